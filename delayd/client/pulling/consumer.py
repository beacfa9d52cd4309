"""Consumer: the blocking form of AsyncConsumer, on a background thread.

Invariant: every method may be called from any thread, and after a fork from the child too, which gets a consumer of its
own (rule I2).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self, overload

from delayd.client.at_exit import THREAD_S, forget, remember
from delayd.client.engine import OwnEngine
from delayd.client.instants import monotonic_s
from delayd.client.limits import need_bool, need_meta, need_timedelta
from delayd.client.loop_thread import Inbox, LoopThread, Work
from delayd.client.pulling.acks import Handles
from delayd.client.pulling.consumer_core import WAIT, ConsumerCore
from delayd.client.pulling.lives import word_back, words_back
from delayd.client.pulling.message import MessageColumns, MessageView, Pulled, place_in
from delayd.client.pulling.settings import (
    BACKOFF,
    LEASE,
    ConsumerSettings,
    Start,
    exclusive_of,
    start_of,
    wanted_tags,
)
from delayd.client.pulling.subjects import Subjects
from delayd.client.pulling.words import ACK, Backoff, Word, extended, rejected
from delayd.client.sending.arguments import TIMEOUT_MS
from delayd.errors import AlreadyClosed, DelaydError

log = logging.getLogger(__name__)


class Consumer:
    """Takes due messages for a group. Several threads may share one; use it with ``with`` and ``for``.

    Example::

        with delayd.Consumer("127.0.0.1:7400", "orders.cancel", group="billing") as consumer:
            for message in consumer:
                print(message.body, message.headers, f"{message.late_ms} ms late")
                message.ack()

    Any number of consumers share a group: each message goes to one of them, until its lease ends. Each group of a
    subject gets every message of the subject.

    Args:
        address: where meta listens, as ``host:port``. The default is the environment variable DELAYD_META, or
            127.0.0.1:7400.
        subject: the name under which the messages were sent; or a list of names; or a pattern of names, in which
            ``*`` stands for one word between dots and ``>`` at the end for one or more: ``orders.*``, ``orders.>``.
        group: the name of the group. Consumers that share the work give the same name; the first pull makes the group.
        lease: how long a message belongs to this consumer alone. If the consumer has not acknowledged the message by
            then, the server offers it again.
        prefetch: whether to fetch messages ahead while the caller works. The consumer measures how long the caller
            takes for a message, and fetches about as many as the caller works off in a quarter of a second; none when
            one message takes longer than half a second. Messages that the caller does not ask for within a second
            go back to other consumers, and this does not count as an attempt.
        max_messages: the most messages in one fetch. Without it, a pull that names no number gets about as many as the
            caller works off in a second: one message at first, and at most 500.
        timeout_ms: how long a call tries to reach a server that is away.
        max_attempts: how often handlers may get a message; a further `nack` makes it a dead letter, and so does a
            lease that ends. Without it there is no limit.
        backoff: how long messages wait that are given back with no delay named; see `Backoff`.
        auto_extend: keep the lease of a message alive while its handler works, for so long in all.
        start: where the group begins if this consumer makes it: ``"earliest"`` (the first message that is kept),
            ``"latest"`` (only what comes from now on), or the first message that was handed over at an instant.
        ephemeral: the group ends when no consumer of it was connected for 30 s; ``start`` is then "latest" if nobody
            says else.
        broadcast: this consumer gets all messages, whatever others get: it has an ephemeral group of its own, whose
            name begins with ``group``; and after a fork another one.
        tags_any: the group gets only messages that were sent with one of these tags. All consumers of a group name the
            same ones, or none.
        tags_all: the same for messages that were sent with all of these tags.
        ordered: the group gets messages with one ordering key one after the other: the next one when the one before is
            settled. All consumers of a group say the same, or nothing.
        exclusive: one consumer of the group gets all messages; the others stand by, and one of them takes over when its
            connection ends, or is silent for 15 s, or for the time that is given here. Nothing is fetched ahead.
        max_in_flight: how many messages handlers may have at most that they have said nothing of. Then a pull and a
            ``for`` loop wait until one of these is settled, or its lease ends.
        group_max_in_flight: how many messages all consumers of the group may hold together, of each subject; the
            realtime server gives out no more. Say the same in each of them: what was said last counts.
        connect_timeout: how long a pull goes on when no server can be connected to; then it raises ServerUnavailable.
            None: as long as ``timeout_ms``.
    """

    def __init__(
        self,
        address: str | None = None,
        subject: str | Sequence[str] = "",
        group: str = "",
        *,
        lease: timedelta = LEASE,
        prefetch: bool = True,
        max_messages: int | None = None,
        timeout_ms: float = TIMEOUT_MS,
        max_attempts: int | None = None,
        backoff: Backoff = BACKOFF,
        auto_extend: timedelta | None = None,
        start: Start | None = None,
        ephemeral: bool = False,
        broadcast: bool = False,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        ordered: bool = False,
        exclusive: bool | timedelta = False,
        max_in_flight: int | None = None,
        group_max_in_flight: int | None = None,
        connect_timeout: timedelta | None = None,
    ) -> None:
        meta = need_meta(address, others="subject= and group=")
        what = Subjects(subject)
        alone = need_bool("ephemeral", ephemeral) or need_bool("broadcast", broadcast)
        tags = (wanted_tags("tags_any", tags_any), wanted_tags("tags_all", tags_all))
        window = exclusive_of(exclusive)
        beginning = (start_of(start, from_now=alone), alone, *tags, ordered, window)
        bounds = (max_in_flight, group_max_in_flight, connect_timeout)
        prefetch = need_bool("prefetch", prefetch) and window is None
        terms = (lease, prefetch, max_messages, timeout_ms, max_attempts, backoff, auto_extend)
        own = group if broadcast else ""
        self._settings = ConsumerSettings(what, group, *terms, *beginning, *bounds, own).of_this_process()
        self._own = OwnEngine(
            "consumer", lambda: _Engine(meta, self._here(), lambda pulled: MessageBatch(pulled, self))
        )
        self._standing_engine = self._own.standing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DelaydError as failed:
            if error is None:
                raise
            # What ended the block says more than what was not acknowledged because of it.
            error.add_note(f"the consumer's close failed, too: {failed.message}")

    def __iter__(self) -> Self:
        self._standing_engine()
        return self

    def __next__(self) -> Message:
        """Return the next message; waits as long as it takes, even while servers are away. Iteration ends with the
        close.
        """
        engine = self._own.engine
        # Written out for speed: a call less for each message.
        if engine is None or engine.pid != os.getpid():
            try:
                engine = self._standing_engine()
            except AlreadyClosed:
                raise StopIteration from None
        core = engine.core
        given: list[tuple[MessageBatch, int]] = []
        try:
            while not core.take_next(given):
                if not engine.wait_to_iterate():
                    raise StopIteration
            return Message(*given[0])
        except BaseException:
            # A Ctrl-C came on the way out.
            core.put_back_next(given)
            raise

    def pull(self, max_messages: int | None = None, wait: timedelta = WAIT) -> MessageBatch:
        """Get the next messages, as columns: at least one, or an empty batch when none came within ``wait``.

        The ``outage`` of an empty batch says why no server could be asked, or answered; it is None when they had no
        messages.

        When a pull is interrupted, for example by Ctrl-C, its messages go to the next call, or back to the server.

        Args:
            max_messages: the most messages to return. The returned messages belong to the caller until the lease ends.
            wait: how long to wait for the first message.

        Raises:
            RetryLater: no server was reached within the timeout.
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
                    return MessageBatch(Pulled.nothing(self._settings.subject, core.outage), self)
            return MessageBatch(given[0], self)
        except BaseException:
            core.put_back(given)
            raise

    def flush(self) -> None:
        """Wait until all acknowledgements are durable. Raises the errors of those that failed since the last call."""
        engine = self._standing_engine()
        engine.thread.call(engine.core.flush())

    def close(self) -> None:
        """Flush, give back messages that were fetched ahead, and disconnect. A second call does nothing.

        A message that the caller has got can be acknowledged after the close, too, on any thread.
        """
        engine = self._own.close()
        if engine is not None:
            engine.close()

    def settle(self, handles: Handles, wait: bool, word: Word = ACK) -> None:
        """Say ``word`` of the messages of ``handles``; with ``wait`` it is durable then. Messages call it."""
        need_bool("wait", wait)
        if not handles:
            return
        try:
            engine = self._standing_engine()
            if wait:
                engine.thread.call(engine.settle(handles, word))
            else:
                engine.settle_soon(handles, word)
        except AlreadyClosed:
            # To acknowledge twice is to acknowledge once, so it does not matter what had left before the close.
            self._settle_late(handles, word)

    def word_back(self, attempt: int, delay: timedelta | None, error: str) -> Word:
        """What a message becomes that is given back after its ``attempt``, with that ``delay`` and ``error``."""
        return word_back(self._settings, attempt, delay, error)

    def words_back(self, columns: MessageColumns, delay: timedelta | None, error: str) -> list[tuple[Handles, Word]]:
        """The same for the ``columns`` of a batch: handles, and what their messages become, with that ``delay`` and
        ``error``.
        """
        return words_back(self._settings, columns, delay, error)

    def _here(self) -> ConsumerSettings:
        self._settings = self._settings.of_this_process()
        return self._settings

    def _settle_late(self, handles: Handles, word: Word) -> None:
        """Acknowledge after the close, on a connection of its own; durably, because no later call can say what
        failed.
        """
        engine = self._own.make()
        try:
            engine.thread.call(engine.settle(handles, word))
        finally:
            engine.close()


