"""Stock: messages that a consumer has fetched and not handed out.

Invariant: each message leaves once: it is handed out to a caller that iterates or pulls on any thread, or it is given
back. A caller that is interrupted on its way out, as by Ctrl-C, puts back the messages that it took.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from delayd.client.pulling.acks import Handles
from delayd.client.pulling.message import MessageColumns, Pulled

Batch = TypeVar("Batch", bound=MessageColumns)

log = logging.getLogger(__name__)


class Stock(Generic[Batch]):
    """Messages in the order in which they came; each answer to a PULL stands on a *shelf* of its own.

    ``make`` turns pulled messages into the consumer's batch.

    The loop puts in and gives back, any thread takes out. The loop never waits for a thread, because that thread may be
    in a signal handler and wait for the loop.
    """

    __slots__ = ("_closed", "_lock", "_make", "_shelves")

    def __init__(self, make: Callable[[Pulled], Batch]) -> None:
        self._make = make
        self._shelves: deque[_Shelf[Batch]] = deque()
        # Reentrant, because a signal handler may close the consumer that it interrupted.
        self._lock = threading.RLock()
        self._closed = False

    @property
    def count(self) -> int:
        """How many messages."""
        # A deque is copied to a list in one step of the interpreter, whatever other threads do.
        return sum([shelf.left for shelf in list(self._shelves)])

    @property
    def oldest(self) -> float | None:
        """When the first of them was put in; None when there is none."""
        return next((shelf.put_at for shelf in list(self._shelves) if shelf.left), None)

    def put(self, pulled: Pulled, now: float) -> None:
        """Add messages to hand out."""
        self._shelves.append(_Shelf(pulled, now))

    def next(self, now: float, given: list[tuple[Batch, int]]) -> int:
        """Add the next message to ``given``, as its batch and row; return how many messages of its answer are left, or
        -1 when no message is here.

        ``given`` has the message before it leaves the stock, so an interrupted caller loses nothing (`put_back`).
        """
        with self._lock:
            while True:
                # Written out for speed: take the first shelf, if one of its messages may be handed out.
                shelf = self._shelves[0] if self._shelves else None
                if shelf is None or (row := shelf.row) >= shelf.count or now >= shelf.pulled.lease_ends:
                    if self._first(now) is None:
                        return -1
                    continue
                batch = shelf.batch
                if batch is None:
                    batch = shelf.batch = self._make(shelf.pulled)
                given.append((batch, row))
                if self._closed:
                    # A signal handler has just closed the consumer, and gave this message back.
                    given.clear()
                    return -1
                shelf.row = row = row + 1
                return shelf.count - row

    def take(self, most: int, now: float, given: list[Pulled]) -> bool:
        """Take out the next messages, at most ``most`` and of one answer only, and add them to ``given``; False when no
        message is here.

        ``given`` has them before they leave the stock, so an interrupted caller loses nothing: it puts them back
        (`put_back`). A message whose lease has ended is not handed out.
        """
        with self._lock:
            while (shelf := self._first(now)) is not None:
                end = min(shelf.row + most, shelf.count)
                given.append(shelf.pulled if end - shelf.row == shelf.count else shelf.rest.cut(most)[0])
                if self._closed:
                    given.clear()
                    break
                shelf.row = end
                return True
            return False

    def put_back(self, pulled: Pulled, now: float) -> None:
        """Take back messages that did not reach their caller: they are the next to be handed out."""
        with self._lock:
            first = self._first(now)
            if first is None or first.rest.parts[0].pull_first != pulled.parts[0].pull_first:
                self._shelves.appendleft(_Shelf(pulled, now))

    def give_back_older(self, put_before: float) -> Handles | None:
        """Take out messages that were put in before ``put_before`` and are still here; return their handles, None while
        a thread takes something.
        """
        return self._give_back(lambda shelf: shelf.left if shelf.put_at <= put_before else 0)

    def give_back_last(self, count: int) -> Handles | None:
        """Take out the last messages, at most ``count``; as `give_back_older`."""
        left = self.count - count
        kept = 0

        def surplus(shelf: _Shelf[Batch]) -> int:
            nonlocal kept
            keep = max(0, min(shelf.left, left - kept))
            kept += keep
            return shelf.left - keep

        return self._give_back(surplus)

    def close(self) -> Handles:
        """Hand out nothing more; return the handles of the messages that are left."""
        with self._lock:
            self._closed = True
            left = [handle for shelf in self._shelves for handle in shelf.rest.handles]
            self._shelves.clear()
            return left

    def _first(self, now: float) -> _Shelf[Batch] | None:
        while self._shelves:
            shelf = self._shelves[0]
            if shelf.left and now < shelf.pulled.lease_ends:
                return shelf
            if shelf.left:
                log.warning("lease_ended_unused subject=%s messages=%d", shelf.pulled.subject, shelf.left)
            self._shelves.popleft()
        return None

    def _give_back(self, surplus: Callable[[_Shelf[Batch]], int]) -> Handles | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            handles: Handles = []
            kept: deque[_Shelf[Batch]] = deque()
            for shelf in self._shelves:
                extra = surplus(shelf)
                keep, back = shelf.rest.cut(shelf.left - extra)
                handles += back.handles
                if extra:
                    shelf = _Shelf(keep, shelf.put_at)
                kept.append(shelf)
            self._shelves = kept
            return handles
        finally:
            self._lock.release()


class _Shelf(Generic[Batch]):
    """The messages of one answer to a PULL that are not handed out yet."""

    __slots__ = ("batch", "count", "pulled", "put_at", "row")

    def __init__(self, pulled: Pulled, put_at: float) -> None:
        self.pulled = pulled
        self.count = pulled.message_count
        self.put_at = put_at
        self.batch: Batch | None = None  # Once one of its messages was iterated over.
        self.row = 0  # The next one to hand out.

    @property
    def left(self) -> int:
        """How many messages."""
        return self.count - self.row

    @property
    def rest(self) -> Pulled:
        """The messages that are left."""
        return self.pulled.cut(self.row)[1] if self.row else self.pulled
