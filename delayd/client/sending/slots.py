"""Slots: places that a bounded number of batches take while they are under way.

Invariant: no more are taken than the limit at that moment allows, and the task that has waited longest gets the next
one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """Belongs to one loop; the limit may change, and counts from the next take or give on."""

    __slots__ = ("_limit", "_waiting", "taken")

    def __init__(self, limit: Callable[[], int]) -> None:
        self.taken = 0
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> bool:
        """Whether a take would not wait."""
        return not self._waiting and self.taken < self._limit()

    def take_free(self) -> bool:
        """Take one if that needs no waiting; False if it does."""
        free = self.free
        self.taken += free
        return free

    async def take(self, deadline: float) -> None:
        """Take one; TimeoutError when none is free before the deadline, which is on the loop's clock."""
        if self.take_free():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                # The slot was handed over in the same moment.
                self.give()
            raise

    def give(self) -> None:
        """Give one back; the task that has waited longest gets it."""
        self.taken -= 1
        while self._waiting and self.taken < self._limit():
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
