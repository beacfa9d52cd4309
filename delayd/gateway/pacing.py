"""Pacing: how often, and how many at one time, a server is asked; and a pause when it fails (docs/push.md, Limits).

Invariant: nothing here refuses: it says how long to wait.
"""

from __future__ import annotations

BURST_S = 0.1  # What a pace has saved up at most, so that a timer which is late costs nothing.
OPEN_AFTER = 5  # So many POSTs fail one behind the other, then the server is left alone for a while.
OPEN_S, OPEN_S_MAX = 1.0, 60.0


class Pace:
    """At most so many in a second, evenly; 0 is no limit. It keeps when the next one would be on time."""

    def __init__(self, per_second: float) -> None:
        self._step_s = 1.0 / per_second if per_second else 0.0
        self._next_at = 0.0

    def wait_s(self, now: float) -> float:
        """How long until one more may go."""
        return max(0.0, self._next_at - now) if self._step_s else 0.0

    def room(self, now: float, most: int) -> int:
        """How many may go now, of ``most``."""
        if not self._step_s:
            return most
        if self._next_at > now:
            return 0
        # What goes at once is what was saved up, and one more.
        return min(most, 1 + int((now - max(self._next_at, now - BURST_S)) / self._step_s))

    def take(self, now: float, count: int = 1) -> None:
        """Note that so many go."""
        if self._step_s:
            self._next_at = max(self._next_at, now - BURST_S) + count * self._step_s

    def is_rested(self, now: float) -> bool:
        """Whether it stands as if nothing had ever gone."""
        return not self._step_s or self._next_at <= now - BURST_S


class Breaker:
    """Whether a server is asked at all.

    An example: five POSTs fail. For 1 s nothing goes; then one goes, alone. It fails, too: 2 s; the next one is taken:
    all go again.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._open_until = 0.0
        self._pause_s = 0.0

    def wait_s(self, now: float) -> float:
        """How long nothing goes."""
        return max(0.0, self._open_until - now)

    @property
    def is_trying(self) -> bool:
        """Whether only one may go, to see whether the server is well again."""
        return self._pause_s > 0

    def failed(self, now: float) -> float:
        """Note that the server did not answer, or said that it can't; returns how long it is left alone, mostly 0."""
        self._failures += 1
        if self._failures < OPEN_AFTER or self._open_until > now:
            return 0.0
        self._pause_s = min(OPEN_S_MAX, 2 * self._pause_s or OPEN_S)
        self._open_until = now + self._pause_s
        return self._pause_s

    def rest(self, until: float) -> None:
        """Leave the server alone until then, because it says so."""
        self._open_until = max(self._open_until, until)

    def took(self) -> bool:
        """Note that the server takes messages; returns whether it did not before."""
        was, self._pause_s, self._failures = self._pause_s > 0, 0.0, 0
        return was
