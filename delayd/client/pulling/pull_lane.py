"""Pull: what a consumer asks of one server, and reads from its answer, over all its tries and connections.

`PullLane` has the one PULL of a consumer that is under way; it is tried again until it is answered or its time is up.
A PULL without trouble needs no task: its request leaves at once, and its answer is handed on where it arrives.

`Presence` has the connection of a consumer that its server must not miss, because its group lives as long as that
connection (``broadcast``, ``ephemeral``), or because it leads its group (``exclusive``).

`Incarnations` are those that an exclusive consumer had on its connections, and under which it may still hold messages:
on another connection the server knows by them which messages are this consumer's own (docs/protocol.md, A lead). An
example, with a lease of 60 s: message A came under the incarnation 1 at 0 s. The connection broke, and B came under 2
at 10 s. Until 60 s the consumer names 1 and 2, and then only 2. When it extends A for 60 s at 50 s, it names 1 until
110 s. A connection that breaks may mean that the server was started again, which gives each message a whole lease; so
at the first answer under 3, at 80 s, what is still named is named until 140 s at least.

Invariants: messages that a server has given out reach this consumer, which gives back those that nobody wants any more;
so a PULL is never just forgotten, and to end it the server is asked to answer it now. From the first request on until
the close, a connection that must not be missed is replaced at once when it ends, whatever the caller does meanwhile:
the server hears of this consumer again within seconds of being back, also while a handler works.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind
from delayd.client.instants import monotonic_us
from delayd.client.pulling.acks import (
    Handles,
)
from delayd.client.pulling.consume_options import ConsumerSettings
from delayd.client.pulling.message import Pulled, PulledPart
from delayd.client.routing import RetryWaits, ServerLink, spread_ms
from delayd.errors import (
    BadRequest,
    DelaydError,
    RequestFailed,
    RequestTimedOut,
    RetryLater,
    ServerUnavailable,
)
from delayd.net.calls import OnAnswer
from delayd.net.connection import Connection
from delayd.wire.consuming import AtInstant, End, position_value
from delayd.wire.frame import MORE, Frame, Head, HeadValue
from delayd.wire.heads import (
    PART_MOST,
    need_bool,
    need_instant,
    need_int,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType


class Presence:
    """Belongs to one consumer at one server; ``connect`` makes the connection, and calls `watch` with it."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self.watched: Connection | None = None
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._returning: asyncio.Task[None] | None = None
        self._rests = False

    def watch(self, connection: Connection) -> None:
        """Replace this connection when it ends."""
        self.watched = connection
        self._rests = False
        connection.closed.add_done_callback(lambda _: self._ended(connection))

    def rest(self) -> None:
        """Replace no connection, until one is watched again."""
        self._rests = True
        if self._returning is not None:
            self._returning.cancel()

    def _ended(self, connection: Connection) -> None:
        is_back = connection is not self.watched
        if not self._rests and not is_back and (self._returning is None or self._returning.done()):
            self._returning = self._loop.create_task(self._return())

    async def _return(self) -> None:
        backoff = RetryWaits()
        while True:
            try:
                await self._connect()
            except DelaydError:
                # The server is away: whoever waits for a message of it says so.
                await asyncio.sleep(backoff.next_ms() / 1000)
            else:
                return


NAMED_MAX = 1_000  # As many as a request may name; the newest are.


