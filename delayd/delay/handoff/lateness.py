"""Lateness: how long after their due instants the messages of the last ten seconds reached a target, for STATUS.

Invariant: each row that a target acknowledged counts once, in the second of the acknowledgement. A frame is counted as
a whole, by arrays.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.clock import Clock
from delayd.reading.histogram import BUCKETS, count_ms, quantile_ms

SECONDS = 10


class Second:
    """The messages of one second."""

    __slots__ = ("counts", "ms_max", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.counts: NDArray[np.int64] = np.zeros(BUCKETS, np.int64)
        self.ms_max = 0

    def add(self, late_ms: Int64s) -> None:
        self.counts += count_ms(late_ms)
        self.ms_max = max(self.ms_max, int(late_ms.max()))


class Lateness:
    """The messages that one target took in the last ten seconds."""

    __slots__ = ("_clock", "_seconds")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: deque[Second] = deque()  # Those with messages, oldest first.

    def note(self, due_ms: Sequence[Int64s], appended_at_ms: int) -> None:
        """Count rows of one frame by when they were due; the target appended all of them at once."""
        late_ms = appended_at_ms - (due_ms[0] if len(due_ms) == 1 else np.concatenate(due_ms))
        second = self._now_s()
        if not self._seconds or self._seconds[-1].second != second:
            self._forget(second)
            self._seconds.append(Second(second))
        self._seconds[-1].add(late_ms)

    def last(self) -> list[Second]:
        """What was counted in the last ten seconds."""
        self._forget(self._now_s())
        return list(self._seconds)

    def _now_s(self) -> int:
        return self._clock.monotonic_ms() // 1_000

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0].second <= second - SECONDS:
            self._seconds.popleft()


def figures(all_targets: Iterable[Lateness]) -> dict[str, int]:
    """The figures of a server for STATUS; there are no others than the number of messages when it is 0."""
    seconds = [second for lateness in all_targets for second in lateness.last()]
    counts = sum((second.counts for second in seconds), np.zeros(BUCKETS, np.int64))
    p50, p99 = quantile_ms(counts, 0.5), quantile_ms(counts, 0.99)
    found = {"taken_rows_10s": int(counts.sum())}
    if p50 is None or p99 is None:
        return found
    longest = max(second.ms_max for second in seconds)
    # The middle of a step may lie above the longest.
    return {**found, "late_ms_p50": min(p50, longest), "late_ms_p99": min(p99, longest), "late_ms_max": longest}
