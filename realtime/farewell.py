"""Farewell: it ends, at the delay servers, what groups left there that ended with their consumers: dead letters, and
messages that were to come again.

Such a group has ended, and the group of its retry subject has not: it stands for what is still to be done, over
restarts too. It is deleted when all delay servers have said that nothing of it is pending any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

from delayd.client.producer import AsyncProducer
from delayd.errors import DelaydError
from delayd.machine.operating import LogLimit

from .groups import Group

TIMEOUT_MS = 5_000
AGAIN_S = 10.0  # A delay server that is away, or was handing messages over, is asked again after this.

log = logging.getLogger(__name__)
limited = LogLimit(log)


class Left(Protocol):
    """What is to be ended: `realtime.group_records.GroupRecords`."""

    on_left: Callable[[], None]

    @property
    def left(self) -> Collection[Group]:
        """The groups of retry subjects whose own groups have ended."""

    def delete(self, group: Group) -> None:
        """Delete one of them."""


class Farewell:
    """Ends what is left; belongs to the loop. ``after`` is called when something was told to the core."""

    def __init__(self, groups: Left, meta: str, after: Callable[[], None]) -> None:
        self._groups = groups
        self._meta = meta
        self._after = after
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what was left before."""
        self._groups.on_left = self._new
        self._new()

    async def close(self) -> None:
        """Stop; the next life goes on."""
        self._groups.on_left = lambda: None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _new(self) -> None:
        if self._groups.left and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._serve())
            self._task.add_done_callback(_ended)

    async def _serve(self) -> None:
        while self._groups.left:
            try:
                async with AsyncProducer(self._meta, timeout_ms=TIMEOUT_MS) as producer:
                    for group in list(self._groups.left):
                        await self._end(producer, group)
            except DelaydError as error:
                limited.warning(
                    "farewell_waits", "farewell_waits groups=%d reason=%r", len(self._groups.left), str(error)
                )
            if self._groups.left:
                await asyncio.sleep(AGAIN_S)

    async def _end(self, producer: AsyncProducer, group: Group) -> None:
        walked = await producer.cancel_where(group.subject.name, dry_run=False)
        if walked.done:
            log.info("group_left_nothing group=%s ended=%d", group.name, walked.done)
        # What was being handed over, or could not be read, is found by the next walk.
        if not walked.in_flight and not walked.unread and group in self._groups.left:
            self._groups.delete(group)
            self._after()


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "a bug in the farewell", "exception": error})
