"""AsyncProducer: sends messages from the caller's own event loop.

Invariant: an invalid argument raises an error before anything is queued. Each queued message ends with a receipt, or
with an error that says whether the message may be kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from os import getpid
from types import TracebackType
from typing import NamedTuple, Self

from delayd.client.at_exit import forget, remember
from delayd.client.instants import HORIZON_MS
from delayd.client.limits import Headers, need_meta
from delayd.client.own_loop import check_loop, own_loop
from delayd.client.sending.arguments import LINGER_MS, QUEUE_BYTES_MAX, TIMEOUT_MS, Arguments, ProducerSettings, Single
from delayd.client.sending.due_columns import Delays, DeliverAt, DeliverAtMs
from delayd.client.sending.gathering import ROW_BYTES
from delayd.client.sending.producer_core import ProducerCore, queue_full, tell_unsent
from delayd.client.sending.receipt import Accepted, BatchReceipt, Receipt
from delayd.errors import SendHandle

HORIZON = timedelta(milliseconds=HORIZON_MS)
WHAT = "an AsyncProducer"


class AsyncProducer:
    """Sends messages to be delivered later. Make and use it in one running event loop, best with ``async with``.

    Example::

        async with delayd.AsyncProducer("127.0.0.1:7400") as producer:
            receipt = await producer.send("orders.cancel", b"42", delay=timedelta(minutes=30))
            print("kept as", receipt.sequence, "due at", receipt.deliver_at)

    It connects at the first send. Any number of tasks may share one producer; their sends share batches.

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
        self._core = _AsyncCore(self._address, self._settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def send(
        self,
        subject: str,
        body: bytes,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        deliver_at_ms: int | None = None,
        headers: Headers | None = None,
    ) -> asyncio.Future[Receipt]:
        """Send one message, due at one of ``delay``, ``deliver_at`` or ``deliver_at_ms``.

        Await the returned future at once, or keep it and go on. When it is cancelled, the message is sent all the same.

        Args:
            subject: the name by which consumers ask for the message: 1 to 255 characters of ``[A-Za-z0-9._%/-]``.
            body: the bytes that a consumer gets; together with the headers at most 4 MiB.
            delay: how long from now the message is due, by the delay server's clock.
            deliver_at: when the message is due, with a time zone. A message whose instant is past is due at once.
            deliver_at_ms: the same in milliseconds since the epoch.
            headers: names with texts or bytes, at most 32 KiB; the consumer gets them with the body.

        Raises:
            CallerError: an argument is wrong; the call itself raises it, and nothing was queued.
            QueueFull: the queue stayed full for the timeout; nothing was sent.
            RetryLater: no server took the message within the timeout; it is not kept.
            OutcomeUnknown: nobody knows whether the message is kept; ask `outcome` with the handle of this error.
        """
        row = self._arguments.single(subject, body, delay, deliver_at, deliver_at_ms, headers)
        core = self._core
        if core.pid != getpid():
            core = self._standing_core()
        try:
            return core.queue(row)
        except RuntimeError:
            # The loop is not checked for each message, because the check costs a twentieth of a send.
            core.check_loop()
            raise

    send_nowait = send  # As the blocking Producer calls it.

    async def send_batch(
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
        return await self._core_of_this_loop().core.send_batch(columns)

    async def outcome(self, handle: SendHandle) -> Accepted | None:
        """Ask what became of a send that raised OutcomeUnknown.

        Returns what the server accepted, or None. None means that the message is not kept and never will be, so the
        caller can send it anew.

        Args:
            handle: the ``handle`` of the error. Ask within a minute.
        """
        return await self._core_of_this_loop().core.sender.ask(handle)

    async def flush(self) -> None:
        """Wait until all earlier sends have an outcome. It raises no errors of sends: each send raises its own."""
        await self._core_of_this_loop().flush()

    async def close(self) -> None:
        """Flush and disconnect; calling it again does nothing."""
        await self._core.close()

    def _core_of_this_loop(self) -> _AsyncCore:
        core = self._standing_core()
        core.check_loop()
        return core

    def _standing_core(self) -> _AsyncCore:
        if self._core.pid != getpid():
            # Sockets and batch numbers belong to the parent process, which goes on with them (rule I2).
            _LEFT_TO_PARENTS.append(self._core)
            self._core = _AsyncCore(self._address, self._settings)
        return self._core


class _AsyncCore:
    """A core, and the line of sends that wait because its queue is full."""

    def __init__(self, address: str, settings: ProducerSettings) -> None:
        self._loop = own_loop(WHAT)
        self.core = ProducerCore(address, settings, self._free)
        self.pid = self.core.pid
        self._add = self.core.outbox.add
        self._settings = settings
        self._new_future = self._loop.create_future
        self._bytes_max = settings.queue_bytes_max
        self._queued_bytes = 0
        self._line: deque[_InLine] = deque()
        remember(self)

    def end(self, until: float) -> None:
        """Do nothing but log: the program ends, and the loop has ended before; see at_exit."""
        if self.pid == getpid():
            tell_unsent(self.core.outbox.unsent + len(self._line))

    def check_loop(self) -> None:
        """Raise WrongLoop outside of the loop that this core was made in."""
        check_loop(WHAT, self._loop)

    def queue(self, row: Single) -> asyncio.Future[Receipt]:
        """Queue one send, or let it wait in line."""
        if self.core.closed:
            self.core.check_open()
        answered: asyncio.Future[Receipt] = self._new_future()
        byte_count = len(row[1]) + len(row[4]) + ROW_BYTES
        if self._line or self._queued_bytes + byte_count > self._bytes_max:
            timer = self._loop.call_later(self._settings.timeout_ms / 1000, self._queue_full, answered)
            self._line.append(_InLine(row, byte_count, answered, timer))
        else:
            self._queued_bytes += byte_count
            self._add(row, byte_count, answered)
        return answered

    async def flush(self) -> None:
        """See AsyncProducer."""
        in_line = [waiting.answered for waiting in self._line]
        if in_line:
            await asyncio.wait(in_line)
        await self.core.outbox.flush()

    async def close(self) -> None:
        """See AsyncProducer."""
        if not self.core.closed:
            self.check_loop()
            self.core.closed = True
            await self.flush()
            forget(self)
            await self.core.disconnect()

    def _free(self, byte_count: int) -> None:
        self._queued_bytes -= byte_count
        while self._line:
            waiting = self._line[0]
            if not waiting.answered.done():
                if self._queued_bytes + waiting.byte_count > self._bytes_max:
                    return
                self._queued_bytes += waiting.byte_count
                self._add(waiting.row, waiting.byte_count, waiting.answered)
            waiting.timer.cancel()
            self._line.popleft()

    def _queue_full(self, answered: asyncio.Future[Receipt]) -> None:
        if not answered.done():
            answered.set_exception(queue_full(self._settings))


class _InLine(NamedTuple):
    row: Single
    byte_count: int
    answered: asyncio.Future[Receipt]
    timer: asyncio.TimerHandle


_LEFT_TO_PARENTS: list[_AsyncCore] = []
