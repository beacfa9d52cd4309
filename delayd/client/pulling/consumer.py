"""Consumers: take messages for a group, from the caller's own event loop or from any thread.

Invariants: a message that was handed out is the caller's until its lease ends, and `ack()` returns only when the
acknowledgement is durable. A Consumer may be used from any thread, and after a fork from the child too, which gets a
consumer of its own (rule I2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Self

from delayd.client.engine import (
    PROCESS,
    AsyncClient,
    BlockingClient,
    OnThread,
    OwnEngine,
    OwnLoopEngine,
    blocking,
    form_of,
)
from delayd.client.instants import clock_at, monotonic_s
from delayd.client.limits import need_bool, need_listed, need_timedelta
from delayd.client.pulling.acks import ACK, Handles, Word, extended, rejected
from delayd.client.pulling.consume_options import Consumes
from delayd.client.pulling.consumer_core import WAIT, ConsumerCore
from delayd.client.pulling.message import (
    MessageColumns,
    Messages,
    MessageView,
    Pulled,
    Settling,
    word_back,
    words_back,
)
from delayd.errors import AlreadyClosed, BadArgument


class AsyncConsumer(Consumes, AsyncClient[ConsumerCore["AsyncMessageBatch"]]):
    """Takes due messages for a group. Make and use it in one running event loop, with ``async with`` and ``async for``.

    Example::

        async with delayd.AsyncConsumer("127.0.0.1:7400", "orders.cancel", group="billing") as consumer:
            async for message in consumer:
                print(message.body, message.headers, f"{message.late_ms} ms late")
                await message.ack()

    Any number of consumers share a group: each message goes to one of them, until its lease ends. Each group of a
    subject gets every message of the subject.

    Args:
        address: where meta listens, as ``host:port``, or over TLS as ``delayds://host:port?ca=FILE``
            (docs/security.md). The default is the environment variable DELAYD_META, or 127.0.0.1:7400.
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
        auto_extend: keep the lease of a message alive while its handler works, for so long in all. A handler that
            blocks its event loop extends nothing.
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
        token: what lets this client in where servers ask for tokens (docs/security.md); it must not be in a repository.
            The default is the environment variable DELAYD_TOKEN, or none.
        connect_timeout: how long a pull goes on when no server can be connected to; then it raises ServerUnavailable.
            None: as long as ``timeout_ms``.
    """

    def _begin(self, meta: str) -> None:
        make = partial(AsyncMessageBatch, consumer=self)
        self._own = OwnLoopEngine("consumer", lambda: clock_at(meta).core_of(ConsumerCore)(meta, self._here(), make))
        self._own.standing()  # The consumer belongs to the loop in which it is made.

    def __aiter__(self) -> Self:
        self._core.check()
        return self

    async def __anext__(self) -> AsyncMessage:
        """Return the next message; waits as long as it takes, even while servers are away. Iteration ends with the
        close.
        """
        core = self._own.engine
        # `is_here`, written out for speed: a call less for each message.
        if core is None or core.ident != get_ident() or core.pid != PROCESS.pid or not core.is_running():
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

        When a pull is cancelled, or interrupted as by Ctrl-C, its messages go to the next call, or back to the server.

        Args:
            max_messages: the most messages to return. The returned messages belong to the caller until the lease ends.
            wait: how long to wait for the first message.

        Raises:
            RetryLater: no server was reached within the timeout.
        """
        most = self._settings.pulled(max_messages)
        until = monotonic_s() + need_timedelta("wait", wait).total_seconds()
        core = self._core
        core.check()
        given: list[Pulled] = []
        try:
            while not core.take(most, given):
                if not await self._run(core.more(most, until), ends_with_caller=True):
                    return core.make(Pulled.nothing(self._settings.subject, core.outage))
            return core.make(given[0])
        except BaseException:
            core.put_back(given)
            raise

    async def flush(self) -> None:
        """Wait until all acknowledgements are durable. Raises the errors of those that failed since the last call."""
        await self._run(self._core.flush())

    async def close(self) -> None:
        """Flush, give back messages that were fetched ahead, and disconnect. A second call does nothing.

        A message that the caller has got can be acknowledged after the close, too.
        """
        engine = self._own.close()
        if engine is not None:
            await engine.close()

    async def step_down(self) -> None:
        """Give up the lead of an exclusive group, so that a consumer that stands by takes over at once. What this
        consumer still holds comes to that one. The next pull stands by.
        """
        await self._core.disconnect()

    def give_back(self, messages: Iterable[AsyncMessage]) -> None:
        """Give ``messages`` back on which no work was done: they come again soon, and this counts as no attempt.

        Nobody waits for that, except the close.
        """
        given = need_listed("messages", messages, "messages of this consumer")
        if not all(isinstance(message, AsyncMessage) for message in given):
            raise BadArgument("messages must be those that this consumer has given out")
        self._core.give_back([message.handle for message in given])

    async def settle(self, handles: Handles, wait: bool, word: Word = ACK) -> None:
        """Say ``word`` of the messages of ``handles``; with ``wait`` it is durable then. Messages call it."""
        need_bool("wait", wait)
        if not handles:
            return
        try:
            core = self._core
            if wait:
                await self._run(core.settled(handles, word))
            else:
                core.check()
                core.settle_soon(handles, word)
        except AlreadyClosed:
            # To acknowledge twice is to acknowledge once, so it does not matter what had left before the close.
            await self._settle_late(handles, word)

    def word_back(self, attempt: int, delay: timedelta | None, error: str) -> Word:
        """What a message becomes that is given back after its ``attempt``, with that ``delay`` and ``error``."""
        return word_back(self._settings, attempt, delay, error)

    def words_back(self, columns: MessageColumns, delay: timedelta | None, error: str) -> list[tuple[Handles, Word]]:
        """The same for the ``columns`` of a batch: handles, and what their messages become, with that ``delay`` and
        ``error``.
        """
        return words_back(self._settings, columns, delay, error)

    async def _settle_late(self, handles: Handles, word: Word) -> None:
        """Acknowledge after the close, on a connection of its own; durably, because no later call can say what
        failed.
        """
        engine = self._own.make()
        try:
            await engine.run(engine.core.settled(handles, word))
        finally:
            await engine.close()


