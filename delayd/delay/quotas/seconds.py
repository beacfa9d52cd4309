"""Seconds: how many messages of a subject are due in each second, and which instants of a window are least loaded.

An hour with few loaded seconds is a dict, because most subjects are due now and then; an hour with more of them is an
array of its 3,600 seconds. The fullest second of each hour, and of each day, is known all the time: two years of hours
are not looked through when somebody asks.

An example of a place: a message is due at 10:00:00.400 with a spread of three seconds, and the seconds 10:00:00 to
10:00:03 have 5, 2, 2 and 0 messages. The window ends at 10:00:03.400, so it gets second 10:00:03, at or before .400.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

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
        # Only a part of the first hour and day is asked for; later days are compared as a whole.
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


GIVEN_MS = 10_000  # An instant that was given out counts as taken for so long, or up to a second longer.
BUCKET_MS = 1_000  # What is given out within so long is forgotten together.
BLOCK_S = 600  # The lowest count of each such stretch is remembered while many windows are searched.
SECOND_MS = 1_000
# The n-th message of a second gets this many ms more than the one before, modulo 1,000: all of them lie far apart.
STEP_MS = 618


class _Bucket:
    """Instants that were given out within a second, and that no message came for yet."""

    __slots__ = ("begin_ms", "count", "profile", "until_ms")

    def __init__(self, now_ms: int) -> None:
        self.begin_ms = now_ms
        self.until_ms = 0  # Until when they count.
        self.count = 0  # With those for which a message came.
        self.profile = Profile()


class Given:
    """The instants that were given out and not used yet."""

    def __init__(self) -> None:
        self._profile = Profile()  # All buckets together.
        self._buckets: deque[_Bucket] = deque()
        self.count = 0  # All buckets together.

    def add(self, seconds: Seconds, now_ms: int) -> None:
        """Instants in these seconds were given out; ``now_ms`` is monotonic."""
        if not self._buckets or self._buckets[-1].begin_ms <= now_ms - BUCKET_MS:
            self._buckets.append(_Bucket(now_ms))
        bucket = self._buckets[-1]
        bucket.until_ms = now_ms + GIVEN_MS
        bucket.profile.add(seconds)
        bucket.count += len(seconds)
        self._profile.add(seconds)
        self.count += len(seconds)

    def arrived(self, seconds: Seconds) -> None:
        """Messages that are due in these seconds came: they count as messages now."""
        if not self.count:
            return
        found, left = np.unique(seconds, return_counts=True)
        # What was given out first was used first.
        for bucket in self._buckets:
            taken = np.minimum(left, bucket.profile.at(found))
            if taken.any():
                used = np.repeat(found, taken)
                bucket.profile.remove(used)
                self._profile.remove(used)
                left -= taken

    def expire(self, now_ms: int) -> None:
        """Forget what was given out long ago."""
        while self._buckets and self._buckets[0].until_ms <= now_ms:
            bucket = self._buckets.popleft()
            self.count -= bucket.count
            self._profile.take_off(bucket.profile)

    def window(self, first: int, count: int) -> Int64s:
        """How many are given out in each of ``count`` seconds from ``first`` on."""
        return self._profile.window(first, count)


class SpreadWindow(NamedTuple):
    """The seconds that a request for places is about."""

    begin: int  # The first second.
    loads: Int64s  # How many messages each second has, from the first one on.
    first_ms: Int64s  # For each row the begin and the end of its own window.
    last_ms: Int64s
    limit: int | None  # A second that has so many messages gets no more.


class Chosen(NamedTuple):
    """What each row of a request gets."""

    seconds: Seconds
    instants: Int64s


def choose(window: SpreadWindow) -> Chosen | None:
    """Choose an instant for each row; None when the seconds have no room for all. Any thread may call it."""
    begin, loads, first_ms, last_ms, limit = window
    firsts, lasts = first_ms // SECOND_MS - begin, last_ms // SECOND_MS - begin
    if firsts.min() == firsts.max():
        chosen = fill(loads, len(firsts), limit)
    else:
        picker = Picker(loads)
        picked = [picker.pick(low, high, limit) for low, high in zip(firsts.tolist(), lasts.tolist(), strict=True)]
        chosen = None if None in picked else np.array(picked)
    if chosen is None:
        return None
    order = np.argsort(chosen, kind="stable")
    ordered = chosen.take(order)
    earlier = np.empty(len(chosen), np.int64)  # How many rows of this request come before in the same second.
    earlier[order] = np.arange(len(chosen)) - np.searchsorted(ordered, ordered)
    return Chosen(chosen + begin, instants_in(chosen + begin, loads.take(chosen) + earlier, first_ms, last_ms))


def fill(loads: Int64s, count: int, limit: int | None) -> Int64s | None:
    """Choose the least loaded seconds for ``count`` messages that have the same window: int64[count], rising.

    ``loads`` has each second of the window, from its begin on, and is not changed. None: the seconds that have fewer
    than ``limit`` messages have no room for all.

    An example: loads of 3, 1, 1 and 5, and four messages. The second and the third second get one each, so that all of
    them have 2 or more, then one each again: 3, 3, 3, 5.
    """
    at = int(loads.argmin())
    lowest = int(loads[at])
    if count == 1:
        return None if limit is not None and lowest >= limit else np.array([at])
    if limit is not None and int(np.maximum(limit - loads, 0).sum()) < count:
        return None
    # No second is filled up higher than this, so higher loads need not be told apart.
    above = np.minimum(loads - lowest, count)
    seconds_at = np.bincount(above, minlength=count + 1)
    # To bring all seconds up to level n takes as many messages as there are seconds below 1, below 2, … below n.
    cost = np.cumsum(np.cumsum(seconds_at))
    level = int(np.searchsorted(cost, count, "right"))
    filled = np.flatnonzero(above <= level)
    added = level - above.take(filled)
    added[: count - int(added.sum())] += 1
    return np.repeat(filled, added)


class Picker:
    """Chooses the least loaded second for one message after the other, each with a window of its own."""

    def __init__(self, loads: Int64s) -> None:
        blocks = -(-len(loads) // BLOCK_S)
        self._loads = np.full(blocks * BLOCK_S, np.iinfo(np.int64).max)
        self._loads[: len(loads)] = loads
        self._lowest = self._loads.reshape(blocks, BLOCK_S).min(1)

    def pick(self, first: int, last: int, limit: int | None) -> int | None:
        """The earliest of the least loaded seconds from ``first`` to ``last``, which has one more from now on; None
        when each has ``limit`` or more.
        """
        begin, end = first // BLOCK_S + 1, last // BLOCK_S
        if begin >= end:
            best = first + int(self._loads[first : last + 1].argmin())
        else:
            # The block in which the window begins, the whole ones, and that in which it ends.
            at = begin + int(self._lowest[begin:end].argmin())
            inside = at * BLOCK_S + int(self._loads[at * BLOCK_S : (at + 1) * BLOCK_S].argmin())
            front = first + int(self._loads[first : begin * BLOCK_S].argmin())
            back = end * BLOCK_S + int(self._loads[end * BLOCK_S : last + 1].argmin())
            best = min(front, inside, back, key=lambda second: (int(self._loads[second]), second))
        if limit is not None and self._loads[best] >= limit:
            return None
        self._loads[best] += 1
        block = best // BLOCK_S
        self._lowest[block] = self._loads[block * BLOCK_S : (block + 1) * BLOCK_S].min()
        return best


def instants_in(seconds: Seconds, loads: Int64s, first_ms: Int64s, last_ms: Int64s) -> Int64s:
    """An instant in each chosen second, within the row's window; ``loads`` says how many messages it has already."""
    chosen = seconds * SECOND_MS + loads * STEP_MS % SECOND_MS
    within: Int64s = np.minimum(np.maximum(chosen, first_ms), last_ms)
    return within
