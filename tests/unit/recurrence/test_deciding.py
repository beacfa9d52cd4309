"""Deciding: what runs and what is skipped under each policy."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest

from delayd.errors import BadArgument, BadRequest
from delayd.hours import instant_text
from delayd.recurrence.deciding import RunDecision, RunPolicy, SkippedRun, SkipReason, decide
from delayd.recurrence.recurrence import Recurrence

HOURLY = Recurrence(cron="0 * * * *", timezone="Europe/Berlin")
MINUTELY = Recurrence(cron="* * * * *", timezone="Europe/Berlin")


def ms(text: str) -> int:
    return int(datetime.fromisoformat(f"2027-01-01T{text}Z").timestamp() * 1000)


def hours(decision: RunDecision) -> list[str]:
    return [instant_text(each)[11:16] for each in decision.run]


def reasons(decision: RunDecision) -> list[tuple[str, str, str, int]]:
    return [
        (each.reason.value, instant_text(each.first_ms)[11:16], instant_text(each.last_ms)[11:16], each.count)
        for each in decision.skipped
    ]


@pytest.mark.parametrize(
    ("policy", "run", "skipped"),
    [
        ({}, ["08:00"], [("superseded", "03:00", "07:00", 5)]),
        ({"misfire": "skip"}, [], [("missed", "03:00", "08:00", 6)]),
        ({"misfire": "all"}, ["03:00", "04:00", "05:00", "06:00", "07:00", "08:00"], []),
        (
            {"misfire": "all", "catchup": timedelta(hours=4)},
            ["05:00", "06:00", "07:00", "08:00"],
            [("too_old", "03:00", "04:00", 2)],
        ),
        ({"misfire": "all", "catchup_max": 2}, ["07:00", "08:00"], [("too_many", "03:00", "06:00", 4)]),
        (
            {"misfire": "all", "catchup_max": 2, "catchup": timedelta(hours=4)},
            ["07:00", "08:00"],
            [("too_old", "03:00", "04:00", 2), ("too_many", "05:00", "06:00", 2)],
        ),
        ({"misfire": "all", "overlap": "skip"}, ["08:00"], [("overlap", "03:00", "07:00", 5)]),
        ({"catchup": timedelta(minutes=29)}, [], [("too_old", "03:00", "08:00", 6)]),
        ({"catchup": timedelta(minutes=30)}, ["08:00"], [("too_old", "03:00", "07:00", 5)]),
        ({"catchup": timedelta(0)}, [], [("too_old", "03:00", "08:00", 6)]),
    ],
)
def test_an_hourly_line_whose_server_was_away_from_0230_to_0830(
    policy: dict[str, Any], run: list[str], skipped: list[tuple[str, str, str, int]]
) -> None:
    decision = decide(HOURLY, RunPolicy(**policy), ms("02:30"), ms("08:30"))
    assert (hours(decision), reasons(decision)) == (run, skipped)
    assert (decision.decided_ms, decision.next_ms) == (ms("08:30"), ms("09:00"))


@pytest.mark.parametrize("misfire", ["last", "all", "skip"])
def test_one_that_is_on_time_runs_under_each_policy(misfire: Any) -> None:
    for late_ms in (0, 1, 59_999):
        decision = decide(HOURLY, RunPolicy(misfire=misfire, catchup=timedelta(0)), ms("08:30"), ms("09:00") + late_ms)
        assert (hours(decision), decision.skipped) == (["09:00"], ())
    late = decide(HOURLY, RunPolicy(misfire="skip"), ms("08:30"), ms("09:01"))
    assert (hours(late), reasons(late)) == ([], [("missed", "09:00", "09:00", 1)])


def test_one_that_is_on_time_stands_for_those_that_were_missed() -> None:
    decision = decide(HOURLY, RunPolicy(), ms("02:30"), ms("08:00") + 10)
    assert (hours(decision), reasons(decision)) == (["08:00"], [("superseded", "03:00", "07:00", 5)])


def test_nothing_runs_while_it_is_paused() -> None:
    decision = decide(HOURLY, RunPolicy(misfire="all"), ms("02:30"), ms("08:00"), paused=True)
    assert (hours(decision), reasons(decision)) == ([], [("paused", "03:00", "08:00", 6)])
    assert decision.next_ms == ms("09:00")


def test_nothing_runs_beside_a_message_that_is_not_acknowledged() -> None:
    busy = decide(HOURLY, RunPolicy(overlap="skip"), ms("08:30"), ms("09:00"), busy=True)
    assert (hours(busy), reasons(busy)) == ([], [("overlap", "09:00", "09:00", 1)])
    assert hours(decide(HOURLY, RunPolicy(), ms("08:30"), ms("09:00"), busy=True)) == ["09:00"], "the default is all"
    assert hours(decide(HOURLY, RunPolicy(overlap="skip"), ms("08:30"), ms("09:00"))) == ["09:00"]


def test_it_ends_after_as_many_as_may_run_and_skipped_ones_do_not_count() -> None:
    three = Recurrence(cron="0 * * * *", max_occurrences=3)
    some = decide(three, RunPolicy(misfire="all"), ms("02:30"), ms("03:30"), ran=1)
    assert (hours(some), some.next_ms) == (["03:00"], ms("04:00"))
    last = decide(three, RunPolicy(misfire="all"), ms("02:30"), ms("08:30"), ran=1)
    assert (hours(last), last.skipped, last.next_ms) == (["03:00", "04:00"], (), None)
    assert decide(three, RunPolicy(), ms("08:30"), ms("10:30"), ran=3) == RunDecision((), (), ms("10:30"), None)
    paused = decide(three, RunPolicy(), ms("02:30"), ms("08:30"), ran=2, paused=True)
    assert paused.next_ms == ms("09:00")


def test_it_ends_with_its_last_instant() -> None:
    until = Recurrence(cron="0 * * * *", until=datetime(2027, 1, 1, 5, tzinfo=UTC))
    decision = decide(until, RunPolicy(misfire="all"), ms("03:30"), ms("08:30"))
    assert (hours(decision), decision.next_ms) == (["04:00", "05:00"], None)


def test_a_clock_that_was_set_back_decides_nothing_twice() -> None:
    back = decide(HOURLY, RunPolicy(), ms("08:30"), ms("07:30"))
    assert back == RunDecision((), (), ms("08:30"), ms("09:00"))


def test_an_outage_of_two_years_is_decided_in_few_rows_and_milliseconds() -> None:
    from_ms = ms("00:00")
    now_ms = from_ms + 731 * 86_400_000
    decide(MINUTELY, RunPolicy(), from_ms, now_ms)  # The eras of these years are looked up once.
    begun = time.thread_time()
    for misfire in ("last", "all", "skip"):
        decision = decide(MINUTELY, RunPolicy(misfire=misfire, catchup_max=10_000), from_ms, now_ms)
        assert len(decision.skipped) == 1
        assert len(decision.run) + decision.skipped[0].count == 731 * 1440
    # About 20 ms for all three; a list of a million instants takes longer for one of them.
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize(
    "policy",
    [RunPolicy(), RunPolicy(misfire="all", catchup=timedelta(hours=1), catchup_max=7, overlap="skip")],
)
def test_a_policy_comes_back_equal_from_msgpack(policy: RunPolicy) -> None:
    assert RunPolicy.decoded(msgpack.unpackb(msgpack.packb(policy.encoded()))) == policy


def test_the_encoded_policy_stays_as_it_is() -> None:
    assert RunPolicy().encoded() == {}
    policy = RunPolicy(misfire="all", catchup=timedelta(hours=1), catchup_max=7, overlap="skip")
    assert policy.encoded() == {"m": "all", "c": 3_600_000, "n": 7, "o": "skip"}
    assert {reason.value for reason in SkipReason} == {
        *("paused", "too_old", "missed", "superseded", "too_many", "overlap", "restored")
    }
    assert SkippedRun(SkipReason.MISSED, 1, 2, 2) == SkippedRun(SkipReason("missed"), 1, 2, 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"misfire": "never"}, "misfire must be one of last, all, skip, not 'never'"),
        ({"overlap": "queue"}, "overlap must be one of all, skip"),
        ({"catchup": 5}, "catchup must be a timedelta, not int"),
        ({"catchup": timedelta(seconds=-1)}, "must be whole milliseconds, from 0"),
        ({"catchup_max": 0}, "catchup_max must be a whole number from 1 to 10000"),
        ({"catchup_max": True}, "catchup_max must be"),
    ],
)
def test_what_no_policy_has_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadArgument) as refused:
        RunPolicy(**options)
    assert told in str(refused.value)


@pytest.mark.parametrize("encoded", [{"q": 1}, {"c": "1"}, {"c": True}])
def test_a_map_that_is_no_policy_is_refused(encoded: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        RunPolicy.decoded(encoded)


@pytest.mark.parametrize("encoded", [{"m": 5}, {"c": 1 << 62}, {"c": -1}, {"n": "7"}, {"o": None}])
def test_values_that_no_policy_has_are_refused_also_when_they_came_encoded(encoded: dict[str, object]) -> None:
    with pytest.raises(BadArgument):
        RunPolicy.decoded(encoded)
