"""Alarms: what is to happen at an instant, unless it was overtaken before.

What was overtaken stays in the heap until it is due or until such entries are the larger part, so that a change costs
no search and memory is bounded by what is alive.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

NEVER_MS = 1 << 62
CLEAN_MIN = 1_000  # Fewer entries than this are not worth a pass, which takes some 0.3 ms for these.


class Alarms(Generic[T]):
    """A heap by monotonic time; ``is_alive`` says whether an item, set for that time, still counts."""

    __slots__ = ("_clean_at", "_heap", "_is_alive", "_order")

    def __init__(self, is_alive: Callable[[int, T], bool]) -> None:
        self._is_alive = is_alive
        self._heap: list[tuple[int, int, T]] = []
        self._order = count()  # Items themselves have no order.
        self._clean_at = CLEAN_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_ms: int, item: T) -> None:
        """Have an item come up at ``at_ms``."""
        heapq.heappush(self._heap, (at_ms, next(self._order), item))
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if self._is_alive(entry[0], entry[2])]
            heapq.heapify(self._heap)
            self._clean_at = max(CLEAN_MIN, 2 * len(self._heap))

    def next_ms(self, before_ms: int = NEVER_MS) -> int | None:
        """When the first living item is due; a time of ``before_ms`` or later says only that none is due before."""
        heap, is_alive = self._heap, self._is_alive
        while heap:
            at_ms, _, item = heap[0]
            if at_ms >= before_ms or is_alive(at_ms, item):
                return at_ms
            heapq.heappop(heap)
        return None

    def due(self, now_ms: int) -> Iterator[T]:
        """Take out what is due and alive, in order."""
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, _, item = heapq.heappop(self._heap)
            if self._is_alive(at_ms, item):
                yield item
