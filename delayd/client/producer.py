"""Producers: send messages, and cancel and move them, from the caller's own event loop or from any thread.

Invariants: an invalid argument raises an error before anything is queued. Each queued message ends with a receipt, or
with an error that says whether the message may be kept. A Producer may be used from any thread, and after a fork from
the child too, which gets a producer of its own (rule I2).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from functools import wraps
from threading import get_ident
from typing import Concatenate, NamedTuple, ParamSpec, Unpack

import numpy as np
from numpy.typing import NDArray

from delayd.client.asking.messages import (
    CANCEL,
    GET,
    RESCHEDULE,
    Asker,
    MessageInfo,
    NewInstants,
    asked_of,
    asked_of_batch,
    count_of,
    unmoved_of,
)
from delayd.client.asking.once import CheckedSends, OnceSends
from delayd.client.asking.recurring import RecurringInfo, RecurringOptions, Schedules, spec_of
from delayd.client.asking.walking import (
    Follower,
    Pages,
    PendingPage,
    Progress,
    Walked,
    Walker,
    blocking_pages,
    bounds_of,
    check_walk,
    shift_ms_of,
    window_of,
)
from delayd.client.engine import (
    PROCESS,
    AsyncClient,
    BlockingClient,
    Inbox,
    LoopThread,
    OnLoop,
    OnThread,
    OwnEngine,
    OwnLoopEngine,
    blocking,
    forget,
    form_of,
    remember,
)
from delayd.client.instants import Delays, DeliverAt, DeliverAtMs, wish, wish_column
from delayd.client.limits import need_bool, need_text
from delayd.client.routing import MetaView
from delayd.client.sending.batch_sender import BatchSender
from delayd.client.sending.outbox import ROW_BYTES, Outbox, row_bytes
from delayd.client.sending.outbox import Progress as BatchProgress
from delayd.client.sending.receipts import (
    Accepted,
    BatchReceipt,
    Receipt,
    ReceiptColumns,
    Rescheduled,
    RescheduledBatch,
    SendFuture,
    Unheard,
    is_unheard,
    rescheduled_batch_of,
    rescheduled_of,
)
from delayd.client.sending.send_options import Columns, Key, ProducerSettings, Sends, SendsBatches, Single, named
from delayd.errors import QueueFull, SendHandle
from delayd.wire.asked import AnswerRows, CancelAnswer

P = ParamSpec("P")

PLACING_MAX = 10_000  # Sends with spread that wait for an instant; they stand outside of the queue.

log = logging.getLogger(__name__)


class AsyncProducer(SendsBatches, AsyncClient["AwaitedSends"]):
    """Sends messages to be delivered later. Make and use it in one running event loop, best with ``async with``.

    Example::

        async with delayd.AsyncProducer("127.0.0.1:7400") as producer:
            receipt = await producer.send("orders.cancel", b"42", delay=timedelta(minutes=30))
            print("kept as", receipt.sequence, "due at", receipt.deliver_at)

    It connects at the first send. Sends of all its callers share batches.

    Args:
        address: where meta listens, as ``host:port``, or over TLS as ``delayds://host:port?ca=FILE``
            (docs/security.md). The default is the environment variable DELAYD_META, or 127.0.0.1:7400.
        linger_ms: how long sends wait for further sends while a batch is under way, so that they share the next one.
            A send does not wait when no batch is under way.
        queue_bytes_max: how many bytes of sends may have no outcome yet. When there are more, a send waits for room.
        timeout_ms: how long a send waits for room in the queue, and then for its outcome.
        horizon: how far ahead a message may be due at most; 732 days is the limit.
        token: what lets this client in where servers ask for tokens (docs/security.md); it must not be in a repository.
            The default is the environment variable DELAYD_TOKEN, or none.
        connect_timeout: how long a call goes on when no server can be connected to, as when none runs; then it raises
            ServerUnavailable. None: as long as ``timeout_ms``, so that a call outlasts a restart.
    """

    send = named(Sends[asyncio.Future[Receipt]].send_nowait, "send", "asyncio.Future[Receipt]")
    send_nowait = send  # As the blocking Producer calls it.

    def _begin(self, meta: str) -> None:
        self._own = OwnLoopEngine("producer", lambda: AwaitedSends(meta, self._settings))
        self._own.standing()  # The producer belongs to the loop in which it is made.

    def _queue(self, row: Single) -> asyncio.Future[Receipt]:
        core = self._own.engine
        # `is_here`, written out for speed.
        if core is None or core.ident != get_ident() or core.pid != PROCESS.pid or not core.is_running():
            core = self._own.on_this_loop()
        return core.queue(row)

    def _queue_spread(self, row: Single, window_ms: int) -> asyncio.Future[Receipt]:
        return self._core.queue_spread(row, window_ms)

    def _send_columns(self, columns: Columns, window_ms: int | None) -> Coroutine[object, object, BatchReceipt]:
        return self._run(self._core.send_batch(columns, window_ms))

    async def cancel(
        self,
        subject: str,
        *,
        receipt: Receipt | None = None,
        key: Key | None = None,
        group: str | None = None,
        if_unmoved: bool = False,
    ) -> CancelAnswer:
        """End a message that is pending, so that it is never delivered.

        Returns a `CancelAnswer`: CANCELLED (durably, also if it was cancelled before), ALREADY_DISPATCHED (it has left,
        or has ended in another way: `get` says how), IN_FLIGHT (it is being handed over: ask again a moment later),
        UNKNOWN (no such message is kept), or CHANGED (with ``if_unmoved``).

        Args:
            receipt: what `send` returned; it names this message.
            key: in place of the receipt, the key that the message was sent with; it names the newest message that took
                it.
            group: when this group gave the message back, end it where it waits for the group, or as its dead letter.
            if_unmoved: end only the message that the receipt was given for: one that was moved since stays as it is.

        Raises:
            CallerError: an argument is wrong, or nobody knows the receipt's server.
            RetryLater, ConnectionLost, RequestTimedOut: the server gave no answer within the timeout. The message may
                be cancelled; ask again, for to cancel twice does no harm.
        """
        exact = need_bool("if_unmoved", if_unmoved)
        one = unmoved_of(subject, receipt, key, group) if exact else asked_of(subject, receipt, key)
        return await self._run(self._core.follower.cancel(subject, group, one))

    async def cancel_batch(
        self, subject: str, *, receipt: BatchReceipt | ReceiptColumns | None = None, keys: Sequence[Key] | None = None
    ) -> NDArray[np.uint8]:
        """End many messages; see `cancel`.

        Returns uint8[n], one `CancelAnswer` a message, in the order of the receipt's columns or of the keys. If one
        server gives no answer, this error is raised, and messages of the others may be cancelled.
        """
        rows = asked_of_batch(subject, receipt, keys)
        _, answers = await self._run(self._core.messages.ask(CANCEL, rows))
        return answers["answer"].copy()

    async def reschedule(
        self,
        subject: str,
        *,
        receipt: Receipt | None = None,
        key: Key | None = None,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        deliver_at_ms: int | None = None,
        group: str | None = None,
        if_unmoved: bool = False,
    ) -> Rescheduled:
        """Move a pending message to another instant, earlier or later.

        Returns a `Rescheduled`: its ``answer`` is MOVED (durably, also when it was due at that instant already),
        ALREADY_DISPATCHED (it has left, or has ended in another way), IN_FLIGHT (it is being handed over: ask again a
        moment later), CANCELLED (it was cancelled or replaced before), UNKNOWN (no such message is kept), or CHANGED
        (with ``if_unmoved``).

        The message keeps its subject, key, tags, headers and body. Its earlier receipts go on to stand for it.

        Args:
            subject, receipt, key: as for `cancel`; a receipt may be that of an earlier `reschedule`.
            delay, deliver_at, deliver_at_ms: as for `send`; give one.
            group: when this group gave the message back, move it where it waits for the group; a dead letter comes to
                the group at the new instant.
            if_unmoved: as for `cancel`. Of two such moves of one receipt at the same moment one is done.

        Raises:
            CallerError: an argument is wrong, the instant is refused as that of a send would be, or nobody knows the
                receipt's server.
            RetryLater, ConnectionLost, RequestTimedOut: the server gave no answer within the timeout. The message may
                be moved; ask again, for to move it to the same instant twice does no harm.
        """
        exact = need_bool("if_unmoved", if_unmoved)
        one = unmoved_of(subject, receipt, key, group) if exact else asked_of(subject, receipt, key)
        core = self._core
        when, relative = wish(delay, deliver_at, deliver_at_ms, self._horizon)
        instants = NewInstants(np.array([when], np.int64), relative)
        return rescheduled_of(*await self._run(core.follower.reschedule(subject, group, one, instants)))

    async def reschedule_batch(
        self,
        subject: str,
        *,
        receipt: BatchReceipt | ReceiptColumns | None = None,
        keys: Sequence[Key] | None = None,
        delay: Delays | None = None,
        deliver_at: DeliverAt | None = None,
        deliver_at_ms: DeliverAtMs | None = None,
    ) -> RescheduledBatch:
        """Move many messages; see `reschedule`.

        Returns a `RescheduledBatch`, in the order of the receipt's columns or of the keys, which later calls take as
        they take the receipt. Give one of ``delay``, ``deliver_at`` and ``deliver_at_ms``, with one value for all or
        one for each. Each message is moved by itself: if one server gives no answer, this error is raised, and other
        messages may be moved.
        """
        rows = asked_of_batch(subject, receipt, keys)
        core = self._core
        instants = NewInstants(*wish_column(delay, deliver_at, deliver_at_ms, count_of(rows.asked), self._horizon))
        return rescheduled_batch_of(*await self._run(core.messages.ask(RESCHEDULE, rows, instants)))

    async def get(
        self, subject: str, *, receipt: Receipt | None = None, key: Key | None = None, group: str | None = None
    ) -> MessageInfo:
        """Ask what became of a message.

        Returns a `MessageInfo`. A message is known as long as the logs of its hour are kept; then its state is UNKNOWN.
        ``subject``, ``receipt`` and ``key`` are those of `cancel`, and so are the errors. With ``group`` it follows the
        message into the group: PENDING while it waits to come to the group again, DEAD when it is a dead letter of it.
        """
        one = asked_of(subject, receipt, key)
        return await self._run(self._core.follower.get(subject, group, one))

    async def get_batch(
        self, subject: str, *, receipt: BatchReceipt | ReceiptColumns | None = None, keys: Sequence[Key] | None = None
    ) -> AnswerRows:
        """Ask what became of many messages; see `get`.

        Returns a structured array with one row a message, in the order of the receipt's columns or of the keys, and the
        fields of a `MessageInfo`, in which 0 stands for None.
        """
        rows = asked_of_batch(subject, receipt, keys)
        _, answers = await self._run(self._core.messages.ask(GET, rows))
        return answers

    def pending(
        self,
        subject: str,
        *,
        due_from: datetime | None = None,
        due_before: datetime | None = None,
        receipt: Receipt | None = None,
        key: Key | None = None,
        tag: str | None = None,
        contents: bool = False,
        page_size: int | None = None,
        resume: str | None = None,
    ) -> Pages[PendingPage]:
        """List the pending messages of a subject, a page at a time.

        Pages are read from the running delay servers, one server after another, by rising hour of the due instant and,
        within an hour, in the order in which the messages were accepted. A page has up to 65,536 messages, or fewer
        when they are large. Messages that are sent while you read may be missing; one that is pending from the first
        page to the last, and is not moved meanwhile, is on one page.

        Example::

            pages = producer.pending("orders.cancel", tag="vip")
            async for page in pages:
                for message in page:
                    print(message.receipt.token, message.deliver_at, message.key, message.size)
            print(pages.found, "are pending,", pages.in_flight, "are being handed over")

        Args:
            due_from: when the first of them is due; None: the earliest.
            due_before: the messages are due before this; None: all later ones.
            receipt: only the message of this receipt, if it is pending.
            key: only the message that is pending with this key.
            tag: only messages that were sent with this tag; None: all.
            contents: also read headers and bodies.
            page_size: how many messages a page has at most.
            resume: the ``resume`` of earlier pages with the same arguments: only what is behind them.

        Raises:
            CallerError: an argument is wrong.
            RetryLater, ConnectionLost, RequestTimedOut: while pages are read, a server gave no answer within the
                timeout. Ask for the next page again to go on.
        """
        window = window_of(subject, due_from, due_before, tag)
        one = None if receipt is None and key is None else asked_of(subject, receipt, key)
        return self._core.walker.pending(window, one, page_size, resume, whole=need_bool("contents", contents))

    async def cancel_where(
        self,
        subject: str,
        *,
        due_from: datetime | None = None,
        due_before: datetime | None = None,
        tag: str | None = None,
        dry_run: bool = True,
        progress: Progress | None = None,
    ) -> Walked:
        """End all pending messages of a subject that are due in a window, or only count them.

        It goes through all delay servers at the same time, hour by hour, in pieces of up to 65,536 messages, and
        cancels each message as `cancel` does. Messages that were accepted before it began at a server are covered;
        later ones are not. When it is interrupted, or raises, the pieces so far are done; call it again to go on.

        Args:
            due_from, due_before, tag: as for `pending`.
            dry_run: only count, and change nothing. It is the default; say False to cancel.
            progress: called with the counts so far, after each piece; of a blocking producer, on its own thread.

        Returns a `Walked` with the counts.

        Raises:
            CallerError: an argument is wrong; nothing was done.
            RetryLater, ConnectionLost, RequestTimedOut: a server gave no answer within the timeout. It is raised when
                the others are through; its ``details`` have ``servers``, the log_ids of those that are not, ``found``
                and ``done``.
        """
        check_walk(dry_run, progress)
        window = window_of(subject, due_from, due_before, tag)
        walk = self._core.walker.cancel(window, dry_run=dry_run, progress=progress)
        return await self._run(walk, ends_with_caller=True)

    async def reschedule_where(
        self,
        subject: str,
        *,
        shift: timedelta,
        due_from: datetime | None = None,
        due_before: datetime | None = None,
        tag: str | None = None,
        dry_run: bool = True,
        progress: Progress | None = None,
        resume: str | None = None,
    ) -> Walked:
        """Move all pending messages of a subject that are due in a window by ``shift``, or only count them.

        It walks as `cancel_where` does and moves each message as `reschedule` does. No message is moved twice, even if
        it is due in the window again: only messages that were accepted before the walk began at a server are covered.
        When it is interrupted, or raises, the pieces so far are done; give the next call the ``resume`` of the last
        counts that ``progress`` was told, and it goes on. Without it, what was moved and is due in the window by then
        is moved once more.

        Args:
            shift: how much later they are to be due; negative: earlier. What would be due in the past is due at once.
            due_from, due_before, tag, dry_run, progress: as for `cancel_where`.
            resume: of a walk with the same subject and window that did not come to its end.

        Returns a `Walked` with the counts.

        Raises:
            CallerError: an argument is wrong, and nothing was done; or a message would be due past the horizon.
            RetryLater, ConnectionLost, RequestTimedOut: as for `cancel_where`; ``details`` have ``resume``, too.
        """
        check_walk(dry_run, progress)
        window, shift_ms = window_of(subject, due_from, due_before, tag), shift_ms_of(shift)
        bounds = bounds_of(resume)
        walk = self._core.walker.reschedule(window, shift_ms, bounds, dry_run=dry_run, progress=progress)
        return await self._run(walk, ends_with_caller=True)

    async def recurring(
        self,
        name: Key,
        subject: str,
        body: bytes,
        *,
        if_version: int | None = None,
        **options: Unpack[RecurringOptions],
    ) -> RecurringInfo:
        """Send a message again and again: at the instants of a cron line, or at an interval (docs/recurring.md).

        A delay server keeps the schedule and decides each occurrence, so each is sent once, whatever is killed. The
        call may be repeated; it changes nothing when there is a schedule with this name and the same specification.

        Example::

            producer.recurring("report", "reports.daily", b"{}", cron="0 9 * * 1-5", timezone="Europe/Berlin")

        Args:
            name: of the schedule, unique in the cluster: text or UTF-8 of 1 to 200 bytes.
            subject: to which its messages are sent.
            body: of each message; with the headers at most 256 KiB.
            if_version: change the schedule that has this version; 0: make it only if there is none.
            options: either ``cron``, a line of five fields or a word such as ``@daily``, or ``every``, a timedelta,
                with ``anchor``, an instant from which it counts. ``timezone`` (an IANA name, UTC by default),
                ``fold``, ``gap``, ``skip_dates``, ``only_dates``, ``jitter``, ``starts_at``, ``until`` and
                ``max_occurrences`` say more of when; ``misfire``, ``catchup`` and ``catchup_max`` say what becomes of
                occurrences that were missed; ``overlap="skip"`` skips one while a message of an earlier one is not
                acknowledged by all groups. ``headers``, ``tags``, ``ttl`` and ``ordering_key`` are those of `send`.

        Raises:
            CallerError: an argument is wrong; nothing was done.
            RecurringConflict: there is a schedule of this name with another specification, and ``if_version`` is not
                its version; nothing changed.
            RetryLater, ConnectionLost, RequestTimedOut: the server gave no answer within the timeout. Call again.
        """
        return await self._run(self._core.schedules.put(name, spec_of(subject, body, options), if_version))

    async def pause_recurring(self, name: Key, note: str = "", *, if_version: int | None = None) -> RecurringInfo:
        """Let a schedule send nothing until it is resumed; what recurs meanwhile is skipped.

        Args:
            name: of the schedule.
            note: why, for whoever looks at it.
            if_version: only if the schedule has this version.

        Raises NoRecurring, and as `recurring`.
        """
        return await self._run(self._core.schedules.pause(name, note, if_version))

    async def resume_recurring(self, name: Key, *, if_version: int | None = None) -> RecurringInfo:
        """Let a paused schedule send its occurrences again, from now on. Arguments and errors: `pause_recurring`."""
        return await self._run(self._core.schedules.resume(name, if_version))

    async def run_recurring(self, name: Key) -> RecurringInfo:
        """Send one message of a schedule now, besides its occurrences, also while it is paused.

        ``name`` is that of the schedule. Raises as `pause_recurring`.
        """
        return await self._run(self._core.schedules.run(name))

    async def delete_recurring(self, name: Key, *, if_version: int | None = None) -> bool:
        """End a schedule. What it has sent before stays. Returns False when there is no schedule of this name.

        Args:
            name: of the schedule.
            if_version: only if the schedule has this version.

        Raises as `cancel`, and RecurringConflict.
        """
        return await self._run(self._core.schedules.delete(name, if_version))

    async def get_recurring(self, name: Key) -> RecurringInfo | None:
        """Read a schedule; None when there is none of this name. ``name`` and errors as of `delete_recurring`."""
        return await self._run(self._core.schedules.get(name))

    async def list_recurring(self, prefix: str = "") -> list[RecurringInfo]:
        """Read all schedules whose names begin with ``prefix``, by name. Raises as `pending`."""
        return await self._run(self._core.schedules.all(need_text("prefix", prefix)), ends_with_caller=True)

    async def outcome(self, handle: SendHandle) -> Accepted | None:
        """Ask what became of a send that raised OutcomeUnknown.

        Returns what the server accepted, or None. None means that the message is not kept and never will be, so the
        caller can send it anew.

        Args:
            handle: the ``handle`` of the error. Ask within a minute.
        """
        return await self._run(self._core.messages.outcome(handle))

    async def flush(self) -> None:
        """Wait until all earlier sends have an outcome. It raises no errors of sends: each send raises its own."""
        await self._run(self._core.flush())

    async def close(self) -> None:
        """Flush and disconnect. A second call does nothing."""
        engine = self._own.close()
        if engine is not None:
            await engine.close()


def kept(method: Callable[Concatenate[Producer, P], SendFuture]) -> Callable[Concatenate[Producer, P], Receipt]:
    """The blocking send that waits until its message is kept."""

    @wraps(method)
    def send(self: Producer, /, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        # Every send ends by itself; this limit only keeps a bug from looking like a slow server.
        return method(self, *args, **kwargs).receipt(2 * self._settings.timeout_ms / 1000 + 5)

    told = inspect.getdoc(method) or ""
    send.__doc__ = (
        "Send one message, due at one of ``delay``, ``deliver_at`` or ``deliver_at_ms``, and wait until it is kept."
    )
    send.__doc__ += f"\n\n{told[told.index('Args:') :]}"
    send.__name__, send.__qualname__ = "send", "Producer.send"
    send.__signature__ = inspect.signature(method).replace(return_annotation="Receipt")  # type: ignore[attr-defined]
    return send


@form_of(AsyncProducer)
class Producer(Sends[SendFuture], BlockingClient["ThreadedSends"]):
    """Sends messages to be delivered later. Several threads may share one; use it with ``with``, which closes it."""

    send = kept(Sends[SendFuture].send_nowait)
    send_nowait = named(Sends[SendFuture].send_nowait, "send_nowait", "SendFuture")
    send_batch = blocking(AsyncProducer.send_batch)
    cancel = blocking(AsyncProducer.cancel)
    cancel_batch = blocking(AsyncProducer.cancel_batch)
    reschedule = blocking(AsyncProducer.reschedule)
    reschedule_batch = blocking(AsyncProducer.reschedule_batch)
    get = blocking(AsyncProducer.get)
    get_batch = blocking(AsyncProducer.get_batch)
    pending = blocking_pages(AsyncProducer.pending)
    cancel_where = blocking(AsyncProducer.cancel_where)
    reschedule_where = blocking(AsyncProducer.reschedule_where)
    recurring = blocking(AsyncProducer.recurring)
    pause_recurring = blocking(AsyncProducer.pause_recurring)
    resume_recurring = blocking(AsyncProducer.resume_recurring)
    run_recurring = blocking(AsyncProducer.run_recurring)
    delete_recurring = blocking(AsyncProducer.delete_recurring)
    get_recurring = blocking(AsyncProducer.get_recurring)
    list_recurring = blocking(AsyncProducer.list_recurring)
    outcome = blocking(AsyncProducer.outcome)
    flush = blocking(AsyncProducer.flush)
    close = blocking(AsyncProducer.close)
    _send_columns = AsyncProducer._send_columns

    def _begin(self, meta: str) -> None:
        def made() -> OnThread[ThreadedSends]:
            return OnThread("delayd-producer", lambda thread: ThreadedSends(thread, meta, self._settings))

        self._own = OwnEngine("producer", made)

    def _queue(self, row: Single) -> SendFuture:
        return self._core.queue(row)

    def _queue_spread(self, row: Single, window_ms: int) -> SendFuture:
        return self._core.queue_spread(row, window_ms)


class ProducerCore(OnLoop):
    """Outbox and connections of a producer; arguments were checked before, and what is queued is bounded below."""

    def __init__(self, what: str, meta: str, settings: ProducerSettings) -> None:
        super().__init__(what)
        self._settings = settings
        self._meta = MetaView(meta)
        limits = settings.timeout_ms, settings.unreached_s
        self.sender = BatchSender(self._meta, *limits)
        self.messages = Asker(self.sender.groups, self.sender.owners, self._meta, *limits)
        self.walker = Walker(self.messages)
        self.follower = Follower(meta, self.messages)
        self.schedules = Schedules(self.messages, self.walker)
        self.unheard = Unheard()
        self.outbox = Outbox(self.sender, settings.linger_ms, settings.timeout_ms, self.unheard)

    async def send_batch(self, columns: Columns, window_ms: int | None = None) -> BatchReceipt:
        """Send the rows of one call and wait until each has ended; with a window, a server chooses their instants."""
        if window_ms is not None:
            columns = await self.messages.place_columns(columns, window_ms)
        if not columns.bodies:
            return BatchReceipt(())
        answered: asyncio.Future[BatchReceipt] = self.loop.create_future()
        await self.outbox.add_batch(BatchProgress(len(columns.bodies), answered), columns)
        return await answered

    async def flush(self) -> None:
        """Wait until everything that was queued has ended."""
        await self.outbox.flush()

    async def close(self) -> None:
        """Flush, disconnect, and tell which sends have failed without anybody's knowledge."""
        await self.flush()
        forget(self)
        self.unheard.tell()
        await self.sender.close()
        await self._meta.close()

    async def flush_at_end(self) -> None:
        await self.outbox.flush()

    def tell_at_end(self, *, flushed: bool) -> None:
        """See OnLoop; also which sends have failed without anybody's knowledge."""
        self.unheard.tell()
        if unsent := self.outbox.unsent + self.waiting:
            log.warning("ended_before_sent messages=%d", unsent)

    @property
    def waiting(self) -> int:
        """How many sends wait outside of the outbox."""
        return 0

    def queue_full(self) -> QueueFull:
        """The error of a send that found no room in time."""
        limit, waited_s = self._settings.queue_bytes_max, self._settings.timeout_ms / 1000
        return QueueFull(f"{limit} bytes of sends are queued and none left for {waited_s:g} s; nothing was sent")


