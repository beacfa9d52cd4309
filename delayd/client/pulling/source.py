"""Source: where the messages of a consumer come from, and where their acknowledgements go.

`OneSource` is one subject at its realtime server; `many_source` has the source of many subjects.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

from delayd.batch import BatchKind, parse
from delayd.client.instants import monotonic_s, monotonic_us
from delayd.client.link import ServerLink
from delayd.client.meta import MetaView, ServerAddress
from delayd.client.pulling.acks import AckLane, Failures, Handles, HandleSet, Naming, OneLater, OneSubject
from delayd.client.pulling.incarnations import Incarnations
from delayd.client.pulling.message import Pulled, PulledPart
from delayd.client.pulling.presence import Presence
from delayd.client.pulling.pull_lane import ANSWER_MS_MAX, PullLane
from delayd.client.pulling.settings import ConsumerSettings
from delayd.client.pulling.words import Kind, Word
from delayd.errors import BadRequest, DelaydError, ServerUnavailable
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head
from delayd.wire.positions import AtInstant, End, position_value
from delayd.wire.requests import PART_MOST, RequestType, need_bool, need_instant, need_int, need_rows, need_u64

PULL_BYTES_MAX = 16 << 20  # One answer has at most this many bytes.
LANES_MAX = 100  # Lanes of one subject or lease; above this those that are idle are forgotten.
CLOCKS_MS = 5_000  # The clocks of servers may differ by this much (rule T1).
ROUTE_LOOK_S = 600.0  # Between looks at the route while no message has come; meta keeps it for an hour.

_LATER = {Kind.RETRY: (RequestType.RETRY, "retries"), Kind.REJECT: (RequestType.REJECT, "rejects")}
_MS = timedelta(milliseconds=1)
_SECOND = timedelta(seconds=1)

log = logging.getLogger(__name__)


class Callbacks(NamedTuple):
    """What a source tells the core of its consumer."""

    on_pulled: Callable[[Pulled | DelaydError | None, int], None]
    """A PULL has ended: with messages, with none, or with an error; and how many messages other consumers want."""
    on_wanted: Callable[[int], None]
    """How many messages other consumers want, as the answer to an acknowledgement says it."""
    failures: Failures
    """Takes why words failed that nobody waited for."""


class Source(Protocol):
    """Belongs to a loop."""

    @property
    def under_way(self) -> bool:
        """Whether a PULL waits for its answer at each server that can be asked."""

    @property
    def is_asking(self) -> bool:
        """Whether a server that is there has a PULL to answer."""

    @property
    def trouble(self) -> DelaydError | None:
        """Why the last try of a PULL failed; None when it was answered, or there was none."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a server that answered without messages had not looked at all of them."""

    def start(self, most: int, wait_ms: int, ahead: int) -> None:
        """Ask for up to ``most`` messages wherever no PULL is under way; see `PullLane.start`."""

    def withdraw(self) -> None:
        """Nobody waits any more: have the PULLs under way answered at once, with what is given out already."""

    def settle(self, handles: Handles, word: Word) -> None:
        """Say something of messages, soon."""

    def settle_and_wait(self, handles: Handles, word: Word) -> asyncio.Future[None]:
        """Say something of messages, durably."""

    async def give_back(self, handles: Handles) -> None:
        """Give back messages that no handler was given."""

    @property
    def is_settled(self) -> bool:
        """Whether what was settled is durable or failed."""

    async def flush(self) -> None:
        """Wait until it is."""

    async def disconnect(self) -> None:
        """End the connections; the next request makes others."""

    async def end(self) -> None:
        """Pull no more; what is under way is ended and handed on."""

    async def close(self) -> None:
        """Disconnect."""


