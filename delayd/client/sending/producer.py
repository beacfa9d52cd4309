"""Producer: the blocking form of AsyncProducer, on a background thread.

Invariant: every method may be called from any thread, and after a fork from the child too, which gets a producer of its
own (rule I2).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from delayd.client.at_exit import THREAD_S, forget, remember
from delayd.client.engine import OwnEngine
from delayd.client.home_clock import clock_at
from delayd.client.instants import monotonic_s
from delayd.client.limits import Headers, need_bool, need_meta
from delayd.client.loop_thread import Inbox, LoopThread
from delayd.client.sending.arguments import (
    HORIZON,
    LINGER_MS,
    QUEUE_BYTES_MAX,
    TIMEOUT_MS,
    Arguments,
    ProducerSettings,
    Single,
)
from delayd.client.sending.due_columns import Delays, DeliverAt, DeliverAtMs
from delayd.client.sending.expiries import ExpireAt, Ttls
from delayd.client.sending.gathering import ROW_BYTES, row_bytes
from delayd.client.sending.labels import REJECT, Key, OnConflict, Tags
from delayd.client.sending.message_asker import MessageInfo, asked_of, asked_of_batch
from delayd.client.sending.pending import BlockingPages, PendingPage
from delayd.client.sending.place_asker import spread_of
from delayd.client.sending.producer_core import ProducerCore, queue_full, tell_at_end
from delayd.client.sending.receipt import Accepted, BatchReceipt, Receipt, ReceiptColumns
from delayd.client.sending.rescheduled import (
    Rescheduled,
    RescheduledBatch,
    rescheduled_batch_of,
    rescheduled_of,
)
from delayd.client.sending.room import Room
from delayd.client.sending.send_future import SendFuture
from delayd.client.sending.walker import Progress, Walked, bounds_of, check_walk, shift_ms_of, window_of
from delayd.errors import SendHandle
from delayd.wire.ending import AnswerRows, CancelAnswer


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
        connect_timeout: how long a call goes on when no server can be connected to, as when none runs; then it raises
            ServerUnavailable. None: as long as ``timeout_ms``, so that a call outlasts a restart.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        linger_ms: float = LINGER_MS,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        timeout_ms: float = TIMEOUT_MS,
        horizon: timedelta = HORIZON,
        connect_timeout: timedelta | None = None,
    ) -> None:
        meta = need_meta(address)
        settings = self._settings = ProducerSettings(linger_ms, queue_bytes_max, timeout_ms, horizon, connect_timeout)
        self._arguments = Arguments(horizon, clock_at(meta))
        self._own = OwnEngine("producer", lambda: _Engine(meta, settings))
        self._standing_engine = self._own.standing

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
        spread: timedelta | None = None,
        key: Key | None = None,
        on_conflict: OnConflict = REJECT,
        tags: Tags | None = None,
        ttl: timedelta | None = None,
        expires_at: datetime | None = None,
        ordering_key: Key | None = None,
    ) -> Receipt:
        """Send one message, due at one of ``delay``, ``deliver_at`` or ``deliver_at_ms``, and wait until it is kept.

        Args:
            subject: the name by which consumers ask for the message: 1 to 255 characters of ``[A-Za-z0-9._%/-]``.
            body: the bytes that a consumer gets; together with the headers at most 4 MiB.
            delay: how long from now the message is due, by the delay server's clock.
            deliver_at: when the message is due, with a time zone. A message whose instant is past is due at once.
            deliver_at_ms: the same in milliseconds since the epoch.
            headers: names with texts or bytes, at most 32 KiB; the consumer gets them with the body.
            spread: how much later the message may be due: the server chooses the least loaded instant between the due
                instant and the end of this window, at most 7 days, and the receipt says which.
            key: a name for the message, text or UTF-8 of 1 to 200 bytes: no two pending messages of a subject have the
                same one.
            on_conflict: what happens when a pending message has this key: ``"reject"`` (KeyPending), ``"keep"`` (the
                receipt is that of the pending message, and ``kept`` is true) or ``"replace"`` (the new one takes its
                place).
            tags: 1 to 16 distinct texts of at most 64 bytes each, by which messages can be found.
            ttl: how long after its due instant the message expires: then it is not delivered any more.
            expires_at: in place of ttl, the instant, with a time zone, from which on it is not delivered any more.
            ordering_key: messages with the same one come one after the other to groups that ask for that
                (``ordered=True`` of a consumer, docs/consuming.md).

        Raises:
            CallerError: an argument is wrong; nothing was queued.
            QueueFull: the queue stayed full for the timeout; nothing was sent.
            RetryLater: no server took the message within the timeout; it is not kept.
            KeyPending: a pending message has the key; nothing changed.
            InFlight: the message with this key is being handed over at this moment, so it can't be replaced; nothing
                changed. Send again a moment later.
            OutcomeUnknown: nobody knows whether the message is kept; ask `outcome` with the handle of this error.
        """
        row = self._arguments.single(
            subject,
            body,
            delay,
            deliver_at,
            deliver_at_ms,
            headers,
            key,
            on_conflict,
            tags,
            ttl,
            expires_at,
            ordering_key,
        )
        if spread is not None:
            row = self._placed(row, spread)
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
        spread: timedelta | None = None,
        key: Key | None = None,
        on_conflict: OnConflict = REJECT,
        tags: Tags | None = None,
        ttl: timedelta | None = None,
        expires_at: datetime | None = None,
        ordering_key: Key | None = None,
    ) -> SendFuture:
        """Send one message, and do not wait for the outcome: the future has the receipt, or the error.

        While the queue is full the call waits for room; with ``spread`` it waits until the server has chosen an
        instant. It raises CallerError, QueueFull and what prevents that choice itself. ``subject``, ``body``,
        ``delay``, ``deliver_at``, ``deliver_at_ms``, ``headers``, ``spread``, ``key``, ``on_conflict``, ``tags``,
        ``ttl``, ``expires_at`` and ``ordering_key`` are those of
        `send`.
        """
        row = self._arguments.single(
            subject,
            body,
            delay,
            deliver_at,
            deliver_at_ms,
            headers,
            key,
            on_conflict,
            tags,
            ttl,
            expires_at,
            ordering_key,
        )
        if spread is not None:
            row = self._placed(row, spread)
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
        spread: timedelta | None = None,
        keys: Sequence[Key | None] | None = None,
        on_conflict: OnConflict = REJECT,
        tags: Tags | Sequence[Tags | None] | None = None,
        ttl: Ttls | None = None,
        expires_at: ExpireAt | None = None,
        ordering_keys: Sequence[Key | None] | None = None,
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
            spread: how much later each message may be due: the server chooses the least loaded instants, and the
                receipt says which.
            keys: a key for each message, or None for a message without one. What became of each is in the receipt's
                ``verdicts``; a message that is rejected raises nothing here.
            on_conflict: as for `send`, one for all messages.
            tags: one list of texts for all messages, or one for each.
            ttl: as for `send`, one for all messages or one for each; None for a message that never expires.
            expires_at: the same.
            ordering_keys: an ordering key for each message, or None for a message without one.

        Raises:
            CallerError: an argument is wrong; nothing was sent.
            BatchFailed: some messages failed; the error has the receipt of the others.
            DelaydError: all messages failed in the same way; this is that error.
        """
        columns = self._arguments.columns(
            subject,
            bodies,
            deliver_at_ms,
            delay,
            deliver_at,
            headers,
            keys,
            on_conflict,
            tags,
            ttl,
            expires_at,
            ordering_keys,
        )
        window_ms = None if spread is None else spread_of(spread)
        engine = self._standing_engine()
        return engine.thread.call(engine.core.send_batch(columns, window_ms))

    def _placed(self, row: Single, spread: timedelta) -> Single:
        """The same send with the instant that a server chose."""
        window_ms = spread_of(spread)
        engine = self._standing_engine()
        return engine.thread.call(engine.core.places.place(row, window_ms))

    def cancel(
        self, subject: str, *, receipt: Receipt | None = None, key: Key | None = None, group: str | None = None
    ) -> CancelAnswer:
        """End a message that is pending, so that it is never delivered.

        Returns a `CancelAnswer`: CANCELLED (durably, also if it was cancelled before), ALREADY_DISPATCHED (it has left,
        or has ended in another way: `get` says how), IN_FLIGHT (it is being handed over: ask again a moment later), or
        UNKNOWN (no such message is kept).

        Args:
            subject: the one that the message was sent to.
            receipt: what `send` returned; it names this message.
            key: in place of the receipt, the key that the message was sent with; it names the newest message that took
                it.
            group: when this group gave the message back, end it where it waits for the group, or as its dead letter.

        Raises:
            CallerError: an argument is wrong, or nobody knows the receipt's server.
            RetryLater, ConnectionLost, RequestTimedOut: the server gave no answer within the timeout. The message may
                be cancelled; ask again, for to cancel twice does no harm.
        """
        one = asked_of(subject, receipt, key)
        engine = self._standing_engine()
        return engine.thread.call(engine.core.follower.cancel(subject, group, one))

    def cancel_batch(
        self, subject: str, *, receipt: BatchReceipt | ReceiptColumns | None = None, keys: Sequence[Key] | None = None
    ) -> NDArray[np.uint8]:
        """End many messages; see `cancel`.

        Returns uint8[n], one `CancelAnswer` a message, in the order of the receipt's columns. If one server gives no
        answer, this error is raised, and messages of the others may be cancelled.

        Args:
            subject: the one that the messages were sent to.
            receipt: what `send_batch` returned.
            keys: in place of the receipt, a key for each message; the answers are in their order.
        """
        rows = asked_of_batch(subject, receipt, keys)
        engine = self._standing_engine()
        answers = engine.thread.call(engine.core.messages.cancel(rows))
        return answers["answer"].copy()

    def reschedule(
        self,
        subject: str,
        *,
        receipt: Receipt | None = None,
        key: Key | None = None,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        deliver_at_ms: int | None = None,
        group: str | None = None,
    ) -> Rescheduled:
        """Move a pending message to another instant, earlier or later.

        Returns a `Rescheduled`: its ``answer`` is MOVED (durably, also when it was due at that instant already),
        ALREADY_DISPATCHED (it has left, or has ended in another way), IN_FLIGHT (it is being handed over: ask again a
        moment later), CANCELLED (it was cancelled or replaced before), or UNKNOWN (no such message is kept).

        The message keeps its subject, key, tags, headers and body. Its earlier receipts go on to stand for it.

        Args:
            subject: the one that the message was sent to.
            receipt: what `send` or an earlier `reschedule` returned; it names this message.
            key: in place of the receipt, the key that the message was sent with; it names the newest message that took
                it.
            delay: how long from now it is to be due; of the three, give one.
            deliver_at: when it is to be due. An instant that has passed means at once.
            deliver_at_ms: the same in milliseconds since the epoch.
            group: when this group gave the message back, move it where it waits for the group; a dead letter comes to
                the group at the new instant.

        Raises:
            CallerError: an argument is wrong, the instant is refused as that of a send would be, or nobody knows the
                receipt's server.
            RetryLater, ConnectionLost, RequestTimedOut: the server gave no answer within the timeout. The message may
                be moved; ask again, for to move it to the same instant twice does no harm.
        """
        one = asked_of(subject, receipt, key)
        engine = self._standing_engine()
        instants = self._arguments.new_instant(delay, deliver_at, deliver_at_ms)
        return rescheduled_of(*engine.thread.call(engine.core.follower.reschedule(subject, group, one, instants)))

    def reschedule_batch(
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

        Returns a `RescheduledBatch`, which later calls take as they take the receipt. Each message is moved by itself:
        if one server gives no answer, this error is raised, and other messages may be moved.

        Args:
            subject: the one that the messages were sent to.
            receipt: what `send_batch` or an earlier `reschedule_batch` returned.
            keys: in place of the receipt, a key for each message; the answers are in their order.
            delay: how long from now they are to be due, one for all or one for each; of the three, give one.
            deliver_at: when they are to be due, one for all or one for each.
            deliver_at_ms: the same in milliseconds since the epoch.
        """
        rows = asked_of_batch(subject, receipt, keys)
        engine = self._standing_engine()
        instants = self._arguments.new_instants(delay, deliver_at, deliver_at_ms, rows.row_count)
        return rescheduled_batch_of(*engine.thread.call(engine.core.messages.reschedule(rows, instants)))

    def get(
        self, subject: str, *, receipt: Receipt | None = None, key: Key | None = None, group: str | None = None
    ) -> MessageInfo:
        """Ask what became of a message.

        Returns a `MessageInfo`. A message is known as long as the logs of its hour are kept; then its state is UNKNOWN.
        ``subject``, ``receipt`` and ``key`` are those of `cancel`, and so are the errors. With ``group`` it follows the
        message into the group: PENDING while it waits to come to the group again, DEAD when it is a dead letter of it.
        """
        one = asked_of(subject, receipt, key)
        engine = self._standing_engine()
        return engine.thread.call(engine.core.follower.get(subject, group, one))

    def get_batch(
        self, subject: str, *, receipt: BatchReceipt | ReceiptColumns | None = None, keys: Sequence[Key] | None = None
    ) -> AnswerRows:
        """Ask what became of many messages; see `get`.

        Returns a structured array with one row a message, in the order of the receipt's columns, and the fields state,
        deliver_at_ms, attempt, decided_at_ms, target_log_id, target_appended_at_ms, target_offset, other and
        other_at_ms, in which 0 stands for None.

        Args:
            subject: the one that the messages were sent to.
            receipt: what `send_batch` returned.
            keys: in place of the receipt, a key for each message; the answers are in their order.
        """
        rows = asked_of_batch(subject, receipt, keys)
        engine = self._standing_engine()
        return engine.thread.call(engine.core.messages.get(rows))

    def pending(
        self,
        subject: str,
        *,
        due_from: datetime | None = None,
        due_before: datetime | None = None,
        key: Key | None = None,
        tag: str | None = None,
        contents: bool = False,
    ) -> BlockingPages[PendingPage]:
        """List the pending messages of a subject, a page at a time.

        Pages are read from the running delay servers, one server after another, by rising hour of the due instant and,
        within an hour, in the order in which the messages were accepted. A page has up to 65,536 messages, or fewer
        when they are large. Messages that are sent while you read may be missing; one that is pending from the first
        page to the last, and is not moved meanwhile, is on one page.

        Example::

            pages = producer.pending("orders.cancel", tag="vip")
            for page in pages:
                for message in page:
                    print(message.receipt.token, message.deliver_at, message.key, message.size)
            print(pages.found, "are pending,", pages.in_flight, "are being handed over")

        Args:
            subject: the one that the messages were sent to.
            due_from: when the first of them is due; None: the earliest.
            due_before: the messages are due before this; None: all later ones.
            key: only the message that is pending with this key.
            tag: only messages that were sent with this tag; None: all.
            contents: also read headers and bodies.

        Raises:
            CallerError: an argument is wrong.
            RetryLater, ConnectionLost, RequestTimedOut: while pages are read, a server gave no answer within the
                timeout. Ask for the next page again to go on.
        """
        window = window_of(subject, due_from, due_before, tag)
        one = None if key is None else asked_of(subject, None, key)
        engine = self._standing_engine()
        return BlockingPages(
            engine.core.walker.pending(window, one, whole=need_bool("contents", contents)), engine.thread
        )

    def cancel_where(
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
            subject: the one that the messages were sent to.
            due_from: when the first of them is due; None: the earliest.
            due_before: the messages are due before this; None: all later ones.
            tag: only messages that were sent with this tag; None: all.
            dry_run: only count, and change nothing. It is the default; say False to cancel.
            progress: called with the counts so far, after each piece, on a thread of the producer.

        Returns a `Walked` with the counts.

        Raises:
            CallerError: an argument is wrong; nothing was done.
            RetryLater, ConnectionLost, RequestTimedOut: a server gave no answer within the timeout. It is raised when
                the others are through; its ``details`` have ``servers``, the log_ids of those that are not, ``found``
                and ``done``.
        """
        check_walk(dry_run, progress)
        window = window_of(subject, due_from, due_before, tag)
        engine = self._standing_engine()
        walk = engine.core.walker.cancel(window, dry_run=dry_run, progress=progress)
        return engine.thread.call(walk, ends_with_caller=True)

    def reschedule_where(
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
            subject: the one that the messages were sent to.
            shift: how much later they are to be due; negative: earlier. What would be due in the past is due at once.
            due_from: when the first of them is due; None: the earliest.
            due_before: the messages are due before this; None: all later ones.
            tag: only messages that were sent with this tag; None: all.
            dry_run: only count, and change nothing. It is the default; say False to move.
            progress: called with the counts so far, after each piece, on a thread of the producer.
            resume: of a walk with the same subject and window that did not come to its end.

        Returns a `Walked` with the counts.

        Raises:
            CallerError: an argument is wrong, and nothing was done; or a message would be due past the horizon.
            RetryLater, ConnectionLost, RequestTimedOut: a server gave no answer within the timeout. It is raised when
                the others are through; its ``details`` have ``servers``, the log_ids of those that are not, ``found``,
                ``done`` and ``resume``.
        """
        check_walk(dry_run, progress)
        window, shift_ms = window_of(subject, due_from, due_before, tag), shift_ms_of(shift)
        bounds = bounds_of(resume)
        engine = self._standing_engine()
        walk = engine.core.walker.reschedule(window, shift_ms, bounds, dry_run=dry_run, progress=progress)
        return engine.thread.call(walk, ends_with_caller=True)

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
        engine = self._own.close()
        if engine is not None:
            engine.close()


class _Engine:
    """A core on a thread of its own."""

    def __init__(self, address: str, settings: ProducerSettings) -> None:
        self.thread = LoopThread("delayd-producer")
        self._settings = settings
        self._room = Room(settings.queue_bytes_max)
        self.core = self.thread.run(lambda: ProducerCore(address, settings, self._room.give))
        self.pid = self.core.pid
        self._inbox = Inbox[Single, int, SendFuture](self.thread, self.core.outbox.add)
        remember(self)

    def queue(self, row: Single, future: SendFuture) -> None:
        """Hand one send over when there is room for it."""
        byte_count = row_bytes(row) if row[5] else len(row[1]) + len(row[4]) + ROW_BYTES
        if not self._room.take(byte_count, self._settings.timeout_ms / 1000):
            raise queue_full(self._settings)
        self._inbox.put((row, byte_count, future))

    def end(self, until: float) -> None:
        """Flush because the program ends; see at_exit."""
        self.thread.call_within(self.core.outbox.flush(), max(until - monotonic_s(), 0))
        tell_at_end(self.core, len(self._inbox))
        self.thread.end(THREAD_S)

    def close(self) -> None:
        """Flush, disconnect and end the thread."""
        forget(self)
        self.thread.call(self.core.outbox.flush())
        self.thread.call(self.core.disconnect())
        self.thread.close()