class MessageBatch(MessageColumns):
    """The messages of one pull, as columns. Iterate over it to get single messages.

    ``batch[0]`` is the first message, and ``batch[:10]`` a batch of the first ten.

    Example::

        batch = consumer.pull(max_messages=500)
        print(len(batch), batch.bodies, batch.deliver_at_ms, batch.late_ms)
        batch.ack()
    """

    def __init__(self, pulled: Pulled, consumer: Consumer) -> None:
        super().__init__(pulled)
        self.consumer = consumer

    @overload
    def __getitem__(self, row: int) -> Message: ...

    @overload
    def __getitem__(self, row: slice) -> MessageBatch: ...

    def __getitem__(self, row: int | slice) -> Message | MessageBatch:
        if isinstance(row, slice):
            return MessageBatch(self.pulled.pick(range(len(self))[row]), self.consumer)
        return Message(self, place_in(len(self), row))

    def __iter__(self) -> Iterator[Message]:
        return (Message(self, row) for row in range(len(self)))

    def ack(self, *, wait: bool = True) -> None:
        """Acknowledge all messages of the batch: the work on them is done, so their group does not get them again.

        Args:
            wait: True returns when the acknowledgement is durable. False returns at once; if the acknowledgement fails,
                the log says so at once, and the next `flush` or `close` of the consumer raises the error.

        Raises:
            StaleHandle: the server no longer held some messages for this consumer; it offers them again.
            DelaydError: no server was reached within the timeout; the messages come again when their lease ends.
        """
        self.consumer.settle(self.pulled.handles, wait)

    def nack(self, delay: timedelta | None = None, *, error: str = "", wait: bool = True) -> None:
        """Give all messages of the batch back: they come again, as the next attempt.

        They come after ``delay``, or after the consumer's ``backoff``, through their delay server. With a delay of 0
        and no error they come again at once, or after a pause of up to 10 s when they come back again and again.
        Messages whose attempts are over (``max_attempts``) become dead letters instead.

        Args:
            delay: how long they wait; without it, as the back-off says for the attempt of each.
            error: what went wrong; the next handler reads it as `last_error`. At most 2,000 bytes are kept.
            wait: as for `ack`, which also lists the errors.
        """
        for handles, word in self.consumer.words_back(self, delay, error):
            self.consumer.settle(handles, wait, word)

    def extend(self, lease: timedelta) -> None:
        """Hold all messages of the batch for ``lease`` from now on.

        Args:
            lease: how long, from 0.1 s to 12 h (``lease_ms_max`` of the realtime server).

        Raises:
            StaleHandle: the server no longer held some messages for this consumer; the others are extended.
            DelaydError: no server was reached within the timeout.
        """
        self.consumer.settle(self.pulled.handles, True, extended(lease))

    def reject(self, reason: str, *, error: str = "", wait: bool = True) -> None:
        """Keep all messages of the batch as dead letters of their group: they do not come again by themselves.

        ``delayd dead`` lists them, and sends them to the group again.

        Args:
            reason: why, such as ``"no such order"``; at most 2,000 bytes are kept.
            error: what went wrong last, as for `nack`.
            wait: as for `ack`, which also lists the errors.
        """
        self.consumer.settle(self.pulled.handles, wait, rejected(reason, error))