class Lanes:
    """The words of one consumer for one server.

    Words about one message keep their order: a word waits until each earlier one that names one of its messages has its
    answer. Only EXTEND is in no order, because it changes nothing of what becomes of a message.
    """

    def __init__(
        self,
        namings: tuple[Naming, Naming],
        connection: Callable[[], Awaitable[Connection]],
        timeout_ms: float,
        callbacks: Callbacks,
    ) -> None:
        def lane(request: RequestType, naming: Naming) -> AckLane:
            return AckLane(request, naming, connection, timeout_ms, callbacks.failures, heard)

        def heard(head: Head) -> None:
            callbacks.on_wanted(wanted_in(head))

        counted, uncounted = namings
        self._of = {Kind.ACK: lane(RequestType.ACK, counted), Kind.NACK: lane(RequestType.NACK, counted)}
        self.returns = lane(RequestType.NACK, uncounted)
        self._make = lane
        self._of_one: dict[tuple[Kind, str, int], AckLane] = {}
        self._busy: dict[AckLane, None] = {}  # All that are not idle, and some that have become idle.
        self._timeout_s = timeout_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._held_up: deque[_HeldUp] = deque()  # Words that wait for earlier ones, in their order.
        self._held_up_handles = HandleSet()
        self._going_on: asyncio.Task[None] | None = None

    def give(self, word: Word, names: Head, handles: Handles) -> None:
        """Say something of messages, soon; ``names`` are those of the group, for words that name one subject."""
        lane = self._lane(word, names)
        if self._is_held_up(lane, word, handles):
            self._hold_up(_HeldUp(lane, handles, word.rows(handles), None, self._loop.time() + self._timeout_s))
        else:
            lane.give(word.rows(handles))

    def give_and_wait(self, word: Word, names: Head, handles: Handles) -> asyncio.Future[None]:
        """As `AckLane.give_and_wait`."""
        lane = self._lane(word, names)
        if not self._is_held_up(lane, word, handles):
            return lane.give_and_wait(word.rows(handles))
        durable: asyncio.Future[None] = self._loop.create_future()
        until_s = self._loop.time() + self._timeout_s
        self._hold_up(_HeldUp(lane, handles, word.rows(handles), durable, until_s))
        return durable

    @property
    def are_idle(self) -> bool:
        """Whether all words are durable or failed."""
        return self._going_on is None and all(lane.is_idle for lane in self._busy)

    async def flush(self) -> None:
        """Wait until all of them are."""
        while not self.are_idle:
            if self._going_on is not None:
                await asyncio.wait([self._going_on])
            for lane in list(self._busy):
                await lane.flush()

    def _lane(self, word: Word, names: Head) -> AckLane:
        kind = word.kind
        known = self._of.get(kind)
        if known is not None:
            return known
        lease_ms = word.delay_ms if kind is Kind.EXTEND else 0
        key = (kind, str(names["subject"]), lease_ms)
        found = self._of_one.get(key)
        if found is None:
            if len(self._of_one) >= LANES_MAX:
                self._of_one = {at: lane for at, lane in self._of_one.items() if not lane.is_idle}
            if kind is Kind.EXTEND:
                found = self._make(RequestType.EXTEND, OneSubject({**names, "lease_ms": lease_ms}))
            else:
                request, field = _LATER[kind]
                found = self._make(request, OneLater(names, field))
            self._of_one[key] = found
        return found

    def _is_held_up(self, lane: AckLane, word: Word, handles: Handles) -> bool:
        """Whether an earlier word about one of these messages has no answer yet."""
        self._busy[lane] = None
        if word.kind is Kind.EXTEND:
            return False
        if self._held_up and self._held_up_handles.meets(handles):
            return True
        # The lanes that are busy are few: mostly this one alone.
        return len(self._busy) > 1 and any(other.meets(handles) for other in self._others(lane))

    def _others(self, lane: AckLane) -> list[AckLane]:
        """The other lanes on which an earlier word may be under way."""
        for other in [each for each in self._busy if each.is_idle and each is not lane]:
            del self._busy[other]
        return [each for each in self._busy if each is not lane and each.keeps_order]

    def _hold_up(self, held_up: _HeldUp) -> None:
        self._held_up.append(held_up)
        self._held_up_handles.add(held_up.handles)
        if self._going_on is None:
            self._going_on = self._loop.create_task(self._go_on())

    async def _go_on(self) -> None:
        """Pass on the words that wait, in their order.

        A later word about the same messages waits behind, so what a word still meets was said before it.
        """
        try:
            while self._held_up:
                lane, handles, rows, durable, until_s = self._held_up[0]
                for other in self._others(lane):
                    while other.meets(handles):
                        await other.next_round()
                self._held_up.popleft()
                if durable is None or not durable.done():
                    self._busy[lane] = None
                    lane.pass_on(rows, durable, until_s)
        finally:
            self._held_up_handles = HandleSet()
            self._going_on = None


