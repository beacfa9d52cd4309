"""Extensions: which pulled messages of a group are held for longer than their first lease.

They are in no log: after a restart each pull has a whole lease again, as ever.

An example: 700 to 709 were pulled with a lease that ends at 30,000. At 20,000 the consumer extends 704 and 705 by
30 s, so these are held until 50,000. At 30,000 the first alarm comes: 700 to 703 and 706 to 709 lapse. At 50,000 the
extension's own alarm comes, and 704 and 705 lapse, unless they were extended again meanwhile.
"""

import bisect
from typing import NamedTuple

CLEAN_MIN = 1_000  # With fewer of them than this a cleaning pass is not worth it.


class Extension(NamedTuple):
    """Pull sequences [start, end) are held until ``until_ms``, monotonic."""

    start: int
    end: int
    until_ms: int


class Extensions:
    """Of one group; disjoint, and rising by pull sequence."""

    __slots__ = ("_all", "_clean_at")

    def __init__(self) -> None:
        self._all: list[Extension] = []
        self._clean_at = CLEAN_MIN

    def __bool__(self) -> bool:
        return bool(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def extend(self, start: int, end: int, until_ms: int, now_ms: int) -> None:
        """Hold [start, end) until that instant, whatever was said of it before."""
        low, high = self._overlapping(start, end)
        cut = self._all[low:high]
        left = [each._replace(end=start) for each in cut if each.start < start]
        right = [each._replace(start=end) for each in cut if each.end > end]
        self._all[low:high] = [*left, Extension(start, end, until_ms), *right]
        if len(self._all) >= self._clean_at:
            self._all = [each for each in self._all if each.until_ms > now_ms]
            self._clean_at = max(CLEAN_MIN, 2 * len(self._all))

    def ended(self, start: int, end: int, now_ms: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not held beyond ``now_ms``."""
        parts: list[tuple[int, int]] = []
        low, high = self._overlapping(start, end)
        for each in self._all[low:high]:
            if each.until_ms > now_ms:
                if start < each.start:
                    parts.append((start, each.start))
                start = max(start, each.end)
        if start < end:
            parts.append((start, end))
        return parts

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        low = bisect.bisect_left(self._all, (start,))
        if low and self._all[low - 1].end > start:
            low -= 1
        return low, bisect.bisect_left(self._all, (end,))
