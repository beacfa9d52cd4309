"""Room: how many bytes of sends may be queued, for callers on threads.

Invariant: no more bytes are taken than the limit, and a waiting caller is woken when there may be room.
"""

from __future__ import annotations

import threading


class Room:
    """Taken by threads, given back by the loop; free room costs one lock."""

    __slots__ = ("_limit", "_lock", "_more", "_taken", "_waiting")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting = 0
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)

    def take(self, byte_count: int, limit_s: float) -> bool:
        """Take room, waiting for it; False when there is none for ``limit_s``."""
        with self._lock:
            if self._taken + byte_count > self._limit:
                self._waiting += 1
                try:
                    if not self._more.wait_for(lambda: self._taken + byte_count <= self._limit, limit_s):
                        return False
                finally:
                    self._waiting -= 1
            self._taken += byte_count
            return True

    def give(self, byte_count: int) -> None:
        """Give room back."""
        with self._lock:
            self._taken -= byte_count
            if self._waiting:
                self._more.notify_all()
