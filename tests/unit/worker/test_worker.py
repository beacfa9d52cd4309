"""Workers: what a handler gets, and handlers, middlewares and servers that fail."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import delayd
from delayd.errors import BadArgument
from delayd.testing import InMemoryBroker
from delayd.worker.verdicts import verdict_of
from tests.unit.client.world import THREADS_AT_A_FORK, World, add_messages, on_loop, on_steady_loop
from tests.unit.worker.workers import GROUP, SUBJECT, serving, settled, worker_of
from tests.waiting import DEADLINE_S, until, wait_until


def handled(register: Callable[[delayd.Worker], object], *bodies: bytes) -> World:
    """A world after a worker has settled these bodies, each once."""
    worlds: list[World] = []

    async def scenario(world: World) -> None:
        worlds.append(world)
        for body in bodies:
            world.realtime.add(body)
        worker = worker_of(world)
        register(worker)
        async with serving(worker):
            await settled(world, len(bodies))

    on_loop(scenario)
    return worlds[0]


class Called:
    """A handler that is an object."""

    def __init__(self, seen: list[object]) -> None:
        self.seen = seen

    async def __call__(self, body: bytes) -> None:
        self.seen.append(body)


def handlers(seen: list[object]) -> list[tuple[Callable[..., Any], object]]:
    """Handlers that note what they got, each with what it is to get of the body `x`."""

    def body_alone(body: bytes) -> None:
        seen.append(body)

    def body_and_message(body: bytes, message: delayd.AsyncMessage) -> None:
        seen.append((body, message.body, message.attempt))

    def message_by_keyword(body: bytes, *, message: delayd.AsyncMessage) -> None:
        seen.append((body, message.body))

    def message_alone(message: delayd.AsyncMessage) -> None:
        seen.append((message.subject, message.body))

    async def coroutine(body: bytes, message: delayd.AsyncMessage) -> None:
        seen.append((body, message.body))

    def others(body: bytes, other: int = 3, *rest: object) -> None:
        seen.append((body, other, rest))

    def bound(first: int, body: bytes) -> None:
        seen.append((first, body))

    return [
        (body_alone, b"x"),
        (body_and_message, (b"x", b"x", 1)),
        (message_by_keyword, (b"x", b"x")),
        (message_alone, (SUBJECT, b"x")),
        (coroutine, (b"x", b"x")),
        (others, (b"x", 3, ())),
        (functools.partial(bound, 1), (1, b"x")),
        (functools.partial(coroutine), (b"x", b"x")),
        (Called(seen), b"x"),
        (seen.append, b"x"),
    ]


@pytest.mark.parametrize("number", range(len(handlers([]))))
def test_a_handler_gets_what_its_parameters_ask_for(number: int) -> None:
    seen: list[object] = []
    handler, expected = handlers(seen)[number]
    handled(lambda worker: worker.on(SUBJECT, group=GROUP)(handler), b"x")
    assert seen == [expected]


def test_with_pass_message_the_second_parameter_gets_it_whatever_its_name() -> None:
    seen: list[object] = []
    handled(
        lambda worker: worker.on(SUBJECT, group=GROUP, pass_message=True)(lambda body, m: seen.append((body, m.body))),
        b"x",
    )
    assert seen == [(b"x", b"x")]


def nothing() -> None:
    """Takes nothing."""


def too_much(body: bytes, other: int) -> None:
    """Takes what nobody gives."""


def keyword(body: bytes, *, other: int) -> None:
    """The same by name."""


def generator(body: bytes) -> Any:
    """Is none."""
    yield body


@pytest.mark.parametrize(
    ("handler", "pass_message", "told"),
    [
        (nothing, False, "takes no argument"),
        (too_much, False, "a parameter 'other' that nobody fills"),
        (keyword, False, "a parameter 'other' that nobody fills"),
        (lambda body: None, True, "no second parameter"),
        (generator, False, "is a generator"),
        (5, False, "is neither"),
    ],
)
def test_a_handler_that_can_not_be_called_is_refused_when_it_is_registered(
    handler: Any, pass_message: bool, told: str
) -> None:
    worker = delayd.Worker("127.0.0.1:1")
    with pytest.raises(BadArgument, match=told):
        worker.on(SUBJECT, group=GROUP, pass_message=pass_message)(handler)
    assert not worker.handlers


def test_leases_are_extended_only_for_handlers_that_may_outlast_them() -> None:
    worker = delayd.Worker("127.0.0.1:1")

    async def waits(body: bytes) -> None: ...

    worker.on("a", group=GROUP)(waits)
    worker.on("b", group=GROUP, lease=timedelta(minutes=12))(waits)
    worker.on("c", group=GROUP, time_limit=timedelta(seconds=7))(print)
    worker.on("d", group=GROUP, time_limit=timedelta(hours=1))(print)
    worker.on("e", group=GROUP, time_limit=None)(waits)
    worker.on("f", group=GROUP)(print)  # Nobody can end a function.
    assert [(handler.settings.limit, handler.settings.auto_extend) for handler in worker.handlers] == [
        (timedelta(seconds=50), None),
        (timedelta(minutes=10), None),
        (timedelta(seconds=7), None),
        (timedelta(hours=1), timedelta(minutes=61)),
        (None, timedelta(days=1)),
        (None, timedelta(days=1)),
    ]


class Unspeakable(Exception):
    """Can't even be told."""

    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_that_has_no_text_or_too_much_is_told_anyhow() -> None:
    assert verdict_of(ValueError()).error == "ValueError"
    assert len(verdict_of(ValueError("x" * 10_000)).error) == 2_000
    assert "Unspeakable" in verdict_of(Unspeakable()).error


