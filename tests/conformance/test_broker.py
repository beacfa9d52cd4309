"""The in-memory broker: what a test sees when it moves the clock."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from freezegun import freeze_time

import delayd
from delayd.testing import InMemoryBroker, broker_clock
from tests.waiting import wait_until

DAY = timedelta(days=1)
MS = timedelta(milliseconds=1)
AT_ONCE = timedelta(0)
START = datetime(2027, 1, 1, tzinfo=UTC)


def _pulled(consumer: delayd.Consumer) -> list[bytes]:
    """What the consumer gets now; all of it is acknowledged."""
    bodies = []
    while len(batch := consumer.pull(wait=AT_ONCE)):
        bodies += [message.body for message in batch]
        batch.ack()
    return bodies


def _until_one_waits(broker: InMemoryBroker) -> None:
    wait_until(lambda: any(core.is_active for core in list(broker.clock.followed)), "a consumer waits")


def test_a_message_comes_at_its_millisecond(delayd_broker: InMemoryBroker) -> None:
    clock = delayd_broker.clock
    with delayd_broker.producer() as producer, delayd_broker.consumer("a", "g") as consumer:
        receipt = producer.send("a", b"42", delay=30 * DAY)
        assert receipt.deliver_at == clock.now + 30 * DAY
        clock.advance(30 * DAY - MS)
        assert _pulled(consumer) == []
        clock.advance(MS)
        (message,) = consumer.pull(wait=AT_ONCE)
        assert message.body == b"42" and message.late_ms == 0
        message.ack()


def test_the_clock_stands_still_until_it_is_moved(delayd_broker: InMemoryBroker) -> None:
    with delayd_broker.producer() as producer, delayd_broker.consumer("a", "g") as consumer:
        producer.send("a", b"", delay=MS)
        assert len(consumer.pull(wait=timedelta(milliseconds=50))) == 0
        delayd_broker.clock.advance(MS)
        assert len(consumer.pull(wait=AT_ONCE)) == 1


def test_two_years_pass_and_everything_comes_in_order() -> None:
    with (
        InMemoryBroker(start=START) as broker,
        broker.producer() as producer,
        broker.consumer("a", "g") as consumer,
    ):
        days = [400, 3, 731, 1, 90, 3]
        for number, day in enumerate(days):
            producer.send("a", b"%d" % number, delay=day * DAY + number * MS)
        broker.clock.move_to(START + 732 * DAY)
        assert broker.clock.now == START + 732 * DAY
        assert _pulled(consumer) == [b"3", b"1", b"5", b"4", b"0", b"2"]


def test_a_lease_that_ends_gives_the_message_to_another(delayd_broker: InMemoryBroker) -> None:
    clock = delayd_broker.clock
    with (
        delayd_broker.producer() as producer,
        delayd_broker.consumer("a", "g", lease=timedelta(minutes=5)) as one,
        delayd_broker.consumer("a", "g") as other,
    ):
        producer.send("a", b"", delay=AT_ONCE)
        (message,) = one.pull()
        clock.advance(timedelta(minutes=5) - timedelta(seconds=1))
        assert len(other.pull(wait=AT_ONCE)) == 0
        clock.advance(timedelta(seconds=1))
        (again,) = other.pull(wait=AT_ONCE)
        assert again.attempt == 2
        with pytest.raises(delayd.StaleHandle):
            message.ack()
        again.ack()


def test_a_consumer_that_waits_gets_each_message_at_its_instant(delayd_broker: InMemoryBroker) -> None:
    clock = delayd_broker.clock
    begun = clock.now
    seen: list[tuple[bytes, timedelta]] = []

    async def scenario() -> None:
        async def consume() -> None:
            async for message in consumer:
                seen.append((message.body, clock.now - begun))
                if message.body == b"1" and message.attempt == 1:
                    await message.nack(delay=5 * DAY)
                    await producer.send("a", b"told", delay=DAY)
                else:
                    await message.ack()

        async with delayd_broker.async_producer() as producer, delayd_broker.async_consumer("a", "g") as consumer:
            for number in range(3):
                await producer.send("a", b"%d" % number, delay=number * 2 * DAY)
            task = asyncio.get_running_loop().create_task(consume())
            await clock.advance_async(8 * DAY)
            await clock.advance_async(AT_ONCE)
            task.cancel()

    asyncio.run(scenario())
    at = [(body, length / DAY) for body, length in seen]
    assert at == [(b"0", 0), (b"1", 2), (b"told", 3), (b"2", 4), (b"1", 7)]


def test_a_worker_is_waited_for_at_each_instant(delayd_broker: InMemoryBroker) -> None:
    clock = delayd_broker.clock
    begun = clock.now
    seen: list[float] = []
    worker = delayd_broker.worker()

    @worker.on("a", group="g", max_attempts=3, backoff=delayd.Backoff(first=DAY, most=9 * DAY, jitter=0.0))
    def fail(body: bytes) -> None:
        seen.append((clock.now - begun) / DAY)
        raise ValueError("no")

    async def scenario() -> None:
        async with delayd_broker.async_producer() as producer:
            await producer.send("a", b"", delay=DAY)
            task = asyncio.get_running_loop().create_task(worker.serve())
            await clock.advance_async(30 * DAY)
            worker.stop()
            await task

    asyncio.run(scenario())
    assert seen == [1, 2, 4]


def test_a_thread_that_waits_is_waited_for(delayd_broker: InMemoryBroker) -> None:
    clock = delayd_broker.clock
    begun = clock.now
    seen: list[float] = []

    with delayd_broker.producer() as producer, delayd_broker.consumer("a", "g") as consumer:

        def consume() -> None:
            for message in consumer:
                seen.append((clock.now - begun) / DAY)
                message.ack()
                if message.body == b"last":
                    return

        for day in (1, 2, 3):
            producer.send("a", b"last" if day == 3 else b"", delay=day * DAY)
        thread = threading.Thread(target=consume)
        thread.start()
        wait_until(lambda: any(core.is_active for core in list(clock.followed)))
        clock.advance(10 * DAY)
        thread.join()
    assert seen == [1, 2, 3]


def test_a_handler_that_does_nothing_is_not_waited_for_for_ever(
    delayd_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker_clock, "PATIENCE_S", 0.1)

    async def scenario() -> None:
        async def take() -> None:
            await consumer.pull(1, wait=timedelta(minutes=1))
            await asyncio.Event().wait()

        async with delayd_broker.async_producer() as producer, delayd_broker.async_consumer("a", "g") as consumer:
            task = asyncio.get_running_loop().create_task(take())
            await producer.send("a", b"", delay=DAY)
            await delayd_broker.clock.advance_async(2 * DAY)
            task.cancel()

    asyncio.run(scenario())
    assert "clock_goes_on" in caplog.text


def test_a_consumer_that_was_begun_just_before_is_served_on_the_way(delayd_broker: InMemoryBroker) -> None:
    begun, seen = delayd_broker.clock.now, list[timedelta]()

    async def take() -> None:
        await asyncio.sleep(0)
        # Its beginning takes some milliseconds, in which the servers' thread goes on.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)
        async with delayd_broker.async_consumer("a", "g") as consumer:
            async for message in consumer:
                seen.append(delayd_broker.clock.now - begun)
                await message.ack()

    async def scenario() -> None:
        async with delayd_broker.async_producer() as producer:
            for days in (0, 1, 2):
                await producer.send("a", b"", delay=days * DAY)
            task = asyncio.get_running_loop().create_task(take())
            await delayd_broker.clock.advance_async(3 * DAY)
            task.cancel()
            await asyncio.wait([task])

    asyncio.run(scenario())
    assert seen == [AT_ONCE, DAY, 2 * DAY]


def test_questions_of_others_are_no_work_of_a_handler(
    delayd_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker_clock, "PATIENCE_S", 0.1)
    monkeypatch.setattr(broker_clock, "STUCK_S", 5.0)
    done, hold = threading.Event(), threading.Event()
    with delayd_broker.producer() as producer, delayd_broker.consumer("a", "g") as consumer:
        receipt = producer.send("b", b"", delay=100 * DAY)
        producer.send("a", b"", delay=DAY)

        def ask() -> None:
            while not done.is_set():
                producer.get("b", receipt=receipt)

        def take() -> None:
            consumer.pull(1, wait=timedelta(minutes=1))
            hold.wait()

        threads = [threading.Thread(target=work) for work in (ask, take)]
        for thread in threads:
            thread.start()
        wait_until(lambda: any(core.is_active for core in list(delayd_broker.clock.followed)), "the consumer waits")
        try:
            delayd_broker.clock.advance(DAY)
        finally:
            done.set()
            hold.set()
            for thread in threads:
                thread.join()
    assert "clock_goes_on" in caplog.text


@pytest.mark.parametrize("blocked", [False, True])
def test_a_consumer_whose_loop_does_nothing_is_not_waited_for(
    delayd_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    monkeypatch.setattr(broker_clock, "PATIENCE_S", 0.1)
    loop, hold = asyncio.new_event_loop(), threading.Event()

    async def made() -> delayd.AsyncConsumer:
        consumer = delayd_broker.async_consumer("a", "g", prefetch=False)
        assert not len(await consumer.pull(wait=AT_ONCE))
        return consumer

    consumer = loop.run_until_complete(made())

    async def block() -> None:
        hold.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(block()) if blocked else None)
    thread.start()
    wait_until(lambda: loop.is_running() or not blocked, lambda: "the loop does not run")
    delayd_broker.clock.advance(DAY)
    hold.set()
    thread.join()
    loop.run_until_complete(consumer.close())
    loop.close()


def test_messages_that_go_round_at_one_instant_are_told(
    delayd_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_clock, "STUCK_S", 0.3)

    async def scenario() -> None:
        async def send_again() -> None:
            async for message in consumer:
                await producer.send("a", b"", delay=AT_ONCE)
                await message.ack()

        async with delayd_broker.async_producer() as producer, delayd_broker.async_consumer("a", "g") as consumer:
            task = asyncio.get_running_loop().create_task(send_again())
            await producer.send("a", b"", delay=DAY)
            with pytest.raises(TimeoutError, match="go round"):
                await delayd_broker.clock.advance_async(DAY)
            task.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("real_asyncio", [False, True])
def test_frozen_time_is_the_brokers_time(real_asyncio: bool) -> None:
    frozen_time = freeze_time("2027-03-01 12:00:00", tz_offset=0, real_asyncio=real_asyncio)
    with frozen_time as frozen, InMemoryBroker() as broker:
        assert broker.clock.now == datetime(2027, 3, 1, 12, tzinfo=UTC)
        with broker.producer() as producer, broker.consumer("a", "g") as consumer:
            producer.send("a", b"42", delay=DAY)
            frozen.tick(DAY - MS)
            assert len(consumer.pull(wait=AT_ONCE)) == 0
            frozen.tick(MS)
            (message,) = consumer.pull(wait=AT_ONCE)
            assert message.deliver_at == datetime(2027, 3, 2, 12, tzinfo=UTC)
            message.ack()


def test_a_broker_that_nobody_calls_follows_frozen_time() -> None:
    with freeze_time("2027-03-01", real_asyncio=True, ignore=["tests.waiting"]) as frozen, InMemoryBroker() as broker:
        frozen.move_to("2027-06-01")
        wait_until(lambda: broker.clock.now == datetime(2027, 6, 1, tzinfo=UTC))


def test_a_frozen_time_that_no_server_can_name_is_not_followed_and_later_ones_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with freeze_time("2027-03-01", real_asyncio=True, ignore=["tests.waiting"]) as frozen, InMemoryBroker() as broker:
        frozen.move_to("9998-01-01")
        wait_until(lambda: "clock_stays" in caplog.text)
        frozen.move_to("2027-06-01")
        wait_until(lambda: broker.clock.now == datetime(2027, 6, 1, tzinfo=UTC))


def test_a_clock_that_ticks_goes_on_by_itself() -> None:
    with InMemoryBroker(tick=True) as broker, broker.producer() as producer, broker.consumer("a", "g") as consumer:
        producer.send("a", b"", delay=timedelta(milliseconds=20))
        producer.send("a", b"", delay=DAY)
        assert len(consumer.pull(wait=timedelta(seconds=30))) == 1
        broker.clock.advance(DAY)
        assert len(consumer.pull(wait=timedelta(seconds=30))) == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda clock: clock.advance(-DAY), delayd.BadArgument, "never goes back"),
        (lambda clock: clock.advance(timedelta.min), delayd.BadArgument, "never goes back"),
        (lambda clock: clock.advance(timedelta.max), delayd.BadArgument, "9996"),
        (lambda clock: clock.move_to(datetime.max.replace(tzinfo=UTC)), delayd.BadArgument, "9996"),
        (lambda clock: clock.advance(5), delayd.BadArgument, "timedelta"),
        (lambda clock: clock.move_to(clock.now - MS), delayd.BadArgument, "never goes back"),
        (lambda clock: clock.move_to((START + 5_000 * DAY).replace(tzinfo=None)), delayd.NaiveDatetime, "no time zone"),
    ],
)
def test_a_wrong_move_is_refused(
    delayd_broker: InMemoryBroker, call: Callable[[Any], None], error: type[Exception], text: str
) -> None:
    before = delayd_broker.clock.now
    with pytest.raises(error, match=text):
        call(delayd_broker.clock)
    assert delayd_broker.clock.now == before


def test_a_move_that_would_stop_its_own_loop_says_what_to_call(delayd_broker: InMemoryBroker) -> None:
    async def scenario() -> None:
        with pytest.raises(delayd.WrongLoop, match="advance_async"):
            delayd_broker.clock.advance(DAY)

    asyncio.run(scenario())


def test_clients_of_other_homes_keep_their_time(delayd_broker: InMemoryBroker, tmp_path_factory: Any) -> None:
    with delayd.open(tmp_path_factory.mktemp("home")) as home, home.producer() as producer:
        delayd_broker.clock.advance(DAY)
        receipt = producer.send("a", b"", delay=timedelta(hours=1))
        assert receipt.deliver_at - datetime.now(UTC) < timedelta(hours=2)


def test_the_clock_stops_only_where_something_is_due(
    delayd_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = delayd_broker.clock
    due = {clock.now + day * DAY for day in (100, 400, 700)}
    seen: set[datetime] = set()
    moves: list[int] = []
    move = clock.time.move

    def moved(ms: int) -> None:
        moves.append(ms)
        move(ms)

    monkeypatch.setattr(clock.time, "move", moved)

    async def scenario() -> None:
        async def consume() -> None:
            async for message in consumer:
                seen.add(clock.now)
                await message.ack()

        async with delayd_broker.async_producer() as producer, delayd_broker.async_consumer("a", "g") as consumer:
            for instant in due:
                await producer.send("a", b"", deliver_at=instant)
            task = asyncio.get_running_loop().create_task(consume())
            await clock.advance_async(730 * DAY)
            task.cancel()

    asyncio.run(scenario())
    assert seen == due
    # And at the start of its hour, when it is loaded, at the start of its slot, and at the end.
    assert len(moves) <= 3 * len(due) + 1


def test_a_move_of_the_clock_is_no_silence(delayd_broker: InMemoryBroker) -> None:
    with (
        delayd_broker.producer() as producer,
        delayd_broker.consumer("a", "g", exclusive=True) as lead,
        delayd_broker.consumer("a", "g", exclusive=True) as other,
    ):
        assert _pulled(lead) == []
        for _ in range(3):
            producer.send("a", b"1", delay=DAY)
            delayd_broker.clock.advance(DAY)
            assert _pulled(other) == [] and _pulled(lead) == [b"1"]


def test_a_move_of_the_clock_ends_no_group_that_has_consumers(delayd_broker: InMemoryBroker) -> None:
    with delayd_broker.producer() as producer, delayd_broker.consumer("a", "g", broadcast=True) as consumer:
        for _ in range(3):
            producer.send("a", b"1", delay=DAY)
            assert _pulled(consumer) == []
            delayd_broker.clock.advance(DAY)
            assert _pulled(consumer) == [b"1"]


def test_a_long_hand_over_is_waited_for(delayd_broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    # Shorter than the hand-over, and longer than any one step of it.
    monkeypatch.setattr(broker_clock, "PATIENCE_S", 1.0)
    count = 8_000
    with delayd_broker.producer() as producer, delayd_broker.consumer("a", "g") as consumer:
        begin_ms = round(delayd_broker.clock.now.timestamp() * 1_000)
        due_ms = [begin_ms + (number + 1) * 7_200_000 for number in range(count)]
        producer.send_batch("a", [b""] * count, deliver_at_ms=due_ms)
        delayd_broker.clock.advance(730 * DAY)
        assert len(_pulled(consumer)) == count


def test_what_a_handler_sends_after_its_acknowledgement_is_not_missed(delayd_broker: InMemoryBroker) -> None:
    begun, seen = delayd_broker.clock.now, list[float]()
    with delayd_broker.producer() as producer, delayd_broker.consumer("a", "g") as consumer:

        def work() -> None:
            for message in consumer:
                seen.append((delayd_broker.clock.now - begun) / DAY)
                message.ack()
                threading.Event().wait(0.05)  # Some work after the acknowledgement.
                producer.send("a", b"x", delay=DAY)

        worker = threading.Thread(target=work)
        worker.start()
        _until_one_waits(delayd_broker)
        producer.send("a", b"x", delay=DAY)
        delayd_broker.clock.advance(5 * DAY)
        assert seen == [1, 2, 3, 4, 5]
    worker.join(10)
    assert not worker.is_alive()


@pytest.mark.parametrize("kind", ["function", "coroutine"])
def test_what_a_workers_handler_sends_after_its_own_acknowledgement_is_not_missed(
    delayd_broker: InMemoryBroker, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    begun, seen, worker = delayd_broker.clock.now, list[float](), delayd_broker.worker()
    with delayd_broker.producer() as producer:

        def work(body: bytes, message: delayd.Message) -> None:
            seen.append((delayd_broker.clock.now - begun) / DAY)
            message.ack()
            threading.Event().wait(0.05)  # Some work after the acknowledgement.
            producer.send("a", b"x", delay=DAY)

        async def work_on_loop(body: bytes, message: delayd.AsyncMessage) -> None:
            seen.append((delayd_broker.clock.now - begun) / DAY)
            await message.ack()
            await asyncio.sleep(0.05)
            await asyncio.to_thread(producer.send, "a", b"x", delay=DAY)

        worker.on("a", group="g")(work if kind == "function" else work_on_loop)
        serving = threading.Thread(target=lambda: asyncio.run(worker.serve()))
        serving.start()
        _until_one_waits(delayd_broker)
        producer.send("a", b"x", delay=DAY)
        delayd_broker.clock.advance(5 * DAY)
        assert seen == [1, 2, 3, 4, 5]
        assert "clock_goes_on" not in caplog.text, "a handler that has ended is not waited for"
        worker.stop()
        serving.join()


def test_a_lease_that_is_kept_lasts_while_the_clock_moves(delayd_broker: InMemoryBroker) -> None:
    lease = timedelta(seconds=20)
    with (
        delayd_broker.producer() as producer,
        delayd_broker.consumer("a", "g", lease=lease, auto_extend=4 * DAY) as consumer,
    ):
        producer.send("a", b"x", delay=timedelta(0))
        (message,) = consumer.pull()
        delayd_broker.clock.advance(3 * DAY)
        message.extend(lease)
        delayd_broker.clock.advance(2 * DAY)
        with pytest.raises(delayd.errors.StaleHandle):
            message.ack()


def test_a_task_that_pulls_and_a_test_that_moves_the_clock_cost_no_patience(
    delayd_broker: InMemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with delayd_broker.async_producer() as producer, delayd_broker.async_consumer("a", "g") as consumer:
            for _ in range(3):
                await producer.send("a", b"1", delay=DAY)
                pulling = asyncio.create_task(consumer.pull())
                await delayd_broker.clock.advance_async(DAY)
                await (await pulling).ack()

    asyncio.run(scenario())
    assert "clock_goes_on" not in caplog.text


def test_a_home_that_is_closed_ends_its_loops_and_workers() -> None:
    ended: list[str] = []
    with InMemoryBroker() as broker:
        consumer, worker = broker.consumer("a", "g"), broker.worker()
        worker.on("b", group="g")(lambda body: None)

        def iterate() -> None:
            for _ in consumer:
                pass
            ended.append("loop")

        def serve() -> None:
            asyncio.run(worker.serve())
            ended.append("worker")

        threads = [threading.Thread(target=each) for each in (iterate, serve)]
        for thread in threads:
            thread.start()
        _until_one_waits(broker)
    for thread in threads:
        thread.join(15)
    assert sorted(ended) == ["loop", "worker"]
    with pytest.raises(delayd.errors.AlreadyClosed):
        consumer.pull(wait=timedelta(0))
    consumer.close()


def test_a_workers_function_that_sends_in_frozen_time_does_not_wait_for_the_clock_that_waits_for_it() -> None:
    seen: list[float] = []
    with freeze_time("2026-01-01", real_asyncio=True) as frozen, InMemoryBroker() as broker:
        begun, worker = broker.clock.now, broker.worker()
        with broker.producer() as producer, broker.consumer("b", "g") as other:

            @worker.on("a", group="g")
            def send_again(body: bytes) -> None:
                seen.append((broker.clock.now - begun) / DAY)
                producer.send("a", b"x", delay=DAY)

            serving = threading.Thread(target=lambda: asyncio.run(worker.serve()))
            serving.start()
            _until_one_waits(broker)
            producer.send("a", b"x", delay=DAY)
            frozen.tick(3 * DAY + timedelta(hours=1))
            assert _pulled(other) == []
            assert seen == [1, 2, 3]
            worker.stop()
            serving.join()


def test_on_a_loop_a_call_finds_what_is_due_while_the_clock_ends_an_earlier_move() -> None:
    async def scenario(broker: InMemoryBroker, tick: Callable[[timedelta], object]) -> None:
        async with broker.async_producer() as producer, broker.async_consumer("b", "g") as consumer:
            for _ in range(3):
                await producer.send("b", b"1", delay=DAY)
                tick(DAY)
                # The clock is moved twice, and what comes meanwhile counts as work for the second move.
                again = asyncio.create_task(broker.clock.advance_async(AT_ONCE))
                batch = await consumer.pull(wait=AT_ONCE)
                assert len(batch) == 1
                await batch.ack()
                await producer.send("b", b"2", delay=DAY)
                tick(DAY)
                batch = await consumer.pull(wait=AT_ONCE)
                assert len(batch) == 1
                await batch.ack()
                await again

    with freeze_time("2026-01-01", real_asyncio=True) as frozen, InMemoryBroker() as broker:
        asyncio.run(scenario(broker, frozen.tick))


def test_on_a_loop_the_next_call_after_frozen_time_has_moved_finds_what_is_due() -> None:
    async def scenario(broker: InMemoryBroker, tick: Callable[[timedelta], object]) -> None:
        seen, begun = list[float](), broker.clock.now
        async with (
            broker.async_producer() as producer,
            broker.async_consumer("a", "g") as consumer,
            broker.async_consumer("b", "g") as other,
        ):
            for _ in range(3):
                tick(DAY)
                await producer.send("b", b"1", delay=DAY)  # From the frozen time on.
                assert not len(await other.pull(wait=AT_ONCE))
                tick(DAY)
                batch = await other.pull(wait=AT_ONCE)
                assert len(batch) == 1
                await batch.ack()

            async def send_again() -> None:
                async for message in consumer:
                    seen.append((broker.clock.now - begun) / DAY)
                    await producer.send("a", b"x", delay=DAY)
                    await message.ack()

            working = asyncio.create_task(send_again())
            await producer.send("a", b"x", delay=DAY)
            tick(3 * DAY + timedelta(hours=1))
            await other.pull(wait=AT_ONCE)
            assert seen == [7, 8, 9]
            working.cancel()

    with freeze_time("2026-01-01", real_asyncio=True) as frozen, InMemoryBroker() as broker:
        asyncio.run(scenario(broker, frozen.tick))


def test_what_was_said_before_the_clock_is_moved_is_heard_before_it_moves(delayd_broker: InMemoryBroker) -> None:
    with (
        delayd_broker.producer() as producer,
        delayd_broker.consumer("a", "g") as consumer,
        delayd_broker.consumer("a", "g") as other,
    ):
        for _ in range(5):
            producer.send("a", b"", delay=AT_ONCE)
            (message,) = consumer.pull()
            message.ack(wait=False)
            delayd_broker.clock.advance(DAY)
            assert not len(other.pull(wait=AT_ONCE))


def test_a_caller_that_waits_for_room_is_not_at_work(
    delayd_broker: InMemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            delayd_broker.async_producer() as producer,
            delayd_broker.async_consumer("a", "g", max_in_flight=1, lease=timedelta(hours=1)) as consumer,
        ):
            await producer.send("a", b"", delay=AT_ONCE)
            (message,) = await consumer.pull()
            pulling = asyncio.create_task(consumer.pull(wait=timedelta(minutes=1)))
            await delayd_broker.clock.advance_async(timedelta(minutes=1))
            await message.ack()
            pulling.cancel()
            await asyncio.wait([pulling])

    asyncio.run(scenario())
    assert "clock_goes_on" not in caplog.text


def test_what_a_handler_sends_while_its_loop_is_asked_is_worked_off_at_that_instant(
    delayd_broker: InMemoryBroker,
) -> None:
    clock, seen = delayd_broker.clock, list[timedelta]()
    begun, groups = clock.now, [f"g{number}" for number in range(4)]

    def take(consumer: delayd.Consumer) -> None:
        for message in consumer:
            threading.Event().wait(0.05)  # Some work.
            seen.append(clock.now - begun)
            message.ack()

    async def send_on(consumer: delayd.AsyncConsumer, producer: delayd.Producer) -> None:
        async for message in consumer:
            # All of this is done in one turn of the loop, so the question of the clock is answered after it.
            threading.Event().wait(0.05)
            producer.send("b", b"", delay=AT_ONCE)
            await message.ack(wait=False)

    async def scenario(producer: delayd.Producer) -> None:
        async with delayd_broker.async_consumer("a", "g") as consumer:
            sending = asyncio.create_task(send_on(consumer, producer))
            await clock.advance_async(5 * DAY)
            sending.cancel()

    with delayd_broker.producer() as producer, ExitStack() as opened:
        consumers = [opened.enter_context(delayd_broker.consumer("b", group)) for group in groups]
        threads = [threading.Thread(target=take, args=(consumer,)) for consumer in consumers]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(core.is_active for core in list(clock.followed)) == len(groups), "all of them wait")
        producer.send("a", b"", delay=DAY)
        asyncio.run(scenario(producer))
        assert seen == [DAY] * len(groups)
    for thread in threads:
        thread.join()


def test_no_time_is_taken_from_a_handler_that_sleeps_or_runs_a_thread(delayd_broker: InMemoryBroker) -> None:
    clock = delayd_broker.clock
    begun, seen = clock.now, list[tuple[timedelta, timedelta]]()
    worker = delayd_broker.worker()

    @worker.on("a", group="sleeps")
    async def sleep(body: bytes) -> None:
        came = clock.now - begun
        await asyncio.sleep(0.1)
        seen.append((came, clock.now - begun))

    @worker.on("a", group="runs a thread")
    async def run(body: bytes) -> None:
        came = clock.now - begun
        await asyncio.to_thread(threading.Event().wait, 0.1)
        seen.append((came, clock.now - begun))

    async def scenario() -> None:
        async with delayd_broker.async_producer() as producer:
            for days in (1, 2):
                await producer.send("a", b"", delay=days * DAY)
            serving = asyncio.create_task(worker.serve())
            await clock.advance_async(5 * DAY)
            worker.stop()
            await serving

    asyncio.run(scenario())
    assert seen == [(DAY, DAY)] * 2 + [(2 * DAY, 2 * DAY)] * 2


def test_a_task_that_a_handler_in_frozen_time_has_begun_counts_from_the_handlers_instant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(broker: InMemoryBroker, tick: Callable[[timedelta], object]) -> None:
        seen, begun = list[float](), broker.clock.now
        async with (
            broker.async_producer() as producer,
            broker.async_consumer("a", "g") as consumer,
            broker.async_consumer("b", "g") as other,
        ):

            async def follow() -> None:
                await other.pull(wait=AT_ONCE)
                await producer.send("a", b"x", delay=DAY)

            async def send_again() -> None:
                async for message in consumer:
                    seen.append((broker.clock.now - begun) / DAY)
                    await asyncio.gather(follow())
                    await message.ack()

            working = asyncio.create_task(send_again())
            await producer.send("a", b"x", delay=DAY)
            tick(3 * DAY + timedelta(hours=1))
            await other.pull(wait=AT_ONCE)
            assert seen == [1, 2, 3]
            working.cancel()

    with freeze_time("2026-01-01", real_asyncio=True) as frozen, InMemoryBroker() as broker:
        asyncio.run(scenario(broker, frozen.tick))
    assert "clock_goes_on" not in caplog.text
