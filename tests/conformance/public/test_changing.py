"""Pending messages are cancelled, moved, replaced and asked about, by receipts and by keys."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import delayd
from delayd import CancelAnswer, MessageState, RescheduleAnswer, SendVerdict
from tests.conformance.public.desk import AT_ONCE, LATER, SOON, Desk
from tests.waiting import wait_until

NAMED: dict[str, Callable[[delayd.Receipt], dict[str, Any]]] = {
    "receipt": lambda receipt: {"receipt": receipt},
    "key": lambda receipt: {"key": "k"},
}

by_each_name = pytest.mark.parametrize("name", NAMED)


@by_each_name
def test_a_cancelled_message_never_comes(desk: Desk, name: str) -> None:
    (receipt,) = desk.send(b"1", delay=timedelta(milliseconds=300), key="k")
    answer = desk.producer.cancel(desk.subject, **NAMED[name](receipt))
    came = [b"2"]
    if answer is CancelAnswer.CANCELLED:
        assert desk.producer.get(desk.subject, receipt=receipt).state is MessageState.CANCELLED
    else:
        came.append(b"1")  # It was too late: this machine stood still for a moment.
    desk.send(b"2", delay=timedelta(milliseconds=350))
    consumer = desk.consumer()
    assert sorted(message.body for message in desk.take(consumer, len(came))) == sorted(came)
    assert desk.is_empty(consumer)


@by_each_name
def test_to_cancel_twice_is_to_cancel_once(desk: Desk, name: str) -> None:
    (receipt,) = desk.send(b"1", delay=LATER, key="k")
    answers = {desk.producer.cancel(desk.subject, **NAMED[name](receipt)) for _ in range(3)}
    assert answers == {CancelAnswer.CANCELLED}


@by_each_name
def test_a_message_that_has_left_is_not_cancelled(desk: Desk, name: str) -> None:
    (receipt,) = desk.send(b"1", key="k")
    desk.one(desk.consumer()).ack()
    wait_until(
        lambda: desk.producer.cancel(desk.subject, **NAMED[name](receipt)) is CancelAnswer.ALREADY_DISPATCHED,
        "the delay server hears that the message was taken",
    )
    assert desk.producer.get(desk.subject, receipt=receipt).state is MessageState.DISPATCHED


@by_each_name
@pytest.mark.parametrize("to", [SOON, timedelta(days=700)], ids=["earlier", "later"])
def test_a_moved_message_is_due_at_its_new_instant(desk: Desk, name: str, to: timedelta) -> None:
    (receipt,) = desk.send(b"1", delay=LATER, key="k")
    instant = datetime.now(UTC) + to
    moved = desk.producer.reschedule(desk.subject, **NAMED[name](receipt), deliver_at=instant)
    assert moved.answer is RescheduleAnswer.MOVED and moved.receipt is not None
    assert abs(moved.receipt.deliver_at - instant) < timedelta(milliseconds=2)
    if to == SOON:
        message = desk.one(desk.consumer())
        assert (message.body, message.deliver_at) == (b"1", moved.receipt.deliver_at)
    else:
        assert desk.producer.cancel(desk.subject, receipt=moved.receipt) is CancelAnswer.CANCELLED


def test_an_earlier_receipt_stands_for_a_moved_message(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", delay=LATER)
    desk.producer.reschedule(desk.subject, receipt=receipt, delay=2 * LATER)
    assert desk.producer.cancel(desk.subject, receipt=receipt) is CancelAnswer.CANCELLED


def test_if_unmoved_a_message_is_changed_only_as_its_receipt_says(desk: Desk) -> None:
    (first,) = desk.send(b"1", delay=LATER, key="k")
    ask = desk.producer
    second = ask.reschedule(desk.subject, receipt=first, delay=2 * LATER, if_unmoved=True).receipt
    assert second is not None
    assert ask.reschedule(desk.subject, receipt=first, delay=3 * LATER, if_unmoved=True).answer is (
        RescheduleAnswer.CHANGED
    )
    assert ask.cancel(desk.subject, receipt=first, if_unmoved=True) is CancelAnswer.CHANGED
    assert ask.get(desk.subject, receipt=first).deliver_at_ms == second.deliver_at_ms, "nothing was done"
    # An instant at which it is due already is no move.
    same = ask.reschedule(desk.subject, receipt=second, deliver_at_ms=second.deliver_at_ms, if_unmoved=True)
    assert same.answer is RescheduleAnswer.MOVED and same.receipt is not None
    assert ask.cancel(desk.subject, receipt=same.receipt, if_unmoved=True) is CancelAnswer.CANCELLED
    assert ask.cancel(desk.subject, receipt=same.receipt, if_unmoved=True) is CancelAnswer.CANCELLED, "asked again"
    for wrong in ({"key": "k"}, {"receipt": first, "group": "g"}, {}):
        with pytest.raises(delayd.BadArgument, match="if_unmoved"):
            ask.cancel(desk.subject, if_unmoved=True, **wrong)


@by_each_name
def test_a_pending_message_is_pending(desk: Desk, name: str) -> None:
    (receipt,) = desk.send(b"1", delay=LATER, key="k")
    info = desk.producer.get(desk.subject, **NAMED[name](receipt))
    assert info.state is MessageState.PENDING
    assert (info.deliver_at_ms, info.attempt, info.decided_at_ms) == (receipt.deliver_at_ms, 0, None)


def test_a_key_that_nobody_took_is_unknown(desk: Desk) -> None:
    assert desk.producer.cancel(desk.subject, key="nobody") is CancelAnswer.UNKNOWN
    assert desk.producer.get(desk.subject, key="nobody").state is MessageState.UNKNOWN
    assert desk.producer.reschedule(desk.subject, key="nobody", delay=LATER).receipt is None


def test_keep_keeps_the_earlier_message(desk: Desk) -> None:
    (first,) = desk.send(b"1", delay=SOON, key="k")
    (second,) = desk.send(b"2", delay=LATER, key="k", on_conflict="keep")
    assert (second.sequence == first.sequence) == second.kept
    if second.kept:
        consumer = desk.consumer()
        assert desk.one(consumer).body == b"1" and desk.is_empty(consumer)


def test_replace_ends_the_earlier_message(desk: Desk) -> None:
    (first,) = desk.send(b"1", delay=LATER, key="k")
    (second,) = desk.send(b"2", key="k", on_conflict="replace")
    assert second.replaced == first.sequence
    assert desk.producer.get(desk.subject, receipt=first).state is MessageState.REPLACED
    assert desk.one(desk.consumer()).body == b"2"


@pytest.mark.parametrize("key", ["a", "ü" * 100, b"\x01\x02" * 10, "k" * 200], ids=["one", "wide", "bytes", "long"])
def test_keys_of_all_kinds_name_their_messages(desk: Desk, key: str | bytes) -> None:
    desk.send(b"1", delay=LATER, key=key)
    assert desk.producer.cancel(desk.subject, key=key) is CancelAnswer.CANCELLED


def test_a_key_is_free_once_its_message_has_ended(desk: Desk) -> None:
    for _ in range(3):
        desk.send(b"1", delay=LATER, key="k")
        assert desk.producer.cancel(desk.subject, key="k") is CancelAnswer.CANCELLED


def test_a_key_is_of_its_subject_only(desk: Desk) -> None:
    desk.send(b"1", delay=LATER, key="k")
    desk.producer.send(f"{desk.subject}.other", b"1", delay=LATER, key="k")
    assert desk.producer.cancel(desk.subject, key="k") is CancelAnswer.CANCELLED
    assert desk.producer.get(f"{desk.subject}.other", key="k").state is MessageState.PENDING


@pytest.mark.parametrize("name", ["receipt", "keys"])
def test_many_messages_are_changed_at_once(desk: Desk, name: str) -> None:
    keys = [f"k{row}" for row in range(50)]
    receipt = desk.producer.send_batch(desk.subject, [b"1"] * 50, delay=LATER, keys=keys)
    named: dict[str, Any] = {"receipt": receipt} if name == "receipt" else {"keys": keys}
    assert set(desk.producer.get_batch(desk.subject, **named)["state"].tolist()) == {MessageState.PENDING}
    moved = desk.producer.reschedule_batch(desk.subject, **named, delay=2 * LATER)
    assert set(moved.answers.tolist()) == {RescheduleAnswer.MOVED}
    assert set(desk.producer.cancel_batch(desk.subject, **named).tolist()) == {CancelAnswer.CANCELLED}
    assert set(desk.producer.cancel_batch(desk.subject, receipt=moved).tolist()) == {CancelAnswer.CANCELLED}


def test_a_walk_counts_first_and_ends_messages_when_told(desk: Desk) -> None:
    receipts = desk.send(b"1", b"2", b"3", delay=LATER)
    assert desk.producer.cancel_where(desk.subject).found == 3
    assert desk.producer.get(desk.subject, receipt=receipts[0]).state is MessageState.PENDING
    assert desk.producer.cancel_where(desk.subject, dry_run=False).done == 3
    assert {desk.producer.get(desk.subject, receipt=each).state for each in receipts} == {MessageState.CANCELLED}


def test_a_walk_keeps_to_its_window(desk: Desk) -> None:
    now = datetime.now(UTC)
    for hours in (1, 2, 3):
        desk.producer.send(desk.subject, b"%d" % hours, deliver_at=now + timedelta(hours=hours))
    first, last = now + timedelta(hours=1.5), now + timedelta(hours=2.5)
    assert desk.producer.cancel_where(desk.subject, due_from=first, due_before=last, dry_run=False).done == 1
    assert desk.producer.cancel_where(desk.subject).found == 2


def test_a_walk_moves_what_it_finds(desk: Desk) -> None:
    desk.send(b"1", b"2", delay=LATER, tags=["t"])
    desk.producer.reschedule_where(desk.subject, shift=-2 * LATER, tag="t", dry_run=False)
    assert sorted(message.body for message in desk.take(desk.consumer(), 2)) == [b"1", b"2"]


def test_what_was_cancelled_is_not_moved(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", delay=LATER)
    desk.producer.cancel(desk.subject, receipt=receipt)
    answer = desk.producer.reschedule(desk.subject, receipt=receipt, delay=AT_ONCE).answer
    assert answer is not RescheduleAnswer.MOVED
    assert desk.is_empty(desk.consumer())


def test_the_rows_of_a_batch_meet_each_other_and_earlier_messages_in_their_order(desk: Desk) -> None:
    (earlier,) = desk.send(b"0", delay=LATER, key="a")
    rows: dict[str, Any] = {"delay": LATER, "keys": ["a", "b", "b"]}
    rejected = desk.producer.send_batch(desk.subject, [b"1", b"2", b"3"], **rows)
    assert rejected.verdicts.tolist() == [SendVerdict.REJECTED, SendVerdict.ACCEPTED, SendVerdict.REJECTED]
    assert rejected.others.tolist() == [earlier.sequence, 0, rejected.sequences[1]]
    assert rejected.others_at_ms.tolist()[0] == earlier.deliver_at_ms
    replaced = desk.producer.send_batch(desk.subject, [b"1", b"2", b"3"], **rows, on_conflict="replace")
    assert (replaced.verdicts == SendVerdict.REPLACED).all()
    assert replaced.others.tolist() == [earlier.sequence, rejected.sequences[1], replaced.sequences[1]]
    states = desk.producer.get_batch(desk.subject, receipt=replaced)["state"].tolist()
    assert states == [MessageState.PENDING, MessageState.REPLACED, MessageState.PENDING]


def test_a_receipt_that_no_server_gave_is_of_nothing(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", delay=LATER)
    forged = receipt._replace(sequence=receipt.sequence + 1_000_000)
    assert desk.producer.cancel(desk.subject, receipt=forged) is CancelAnswer.UNKNOWN
    assert desk.producer.reschedule(desk.subject, receipt=forged, delay=LATER).answer is RescheduleAnswer.UNKNOWN
    assert desk.producer.get(desk.subject, receipt=forged).state is MessageState.UNKNOWN
    with pytest.raises(delayd.UnknownServer):
        desk.producer.get(desk.subject, receipt=receipt._replace(log_id=delayd.LogId(5)))
    nothing = desk.producer.send_batch(desk.subject, [], delay=LATER)
    assert not len(desk.producer.cancel_batch(desk.subject, receipt=nothing))
    assert not len(desk.producer.get_batch(desk.subject, receipt=nothing))
    assert desk.producer.get(desk.subject, receipt=receipt).state is MessageState.PENDING
