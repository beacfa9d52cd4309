"""Consumer: the blocking form of AsyncConsumer, on a background thread.

Invariant: every method may be called from any thread, and after a fork from the child too, which gets a consumer of its
own (rule I2).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Self

from delayd.client.at_exit import forget, remember
from delayd.client.instants import monotonic_s
from delayd.client.limits import need_meta, need_timedelta
from delayd.client.loop_thread import LoopThread, Work
from delayd.client.pulling.acks import Handles
from delayd.client.pulling.consumer_core import LEASE, WAIT, ConsumerCore, ConsumerSettings
from delayd.client.pulling.message import MessageColumns, MessageView, Pulled
from delayd.client.sending.arguments import TIMEOUT_MS
from delayd.errors import AlreadyClosed

log = logging.getLogger(__name__)


class Consumer:
    """One consumer of a group; thread-safe, best used with ``with`` and ``for``.

    Example::

        with delayd.Consumer("127.0.0.1:7400", "orders.cancel", group="billing") as consumer:
            for message in consumer:
                print(message.body, message.headers, f"{message.late_ms} ms late")
                message.ack()

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
        self._closed = False
        self._engine: _Engine | None = None
        self._starting = threading.RLock()  # The handler of a signal may close the client that it interrupted.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        self._standing_engine()
        return self

    def __next__(self) -> Message:
        """The next message; waits for it as long as it takes, also while servers are away. The close ends iteration."""
        engine = self._engine
        if engine is None or engine.thread.pid != os.getpid():
            if self._closed:
                raise StopIteration
            engine = self._standing_engine()
        core = engine.core
        given: list[tuple[MessageBatch, int]] = []
        try:
            while not core.take_next(given):
                if not engine.wait_to_iterate():
                    raise StopIteration
            return Message(*given[0])
        except BaseException:
            # A Ctrl-C on the way out.
            core.put_back_next(given)
            raise

    def pull(self, max_messages: int | None = None, wait: timedelta = WAIT) -> MessageBatch:
        """The next messages, as columns: at least one, or none when none came within ``wait``.

        What comes to a pull that was interrupted, as by Ctrl-C, is given to the next call, or goes back.

        Args:
            max_messages: the most to return. All that are returned are the caller's own until the lease ends.
            wait: how long to wait for the first message.

        Raises:
            RetryLater: no server was reached within the timeout.
            StaleHandle: an `ack(wait=False)` came too late; it is raised once, here or at the next call of any kind.
        """
        most = self._settings.pulled(max_messages)
        until = monotonic_s() + need_timedelta("wait", wait).total_seconds()
        engine = self._standing_engine()
        core = engine.core
        core.check()
        given: list[Pulled] = []
        try:
            while not core.take(most, given):
                if not engine.thread.call(core.more(most, until), ends_with_caller=True):
                    return MessageBatch(Pulled.nothing(self._settings.subject), self)
            return MessageBatch(given[0], self)
        except BaseException:
            core.put_back(given)
            raise

    def flush(self) -> None:
        """Wait until all acknowledgements are durable; raises what failed since the last call."""
        engine = self._standing_engine()
        engine.thread.call(engine.core.flush())

    def close(self) -> None:
        """Flush, give back what was not handed out, disconnect; calling it again does nothing.

        What was handed out stays its holder's, on whatever thread: it can be acknowledged after the close, too.
        """
        with self._starting:
            self._closed = True
            engine, self._engine = self._engine, None
        if engine is not None and engine.thread.pid == os.getpid():
            engine.close()

    def settle(self, handles: Handles, wait: bool, *, back: bool = False) -> None:
        """Acknowledge ``handles`` or give them ``back``; with ``wait`` it is durable then. Messages call it."""
        if not handles:
            return
        try:
            engine = self._standing_engine()
            if wait:
                engine.thread.call(engine.settle(handles, back))
            else:
                engine.settle_soon(handles, back)
        except AlreadyClosed:
            # Acknowledged twice is acknowledged once, so it does not matter what had left when the close came.
            self._settle_late(handles, back)

    def _settle_late(self, handles: Handles, back: bool) -> None:
        """After the close, on a connection of its own; durably, for no later call can say what failed."""
        engine = self._new_engine()
        try:
            engine.thread.call(engine.settle(handles, back))
        finally:
            engine.close()

    def _standing_engine(self) -> _Engine:
        engine = self._engine
        if engine is not None and engine.thread.pid == os.getpid():
            return engine
        with self._starting:
            if self._closed:
                raise AlreadyClosed("this consumer was closed")
            if self._engine is None or self._engine.thread.pid != os.getpid():
                # The parent's thread does not exist in a child, and its connection is the parent's.
                self._engine = self._new_engine()
            return self._engine

    def _new_engine(self) -> _Engine:
        return _Engine(self._address, self._settings, lambda pulled: MessageBatch(pulled, self))


