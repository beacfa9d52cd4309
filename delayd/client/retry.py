"""Retry: how long to wait before the next try.

Invariant: waits grow up to a bound and are random, so that clients do not all come back at the same moment.
"""

from __future__ import annotations

import random

FIRST_MS = 25.0  # A server that restarts is back within a second; one that drops a connection, at once.
LAST_MS = 2_000.0  # A longer wait would make all users miss a service that is back, for that long.
GROWTH = 2.0


class Backoff:
    """Counts the failures in a row."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def next_ms(self) -> float:
        """Note another failure; return the wait before the next try."""
        wait_ms = min(LAST_MS, FIRST_MS * GROWTH ** min(self._failures, 16))
        self._failures += 1
        return wait_ms * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Note that it worked."""
        self._failures = 0


def spread_ms(retry_after_ms: int) -> float:
    """A wait that a server asked for, lengthened a little and unequally."""
    return max(retry_after_ms, 1) * random.uniform(1.0, 1.25)
