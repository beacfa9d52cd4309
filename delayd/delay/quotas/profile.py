"""Profile: how many messages of one subject are due in each second.

An hour with few loaded seconds is a dict, because most subjects are due now and then; an hour with more of them is an
array of its 3,600 seconds. The fullest second of each hour, and of each day, is known all the time: two years of hours
are not looked through when somebody asks.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s

HOUR_S = 3_600
DAY_HOURS = 24
FEW = 4  # Up to so many seconds a loop is faster than numpy.
SPARSE_MAX = 100  # Entries of a dict; beyond that the array is smaller.
ENTRY_BYTES = 140  # An entry of a dict, its key and its value; the dict itself counts as one entry more.
DENSE_BYTES = 4 * HOUR_S + 200

Counts = NDArray[np.uint32]  # One for each second of an hour, or of a window.
Seconds = Int64s  # Seconds since the epoch.
Values = list[int] | Int64s


class _Hour:
    """The counts of an hour's seconds, by their numbers in it or in order, and the highest of them."""

    __slots__ = ("counts", "highest")

    def __init__(self, counts: dict[int, int] | Counts, highest: int) -> None:
        self.counts = counts
        self.highest = highest

    @property
    def held_bytes(self) -> int:
        return (len(self.counts) + 1) * ENTRY_BYTES if isinstance(self.counts, dict) else DENSE_BYTES

    def dense(self) -> Counts:
        if not isinstance(self.counts, dict):
            return self.counts
        dense = np.zeros(HOUR_S, np.uint32)
        dense[np.fromiter(self.counts, np.int64)] = list(self.counts.values())
        return dense

    def add(self, seconds: Values, counts: Values) -> None:
        if len(seconds) > SPARSE_MAX:
            self.counts = self.dense()
        known = self.counts
        if isinstance(known, dict):
            for second, count in zip(_listed(seconds), _listed(counts), strict=True):
                known[second] = count = known.get(second, 0) + count
                if count > self.highest:
                    self.highest = count
            if len(known) > SPARSE_MAX:
                self.counts = self.dense()
        else:
            within = np.asarray(seconds)
            known[within] += np.asarray(counts, np.uint32)
            self.highest = max(self.highest, int(known[within].max()))

    def remove(self, seconds: Values, counts: Values) -> None:
        known = self.counts
        if isinstance(known, dict):
            for second, count in zip(_listed(seconds), _listed(counts), strict=True):
                left = known.get(second, 0) - count
                if left > 0:
                    known[second] = left
                else:
                    known.pop(second, None)
            self.highest = max(known.values(), default=0)
        else:
            within = np.asarray(seconds)
            known[within] -= np.minimum(known[within], np.asarray(counts, np.uint32))
            self.highest = int(known.max())

    def add_all(self, other: "_Hour") -> None:
        if isinstance(other.counts, dict):
            self.add(list(other.counts), list(other.counts.values()))
        else:
            self.counts = self.dense() + other.counts
            self.highest = int(self.counts.max())

    def remove_all(self, other: "_Hour") -> None:
        if isinstance(other.counts, dict):
            self.remove(list(other.counts), list(other.counts.values()))
        else:
            dense = self.dense()
            self.counts = dense - np.minimum(dense, other.counts)
            self.highest = int(self.counts.max())


