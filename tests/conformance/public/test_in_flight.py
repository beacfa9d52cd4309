"""How many messages all consumers of a group hold together."""

from __future__ import annotations

from datetime import timedelta

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, LONG, NEXT, Desk

SHORT = timedelta(milliseconds=300)  # A lease that ends.


def test_all_consumers_of_a_group_hold_no_more_than_its_bound(desk: Desk) -> None:
    desk.send(b"1", b"2", b"3", b"4")
    one, other = (desk.consumer(group_max_in_flight=2) for _ in range(2))
    held = desk.take(one, 2)
    assert desk.is_empty(other)
    held[0].ack()
    (third,) = desk.take(other)
    assert desk.is_empty(one) and desk.is_empty(other)
    third.reject("no")
    assert len(desk.take(one)) == 1


def test_a_message_that_came_again_counts(desk: Desk) -> None:
    desk.send(b"1", b"2")
    consumer = desk.consumer(group_max_in_flight=1)
    first = desk.one(consumer)
    first.nack(NEXT)
    second = desk.one(consumer)
    assert desk.is_empty(consumer)
    second.ack()
    assert {first.body, second.body} | {desk.one(consumer).body} == {b"1", b"2"}


def test_another_group_has_no_such_bound(desk: Desk) -> None:
    desk.send(b"1", b"2")
    desk.take(desk.consumer(group_max_in_flight=1))
    assert len(desk.take(desk.consumer("h"), 2)) == 2


def test_the_bound_holds_when_leases_end(desk: Desk) -> None:
    desk.send(b"1", b"2")
    left = desk.one(desk.consumer(group_max_in_flight=1, lease=SHORT))
    other = desk.consumer(group_max_in_flight=1)
    again = desk.one(other)
    assert again.attempt > left.attempt and not len(other.pull(wait=AT_ONCE))


def test_an_extension_that_is_refused_gives_its_place_back(desk: Desk) -> None:
    desk.send(b"1")
    consumer = desk.consumer(max_in_flight=1)
    late = desk.one(consumer)
    late.extend(SHORT)
    again = desk.one(consumer)
    assert again.attempt == 2, "the lease of the first one has ended"
    with pytest.raises(delayd.errors.StaleHandle):
        late.extend(LONG * 100)
    again.nack(AT_ONCE)
    assert desk.one(consumer).attempt == 3


def test_a_group_keeps_its_bound_when_a_consumer_does_not_name_it(desk: Desk) -> None:
    desk.send(b"1", b"2", b"3")
    first = desk.one(desk.consumer(group_max_in_flight=1))
    assert desk.is_empty(desk.consumer())
    first.ack()
    desk.one(desk.consumer()).ack()