class Settling(Protocol):
    """Whoever says the words of a message, and blocks meanwhile: a consumer, or a worker for its functions."""

    def settle(self, handles: Handles, wait: bool, word: Word = ACK) -> None:
        """See Consumer."""

    def word_back(self, attempt: int, delay: timedelta | None, error: str) -> Word:
        """See Consumer."""


class Message(MessageView):
    """One message, as a consumer gets it.

    Example::

        for message in consumer:
            order = message.json()
            print(order, message.headers, "was due at", message.deliver_at, "attempt", message.attempt)
            message.ack()
    """

    __slots__ = ("_consumer",)

    def __init__(self, batch: MessageBatch, row: int) -> None:
        super().__init__(batch, row)
        self._consumer: Settling = batch.consumer

    @classmethod
    def of(cls, view: MessageView, consumer: Settling) -> Self:
        """The message of any view, whose words ``consumer`` says; for a worker, whose functions block."""
        made = cls.__new__(cls)
        MessageView.__init__(made, view.columns, view.row)
        made._consumer = consumer
        return made

    def ack(self, *, wait: bool = True) -> None:
        """Acknowledge the message: the work on it is done, so its group does not get it again.

        Args:
            wait: as for `MessageBatch.ack`, which also lists the errors.
        """
        self._consumer.settle([self.handle], wait)
        self.is_settled = True

    def nack(self, delay: timedelta | None = None, *, error: str = "", wait: bool = True) -> None:
        """Give the message back: it comes again, as the next attempt, or becomes a dead letter when its attempts are
        over. ``delay``, ``error`` and ``wait`` are those of `MessageBatch.nack`.
        """
        self._consumer.settle([self.handle], wait, self._consumer.word_back(self.attempt, delay, error))
        self.is_settled = True

    def extend(self, lease: timedelta) -> None:
        """Hold the message for ``lease`` from now on; see `MessageBatch.extend`."""
        self._consumer.settle([self.handle], True, extended(lease))

    def reject(self, reason: str, *, error: str = "", wait: bool = True) -> None:
        """Keep the message as a dead letter of its group. ``reason``, ``error`` and ``wait`` are those of
        `MessageBatch.reject`.
        """
        self._consumer.settle([self.handle], wait, rejected(reason, error))
        self.is_settled = True