class Profile:
    """Counts by second; seconds that are not counted have none."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._hours: dict[int, dict[int, int] | Counts] = {}
        self._highest: dict[int, int] = {}  # The highest count of each hour.
        self._days: dict[int, int] = {}  # The highest count of each day, which is that of one of its hours.
        self._lowest = 0  # No hour is below.

    def add(self, seconds: Seconds) -> None:
        """Count messages that are due in these seconds."""
        for number, found, counts in _by_hour(seconds):
            self._add(number, partial(_Hour.add, seconds=found, counts=counts))

    def remove(self, seconds: Seconds) -> None:
        """Take counted messages off."""
        for number, found, counts in _by_hour(seconds):
            self._remove(number, partial(_Hour.remove, seconds=found, counts=counts))

    def merge(self, other: "Profile") -> None:
        """Add what another profile counts."""
        for number, counts in other._hours.items():
            self._add(number, partial(_Hour.add_all, other=_Hour(counts, other._highest[number])))

    def take_off(self, other: "Profile") -> None:
        """Take off what another profile counts."""
        for number, counts in other._hours.items():
            self._remove(number, partial(_Hour.remove_all, other=_Hour(counts, other._highest[number])))

    def at(self, seconds: Seconds) -> Int64s:
        """How many messages are counted in each of these seconds: int64[n]."""
        if len(seconds) <= FEW:
            return np.array([self._at(second) for second in seconds.tolist()], np.int64)
        unique, inverse = np.unique(seconds, return_inverse=True)
        found = np.zeros(len(unique), np.int64)
        for number, low, high in _cuts(unique):
            hour = self._hour(number)
            if hour is None:
                continue
            if isinstance(hour.counts, dict):
                within = (unique[low:high] - number * HOUR_S).tolist()
                found[low:high] = [hour.counts.get(second, 0) for second in within]
            else:
                found[low:high] = hour.counts[unique[low:high] - number * HOUR_S]
        return found.take(inverse)

    def window(self, first: int, count: int) -> Int64s:
        """The counts of ``count`` seconds from ``first`` on: int64[count]."""
        found = np.zeros(count, np.int64)
        for number in range(first // HOUR_S, (first + count - 1) // HOUR_S + 1):
            hour = self._hour(number)
            if hour is None:
                continue
            begin = number * HOUR_S - first  # Where the hour begins in the window.
            low, high = max(0, -begin), min(HOUR_S, count - begin)
            found[begin + low : begin + high] = hour.dense()[low:high]
        return found

    def next_from(self, second: int) -> int | None:
        """The first second from ``second`` on in which a message is due."""
        for hour in self._hours_from(second):
            loaded = np.flatnonzero(_Hour(self._hours[hour], 0).dense()) + hour * HOUR_S
            at = int(np.searchsorted(loaded, second))
            if at < len(loaded):
                return int(loaded[at])
        return None

    def highest_from(self, second: int) -> tuple[int, int]:
        """The most loaded second from ``second`` on, the first of several, and how many messages are due in it; (0, 0)
        when none is.
        """
        best, highest = (0, 0), 0
        first_hour = second // HOUR_S
        first_day = first_hour // DAY_HOURS
        # Of the first hour and day only a part is asked for; later days are compared as a whole.
        for number in range(first_hour, (first_day + 1) * DAY_HOURS):
            hour = self._hour(number)
            if hour is not None and hour.highest > highest:
                found = _fullest(number, hour, second)
                if found[1] > highest:
                    best, highest = found, found[1]
        day = min(
            (day for day, count in self._days.items() if day > first_day and count > highest),
            key=lambda day: (-self._days[day], day),
            default=None,
        )
        for number in range(day * DAY_HOURS, (day + 1) * DAY_HOURS) if day is not None else ():
            hour = self._hour(number)
            if hour is not None and hour.highest == self._days[number // DAY_HOURS]:
                return _fullest(number, hour, second)
        return best

    def forget_before(self, second: int) -> None:
        """Forget hours that are over."""
        before = second // HOUR_S
        # Most often no hour or one is over; to look through two years of hours each second would take long.
        few = before - self._lowest < len(self._hours)
        over = range(self._lowest, before) if few else [number for number in self._hours if number < before]
        for number in over:
            if number in self._hours:
                self._drop(number)
        self._lowest = max(self._lowest, before)

    def _at(self, second: int) -> int:
        counts = self._hours.get(second // HOUR_S)
        if counts is None:
            return 0
        within = second % HOUR_S
        return counts.get(within, 0) if isinstance(counts, dict) else int(counts[within])

    def _hour(self, number: int) -> _Hour | None:
        counts = self._hours.get(number)
        return None if counts is None else _Hour(counts, self._highest[number])

    def _add(self, number: int, add: Callable[["_Hour"], None]) -> None:
        hour = self._hour(number)
        before = 0
        self._lowest = min(self._lowest, number) if self._hours else number
        if hour is None:
            hour = _Hour({}, 0)
        else:
            before = hour.held_bytes
        add(hour)
        self._hours[number], self._highest[number] = hour.counts, hour.highest
        self.held_bytes += hour.held_bytes - before
        day = number // DAY_HOURS
        if hour.highest > self._days.get(day, 0):
            self._days[day] = hour.highest

    def _remove(self, number: int, remove: Callable[["_Hour"], None]) -> None:
        hour = self._hour(number)
        if hour is None:
            return  # The hour is over, and forgotten.
        before, highest = hour.held_bytes, hour.highest
        remove(hour)
        self._hours[number], self._highest[number] = hour.counts, hour.highest
        self.held_bytes += hour.held_bytes - before
        if not hour.highest:
            self._drop(number, highest)
        elif hour.highest < highest:
            self._note_day(number // DAY_HOURS, highest)

    def _drop(self, number: int, highest: int | None = None) -> None:
        hour = _Hour(self._hours.pop(number), self._highest.pop(number))
        self.held_bytes -= hour.held_bytes
        self._note_day(number // DAY_HOURS, hour.highest if highest is None else highest)

    def _note_day(self, day: int, gone: int) -> None:
        """One of a day's hours, whose highest count was ``gone``, has less."""
        if self._days.get(day) != gone:
            return
        highest = max(self._highest.get(number, 0) for number in range(day * DAY_HOURS, (day + 1) * DAY_HOURS))
        if highest:
            self._days[day] = highest
        else:
            del self._days[day]

    def _hours_from(self, second: int) -> Iterator[int]:
        """The loaded hours from that of ``second`` on, in order."""
        for day in sorted(day for day in self._days if (day + 1) * DAY_HOURS * HOUR_S > second):
            yield from (
                number
                for number in range(day * DAY_HOURS, (day + 1) * DAY_HOURS)
                if number in self._hours and (number + 1) * HOUR_S > second
            )


