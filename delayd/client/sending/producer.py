"""Producer: the blocking form of AsyncProducer, on a background thread.

Invariant: every method may be called from any thread, and after a fork from the child too, which gets a producer of its
own (rule I2).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from delayd.client.at_exit import forget, remember
from delayd.client.instants import HORIZON_MS, monotonic_s
from delayd.client.limits import Headers, need_meta
from delayd.client.loop_thread import LoopThread
from delayd.client.sending.arguments import LINGER_MS, QUEUE_BYTES_MAX, TIMEOUT_MS, Arguments, ProducerSettings, Single
from delayd.client.sending.due_columns import Delays, DeliverAt, DeliverAtMs
from delayd.client.sending.gathering import ROW_BYTES
from delayd.client.sending.producer_core import ProducerCore, queue_full, tell_unsent
from delayd.client.sending.receipt import Accepted, BatchReceipt, Receipt
from delayd.client.sending.room import Room
from delayd.client.sending.send_future import SendFuture
from delayd.errors import AlreadyClosed, SendHandle

HORIZON = timedelta(milliseconds=HORIZON_MS)


class Producer:
    """Sends messages to be delivered later. Several threads may share one; use it with ``with``, which closes it.

    Example::

        with delayd.Producer("127.0.0.1:7400") as producer:
            receipt = producer.send("orders.cancel", b"42", delay=timedelta(minutes=30))
            print("kept as", receipt.sequence, "due at", receipt.deliver_at)

    It connects at the first send. Sends of all threads share batches.

    Args:
        address: where meta listens, as ``host:port``. The default is the environment variable DELAYD_META, or
            127.0.0.1:7400.
        linger_ms: how long sends wait for further sends while a batch is under way, so that they share the next one.
            A send does not wait when no batch is under way.
        queue_bytes_max: how many bytes of sends may have no outcome yet. When there are more, a send waits for room.
        timeout_ms: how long a send waits for room in the queue, and then for its outcome.
        horizon: how far ahead a message may be due at most; 732 days is the limit.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        linger_ms: float = LINGER_MS,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        timeout_ms: float = TIMEOUT_MS,
        horizon: timedelta = HORIZON,
    ) -> None:
        self._address = need_meta(address)
        self._settings = ProducerSettings(linger_ms, queue_bytes_max, timeout_ms, horizon)
        self._arguments = Arguments(horizon)
        self._closed = False
        self._engine: _Engine | None = None
        # Reentrant, because a signal handler may close the client that it interrupted.
        self._starting = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def send(
        self,
        subject: str,
        body: bytes,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        deliver_at_ms: int | None = None,
        headers: Headers | None = None,
    ) -> Receipt:
        """Send one message, due at one of ``delay``, ``deliver_at`` or ``deliver_at_ms``, and wait until it is kept.

        Args:
            subject: the name by which consumers ask for the message: 1 to 255 characters of ``[A-Za-z0-9._%/-]``.
            body: the bytes that a consumer gets; together with the headers at most 4 MiB.
            delay: how long from now the message is due, by the delay server's clock.
            deliver_at: when the message is due, with a time zone. A message whose instant is past is due at once.
            deliver_at_ms: the same in milliseconds since the epoch.
            headers: names with texts or bytes, at most 32 KiB; the consumer gets them with the body.

        Raises:
            CallerError: an argument is wrong; nothing was queued.
            QueueFull: the queue stayed full for the timeout; nothing was sent.
            RetryLater: no server took the message within the timeout; it is not kept.
            OutcomeUnknown: nobody knows whether the message is kept; ask `outcome` with the handle of this error.
        """
        row = self._arguments.single(subject, body, delay, deliver_at, deliver_at_ms, headers)
        future = SendFuture()
        self._standing_engine().queue(row, future)
        # Every send ends by itself; this limit only keeps a bug from looking like a slow server.
        return future.receipt(2 * self._settings.timeout_ms / 1000 + 5)

    def send_nowait(
        self,
        subject: str,
        body: bytes,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        deliver_at_ms: int | None = None,
        headers: Headers | None = None,
    ) -> SendFuture:
        """Send one message, and do not wait for the outcome: the future has the receipt, or the error.

        While the queue is full the call waits for room. It raises CallerError and QueueFull itself. ``subject``,
        ``body``, ``delay``, ``deliver_at``, ``deliver_at_ms`` and ``headers`` are those of `send`.
        """
        row = self._arguments.single(subject, body, delay, deliver_at, deliver_at_ms, headers)
        future = SendFuture()
        self._standing_engine().queue(row, future)
        return future

    def send_batch(
        self,
        subject: str,
        bodies: Sequence[bytes],
        deliver_at_ms: DeliverAtMs | None = None,
        *,
        delay: Delays | None = None,
        deliver_at: DeliverAt | None = None,
        headers: Headers | Sequence[Headers | None] | None = None,
    ) -> BatchReceipt:
        """Send many messages of one subject, as columns, and wait until they are kept.

        Give exactly one of ``deliver_at_ms``, ``delay`` and ``deliver_at``. Each of them, and ``headers``, is one value
        for all messages, or a column with one value for each: a list, a numpy array (datetime64 counts in UTC) or a
        pandas Series (with a time zone).

        Args:
            subject: as for `send`.
            bodies: the bytes of each message.
            deliver_at_ms: when the messages are due, in milliseconds since the epoch.
            delay: how long from now they are due, by the delay server's clock.
            deliver_at: when they are due, with a time zone.
            headers: as for `send`; None for a message without headers.

        Raises:
            CallerError: an argument is wrong; nothing was sent.
            BatchFailed: some messages failed; the error has the receipt of the others.
            DelaydError: all messages failed in the same way; this is that error.
        """
        columns = self._arguments.columns(subject, bodies, deliver_at_ms, delay, deliver_at, headers)
        engine = self._standing_engine()
        return engine.thread.call(engine.core.send_batch(columns))

    def outcome(self, handle: SendHandle) -> Accepted | None:
        """Ask what became of a send that raised OutcomeUnknown.

        Returns what the server accepted, or None. None means that the message is not kept and never will be, so the
        caller can send it anew.

        Args:
            handle: the ``handle`` of the error. Ask within a minute.
        """
        engine = self._standing_engine()
        return engine.thread.call(engine.core.sender.ask(handle))

    def flush(self) -> None:
        """Wait until all earlier sends have an outcome. It raises no errors of sends: each send raises its own."""
        engine = self._standing_engine()
        engine.thread.call(engine.core.outbox.flush())

    def close(self) -> None:
        """Flush and disconnect. A second call does nothing."""
        with self._starting:
            closed, self._closed = self._closed, True
            engine, self._engine = self._engine, None
        if not closed and engine is not None and engine.thread.pid == os.getpid():
            engine.close()

    def _standing_engine(self) -> _Engine:
        engine = self._engine
        if engine is not None and engine.thread.pid == os.getpid():
            return engine
        with self._starting:
            if self._closed:
                raise AlreadyClosed("this producer was closed")
            if self._engine is None or self._engine.thread.pid != os.getpid():
                # A child does not have the parent's thread, and the batch numbers are the parent's.
                self._engine = _Engine(self._address, self._settings)
            return self._engine