class Notes:
    """Notes each call; its methods are functions."""

    def __init__(self, name: str, notes: list[tuple[object, ...]]) -> None:
        self.name = name
        self.notes = notes

    def before(self, message: delayd.AsyncMessage) -> None:
        self.notes.append((self.name, "before", message.body))

    def after(self, message: delayd.AsyncMessage, result: object) -> None:
        self.notes.append((self.name, "after", result))

    def error(self, message: delayd.AsyncMessage, exception: BaseException) -> None:
        self.notes.append((self.name, "error", type(exception)))


class AsyncNotes:
    """The same with coroutines."""

    def __init__(self, name: str, notes: list[tuple[object, ...]]) -> None:
        self.inner = Notes(name, notes)

    async def before(self, message: delayd.AsyncMessage) -> None:
        await asyncio.sleep(0)
        self.inner.before(message)

    async def after(self, message: delayd.AsyncMessage, result: object) -> None:
        await asyncio.sleep(0)
        self.inner.after(message, result)

    async def error(self, message: delayd.AsyncMessage, exception: BaseException) -> None:
        await asyncio.sleep(0)
        self.inner.error(message, exception)


def played(handler: Callable[..., Any], *middleware: object, counted: int = 0) -> None:
    """One message is handled until it is acknowledged."""

    async def scenario(world: World) -> None:
        world.realtime.add(b"x")
        worker = worker_of(world, middleware=middleware)
        worker.on(SUBJECT, group=GROUP)(handler)
        async with serving(worker):
            await settled(world, 1, counted)

    on_loop(scenario)


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_errors_are_told_in_reverse_and_a_retry_is_one(is_coroutine: bool) -> None:
    notes: list[tuple[object, ...]] = []
    tries: list[bytes] = []

    def fails_first(body: bytes) -> None:
        tries.append(body)
        if len(tries) == 1:
            raise delayd.Retry

    async def fails_first_on_loop(body: bytes) -> None:
        fails_first(body)

    handler = fails_first_on_loop if is_coroutine else fails_first
    played(handler, Notes("a", notes), AsyncNotes("b", notes), counted=1)
    assert notes[:4] == [
        ("a", "before", b"x"),
        ("b", "before", b"x"),
        ("b", "error", delayd.Retry),
        ("a", "error", delayd.Retry),
    ]


