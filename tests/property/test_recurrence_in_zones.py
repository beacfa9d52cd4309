"""Recurrences against a reckoning minute by minute, in zones whose clocks change: nothing is missing, nothing doubled.

``pytest -m long tests/property/test_recurrence_in_zones.py`` takes all zones of tzdata; a sample runs always.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple, get_args

import numpy as np
import pytest

from delayd.recurrence.recurrence import Fold, Gap, Recurrence
from tests.property.reckoned import Clocks, all_zones

FIRST, END = datetime(2024, 1, 1, tzinfo=UTC), datetime(2032, 1, 1, tzinfo=UTC)
EDGE_MS = 2 * 86_400_000  # The days at either end are not whole in the reckoning.
DAILY = {"0 0 * * *": [0], "30 1 * * *": [90], "30 2 * * *": [150], "0,30 0-3 * * *": [*range(0, 240, 30)]}
HOURLY = {"0 * * * *": [*range(0, 1440, 60)], "30 * * * *": [*range(30, 1440, 60)]}
# Changes at midnight, by half an hour, by two hours, in Ramadan, backwards in summer, for good, and plain ones.
SAMPLE = [
    *("Europe/Berlin", "America/New_York", "America/Santiago", "America/Havana", "Africa/Cairo", "Asia/Beirut"),
    *("Australia/Lord_Howe", "Antarctica/Troll", "Africa/Casablanca", "Europe/Dublin", "America/Scoresbysund"),
    *("Asia/Almaty", "America/Asuncion"),
]


class Found(NamedTuple):
    """What is compared in one zone."""

    changes: int
    occurrences: int
    missing: int
    doubled: int
    other: int


def compared(zone: str) -> Found:
    clocks = Clocks(zone, FIRST, END)
    if not clocks.changes:
        return Found(0, 0, 0, 0, 0)
    from_ms, to_ms = int(FIRST.timestamp()) * 1000 + EDGE_MS, int(END.timestamp()) * 1000 - EDGE_MS
    occurrences = missing = doubled = other = 0
    for lines, fold, gap in ((DAILY, "first", "shift"), (HOURLY, "both", "skip")):
        for line, times in lines.items():
            due = clocks.fires(times, fold, gap)
            due = due[(due > from_ms) & (due <= to_ms)]
            fired = np.array(list(Recurrence(cron=line, timezone=zone).between(from_ms, to_ms)), np.int64)
            occurrences += len(due)
            missing += len(np.setdiff1d(due, fired))
            doubled += len(fired) - len(np.unique(fired))
            other += len(np.setdiff1d(fired, due))
    return Found(clocks.changes, occurrences, missing, doubled, other)


@pytest.mark.parametrize("zone", SAMPLE)
def test_nothing_is_missing_and_nothing_doubled_in_a_zone_whose_clocks_change(zone: str) -> None:
    found = compared(zone)
    assert found.changes >= 1 and found.occurrences > 8 * 365 * 50
    assert found[2:] == (0, 0, 0)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_nothing_is_missing_and_nothing_doubled_in_any_zone() -> None:
    found = {zone: compared(zone) for zone in all_zones()}
    changing = {zone: each for zone, each in found.items() if each.changes}
    wrong = {zone: each for zone, each in changing.items() if any(each[2:])}
    total = Found(*map(sum, zip(*changing.values(), strict=True)))
    print(f"{len(changing)} of {len(found)} zones change: {total}")
    assert len(changing) > 150
    assert not wrong


# The hardest changes on record: a whole day is skipped, clocks go back over midnight at one minute past, by twenty
# minutes, and forward at midnight.
HARD = {
    "Pacific/Apia": (datetime(2011, 12, 20, tzinfo=UTC), datetime(2012, 1, 10, tzinfo=UTC)),
    "America/St_Johns": (datetime(2006, 10, 20, tzinfo=UTC), datetime(2006, 11, 10, tzinfo=UTC)),
    "America/Sao_Paulo": (datetime(2017, 10, 1, tzinfo=UTC), datetime(2018, 3, 1, tzinfo=UTC)),
    "America/Caracas": (datetime(2016, 4, 20, tzinfo=UTC), datetime(2016, 5, 10, tzinfo=UTC)),
    "Asia/Pyongyang": (datetime(2018, 4, 25, tzinfo=UTC), datetime(2018, 5, 15, tzinfo=UTC)),
    "Australia/Lord_Howe": (datetime(2027, 3, 25, tzinfo=UTC), datetime(2027, 10, 20, tzinfo=UTC)),
    "Antarctica/Troll": (datetime(2027, 3, 20, tzinfo=UTC), datetime(2027, 11, 10, tzinfo=UTC)),
}


@pytest.mark.parametrize("fold", get_args(Fold))
@pytest.mark.parametrize("gap", get_args(Gap))
@pytest.mark.parametrize("zone", HARD)
def test_each_policy_holds_in_the_hardest_changes(zone: str, fold: Fold, gap: Gap) -> None:
    clocks = Clocks(zone, *HARD[zone])
    assert clocks.changes
    from_ms, to_ms = (int(clocks.first + edge) * 60_000 for edge in (2 * 1440, len(clocks.shown) - 2 * 1440))
    lines = {
        "0 0 * * *": [0],
        "*/7 * * * *": [h * 60 + m for h in range(24) for m in range(0, 60, 7)],
        **DAILY,
        **HOURLY,
    }
    for line, times in lines.items():
        due = clocks.fires(times, fold, gap)
        due = due[(due > from_ms) & (due <= to_ms)]
        recurrence = Recurrence(cron=line, timezone=zone, fold=fold, gap=gap)
        assert list(recurrence.between(from_ms, to_ms)) == due.tolist(), line
        assert recurrence.count(from_ms, to_ms) == len(due)
        for middle in (len(due) // 3, len(due) // 2):
            assert recurrence.next_after(int(due[middle]) - 1) == due[middle]
            assert recurrence.newest(middle, from_ms, to_ms) == due[len(due) - middle :].tolist()
