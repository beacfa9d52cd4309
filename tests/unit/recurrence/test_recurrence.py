"""A recurrence: its occurrences, its bounds and its calendar, and its form for msgpack."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import msgpack
import pytest

import delayd
from delayd.errors import BadArgument, BadRequest, NaiveDatetime
from delayd.hours import instant_text
from delayd.recurrence.recurrence import SEARCH_MS, Recurrence

YEARS_2_MS = 731 * 86_400_000


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000)


def shown(instants: list[int]) -> list[str]:
    return [instant_text(each)[:16] for each in instants]


def test_a_line_fires_at_local_times_of_its_zone() -> None:
    recurrence = delayd.Recurrence(cron="0 9 * * MON-FRI", timezone="Europe/Berlin")
    found = shown(recurrence.preview(3, ms("2027-03-26T00:00Z")))
    assert found == ["2027-03-26T08:00", "2027-03-29T07:00", "2027-03-30T07:00"]


@pytest.mark.parametrize(
    ("line", "options", "spring", "autumn"),
    [
        ("30 2 * * *", {}, ["01:00"], ["00:30"]),
        ("30 2 * * *", {"gap": "skip", "fold": "last"}, [], ["01:30"]),
        ("30 2 * * *", {"fold": "both"}, ["01:00"], ["00:30", "01:30"]),
        ("0,30 2 * * *", {}, ["01:00"], ["00:00", "00:30"]),
        ("0 2,3 * * *", {}, ["01:00"], ["00:00", "02:00"]),
        ("30 1-3 * * *", {}, ["00:30", "01:00", "01:30"], ["00:30", "02:30"]),
        ("30 * * * *", {}, ["00:30", "01:30", "02:30"], ["00:30", "01:30", "02:30"]),
        ("30 * * * *", {"gap": "shift", "fold": "first"}, ["00:30", "01:00", "01:30", "02:30"], ["00:30", "02:30"]),
    ],
)
def test_clocks_that_change_in_berlin(line: str, options: dict[str, Any], spring: list[str], autumn: list[str]) -> None:
    recurrence = Recurrence(cron=line, timezone="Europe/Berlin", **options)
    for day, expected in (("2027-03-28", spring), ("2027-10-31", autumn)):
        found = recurrence.between(ms(f"{day}T00:00Z") - 1, ms(f"{day}T02:59Z"))
        assert [instant_text(each)[11:16] for each in found] == expected


def test_an_interval_counts_elapsed_time_from_its_anchor_in_both_directions() -> None:
    anchor = datetime(2027, 3, 28, 0, 17, tzinfo=UTC)
    recurrence = Recurrence(every=timedelta(hours=5), anchor=anchor, timezone="Europe/Berlin")
    found = recurrence.preview(3, ms("2027-03-27T20:00Z"))
    assert shown(found) == ["2027-03-28T00:17", "2027-03-28T05:17", "2027-03-28T10:17"]
    assert Recurrence(every=timedelta(days=90)).next_after(0) == 90 * 86_400_000
    started = Recurrence(every=timedelta(hours=5), starts_at=anchor)
    assert shown(started.preview(2, 0)) == ["2027-03-28T00:17", "2027-03-28T05:17"]


def test_dates_that_are_skipped_and_dates_alone_are_local_ones() -> None:
    # In Auckland the 25th begins when it is noon of the 24th in UTC.
    holidays = [date(2027, 12, 25), date(2027, 12, 26)]
    line = Recurrence(cron="0 8 * * *", timezone="Pacific/Auckland", skip_dates=holidays)
    assert shown(line.preview(2, ms("2027-12-23T00:00Z"))) == ["2027-12-23T19:00", "2027-12-26T19:00"]
    alone = Recurrence(cron="0 8 * * *", timezone="Pacific/Auckland", only_dates=holidays)
    assert shown(alone.preview(5, 0)) == ["2027-12-24T19:00", "2027-12-25T19:00"]
    steady = Recurrence(every=timedelta(hours=8), timezone="Pacific/Auckland", only_dates=holidays[:1])
    assert shown(steady.preview(5, 0)) == ["2027-12-24T16:00", "2027-12-25T00:00", "2027-12-25T08:00"]


def test_a_zone_that_skipped_a_whole_day_fires_once_when_the_gap_is_over() -> None:
    only = Recurrence(cron="0 9 * * *", timezone="Pacific/Apia", only_dates=[date(2011, 12, 30)])
    assert shown(only.preview(3, 0)) == ["2011-12-30T10:00"], "00:00 of the 31st there"
    assert Recurrence(cron="0 9 30 12 *", timezone="Pacific/Apia", gap="skip").next_after(
        ms("2011-01-01T00:00Z")
    ) == ms("2012-12-29T19:00Z")


def test_the_first_and_the_last_instant_are_included() -> None:
    bounded = Recurrence(
        cron="@hourly",
        starts_at=datetime(2027, 1, 1, 3, tzinfo=UTC),
        until=datetime(2027, 1, 1, 6, tzinfo=timezone(timedelta(hours=1))),
    )
    assert shown(bounded.preview(9, 0)) == ["2027-01-01T03:00", "2027-01-01T04:00", "2027-01-01T05:00"]
    assert bounded.next_after(ms("2027-01-01T05:00Z")) is None


def test_a_preview_ends_when_as_many_have_run_as_may() -> None:
    recurrence = Recurrence(cron="@daily", max_occurrences=5)
    assert len(recurrence.preview(9, 0)) == 5
    assert len(recurrence.preview(9, 0, ran=3)) == 2
    assert recurrence.preview(9, 0, ran=5) == []


def test_a_preview_of_a_rare_line_looks_further_than_one_search() -> None:
    found = Recurrence(cron="0 0 * 2 MON#5").preview(3, ms("2027-01-01T00:00Z"))
    assert shown(found) == ["2044-02-29T00:00", "2072-02-29T00:00", "2112-02-29T00:00"]
    with pytest.raises(BadArgument, match="1 to 10000"):
        Recurrence(cron="@daily").preview(0, 0)


def test_nothing_fires_behind_the_end_of_the_calendar() -> None:
    assert Recurrence(cron="@daily").next_after(ms("9997-12-31T00:00Z")) is not None
    assert Recurrence(cron="@daily").next_after(ms("9998-01-02T00:00Z")) is None
    assert Recurrence(every=timedelta(days=700), timezone="Europe/Berlin").next_after(ms("9999-12-31T00:00Z")) is None


def test_jitter_is_the_same_everywhere_differs_by_name_and_stays_in_its_bounds() -> None:
    recurrence = Recurrence(cron="* * * * *", jitter=timedelta(seconds=30))
    instants = recurrence.preview(1_000, 0)
    late = [recurrence.due_ms("report", each) - each for each in instants]
    assert late[:3] == [recurrence.due_ms("report", each) - each for each in instants[:3]]
    assert recurrence.due_ms("report", 1_800_000_000_000) == 1_800_000_016_735, "other servers must agree"
    assert 0 <= min(late) < 1_000 and 29_000 < max(late) <= 30_000
    assert late != [recurrence.due_ms("other", each) - each for each in instants]
    assert Recurrence(cron="* * * * *").due_ms("report", 60_000) == 60_000


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "say cron= or every="),
        ({"cron": "@daily", "every": timedelta(hours=1)}, "one of them only"),
        ({"cron": "@daily", "fold": "twice"}, "fold must be one of first, last, both"),
        ({"cron": "@daily", "gap": "shut"}, "gap must be one of shift, skip"),
        ({"every": timedelta(hours=1), "gap": "skip"}, "gap= is for a cron line"),
        ({"cron": "@daily", "anchor": datetime(2027, 1, 1, tzinfo=UTC)}, "anchor= is for every="),
        ({"every": timedelta(milliseconds=999)}, "every is 999ms and must lie within 1s and 731d"),
        ({"every": timedelta(days=732)}, "must lie within"),
        ({"every": timedelta(seconds=1, microseconds=1)}, "whole milliseconds"),
        ({"every": 5}, "every must be a timedelta, not int"),
        ({"cron": "@daily", "jitter": timedelta(days=2)}, "jitter is"),
        ({"cron": "@daily", "max_occurrences": 0}, "max_occurrences must be a whole number"),
        ({"cron": "@daily", "max_occurrences": True}, "max_occurrences must be a whole number"),
        ({"cron": "@daily", "timezone": "Mars/Base"}, "timezone 'Mars/Base' is not known"),
        ({"cron": "@daily", "skip_dates": ["2027-12-25"]}, "must be dates such as"),
        ({"cron": "@daily", "skip_dates": "2027-12-25"}, "must be a list of dates"),
        ({"cron": "@daily", "skip_dates": [datetime(2027, 1, 1, tzinfo=UTC)]}, "must be dates such as"),
        ({"cron": "@daily", "only_dates": [date.fromordinal(800_000 - i) for i in range(1_001)]}, "more than 1000"),
        ({"cron": "@daily", "skip_dates": [date(2027, 1, 1)], "only_dates": [date(2027, 1, 2)]}, "not both"),
        ({"cron": "@daily", "starts_at": "now"}, "starts_at must be a datetime"),
        ({"cron": "@daily", "until": datetime(1969, 1, 1, tzinfo=UTC)}, "must lie between 1970 and 9997"),
        (
            {
                "cron": "@daily",
                "starts_at": datetime(2028, 1, 1, tzinfo=UTC),
                "until": datetime(2027, 1, 1, tzinfo=UTC),
            },
            "is before starts_at",
        ),
    ],
)
def test_what_no_recurrence_has_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadArgument) as refused:
        Recurrence(**options)
    assert told in str(refused.value)


def test_a_datetime_without_a_zone_is_refused() -> None:
    with pytest.raises(NaiveDatetime, match="starts_at"):
        Recurrence(cron="@daily", starts_at=datetime(2027, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize(
    "options",
    [
        {"cron": "0 0 */31 * MON#2"},
        {"cron": "0 12 25 12 *", "only_dates": [date(2027, 12, 24)]},
        {
            "cron": "0 12 25 12 *",
            "starts_at": datetime(2027, 1, 1, tzinfo=UTC),
            "until": datetime(2027, 6, 1, tzinfo=UTC),
        },
        {"cron": "0 0 29 2 *", "until": datetime(2003, 1, 1, tzinfo=UTC)},
    ],
)
def test_what_never_fires_is_refused_when_it_is_made_and_soon(options: dict[str, Any]) -> None:
    begun = time.thread_time()
    with pytest.raises(BadArgument, match="never fires"):
        Recurrence(**options)
    assert time.thread_time() - begun < 2


def test_a_line_that_does_not_fire_any_more_says_so_after_a_bounded_search() -> None:
    rare = Recurrence(cron="30 6 1 1 *", only_dates=[date(2027, 1, 1)])
    assert rare.next_after(ms("2027-01-02T00:00Z")) is None
    begun = time.thread_time()
    assert Recurrence(cron="0 0 29 2 MON", skip_dates=[]).next_after(ms("2027-01-01T00:00Z")) is not None
    assert time.thread_time() - begun < 2


def test_two_years_of_each_minute_are_counted_without_being_listed() -> None:
    recurrence = Recurrence(cron="* * * * *", timezone="America/New_York")
    from_ms = ms("2027-01-01T00:00Z")
    begun = time.thread_time()
    assert recurrence.count(from_ms, from_ms + YEARS_2_MS) == 731 * 1440
    assert recurrence.newest(2, from_ms, from_ms + YEARS_2_MS)[1] == from_ms + YEARS_2_MS
    # Some milliseconds; a list of a million instants would take a hundred times as long.
    assert time.thread_time() - begun < 2
    assert next(recurrence.between(from_ms, from_ms + SEARCH_MS)) == from_ms + 60_000


FULL = Recurrence(
    cron="0  9 * * MON-FRI",
    timezone="Europe/Berlin",
    fold="last",
    gap="skip",
    skip_dates=[date(2027, 12, 26), date(2027, 12, 25), date(2027, 12, 25)],
    jitter=timedelta(minutes=5),
    starts_at=datetime(2027, 1, 1, tzinfo=UTC),
    until=datetime(2029, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    max_occurrences=100,
)


@pytest.mark.parametrize(
    "recurrence",
    [
        FULL,
        Recurrence(cron="@daily"),
        Recurrence(every=timedelta(minutes=5), anchor=datetime(2027, 1, 1, 0, 2, tzinfo=UTC)),
        Recurrence(every=timedelta(minutes=5), only_dates=[date(2027, 1, 1)]),
    ],
)
def test_a_recurrence_comes_back_equal_from_msgpack(recurrence: Recurrence) -> None:
    again = Recurrence.decoded(msgpack.unpackb(msgpack.packb(recurrence.encoded())))
    assert again == recurrence and hash(again) == hash(recurrence)
    assert again.preview(20, 0) == recurrence.preview(20, 0)


def test_the_encoded_form_stays_as_it_is() -> None:
    assert Recurrence(cron="@daily").encoded() == {"v": 1, "c": "@daily"}
    assert FULL.encoded() == {
        "v": 1,
        "c": "0 9 * * MON-FRI",
        "z": "Europe/Berlin",
        "f": "last",
        "g": "skip",
        "x": [21177, 21178],
        "j": 300_000,
        "s": ms("2027-01-01T00:00Z"),
        "u": ms("2029-01-01T00:00Z") + 1,
        "n": 100,
    }


@pytest.mark.parametrize(
    ("encoded", "told"),
    [
        ({}, "version None"),
        ({"v": 2, "c": "@daily"}, "version 2, and 1 is known here; upgrade"),
        ({"v": True, "c": "@daily"}, "version True"),
        ({"v": 1, "c": "@daily", "q": 1}, "a field 'q', which is not known here"),
        ({"v": 1, "c": 5}, "cron of a recurrence has a wrong type, int"),
        ({"v": 1, "e": "5"}, "every of a recurrence has a wrong type"),
        ({"v": 1, "e": 1 << 63}, "every of a recurrence is out of range"),
        ({"v": 1, "c": "@daily", "x": ["a"]}, "skip_dates of a recurrence has a wrong type"),
        ({"v": 1, "c": "@daily", "x": [1 << 62]}, "skip_dates of a recurrence is out of range"),
        ({"v": 1, "c": "@daily", "s": 1 << 62}, "starts_at of a recurrence is out of range"),
        ({"v": 1, "c": "@daily", "n": True}, "max_occurrences of a recurrence has a wrong type"),
    ],
)
def test_a_map_that_is_no_recurrence_is_refused(encoded: Mapping[str, object], told: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Recurrence.decoded(encoded)
    assert told in str(refused.value)


def test_a_recurrence_is_equal_to_one_with_the_same_instants_and_dates() -> None:
    there = timezone(timedelta(hours=2))
    one = Recurrence(cron="@daily", starts_at=datetime(2027, 1, 1, 2, tzinfo=there), only_dates=[date(2027, 1, 5)])
    assert one == Recurrence(
        cron="@daily", starts_at=datetime(2027, 1, 1, tzinfo=UTC), only_dates=(date(2027, 1, 5), date(2027, 1, 5))
    )
    assert one != Recurrence(cron="@daily", only_dates=[date(2027, 1, 5)])
    for a, b in itertools.combinations([FULL, one, Recurrence(cron="@daily")], 2):
        assert a != b
