"""AsyncConsumer: takes messages of one subject for one group, from the caller's own event loop.

Invariant: a message that was handed out is the caller's until its lease ends, and `ack()` returns only when the
acknowledgement is durable.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self, overload

from delayd.client.engine import OwnLoopEngine
from delayd.client.instants import monotonic_s
from delayd.client.limits import need_bool, need_listed, need_meta, need_timedelta
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
from delayd.errors import AlreadyClosed, BadArgument, DelaydError


class AsyncConsumer:
    """Takes due messages for a group. Make and use it in one running event loop, with ``async with`` and ``async for``.

    Example::

        async with delayd.AsyncConsumer("127.0.0.1:7400", "orders.cancel", group="billing") as consumer:
            async for message in consumer:
                print(message.body, message.headers, f"{message.late_ms} ms late")
                await message.ack()

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
        auto_extend: keep the lease of a message alive while its handler works, for so long in all. The event loop
            must run: a handler that blocks it extends nothing.
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
        # Everything is on one thread, so work is done on the loop at once.
        self._own = OwnLoopEngine(
            "consumer",
            lambda: ConsumerCore(
                meta, self._here(), lambda pulled: AsyncMessageBatch(pulled, self), lambda work: work()
            ),
        )
        self._own.standing()  # The consumer belongs to the loop in which it is made.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except DelaydError as failed:
            if error is None:
                raise
            # What ended the block says more than what was not acknowledged because of it.
            error.add_note(f"the consumer's close failed, too: {failed.message}")

    def __aiter__(self) -> Self:
        self._own.on_this_loop().check()
        return self

    async def __anext__(self) -> AsyncMessage:
        """Return the next message; waits as long as it takes, even while servers are away. Iteration ends with the
        close.
        """
        core = self._own.engine
        # Written out for speed: a call less for each message. In a child of a fork no loop of the parent runs.
        if core is None or core.loop is not _get_running_loop():
            try:
                core = self._own.on_this_loop()
            except AlreadyClosed:
                raise StopAsyncIteration from None
        given: list[tuple[AsyncMessageBatch, int]] = []
        while not core.take_next(given):
            if not await core.more_to_iterate():
                raise StopAsyncIteration
        return AsyncMessage(*given[0])

    async def pull(self, max_messages: int | None = None, wait: timedelta = WAIT) -> AsyncMessageBatch:
        """Get the next messages, as columns: at least one, or an empty batch when none came within ``wait``.

        The ``outage`` of an empty batch says why no server could be asked, or answered; it is None when they had no
        messages.

        When a pull is cancelled, its messages go to the next call, or back to the server.

        Args:
            max_messages: the most messages to return. The returned messages belong to the caller until the lease ends.
            wait: how long to wait for the first message.

        Raises:
            RetryLater: no server was reached within the timeout.
        """
        most = self._settings.pulled(max_messages)
        until = monotonic_s() + need_timedelta("wait", wait).total_seconds()
        core = self._own.on_this_loop()
        core.check()
        given: list[Pulled] = []
        while not core.take(most, given):
            if not await core.more(most, until):
                return AsyncMessageBatch(Pulled.nothing(self._settings.subject, core.outage), self)
        return AsyncMessageBatch(given[0], self)

    async def flush(self) -> None:
        """Wait until all acknowledgements are durable. Raises the errors of those that failed since the last call."""
        await self._own.on_this_loop().flush()

    async def close(self) -> None:
        """Flush, give back messages that were fetched ahead, and disconnect. A second call does nothing.

        A message that the caller has got can be acknowledged after the close, too.
        """
        core = self._own.close()
        if core is not None:
            await core.close(core.leave())

    async def step_down(self) -> None:
        """Give up the lead of an exclusive group, so that a consumer that stands by takes over at once. What this
        consumer still holds comes to that one. The next pull stands by.
        """
        await self._own.on_this_loop().disconnect()

    def give_back(self, messages: Iterable[AsyncMessage]) -> None:
        """Give ``messages`` back on which no work was done: they come again soon, and this counts as no attempt.

        Nobody waits for that, except the close.
        """
        given = need_listed("messages", messages, "messages of this consumer")
        if not all(isinstance(message, AsyncMessage) for message in given):
            raise BadArgument("messages must be those that this consumer has given out")
        self._own.on_this_loop().give_back([message.handle for message in given])

    async def settle(self, handles: Handles, wait: bool, word: Word = ACK) -> None:
        """Say ``word`` of the messages of ``handles``; with ``wait`` it is durable then. Messages call it."""
        need_bool("wait", wait)
        if not handles:
            return
        core = self._own.engine
        # Written out for speed, as in `__anext__`.
        if core is None or core.loop is not _get_running_loop():
            try:
                core = self._own.on_this_loop()
            except AlreadyClosed:
                await self._settle_late(handles, word)
                return
        if wait:
            await core.settle_and_wait(handles, word)
        else:
            core.check()
            core.settle(handles, word)

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

    async def _settle_late(self, handles: Handles, word: Word) -> None:
        """Acknowledge after the close, on a connection of its own; durably, because no later call can say what
        failed.
        """
        core = self._own.make()
        try:
            await core.settle_and_wait(handles, word)
        finally:
            await core.close(core.leave())


