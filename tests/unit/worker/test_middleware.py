"""Middleware: what is called, in which order, and that nothing that it does harms a message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import delayd
from tests.unit.client.world import World, on_loop
from tests.unit.worker.workers import GROUP, SUBJECT, serving, settled, worker_of


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


async def returns(body: bytes) -> int:
    return 42


@pytest.mark.parametrize("handler", [lambda body: 42, returns], ids=["function", "coroutine"])
def test_all_are_called_in_order_and_back(handler: Callable[..., Any]) -> None:
    notes: list[tuple[object, ...]] = []
    played(handler, Notes("a", notes), AsyncNotes("b", notes))
    assert notes == [("a", "before", b"x"), ("b", "before", b"x"), ("b", "after", 42), ("a", "after", 42)]


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


def test_the_functions_of_a_middleware_run_in_the_thread_of_the_handler() -> None:
    threads: list[int] = []

    class Where:
        def before(self, message: delayd.AsyncMessage) -> None:
            threads.append(threading.get_ident())

        def after(self, message: delayd.AsyncMessage, result: object) -> None:
            threads.append(threading.get_ident())

    played(lambda body: threads.append(threading.get_ident()), Where())
    assert len(threads) == 3 and len(set(threads)) == 1 and threads[0] != threading.get_ident()


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("sent", [TRACE, TRACE.encode()])
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_the_trace_of_a_message_is_that_of_its_handler_and_of_no_other(sent: str | bytes, is_coroutine: bool) -> None:
    seen: list[tuple[bytes, str]] = []

    def handle(body: bytes) -> None:
        seen.append((body, delayd.traceparent.get()))

    async def handle_on_loop(body: bytes) -> None:
        handle(body)

    async def scenario(world: World) -> None:
        world.realtime.add(b"traced", headers={"traceparent": sent})
        world.realtime.add(b"untraced")
        world.realtime.add(b"misnamed", headers={"traceparent": "yes"})
        world.realtime.add(b"damaged", headers=b"\x93traceparent")
        worker = worker_of(world)
        worker.on(SUBJECT, group=GROUP, concurrency=1)(handle_on_loop if is_coroutine else handle)
        async with serving(worker):
            await settled(world, 4)

    on_loop(scenario)
    assert sorted(seen) == [(b"damaged", ""), (b"misnamed", ""), (b"traced", TRACE), (b"untraced", "")]
