"""Alarms: what is to happen at an instant, unless something else made it unnecessary before.

A part of the server has an `Alarm` for each thing that it does by the clock, and says when: nobody asks the part
whether something is due. The core asks `Alarms.next_ms`, and calls `Alarms.ring` at that time. An example: a batch
can't be read at 1,000 ms, so its part calls ``retry.after(30_000)``. At 7,000 ms the file is put back, and the part
calls ``retry.soon()``. `next_ms` is 7,000, and `ring` calls the part once. The entry for 31,000 ms means nothing by
then.

An entry that is no longer needed stays in the heap until it is due, or until such entries are the larger part. So a
change needs no search, and memory is bounded by the entries that still count.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import Generic, TypeVar

from delayd.machine.clock import Clock

T = TypeVar("T")

NEVER_MS = 1 << 62
FULL_AGAIN_MS = 1_000  # After a full disk, or a lack of memory or descriptors: a try costs one write or one read.
DAMAGED_AGAIN_MS = 30_000  # After damage: an operator must restore the file, and a try may read all of it.
LOOK_MS = 30_000  # Between two looks for files that somebody removes, cuts or replaces.
CLEAN_MIN = 1_000  # With fewer entries than this a cleaning pass is not worth it; it takes some 0.3 ms for this many.


class DueHeap(Generic[T]):
    """Items by monotonic time; ``is_alive`` says whether an item, set for that time, still counts."""

    __slots__ = ("_clean_at", "_heap", "_is_alive", "_order")

    def __init__(self, is_alive: Callable[[int, T], bool]) -> None:
        self._is_alive = is_alive
        self._heap: list[tuple[int, int, T]] = []
        self._order = count()  # The heap compares this number at equal times, because items themselves have no order.
        self._clean_at = CLEAN_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_ms: int, item: T) -> None:
        """Let an item come up at ``at_ms``."""
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
        """When the first item that still counts is due; an answer of ``before_ms`` or later says only that none is due
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


class Alarm:
    """One thing that a part does by the clock, at one instant or none; it is off when it is made and when it rings."""

    __slots__ = ("_alarms", "at_ms", "call")

    def __init__(self, alarms: Alarms, call: Callable[[], object]) -> None:
        self.at_ms: int | None = None  # Monotonic; None: it is off.
        self.call = call
        self._alarms = alarms

    def at(self, at_ms: int) -> None:
        """Ring at an instant, and not at the one that was said before."""
        if at_ms != self.at_ms:
            self.at_ms = at_ms
            self._alarms.add(at_ms, self)

    def after(self, ms: int) -> None:
        """Ring so many milliseconds from now."""
        self.at(self._alarms.clock.monotonic_ms() + ms)

    def soon(self) -> None:
        """Ring in the next turn of the loop."""
        self.after(0)

    def off(self) -> None:
        """Do not ring."""
        self.at_ms = None

    def put_off(self, ms: int) -> None:
        """Ring so much later, if it is to ring at all."""
        if self.at_ms is not None:
            self.at(self.at_ms + ms)


class Alarms(DueHeap[Alarm]):
    """The alarms of a server: its shell sleeps until `next_ms` at most, and calls `ring`."""

    __slots__ = ("_looks", "clock")

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda at_ms, alarm: alarm.at_ms == at_ms)
        self.clock = clock
        self._looks: list[Alarm] = []

    def alarm(self, call: Callable[[], object]) -> Alarm:
        """An alarm that is off."""
        return Alarm(self, call)

    def every(self, ms: int, call: Callable[[], object]) -> Alarm:
        """An alarm that rings at each multiple of ``ms``: those of one period ring in one turn, so that an
        idle server wakes up once for them.
        """

        def next_ms() -> int:
            return (self.clock.monotonic_ms() // ms + 1) * ms

        def again() -> None:
            alarm.at(next_ms())
            call()

        alarm = Alarm(self, again)
        alarm.at(next_ms())
        return alarm

    def look(self, call: Callable[[], object]) -> Alarm:
        """An alarm for a look at files, every LOOK_MS in which they could change."""
        alarm = self.every(LOOK_MS, call)
        self._looks.append(alarm)
        return alarm

    def stood_still(self, ms: int) -> None:
        """No file could change for so long: each look comes so much later."""
        for look in self._looks:
            look.put_off(ms)

    def ring(self) -> None:
        """Call what is due, once; what it sets for now is for the next turn."""
        due: list[Alarm] = []
        for alarm in self.due(self.clock.monotonic_ms()):
            alarm.off()
            due.append(alarm)
        for alarm in due:
            alarm.call()
