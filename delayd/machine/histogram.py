"""Histogram: how many values of a kind there were, on a logarithmic scale.

The scale has 16 steps an octave and is exact below 23: histograms merge by adding their counts, and a quantile is off
by half a step at most, 2.3 %. Its steps begin at each power of two, so how many values were below a power of two is
exact too. The audit counts lateness so, and the metrics of servers count milliseconds and nanoseconds.

Invariant: nothing is counted where a value occurs. It is noted, as one column for all messages of a batch, and counted
many at a time, or when somebody asks.

An example, in ms. A batch of messages due at 5,000 and 5,003 becomes durable at 5,009: ``late(due, 5009)`` notes the
column's bytes and the instant. When `counted` is asked, 9 and 6 ms are in it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

STEPS_PER_OCTAVE = 16
VALUE_MAX = 1 << 41  # 70 years in ms, 36 minutes in ns; larger values are counted in the last step.
NOTED_MAX = 512  # Columns, or single values, that are counted together.
VALUE_BYTES = 8
# A column with more is counted at once: it costs a nanosecond a value when all are of one step, as those of a herd.
NOTED_BYTES_MAX = 256 * VALUE_BYTES
SMALL = 1 << 16  # The steps of smaller values are looked up, which takes a tenth of a search.


def _lower_bounds() -> Int64s:
    steps = np.arange(STEPS_PER_OCTAVE * (VALUE_MAX.bit_length() - 1) + 1)
    return np.concatenate(([0], np.unique(np.ceil(np.exp2(steps / STEPS_PER_OCTAVE)).astype(np.int64))))


LOWER_BOUNDS = _lower_bounds()
BUCKETS = len(LOWER_BOUNDS)
_BOUNDS: list[int] = LOWER_BOUNDS.tolist()
_STEPS = (LOWER_BOUNDS.searchsorted(np.arange(SMALL), side="right") - 1).astype(np.uint16)
# What has no value. It is one array for all: 100,000 hours of an audit would take 500 MB.
NO_COUNTS = np.zeros(BUCKETS, np.int64)
NO_COUNTS.flags.writeable = False


def count_values(values: Int64s) -> NDArray[np.int64]:
    """Count values by step: int64[BUCKETS]; negative values, from a clock that is behind, count as 0."""
    if not len(values):
        return NO_COUNTS
    least, most = int(values.min()), int(values.max())
    if (step := _step(least)) == _step(most):
        return _all_in(step, len(values))
    positive = np.maximum(values, 0) if least < 0 else values
    steps = _STEPS.take(positive) if most < SMALL else np.searchsorted(LOWER_BOUNDS, positive, side="right") - 1
    return np.bincount(steps, minlength=BUCKETS).astype(np.int64)


def _step(value: int) -> int:
    return max(bisect_right(_BOUNDS, value) - 1, 0)


def _all_in(step: int, count: int) -> NDArray[np.int64]:
    counts = np.zeros(BUCKETS, np.int64)
    counts[step] = count
    return counts


def quantile_of(counts: NDArray[np.int64], quantile: float) -> int | None:
    """The middle of the step in which the value of that rank lies; None when nothing was counted."""
    total = int(counts.sum())
    if not total:
        return None
    rank = max(1, int(np.ceil(quantile * total)))
    step = int(np.searchsorted(np.cumsum(counts), rank))
    lower = int(LOWER_BOUNDS[step])
    upper = int(LOWER_BOUNDS[step + 1]) - 1 if step + 1 < BUCKETS else lower
    return (lower + upper) // 2


class Counted(NamedTuple):
    """All values since the start: how many of each step, int64[BUCKETS], and their sum."""

    counts: NDArray[np.int64]
    total: int


class Histogram:
    """The values of one kind since the start; belongs to the loop."""

    __slots__ = ("_ats", "_columns", "_counts", "_total", "_values")

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(BUCKETS, np.int64)
        self._total = 0
        self._values: list[int] = []
        self._columns: list[bytes] = []
        self._ats: list[int] = []  # For each column the instant from which its values are taken away.

    def add(self, value: int) -> None:
        """Note one value."""
        self._values.append(value)
        if len(self._values) >= NOTED_MAX:
            self._count()

    def late(self, due: bytes | memoryview, at: int) -> None:
        """Note how long after each of these instants ``at`` is; ``due`` has the bytes of i64s."""
        if len(due) > NOTED_BYTES_MAX:
            self._late_at_once(np.frombuffer(due, np.int64), at)
            return
        self._columns.append(bytes(due))  # A view would keep the whole batch.
        self._ats.append(at)
        if len(self._ats) >= NOTED_MAX:
            self._count()

    def counted(self) -> Counted:
        """All values so far; the array is the caller's."""
        self._count()
        return Counted(self._counts.copy(), self._total)

    def _count(self) -> None:
        rows = [len(column) // VALUE_BYTES for column in self._columns]
        late = np.repeat(np.array(self._ats, np.int64), rows) - np.frombuffer(b"".join(self._columns), np.int64)
        self._take(late)
        self._take(np.array(self._values, np.int64))
        self._columns, self._ats, self._values = [], [], []

    def _late_at_once(self, due: Int64s, at: int) -> None:
        first, last = int(due.min()), int(due.max())
        if last <= at and (step := _step(at - last)) == _step(at - first):
            self._counts[step] += len(due)
            self._total += at * len(due) - int(due.sum())
        else:
            self._take(at - due)

    def _take(self, values: Int64s) -> None:
        if len(values):
            values = np.maximum(values, 0)
            self._counts += count_values(values)
            self._total += int(values.sum())
