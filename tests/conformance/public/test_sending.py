"""What is sent comes, whole, once, at its time, to each group."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, LATER, LONG, SOON, Desk


def _in_ms(delay: timedelta) -> dict[str, Any]:
    return {"deliver_at_ms": time.time_ns() // 1_000_000 + delay // timedelta(milliseconds=1)}


WAYS: dict[str, Callable[[timedelta], dict[str, Any]]] = {
    "delay": lambda delay: {"delay": delay},
    "instant": lambda delay: {"deliver_at": datetime.now(UTC) + delay},
    "ms": _in_ms,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("delay", [AT_ONCE, SOON, timedelta(milliseconds=150)], ids=["now", "soon", "later"])
def test_a_message_never_comes_early(desk: Desk, way: str, delay: timedelta) -> None:
    receipt = desk.producer.send(desk.subject, b"1", **WAYS[way](delay))
    message = desk.one(desk.consumer())
    assert time.time_ns() // 1_000_000 >= message.deliver_at_ms == receipt.deliver_at_ms
    assert message.late_ms >= 0
    message.ack()


@pytest.mark.parametrize("past", [timedelta(seconds=1), timedelta(days=365)], ids=["a second", "a year"])
def test_an_instant_that_is_past_is_due_at_once(desk: Desk, past: timedelta) -> None:
    receipt = desk.producer.send(desk.subject, b"1", deliver_at=datetime.now(UTC) - past)
    assert receipt.was_due
    desk.one(desk.consumer()).ack()


def test_a_receipt_is_the_same_after_a_token(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", delay=LATER)
    read = delayd.Receipt.of_token(receipt.token)
    assert read == receipt
    assert desk.producer.cancel(desk.subject, receipt=read) is delayd.CancelAnswer.CANCELLED


@pytest.mark.parametrize("count", [1, 2, 100, 3_000])
def test_each_message_of_a_batch_comes_once(desk: Desk, count: int) -> None:
    receipt = desk.producer.send_batch(desk.subject, [b"%d" % row for row in range(count)], delay=AT_ONCE)
    assert len(receipt) == count
    consumer = desk.consumer()
    found: list[bytes] = []
    while len(found) < count:
        batch = consumer.pull(1000, wait=LONG)
        found += batch.bodies
        batch.ack()
    assert sorted(found, key=int) == [b"%d" % row for row in range(count)]
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("column", [list, np.array], ids=["list", "numpy"])
def test_a_batch_has_an_instant_for_each_message(desk: Desk, column: Callable[[list[int]], Any]) -> None:
    now_ms = time.time_ns() // 1_000_000
    wanted = [now_ms + 60, now_ms - 1_000, now_ms + 30]
    desk.producer.send_batch(desk.subject, [b"0", b"1", b"2"], column(wanted))
    messages = desk.take(desk.consumer(), 3)
    assert {message.body: message.deliver_at_ms for message in messages} == {
        b"%d" % row: at_ms for row, at_ms in enumerate(wanted)
    }


def test_a_batch_has_headers_for_each_message(desk: Desk) -> None:
    desk.producer.send_batch(desk.subject, [b"0", b"1"], delay=AT_ONCE, headers=[{"row": "0"}, None])
    messages = desk.take(desk.consumer(), 2)
    assert {message.body: dict(message.headers) for message in messages} == {b"0": {"row": "0"}, b"1": {}}


def test_subjects_do_not_mix(desk: Desk) -> None:
    desk.send(b"mine")
    desk.producer.send(f"{desk.subject}.other", b"other", delay=AT_ONCE)
    consumer = desk.consumer()
    assert desk.one(consumer).body == b"mine"
    assert desk.is_empty(consumer)


@pytest.mark.parametrize("spread", [timedelta(milliseconds=50), timedelta(days=7)], ids=["short", "a week"])
def test_a_spread_chooses_an_instant_of_its_window(desk: Desk, spread: timedelta) -> None:
    due = datetime.now(UTC) + LATER
    receipt = desk.producer.send(desk.subject, b"1", deliver_at=due, spread=spread)
    assert due - timedelta(milliseconds=1) <= receipt.deliver_at <= due + spread
    desk.producer.cancel(desk.subject, receipt=receipt)


@pytest.mark.parametrize("tags", [["a"], ["a", "b", "c"], ["ü"], [str(number) for number in range(16)]], ids=len)
def test_a_message_with_tags_is_found_by_each_of_them(desk: Desk, tags: list[str]) -> None:
    desk.send(b"1", delay=LATER, tags=tags)
    desk.send(b"2", delay=LATER, tags=["another"])
    for tag in tags:
        assert desk.producer.cancel_where(desk.subject, tag=tag).found == 1
    assert desk.producer.cancel_where(desk.subject, tag="nobody has it").found == 0


def test_an_expiry_comes_with_the_message(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", ttl=LATER)
    message = desk.one(desk.consumer())
    assert message.expires_at is not None
    assert abs(message.expires_at - receipt.deliver_at - LATER) <= timedelta(milliseconds=1)
