"""How long to wait before the next try.

Invariant: waits grow up to a bound and are never equal among clients, or all of them would come back in one instant.
"""

from __future__ import annotations

import random

FIRST_MS = 25.0  # A server that restarts is back within a second; one that drops a connection, at once.
LAST_MS = 2_000.0  # Not longer, or a service that is back is missed by all of its users for that long.
GROWTH = 2.0


class Backoff:
    """Counts the failures in a row."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def next_ms(self) -> float:
        """Another failure: the wait before the next try."""
        wait_ms = min(LAST_MS, FIRST_MS * GROWTH ** min(self._failures, 16))
        self._failures += 1
        return wait_ms * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked."""
        self._failures = 0


def spread_ms(retry_after_ms: int) -> float:
    """A wait that a server asked for, lengthened a little and unequally."""
    return max(retry_after_ms, 1) * random.uniform(1.0, 1.25)
