"""A worker calls handlers for due messages, and acknowledges for them."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

import delayd
from delayd import errors
from tests.conformance.public.desk import AT_ONCE, Desk
from tests.waiting import DEADLINE_S, holds_in_time

QUICK = delayd.Backoff(first=timedelta(milliseconds=20), most=timedelta(milliseconds=60), jitter=0)
TIME_TO_COME_AGAIN = timedelta(milliseconds=300)  # What must not come again would have come, most of the time.


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


@each_kind
def test_a_handler_sees_the_key_of_a_message_in_each_of_its_lives(desk: Desk, kind: str) -> None:
    worker, seen = delayd.Worker(desk.address), list[tuple[bytes, int, str | None]]()

    def handle(body: Any, message: Any) -> None:
        seen.append((body, message.attempt, message.key))
        if len(seen) == 4:
            worker.stop()
        if message.attempt == 1:
            raise delayd.Retry(after=timedelta(milliseconds=20))

    worker.on(desk.subject, group="g")(_handler(kind, handle))
    desk.send(b"1", key="order-1")
    desk.send(b"2")
    _serve(worker)
    assert sorted(seen) == [
        *((b"1", attempt, "order-1") for attempt in (1, 2)),
        *((b"2", attempt, None) for attempt in (1, 2)),
    ]


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
            return
        desk.send(b"last", delay=TIME_TO_COME_AGAIN)
        if failure == "reject":
            raise delayd.Reject("no such order")
        else:
            raise ValueError("it failed")

    worker.on(desk.subject, group="g", max_attempts=1, backoff=QUICK)(_handler(kind, handle))
    desk.send(b"bad")
    _serve(worker)
    assert seen == [b"bad", b"last"]
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


def test_a_function_that_is_slower_than_its_lease_runs_once_and_the_log_says_so(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    groups = count()

    def judged(lease: timedelta) -> None:
        group = f"g{next(groups)}"
        worker, seen = delayd.Worker(desk.address, group=group), list[tuple[bytes, int]]()

        @worker.on(desk.subject, lease=lease, max_attempts=3, backoff=QUICK)
        def handle(body: bytes, message: delayd.Message) -> None:
            seen.append((body, message.attempt))
            time.sleep(3 * lease.total_seconds())  # It is the handler's work that takes so long.
            worker.stop()

        _serve(worker)
        assert seen == [(b"slow", 1)]
        assert desk.is_empty(desk.consumer(group))
        told = [record.getMessage() for record in caplog.records if "handler_slow" in record.getMessage()]
        told = [line for line in told if f"subject={desk.subject} group={group} handler=" in line]
        assert len(told) == 1 and "time_limit=" in told[0]

    desk.send(b"slow")
    # A worker that stands still for as long as a lease can't extend it.
    holds_in_time(timedelta(milliseconds=300), judged)


WORDS: dict[str, Callable[[delayd.Message], None]] = {
    "ack": lambda message: message.ack(),
    "ack soon": lambda message: message.ack(wait=False),
    "nack": lambda message: message.nack(timedelta(milliseconds=30), error="not now"),
    "reject": lambda message: message.reject("never"),
}


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
@pytest.mark.parametrize("word", WORDS)
def test_a_function_may_settle_its_message_itself(
    desk: Desk, word: str, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker, seen = delayd.Worker(desk.address), list[tuple[bytes, int]]()

    @worker.on(desk.subject, group="g", backoff=QUICK, concurrency=1)
    def handle(body: bytes, message: delayd.Message) -> None:
        assert isinstance(message, delayd.Message)
        seen.append((body, message.attempt))
        if body == b"last":
            worker.stop()
            return
        if word != "nack" or message.attempt == 2:
            desk.send(b"last", delay=TIME_TO_COME_AGAIN)
        if message.attempt == 1:
            WORDS[word](message)
            if fails:
                raise ValueError("it failed after it had settled the message")

    desk.send(b"1")
    _serve(worker)
    again = [(b"1", 2)] if word == "nack" else []
    assert seen == [(b"1", 1), *again, (b"last", 1)]
    assert not [record for record in caplog.records if "not_acknowledged" in record.getMessage()]


def test_a_coroutine_may_settle_its_message_itself(desk: Desk) -> None:
    worker, seen = delayd.Worker(desk.address), list[bytes]()

    @worker.on(desk.subject, group="g")
    async def handle(body: bytes, message: delayd.AsyncMessage) -> None:
        assert isinstance(message, delayd.AsyncMessage)
        seen.append(body)
        if body == b"last":
            worker.stop()
        else:
            await message.extend(timedelta(minutes=1))
            await message.reject("never")
            desk.send(b"last", delay=TIME_TO_COME_AGAIN)

    desk.send(b"1")
    _serve(worker)
    assert seen == [b"1", b"last"]


def test_a_function_holds_its_message_for_as_long_as_it_says(desk: Desk) -> None:
    groups = count()

    def judged(lease: timedelta) -> None:
        group, seen = f"g{next(groups)}", list[int]()
        worker = delayd.Worker(desk.address)

        @worker.on(desk.subject, group=group, lease=lease, time_limit=lease * 0.8, concurrency=2, backoff=QUICK)
        def handle(body: bytes, message: delayd.Message) -> None:
            seen.append(message.attempt)
            message.extend(timedelta(seconds=30))
            message.ack()
            worker.stop()

        _serve(worker)
        assert seen == [1] and desk.is_empty(desk.consumer(group))

    desk.send(b"1")
    # The message of a function that stands still for its time limit goes back.
    holds_in_time(timedelta(milliseconds=200), judged)


MEETING: list[tuple[str | list[str], str | list[str]]] = [
    ("a.b", "a.b"),
    ("a.b", "a.*"),
    ("a.*", "a.b"),
    (["x", "a.b"], "a.>"),
    (["x", "a.b"], ["a.b", "y"]),
    ("a.*", "*.b"),
    ("a.>", "*.b.c"),
    (">", "a"),
    ("*.b.>", "a.>"),
]
APART: list[tuple[str | list[str], str | list[str]]] = [
    ("a.b", "a.c"),
    ("a.b", "b.*"),
    ("a.*", "a.b.>"),
    ("a.*", "b.*"),
    ("*.a", "*.b"),
    ("a.>", "a"),
    (["x", "y"], ["z", "a.*.c"][:1]),
]


@pytest.mark.parametrize(("first", "second"), MEETING, ids=str)
def test_handlers_of_one_group_that_may_get_one_message_are_refused_by_name(
    first: str | list[str], second: str | list[str]
) -> None:
    worker = delayd.Worker("127.0.0.1:1")

    def one(body: bytes) -> None: ...

    def another(body: bytes) -> None: ...

    worker.on(first, group="g")(one)
    with pytest.raises(errors.BadArgument, match=r"one already handles .* give .*another another group"):
        worker.on(second, group="g")(another)
    worker.on(second, group="h")(another)
    assert len(worker.handlers) == 2


@pytest.mark.parametrize(("first", "second"), APART, ids=str)
def test_handlers_of_one_group_that_get_no_message_of_each_other_are_taken(
    first: str | list[str], second: str | list[str]
) -> None:
    worker = delayd.Worker("127.0.0.1:1", group="g")
    worker.on(first)(print)
    worker.on(second)(print)
    assert len(worker.handlers) == 2


def test_a_worker_has_a_group_for_handlers_that_name_none(desk: Desk) -> None:
    worker = delayd.Worker(desk.address, group="mine")
    worker.on("a")(print)
    worker.on("b", group="other")(print)
    assert [handler.settings.group for handler in worker.handlers] == ["mine", "other"]
    with pytest.raises(errors.BadArgument, match=r"Worker\(group="):
        delayd.Worker(desk.address).on("a")


def test_a_worker_calls_its_hooks_before_the_first_message_and_after_the_last(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    worker, seen = delayd.Worker(desk.address, group="g"), list[str]()

    @worker.on_start
    async def open_pool() -> None:
        await asyncio.sleep(0)
        seen.append("pool")

    @worker.on_start
    def open_file() -> None:
        seen.append("file")

    @worker.on_stop
    def close_pool() -> None:
        seen.append("pool closed")

    @worker.on_stop
    async def close_file() -> None:
        seen.append("file closed")
        raise ValueError("it is closed already")

    @worker.on(desk.subject)
    def handle(body: bytes) -> None:
        seen.append("message")
        worker.stop()

    desk.send(b"1")
    _serve(worker)
    assert seen == ["pool", "file", "message", "file closed", "pool closed"]
    assert sum("hook_failed" in record.getMessage() for record in caplog.records) == 1


def test_a_worker_whose_start_fails_says_so_and_stops() -> None:
    worker, seen = delayd.Worker("127.0.0.1:1", group="g"), list[str]()
    worker.on("a")(print)
    worker.on_stop(lambda: seen.append("stopped"))

    @worker.on_start
    def fails() -> None:
        raise ConnectionError("no database")

    with pytest.raises(ConnectionError, match="no database"):
        _serve(worker)
    assert seen == ["stopped"]


def test_a_run_where_an_event_loop_runs_names_what_to_say_there(recwarn: pytest.WarningsRecorder) -> None:
    worker = delayd.Worker("127.0.0.1:1", group="g")
    worker.on("a")(print)

    async def notebook() -> None:
        with pytest.raises(errors.WrongLoop, match=r"await worker\.serve"):
            worker.run()

    asyncio.run(notebook())
    assert not recwarn.list, "no coroutine is left that nobody has awaited"


@each_kind
def test_the_log_of_a_failure_tells_the_origin_and_when_the_message_comes_again(
    desk: Desk, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker, again = delayd.Worker(desk.address), timedelta(milliseconds=40)

    def handle(found: Any, message: Any) -> None:
        if message.attempt == 3:
            worker.stop()
        raise ValueError("it failed")

    backoff = delayd.Backoff(first=again, most=again, jitter=0)
    worker.on(desk.subject, group="g", max_attempts=3, backoff=backoff)(_handler(kind, handle))
    (receipt,) = desk.send(b"1")
    _serve(worker)
    told = [record.getMessage().partition("\n")[0] for record in caplog.records if "origin=" in record.getMessage()]
    origin = f"origin={receipt.sequence} attempt="
    assert [line.partition(origin)[2] for line in told] == [
        "1 again_in_s=0.04",
        "2 again_in_s=0.04",
        "3 again_in_s=never",
        "3 reason='its attempts are over'",
    ]
