"""How long the loop made its callers wait: a short timer that notes how late it was called (rule B2).

A long turn delays every request of the server; STATUS shows the longest wait, since the start and of the last minute.
"""

from __future__ import annotations

import asyncio
import time

# The measured wait may be too short by up to this; twenty wake-ups a second cost a thousandth of a processor.
TICK_S = 0.05
PART_S = 30.0  # The last minute is two parts, the present one and the one before: never less than half a minute.


class LoopWatch:
    """Measures one loop, from `start` to `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._longest_s = 0.0
        self._parts_s = [0.0, 0.0]
        self._part_ends = 0.0
        self._due = 0.0
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
        self._part_ends = time.monotonic() + PART_S
        self._set()

    def close(self) -> None:
        """Measure no more."""
        if self._handle is not None:
            self._handle.cancel()

    def _set(self) -> None:
        self._due = time.monotonic() + TICK_S
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        late_s = now - self._due
        if now >= self._part_ends:
            self._parts_s = [0.0, self._parts_s[0]]
            self._part_ends = now + PART_S
        self._parts_s[0] = max(self._parts_s[0], late_s)
        self._longest_s = max(self._longest_s, late_s)
        self._set()
