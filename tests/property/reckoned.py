"""When a line fires, reckoned minute by minute: each UTC minute of a time, and what the clocks of a zone show then.

It shares nothing with `delayd.recurrence` but the files of tzdata: no eras, no days that are skipped, no search.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np

from delayd.batch.columns import Int64s

DAY = 1_440
MINUTE_MS = 60_000
_MINUTE = timedelta(minutes=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@cache
def all_zones() -> list[str]:
    return sorted(files("tzdata").joinpath("zones").read_text().split())


def minute_of(moment: datetime) -> int:
    return (moment - _EPOCH) // _MINUTE


class Clocks:
    """What the clocks of a zone show in each UTC minute of a time, as minutes since the epoch."""

    def __init__(self, zone: str, first: datetime, end: datetime) -> None:
        with files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as file:
            rules = ZoneInfo.from_file(file)
        self.first = minute_of(first)
        hours = [_offset(rules, minute) for minute in range(self.first, minute_of(end) + 1, 60)]
        # An hour that begins and ends with the same offset keeps it; each minute of another one is looked up.
        offsets = np.repeat(np.array(hours[:-1], np.int64), 60)
        for place, (before, after) in enumerate(pairwise(hours)):
            if before != after:
                minutes = range(self.first + 60 * place, self.first + 60 * place + 60)
                offsets[60 * place : 60 * place + 60] = [_offset(rules, minute) for minute in minutes]
        self.changes = int(np.count_nonzero(np.diff(offsets)))
        self.shown: Int64s = np.arange(self.first, self.first + len(offsets)) + offsets
        self._highest = np.maximum.accumulate(self.shown)
        self._of_day = self.shown % DAY

    def fires(self, times: list[int], fold: str, gap: str) -> Int64s:
        """The instants in ms at which a line with these minutes of the day fires, each once, in order; days at either
        end of the time are not whole.
        """
        found = [np.zeros(0, np.int64)]
        days = np.arange(self.shown[0] // DAY + 1, self.shown[-1] // DAY)
        for time in times:
            places = np.flatnonzero(self._of_day == time)
            of_day = self.shown[places] // DAY
            if fold == "both":
                found.append(places)
            elif fold == "first":
                found.append(places[np.unique(of_day, return_index=True)[1]])
            else:
                found.append(places[len(places) - 1 - np.unique(of_day[::-1], return_index=True)[1]])
            if gap == "shift":
                without = np.setdiff1d(days, of_day)
                # The first minute in which clocks show a later time than the one that they never show.
                found.append(np.searchsorted(self._highest, without * DAY + time))
        return (np.unique(np.concatenate(found)) + self.first) * MINUTE_MS


def _offset(rules: ZoneInfo, minute: int) -> int:
    offset = (_EPOCH + minute * _MINUTE).astimezone(rules).utcoffset()
    assert offset is not None
    return offset // _MINUTE
