"""Ranges: a set of numbers that come in runs, such as the pull sequences that nobody has acknowledged yet.

Ranges are half-open, disjoint, rising and never adjacent.
"""

import bisect
from collections.abc import Iterable, Iterator


class Ranges:
    """A set of integers as runs; each change costs the logarithm of the runs, and the runs that it moves."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in runs:
            self.add(start, end)

    @classmethod
    def of(cls, start: int, end: int) -> "Ranges":
        """The run [start, end), which must not be empty."""
        made = cls()
        made._starts.append(start)
        made._ends.append(end)
        return made

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    @property
    def first(self) -> int:
        """The lowest number; there must be one."""
        return self._starts[0]

    @property
    def total(self) -> int:
        """How many numbers."""
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """Add [start, end)."""
        low = bisect.bisect_left(self._ends, start)
        high = bisect.bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def remove(self, start: int, end: int) -> list[tuple[int, int]]:
        """Take [start, end) out; returns the runs that were there."""
        low = bisect.bisect_right(self._ends, start)
        high = bisect.bisect_left(self._starts, end)
        if low >= high:
            return []
        starts, ends = self._starts[low:high], self._ends[low:high]
        kept_starts = [starts[0]] if starts[0] < start else []
        kept_ends = [start] if starts[0] < start else []
        if ends[-1] > end:
            kept_starts.append(end)
            kept_ends.append(ends[-1])
        self._starts[low:high] = kept_starts
        self._ends[low:high] = kept_ends
        starts[0], ends[-1] = max(starts[0], start), min(ends[-1], end)
        return list(zip(starts, ends, strict=True))

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a number of [start, end) is in the set."""
        at = bisect.bisect_right(self._ends, start)
        return at < len(self._starts) and self._starts[at] < end

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """The runs of [start, end) that are in the set."""
        low = bisect.bisect_right(self._ends, start)
        high = bisect.bisect_left(self._starts, end)
        runs = zip(self._starts[low:high], self._ends[low:high], strict=True)
        return [(max(first, start), min(last, end)) for first, last in runs]

    def copy(self) -> "Ranges":
        """The same runs as a set of its own; some nanoseconds a run."""
        made = Ranges()
        made._starts, made._ends = self._starts.copy(), self._ends.copy()
        return made

    def drop_first(self, runs: int) -> int:
        """Forget the lowest ``runs`` runs, which must exist; return where the last of them ends."""
        end = self._ends[runs - 1]
        del self._starts[:runs]
        del self._ends[:runs]
        return end
