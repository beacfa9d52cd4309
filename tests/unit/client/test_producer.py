"""AsyncProducer: what a send promises, whatever happens to its connection and its server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from delayd.client.producer import AsyncProducer
from delayd.client.receipt import BatchFailed
from delayd.errors import (
    AlreadyClosed,
    BadArgument,
    BadSubject,
    CallerError,
    DelaydError,
    HourFull,
    MessageTooLarge,
    NaiveDatetime,
    NoDelayServer,
    OutcomeUnknown,
    PastHorizon,
    QueueFull,
    ServerUnavailable,
    SlowDown,
)
from tests.unit.client.servers import SmallDelay, drop_after, drop_before, hold, refuse, until
from tests.unit.client.world import World, error_of, on_loop


async def until_held(delay: SmallDelay, count: int) -> None:
    await until(lambda: len(delay.held) == count)


def test_a_receipt_says_where_a_message_is_kept_and_when_it_is_due() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            ahead = world.delay.now_ms() + 60_000
            receipt = await producer.send("orders.cancel", b"42", deliver_at_ms=ahead)
            assert (receipt.log_id, receipt.sequence, receipt.deliver_at_ms) == (101, 1, ahead)
            assert not receipt.was_due and not receipt.duplicate
            past = await producer.send("orders.cancel", b"43", deliver_at=datetime(2020, 1, 1, tzinfo=UTC))
            assert past.sequence == 2 and past.was_due
            assert past.deliver_at_ms == 1_577_836_800_000
        assert world.delay.rows == [(b"orders.cancel", b"42", ahead), (b"orders.cancel", b"43", 1_577_836_800_000)]

    on_loop(scenario)


def test_sends_of_many_subjects_share_one_batch() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            sends = [producer.send(f"s{row % 7}", b"%d" % row, deliver_at_ms=row) for row in range(100)]
            receipts = await asyncio.gather(*sends)
        assert len(world.delay.kept) == 1
        assert [receipt.sequence for receipt in receipts] == list(range(1, 101))
        assert world.delay.rows == [(b"s%d" % (row % 7), b"%d" % row, row) for row in range(100)]

    on_loop(scenario)


def test_while_a_batch_is_under_way_sends_gather_and_its_acknowledgement_flushes_them() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, linger_ms=1_000) as producer:
            await producer.send("a", b"first", deliver_at_ms=1)
            world.delay.holding = True
            sends = [producer.send("a", b"second", deliver_at_ms=1)]
            await until(lambda: len(world.delay.held) == 1)
            for _ in range(10):
                sends.append(producer.send("a", b"third", deliver_at_ms=1))
                await asyncio.sleep(0)
            world.delay.release()
            await asyncio.gather(*sends)
        assert [kept.batch.count for kept in world.delay.kept] == [1, 1, 10]

    on_loop(scenario)


def test_the_linger_sends_a_second_batch_and_a_third_one_waits() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, linger_ms=1) as producer:
            world.delay.holding = True
            sends = []
            for number in range(1, 3):
                sends.append(producer.send("a", b"x", deliver_at_ms=1))
                await until_held(world.delay, number)
            for _ in range(20):
                sends.append(producer.send("a", b"x", deliver_at_ms=1))
                await asyncio.sleep(0.002)
            assert len(world.delay.held) == 2
            world.delay.release()
            await asyncio.gather(*sends)
        assert [kept.batch.count for kept in world.delay.kept] == [1, 1, 20]

    on_loop(scenario)


def test_a_faulty_argument_is_named_before_anything_is_queued() -> None:
    async def scenario(world: World) -> None:
        now = datetime.now(UTC)
        faults: list[tuple[type[CallerError], dict[str, object]]] = [
            (NaiveDatetime, {"deliver_at": datetime(2030, 1, 1)}),  # noqa: DTZ001
            (BadArgument, {"delay": timedelta(milliseconds=-1)}),
            (PastHorizon, {"delay": timedelta(days=733)}),
            (PastHorizon, {"deliver_at": now + timedelta(days=733)}),
            (BadArgument, {"deliver_at_ms": -1}),
            (BadArgument, {"deliver_at_ms": 1.5}),
            (BadArgument, {"deliver_at_ms": True}),
            (BadArgument, {}),
            (BadArgument, {"delay": timedelta(1), "deliver_at_ms": 5}),
            (BadArgument, {"delay": 5}),
            (BadArgument, {"deliver_at": 5}),
            (BadSubject, {"subject": ""}),
            (BadSubject, {"subject": "a b"}),
            (BadSubject, {"subject": "a\n"}),
            (BadSubject, {"subject": "ä"}),
            (BadSubject, {"subject": "a" * 256}),
            (BadSubject, {"subject": b"a"}),
            (BadSubject, {"subject": ["a"]}),
            (BadArgument, {"body": "text"}),
            (BadArgument, {"body": None}),
            (MessageTooLarge, {"body": bytes((4 << 20) + 1)}),
            (MessageTooLarge, {"headers": {"a": "b" * (32 << 10)}}),
            (BadArgument, {"headers": {"a": 5}}),
            (BadArgument, {"headers": {5: "a"}}),
            (BadArgument, {"headers": {"a": "\ud800"}}),
            (BadArgument, {"headers": [("a", "b")]}),
        ]
        async with AsyncProducer(world.address) as producer:
            for kind, fault in faults:
                arguments: dict[str, object] = {"subject": "a", "body": b"", **fault}
                if not {"delay", "deliver_at", "deliver_at_ms"} & set(fault) and fault != {}:
                    arguments["deliver_at_ms"] = 1
                with pytest.raises(kind):
                    producer.send(**arguments)  # type: ignore[arg-type]
        assert world.delay.seen == []

    on_loop(scenario)


def test_an_address_that_is_none_is_named() -> None:
    async def scenario(world: World) -> None:
        for address in ("", "localhost", "localhost:", ":7400", "localhost:0", "localhost:99999", "localhost:x"):
            with pytest.raises(BadArgument):
                AsyncProducer(address)

    on_loop(scenario)


def test_a_batch_lost_before_it_was_kept_is_sent_again_under_the_same_number() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.extend([drop_before, drop_before])
            receipt = await producer.send("a", b"x", deliver_at_ms=1)
        assert not receipt.duplicate
        assert world.delay.numbers == [1, 1, 1] and len(world.delay.rows) == 1

    on_loop(scenario)


def test_rule_I3_a_batch_kept_before_the_connection_broke_is_kept_once_and_says_so() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(drop_after(world.delay))
            receipt = await producer.send("a", b"x", deliver_at_ms=1)
        assert receipt.duplicate and receipt.sequence == 1
        assert world.delay.numbers == [1, 1] and len(world.delay.rows) == 1

    on_loop(scenario)


def test_rule_I3_after_bytes_left_a_batch_goes_to_no_other_group() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        async with AsyncProducer(world.address, timeout_ms=1_500) as producer:
            await asyncio.gather(*(producer.send("a", b"warm", deliver_at_ms=1) for _ in range(2)))
            first = world.delay if not world.delay.kept else other
            second = other if first is world.delay else world.delay

            kept_before = len(second.rows)
            first.script.append(drop_before)
            sending = producer.send("a", b"x", deliver_at_ms=1)
            await until(lambda: bool(first.numbers))
            await first.stop()
            error = await error_of(sending)
            assert isinstance(error, OutcomeUnknown)
            assert error.handle.log_id == first.log_id
            assert len(second.rows) == kept_before
            # The other group serves new sends meanwhile and after.
            assert (await producer.send("a", b"y", deliver_at_ms=1)).log_id == second.log_id

    on_loop(scenario)


def test_a_batch_of_which_nothing_left_moves_to_a_group_that_can_be_reached() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        await world.delay.stop()
        async with AsyncProducer(world.address, timeout_ms=5_000) as producer:
            receipts = [await producer.send("a", b"%d" % row, deliver_at_ms=1) for row in range(4)]
        assert {receipt.log_id for receipt in receipts} == {other.log_id}

    on_loop(scenario)


def test_batches_go_to_the_live_groups_in_turn() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        async with AsyncProducer(world.address) as producer:
            for _ in range(10):
                await producer.send("a", b"x", deliver_at_ms=1)
        assert len(world.delay.rows) == 5 and len(other.rows) == 5

    on_loop(scenario)


def test_a_group_that_meta_calls_dead_gets_nothing_while_another_lives() -> None:
    async def scenario(world: World) -> None:
        other = await world.second_delay()
        world.meta.dead.add(other.log_id)
        async with AsyncProducer(world.address) as producer:
            for _ in range(6):
                await producer.send("a", b"x", deliver_at_ms=1)
        assert len(world.delay.rows) == 6

    on_loop(scenario)


def test_an_unknown_outcome_can_be_asked_for_later() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, timeout_ms=400) as producer:
            world.delay.holding = True
            error = await error_of(producer.send("a", b"x", deliver_at_ms=1))
            assert isinstance(error, OutcomeUnknown)
            assert await producer.outcome(error.handle) is None
            world.delay.release()
            outcome = await producer.outcome(error.handle)
            assert outcome is not None and outcome.base_sequence == 1 and outcome.row_count == 1
            # Its number is not given up as long as somebody may ask, so the server keeps it.
            await producer.send("a", b"y", deliver_at_ms=1)
            assert world.delay.kept[-1].low_water <= error.handle.producer_batch

    on_loop(scenario)


def test_rule_I1_the_low_water_mark_never_passes_a_number_that_is_still_in_use() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, linger_ms=0) as producer:
            await producer.send("a", b"1", deliver_at_ms=1)
            world.delay.script.append(hold(world.delay))
            slow = producer.send("a", b"slow", deliver_at_ms=1)
            await until(lambda: len(world.delay.held) == 1)
            for _ in range(5):
                await producer.send("a", b"x", deliver_at_ms=1)
            assert {kept.low_water for kept in world.delay.kept[1:]} == {2}
            world.delay.release()
            await slow
            await producer.send("a", b"last", deliver_at_ms=1)
            assert world.delay.kept[-1].low_water == world.delay.kept[-1].number

    on_loop(scenario)


def test_a_server_that_says_later_gets_the_same_batch_later() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            later = refuse(world.delay, SlowDown("behind", retry_after_ms=20), [])
            world.delay.script.extend([later, later])
            await producer.send("a", b"x", deliver_at_ms=1)
        assert world.delay.numbers == [1, 1, 1]

    on_loop(scenario)


def test_a_refusal_that_lasts_is_raised_at_the_time_limit_and_is_retryable() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, timeout_ms=200) as producer:
            world.delay.script.extend([refuse(world.delay, SlowDown("behind", retry_after_ms=50), [])] * 50)
            assert isinstance(await error_of(producer.send("a", b"x", deliver_at_ms=1)), SlowDown)
            world.delay.script.clear()
            await producer.send("a", b"y", deliver_at_ms=1)
        assert [body for _, body, _ in world.delay.rows] == [b"y"]

    on_loop(scenario)


def test_refused_rows_fail_alone_and_the_others_go_again_as_a_new_batch() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(refuse(world.delay, HourFull("that hour is full"), [1, 3]))
            sends = [producer.send(f"s{row}", b"%d" % row, deliver_at_ms=row) for row in range(5)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert [isinstance(outcome, HourFull) for outcome in outcomes] == [False, True, False, True, False]
        assert world.delay.rows == [(b"s%d" % row, b"%d" % row, row) for row in (0, 2, 4)]
        assert world.delay.numbers == [1, 2]

    on_loop(scenario)


def test_rows_that_must_wait_hold_up_no_other_row_of_their_batch() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(refuse(world.delay, SlowDown("the far ones wait", retry_after_ms=300), [0]))
            far = producer.send("a", b"far", deliver_at_ms=9)
            near = producer.send("a", b"near", deliver_at_ms=1)
            await near
            assert not far.done()
            await far
        assert [body for _, body, _ in world.delay.rows] == [b"near", b"far"]

    on_loop(scenario)


def test_without_a_delay_server_a_send_waits_for_one() -> None:
    async def scenario(world: World) -> None:
        world.meta.delay.clear()
        async with AsyncProducer(world.address, timeout_ms=300) as producer:
            assert isinstance(await error_of(producer.send("a", b"x", deliver_at_ms=1)), NoDelayServer)
        async with AsyncProducer(world.address) as producer:
            sending = producer.send("a", b"x", deliver_at_ms=1)
            await until(lambda: len(world.meta.seen) >= 2)
            world.meta.delay.append(world.delay)
            await sending

    on_loop(scenario)


def test_without_meta_a_first_send_fails_and_a_later_one_goes_on() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, timeout_ms=500) as producer:
            await producer.send("a", b"x", deliver_at_ms=1)
            await world.meta.stop()
            world.delay.drop_connections()
            await producer.send("a", b"y", deliver_at_ms=1)
            async with AsyncProducer(world.address, timeout_ms=300) as newcomer:
                error = await error_of(newcomer.send("a", b"z", deliver_at_ms=1))
                assert isinstance(error, ServerUnavailable)

    on_loop(scenario)


def test_a_server_that_comes_back_at_another_address_is_found() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"x", deliver_at_ms=1)
            await world.delay.stop()
            world.delay.port = 0
            sending = producer.send("a", b"y", deliver_at_ms=1)
            await world.delay.start()
            assert (await sending).sequence == 2

    on_loop(scenario)


def test_rule_I3_another_log_at_the_same_address_gets_nothing_of_the_old_one() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, timeout_ms=800) as producer:
            world.delay.script.append(drop_before)
            sending = producer.send("a", b"x", deliver_at_ms=1)
            await until(lambda: bool(world.delay.numbers))
            await world.delay.stop()
            stranger = SmallDelay(999)
            stranger.port = world.delay.port
            world.servers.append(stranger)
            await stranger.start()
            assert isinstance(await error_of(sending), OutcomeUnknown)
            assert stranger.numbers == []

    on_loop(scenario)


def test_rule_T2_a_delay_counts_by_the_servers_clock_and_is_never_short() -> None:
    async def scenario(world: World) -> None:
        for ahead_ms in (-5_000, 0, 7_000):
            world.delay.ahead_ms = ahead_ms
            async with AsyncProducer(world.address) as producer:
                before = world.delay.now_ms()
                receipt = await producer.send("a", b"x", delay=timedelta(seconds=2))
                late = receipt.deliver_at_ms - (before + 2_000)
                assert 0 <= late < 200, f"{late} ms late with a clock {ahead_ms} ms ahead"

    on_loop(scenario)


def test_a_clock_far_from_the_servers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        world.delay.ahead_ms = 5_000
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"x", deliver_at_ms=1)
            await producer.send("a", b"x", deliver_at_ms=1)

    on_loop(scenario)
    assert [record.message.split()[0] for record in caplog.records].count("clock_skew") == 1


def test_a_send_past_a_full_queue_waits_and_goes_on() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, queue_bytes_max=4 << 20) as producer:
            world.delay.holding = True
            body = bytes(1 << 20)
            sends = [producer.send("a", body, deliver_at_ms=1) for _ in range(8)]
            await until(lambda: len(world.delay.held) >= 1)
            assert sum(len(frame.body) for _, frame in world.delay.held) < 5 << 20
            world.delay.release()
            await asyncio.gather(*sends)
        assert len(world.delay.rows) == 8

    on_loop(scenario)


def test_a_queue_that_stays_full_is_a_named_retryable_error() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, queue_bytes_max=4 << 20, timeout_ms=300) as producer:
            world.delay.holding = True
            body = bytes(3 << 20)
            sends = [producer.send("a", body, deliver_at_ms=1) for _ in range(3)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown, QueueFull, QueueFull]
            world.delay.holding = False
            await producer.send("a", b"again", deliver_at_ms=1)

    on_loop(scenario)


def test_a_caller_that_is_cancelled_stops_waiting_and_nobody_else_does() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.holding = True

            async def send(body: bytes) -> int:
                return (await producer.send("a", body, deliver_at_ms=1)).sequence

            impatient = asyncio.create_task(send(b"1"))
            patient = asyncio.create_task(send(b"2"))
            await until(lambda: len(world.delay.held) == 1)
            impatient.cancel()
            await asyncio.wait([impatient])
            world.delay.release()
            assert await patient == 2
        assert len(world.delay.rows) == 2

    on_loop(scenario)


def test_flush_waits_for_what_was_sent_before() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            sends = [producer.send("a", b"%d" % row, deliver_at_ms=1) for row in range(1000)]
            await producer.flush()
            assert all(send.done() for send in sends)

    on_loop(scenario)


def test_close_sends_what_is_queued_and_refuses_what_comes_later() -> None:
    async def scenario(world: World) -> None:
        producer = AsyncProducer(world.address)
        sending = producer.send("a", b"x", deliver_at_ms=1)
        await producer.close()
        assert sending.done() and len(world.delay.rows) == 1
        with pytest.raises(AlreadyClosed):
            producer.send("a", b"y", deliver_at_ms=1)
        await producer.close()

    on_loop(scenario)


def test_a_large_batch_is_split_and_its_receipt_names_every_row() -> None:
    async def scenario(world: World) -> None:
        count = 20_000
        due = np.arange(count, dtype=np.int64)[::-1].copy()
        bodies = [b"%d" % row for row in range(count)]
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send_batch("a", bodies, due)
        assert len(world.delay.kept) == 3
        by_sequence = dict(zip(range(1, count + 1), world.delay.rows, strict=True))
        assert [by_sequence[sequence] for sequence in receipt.sequences.tolist()] == [
            (b"a", body, at) for body, at in zip(bodies, due.tolist(), strict=True)
        ]
        assert receipt.deliver_at_ms.tolist() == due.tolist()
        assert receipt.rows.tolist() == list(range(count)) and receipt.was_due.all()
        assert set(receipt.log_ids.tolist()) == {101}

    on_loop(scenario)


def test_a_batch_of_large_messages_is_split_by_bytes() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send_batch("a", [bytes(3 << 20)] * 5, 1, headers={"a": "b"})
        assert len(receipt) == 5 and len(world.delay.kept) == 5

    on_loop(scenario)


def test_an_empty_batch_has_an_empty_receipt() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            receipt = await producer.send_batch("a", [], 1)
        assert len(receipt) == 0 and receipt.sequences.tolist() == [] and receipt.was_due.tolist() == []
        assert world.delay.seen == []

    on_loop(scenario)


def test_a_delay_for_a_batch_is_one_instant_for_all() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            before = world.delay.now_ms()
            receipt = await producer.send_batch("a", [b"x"] * 10, delay=timedelta(minutes=1))
        assert len(set(receipt.deliver_at_ms.tolist())) == 1
        assert 0 <= receipt.deliver_at_ms[0] - before - 60_000 < 1_000

    on_loop(scenario)


def test_faulty_columns_are_named_by_their_row() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            text: bytes = "text"  # type: ignore[assignment]
            assert "row 1" in (await error_of(producer.send_batch("a", [b"", text], 1))).message
            assert "row 2" in (await error_of(producer.send_batch("a", [b"", b"", bytes(5 << 20)], 1))).message
            faults: list[DelaydError] = [
                await error_of(producer.send_batch("a", [b"x"] * 3, [1, 2])),
                await error_of(producer.send_batch("a", [b"x"], [1.5])),  # type: ignore[list-item]
                await error_of(producer.send_batch("a", [b"x"], [-1])),
                await error_of(producer.send_batch("a", [b"x"], np.array([2**63], np.uint64))),
                await error_of(producer.send_batch("a", [b"x"], 1, delay=timedelta(1))),
                await error_of(producer.send_batch("a", [b"x"], 1, headers=[None, None])),
                await error_of(producer.send_batch("", [b"x"], 1)),
            ]
        assert [type(fault) for fault in faults] == [BadArgument] * 3 + [PastHorizon] + [BadArgument] * 2 + [BadSubject]
        assert world.delay.seen == []

    on_loop(scenario)


def test_refused_rows_of_a_batch_are_named_with_the_receipt_of_the_others() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.script.append(refuse(world.delay, HourFull("that hour is full"), [0, 2]))
            error = await error_of(producer.send_batch("a", [b"0", b"1", b"2", b"3"], [0, 1, 2, 3]))
            assert isinstance(error, BatchFailed)
            assert [(failure.rows.tolist(), type(failure.error)) for failure in error.failures] == [([0, 2], HourFull)]
            assert error.receipt.rows.tolist() == [1, 3] and error.receipt.deliver_at_ms.tolist() == [1, 3]
            world.delay.script.append(refuse(world.delay, HourFull("that hour is full"), []))
            assert isinstance(await error_of(producer.send_batch("a", [b"0", b"1"], 1)), HourFull)

    on_loop(scenario)


def test_at_most_sixteen_pieces_of_batches_are_under_way() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"warm", deliver_at_ms=1)
            world.delay.holding = True
            sending = asyncio.create_task(producer.send_batch("a", [b"x"] * (8_192 * 20), 1))
            await until(lambda: len(world.delay.held) == 16)
            await asyncio.sleep(0.02)
            assert len(world.delay.held) == 16
            world.delay.release()
            assert len(await sending) == 8_192 * 20

    on_loop(scenario)