class Incarnations:
    """Belongs to one consumer, and to its loop. ``lease_s`` is the length of a lease, ``now_s`` the clock of leases."""

    def __init__(self, lease_s: float, now_s: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._now_s = now_s
        self._newest = 0
        self._ends: dict[int, float] = {}  # When the last lease of a message that came under it ends.

    @property
    def hold_any(self) -> bool:
        """Whether messages may be held under any of them: the lease of the newest one has not ended."""
        return any(ends > self._now_s() for ends in self._ends.values())

    def answered(self, incarnation: int, lease_ends: float | None) -> list[HeadValue]:
        """A PULL was answered under this incarnation, with messages whose lease ends then, or None; return all that are
        to be named.
        """
        now = self._now_s()
        if incarnation != self._newest:
            self._newest = incarnation
            for each in self._ends:
                self._extend(each, now + self._lease_s)
        for each in [each for each, ends in self._ends.items() if ends <= now]:
            del self._ends[each]
        if lease_ends is not None:
            self._ends.setdefault(incarnation, lease_ends)
            self._extend(incarnation, lease_ends)
        # The connection before is named in any case: the server may not have noticed its end.
        return [*[each for each in self._ends if each != incarnation][1 - NAMED_MAX :], incarnation]

    def extended(self, handles: Handles, lease_s: float) -> None:
        """These messages are to be held for so long from now on."""
        ends = self._now_s() + lease_s
        for incarnation, *_ in handles:
            self._extend(incarnation, ends)

    def _extend(self, incarnation: int, ends: float) -> None:
        if incarnation in self._ends:
            self._ends[incarnation] = max(self._ends[incarnation], ends)


ANSWER_MS_MAX = 10_000.0  # A server may take this much longer than the PULL asked it to wait.
# How long a close waits for the answer to a PULL that it ends, because the answer may hold messages.
END_MS_MAX = 1_000.0

OnAnswered = Callable[[Frame | DelaydError, int], None]
"""Called with the answer or the error, and when it was asked for (monotonic us)."""


class PullLane:
    """PULLs of one group of one subject, or of one subscription, one at a time; belongs to a loop.

    ``names`` says which, in the fields that each request has; ``connection`` may change it when it makes a connection.
    """

    def __init__(
        self,
        names: Mapping[str, HeadValue],
        terms: Mapping[str, HeadValue],
        standing: Callable[[], Connection | None],
        connection: Callable[[], Awaitable[Connection]],
        settings: ConsumerSettings,
        on_answer: OnAnswered,
    ) -> None:
        self._names = names
        self._terms = terms
        self._standing = standing
        self._connection = connection
        self._timeout_s = settings.timeout_ms / 1000
        self._unreached_s = settings.unreached_s
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self.trouble: DelaydError | None = None  # Why the last try failed; None once one is answered.
        self._asked: _Asked | None = None
        self._trying: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a PULL waits for its answer."""
        return self._asked is not None

    @property
    def is_asking(self) -> bool:
        """Whether a PULL has left, and waits for its answer."""
        return self._asked is not None and self._asked.connection is not None

    def start(self, most: int, wait_ms: int, ahead: int) -> None:
        """Ask for up to ``most`` messages for a busy caller that has ``ahead`` messages left; 0 means that the caller
        waits.

        There must be nothing under way.
        """
        assert self._asked is None, "one PULL at a time"
        head: Head = {**self._terms, "max_messages": most, "wait_ms": wait_ms}
        if ahead:
            # Of what is fetched ahead each answer may bring a piece, so it needs no request of its own.
            head["ahead"], head["stands"] = ahead, True
        asked = self._asked = _Asked(head, wait_ms, self._loop.time() + self._timeout_s)
        connection = self._standing()
        if connection is not None:
            self._ask(asked, connection)
        else:
            self._try_in(asked, 0.0)

    def withdraw(self) -> None:
        """Nobody waits any more: ask the server to answer the PULL under way at once, with the messages that it has
        given out.
        """
        asked = self._asked
        if asked is not None and asked.connection is not None:
            self._end_at_server(asked.connection, _ignore)

    async def end(self) -> bool:
        """End the PULL under way for good: its answer is handed on, if it comes in time.

        Returns True if it did not come: then the connection must be ended, so that the server forgets the PULL.
        """
        asked = self._asked
        if asked is not None and asked.connection is not None:
            ended: asyncio.Future[None] = self._loop.create_future()
            # Frames of one connection keep their order, so the PULL's own answer comes before this one.
            self._end_at_server(asked.connection, lambda answer: ended.set_result(None))
            await ended
        asked, self._asked = self._asked, None
        trying, self._trying = self._trying, None
        if trying is not None:
            trying.cancel()
            await asyncio.wait([trying])
        if asked is None or asked.connection is None:
            return False
        asked.connection.forget(asked.request_id)
        return True

    def _end_at_server(self, connection: Connection, ended: OnAnswer) -> None:
        connection.call(RequestType.PULL_END, self._names, (), ended, END_MS_MAX)

    def _ask(self, asked: _Asked, connection: Connection) -> None:
        asked.connection, asked.asked_us = connection, monotonic_us()

        def answered(answer: Frame | DelaydError) -> None:
            if self._asked is asked:
                self._answered(asked, connection, answer)

        timeout_ms = asked.wait_ms + ANSWER_MS_MAX
        head = {**self._names, **asked.head}
        asked.request_id = connection.call(RequestType.PULL, head, (), answered, timeout_ms)

    def _answered(self, asked: _Asked, connection: Connection, answer: Frame | DelaydError) -> None:
        if isinstance(answer, RequestTimedOut):
            # Its answer may still come, and nobody would take the messages in it.
            connection.abort()
        if isinstance(answer, DelaydError):
            self._failed(asked, answer)
        else:
            self.trouble = None
            if not answer.flags & MORE:
                self._asked = None
            self._on_answer(answer, asked.asked_us)

    def _failed(self, asked: _Asked, error: DelaydError) -> None:
        asked.connection = None
        self.trouble = error
        if isinstance(error, RequestFailed | RetryLater):
            asked.backoff = asked.backoff or RetryWaits()
            later = isinstance(error, RetryLater)
            wait_s = (spread_ms(error.retry_after_ms) if later else asked.backoff.next_ms()) / 1000
            left_s = self._unreached_s if isinstance(error, ServerUnavailable) else 0.0
            if self._loop.time() + wait_s < asked.deadline - left_s:
                self._try_in(asked, wait_s)
                return
        self._asked = None
        self._on_answer(error, asked.asked_us)

    def _try_in(self, asked: _Asked, wait_s: float) -> None:
        self._trying = self._loop.create_task(self._try(asked, wait_s))

    async def _try(self, asked: _Asked, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            connection = await self._connection()
        except DelaydError as error:
            self._trying = None
            self._failed(asked, error)
        else:
            self._trying = None
            self._ask(asked, connection)


class _Asked:
    """One PULL over all its tries."""

    __slots__ = ("asked_us", "backoff", "connection", "deadline", "head", "request_id", "wait_ms")

    def __init__(self, head: Head, wait_ms: int, deadline: float) -> None:
        self.head = head
        self.wait_ms = wait_ms
        self.deadline = deadline
        self.backoff: RetryWaits | None = None  # Set from the first failure on.
        self.connection: Connection | None = None  # The connection on which the request may have left.
        self.request_id = 0
        self.asked_us = 0


def _ignore(answer: Frame | DelaydError) -> None:
    """Do nothing: the PULL is answered, or tried again, in any case."""


PULL_BYTES_MAX = 16 << 20  # One answer has at most this many bytes.
CLOCKS_MS = 5_000  # The clocks of servers may differ by this much (rule T1).
_MS = timedelta(milliseconds=1)
_SECOND = timedelta(seconds=1)


def terms_of(settings: ConsumerSettings) -> Head:
    """The fields that each PULL of a consumer has."""
    terms: Head = {
        "max_bytes": PULL_BYTES_MAX,
        "lease_ms": settings.lease // _MS,
        "consumer": f"{socket.gethostname()}:{os.getpid()}",
    }
    if settings.exclusive is not None:
        terms["exclusive_ms"] = settings.exclusive // _MS
    return terms


def bound_of(settings: ConsumerSettings) -> Head:
    """The field that says how many messages a group may have in flight, where it is bounded."""
    return {} if settings.group_max_in_flight is None else {"in_flight_max": settings.group_max_in_flight}


def beginning_of(settings: ConsumerSettings, *, since_ms: int | None = None) -> Head:
    """The fields that say how a group begins, where it is not as usual. ``since_ms``: the consumer had its groups
    before, and was heard last when the server's clock showed that.
    """
    head: Head = {}
    start = settings.start
    if since_ms is not None and start is End.LATEST:
        # What has no group is new, or its group had to end meanwhile, because it was the consumer's own.
        start = AtInstant(max(since_ms - CLOCKS_MS, 0)) if settings.ephemeral else End.EARLIEST
    if start is not End.EARLIEST:
        head["start"] = position_value(start)
    if settings.ephemeral:
        head["ephemeral"] = True
    if settings.tags_any:
        head["tags_any"] = settings.tags_any
    if settings.tags_all:
        head["tags_all"] = settings.tags_all
    if settings.ordered:
        head["ordered"] = True
    return head


def unfinished_in(head: Head) -> bool:
    """Whether the server had not looked at all messages when it answered without any."""
    return need_bool(head, "unfinished") if "unfinished" in head else False


def wanted_in(head: Head) -> int:
    """How many messages other consumers wait for with empty hands, as an answer says it."""
    return need_int(head, "wanted") if "wanted" in head else 0


def pulled_in(
    answer: Frame,
    asked_us: int,
    link: ServerLink,
    settings: ConsumerSettings,
    now_s: float,
    places: Sequence[int] | int,
) -> Pulled | None:
    """The messages in an answer that came at ``now_s`` by the clock of leases; None when there is none.

    ``places`` has the place of each part, or that of all parts.
    """
    # The likely time may be wrong by up to half a round trip, but the answer was not received before it was given.
    answered_at_ms = need_instant(answer.head, "now_ms")
    now_us = monotonic_us()
    on_the_way_ms = max(0, link.clock.likely_ms(now_us) - answered_at_ms)
    # The answer cannot have travelled for longer than we waited. If it seems so, the server's clock was set back.
    on_the_way_ms = min(on_the_way_ms, (now_us - asked_us) // 1000)
    received_at_ms = answered_at_ms + on_the_way_ms
    lease_ends = now_s + settings.lease / _SECOND - on_the_way_ms / 1000
    rows = need_rows(answer.head, "parts", 4, PART_MOST)
    if isinstance(places, int):
        places = [places] * len(rows)
    if len(places) != len(rows):
        raise BadRequest(f"an answer of {len(rows)} parts says of {len(places)} which subject they are of")
    parts: list[PulledPart] = []
    position = 0
    for number, (pull_first, _, count, attempt) in enumerate(rows):
        batch = parse(answer.body, position)
        batch.verify()
        position += batch.total_bytes
        if batch.kind != BatchKind.DISPATCH or batch.count != count:
            raise BadRequest(f"a part of {count} messages came with a batch of {batch.count}, kind {batch.kind}")
        parts.append(PulledPart(batch, range(count), pull_first, attempt, places[number], received_at_ms))
    if not parts:
        return None
    incarnation = need_u64(answer.head, "incarnation")
    return Pulled(settings.subject, incarnation, tuple(parts), lease_ends, settings.subjects)
