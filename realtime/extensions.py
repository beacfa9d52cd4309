"""Extensions: which pulled messages of a group are held for longer than their first lease.

They are in no log: after a restart each pull has a whole lease again, as ever. Invariant: each extension has an alarm
that comes at ``armed_ms``, at its end or before, and it is forgotten when its messages are settled. So memory follows
the messages that are held, however often they are extended.

An example: 700 to 709 were pulled with a lease that ends at 30,000.

1. At 20,000 the consumer extends 704 and 705 by 30 s, so these are held until 50,000, and an alarm is set for then.
2. At 30,000 the alarm of the pull comes: 700 to 703 and 706 to 709 lapse.
3. At 40,000 it extends 704 by 30 s, until 70,000. The alarm at 50,000 is early enough, so no other one is set.
4. At 50,000 that alarm comes: 705 lapses, and for 704 an alarm is set at 70,000.
5. 704 is acknowledged: its extension is forgotten, and the alarm at 70,000 counts no more.
"""

import bisect
from typing import NamedTuple


class Extension(NamedTuple):
    """Pull sequences [start, end) are held until ``until_ms``, and an alarm for them comes at ``armed_ms``."""

    start: int
    end: int
    until_ms: int
    armed_ms: int


class Extensions:
    """Of one group; disjoint, and rising by pull sequence. All times are those of leases."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: list[Extension] = []

    def __len__(self) -> int:
        return len(self.all)

    def extend(self, start: int, end: int, until_ms: int) -> bool:
        """Hold [start, end) until that instant, whatever was said of it before; return whether an alarm must be set
        for then.
        """
        low, high = self._overlapping(start, end)
        parts: list[Extension] = []
        at, needs_alarm = start, False
        for each in self.all[low:high]:
            if each.start < start:
                parts.append(each._replace(end=start))
            if at < each.start:
                parts.append(Extension(at, each.start, until_ms, until_ms))
                needs_alarm = True
            first, at = max(each.start, start), min(each.end, end)
            parts.append(Extension(first, at, until_ms, min(each.armed_ms, until_ms)))
            needs_alarm = needs_alarm or each.armed_ms > until_ms
            if each.end > end:
                parts.append(each._replace(start=end))
        if at < end:
            parts.append(Extension(at, end, until_ms, until_ms))
            parts.sort()
            needs_alarm = True
        self.all[low:high] = parts
        return needs_alarm

    def forget(self, start: int, end: int) -> None:
        """Nobody holds [start, end) any more."""
        low, high = self._overlapping(start, end)
        cut = self.all[low:high]
        left = [each._replace(end=start) for each in cut if each.start < start]
        self.all[low:high] = [*left, *[each._replace(start=end) for each in cut if each.end > end]]

    def ended(self, start: int, end: int, now_ms: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not held beyond ``now_ms``."""
        parts: list[tuple[int, int]] = []
        low, high = self._overlapping(start, end)
        for each in self.all[low:high]:
            if each.until_ms > now_ms:
                if start < each.start:
                    parts.append((start, each.start))
                start = max(start, each.end)
        if start < end:
            parts.append((start, end))
        return parts

    def is_armed(self, start: int, end: int, at_ms: int) -> bool:
        """Whether an alarm that was set for [start, end) at that time still counts."""
        low, high = self._overlapping(start, end)
        return any(each.armed_ms == at_ms for each in self.all[low:high])

    def arm_again(self, start: int, end: int, now_ms: int) -> list[Extension]:
        """The parts of [start, end) whose alarm has come and which are held for longer; an alarm must be set for the
        end of each.
        """
        low, high = self._overlapping(start, end)
        again: list[Extension] = []
        for at in range(low, high):
            each = self.all[at]
            if each.armed_ms <= now_ms < each.until_ms:
                self.all[at] = each._replace(armed_ms=each.until_ms)
                again.append(self.all[at])
        return again

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        low = bisect.bisect_left(self.all, (start,))
        if low and self.all[low - 1].end > start:
            low -= 1
        return low, bisect.bisect_left(self.all, (end,))