class AsyncMessageBatch(MessageColumns):
    """The messages of one pull, as columns. Iterate over it to get single messages.

    ``batch[0]`` is the first message, and ``batch[:10]`` a batch of the first ten.

    Example::

        batch = await consumer.pull(max_messages=500)
        print(len(batch), batch.bodies, batch.deliver_at_ms, batch.late_ms)
        await batch.ack()
    """

    def __init__(self, pulled: Pulled, consumer: AsyncConsumer) -> None:
        super().__init__(pulled)
        self.consumer = consumer

    @overload
    def __getitem__(self, row: int) -> AsyncMessage: ...

    @overload
    def __getitem__(self, row: slice) -> AsyncMessageBatch: ...

    def __getitem__(self, row: int | slice) -> AsyncMessage | AsyncMessageBatch:
        if isinstance(row, slice):
            return AsyncMessageBatch(self.pulled.pick(range(len(self))[row]), self.consumer)
        return AsyncMessage(self, place_in(len(self), row))

    def __iter__(self) -> Iterator[AsyncMessage]:
        return (AsyncMessage(self, row) for row in range(len(self)))

    async def ack(self, *, wait: bool = True) -> None:
        """Acknowledge all messages of the batch: the work on them is done, so their group does not get them again.

        Args:
            wait: True returns when the acknowledgement is durable. False returns at once; if the acknowledgement fails,
                the log says so at once, and the next `flush` or `close` of the consumer raises the error.

        Raises:
            StaleHandle: the server no longer held some messages for this consumer; it offers them again.
            DelaydError: no server was reached within the timeout; the messages come again when their lease ends.
        """
        await self.consumer.settle(self.pulled.handles, wait)

    async def nack(self, delay: timedelta | None = None, *, error: str = "", wait: bool = True) -> None:
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
            await self.consumer.settle(handles, wait, word)

    async def extend(self, lease: timedelta) -> None:
        """Hold all messages of the batch for ``lease`` from now on.

        Args:
            lease: how long, from 0.1 s to 12 h (``lease_ms_max`` of the realtime server).

        Raises:
            StaleHandle: the server no longer held some messages for this consumer; the others are extended.
            DelaydError: no server was reached within the timeout.
        """
        await self.consumer.settle(self.pulled.handles, True, extended(lease))

    async def reject(self, reason: str, *, error: str = "", wait: bool = True) -> None:
        """Keep all messages of the batch as dead letters of their group: they do not come again by themselves.

        ``delayd dead`` lists them, and sends them to the group again.

        Args:
            reason: why, such as ``"no such order"``; at most 2,000 bytes are kept.
            error: what went wrong last, as for `nack`.
            wait: as for `ack`, which also lists the errors.
        """
        await self.consumer.settle(self.pulled.handles, wait, rejected(reason, error))


class AsyncMessage(MessageView):
    """One message, as a consumer gets it.

    Example::

        async for message in consumer:
            order = message.json()
            print(order, message.headers, "was due at", message.deliver_at, "attempt", message.attempt)
            await message.ack()
    """

    __slots__ = ("_consumer",)

    def __init__(self, batch: AsyncMessageBatch, row: int) -> None:
        super().__init__(batch, row)
        self._consumer = batch.consumer

    async def ack(self, *, wait: bool = True) -> None:
        """Acknowledge the message: the work on it is done, so its group does not get it again.

        Args:
            wait: as for `AsyncMessageBatch.ack`, which also lists the errors.
        """
        await self._consumer.settle([self.handle], wait)
        self.is_settled = True

    async def nack(self, delay: timedelta | None = None, *, error: str = "", wait: bool = True) -> None:
        """Give the message back: it comes again, as the next attempt, or becomes a dead letter when its attempts are
        over. ``delay``, ``error`` and ``wait`` are those of `AsyncMessageBatch.nack`.
        """
        await self._consumer.settle([self.handle], wait, self._consumer.word_back(self.attempt, delay, error))
        self.is_settled = True

    async def extend(self, lease: timedelta) -> None:
        """Hold the message for ``lease`` from now on; see `AsyncMessageBatch.extend`."""
        await self._consumer.settle([self.handle], True, extended(lease))

    async def reject(self, reason: str, *, error: str = "", wait: bool = True) -> None:
        """Keep the message as a dead letter of its group. ``reason``, ``error`` and ``wait`` are those of
        `AsyncMessageBatch.reject`.
        """
        await self._consumer.settle([self.handle], wait, rejected(reason, error))
        self.is_settled = True
