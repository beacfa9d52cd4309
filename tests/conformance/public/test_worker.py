"""A worker calls handlers for due messages, and acknowledges for them."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, Desk
from tests.waiting import DEADLINE_S

QUICK = delayd.Backoff(first=timedelta(milliseconds=20), most=timedelta(milliseconds=60), jitter=0)


def _serve(worker: delayd.Worker) -> None:
    """Serve until a handler stops the worker."""

    async def bounded() -> None:
        await asyncio.wait_for(worker.serve(), DEADLINE_S)

    asyncio.run(bounded())


def _handler(
    kind: str, handle: Callable[[Any, Any], None]
) -> Callable[[Any, Any], None] | Callable[[Any, Any], Coroutine[Any, Any, None]]:
    async def waits(body: Any, message: Any) -> None:
        handle(body, message)

    def works(body: Any, message: Any) -> None:
        handle(body, message)

    return waits if kind == "coroutine" else works


each_kind = pytest.mark.parametrize("kind", ["function", "coroutine"])


@each_kind
@pytest.mark.parametrize(
    ("decode", "body", "decoded"),
    [("bytes", b"1", b"1"), ("json", b'{"a": [1]}', {"a": [1]}), ("msgpack", b"\x93\x01\x02\x03", [1, 2, 3])],
    ids=["bytes", "json", "msgpack"],
)
def test_a_handler_gets_what_was_sent(desk: Desk, kind: str, decode: Any, body: bytes, decoded: object) -> None:
    worker, seen = delayd.Worker(desk.address), list[Any]()

    def handle(found: Any, message: Any) -> None:
        seen.append((found, message.subject))
        worker.stop()

    worker.on(desk.subject, group="g", decode=decode)(_handler(kind, handle))
    desk.send(body)
    _serve(worker)
    assert seen == [(decoded, desk.subject)]
    assert desk.is_empty(desk.consumer())


FAILURES: dict[str, Callable[[], BaseException]] = {
    "any error": lambda: ValueError("it failed"),
    "retry": lambda: delayd.Retry(error="it failed"),
    "retry after": lambda: delayd.Retry(after=timedelta(milliseconds=30), error="it failed"),
}


@each_kind
@pytest.mark.parametrize("failure", FAILURES)
def test_a_handler_that_fails_gets_the_message_again(desk: Desk, kind: str, failure: str) -> None:
    worker, attempts = delayd.Worker(desk.address), list[tuple[int, bool]]()

    def handle(found: Any, message: Any) -> None:
        attempts.append((message.attempt, "it failed" in message.last_error))
        if message.attempt < 3:
            raise FAILURES[failure]()
        worker.stop()

    worker.on(desk.subject, group="g", backoff=QUICK)(_handler(kind, handle))
    desk.send(b"1")
    _serve(worker)
    assert attempts == [(1, False), (2, True), (3, True)]
    assert desk.is_empty(desk.consumer())


@pytest.mark.parametrize("days", [2, 4_000])
def test_a_handler_that_asks_for_too_long_a_wait_gets_the_message_by_its_back_off(desk: Desk, days: int) -> None:
    worker, attempts = delayd.Worker(desk.address), list[int]()

    def handle(found: Any, message: Any) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise delayd.Retry(after=timedelta(days=days))
        worker.stop()

    worker.on(desk.subject, group="g", ordered=True, backoff=QUICK)(_handler("function", handle))
    desk.send(b"1")
    _serve(worker)
    assert attempts == [1, 2]


@each_kind
@pytest.mark.parametrize("failure", ["reject", "attempts over"])
def test_a_message_that_is_given_up_does_not_come_again(desk: Desk, kind: str, failure: str) -> None:
    worker, seen = delayd.Worker(desk.address), list[bytes]()

    def handle(found: Any, message: Any) -> None:
        seen.append(found)
        if found == b"last":
            worker.stop()
        elif failure == "reject":
            raise delayd.Reject("no such order")
        else:
            raise ValueError("it failed")

    worker.on(desk.subject, group="g", max_attempts=1, backoff=QUICK)(_handler(kind, handle))
    desk.send(b"bad")
    desk.producer.send(desk.subject, b"last", delay=timedelta(milliseconds=300))
    _serve(worker)
    assert sorted(seen) == [b"bad", b"last"]
    assert desk.is_empty(desk.consumer())


@each_kind
def test_each_message_is_handled_once(desk: Desk, kind: str) -> None:
    worker, seen = delayd.Worker(desk.address), list[int]()

    def handle(found: Any, message: Any) -> None:
        seen.append(int(found))
        if len(seen) == 200:
            worker.stop()

    worker.on(desk.subject, group="g", concurrency=4)(_handler(kind, handle))
    desk.producer.send_batch(desk.subject, [b"%d" % row for row in range(200)], delay=AT_ONCE)
    _serve(worker)
    assert sorted(seen) == [*range(200)]
    assert desk.is_empty(desk.consumer())


@pytest.mark.parametrize("settings", [{"tags_any": ["new"]}, {"tags_any": ["new"], "exclusive": True}], ids=str)
def test_a_handler_gets_what_its_group_wants(desk: Desk, settings: dict[str, Any]) -> None:
    worker, seen = delayd.Worker(desk.address), list[bytes]()

    @worker.on(desk.subject, group="g", **settings)
    def handle(body: bytes) -> None:
        seen.append(body)
        worker.stop()

    desk.send(b"old")
    desk.send(b"new", tags=["new"])
    _serve(worker)
    assert seen == [b"new"]


def test_a_group_works_on_no_more_messages_than_its_bound(desk: Desk) -> None:
    worker, at_work, most, done = delayd.Worker(desk.address), 0, 0, 0

    @worker.on(desk.subject, group="g", concurrency=8, group_max_in_flight=2)
    async def handle(body: bytes) -> None:
        nonlocal at_work, most, done
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.005)
        at_work, done = at_work - 1, done + 1
        if done == 20:
            worker.stop()

    desk.producer.send_batch(desk.subject, [b""] * 20, delay=AT_ONCE)
    _serve(worker)
    assert most <= 2
