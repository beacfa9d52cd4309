"""AsyncProducer: sends messages from the caller's own event loop.

Invariant: an argument at fault is named before anything is queued, and what was queued ends: with a receipt, or with an
error that says whether the message may be kept.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import NamedTuple, Self

from delayd.client.arguments import LINGER_MS, QUEUE_BYTES_MAX, TIMEOUT_MS, Arguments, Columns, ProducerSettings, Single
from delayd.client.block import Progress
from delayd.client.gathering import ROW_BYTES
from delayd.client.instants import HORIZON_MS, DeliverAtMs
from delayd.client.limits import Headers, parse_address
from delayd.client.meta import MetaView
from delayd.client.outbox import Outbox
from delayd.client.receipt import Accepted, BatchReceipt, Receipt
from delayd.client.sender import Sender
from delayd.errors import AlreadyClosed, QueueFull, SendHandle

HORIZON = timedelta(milliseconds=HORIZON_MS)


class AsyncProducer:
    """Sends messages to be delivered later; made and used inside a running loop, best with ``async with``.

    Nothing is asked of the network before the first send. One producer serves any number of tasks: their sends share
    batches.
    """

    def __init__(
        self,
        address: str,
        *,
        linger_ms: float = LINGER_MS,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        timeout_ms: float = TIMEOUT_MS,
        horizon: timedelta = HORIZON,
    ) -> None:
        self._address = address
        self._settings = ProducerSettings(linger_ms, queue_bytes_max, timeout_ms, horizon)
        parse_address(address)
        self._arguments = Arguments(horizon)
        self._core = ProducerCore(address, self._settings)

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
        """Send one message, due at one of the three; await the receipt, or keep the future and go on.

        A cancelled future stops the waiting, not the message.

        Raises:
            CallerError: at once, an argument is wrong; nothing was queued.
            QueueFull: the queue stayed full for the timeout; nothing was sent.
            RetryLater: no server took it within the timeout; nothing is kept.
            OutcomeUnknown: it may be kept; `outcome` asks with the error's handle.
        """
        single = self._arguments.single(subject, body, delay, deliver_at, deliver_at_ms, headers)
        return self._standing_core().send(single)

    send_nowait = send  # As the blocking Producer calls it.

    async def send_batch(
        self,
        subject: str,
        bodies: Sequence[bytes],
        deliver_at_ms: DeliverAtMs | None = None,
        *,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        headers: Headers | Sequence[Headers | None] | None = None,
    ) -> BatchReceipt:
        """Send many messages of one subject, as columns; `deliver_at_ms` and `headers` are one for all or one for each.

        Raises:
            CallerError: an argument is wrong; nothing was sent.
            BatchFailed: some messages failed; it holds the receipt of the others. If all failed in one way, that error.
        """
        columns = self._arguments.columns(subject, bodies, deliver_at_ms, delay, deliver_at, headers)
        return await self._standing_core().send_batch(columns)

    async def outcome(self, handle: SendHandle) -> Accepted | None:
        """What became of the batch of an OutcomeUnknown: accepted, or None while the server does not hold it."""
        return await self._standing_core().sender.ask(handle)

    async def flush(self) -> None:
        """Wait until everything that was sent before has ended; failures are raised by the sends themselves."""
        await self._standing_core().flush()

    async def close(self) -> None:
        """Flush and disconnect; calling it again does nothing."""
        await self._core.close()

    def _standing_core(self) -> ProducerCore:
        if self._core.pid != os.getpid():
            # Sockets and numbers belong to the parent process, which goes on with them.
            _LEFT_TO_PARENTS.append(self._core)
            self._core = ProducerCore(self._address, self._settings)
        return self._core


class ProducerCore:
    """A producer without its arguments' checks: queue, outbox and connections, on one loop of one process."""

    def __init__(self, address: str, settings: ProducerSettings) -> None:
        self.pid = os.getpid()
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._meta = MetaView(address)
        self.sender = Sender(self._meta, settings.timeout_ms)
        self.outbox = Outbox(self.sender, settings.linger_ms, settings.timeout_ms, self._free)
        self._queued_bytes = 0
        self._line: deque[_InLine] = deque()
        self._closed = False

    def send(self, single: Single) -> asyncio.Future[Receipt]:
        """Queue one send, or let it wait in line while the queue is full."""
        if self._closed:
            raise AlreadyClosed("this producer was closed")
        answered: asyncio.Future[Receipt] = self._loop.create_future()
        byte_count = len(single.body) + len(single.headers) + ROW_BYTES
        if self._line or self._queued_bytes + byte_count > self._settings.queue_bytes_max:
            timer = self._loop.call_later(self._settings.timeout_ms / 1000, self._queue_full, answered)
            self._line.append(_InLine(single, byte_count, answered, timer))
        else:
            self._queued_bytes += byte_count
            self.outbox.add(*single, answered)
        return answered

    async def send_batch(self, columns: Columns) -> BatchReceipt:
        """Send the rows of one call."""
        if self._closed:
            raise AlreadyClosed("this producer was closed")
        if not columns.bodies:
            return BatchReceipt(())
        answered: asyncio.Future[BatchReceipt] = self._loop.create_future()
        await self.outbox.add_batch(Progress(len(columns.bodies), answered), columns)
        return await answered

    async def flush(self) -> None:
        """See AsyncProducer."""
        while self._line:
            await self.outbox.flush()
        await self.outbox.flush()

    async def close(self) -> None:
        """See AsyncProducer."""
        if self._closed:
            return
        self._closed = True
        await self.flush()
        await self.sender.close()
        await self._meta.close()

    def _free(self, byte_count: int) -> None:
        self._queued_bytes -= byte_count
        while self._line and (
            self._line[0].answered.done()
            or self._queued_bytes + self._line[0].byte_count <= self._settings.queue_bytes_max
        ):
            waiting = self._line.popleft()
            waiting.timer.cancel()
            if not waiting.answered.done():
                self._queued_bytes += waiting.byte_count
                self.outbox.add(*waiting.single, waiting.answered)

    def _queue_full(self, answered: asyncio.Future[Receipt]) -> None:
        if not answered.done():
            limit = self._settings.queue_bytes_max
            answered.set_exception(QueueFull(f"{limit} bytes of sends are waiting and nothing left for the timeout"))


class _InLine(NamedTuple):
    single: Single
    byte_count: int
    answered: asyncio.Future[Receipt]
    timer: asyncio.TimerHandle


_LEFT_TO_PARENTS: list[ProducerCore] = []
