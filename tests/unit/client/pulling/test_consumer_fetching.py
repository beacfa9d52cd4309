"""What a consumer fetches ahead, and where that goes when nobody comes for it (rule Q4)."""

from __future__ import annotations

import asyncio
import linecache
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

import delayd.client
from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessageBatch, Consumer, Message, MessageBatch
from delayd.errors import AlreadyClosed
from delayd.wire.requests import RequestType
from tests.unit.client.world import World, add_messages, fork, on_steady_loop, world_aside
from tests.waiting import DEADLINE_S, until, wait_until

LEASE = timedelta(seconds=1)  # What nobody comes for goes back after a quarter of it.
CLIENT = str(Path(delayd.client.__file__).parent)


def default_consumer(world: World, lease: timedelta = LEASE) -> AsyncConsumer:
    """With default settings, but for the lease."""
    return AsyncConsumer(world.address, "orders", "g", lease=lease)


def not_handed_out(world: World, handed_out: int) -> list[int]:
    """What the consumer holds beyond the first messages."""
    return sorted(held.consume for held in world.realtime.held.values() if held.consume >= handed_out)


async def work_off(consumer: AsyncConsumer, count: int, each_s: float) -> None:
    """Handle so many messages at that pace."""
    for _ in range(count):
        message = await anext(consumer)
        await asyncio.sleep(each_s)
        await message.ack(wait=False)


def test_rule_Q4_a_slow_handler_has_nothing_ahead_and_a_fast_one_a_good_deal() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 2_000)
        async with default_consumer(world) as consumer:
            await work_off(consumer, 3, 0.15)
            await (await anext(consumer)).ack()
            await asyncio.sleep(0.03)
            assert world.realtime.held == {}
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            await work_off(consumer, 700, 0)
            await until(lambda: len(world.realtime.held) > 50)
            assert len(world.realtime.held) < 1_500
        assert world.realtime.counted == [] and world.realtime.held == {}

    on_steady_loop(scenario)


def test_rule_Q4_the_first_fetches_are_small() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 2_000)
        async with default_consumer(world) as consumer:
            await work_off(consumer, 30, 0)
            pulls = [frame.head for frame in world.realtime.seen if frame.type == RequestType.PULL]
            assert [head["max_messages"] for head in pulls[:3]] <= [1, 8, 64]
            assert "ahead" not in pulls[0] and all("ahead" in head for head in pulls[2:])
        async with default_consumer(world) as consumer:
            assert len(await consumer.pull()) == 1
            assert 1 < len(await consumer.pull()) <= 8

    on_steady_loop(scenario)


def test_rule_Q4_what_a_stalled_handler_does_not_come_for_goes_back_in_time_and_uncounted() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 100)
        async with default_consumer(world) as consumer:
            await work_off(consumer, 20, 0.001)
            stalled = await anext(consumer)
            await until(lambda: bool(not_handed_out(world, 21)))
            await until(lambda: not not_handed_out(world, 21))
            assert len(world.realtime.held) == 1 and world.realtime.counted == []
            await stalled.ack()
            # It goes on with what came back, as if nothing had been.
            handled = [await anext(consumer) for _ in range(79)]
            assert {message.attempt for message in handled} == {1}
            assert sorted(message.sequence for message in handled) == list(range(22, 101))

    on_steady_loop(scenario)


