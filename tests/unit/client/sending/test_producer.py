"""AsyncProducer: what a send promises, and how sends are gathered."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from delayd.client.producer import AsyncProducer
from delayd.errors import (
    AlreadyClosed,
    BadArgument,
    BadInstant,
    BadSubject,
    CallerError,
    ClockInDoubt,
    MessageTooLarge,
    NaiveDatetime,
    OutcomeUnknown,
    PastHorizon,
    QueueFull,
)
from tests.unit.client.servers import SmallDelay
from tests.unit.client.world import LIMIT_S, PAST_MS, World, on_loop, on_steady_loop
from tests.unit.net.loopback import skip
from tests.waiting import DEADLINE_S, until


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
            sends = [producer.send(f"s{row % 7}", b"%d" % row, deliver_at_ms=PAST_MS + row) for row in range(100)]
            receipts = await asyncio.gather(*sends)
        assert len(world.delay.kept) == 1
        assert [receipt.sequence for receipt in receipts] == list(range(1, 101))
        assert world.delay.rows == [(b"s%d" % (row % 7), b"%d" % row, PAST_MS + row) for row in range(100)]

    on_loop(scenario)


def test_while_a_batch_is_under_way_sends_gather_and_its_acknowledgement_flushes_them() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, linger_ms=1_000) as producer:
            await producer.send("a", b"first", deliver_at_ms=PAST_MS)
            world.delay.holding = True
            sends = [producer.send("a", b"second", deliver_at_ms=PAST_MS)]
            await until(lambda: len(world.delay.held) == 1)
            for _ in range(10):
                sends.append(producer.send("a", b"third", deliver_at_ms=PAST_MS))
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
                sends.append(producer.send("a", b"x", deliver_at_ms=PAST_MS))
                await until_held(world.delay, number)
            for _ in range(20):
                sends.append(producer.send("a", b"x", deliver_at_ms=PAST_MS))
                await skip(0.002)
            assert len(world.delay.held) == 2
            world.delay.release()
            await asyncio.gather(*sends)
        assert [kept.batch.count for kept in world.delay.kept] == [1, 1, 20]

    on_steady_loop(scenario)


def test_a_faulty_argument_is_named_before_anything_is_queued() -> None:
    async def scenario(world: World) -> None:
        now = datetime.now(UTC)
        faults: list[tuple[type[CallerError], dict[str, object]]] = [
            (NaiveDatetime, {"deliver_at": datetime(2030, 1, 1)}),  # noqa: DTZ001
            (BadArgument, {"delay": timedelta(milliseconds=-1)}),
            (PastHorizon, {"delay": timedelta(days=733)}),
            (PastHorizon, {"deliver_at": now + timedelta(days=733)}),
            (BadInstant, {"deliver_at_ms": -1}),
            (BadInstant, {"deliver_at_ms": int(now.timestamp())}),
            (BadInstant, {"deliver_at": datetime(1970, 1, 1, tzinfo=UTC)}),
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


def test_rule_T2_a_delay_counts_by_the_servers_clock_and_is_never_short() -> None:
    async def scenario(world: World) -> None:
        for ahead_ms in (-5_000, 0, 7_000):
            world.delay.ahead_ms = ahead_ms
            async with AsyncProducer(world.address) as producer:
                before = world.delay.now_ms()
                receipt = await producer.send("a", b"x", delay=timedelta(seconds=2))
                spent = world.delay.now_ms() - before
                late = receipt.deliver_at_ms - (before + 2_000)
                # The send left while this was spent, and the clock is known to within the time of an answer.
                assert 0 <= late <= 2 * spent + 20, f"{late} ms late with a clock {ahead_ms} ms ahead"

    on_loop(scenario)


def test_rule_T4_no_delay_is_counted_by_a_clock_that_is_in_doubt() -> None:
    async def scenario(world: World) -> None:
        world.delay.ahead_ms, world.delay.in_doubt = 60 * 86_400_000, True
        async with AsyncProducer(world.address) as producer:
            assert (await producer.send("a", b"x", deliver_at_ms=PAST_MS)).sequence == 1
            sending = producer.send("a", b"x", delay=timedelta(seconds=2))
            await skip(0)
            await skip(LIMIT_S)
            with pytest.raises(ClockInDoubt, match="nothing has confirmed the clock"):
                await sending
            assert (await producer.send("a", b"x", deliver_at_ms=PAST_MS)).sequence == 2

    on_steady_loop(scenario)


def test_rule_T4_a_delay_waits_until_the_clock_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.client.routing.ALIVE_EVERY_MS", 20)

    async def scenario(world: World) -> None:
        before_ms = world.delay.now_ms()
        world.delay.ahead_ms, world.delay.in_doubt = 60 * 86_400_000, True
        async with AsyncProducer(world.address) as producer:
            sending = asyncio.ensure_future(producer.send("a", b"y", delay=timedelta(seconds=2)))
            await asyncio.sleep(0.05)
            assert not sending.done()
            world.delay.ahead_ms, world.delay.in_doubt = 0, False
            assert 0 <= (await sending).deliver_at_ms - before_ms - 2_000 <= DEADLINE_S * 1_000

    on_loop(scenario)


def test_a_clock_far_from_the_servers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        world.delay.ahead_ms = 5_000
        async with AsyncProducer(world.address) as producer:
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)
            await producer.send("a", b"x", deliver_at_ms=PAST_MS)

    on_loop(scenario)
    assert [record.message.split()[0] for record in caplog.records].count("clock_skew") == 1


def test_a_send_past_a_full_queue_waits_and_goes_on() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, queue_bytes_max=4 << 20) as producer:
            world.delay.holding = True
            body = bytes(1 << 20)
            sends = [producer.send("a", body, deliver_at_ms=PAST_MS) for _ in range(8)]
            await until(lambda: len(world.delay.held) >= 1)
            assert sum(len(frame.body) for _, frame in world.delay.held) < 5 << 20
            world.delay.release()
            await asyncio.gather(*sends)
        assert len(world.delay.rows) == 8

    on_loop(scenario)


def test_a_queue_that_stays_full_is_a_named_retryable_error() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address, queue_bytes_max=4 << 20) as producer:
            world.delay.holding = True
            body = bytes(3 << 20)
            sends = [producer.send("a", body, deliver_at_ms=PAST_MS) for _ in range(3)]
            await until_held(world.delay, 1)
            await skip(LIMIT_S)
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [OutcomeUnknown, QueueFull, QueueFull]
            world.delay.holding = False
            await producer.send("a", b"again", deliver_at_ms=PAST_MS)

    on_steady_loop(scenario)


def test_a_caller_that_is_cancelled_stops_waiting_and_nobody_else_does() -> None:
    async def scenario(world: World) -> None:
        async with AsyncProducer(world.address) as producer:
            world.delay.holding = True

            async def send(body: bytes) -> int:
                return (await producer.send("a", body, deliver_at_ms=PAST_MS)).sequence

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
            sends = [producer.send("a", b"%d" % row, deliver_at_ms=PAST_MS) for row in range(1000)]
            await producer.flush()
            assert all(send.done() for send in sends)

    on_loop(scenario)


def test_close_sends_what_is_queued_and_refuses_what_comes_later() -> None:
    async def scenario(world: World) -> None:
        producer = AsyncProducer(world.address)
        sending = producer.send("a", b"x", deliver_at_ms=PAST_MS)
        await producer.close()
        assert sending.done() and len(world.delay.rows) == 1
        with pytest.raises(AlreadyClosed):
            producer.send("a", b"y", deliver_at_ms=PAST_MS)
        await producer.close()

    on_loop(scenario)
