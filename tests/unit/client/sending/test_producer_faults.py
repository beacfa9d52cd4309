"""AsyncProducer: a send ends once, whatever happens to connections and servers, and says what is known."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import pytest

from delayd.client.producer import AsyncProducer
from delayd.client.sending import outbox, sender
from delayd.client.sending.outbox import Gathering
from delayd.errors import (
    BadArgument,
    HourFull,
    InternalError,
    NoDelayServer,
    OutcomeUnknown,
    SendHandle,
    ServerCordoned,
    ServerUnavailable,
    SlowDown,
)
from tests.unit.client.servers import SmallDelay, drop_after, drop_before, hold, refuse
from tests.unit.client.world import LIMIT_S, PAST_MS, World, on_loop, on_steady_loop
from tests.unit.net.loopback import error_of, skip
from tests.waiting import until


def test_a_batch_lost_before_it_was_kept_is_sent_again_under_the_same_number() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.extend([drop_before, drop_before])
            receipt = await producer.send("a", b"x", deliver_at_ms=PAST_MS)
        assert not receipt.duplicate
        assert world.delay.numbers == [1, 1, 1] and len(world.delay.rows) == 1

    on_loop(scenario)


def test_rule_I3_a_batch_kept_before_the_connection_broke_is_kept_once_and_says_so() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(drop_after(world.delay))
            receipt = await producer.send("a", b"x", deliver_at_ms=PAST_MS)
        assert receipt.duplicate and receipt.sequence == 1
        assert world.delay.numbers == [1, 1] and len(world.delay.rows) == 1

    on_loop(scenario)


def test_rule_I3_after_bytes_left_a_batch_goes_to_no_other_group() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        async with AsyncProducer(world.address) as producer:
            await asyncio.gather(*(producer.send("a", b"warm", deliver_at_ms=PAST_MS) for _ in range(2)))
            first = world.delay if not world.delay.kept else other
            second = other if first is world.delay else world.delay

            kept_before = len(second.rows)
            first.script.append(drop_before)
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: bool(first.numbers))
            await first.stop()
            # After each try that fails, meta is asked where the server is.
            asked = len(world.meta.seen)
            await until(lambda: len(world.meta.seen) > asked + 1)
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
            assert error.handle.log_id == first.log_id
            assert len(second.rows) == kept_before
            # The other group serves new sends meanwhile and after.
            assert (await producer.send("a", b"y", deliver_at_ms=PAST_MS)).log_id == second.log_id

    on_steady_loop(scenario)


def test_a_batch_that_was_under_way_when_its_server_was_cordoned_and_killed_goes_to_another_one() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        async with AsyncProducer(world.address) as producer:
            await asyncio.gather(*(producer.send("a", b"warm", deliver_at_ms=PAST_MS) for _ in range(2)))
            first = world.delay if not world.delay.kept else other
            second = other if first is world.delay else world.delay
            tried = len(first.numbers)
            # A cordoned server answers a batch that it has kept as before, so this one is not there.
            cordoned = ServerCordoned("an operator has cordoned this server", retry_after_ms=5)
            first.script.extend([drop_before, refuse(first, cordoned, [])])
            receipt = await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            assert len(first.numbers) == tried + 2 and receipt.log_id == second.log_id

    on_loop(scenario)


def test_a_batch_of_which_nothing_left_moves_to_a_group_that_can_be_reached() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        await world.delay.stop()
        async with AsyncProducer(world.address, timeout_ms=5_000) as producer:
            receipts = [await producer.send("a", b"%d" % row, deliver_at_ms=PAST_MS) for row in range(4)]
        assert {receipt.log_id for receipt in receipts} == {other.log_id}

    on_loop(scenario)


def test_batches_go_to_the_live_groups_in_turn() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        async with AsyncProducer(world.address) as producer:
            for _ in range(10):
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
        assert len(world.delay.rows) == 5 and len(other.rows) == 5

    on_loop(scenario)


def test_a_group_that_meta_calls_dead_gets_nothing_while_another_lives() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        world.meta.dead.add(other.log_id)
        async with AsyncProducer(world.address) as producer:
            for _ in range(6):
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
        assert len(world.delay.rows) == 6

    on_loop(scenario)


def test_an_unknown_outcome_can_be_asked_for_later() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.holding = True
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: bool(world.delay.held))
            await skip(LIMIT_S)
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
            assert await producer.outcome(error.handle) is None
            assert isinstance(await error_of(producer.outcome(cast(SendHandle, "x"))), BadArgument)
            world.delay.release()
            outcome = await producer.outcome(error.handle)
            assert outcome is not None and outcome.base_sequence == 1 and outcome.row_count == 1
            # Its number is not given up as long as somebody may ask, so the server keeps it.
            await producer.send("a", b"y", deliver_at_ms=PAST_MS)
            assert world.delay.kept[-1].low_water <= error.handle.producer_batch

    on_steady_loop(scenario)


def test_rule_I1_the_low_water_mark_never_passes_a_number_that_is_still_in_use() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, linger_ms=0) as producer:
            await producer.send("a", b"1", deliver_at_ms=PAST_MS)
            world.delay.script.append(hold(world.delay))
            slow = producer.send("a", b"slow", deliver_at_ms=PAST_MS)
            await until(lambda: len(world.delay.held) == 1)
            for _ in range(5):
                await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            assert {kept.low_water for kept in world.delay.kept[1:]} == {2}
            world.delay.release()
            await slow
            await producer.send("a", b"last", deliver_at_ms=PAST_MS)
            assert world.delay.kept[-1].low_water == world.delay.kept[-1].number

    on_loop(scenario)


def test_a_server_that_says_later_gets_the_same_batch_later() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            later = refuse(world.delay, SlowDown("behind", retry_after_ms=20), [])
            world.delay.script.extend([later, later])
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)
        assert world.delay.numbers == [1, 1, 1]

    on_loop(scenario)


def test_a_refusal_that_lasts_is_raised_at_the_time_limit_and_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def wait_ms(retry_after_ms: int) -> float:
        heard.append(retry_after_ms)
        return 31_000.0

    def has_heard(count: int) -> bool:
        return len(heard) == count

    monkeypatch.setattr(sender, "spread_ms", wait_ms)

    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, timeout_ms=100_000) as producer:
            world.delay.script.extend([refuse(world.delay, SlowDown("behind", retry_after_ms=50), [])] * 50)
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            for tries in (1, 2, 3):
                await until(partial(has_heard, tries))
                await skip(31)
            # 93 s of 100 have passed. An answer to another try could be too late, and then nobody would know.
            assert not sending.done()
            await skip(31)
            assert isinstance(await error_of(sending), SlowDown)
            world.delay.script.clear()
            await producer.send("a", b"y", deliver_at_ms=PAST_MS)
        assert [body for _, body, _ in world.delay.rows] == [b"y"]
        assert world.delay.numbers == [1, 1, 1, 2]

    on_steady_loop(scenario)


def test_refused_rows_fail_alone_and_the_others_go_again_as_a_new_batch() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(refuse(world.delay, HourFull("that hour is full"), [1, 3]))
            sends = [producer.send(f"s{row}", b"%d" % row, deliver_at_ms=PAST_MS + row) for row in range(5)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert [isinstance(outcome, HourFull) for outcome in outcomes] == [False, True, False, True, False]
        assert world.delay.rows == [(b"s%d" % row, b"%d" % row, PAST_MS + row) for row in (0, 2, 4)]
        assert world.delay.numbers == [1, 2]

    on_loop(scenario)


def test_rows_that_must_wait_hold_up_no_other_row_of_their_batch() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(refuse(world.delay, SlowDown("the far ones wait", retry_after_ms=20_000), [0]))
            far = producer.send("a", b"far", deliver_at_ms=PAST_MS + 8)
            near = producer.send("a", b"near", deliver_at_ms=PAST_MS)
            await near
            assert not far.done()
            await skip(25)
            await far
        assert [body for _, body, _ in world.delay.rows] == [b"near", b"far"]

    on_steady_loop(scenario)


def test_without_a_delay_server_a_send_waits_for_one() -> None:
    async def scenario(world: World) -> None:
        world.meta.delay.clear()
        async with AsyncProducer(world.address) as producer:
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: len(world.meta.seen) >= 4)
            await skip(LIMIT_S)
            assert isinstance(await error_of(sending), NoDelayServer)
        async with AsyncProducer(world.address) as producer:
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            asked = len(world.meta.seen)
            await until(lambda: len(world.meta.seen) >= asked + 2)
            world.meta.delay.append(world.delay)
            await sending

    on_steady_loop(scenario)


def test_without_meta_a_first_send_fails_and_a_later_one_goes_on() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await world.meta.stop()
            world.delay.drop_connections()
            await producer.send("a", b"y", deliver_at_ms=PAST_MS)
            async with AsyncProducer(world.address) as newcomer:
                sending = newcomer.send("a", b"z", deliver_at_ms=PAST_MS)
                await skip(0)
                await skip(LIMIT_S)
                assert isinstance(await error_of(sending), ServerUnavailable)

    on_steady_loop(scenario)


def test_a_meta_that_hangs_is_named() -> None:
    async def scenario(world: World) -> None:
        writers: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        # Less than the 5 s after which a new connection that is silent is given up.
        async with AsyncProducer(address, timeout_ms=4_500) as producer:
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: bool(writers))
            await skip(4.5)
            error = await error_of(sending)
            assert isinstance(error, ServerUnavailable)
            assert error.message == f"meta at {address} gave no answer in time; nothing was sent"
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        silent.close()
        await silent.wait_closed()

    on_steady_loop(scenario)


def test_a_server_that_comes_back_at_another_address_is_found() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await world.delay.stop()
            world.delay.port = 0
            sending = producer.send("a", b"y", deliver_at_ms=PAST_MS)
            await world.delay.start()
            assert (await sending).sequence == 2

    on_loop(scenario)


def test_rule_I3_another_log_at_the_same_address_gets_nothing_of_the_old_one() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(drop_before)
            sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await until(lambda: bool(world.delay.numbers))
            await world.delay.stop()
            stranger = SmallDelay(999)
            stranger.port = world.delay.port
            world.servers.append(stranger)
            await stranger.start()
            await until(lambda: stranger.connected_count > 1)
            await skip(LIMIT_S)
            assert isinstance(await error_of(sending), OutcomeUnknown)
            assert stranger.numbers == []

    on_steady_loop(scenario)


@pytest.mark.parametrize("place", ["encode", "accept"])
def test_a_bug_in_a_batch_fails_its_sends_and_no_other(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            with monkeypatch.context() as broken:
                broken.setattr(Gathering, place, fail)
                sent = [producer.send("a", b"x", deliver_at_ms=PAST_MS) for _ in range(3)]
                errors = [await error_of(future) for future in sent]
            assert [type(error) for error in errors] == [InternalError] * 3
            await producer.send("a", b"y", deliver_at_ms=PAST_MS)
            await producer.flush()

    on_loop(scenario)
    assert "ZeroDivisionError" in caplog.text


def test_a_flush_waits_for_sends_that_wait_for_a_place_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        for limit in ("COMPANY_ROWS", "CROWD_ROWS", "ROWS_TARGET"):
            monkeypatch.setattr(outbox, limit, 10)
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            world.delay.script.extend([hold(world.delay)] * 2)
            sent = [producer.send("a", b"x", deliver_at_ms=PAST_MS) for _ in range(30)]
            flushing = asyncio.ensure_future(producer.flush())
            await until(lambda: len(world.delay.held) == 2)
            assert not flushing.done()
            world.delay.release()
            await flushing
            assert all(future.done() for future in sent)

    on_loop(scenario)
