"""How many messages all consumers of a group hold together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.conformance.public.desk import AT_ONCE, NEXT, Desk


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
    settings: dict[str, Any] = {"group_max_in_flight": 1, "lease": timedelta(seconds=1)}
    assert desk.one(desk.consumer(**settings)).attempt == 1
    other = desk.consumer(**settings)
    again = desk.one(other)
    assert again.attempt == 2 and not len(other.pull(wait=AT_ONCE))
