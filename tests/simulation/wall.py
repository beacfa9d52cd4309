"""How far ahead a server's clock may be, by rule T1 alone: an oracle that shares nothing with the judged clock.

Invariant: it is never below what the rule allows, so what leaves ahead of it left early.
"""

from __future__ import annotations

from delayd.testing.clock import SimMachine

JUMP_MS = 5_000
BELIEVED_AFTER_MS = 30_000


class WallBound:
    """The most that wall time may be ahead of the time since boot, as far as it can be believed."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine
        self._ahead_ms = machine.wall_ms - machine.boottime_ms
        self._doubt_since_ms: int | None = None

    def latest_ms(self) -> int:
        """The latest instant that a server may take it to be."""
        self.look()
        return self._machine.boottime_ms + self._ahead_ms

    def look(self, *, heard: bool = False) -> None:
        """Take a reading at each step of the wall clock; ``heard``: the server has taken one at this moment too."""
        machine = self._machine
        ahead_ms = machine.wall_ms - machine.boottime_ms
        if ahead_ms <= self._ahead_ms + JUMP_MS:
            self._ahead_ms = max(self._ahead_ms, ahead_ms)
            if heard:
                self._doubt_since_ms = None
        elif self._doubt_since_ms is None:
            self._doubt_since_ms = machine.boottime_ms
        elif machine.boottime_ms - self._doubt_since_ms >= BELIEVED_AFTER_MS:
            self._ahead_ms, self._doubt_since_ms = ahead_ms, None