def _fullest(number: int, hour: _Hour, second: int) -> tuple[int, int]:
    """The first of an hour's fullest seconds from ``second`` on, and its count."""
    dense = hour.dense()
    low = max(0, second - number * HOUR_S)
    at = low + int(dense[low:].argmax())
    return number * HOUR_S + at, int(dense[at])


def _listed(values: Values) -> list[int]:
    return values if isinstance(values, list) else values.tolist()


def _by_hour(seconds: Seconds) -> Iterator[tuple[int, Values, Values]]:
    """For each hour: its number, its loaded seconds from its begin on, and how often each comes."""
    if len(seconds) <= FEW:
        # Most batches are a few single messages, for which plain integers take a tenth of the time of arrays.
        for second, count in Counter(seconds.tolist()).items():
            yield second // HOUR_S, [second % HOUR_S], [count]
        return
    found, counts = np.unique(seconds, return_counts=True)
    # A slice of a list costs less than one of an array, and many hours have a second or two.
    all_seconds, all_counts = found.tolist(), counts.tolist()
    for number, low, high in _cuts(found):
        if high - low <= FEW:
            yield number, [second % HOUR_S for second in all_seconds[low:high]], all_counts[low:high]
        else:
            yield number, found[low:high] - number * HOUR_S, counts[low:high]


def _cuts(seconds: Seconds) -> Iterator[tuple[int, int, int]]:
    """The hours of rising seconds, each with its range of them."""
    hours = seconds // HOUR_S
    cuts = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(seconds)]
    numbers = hours.take(cuts[:-1]).tolist() if len(seconds) else []
    for number, (low, high) in zip(numbers, pairwise(cuts), strict=False):
        yield number, low, high
