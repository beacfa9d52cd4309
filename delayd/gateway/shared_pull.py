"""Shared pull: callers who wait for messages of one group share one pull at its server.

     A wants 10 ┐                                       ┌─▶ A gets 10
     B wants 5  ├─ one pull of 25 ─▶ 12 messages came ──┼─▶ B gets 2
     C wants 10 ┘                                       └─▶ C waits on, in the next pull

A pull lasts until the time of the first caller is over. A caller with less time than that has it begun anew.

Invariant: no message rests here. What came goes to those who wait, in the order in which they asked. What is left
because callers hung up meanwhile goes back to the group at once, and costs no attempt.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

from delayd.client.pulling.consumer import AsyncConsumer, AsyncMessageBatch
from delayd.gateway.connection import Listener
from delayd.gateway.values import PULL_MAX


class Share(NamedTuple):
    """What one caller gets: these rows of what came."""

    batch: AsyncMessageBatch
    rows: range


class _Waiting(NamedTuple):
    """A caller who waits for up to ``most`` messages until then; None when it gets none."""

    most: int
    until: float
    share: asyncio.Future[Share | None]


class SharedPull:
    """Pulls of one group with one length of leases; belongs to one loop."""

    def __init__(self, consumer: AsyncConsumer) -> None:
        self.consumer = consumer
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Future[Share | None], _Waiting] = {}  # In the order in which they asked.
        self._begins = False
        self._pulling: asyncio.Task[AsyncMessageBatch] | None = None
        self._ends_at = -math.inf  # When the pull under way ends.
        self._used_at = self._loop.time()

    def rests_since(self, instant: float) -> bool:
        """Whether nobody has waited here since that instant of the loop's clock."""
        return not self._waiting and self._used_at <= instant

    async def take(self, most: int, wait_s: float, listener: Listener) -> Share | None:
        """The next messages, at most ``most``; None when none came in time, or the listener has left."""
        share: asyncio.Future[Share | None] = listener.future()
        until = self._loop.time() + wait_s
        self._waiting[share] = _Waiting(most, until, share)
        if until < self._ends_at:
            self._end_pull()
        self._begin_soon()
        try:
            taken = await share
        finally:
            self._used_at = self._loop.time()
            if self._waiting.pop(share, None) is not None and not self._waiting:
                self._end_pull()
        if taken is not None and listener.is_gone:
            self._give_back(taken)
            return None
        return taken

    async def close(self) -> None:
        """Let nobody wait any more, and disconnect."""
        for waiting in self._waiting.values():
            _answer(waiting, None)
        self._end_pull()
        await self.consumer.close()

    def _begin_soon(self) -> None:
        # Requests that come together are read in one turn of the loop, so their callers share the pull of the next one.
        if self._pulling is None and not self._begins:
            self._begins = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._begins = False
        waiting = [each for each in self._waiting.values() if not each.share.done()]
        if not waiting:
            return
        most = min(sum([each.most for each in waiting]), PULL_MAX)
        self._ends_at = min([each.until for each in waiting])
        wait = timedelta(seconds=max(0.0, self._ends_at - self._loop.time()))
        self._pulling = self._loop.create_task(self.consumer.pull(most, wait=wait))
        self._pulling.add_done_callback(partial(self._ended, waiting, self._ends_at))

    def _end_pull(self) -> None:
        """End the pull under way. What comes of it all the same goes to the next one, or back to the server."""
        self._ends_at = -math.inf
        if self._pulling is not None:
            self._pulling.cancel()

    def _ended(self, asked: Sequence[_Waiting], ends_at: float, pulling: asyncio.Task[AsyncMessageBatch]) -> None:
        self._pulling, self._ends_at = None, -math.inf
        error = None if pulling.cancelled() else pulling.exception()
        if error is not None:
            for each in asked:
                _answer(each, error)
        elif not pulling.cancelled():
            batch = pulling.result()
            if len(batch):
                self._share_out(batch)
            for each in asked if not len(batch) else ():
                if each.until <= ends_at:
                    _answer(each, batch.outage)
        if self._waiting:
            self._begin_soon()

    def _share_out(self, batch: AsyncMessageBatch) -> None:
        first, count = 0, len(batch)
        for share, waiting in [*self._waiting.items()]:
            if first == count:
                return
            if not share.done():
                rows = range(first, min(first + waiting.most, count))
                share.set_result(Share(batch, rows))
                del self._waiting[share]
                first = rows.stop
        if first < count:
            self._give_back(Share(batch, range(first, count)))

    def _give_back(self, share: Share) -> None:
        self.consumer.give_back([share.batch[row] for row in share.rows])


def _answer(waiting: _Waiting, error: BaseException | None) -> None:
    if waiting.share.done():
        return
    if error is None:
        waiting.share.set_result(None)
    else:
        waiting.share.set_exception(error)
