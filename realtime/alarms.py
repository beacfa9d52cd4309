"""Alarms: things that are to happen at an instant, unless something else made them unnecessary before.

An alarm that is no longer needed stays in the heap until it is due, or until such alarms are the larger part. So a
change needs no search, and memory is bounded by the alarms that still count.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

NEVER_MS = 1 << 62
CLEAN_MIN = 1_000  # With fewer entries than this a cleaning pass is not worth it; it takes some 0.3 ms for this many.


class Alarms(Generic[T]):
    """A heap by monotonic time; ``is_alive`` says whether an item, set for that time, still counts."""

    __slots__ = ("_clean_at", "_heap", "_is_alive", "_order")

    def __init__(self, is_alive: Callable[[int, T], bool]) -> None:
        self._is_alive = is_alive
        self._heap: list[tuple[int, int, T]] = []
        self._order = count()  # The heap compares this number at equal times, because items themselves have no order.
        self._clean_at = CLEAN_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_ms: int, item: T) -> None:
        """Set an alarm: the item comes up at ``at_ms``."""
        heapq.heappush(self._heap, (at_ms, next(self._order), item))
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if self._is_alive(entry[0], entry[2])]
            heapq.heapify(self._heap)
            self._clean_at = max(CLEAN_MIN, 2 * len(self._heap))

    @property
    def first(self) -> T:
        """The item of the first alarm; there must be one."""
        return self._heap[0][2]

    def next_ms(self, before_ms: int = NEVER_MS) -> int | None:
        """When the first alarm that still counts is due; an answer of ``before_ms`` or later says only that none is due
        before.
        """
        heap, is_alive = self._heap, self._is_alive
        while heap:
            at_ms, _, item = heap[0]
            if at_ms >= before_ms or is_alive(at_ms, item):
                return at_ms
            heapq.heappop(heap)
        return None

    def due(self, now_ms: int) -> Iterator[T]:
        """Take out the items that are due and still count, in order."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, _, item = heapq.heappop(self._heap)
            if self._is_alive(at_ms, item):
                yield item