class _Engine:
    """A core on a thread of its own."""

    def __init__(self, address: str, settings: ProducerSettings) -> None:
        self.thread = LoopThread("delayd-producer")
        self._settings = settings
        self._room = Room(settings.queue_bytes_max)
        self.core = self.thread.call(_made(lambda: ProducerCore(address, settings, self._room.give)))
        self._inbox: deque[tuple[Single, int, SendFuture]] = deque()
        self._posted = False
        remember(self)

    def queue(self, row: Single, future: SendFuture) -> None:
        """Hand one send over when there is room for it."""
        byte_count = len(row[1]) + len(row[4]) + ROW_BYTES
        if not self._room.take(byte_count, self._settings.timeout_ms / 1000):
            raise queue_full(self._settings)
        self._inbox.append((row, byte_count, future))
        # The flag is set before the post and cleared before the inbox is emptied: a send in between posts once more.
        if not self._posted:
            try:
                self._posted = True
                self.thread.post(self._empty_inbox)
            except BaseException:
                # A Ctrl-C came in between: the next send posts again.
                self._posted = False
                raise

    def end(self, until: float) -> None:
        """Flush because the program ends; see at_exit."""
        if self.thread.pid == os.getpid():
            self.thread.call_within(self.core.outbox.flush(), max(until - monotonic_s(), 0))
            tell_unsent(self.core.outbox.unsent + len(self._inbox))

    def close(self) -> None:
        """Flush, disconnect and end the thread."""
        forget(self)
        self.thread.call(self.core.outbox.flush())
        self.thread.call(self.core.disconnect())
        self.thread.close()

    def _empty_inbox(self) -> None:
        self._posted = False
        inbox, add = self._inbox, self.core.outbox.add
        while inbox:
            add(*inbox.popleft())


async def _made(make: Callable[[], ProducerCore]) -> ProducerCore:
    return make()
