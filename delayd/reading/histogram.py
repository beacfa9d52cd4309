"""Histogram of lateness on a logarithmic scale: 16 steps an octave, exact below 23 ms.

Invariant: two histograms merge by adding their counts, so hours, tasks and machines give the figures of one pass. A
quantile is off by half a step at most, 2.3 %.
"""

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s

STEPS_PER_OCTAVE = 16
MS_MAX = 1 << 41  # 70 years; larger values are counted in the last step.
QUANTILES = (0.5, 0.99, 0.999)


def _lower_bounds() -> Int64s:
    steps = np.arange(STEPS_PER_OCTAVE * (MS_MAX.bit_length() - 1) + 1)
    return np.concatenate(([0], np.unique(np.ceil(np.exp2(steps / STEPS_PER_OCTAVE)).astype(np.int64))))


LOWER_BOUNDS_MS = _lower_bounds()
BUCKETS = len(LOWER_BOUNDS_MS)
# What an hour without a lateness has. It is one array for all of them: 100,000 hours would take 500 MB.
NO_COUNTS = np.zeros(BUCKETS, np.int64)
NO_COUNTS.flags.writeable = False


def count_ms(values_ms: Int64s) -> NDArray[np.int64]:
    """Count values by step: int64[BUCKETS]; negative values, from a clock that is behind, count as 0."""
    if not len(values_ms):
        return NO_COUNTS
    steps = np.searchsorted(LOWER_BOUNDS_MS, values_ms, side="right") - 1
    return np.bincount(np.maximum(steps, 0), minlength=BUCKETS).astype(np.int64)


def quantile_ms(counts: NDArray[np.int64], quantile: float) -> int | None:
    """The middle of the step in which the value of that rank lies; None when nothing was counted."""
    total = int(counts.sum())
    if not total:
        return None
    rank = max(1, int(np.ceil(quantile * total)))
    step = int(np.searchsorted(np.cumsum(counts), rank))
    lower = int(LOWER_BOUNDS_MS[step])
    upper = int(LOWER_BOUNDS_MS[step + 1]) - 1 if step + 1 < BUCKETS else lower
    return (lower + upper) // 2
