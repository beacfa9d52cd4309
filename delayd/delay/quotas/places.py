"""Places: which instants of a window are least loaded, and which ones were given out a moment ago (docs/quotas.md).

An example: a message is due at 10:00:00.400 with a spread of three seconds, and the seconds 10:00:00 to 10:00:03 have
5, 2, 2 and 0 messages. The window ends at 10:00:03.400, so it gets second 10:00:03, at or before .400.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from delayd.batch.columns import Int64s
from delayd.delay.quotas.profile import Profile, Seconds

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
        self._profile = Profile()  # Of all buckets.
        self._buckets: deque[_Bucket] = deque()
        self.count = 0  # Of all buckets.

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
