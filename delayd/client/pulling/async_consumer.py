"""AsyncConsumer: takes messages of one subject for one group, from the caller's own event loop.

Invariant: a message that was handed out is the caller's until its lease ends, and `ack()` returns only when the
acknowledgement is durable.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self

from delayd.client.instants import monotonic_s
from delayd.client.limits import need_meta, need_timedelta
from delayd.client.pulling.acks import Handles
from delayd.client.pulling.consumer_core import LEASE, WAIT, ConsumerCore, ConsumerSettings
from delayd.client.pulling.message import MessageColumns, MessageView, Pulled
from delayd.client.sending.arguments import TIMEOUT_MS


class AsyncConsumer:
    """One consumer of a group; made and used inside a running loop, best with ``async with`` and ``async for``.

    Example::

        async with delayd.AsyncConsumer("127.0.0.1:7400", "orders.cancel", group="billing") as consumer:
            async for message in consumer:
                print(message.body, message.headers, f"{message.late_ms} ms late")
                await message.ack()

    Any number of consumers share a group, and each message goes to one of them until its lease ends. A group gets every
    message of its subject; another group of the same subject gets them, too.

    Args:
        address: where meta listens, ``host:port``; without it the environment's DELAYD_META, or this machine.
        subject: the name that the messages were sent under.
        group: the name that all consumers which share the work give; the first pull makes the group.
        lease: how long a message is this consumer's alone. It is offered again if it is not acknowledged by then.
        prefetch: whether messages are fetched while the caller works: about as many as it works off in a quarter of a
            second, by its own measured pace, and none when one takes longer than half a second. What it does not come
            for within a second goes back to the others, and does not count as an attempt.
        max_messages: the most that a fetch brings. Without it a pull that names no number gets what the caller works
            off in about a second: one message at first, and at most 500.
        timeout_ms: how long a call tries to reach a server that is away.
    """

    def __init__(
        self,
        address: str | None = None,
        subject: str = "",
        group: str = "",
        *,
        lease: timedelta = LEASE,
        prefetch: bool = True,
        max_messages: int | None = None,
        timeout_ms: float = TIMEOUT_MS,
    ) -> None:
        self._address = need_meta(address, others="subject= and group=")
        self._settings = ConsumerSettings(subject, group, lease, prefetch, max_messages, timeout_ms)
        self._own_core = self._new_core()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        self.core.check()
        return self

    async def __anext__(self) -> AsyncMessage:
        """The next message; waits for it as long as it takes, also while servers are away. The close ends iteration."""
        core = self.core
        given: list[tuple[AsyncMessageBatch, int]] = []
        while not core.take_next(given):
            core.check_loop()
            if not await core.more_to_iterate():
                raise StopAsyncIteration
        return AsyncMessage(*given[0])

    async def pull(self, max_messages: int | None = None, wait: timedelta = WAIT) -> AsyncMessageBatch:
        """The next messages, as columns: at least one, or none when none came within ``wait``.

        What comes to a pull that was cancelled is given to the next call, or goes back.

        Args:
            max_messages: the most to return. All that are returned are the caller's own until the lease ends.
            wait: how long to wait for the first message.

        Raises:
            RetryLater: no server was reached within the timeout.
            StaleHandle: an `ack(wait=False)` came too late; it is raised once, here or at the next call of any kind.
        """
        most = self._settings.pulled(max_messages)
        until = monotonic_s() + need_timedelta("wait", wait).total_seconds()
        core = self.core
        core.check_loop()
        core.check()
        given: list[Pulled] = []
        while not core.take(most, given):
            if not await core.more(most, until):
                return AsyncMessageBatch(Pulled.nothing(self._settings.subject), self)
        return AsyncMessageBatch(given[0], self)

    async def flush(self) -> None:
        """Wait until all acknowledgements are durable; raises what failed since the last call."""
        core = self.core
        core.check_loop()
        await core.flush()

    async def close(self) -> None:
        """Flush, give back what was not handed out, disconnect; calling it again does nothing.

        What was handed out stays its holder's: it can be acknowledged after the close, too.
        """
        core = self._own_core
        if not core.closed:
            core.check_loop()
            await core.close(core.leave())

    @property
    def core(self) -> ConsumerCore[AsyncMessageBatch]:
        """The core of this process; after a fork a new one."""
        if self._own_core.pid != os.getpid():
            _LEFT_TO_PARENTS.append(self._own_core)
            self._own_core = self._new_core()
        return self._own_core

    async def settle(self, handles: Handles, wait: bool, *, back: bool = False) -> None:
        """Acknowledge ``handles`` or give them ``back``; with ``wait`` it is durable then. Messages call it."""
        if not handles:
            return
        core = self.core
        if core.closed:
            await self._settle_late(handles, back)
            return
        core.check_loop()
        if wait:
            await core.settle_and_wait(handles, back=back)
        else:
            core.check()
            core.settle(handles, back=back)

    async def _settle_late(self, handles: Handles, back: bool) -> None:
        """After the close, on a connection of its own; durably, for no later call can say what failed."""
        core = self._new_core()
        try:
            await core.settle_and_wait(handles, back=back)
        finally:
            await core.close(core.leave())

    def _new_core(self) -> ConsumerCore[AsyncMessageBatch]:
        # All is on one thread, so work is done on the loop at once.
        return ConsumerCore(
            self._address, self._settings, lambda pulled: AsyncMessageBatch(pulled, self), lambda work: work()
        )


class AsyncMessageBatch(MessageColumns):
    """Messages as columns; iterate over it for single ones."""

    def __init__(self, pulled: Pulled, consumer: AsyncConsumer) -> None:
        super().__init__(pulled)
        self.consumer = consumer

    def __getitem__(self, row: int) -> AsyncMessage:
        return AsyncMessage(self, range(len(self))[row])

    def __iter__(self) -> Iterator[AsyncMessage]:
        return (AsyncMessage(self, row) for row in range(len(self)))

    async def ack(self, *, wait: bool = True) -> None:
        """All of them are done. With ``wait`` it is durable then; without, a failure is raised at a later call.

        Raises:
            StaleHandle: some were no longer held for this consumer, and are offered again.
            DelaydError: the server was not reached within the timeout; the messages come again when the lease ends.
        """
        await self.consumer.settle(self.pulled.handles, wait)

    async def nack(self, *, wait: bool = True) -> None:
        """Give all of them back: they are offered again, attempt + 1. Raises what `ack` raises.

        After a first attempt they come again at once, later after a pause that grows from 100 ms to 10 s.
        """
        await self.consumer.settle(self.pulled.handles, wait, back=True)


class AsyncMessage(MessageView):
    """One message."""

    __slots__ = ("_consumer",)

    def __init__(self, batch: AsyncMessageBatch, row: int) -> None:
        super().__init__(batch, row)
        self._consumer = batch.consumer

    async def ack(self, *, wait: bool = True) -> None:
        """It is done; see AsyncMessageBatch.ack."""
        await self._consumer.settle([self.handle], wait)

    async def nack(self, *, wait: bool = True) -> None:
        """Give it back; see AsyncMessageBatch.nack."""
        await self._consumer.settle([self.handle], wait, back=True)


_LEFT_TO_PARENTS: list[ConsumerCore[AsyncMessageBatch]] = []