@pytest.mark.parametrize("each_s", [0.005, 0.0])
def test_rule_Q4_half_of_what_others_wait_for_goes_to_them_unless_it_is_done_at_once(each_s: float) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 40)
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            await work_off(consumer, 20, each_s)
            message = await anext(consumer)
            await until(lambda: len(world.realtime.held) > 8)
            await consumer.flush()
            ahead = len(not_handed_out(world, 21))
            # The server tells of it in any answer.
            world.realtime.offered.clear()
            world.realtime.wanted = 500
            acknowledging = asyncio.create_task(message.ack())
            await until(lambda: bool(world.realtime.acked) and world.realtime.acked[-1] == 20)
            world.realtime.wanted = 0
            await acknowledging
            await asyncio.sleep(0.05)
            assert (len(world.realtime.returned) >= -(-ahead // 2)) if each_s else (world.realtime.returned == [])
            assert world.realtime.counted == []

    on_steady_loop(scenario)


def test_rule_Q4_what_comes_after_a_break_goes_back() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 50)
        async with default_consumer(world) as consumer:
            async for message in consumer:
                await message.ack()
                if message.sequence == 10:
                    break
            await until(lambda: bool(world.realtime.returned))
            await until(lambda: not world.realtime.held)
            assert world.realtime.counted == []
            assert (await anext(consumer)).attempt == 1

    on_steady_loop(scenario)


def test_rule_Q4_a_cancelled_pull_loses_nothing() -> None:
    async def scenario(world: World) -> None:
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            for row in range(9):
                waits: Coroutine[object, object, object] = consumer.pull(1 + row) if row % 3 else consumer.__anext__()
                pulling = asyncio.create_task(asyncio.wait_for(waits, DEADLINE_S))
                await until(lambda: bool(world.realtime.waiting))
                await asyncio.sleep(0.002)
                pulling.cancel()
                if row % 2:
                    # The server is asked for its answer, and then nothing is on the way.
                    await until(lambda: not world.realtime.waiting)
                world.realtime.add(b"%d" % row)
                batch = await consumer.pull(wait=timedelta(seconds=5))
                assert (batch.bodies, batch.attempts.tolist()) == ([b"%d" % row], [1])
                await batch.ack()
        assert world.realtime.acked == list(range(9)) and world.realtime.counted == []

    on_steady_loop(scenario)


def test_rule_Q4_what_came_to_a_pull_that_nobody_waits_for_goes_back() -> None:
    async def scenario(world: World) -> None:
        async with default_consumer(world, timedelta(seconds=60)) as consumer:
            world.realtime.add(b"0")
            await (await consumer.pull()).ack()
            pulling = asyncio.create_task(consumer.pull(3))
            await until(lambda: bool(world.realtime.waiting))
            world.realtime.add(b"1")
            pulling.cancel()
            await until(lambda: bool(world.realtime.held))
            await until(lambda: not world.realtime.held)
        assert world.realtime.returned == [(1, 1)]

    on_steady_loop(scenario)


def test_a_pull_that_has_no_time_to_wait_gets_what_there_is() -> None:
    async def scenario(world: World) -> None:
        async with default_consumer(world) as consumer:
            for row in range(4):
                assert len(await consumer.pull(wait=timedelta(0))) == 0
                world.realtime.add(b"%d" % row)
                # Longer than anything would be held for a caller that is away.
                await asyncio.sleep(0.3)
                batch = await consumer.pull(wait=timedelta(0))
                assert batch.bodies == [b"%d" % row] and batch.attempts.tolist() == [1]
                await batch.ack()
        assert world.realtime.returned == [] and world.realtime.counted == []

    on_steady_loop(scenario)


def test_after_a_pull_in_vain_nothing_is_on_its_way() -> None:
    async def scenario(world: World) -> None:
        async with default_consumer(world) as consumer:
            add_messages(world, 30)
            await work_off(consumer, 30, 0)
            assert len(await consumer.pull(wait=timedelta(milliseconds=20))) == 0
            assert world.realtime.waiting == []

    on_steady_loop(scenario)


def test_what_is_on_its_way_at_the_close_goes_back_uncounted() -> None:
    async def close_in_a_pull(world: World) -> None:
        consumer = default_consumer(world, timedelta(seconds=60))
        add_messages(world, 10)
        requests = world.realtime.pulls
        pulling = asyncio.create_task(consumer.pull(3))
        await until(lambda: world.realtime.pulls > requests)
        await consumer.close()
        (ended,) = await asyncio.gather(pulling, return_exceptions=True)
        assert isinstance(ended, AlreadyClosed | AsyncMessageBatch)
        handed_out = len(ended) if isinstance(ended, AsyncMessageBatch) else 0
        assert len(world.realtime.held) == handed_out and world.realtime.counted == []
        world.realtime.restart()

    async def scenario(world: World) -> None:
        for _ in range(20):
            await close_in_a_pull(world)

    on_steady_loop(scenario)


def test_the_close_ends_an_iteration_of_another_task() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 2)
        consumer = default_consumer(world)
        seen: list[bytes] = []

        async def iterate() -> None:
            async for message in consumer:
                await message.ack()
                seen.append(message.body)

        iterating = asyncio.create_task(iterate())
        await until(lambda: len(seen) == 2)
        await consumer.close()
        await iterating
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)
        with pytest.raises(AlreadyClosed):
            aiter(consumer)

    on_steady_loop(scenario)


