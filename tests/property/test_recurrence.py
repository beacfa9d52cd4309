"""Laws of recurrences and of decisions about them, for random lines, policies and outages.

croniter is the oracle for lines in UTC, where no clock changes: it shares no code with what parses them here.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from random import Random
from typing import Any

from croniter import croniter
from hypothesis import given, settings
from hypothesis import strategies as st

import delayd
from delayd.recurrence.deciding import ON_TIME_MS, RunDecision, RunPolicy, SkipReason, decide

DAY_MS = 86_400_000
YEAR_2027_MS = 1_798_761_600_000
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Africa/Cairo"]


def field(least: int, most: int) -> st.SearchStrategy[str]:
    number = st.integers(least, most)
    # croniter reads a range of one number as all numbers.
    ends = st.tuples(number, number).filter(lambda both: both[0] < both[1])
    ranges = ends.map(lambda both: f"{both[0]}-{both[1]}")
    stepped = st.tuples(ranges, st.integers(1, most)).map(lambda both: f"{both[0]}/{both[1]}")
    listed = st.lists(st.one_of(number.map(str), ranges, stepped), min_size=1, max_size=3).map(",".join)
    return st.one_of(st.just("*"), listed)


# Both kinds of days are limited in one of them at most: croniter reads `*/2` beside a day of the week in its own way.
days = st.one_of(
    st.tuples(field(1, 28), st.just("*")),
    st.tuples(st.just("*"), field(0, 6)),
    st.tuples(field(1, 28).filter(lambda text: text != "*"), field(0, 6).filter(lambda text: text != "*")),
    st.sampled_from([("L", "*"), ("*", "MON"), ("*", "TUE-THU")]),
)
lines = st.tuples(field(0, 59), field(0, 23), days, field(1, 12)).map(
    lambda parts: f"{parts[0]} {parts[1]} {parts[2][0]} {parts[3]} {parts[2][1]}"
)


@settings(max_examples=150, deadline=None)
@given(lines, st.integers(0, 4 * 365 * DAY_MS))
def test_a_line_in_utc_fires_when_croniter_says_so(line: str, after_ms: int) -> None:
    at = YEAR_2027_MS + after_ms
    oracle = croniter(line, datetime.fromtimestamp(at // 1000, UTC))
    expected = [int(oracle.get_next(datetime).timestamp()) * 1000 for _ in range(5)]
    assert delayd.Recurrence(cron=line).preview(5, at) == expected


def options_of(seconds: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    in_zones = st.tuples(lines, st.sampled_from(ZONES), st.sampled_from([None, "first", "last", "both"]))
    return st.one_of(
        in_zones.map(lambda told: {"cron": told[0], "timezone": told[1], "fold": told[2]}),
        seconds.map(lambda each: {"every": timedelta(seconds=each)}),
    )


recurrences = options_of(st.integers(1, 3 * 86_400))


@settings(max_examples=150, deadline=None)
@given(recurrences, st.integers(0, 365), st.integers(1, 40), st.integers(1, 50))
def test_counting_looking_back_and_stepping_agree_with_listing(
    options: dict[str, Any], first_day: int, span_days: int, most: int
) -> None:
    recurrence = delayd.Recurrence(**options)
    from_ms = YEAR_2027_MS + first_day * DAY_MS
    to_ms = from_ms + (min(span_days, 2) if "every" in options else span_days) * DAY_MS
    listed = list(recurrence.between(from_ms, to_ms))
    assert all(one < other for one, other in pairwise(listed))
    assert all(from_ms < each <= to_ms for each in listed)
    assert recurrence.count(from_ms, to_ms) == len(listed)
    assert recurrence.newest(most, from_ms, to_ms) == listed[-most:]
    for before, after in list(pairwise([from_ms, *listed]))[-3:]:
        assert recurrence.next_after(before) == recurrence.next_after(after - 1) == after
    assert delayd.Recurrence.decoded(recurrence.encoded()) == recurrence


policies = st.builds(
    RunPolicy,
    misfire=st.sampled_from(["last", "all", "skip"]),
    catchup=st.one_of(st.none(), st.integers(0, 48).map(lambda hours: timedelta(hours=hours))),
    catchup_max=st.integers(1, 5),
    overlap=st.sampled_from(["all", "skip"]),
)


@settings(max_examples=200, deadline=None)
@given(
    options_of(st.integers(600, 9 * 86_400)), policies, st.integers(0, 2**32), st.one_of(st.none(), st.integers(1, 30))
)
def test_each_occurrence_is_decided_once_whatever_stops_in_between(
    options: dict[str, Any], policy: RunPolicy, seed: int, most: int | None
) -> None:
    """A life of steps and outages. Some decisions are lost in a crash, and are made again a little later."""
    random = Random(seed)
    recurrence = delayd.Recurrence(**options, max_occurrences=most)
    begun_ms = decided_ms = YEAR_2027_MS + random.randrange(365 * DAY_MS)
    now_ms, ran, kept = begun_ms, 0, list[RunDecision]()
    for _ in range(30):
        now_ms += random.choice([1, 40_000, 3_600_000, DAY_MS, 9 * DAY_MS, -500_000])
        if random.random() < 0.3:
            now_ms = (recurrence.next_after(now_ms) or now_ms) - random.choice([0, 1])
        paused, busy = random.random() < 0.2, random.random() < 0.3
        decision = decide(recurrence, policy, decided_ms, now_ms, ran=ran, paused=paused, busy=busy)
        if random.random() < 0.2:
            continue  # It was lost.
        kept.append(decision)
        decided_ms, ran = decision.decided_ms, ran + len(decision.run)
        if decision.next_ms is None:
            break
    runs = [instant for decision in kept for instant in decision.run]
    skips = [skip for decision in kept for skip in decision.skipped]
    assert runs == sorted({*runs}), "none runs twice, nor before an older one"
    assert most is None or len(runs) <= most
    end_ms = runs[-1] if most is not None and len(runs) == most else decided_ms
    spans = sorted([(each, each) for each in runs] + [(skip.first_ms, skip.last_ms) for skip in skips])
    assert all(one[1] < other[0] for one, other in pairwise(spans)), "none is both skipped and run, or skipped twice"
    for skip in skips:
        assert skip.count == recurrence.count(skip.first_ms - 1, skip.last_ms)
        assert recurrence.next_after(skip.first_ms - 1) == skip.first_ms
        assert recurrence.next_after(skip.last_ms - 1) == skip.last_ms
    decided = len(runs) + sum(skip.count for skip in skips if skip.last_ms <= end_ms)
    assert decided == recurrence.count(begun_ms, end_ms), "each one runs, or is skipped"


@settings(max_examples=100, deadline=None)
@given(recurrences, policies, st.integers(1, 20 * DAY_MS), st.booleans())
def test_what_runs_is_young_enough_and_few_rows_say_what_does_not(
    options: dict[str, Any], policy: RunPolicy, outage_ms: int, busy: bool
) -> None:
    recurrence, now_ms = delayd.Recurrence(**options), YEAR_2027_MS + outage_ms
    decision = decide(recurrence, policy, YEAR_2027_MS, now_ms, busy=busy)
    missed = [instant for instant in decision.run if instant <= now_ms - ON_TIME_MS]
    assert len(missed) <= {"last": 1, "all": policy.catchup_max, "skip": 0}[policy.misfire]
    if policy.catchup is not None:
        assert all(now_ms - instant <= policy.catchup / timedelta(milliseconds=1) for instant in missed)
    assert len(decision.skipped) <= 3
    if policy.overlap == "skip":
        assert len(decision.run) <= (0 if busy else 1)
    if any(skip.reason == SkipReason.SUPERSEDED for skip in decision.skipped) and not busy:
        assert decision.run, "one ran for those that were superseded"