def test_a_before_that_raises_counts_as_the_handler_and_only_those_that_had_begun_hear_of_it() -> None:
    notes: list[tuple[object, ...]] = []

    class Refuses:
        def __init__(self) -> None:
            self.refused = False

        def before(self, message: delayd.AsyncMessage) -> None:
            if not self.refused:
                self.refused = True
                raise PermissionError

    handled: list[bytes] = []
    played(handled.append, Notes("a", notes), Refuses(), Notes("c", notes), counted=1)
    assert notes[:2] == [("a", "before", b"x"), ("a", "error", PermissionError)]
    assert handled == [b"x"], "the first attempt did not reach the handler"


def test_an_after_that_raises_changes_nothing_because_the_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def after(self, message: delayd.AsyncMessage, result: object) -> None:
            raise SystemExit("no")

    notes: list[tuple[object, ...]] = []
    played(lambda body: 1, Notes("a", notes), Fails())
    assert notes[-1] == ("a", "after", 1)
    assert "middleware_failed middleware=Fails hook=after" in caplog.text


WINDOW = timedelta(seconds=1)


def test_a_worker_without_a_slot_gives_its_lead_up_after_the_window(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, bytes]] = []
    hang = threading.Event()

    def worker_of(number: int, address: str) -> delayd.Worker:
        worker = delayd.Worker(address, drain=timedelta(0))

        @worker.on("s", group="g", concurrency=2, exclusive=WINDOW, time_limit=timedelta(seconds=0.1))
        def handle(body: bytes) -> None:
            seen.append((number, body))
            if number == 1:
                hang.wait(DEADLINE_S)

        return worker

    with InMemoryBroker(tick=True) as broker, broker.producer() as producer, caplog.at_level(logging.ERROR):
        workers = [worker_of(number, broker.address) for number in (1, 2)]
        threads = [threading.Thread(target=worker.run) for worker in workers]
        try:
            threads[0].start()
            producer.send("s", b"1", delay=timedelta(0))
            wait_until(lambda: seen == [(1, b"1")])
            threads[1].start()
            producer.send("s", b"2", delay=timedelta(0))
            # One of two slots is lost: the lead stays where it is.
            wait_until(lambda: (1, b"2") in seen)
            producer.send("s", b"3", delay=timedelta(0))
            wait_until(lambda: (2, b"3") in seen)
        finally:
            hang.set()
            for worker, thread in zip(workers, threads, strict=True):
                worker.stop()
                if thread.ident is not None:
                    thread.join()
    assert (1, b"3") not in seen
    assert [record.message for record in caplog.records if record.message.startswith("lead_given_up")] == [
        "lead_given_up subject=s group=g lost=2"
    ]


# Longer than a steady loop's time goes on while the machine stands still.
TIME_LIMIT = timedelta(milliseconds=120)


Made = Callable[[Callable[..., Any]], Callable[..., Any]]


def plain(work: Callable[..., Any]) -> Callable[..., Any]:
    return work


def coroutine(work: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(body: Any) -> Any:
        return work(body)

    return handle


KINDS = pytest.mark.parametrize("kind", [plain, coroutine])


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
def test_messages_of_handlers_that_outlast_the_drain_go_back_uncounted(kind: Made) -> None:
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

    monkeypatch.setattr("delayd.worker.verdicts.Settler.settle", broken)

    async def scenario(world: World) -> None:
        add_messages(world, 1)
        worker = worker_of(world, drain_s=0)
        worker.on(SUBJECT, group=GROUP)(lambda body: None)
        with pytest.raises(ZeroDivisionError):
            await worker.serve()

    on_loop(scenario)
