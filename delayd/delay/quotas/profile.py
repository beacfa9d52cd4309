"""Profile: how many messages of one subject are due in each second.

An hour with few loaded seconds is a dict, because most subjects are due now and then; an hour with more of them is an
array of its 3,600 seconds.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s

HOUR_S = 3_600
FEW = 4  # Up to so many seconds a loop is faster than numpy.
SPARSE_MAX = 100  # Entries of a dict; beyond that the array is smaller.
ENTRY_BYTES = 140  # An entry of a dict, its key and its value; the dict itself counts as one entry more.
DENSE_BYTES = 4 * HOUR_S + 200

Counts = NDArray[np.uint32]  # One for each second of an hour, or of a window.
Seconds = Int64s  # Seconds since the epoch.


class Profile:
    """Counts by second; seconds that are not counted have none."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._hours: dict[int, dict[int, int] | Counts] = {}

    def add(self, seconds: Seconds) -> None:
        """Count messages that are due in these seconds."""
        for hour, within, counts in _by_hour(seconds):
            known = self._hours.get(hour)
            if known is None:
                known = self._hours[hour] = {}
                self.held_bytes += ENTRY_BYTES
            if isinstance(known, dict):
                before = len(known)
                for second, count in zip(within.tolist(), counts.tolist(), strict=True):
                    known[second] = known.get(second, 0) + count
                self.held_bytes += (len(known) - before) * ENTRY_BYTES
                if len(known) > SPARSE_MAX:
                    self._hours[hour] = _dense(known)
                    self.held_bytes += DENSE_BYTES - (len(known) + 1) * ENTRY_BYTES
            else:
                known[within] += counts.astype(np.uint32)

    def remove(self, seconds: Seconds) -> None:
        """Take counted messages off."""
        for hour, within, counts in _by_hour(seconds):
            known = self._hours.get(hour)
            if known is None:
                continue  # The hour is over, and forgotten.
            if isinstance(known, dict):
                for second, count in zip(within.tolist(), counts.tolist(), strict=True):
                    left = known.get(second, 0) - count
                    if left > 0:
                        known[second] = left
                    elif known.pop(second, None) is not None:
                        self.held_bytes -= ENTRY_BYTES
                if not known:
                    self._drop(hour)
            else:
                known[within] -= np.minimum(known[within], counts.astype(np.uint32))
                if not known.any():
                    self._drop(hour)

    def merge(self, other: "Profile") -> None:
        """Add what another profile counts, which is not used any more."""
        for hour, counts in other._hours.items():
            if hour not in self._hours:
                self._hours[hour] = counts
                self.held_bytes += _bytes_of(counts)
            else:
                dense = _dense(counts) if isinstance(counts, dict) else counts
                self.add(np.repeat(np.flatnonzero(dense), dense[dense > 0]) + hour * HOUR_S)

    def at(self, seconds: Seconds) -> Int64s:
        """How many messages are counted in each of these seconds: int64[n]."""
        if len(seconds) <= FEW:
            return np.array([self._at(second) for second in seconds.tolist()], np.int64)
        found = np.zeros(len(seconds), np.int64)
        hours = seconds // HOUR_S
        for hour in np.unique(hours).tolist():
            known = self._hours.get(hour)
            if known is not None:
                own = np.flatnonzero(hours == hour)
                within = seconds.take(own) - hour * HOUR_S
                if isinstance(known, dict):
                    found[own] = [known.get(second, 0) for second in within.tolist()]
                else:
                    found[own] = known[within]
        return found

    def _at(self, second: int) -> int:
        counts = self._hours.get(second // HOUR_S)
        if counts is None:
            return 0
        within = second % HOUR_S
        return counts.get(within, 0) if isinstance(counts, dict) else int(counts[within])

    def window(self, first: int, count: int) -> Int64s:
        """The counts of ``count`` seconds from ``first`` on: int64[count]."""
        found = np.zeros(count, np.int64)
        for hour in range(first // HOUR_S, (first + count - 1) // HOUR_S + 1):
            known = self._hours.get(hour)
            if known is None:
                continue
            begin = hour * HOUR_S - first  # Where the hour begins in the window.
            low, high = max(0, -begin), min(HOUR_S, count - begin)
            found[begin + low : begin + high] = (_dense(known) if isinstance(known, dict) else known)[low:high]
        return found

    def next_from(self, second: int) -> int | None:
        """The first second from ``second`` on in which a message is due."""
        for hour in sorted(hour for hour in self._hours if (hour + 1) * HOUR_S > second):
            known = self._hours[hour]
            within = sorted(known) if isinstance(known, dict) else np.flatnonzero(known).tolist()
            for each in within:
                if hour * HOUR_S + each >= second:
                    return hour * HOUR_S + each
        return None

    def highest_from(self, second: int) -> tuple[int, int]:
        """The most loaded second from ``second`` on, and how many messages are due in it; (0, 0) when none is."""
        best = (0, 0)
        for hour, counts in self._hours.items():
            if hour >= second // HOUR_S:
                dense = _dense(counts) if isinstance(counts, dict) else counts
                low = max(0, second - hour * HOUR_S)
                at = low + int(dense[low:].argmax())
                if int(dense[at]) > best[1]:
                    best = (hour * HOUR_S + at, int(dense[at]))
        return best

    def forget_before(self, second: int) -> None:
        """Forget hours that are over."""
        for hour in [hour for hour in self._hours if hour < second // HOUR_S]:
            self._drop(hour)

    def _drop(self, hour: int) -> None:
        self.held_bytes -= _bytes_of(self._hours.pop(hour))


def _by_hour(seconds: Seconds) -> Iterator[tuple[int, Int64s, Int64s]]:
    """For each hour: its loaded seconds, from its begin on, and how often each comes."""
    if len(seconds) <= FEW:
        # Most batches are a few single messages, for which plain integers take a tenth of the time of arrays.
        for second, count in Counter(seconds.tolist()).items():
            hour = second // HOUR_S
            yield hour, np.array([second - hour * HOUR_S]), np.array([count])
        return
    found, counts = np.unique(seconds, return_counts=True)
    hours = found // HOUR_S
    cuts = [0, *(np.flatnonzero(hours[1:] != hours[:-1]) + 1).tolist(), len(found)]
    for low, high in pairwise(cuts):
        hour = int(hours[low])
        yield hour, found[low:high] - hour * HOUR_S, counts[low:high]


def _dense(counts: dict[int, int]) -> Counts:
    dense = np.zeros(HOUR_S, np.uint32)
    dense[list(counts)] = list(counts.values())
    return dense


def _bytes_of(counts: dict[int, int] | Counts) -> int:
    return (len(counts) + 1) * ENTRY_BYTES if isinstance(counts, dict) else DENSE_BYTES
