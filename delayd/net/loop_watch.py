"""How long the loop made its callers wait: a short timer that notes how late it was called (rule B2).

A long turn delays every request of the server; STATUS shows the longest wait, since the start and of the last minute.
Nobody can be heard while the loop stands still, because its process is stopped or its machine is paused. So whoever
counts the silence of others is told of it, before it judges anything (rule T5).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial

# The measured wait may be too short by up to this; twenty wake-ups a second cost a thousandth of a processor.
TICK_S = 0.05
STALL_S = 0.1  # A timer that is later than this by so much means that the loop stood still.
PART_S = 30.0  # The last minute is two parts, the present one and the one before: never less than half a minute.

# By `clock_gettime`, which a program that freezes its time does not freeze. It is asked for each piece that arrives.
_now_s = partial(time.clock_gettime, time.CLOCK_MONOTONIC)


class LoopWatch:
    """Measures one loop, from `start` to `close`. ``stood_still`` hears for how many seconds it stood still."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, stood_still: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._loop = loop
        self._stood_still = stood_still
        self._longest_s = 0.0
        self._parts_s = [0.0, 0.0]
        self._part_ends = 0.0
        self._due = math.inf
        self._handle: asyncio.TimerHandle | None = None

    @property
    def wait_ms_max(self) -> int:
        """The longest wait since the start."""
        return int(self._longest_s * 1000)

    @property
    def wait_ms_max_minute(self) -> int:
        """The longest wait of the last minute, or of half of it at least."""
        return int(max(self._parts_s) * 1000)

    def start(self) -> None:
        """Begin to measure."""
        self._part_ends = _now_s() + PART_S
        self._set()

    def look(self) -> None:
        """Tell of a stall now, if there was one: the timer may come only after what waited for the loop meanwhile."""
        now = _now_s()
        if now - self._due > STALL_S:
            self._note(now)

    def close(self) -> None:
        """Measure no more."""
        self._due = math.inf
        if self._handle is not None:
            self._handle.cancel()

    def _set(self) -> None:
        self._due = _now_s() + TICK_S
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = _now_s()
        if now >= self._part_ends:
            self._parts_s = [0.0, self._parts_s[0]]
            self._part_ends = now + PART_S
        self._note(now)
        self._set()

    def _note(self, now: float) -> None:
        late_s, self._due = now - self._due, now
        self._parts_s[0] = max(self._parts_s[0], late_s)
        self._longest_s = max(self._longest_s, late_s)
        if late_s > STALL_S:
            self._stood_still(late_s)
