"""Exclusive groups: one consumer at a time."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

import pytest

import delayd
from tests.conformance.public.desk import AT_ONCE, LONG, MOMENT, Desk
from tests.waiting import holds_in_time


def test_one_leads_and_the_other_takes_over_when_it_goes(desk: Desk) -> None:
    desk.send(b"1", b"2")
    other = desk.consumer(exclusive=True)
    with delayd.Consumer(desk.address, desk.subject, "g", exclusive=True) as lead:
        message = lead.pull(1, wait=LONG)[0]
        assert desk.is_empty(other)
    # What the lead held comes again, and what it says of that is refused.
    taken = desk.take(other, 2)
    assert {each.body: each.attempt for each in taken} == {b"1": 2, b"2": 1}
    with pytest.raises(delayd.StaleHandle) as caught:
        message.ack()
    assert caught.value.reason == "fenced"
    for each in taken:
        each.ack()


def test_a_lead_goes_on_as_long_as_it_lives(desk: Desk) -> None:
    groups = count()

    def judged(window: timedelta) -> None:
        group = f"g{next(groups)}"
        desk.send(b"1")
        with (
            desk.consumer(group, exclusive=window, start="latest") as lead,
            desk.consumer(group, exclusive=window) as other,
        ):
            lead.pull(wait=AT_ONCE)
            desk.send(b"2")
            desk.one(lead).ack()
            # The window passes, and the lead has asked for nothing in it.
            assert not len(other.pull(wait=1.5 * window))
            desk.send(b"3")
            assert desk.one(lead).body == b"3"

    # A lead that stands still for a window is rightly replaced.
    holds_in_time(timedelta(seconds=1), judged, delayd.DelaydError)


@pytest.mark.parametrize("way", ["alone", "list", "pattern"])
def test_who_would_share_an_exclusive_group_is_refused_and_nobody_leads_one_that_is_shared(
    desk: Desk, way: str
) -> None:
    ways: dict[str, str | list[str]] = {"list": [desk.subject], "pattern": f"{desk.subject}.>"}
    subject = ways.get(way, desk.subject)
    led = f"{desk.subject}.led" if way == "pattern" else desk.subject
    desk.producer.send(led, b"1", delay=AT_ONCE)
    desk.one(desk.consumer(subject=led, exclusive=True)).ack()
    with pytest.raises(delayd.errors.ExclusiveConflict):
        desk.consumer(subject=subject).pull(wait=MOMENT)
    if way == "alone":
        return  # Who comes to a group that others have left leads it.
    desk.producer.send(led, b"2", delay=AT_ONCE)
    desk.one(desk.consumer("shared", subject=subject)).ack()
    with pytest.raises(delayd.errors.ExclusiveConflict):
        desk.consumer("shared", subject=led, exclusive=True).pull(wait=AT_ONCE)


@pytest.mark.parametrize("window", [timedelta(0), timedelta(hours=1), 5])
def test_a_window_that_is_none_is_refused(desk: Desk, window: Any) -> None:
    with pytest.raises(delayd.errors.BadSetting, match="exclusive"):
        desk.consumer(exclusive=window)


def test_an_exclusive_consumer_takes_one_subject(desk: Desk) -> None:
    with pytest.raises(delayd.errors.BadSetting, match="one subject"):
        desk.consumer(subject=[desk.subject, "other"], exclusive=True)