def test_the_close_ends_an_iteration_of_another_thread() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 2))
        consumer = Consumer(world.address, "a", "g")
        seen: list[bytes] = []

        def iterate() -> None:
            for message in consumer:
                seen.append(message.body)
            seen.append(b"over")

        thread = threading.Thread(target=iterate)
        thread.start()
        wait_until(lambda: len(seen) == 2)
        consumer.close()
        thread.join(DEADLINE_S)
        assert seen == [b"0", b"1", b"over"]
        with pytest.raises(StopIteration):
            next(consumer)
        with pytest.raises(AlreadyClosed):
            iter(consumer)


def test_a_handler_on_another_thread_acknowledges_what_it_had_in_hand_at_the_close() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 3))
        consumer = Consumer(world.address, "a", "g", lease=timedelta(seconds=60))
        in_hand, closed = threading.Event(), threading.Event()

        def iterate() -> None:
            for message in consumer:
                in_hand.set()
                closed.wait(DEADLINE_S)
                message.ack()

        thread = threading.Thread(target=iterate)
        thread.start()
        assert in_hand.wait(DEADLINE_S)
        consumer.close()
        closed.set()
        thread.join(DEADLINE_S)
        assert world.realtime.acked == [0] and not world.realtime.held and world.realtime.counted == []


