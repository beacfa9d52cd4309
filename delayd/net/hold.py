"""Hold: keeps what a delay server would tell other servers back for a moment, while a backup is cut (docs/backup.md).

Invariant: calls leave in their order, and none is lost: they leave when the hold ends, by a word or by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> None:
        """Do not call."""


class Hold:
    """One hold at a time; belongs to the loop. ``later`` calls back after some seconds."""

    def __init__(self, later: Callable[[float, Callable[[], None]], Timer]) -> None:
        self.held = False  # Read for each frame that would leave.
        self._later = later
        self._timer: Timer | None = None
        self._calls: deque[Callable[[], object]] = deque()

    def begin(self, hold_ms: int) -> None:
        """Hold calls for so long at most; 0 holds nothing. A hold that is under way lasts as long as the new one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if hold_ms:
            self.held = True
            self._timer = self._later(hold_ms / 1000, self._end)
        else:
            self._end()

    def end(self) -> bool:
        """Let everything leave; returns whether the hold had lasted until now."""
        lasted = self.held
        self._end()
        return lasted

    def leave(self, call: Callable[[], object]) -> None:
        """Call at once, or when the hold ends."""
        if self.held:
            self._calls.append(call)
        else:
            call()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # What a call has leave goes behind those that have waited.
        while self._calls:
            self._calls.popleft()()
        self.held = False
