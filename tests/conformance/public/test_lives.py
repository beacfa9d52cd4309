"""A message that a group gave back is followed by the receipt of its send."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import delayd
from delayd import MessageInfo
from tests.conformance.public.desk import AT_ONCE, LATER, Desk
from tests.waiting import wait_until

STATE = delayd.MessageState
ANSWER = delayd.CancelAnswer


@pytest.fixture
def told(desk: Desk) -> Callable[[delayd.Receipt], MessageInfo]:
    """What became of a message for the group."""
    return lambda receipt: desk.producer.get(desk.subject, receipt=receipt, group="g")


def put_off(desk: Desk) -> delayd.Receipt:
    """A message that its group has put off; another group has acknowledged it."""
    (receipt,) = desk.send(b"1", key="one")
    desk.one(desk.consumer("other")).ack()
    desk.one(desk.consumer()).nack(LATER)
    wait_until(lambda: state(desk, receipt) is STATE.PENDING)
    return receipt


def state(desk: Desk, receipt: delayd.Receipt, group: str | None = "g") -> delayd.MessageState:
    return desk.producer.get(desk.subject, receipt=receipt, group=group).state


def test_a_message_that_waits_to_come_again_is_seen(desk: Desk, told: Callable[[delayd.Receipt], MessageInfo]) -> None:
    receipt = put_off(desk)
    assert told(receipt).deliver_at_ms > receipt.deliver_at_ms + 1_000_000
    assert desk.producer.get(desk.subject, key="one", group="g").state is STATE.PENDING
    assert state(desk, receipt, "other") is STATE.DISPATCHED
    assert state(desk, receipt, None) is STATE.DISPATCHED


def test_it_is_ended_for_its_group_alone(desk: Desk) -> None:
    receipt = put_off(desk)
    assert desk.producer.cancel(desk.subject, receipt=receipt, group="other") is ANSWER.ALREADY_DISPATCHED
    assert desk.producer.cancel(desk.subject, receipt=receipt, group="g") is ANSWER.CANCELLED
    assert state(desk, receipt) is not STATE.PENDING
    assert desk.producer.cancel(desk.subject, receipt=receipt, group="g") is not ANSWER.CANCELLED


def test_no_other_message_of_the_group_is_meant(desk: Desk) -> None:
    receipts = desk.send(b"1", b"2", b"3")
    for message in desk.take(desk.consumer(), 3):
        message.nack(LATER)
    wait_until(lambda: all(state(desk, receipt) is STATE.PENDING for receipt in receipts))
    assert desk.producer.cancel(desk.subject, receipt=receipts[1], group="g") is ANSWER.CANCELLED
    assert [state(desk, receipt) is STATE.PENDING for receipt in receipts] == [True, False, True]


def test_it_is_moved_over_all_its_lives(desk: Desk) -> None:
    receipt = put_off(desk)
    moved = desk.producer.reschedule(desk.subject, receipt=receipt, group="g", delay=AT_ONCE)
    assert moved.answer is delayd.RescheduleAnswer.MOVED
    again = desk.one(desk.consumer())
    assert (again.body, again.attempt) == (b"1", 2)
    again.nack(LATER)
    wait_until(lambda: state(desk, receipt) is STATE.PENDING)
    moved = desk.producer.reschedule(desk.subject, receipt=receipt, group="g", delay=2 * LATER)
    assert moved.answer is delayd.RescheduleAnswer.MOVED
    assert state(desk, receipt) is STATE.PENDING


def test_a_dead_letter_is_told_as_dead_and_comes_again_when_it_is_moved(desk: Desk) -> None:
    receipt = put_off(desk)
    desk.producer.reschedule(desk.subject, receipt=receipt, group="g", delay=AT_ONCE)
    desk.one(desk.consumer()).reject("no")
    wait_until(lambda: state(desk, receipt) is STATE.DEAD)
    moved = desk.producer.reschedule(desk.subject, receipt=receipt, group="g", delay=AT_ONCE)
    assert moved.answer is delayd.RescheduleAnswer.MOVED
    desk.one(desk.consumer()).ack()
    assert state(desk, receipt) is STATE.DISPATCHED


def test_what_was_not_handed_over_belongs_to_all_groups(desk: Desk) -> None:
    (receipt,) = desk.send(b"1", delay=LATER)
    assert state(desk, receipt) is STATE.PENDING
    for change in (desk.producer.cancel, lambda *a, **k: desk.producer.reschedule(*a, delay=LATER, **k)):
        with pytest.raises(delayd.BadArgument, match="leave out group="):
            change(desk.subject, receipt=receipt, group="g")
    assert desk.producer.cancel(desk.subject, receipt=receipt) is ANSWER.CANCELLED
    assert desk.producer.cancel(desk.subject, receipt=receipt, group="g") is ANSWER.CANCELLED


def test_a_group_that_nobody_knows_is_named(desk: Desk) -> None:
    receipt = put_off(desk)
    with pytest.raises(delayd.BadArgument, match="has a group never"):
        desk.producer.get(desk.subject, receipt=receipt, group="never")
