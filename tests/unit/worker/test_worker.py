"""Workers: what a handler gets, and handlers, middlewares and servers that fail."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

import delayd
from delayd.errors import BadArgument
from delayd.testing import InMemoryBroker
from tests.unit.client.world import THREADS_AT_A_FORK, World, on_loop
from tests.waiting import DEADLINE_S, until, wait_until

SUBJECT, GROUP = "orders", "g"
AT_ONCE = timedelta(0)
QUICK = delayd.Backoff(first=timedelta(milliseconds=20), most=timedelta(milliseconds=60), jitter=0)
TIME_LIMIT = timedelta(milliseconds=120)


class Shop:
    """A worker beside servers in memory. What it left of the messages is known once it has stopped."""

    def __init__(self, broker: InMemoryBroker, middleware: tuple[object, ...], drain: timedelta) -> None:
        self.broker = broker
        self.worker = delayd.Worker(broker.address, middleware=middleware, drain=drain)
        self.on = functools.partial(self.worker.on, group=GROUP, backoff=QUICK)
        self.failed: list[ZeroDivisionError] = []
        self._thread = threading.Thread(target=self._run)

    def work(self, *bodies: bytes) -> None:
        """Have these messages, and a worker for them from now on."""
        with self.broker.producer() as producer:
            for body in bodies:
                producer.send(SUBJECT, body, delay=AT_ONCE)
        self._thread.start()

    def stop(self) -> None:
        if self._thread.ident is not None:
            self.worker.stop()
            self._thread.join()

    def left(self) -> list[tuple[bytes, int]]:
        """What its group still has to do: body and attempt."""
        self.stop()
        with self.broker.consumer(SUBJECT, GROUP) as consumer:
            batch = consumer.pull(wait=timedelta(milliseconds=300))
            return [(message.body, message.attempt) for message in batch]

    def _run(self) -> None:
        try:
            self.worker.run()
        except ZeroDivisionError as error:
            self.failed.append(error)


@contextmanager
def shop(*middleware: object, drain: timedelta = timedelta(seconds=30)) -> Iterator[Shop]:
    with InMemoryBroker(tick=True) as broker:
        made = Shop(broker, middleware, drain)
        try:
            yield made
        finally:
            made.stop()


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
        (message_alone, (f"{SUBJECT}.3", b"x")),
        (coroutine, (b"x", b"x")),
        (others, (b"x", 3, ())),
        (functools.partial(bound, 1), (1, b"x")),
        (functools.partial(coroutine), (b"x", b"x")),
        (Called(seen), b"x"),
        (seen.append, b"x"),
    ]


def test_a_handler_gets_what_its_parameters_ask_for() -> None:
    seen: list[list[object]] = []
    expected: list[object] = []
    with InMemoryBroker(tick=True) as broker, broker.producer() as producer:
        worker = delayd.Worker(broker.address)
        for number in range(len(handlers([]))):
            seen.append([])
            handler, gets = handlers(seen[-1])[number]
            expected.append(gets)
            worker.on(f"{SUBJECT}.{number}", group=GROUP)(handler)
            producer.send(f"{SUBJECT}.{number}", b"x", delay=AT_ONCE)
        seen.append([])
        expected.append((b"x", b"x"))
        worker.on("named", group=GROUP, pass_message=True)(lambda body, m: seen[-1].append((body, m.body)))
        producer.send("named", b"x", delay=AT_ONCE)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            wait_until(lambda: all(seen), lambda: seen)
        finally:
            worker.stop()
            thread.join()
    assert seen == [[each] for each in expected]


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
    errors = {b"none": ValueError(), b"long": ValueError("x" * 10_000), b"unspeakable": Unspeakable()}
    told: dict[bytes, str] = {}
    with shop() as made:

        @made.on(SUBJECT)
        def handle(body: bytes, message: delayd.AsyncMessage) -> None:
            if message.attempt == 1:
                raise errors[body]
            told[body] = message.last_error

        made.work(*errors)
        wait_until(lambda: len(told) == 3)
    assert told[b"none"] == "ValueError" and "Unspeakable" in told[b"unspeakable"] and len(told[b"long"]) == 4_096


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


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_errors_are_told_in_reverse_and_a_retry_is_one(is_coroutine: bool) -> None:
    notes: list[tuple[object, ...]] = []

    def fails_first(body: bytes, message: delayd.AsyncMessage) -> None:
        if message.attempt == 1:
            raise delayd.Retry

    async def fails_first_on_loop(body: bytes, message: delayd.AsyncMessage) -> None:
        fails_first(body, message)

    with shop(Notes("a", notes), AsyncNotes("b", notes)) as made:
        made.on(SUBJECT)(fails_first_on_loop if is_coroutine else fails_first)
        made.work(b"x")
        wait_until(lambda: len(notes) == 8)
        assert made.left() == []
    began = [("a", "before", b"x"), ("b", "before", b"x")]
    assert notes[:4] == [*began, ("b", "error", delayd.Retry), ("a", "error", delayd.Retry)]
    assert notes[4:6] == began and {note[1] for note in notes[6:]} == {"after"}


def test_a_before_that_raises_counts_as_the_handler_and_only_those_that_had_begun_hear_of_it() -> None:
    notes: list[tuple[object, ...]] = []
    handled: list[bytes] = []

    class Refuses:
        def before(self, message: delayd.AsyncMessage) -> None:
            if message.attempt == 1:
                raise PermissionError

    with shop(Notes("a", notes), Refuses(), Notes("c", notes)) as made:
        made.on(SUBJECT)(handled.append)
        made.work(b"x")
        wait_until(lambda: bool(handled))
    assert notes[:2] == [("a", "before", b"x"), ("a", "error", PermissionError)]
    assert handled == [b"x"], "the first attempt did not reach the handler"


def test_an_after_that_raises_changes_nothing_because_the_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def after(self, message: delayd.AsyncMessage, result: object) -> None:
            raise SystemExit("no")

    notes: list[tuple[object, ...]] = []
    with shop(Notes("a", notes), Fails()) as made:
        made.on(SUBJECT)(lambda body: 1)
        made.work(b"x")
        wait_until(lambda: len(notes) == 2)
        assert made.left() == []
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


@pytest.mark.filterwarnings(THREADS_AT_A_FORK)
def test_a_process_that_a_handler_forks_ends_with_the_handler() -> None:
    children: list[int] = []

    def handle(body: bytes) -> None:
        child = os.fork()
        if child:
            children.append(child)

    with shop() as made:
        made.on(SUBJECT)(handle)
        made.work(b"x")
        wait_until(lambda: bool(children))
        pid, status = os.waitpid(children[0], 0)
        assert pid == children[0] and os.waitstatus_to_exitcode(status) == 0
        assert made.left() == []


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_handler_over_its_time_limit_keeps_its_slot_and_loses_its_message(
    is_coroutine: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    go_on, tries = threading.Event(), list[bytes]()

    def hangs(body: bytes) -> None:
        tries.append(body)
        if len(tries) == 1:
            go_on.wait()

    async def swallows(body: bytes) -> None:
        tries.append(body)
        while len(tries) == 1 and not go_on.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass

    with shop() as made:
        made.on(SUBJECT, concurrency=1, time_limit=TIME_LIMIT)(swallows if is_coroutine else hangs)
        made.work(b"0", b"1")
        wait_until(lambda: "slot_lost" in caplog.text)
        time.sleep(0.1)
        assert len(tries) == 1, "the only slot is lost"
        go_on.set()
        wait_until(lambda: len(tries) == 3)
        assert made.left() == []
    assert sorted(tries) in ([b"0", b"0", b"1"], [b"0", b"1", b"1"])
    assert "slot_free_again" in caplog.text
    assert "not_acknowledged" not in caplog.text, "the message is settled once"


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_messages_of_handlers_that_outlast_the_drain_go_back_uncounted(is_coroutine: bool) -> None:
    began, go_on = list[bytes](), threading.Event()

    async def slow(body: bytes) -> None:
        began.append(body)
        await asyncio.sleep(3600)

    def slow_thread(body: bytes) -> None:
        began.append(body)
        go_on.wait()

    with shop(drain=timedelta(milliseconds=30)) as made:
        made.on(SUBJECT)(slow if is_coroutine else slow_thread)
        made.work(b"x")
        wait_until(lambda: bool(began))
        assert made.left() == [(b"x", 1)]
        go_on.set()


def test_when_serve_is_cancelled_the_messages_go_back_uncounted() -> None:
    async def scenario(made: Shop) -> None:
        began = asyncio.Event()

        @made.on(SUBJECT)
        async def slow(body: bytes) -> None:
            began.set()
            await asyncio.sleep(3600)

        async with delayd.AsyncProducer(made.broker.address) as producer:
            await producer.send(SUBJECT, b"x", delay=AT_ONCE)
        serve = asyncio.get_running_loop().create_task(made.worker.serve())
        await began.wait()
        serve.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serve

    with shop() as made:
        asyncio.run(scenario(made))
        assert made.left() == [(b"x", 1)]


def test_acknowledgements_that_fail_are_logged_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        world.realtime.add(b"x")
        worker, began, go_on = delayd.Worker(world.address), list[bytes](), asyncio.Event()

        @worker.on(SUBJECT, group=GROUP)
        async def handle(body: bytes) -> None:
            began.append(body)
            await go_on.wait()

        serve = asyncio.get_running_loop().create_task(worker.serve())
        await until(lambda: bool(began))
        world.realtime.end_leases()
        go_on.set()
        await until(lambda: "not_acknowledged" in caplog.text)
        world.realtime.add(b"next")
        await until(lambda: {*world.realtime.acked} == {0, 1})
        worker.stop()
        await serve

    on_loop(scenario)
    assert "stale_handle" in caplog.text


def test_a_coroutine_that_blocks_the_loop_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayd.worker.worker.TICK_S", 0.01)
    monkeypatch.setattr("delayd.worker.worker.BLOCKED_S", 0.05)
    with shop() as made:

        @made.on(SUBJECT)
        async def blocks(body: bytes) -> None:
            time.sleep(0.2)  # noqa: ASYNC251 - what nobody should do.

        made.work(b"x")
        wait_until(lambda: "loop_blocked" in caplog.text)
    assert "blocks" in caplog.text


def test_a_bug_of_the_worker_ends_serve_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("delayd.worker.verdicts.Settler.settle", broken)
    with shop(drain=AT_ONCE) as made:
        made.on(SUBJECT)(lambda body: None)
        made.work(b"x")
        wait_until(lambda: bool(made.failed))
    assert isinstance(made.failed[0], ZeroDivisionError)
