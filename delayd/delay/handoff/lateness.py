"""Lateness: how long after their due instants the messages of the last ten seconds reached a target, for STATUS.

Invariant: each row that a target acknowledged counts once, in the second of the acknowledgement. Frames are counted as
a whole, by arrays.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.machine.clock import Clock
from delayd.machine.histogram import BUCKETS, count_values, quantile_of

SECONDS = 10
NOTED_MAX = 64  # Frames that are counted together; each has at most some thousands of rows, 8 bytes each.

_Frame = tuple[
    int, Sequence[Int64s], int
]  # When it was acknowledged, when its rows were due, and when it was appended.


class LateSecond:
    """The messages of one second."""

    __slots__ = ("counts", "ms_max", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.counts: NDArray[np.int64] = np.zeros(BUCKETS, np.int64)
        self.ms_max = 0

    def add(self, late_ms: Int64s) -> None:
        self.counts += count_values(late_ms)
        self.ms_max = max(self.ms_max, int(late_ms.max()))


class Lateness:
    """The messages that one target took in the last ten seconds.

    A frame is only noted when it is acknowledged; frames are counted many at a time, or when somebody asks.
    """

    __slots__ = ("_clock", "_noted", "_seconds")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted: list[_Frame] = []
        self._seconds: deque[LateSecond] = deque()  # Those with messages, oldest first.

    def note(self, due_ms: Sequence[Int64s], appended_at_ms: int) -> None:
        """Take rows of one frame by when they were due; the target appended all of them at once."""
        self._noted.append((self._clock.monotonic_ms(), due_ms, appended_at_ms))
        if len(self._noted) >= NOTED_MAX:
            self._count()

    def _count(self) -> None:
        noted, self._noted = self._noted, []
        for second, frames in groupby(noted, lambda frame: frame[0] // 1_000):
            if not self._seconds or self._seconds[-1].second != second:
                self._forget(second)
                self._seconds.append(LateSecond(second))
            late_ms = [appended_at_ms - due for _, dues, appended_at_ms in frames for due in dues]
            self._seconds[-1].add(late_ms[0] if len(late_ms) == 1 else np.concatenate(late_ms))

    def last(self) -> list[LateSecond]:
        """What was counted in the last ten seconds."""
        self._count()
        self._forget(self._clock.monotonic_ms() // 1_000)
        return list(self._seconds)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0].second <= second - SECONDS:
            self._seconds.popleft()


def figures(all_targets: Iterable[Lateness]) -> dict[str, int]:
    """The figures of a server for STATUS; there are no others than the number of messages when it is 0."""
    seconds = [second for lateness in all_targets for second in lateness.last()]
    counts = sum((second.counts for second in seconds), np.zeros(BUCKETS, np.int64))
    p50, p99 = quantile_of(counts, 0.5), quantile_of(counts, 0.99)
    found = {"taken_rows_10s": int(counts.sum())}
    if p50 is None or p99 is None:
        return found
    longest = max(second.ms_max for second in seconds)
    # The middle of a step may lie above the longest.
    return {**found, "late_ms_p50": min(p50, longest), "late_ms_p99": min(p99, longest), "late_ms_max": longest}