class _HeldUp(NamedTuple):
    """A word that waits for an earlier one; ``rows`` are what its request has."""

    lane: AckLane
    handles: Handles
    rows: Handles
    durable: asyncio.Future[None] | None
    until_s: float


class OneSource:
    """One subject, at the realtime server that meta routes it to; a Source."""

    def __init__(self, meta: MetaView, settings: ConsumerSettings, callbacks: Callbacks) -> None:
        self._meta = meta
        self._settings = settings
        self._on_pulled = callbacks.on_pulled
        self._loop = asyncio.get_running_loop()
        self._link: ServerLink | None = None
        self._routing = asyncio.Lock()
        self._routed_at_s = 0.0  # When meta was asked for the route last.
        self._had_messages = False  # Once messages have come the route is used, and meta keeps it.
        self._looking: asyncio.Task[None] | None = None
        self._ended = False
        self.is_unfinished = False
        names: Head = {"subject": settings.subject, "group": settings.group}
        terms = self._terms = terms_of(settings) | beginning_of(settings) | bound_of(settings)
        self._lane = PullLane(names, terms, self._standing, self._connection, settings, self._answered)
        namings = (OneSubject(names), OneSubject({**names, "uncounted": True}))
        self._names = names
        self._began = False  # Whether a PULL was answered, so that the group was made.
        self._since_ms: int | None = None  # When the server was heard last, until it answers on another connection.
        self._presence: Presence | None = None
        if settings.ephemeral or settings.exclusive is not None:
            self._presence = Presence(self._connection)
        self._incarnations: Incarnations | None = None
        if settings.exclusive is not None:
            self._incarnations = Incarnations(settings.lease / _SECOND, meta.clock.lease_s)
        self._lanes = Lanes(namings, self._connection, settings.timeout_ms, callbacks)

    @property
    def under_way(self) -> bool:
        """See Source."""
        return self._lane.under_way

    @property
    def is_asking(self) -> bool:
        """See Source."""
        return self._lane.is_asking

    @property
    def trouble(self) -> DelaydError | None:
        """See Source."""
        return self._lane.trouble

    def start(self, most: int, wait_ms: int, ahead: int) -> None:
        """See Source."""
        self._lane.start(most, wait_ms, ahead)

    def withdraw(self) -> None:
        """See Source."""
        self._lane.withdraw()

    def settle(self, handles: Handles, word: Word) -> None:
        """See Source."""
        self._extends(handles, word)
        self._lanes.give(word, self._names, handles)

    def settle_and_wait(self, handles: Handles, word: Word) -> asyncio.Future[None]:
        """See Source."""
        self._extends(handles, word)
        return self._lanes.give_and_wait(word, self._names, handles)

    async def give_back(self, handles: Handles) -> None:
        """See Source."""
        await self._lanes.returns.give_and_wait(handles)

    @property
    def is_settled(self) -> bool:
        """See Source."""
        return self._lanes.are_idle

    async def flush(self) -> None:
        """See Source."""
        await self._lanes.flush()

    async def disconnect(self) -> None:
        """See Source."""
        if self._presence is not None:
            self._presence.rest()
        if self._link is not None:
            await self._link.disconnect()

    async def end(self) -> None:
        """See Source."""
        self._ended = True
        if self._presence is not None:
            self._presence.rest()
        if self._looking is not None:
            self._looking.cancel()
        if await self._lane.end() and self._link is not None:
            await self._link.disconnect()

    async def close(self) -> None:
        """See Source."""
        if self._link is not None:
            await self._link.close()

    def _answered(self, answer: Frame | DelaydError, asked_us: int) -> None:
        if isinstance(answer, DelaydError):
            self._on_pulled(answer, 0)
            return
        assert self._link is not None, "an answer came without a connection"
        try:
            pulled = pulled_in(answer, asked_us, self._link, self._settings, self._meta.clock.lease_s())
            wanted = wanted_in(answer.head)
            self.is_unfinished = unfinished_in(answer.head)
        except DelaydError as error:
            self._on_pulled(error, 0)
            return
        if pulled is not None:
            self._had_messages = True
        else:
            self._keep_route()
        self._began = True
        if self._since_ms is not None:
            self._since_ms = None
            self._terms |= beginning_of(self._settings)
        if self._incarnations is not None:
            # On another connection the server knows by these that what is in hand is this consumer's own.
            lease_ends = None if pulled is None else pulled.lease_ends
            self._terms["was"] = self._incarnations.answered(need_u64(answer.head, "incarnation"), lease_ends)
        self._on_pulled(pulled, wanted)

    def _extends(self, handles: Handles, word: Word) -> None:
        if self._incarnations is not None and word.kind is Kind.EXTEND:
            self._incarnations.extended(handles, word.delay_ms / 1000)

    def _present(self, connection: Connection) -> Connection:
        """Have the server know that this connection is the consumer's, before anything else is asked on it."""
        presence = self._presence
        if presence is not None and presence.watched is not connection:
            if self._began and self._link is not None:
                if self._since_ms is None:
                    self._since_ms = self._link.left_ms
                # Should the group have ended, it goes on where this consumer was heard last.
                self._terms |= beginning_of(self._settings, since_ms=self._since_ms)
                claim: Head = {name: self._terms[name] for name in ("exclusive_ms", "was") if name in self._terms}
                connection.call(RequestType.PULL_END, {**self._names, **claim}, (), _ignore, ANSWER_MS_MAX)
            presence.watch(connection)
        return connection

    def _keep_route(self) -> None:
        """Nothing came: ask for the route again, because meta forgets a subject without messages that nobody asks for,
        and may route it elsewhere later.
        """
        if self._had_messages or self._ended or monotonic_s() - self._routed_at_s < ROUTE_LOOK_S:
            return
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._look_at_route())

    async def _look_at_route(self) -> None:
        async with self._routing:
            try:
                server = await self._meta.route(self._settings.subject)
            except DelaydError as error:
                log.debug("route_unknown subject=%s code=%s", self._settings.subject, error.code)
                return
            self._routed_at_s = monotonic_s()
            # Once messages have come, some may not be acknowledged yet, and only their server can take that.
            if not self._had_messages:
                await self._go_to(server)

    def _standing(self) -> Connection | None:
        return None if self._link is None else self._link.standing

    async def _connection(self) -> Connection:
        standing = self._standing()
        if standing is not None:
            return standing
        async with self._routing:
            if self._link is None:
                await self._route()
            assert self._link is not None, "a route gives a link or raises"
            try:
                return self._present(await self._link.connection())
            except ServerUnavailable as unavailable:
                try:
                    await self._route()
                except DelaydError as error:
                    # Without meta, the server that is known is tried again.
                    log.debug("route_unknown subject=%s code=%s", self._settings.subject, error.code)
                raise unavailable

    async def _route(self) -> None:
        server = await self._meta.route(self._settings.subject)
        self._routed_at_s = monotonic_s()
        await self._go_to(server)

    async def _go_to(self, server: ServerAddress) -> None:
        if self._link is None:
            self._link = ServerLink(server.host, server.port, server.log_id)
        elif self._link.log_id == server.log_id:
            self._link.move(server.host, server.port)
        else:
            await self._link.close()
            self._link = ServerLink(server.host, server.port, server.log_id)


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


def _ignore(answer: Frame | DelaydError) -> None:
    """Do nothing: when the server has not heard it, the connection ends, and the next one is told of."""


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
    places: Sequence[int] | None = None,
) -> Pulled | None:
    """The messages in an answer that came at ``now_s`` by the clock of leases; None when there is none.

    ``places`` has the place of each part where they differ.
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
    if places is not None and len(places) != len(rows):
        raise BadRequest(f"an answer of {len(rows)} parts says of {len(places)} which subject they are of")
    parts: list[PulledPart] = []
    position = 0
    for number, (pull_first, _, count, attempt) in enumerate(rows):
        batch = parse(answer.body, position)
        batch.verify()
        position += batch.total_bytes
        if batch.kind != BatchKind.DISPATCH or batch.count != count:
            raise BadRequest(f"a part of {count} messages came with a batch of {batch.count}, kind {batch.kind}")
        parts.append(PulledPart(batch, range(count), pull_first, attempt, 0 if places is None else places[number]))
    if not parts:
        return None
    incarnation = need_u64(answer.head, "incarnation")
    many = None if places is None else settings.subjects
    return Pulled(settings.subject, incarnation, tuple(parts), received_at_ms, lease_ends, many)