class AsyncMessageBatch(Messages["AsyncMessage"]):
    """The messages of one pull, as columns. Iterate over it to get single messages.

    ``batch[0]`` is the first message, and ``batch[:10]`` a batch of the first ten.

    Example::

        batch = await consumer.pull(max_messages=500)
        print(len(batch), batch.bodies, batch.deliver_at_ms, batch.late_ms)
        await batch.ack()
    """

    def _one(self, row: int) -> AsyncMessage:
        return AsyncMessage(self, row)

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
            error: what went wrong; the next handler reads it as `last_error`. At most 4,096 bytes are kept.
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
        self._consumer: Settling = batch.consumer

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


@form_of(AsyncMessageBatch)
class MessageBatch(Messages["Message"]):
    """The messages of one pull, as columns. Iterate over it to get single messages."""

    def _one(self, row: int) -> Message:
        return Message(self, row)

    ack = blocking(AsyncMessageBatch.ack)
    nack = blocking(AsyncMessageBatch.nack)
    extend = blocking(AsyncMessageBatch.extend)
    reject = blocking(AsyncMessageBatch.reject)


@form_of(AsyncMessage)
class Message(MessageView):
    """One message, as a consumer gets it."""

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

    ack = blocking(AsyncMessage.ack)
    nack = blocking(AsyncMessage.nack)
    extend = blocking(AsyncMessage.extend)
    reject = blocking(AsyncMessage.reject)


@form_of(AsyncConsumer)
class Consumer(Consumes, BlockingClient[ConsumerCore["MessageBatch"]]):
    """Takes due messages for a group. Several threads may share one; use it with ``with`` and ``for``."""

    def _begin(self, meta: str) -> None:
        make = partial(MessageBatch, consumer=self)

        def made() -> OnThread[ConsumerCore[MessageBatch]]:
            core_of: Callable[..., ConsumerCore[MessageBatch]] = clock_at(meta).core_of(ConsumerCore)
            return OnThread("delayd-consumer", lambda thread: core_of(meta, self._here(), make, thread))

        self._own = OwnEngine("consumer", made)

    def __iter__(self) -> Self:
        self._core.check()
        return self

    def __next__(self) -> Message:
        """Return the next message; waits as long as it takes, even while servers are away. Iteration ends with the
        close.
        """
        seat = self._own.engine
        # Written out for speed: a call less for each message.
        if seat is None or seat.pid != PROCESS.pid:
            try:
                seat = self._own.standing()
            except AlreadyClosed:
                raise StopIteration from None
        core = seat.core
        given: list[tuple[MessageBatch, int]] = []
        try:
            while not core.take_next(given):
                if not seat.thread.call(core.more_to_iterate(), ends_with_caller=True):
                    raise StopIteration
            return Message(*given[0])
        except AlreadyClosed:
            raise StopIteration from None
        except BaseException:
            # A Ctrl-C came on the way out.
            core.put_back_next(given)
            raise

    pull = blocking(AsyncConsumer.pull, MessageBatch)
    flush = blocking(AsyncConsumer.flush)
    close = blocking(AsyncConsumer.close)
    settle = AsyncConsumer.settle
    word_back = AsyncConsumer.word_back
    words_back = AsyncConsumer.words_back
    _settle_late = AsyncConsumer._settle_late