class MessageBatch(MessageColumns):
    """Messages as columns; iterate over it for single ones."""

    def __init__(self, pulled: Pulled, consumer: Consumer) -> None:
        super().__init__(pulled)
        self.consumer = consumer

    def __getitem__(self, row: int) -> Message:
        return Message(self, range(len(self))[row])

    def __iter__(self) -> Iterator[Message]:
        return (Message(self, row) for row in range(len(self)))

    def ack(self, *, wait: bool = True) -> None:
        """All of them are done. With ``wait`` it is durable then; without, a failure is raised at a later call.

        Raises:
            StaleHandle: some were no longer held for this consumer, and are offered again.
            DelaydError: the server was not reached within the timeout; the messages come again when the lease ends.
        """
        self.consumer.settle(self.pulled.handles, wait)

    def nack(self, *, wait: bool = True) -> None:
        """Give all of them back: they are offered again, attempt + 1. Raises what `ack` raises.

        After a first attempt they come again at once, later after a pause that grows from 100 ms to 10 s.
        """
        self.consumer.settle(self.pulled.handles, wait, back=True)


class Message(MessageView):
    """One message."""

    __slots__ = ("_consumer",)

    def __init__(self, batch: MessageBatch, row: int) -> None:
        super().__init__(batch, row)
        self._consumer = batch.consumer

    def ack(self, *, wait: bool = True) -> None:
        """It is done; see MessageBatch.ack."""
        self._consumer.settle([self.handle], wait)

    def nack(self, *, wait: bool = True) -> None:
        """Give it back; see MessageBatch.nack."""
        self._consumer.settle([self.handle], wait, back=True)


class _Engine:
    """A core on a thread of its own."""

    def __init__(self, address: str, settings: ConsumerSettings, make: Callable[[Pulled], MessageBatch]) -> None:
        self.thread = LoopThread("delayd-consumer")
        self.core = self.thread.call(_made(lambda: ConsumerCore(address, settings, make, self._post)))
        self._inbox: deque[tuple[Handles, bool]] = deque()
        self._posted = False
        remember(self)

    async def settle(self, handles: Handles, back: bool) -> None:
        """On the loop: acknowledge or give back, durably."""
        await self.core.settle_and_wait(handles, back=back)

    def settle_soon(self, handles: Handles, back: bool) -> None:
        """From any thread: acknowledge or give back soon; raises what failed before."""
        self.core.check()
        self._inbox.append((handles, back))
        # Set before the post and cleared before the inbox is emptied: a call between the two posts once more.
        if not self._posted:
            try:
                self._posted = True
                self.thread.post(self._empty_inbox)
            except BaseException:
                # A Ctrl-C in between: the next call posts again.
                self._posted = False
                raise

    def wait_to_iterate(self) -> bool:
        """From any thread: wait until something may be in stock; False after the close."""
        try:
            return self.thread.call(self.core.more_to_iterate(), ends_with_caller=True)
        except AlreadyClosed:
            return False

    def end(self, until: float) -> None:
        """The program ends; see at_exit."""
        if self.thread.pid == os.getpid():
            closing = self.core.close(self.core.leave())
            if not self.thread.call_within(closing, max(until - monotonic_s(), 0)):
                log.warning("ended_before_flushed subject=%s", self.core.subject)

    def close(self) -> None:
        """Flush, give back, disconnect and end the thread."""
        forget(self)
        left = self.core.leave()
        try:
            self.thread.call(self.core.close(left))
        finally:
            self.thread.close()

    def _post(self, work: Work) -> None:
        # Nothing needs to be fetched any more when the thread has ended.
        with suppress(AlreadyClosed):
            self.thread.post(work)

    def _empty_inbox(self) -> None:
        self._posted = False
        inbox, settle = self._inbox, self.core.settle
        while inbox:
            handles, back = inbox.popleft()
            settle(handles, back=back)


async def _made(make: Callable[[], ConsumerCore[MessageBatch]]) -> ConsumerCore[MessageBatch]:
    return make()