class _Engine:
    """A core on a thread of its own."""

    def __init__(self, address: str, settings: ConsumerSettings, make: Callable[[Pulled], MessageBatch]) -> None:
        self.thread = LoopThread("delayd-consumer")
        self.core = self.thread.run(lambda: ConsumerCore(address, settings, make, self._post))
        self.pid = self.core.pid
        self._inbox = Inbox(self.thread, self._settle)
        remember(self)

    async def settle(self, handles: Handles, word: Word) -> None:
        """On the loop: say something of messages, durably."""
        await self.core.settle_and_wait(handles, word)

    def settle_soon(self, handles: Handles, word: Word) -> None:
        """From any thread: say something of messages soon."""
        self.core.check()
        self._inbox.put((handles, word))

    def wait_to_iterate(self) -> bool:
        """From any thread: wait until something may be in stock; False after the close."""
        try:
            return self.thread.call(self.core.more_to_iterate(), ends_with_caller=True)
        except AlreadyClosed:
            return False

    def end(self, until: float) -> None:
        """Close because the program ends; see at_exit."""
        closing = self.core.close(self.core.leave())
        if not self.thread.call_within(closing, max(until - monotonic_s(), 0)):
            log.warning("ended_before_flushed subject=%s", self.core.subject)
        self.thread.end(THREAD_S)

    def close(self) -> None:
        """Flush, give back, disconnect and end the thread."""
        forget(self)
        left = self.core.leave()
        try:
            self.thread.call(self.core.close(left))
        finally:
            self.thread.close()

    def _post(self, work: Work) -> None:
        # When the thread has ended nothing needs to be fetched any more.
        with suppress(AlreadyClosed):
            self.thread.post(work)

    def _settle(self, handles: Handles, word: Word) -> None:
        self.core.settle(handles, word)
