"""Worker: what becomes of a message, whatever its handler does."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

import delayd
from delayd.errors import BadArgument
from delayd.worker.signals import SIGNALS
from tests.unit.client.realtime import Stored
from tests.unit.client.world import THREADS_AT_A_FORK, World, add_messages, on_loop, on_steady_loop
from tests.unit.net.loopback import skip
from tests.unit.worker.workers import GROUP, SUBJECT, serving, settled, worker_of
from tests.waiting import DEADLINE_S, until, wait_until

# Longer than a steady loop's time goes on while the machine stands still.
TIME_LIMIT = timedelta(milliseconds=120)

Kind = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(work: Callable[..., Any]) -> Callable[..., Any]:
    return work


def coroutine(work: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(body: Any) -> Any:
        return work(body)

    return handle


KINDS = pytest.mark.parametrize("kind", [plain, coroutine])


@KINDS
def test_each_message_is_handled_and_acknowledged(kind: Kind) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 100)
        worker, seen = worker_of(world), list[bytes]()
        worker.on(SUBJECT, group=GROUP)(kind(seen.append))
        async with serving(worker):
            await settled(world, 100)
            world.realtime.add(b"later")
            await settled(world, 101)
        assert sorted(seen) == sorted([*(b"%d" % row for row in range(100)), b"later"])
        assert not world.realtime.held, "nothing is left with a worker that has stopped"

    on_loop(scenario)


@KINDS
def test_acknowledgements_of_many_handlers_share_a_request(kind: Kind) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 500)
        worker = worker_of(world)
        worker.on(SUBJECT, group=GROUP)(kind(lambda body: None))
        async with serving(worker):
            await settled(world, 500)
        assert world.realtime.ack_requests < 250

    on_loop(scenario)


@KINDS
def test_no_more_messages_are_handled_at_once_than_there_are_slots(kind: Kind) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 20)
        worker, running, most = worker_of(world), set[object](), [0]

        async def slow(body: bytes) -> None:
            running.add(body)
            most.append(len(running))
            await asyncio.sleep(0.005)
            running.discard(body)

        def slow_thread(body: bytes) -> None:
            running.add(body)
            most.append(len(running))
            time.sleep(0.005)
            running.discard(body)

        worker.on(SUBJECT, group=GROUP, concurrency=3)(slow_thread if kind is plain else slow)
        async with serving(worker):
            await settled(world, 20)
        assert max(most) <= 3

    on_loop(scenario)


@pytest.mark.parametrize(
    "raised",
    [ValueError("no"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(), GeneratorExit()],
    ids=lambda raised: type(raised).__name__,
)
@KINDS
def test_a_message_whose_handler_raises_anything_is_given_back_and_the_worker_goes_on(
    kind: Kind, raised: BaseException
) -> None:
    async def scenario(world: World) -> None:
        if isinstance(raised, GeneratorExit):
            return  # Python itself asks a coroutine to end by it.
        add_messages(world, 3)
        worker, failed = worker_of(world), list[bytes]()

        def handle(body: bytes) -> None:
            if body == b"1" and not failed:
                failed.append(body)
                raise raised

        worker.on(SUBJECT, group=GROUP)(kind(handle))
        async with serving(worker):
            await settled(world, 3, counted=1)
        assert world.realtime.counted == [(1, 1)] and sorted(world.realtime.acked) == [0, 1, 2]

    on_loop(scenario)


@KINDS
def test_what_a_handler_returns_does_not_matter(kind: Kind) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 4)
        worker, results = worker_of(world), [False, 0, ValueError("returned"), b"x"]
        worker.on(SUBJECT, group=GROUP)(kind(lambda body: results[int(body)]))
        async with serving(worker):
            await settled(world, 4)
        assert not world.realtime.counted

    on_loop(scenario)


def test_a_function_that_returns_a_coroutine_has_not_done_its_work(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, tries = worker_of(world), list[bytes]()

        async def work(body: bytes) -> None:
            raise AssertionError("nobody runs it")

        def handle(body: bytes) -> object:
            tries.append(body)
            return work(body) if len(tries) == 1 else None

        worker.on(SUBJECT, group=GROUP)(handle)
        async with serving(worker):
            await settled(world, 1, counted=1)

    on_loop(scenario)
    assert "returned a coroutine" in caplog.text


@pytest.mark.filterwarnings(THREADS_AT_A_FORK)
def test_a_process_that_a_handler_forks_ends_with_the_handler() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, children = worker_of(world), list[int]()

        def handle(body: bytes) -> None:
            child = os.fork()
            if child:
                children.append(child)

        worker.on(SUBJECT, group=GROUP)(handle)
        async with serving(worker):
            await settled(world, 1)
            pid, status = await asyncio.to_thread(os.waitpid, children[0], 0)
            assert pid == children[0] and os.waitstatus_to_exitcode(status) == 0
        assert world.realtime.acked == [0]

    on_loop(scenario)


def test_a_coroutine_is_cancelled_at_its_time_limit_and_its_message_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, tries = worker_of(world), list[str]()

        async def handle(body: bytes) -> None:
            tries.append("began")
            if len(tries) == 1:
                try:
                    await asyncio.sleep(3600)
                finally:
                    tries.append("cleaned up")

        worker.on(SUBJECT, group=GROUP, time_limit=TIME_LIMIT)(handle)
        async with serving(worker):
            await settled(world, 1, counted=1)
        assert tries == ["began", "cleaned up", "began"]

    on_steady_loop(scenario)
    assert "took longer than its time limit" in caplog.text


def test_a_coroutine_that_swallows_its_cancellation_is_named_and_loses_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, go_on = worker_of(world), asyncio.Event()

        async def handle(body: bytes) -> None:
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                await go_on.wait()

        worker.on(SUBJECT, group=GROUP, concurrency=1, lease=timedelta(seconds=1), time_limit=TIME_LIMIT)(handle)
        async with serving(worker):
            await settled(world, 0, counted=1)
            assert "slot_lost" in caplog.text
            go_on.set()
            await settled(world, 1)
        assert len(world.realtime.counted) == 1

    on_steady_loop(scenario)
    assert "slot_free_again" in caplog.text


@pytest.mark.parametrize("limit", [timedelta(minutes=5), None])
def test_a_handler_that_outlasts_its_lease_keeps_its_message(limit: timedelta | None) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker = worker_of(world)

        async def handle(body: bytes) -> None:
            for tick in range(1, 10):
                await skip(1.001)
                await until(lambda tick=tick: len(world.realtime.extended) == tick)  # type: ignore[misc]

        worker.on(SUBJECT, group=GROUP, lease=timedelta(seconds=3), time_limit=limit)(handle)
        async with serving(worker):
            await settled(world, 1)
        assert world.realtime.counted == []

    on_steady_loop(scenario)


def test_a_function_over_its_time_limit_keeps_its_slot_and_loses_its_message(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, tries, go_on = worker_of(world), list[bytes](), threading.Event()

        def handle(body: bytes) -> None:
            tries.append(body)
            if len(tries) == 1:
                go_on.wait()

        worker.on(SUBJECT, group=GROUP, concurrency=1, time_limit=TIME_LIMIT)(handle)
        async with serving(worker):
            await settled(world, 0, counted=1)
            world.realtime.add(b"next")
            await asyncio.sleep(0.05)
            assert tries == [b"0"], "the only slot is lost"
            go_on.set()
            await settled(world, 2)
        assert sorted(world.realtime.acked) == [0, 1] and len(world.realtime.counted) == 1

    on_steady_loop(scenario)
    assert "slot_lost" in caplog.text and "slot_free_again" in caplog.text
    assert "not_acknowledged" not in caplog.text, "the message is settled once"


@KINDS
def test_a_stop_waits_for_handlers_and_pulls_nothing_more(kind: Kind) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, began, go_on = worker_of(world), list[bytes](), threading.Event()

        async def slow(body: bytes) -> None:
            began.append(body)
            await until(go_on.is_set)

        def slow_thread(body: bytes) -> None:
            began.append(body)
            wait_until(go_on.is_set)

        worker.on(SUBJECT, group=GROUP)(slow_thread if kind is plain else slow)
        async with serving(worker) as serve:
            await until(lambda: bool(began))
            worker.stop()
            await asyncio.sleep(0.02)
            world.realtime.add(b"after the stop")
            await asyncio.sleep(0.05)
            assert not serve.done() and began == [b"0"]
            go_on.set()
        assert world.realtime.acked == [0] and not world.realtime.counted and not world.realtime.held

    on_loop(scenario)


@KINDS
def test_messages_of_handlers_that_outlast_the_drain_go_back_uncounted(kind: Kind) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, began, go_on = worker_of(world, drain_s=0.03), list[bytes](), threading.Event()

        async def slow(body: bytes) -> None:
            began.append(body)
            await asyncio.sleep(3600)

        def slow_thread(body: bytes) -> None:
            began.append(body)
            go_on.wait()

        worker.on(SUBJECT, group=GROUP)(slow_thread if kind is plain else slow)
        async with serving(worker):
            await until(lambda: bool(began))
        assert world.realtime.returned == [(0, 1)] and not world.realtime.counted and not world.realtime.acked
        go_on.set()

    on_loop(scenario)


def test_a_coroutine_that_ends_its_work_although_it_is_cancelled_is_acknowledged() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, began = worker_of(world, drain_s=0.0), list[bytes]()

        async def stubborn(body: bytes) -> None:
            began.append(body)
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)

        worker.on(SUBJECT, group=GROUP)(stubborn)
        async with serving(worker):
            await until(lambda: bool(began))
        assert world.realtime.acked == [0] and not world.realtime.returned

    on_loop(scenario)


def test_when_serve_is_cancelled_the_messages_go_back_uncounted() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, began = worker_of(world), list[bytes]()

        @worker.on(SUBJECT, group=GROUP)
        async def slow(body: bytes) -> None:
            began.append(body)
            await asyncio.sleep(3600)

        serve = asyncio.get_running_loop().create_task(worker.serve())
        await until(lambda: bool(began))
        serve.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serve
        assert world.realtime.returned == [(0, 1)]

    on_loop(scenario)


def test_a_handler_may_stop_the_worker() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker = worker_of(world)
        worker.on(SUBJECT, group=GROUP)(lambda body: worker.stop())
        await worker.serve()
        assert world.realtime.acked == [0]

    on_loop(scenario)


def test_a_worker_that_was_stopped_before_it_serves_returns_at_once_and_serves_the_next_time() -> None:
    async def scenario(world: World) -> None:
        worker, seen = worker_of(world), list[bytes]()
        worker.on(SUBJECT, group=GROUP)(seen.append)
        worker.stop()
        await worker.serve()
        add_messages(world, 1)
        async with serving(worker):
            await settled(world, 1)

    on_loop(scenario)


def test_what_a_handler_sets_in_its_context_is_gone_for_the_next_message() -> None:
    colour: ContextVar[str] = ContextVar("colour", default="none")

    async def scenario(world: World) -> None:
        for kind in (plain, coroutine):
            add_messages(world, 2)
            worker, seen = worker_of(world), list[str]()

            def handle(body: bytes, seen: list[str] = seen) -> None:
                seen.append(colour.get())
                colour.set("red")

            worker.on(SUBJECT, group=GROUP, concurrency=1)(kind(handle))
            acked = len(world.realtime.acked)
            async with serving(worker):
                await settled(world, acked + 2)
            assert seen == ["none", "none"]

    on_loop(scenario)


def test_acknowledgements_that_fail_are_logged_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker, began, go_on = worker_of(world), list[bytes](), asyncio.Event()

        @worker.on(SUBJECT, group=GROUP)
        async def handle(body: bytes) -> None:
            began.append(body)
            await go_on.wait()

        async with serving(worker):
            await until(lambda: bool(began))
            world.realtime.restart()  # It no longer holds the message for this consumer.
            go_on.set()
            await settled(world, 1)
            world.realtime.add(b"next")
            await settled(world, 2)

    on_loop(scenario)
    assert "not_acknowledged" in caplog.text and "stale_handle" in caplog.text


def test_an_outage_is_waited_out() -> None:
    async def scenario(world: World) -> None:
        worker, seen = worker_of(world), list[bytes]()
        worker.on(SUBJECT, group=GROUP)(seen.append)
        async with serving(worker):
            await until(lambda: world.realtime.pulls > 0)
            await world.realtime.stop()
            await world.realtime.start()
            world.realtime.add(b"x")
            await settled(world, 1)

    on_loop(scenario)


def test_two_handlers_of_one_group_and_none_at_all_are_refused() -> None:
    async def scenario(world: World) -> None:
        worker = worker_of(world)
        with pytest.raises(BadArgument, match="no handler"):
            await worker.serve()
        worker.on(SUBJECT, group=GROUP)(print)
        with pytest.raises(BadArgument, match="print already handles orders for the group g"):
            worker.on(SUBJECT, group=GROUP)(repr)
        async with serving(worker):
            await until(lambda: world.realtime.pulls > 0)
            with pytest.raises(BadArgument, match="serves already"):
                await worker.serve()

    on_loop(scenario)


def test_a_coroutine_that_blocks_the_loop_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayd.worker.worker.TICK_S", 0.01)
    monkeypatch.setattr("delayd.worker.worker.BLOCKED_S", 0.05)

    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker = worker_of(world)

        @worker.on(SUBJECT, group=GROUP)
        async def blocks(body: bytes) -> None:
            time.sleep(0.2)  # noqa: ASYNC251 - what nobody should do.

        async with serving(worker):
            await settled(world, 1)
            await until(lambda: "loop_blocked" in caplog.text)

    on_loop(scenario)
    assert "blocks" in caplog.text


def test_a_bug_of_the_worker_ends_serve_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("delayd.worker.settle.Settler.settle", broken)

    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker = worker_of(world, drain_s=0)
        worker.on(SUBJECT, group=GROUP)(lambda body: None)
        with pytest.raises(ZeroDivisionError):
            await worker.serve()

    on_loop(scenario)


def test_a_worker_belongs_to_no_loop_and_run_waits_for_no_server() -> None:
    worker = delayd.Worker("127.0.0.1:1")
    worker.on(SUBJECT, group=GROUP)(lambda body: None)
    before = [signal.getsignal(number) for number in SIGNALS]
    for _ in range(2):
        worker.stop()
        worker.run()
    assert [signal.getsignal(number) for number in SIGNALS] == before, "the program has its signals back"


@KINDS
def test_a_message_that_fails_comes_again_after_a_pause_that_grows_and_is_dead_after_its_last_attempt(
    kind: Kind,
) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker = worker_of(world)

        def fails(body: bytes) -> None:
            raise ValueError("no")

        worker.on(SUBJECT, group=GROUP, max_attempts=4)(kind(fails))
        async with serving(worker):
            await until(lambda: bool(world.realtime.rejected))
        delays = [delay_ms for _, delay_ms, _ in world.realtime.retried]
        assert len(delays) == 3
        assert all(500 * 2**number <= delay <= 1_000 * 2**number for number, delay in enumerate(delays)), delays
        assert {error for *_, error in world.realtime.retried} == {"ValueError: no"}
        assert world.realtime.rejected == [(0, "its attempts are over: 4 of 4", "ValueError: no")]

    on_loop(scenario)


def test_retry_says_when_a_message_comes_again_and_reject_that_it_never_does() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        worker = worker_of(world)

        @worker.on(SUBJECT, group=GROUP)
        def handle(body: bytes, message: delayd.AsyncMessage) -> None:
            if body == b"0" and message.attempt == 1:
                raise delayd.Retry(after=timedelta(minutes=5), error="busy")
            if body == b"1" and message.attempt == 1:
                raise delayd.Retry(after=timedelta(0))
            if body == b"2":
                raise delayd.Reject("no such order")

        async with serving(worker):
            await settled(world, 2, counted=2)
            await until(lambda: bool(world.realtime.rejected))
        assert world.realtime.retried == [(0, 300_000, "busy")]
        assert world.realtime.rejected == [(2, "no such order", "")]

    on_loop(scenario)


def test_a_body_that_can_not_be_decoded_is_rejected_before_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"{")
        worker, seen = worker_of(world), list[object]()
        worker.on(SUBJECT, group=GROUP, decode="json")(seen.append)
        async with serving(worker):
            await until(lambda: bool(world.realtime.rejected))
        ((_, reason, error),) = world.realtime.rejected
        assert "is no JSON" in reason and error.startswith("BadBody") and not seen

    on_loop(scenario)
    assert "message_rejected" in caplog.text


def test_a_message_whose_workers_have_died_too_often_reaches_no_handler() -> None:
    async def scenario(world: World) -> None:
        world.realtime.messages.append(Stored(1, b"kills", world.realtime.now_ms(), None))
        world.realtime.offered.append((0, 4))
        worker, seen = worker_of(world), list[object]()
        worker.on(SUBJECT, group=GROUP, max_attempts=3)(seen.append)
        async with serving(worker):
            await until(lambda: bool(world.realtime.rejected))
            world.realtime.add(b"next")
            await settled(world, 1)
        assert world.realtime.rejected == [(0, "its attempts are over: 3 of 3", "")] and seen == [b"next"]

    on_loop(scenario)


@KINDS
def test_as_many_messages_are_handled_at_once_as_there_are_slots(kind: Kind) -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 3)
        worker, together, met = worker_of(world), threading.Barrier(3), list[bytes]()

        def meet_in_threads(body: bytes) -> None:
            together.wait(DEADLINE_S)

        async def meet(body: bytes) -> None:
            met.append(body)
            await until(lambda: len(met) == 3)

        worker.on(SUBJECT, group=GROUP, concurrency=3)(meet_in_threads if kind is plain else meet)
        async with serving(worker):
            await settled(world, 3)
        assert not world.realtime.counted

    on_loop(scenario)


def test_a_handler_may_have_a_back_off_of_its_own() -> None:
    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker = worker_of(world)

        @worker.on(SUBJECT, group=GROUP, backoff=delayd.Backoff(first=timedelta(seconds=7), jitter=0))
        def handle(body: bytes, message: delayd.AsyncMessage) -> None:
            if message.attempt < 3:
                raise ValueError("no")

        async with serving(worker):
            await settled(world, 1, counted=2)
        assert [delay_ms for _, delay_ms, _ in world.realtime.retried] == [7_000, 14_000]

    on_loop(scenario)