def once_of(producer: AsyncProducer, meta: str) -> OnceSends:
    """Sends of a producer on this loop that are repeated with their answers (docs/once.md)."""
    core, settings = producer._core, producer._settings
    checked = CheckedSends(meta, horizon=settings.horizon)
    return OnceSends(core.outbox, core.messages, checked, settings.timeout_ms)


async def run_under(producer: AsyncProducer, name: Key, number: int) -> RecurringInfo:
    """`AsyncProducer.run_recurring` under a number of the caller's: it is done once (docs/once.md); 0: under none."""
    return await producer._run(producer._core.schedules.run(name, number))


class AwaitedSends(ProducerCore):
    """The core for callers on its loop: sends wait in line because the queue is full."""

    def __init__(self, meta: str, settings: ProducerSettings) -> None:
        super().__init__("an AsyncProducer", meta, settings)
        self.outbox.on_free = self._free
        self._add = self.outbox.add
        self._new_future = self.loop.create_future
        self._bytes_max = settings.queue_bytes_max
        self._queued_bytes = 0
        self._line: deque[_InLine] = deque()
        self._placing: set[asyncio.Task[Receipt]] = set()  # Sends whose instant a server is choosing.
        remember(self)

    @property
    def waiting(self) -> int:
        return len(self._line) + len(self._placing)

    def queue(self, row: Single) -> asyncio.Future[Receipt]:
        """Queue one send, or let it wait in line."""
        answered: asyncio.Future[Receipt] = self._new_future()
        byte_count = row_bytes(row) if row[5] else len(row[1]) + len(row[4]) + ROW_BYTES
        if self._line or self._queued_bytes + byte_count > self._bytes_max:
            timer = self.loop.call_later(self._settings.timeout_ms / 1000, self._queue_full, answered)
            self._line.append(_InLine(row, byte_count, answered, timer))
        else:
            self._queued_bytes += byte_count
            self._add(row, byte_count, answered)
        return answered

    def queue_spread(self, row: Single, window_ms: int) -> asyncio.Future[Receipt]:
        """Queue one send once a server has chosen its instant."""
        if len(self._placing) >= PLACING_MAX:
            raise QueueFull(f"{PLACING_MAX} sends with spread wait for their instants; await some of them first")

        async def place() -> Receipt:
            return await self.queue(await self.messages.place(row, window_ms))

        task = self.loop.create_task(place())
        self._placing.add(task)
        task.add_done_callback(self._placing.discard)
        # A caller that gives up does not take the send back.
        answered = asyncio.shield(task)
        answered.add_done_callback(self._note_failure)
        return answered

    async def flush(self) -> None:
        while self._placing:
            await asyncio.wait(self._placing)
        in_line = [waiting.answered for waiting in self._line]
        if in_line:
            await asyncio.wait(in_line)
        await super().flush()

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
            answered.set_exception(self.queue_full())
            self._note_failure(answered)

    def _note_failure(self, answered: asyncio.Future[Receipt]) -> None:
        if is_unheard(answered):
            self.unheard.add(answered)


