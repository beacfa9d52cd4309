"""What iteration over a consumer has pulled and not handed out.

Invariant: each message is handed out once, to whoever iterates or pulls, on any thread; or it is left at the close.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from delayd.client.acks import Handles
from delayd.client.instants import monotonic_s
from delayd.client.message import MessageColumns, Pulled

Batch = TypeVar("Batch", bound=MessageColumns)


class Cursor(Generic[Batch]):
    """A place in the batches that iteration goes through; ``make`` shows pulled messages as the consumer's batch."""

    __slots__ = ("_batches", "_lock", "_make", "_row")

    def __init__(self, make: Callable[[Pulled], Batch]) -> None:
        self._make = make
        self._batches: deque[Batch] = deque()
        self._row = 0  # Of the first batch: the next one to hand out.
        self._lock = threading.Lock()

    def put(self, pulled: Pulled) -> None:
        """More to hand out."""
        with self._lock:
            self._batches.append(self._make(pulled))

    def next(self) -> tuple[Batch, int] | None:
        """The next message, as its batch and row; None when there is none whose lease goes on."""
        with self._lock:
            while self._batches:
                batch = self._batches[0]
                if self._row < len(batch) and monotonic_s() < batch.pulled.lease_ends:
                    self._row += 1
                    return batch, self._row - 1
                self._batches.popleft()
                self._row = 0
            return None

    def take(self, most: int) -> Pulled | None:
        """Up to ``most`` of what is left of one batch, for a pull; None when nothing is left."""
        with self._lock:
            while self._batches:
                batch, row = self._batches.popleft(), self._row
                self._row = 0
                if row < len(batch) and monotonic_s() < batch.pulled.lease_ends:
                    first, rest = batch.pulled.cut(row)[1].cut(most)
                    if rest.parts:
                        self._batches.appendleft(self._make(rest))
                    return first
            return None

    def leave(self) -> Handles:
        """Hand out nothing more: the handles of what is left."""
        with self._lock:
            left: Handles = []
            for batch in self._batches:
                left += batch.pulled.cut(self._row)[1].handles
                self._row = 0
            self._batches.clear()
            return left
