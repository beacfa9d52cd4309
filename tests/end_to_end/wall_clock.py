"""A wall clock that a test sets while servers run on it, and on nothing else: for processes started inside it.

Invariant: their monotonic clocks and timers are the machine's, so a step is what an administrator's would be.
"""

import struct
import time
from pathlib import Path

from .preloaded import Preloaded

STEP = struct.Struct("<q")


class WallClock(Preloaded):
    """The wall clock of every process that was started inside `preloaded`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "wall_clock", "DELAYD_TEST_WALL_MS", STEP.pack(0))

    @property
    def ahead_ms(self) -> int:
        """How far it is ahead of the machine's."""
        (ahead_ms,) = STEP.unpack(self.control.read_bytes())
        return int(ahead_ms)

    def now_ms(self) -> int:
        """The time that this clock shows."""
        return time.time_ns() // 1_000_000 + self.ahead_ms

    def step(self, ms: int) -> None:
        """Set it ahead or back, for all processes at once."""
        self.write(STEP.pack(self.ahead_ms + ms))