class _InLine(NamedTuple):
    row: Single
    byte_count: int
    answered: asyncio.Future[Receipt]
    timer: asyncio.TimerHandle


class ThreadedSends(ProducerCore):
    """The core for callers on threads: they wait for room. It is taken by threads and given back by the loop.

    Invariant: no more bytes are taken than the limit, and a waiting caller is woken when there may be room.
    """

    def __init__(self, thread: LoopThread, meta: str, settings: ProducerSettings) -> None:
        super().__init__("a Producer", meta, settings)
        self.outbox.on_free = self._give
        self._thread = thread
        self._inbox = Inbox[Single, int, SendFuture](thread, self._take)
        self._limit = settings.queue_bytes_max
        self._taken = 0
        self._threads_waiting = 0
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)

    @property
    def waiting(self) -> int:
        return len(self._inbox)

    def queue(self, row: Single) -> SendFuture:
        """From any thread: hand one send over when there is room for it."""
        future = SendFuture()
        byte_count = row_bytes(row) if row[5] else len(row[1]) + len(row[4]) + ROW_BYTES
        with self._lock:
            if self._taken + byte_count > self._limit:
                self._wait_for(byte_count)
            self._taken += byte_count
        self._inbox.put((row, byte_count, future))
        return future

    def queue_spread(self, row: Single, window_ms: int) -> SendFuture:
        """The same, once a server has chosen its instant."""
        return self.queue(self._thread.call(self.messages.place(row, window_ms)))

    def _take(self, items: deque[tuple[Single, int, SendFuture]]) -> None:
        add = self.outbox.add
        while items:
            add(*items.popleft())

    def _wait_for(self, byte_count: int) -> None:
        self._threads_waiting += 1
        limit_s = self._settings.timeout_ms / 1000
        try:
            if not self._more.wait_for(lambda: self._taken + byte_count <= self._limit, limit_s):
                raise self.queue_full()
        finally:
            self._threads_waiting -= 1

    def _give(self, byte_count: int) -> None:
        with self._lock:
            self._taken -= byte_count
            if self._threads_waiting:
                self._more.notify_all()