def test_closes_of_many_iterations_in_their_first_moments_end_them() -> None:
    with world_aside() as (world, _):
        for _ in range(30):
            consumer = Consumer(world.address, "a", "g")
            thread = threading.Thread(target=list, args=(consumer,))
            thread.start()
            consumer.close()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_an_outage_ends_no_iteration_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        consumer = AsyncConsumer(world.address, "orders", "g", timeout_ms=100)
        seen: list[bytes] = []

        async def iterate() -> None:
            async for message in consumer:
                seen.append(message.body)
                await message.ack(wait=False)

        def has_acknowledged(count: int) -> bool:
            return len(world.realtime.acked) == count

        world.meta.realtime.clear()
        iterating = asyncio.create_task(iterate())
        for row in range(3):
            await asyncio.sleep(0.5)
            world.meta.realtime[:] = [world.realtime]
            world.realtime.add(b"%d" % row)
            # An acknowledgement that the outage takes would be raised by the next one, which is as it should be.
            await until(partial(has_acknowledged, row + 1))
            await world.realtime.stop()
            await asyncio.sleep(0.4)
            assert not iterating.done()
            await world.realtime.start()
        await consumer.close()
        await iterating
        assert seen == [b"0", b"1", b"2"]

    with caplog.at_level(logging.INFO, "delayd.client.pulling.consumer_core"):
        on_steady_loop(scenario)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("consumer_core")]
    words = [line.split()[0] for line in told]
    assert words == ["consumer_waits", "consumer_goes_on"] * (len(words) // 2) + ["consumer_waits"] * (len(words) % 2)
    assert 2 <= len(words) <= 7


def interrupt_when_it_waits(world: World) -> None:
    wait_until(lambda: bool(world.realtime.waiting))
    # To the thread that waits: a signal of the process goes to any thread, and may find this one asleep.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.usefixtures("heard_interrupts")
def test_a_ctrl_c_while_a_pull_waits_loses_nothing_for_a_lease() -> None:
    with world_aside() as (world, do), Consumer(world.address, "a", "g") as consumer:
        do(partial(add_messages, world, 1))
        next(consumer).ack()
        for row in range(1, 4):
            interrupt = threading.Thread(target=interrupt_when_it_waits, args=(world,))
            with pytest.raises(KeyboardInterrupt):
                interrupt.start()
                next(consumer) if row % 2 else consumer.pull(wait=timedelta(seconds=DEADLINE_S))
            interrupt.join()
            do(partial(world.realtime.add, b"%d" % row))
            batch = consumer.pull(wait=timedelta(seconds=5))
            assert (batch.bodies, batch.attempts.tolist()) == ([b"%d" % row], [1])
            batch.ack()
        assert world.realtime.counted == []


def test_a_signal_handler_may_close_the_consumer_that_it_interrupts() -> None:
    def close_by_signal(world: World, do: Callable[[Callable[[], None]], None], flows: bool) -> None:
        do(partial(add_messages, world, 200 if flows else 1))
        consumer = Consumer(world.address, "a", "g")
        signal.signal(signal.SIGUSR1, lambda number, frame: consumer.close())
        waits = threading.main_thread().ident or 0
        late = threading.Timer(0.1, lambda: signal.pthread_kill(waits, signal.SIGUSR1))
        late.start()
        handled = 0
        for message in consumer:
            # The one in hand at the close is acknowledged, too.
            message.ack(wait=False)
            handled += 1
            do(partial(add_messages, world, int(flows)))
        late.join()
        assert len(world.realtime.acked) == handled and world.realtime.counted == []
        world.realtime.acked.clear()
        do(world.realtime.restart)

    before = signal.getsignal(signal.SIGUSR1)
    with world_aside() as (world, do):
        try:
            for row in range(8):
                close_by_signal(world, do, bool(row % 2))
        finally:
            signal.signal(signal.SIGUSR1, before)


class Interrupts:
    """Raises KeyboardInterrupt once, at the n-th line of the clients that this thread comes to."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupts | None:
        code = frame.f_code
        if not code.co_filename.startswith(CLIENT):
            # Functions that the clients call are not followed.
            return None
        # A signal never comes between a `with` and the call of its end, as a trace function would.
        if event == "line" and "with self._lock" not in linecache.getline(code.co_filename, frame.f_lineno):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("pulls", [False, True])
def test_a_ctrl_c_at_any_line_loses_nothing_and_repeats_nothing(pulls: bool) -> None:
    with world_aside() as (world, do), Consumer(world.address, "a", "g", lease=timedelta(seconds=60)) as consumer:
        do(partial(add_messages, world, 3))
        seen = [next(consumer).sequence for _ in range(3)]

        def one() -> Message | MessageBatch:
            return consumer.pull(1) if pulls else next(consumer)

        def number_of(got: Message | MessageBatch) -> int:
            return got.sequence if isinstance(got, Message) else got[0].sequence

        at = interrupted = 0
        while at == interrupted:
            at += 1
            do(partial(add_messages, world, 1))
            got = None
            sys.settrace(Interrupts(at))
            try:
                got = one()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(None)
            began = time.monotonic()
            seen.append(number_of(one() if got is None else got))
            # What is held for nobody would come again after a quarter of its lease, 15 s.
            assert time.monotonic() - began < 14
        assert interrupted > 20 and seen == list(range(1, at + 4))
        assert world.realtime.counted == []


def test_a_child_hands_out_nothing_of_its_parent() -> None:
    with world_aside() as (world, do):
        do(partial(add_messages, world, 60))
        with Consumer(world.address, "a", "g", lease=timedelta(seconds=60)) as consumer:
            parents = [next(consumer).sequence for _ in range(10)]
            wait_until(lambda: len(world.realtime.held) > 15)
            child = fork()
            if child == 0:
                status = 1
                try:
                    message = next(consumer)
                    message.ack()
                    status = 0 if message.sequence > 15 and message.attempt == 1 else 1
                    consumer.close()
                finally:
                    os._exit(status)
            parents += [next(consumer).sequence for _ in range(5)]
            _, waited = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(waited) == 0 and parents == list(range(1, 16))
