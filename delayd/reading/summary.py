"""Summary: the figures of an audited hour, and their sum over hours. Lateness is counted on a logarithmic scale, in 16
steps an octave, exact below 23 ms.

Invariant: ``scheduled == dispatched + dead + cancelled + expired + in_doubt + pending + undecided + waiting +
missing``. Two histograms merge by adding their counts, so hours, tasks and machines give the figures of one pass. A
quantile is off by half a step at most, 2.3 %.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

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


@dataclass(frozen=True, slots=True, eq=False)
class HourSummary:
    """One hour of one delay server; ``hour`` counts from the epoch. In a sum over hours both are 0.

    Counts from ``dispatched`` to ``missing`` are classes of scheduled rows; those from ``lost`` to ``late`` count
    messages with such a finding. ``late_ms_max`` and ``lateness`` are of rows that were not past due when accepted.
    """

    log_id: int = 0
    hour: int = 0
    scheduled: int = 0
    dispatched: int = 0
    dead: int = 0
    cancelled: int = 0
    expired: int = 0
    in_doubt: int = 0
    pending: int = 0  # Not due yet.
    undecided: int = 0  # Due, without a known outcome yet: in flight.
    waiting: int = 0  # Due for longer, while a server that it needs is away or was away just now.
    # Without an outcome though all servers were up for long enough, or not where the dispatch log says.
    missing: int = 0
    lost: int = 0
    duplicate: int = 0
    early: int = 0
    orphan: int = 0
    mismatch: int = 0
    conservation: int = 0
    late: int = 0
    unproven: int = 0  # Dispatched by the dispatch log; the target's retention has removed the row.
    tallied: int = 0  # Unproven rows that the target's tally of the hour proves: it agrees with the dispatch log.
    past_due: int = 0  # Dispatched rows that were already due when accepted.
    late_ms_max: int = 0
    lateness: NDArray[np.int64] = field(default_factory=lambda: NO_COUNTS, repr=False)
    past_due_lateness: NDArray[np.int64] = field(default_factory=lambda: NO_COUNTS, repr=False)

    @property
    def balanced(self) -> bool:
        """Whether nothing is lost, doubled, early, without origin or contradictory; a late message is no imbalance."""
        faults = self.lost, self.duplicate, self.early, self.orphan, self.mismatch, self.conservation
        return not any(faults)

    @property
    def equation(self) -> str:
        """What became of the scheduled rows, as people read it: ``scheduled 3 = dispatched 2 + pending 1``."""
        classes = [(name, getattr(self, name)) for name in CLASSES]
        parts = " + ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in classes if count) or "0"
        return f"scheduled {self.scheduled:,} = {parts}"

    def late_ms(self, quantile: float) -> int | None:
        """Lateness at a quantile, such as 0.99; None when nothing was dispatched."""
        found = quantile_ms(self.lateness, quantile)
        return None if found is None else min(found, self.late_ms_max)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HourSummary):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in FIGURES)


CLASSES = ("dispatched", "dead", "cancelled", "expired", "in_doubt", "pending", "undecided", "waiting", "missing")
FIGURES = tuple(figure.name for figure in fields(HourSummary))
COUNTS = FIGURES[2:-2]  # The figures that are single numbers; the last of them is a maximum, the others are sums.


def join_parts(parts: Sequence[HourSummary]) -> HourSummary:
    """The figures of an hour that was audited in parts."""
    return replace(sum_up(parts), log_id=parts[0].log_id, hour=parts[0].hour)


def sum_up(hours: Iterable[HourSummary]) -> HourSummary:
    """Add up the figures of hours."""
    listed = list(hours)
    sums = {name: sum(int(getattr(hour, name)) for hour in listed) for name in COUNTS}
    sums["late_ms_max"] = max((hour.late_ms_max for hour in listed), default=0)
    return HourSummary(
        **sums,
        lateness=_sum(hour.lateness for hour in listed),
        past_due_lateness=_sum(hour.past_due_lateness for hour in listed),
    )


def _sum(histograms: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    total = NO_COUNTS.copy()
    for counts in histograms:
        if counts is not NO_COUNTS:
            total += counts
    return total
