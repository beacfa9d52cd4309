"""Source: where the messages of a consumer come from, and where their acknowledgements go.

`OneSource` is one subject at its realtime server; `many_source` has the source of many subjects. `Lanes` has the words
for one server.

Invariant: words about one message keep their order, and each goes to the server that gave the message, wherever its
subject is by now.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from delayd.client.instants import monotonic_us
from delayd.client.pulling.acks import (
    NACK,
    AckLane,
    Failures,
    Handles,
    HandleSet,
    Naming,
    OneLater,
    OneSubject,
    Way,
    Word,
    WordKind,
    stale_error,
)
from delayd.client.pulling.consume_options import ConsumerSettings
from delayd.client.pulling.message import Pulled
from delayd.client.pulling.pull_lane import (
    ANSWER_MS_MAX,
    Incarnations,
    Presence,
    PullLane,
    beginning_of,
    bound_of,
    pulled_in,
    terms_of,
    unfinished_in,
    wanted_in,
)
from delayd.client.routing import MetaView, ServerAddress, ServerLink, spread_ms
from delayd.errors import (
    DelaydError,
    NoRealtimeServer,
    RetryLater,
    ServerUnavailable,
    StaleHandle,
)
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    need_u64,
)
from delayd.wire.requests import RequestType

LANES_MAX = 100  # Lanes of one subject or lease; above this those that are idle are forgotten.
ROUTE_LOOK_S = 5.0  # Between looks at the route, which an operator may move.

_LATER = {WordKind.RETRY: (RequestType.RETRY, "retries"), WordKind.REJECT: (RequestType.REJECT, "rejects")}
_MS, _SECOND = timedelta(milliseconds=1), timedelta(seconds=1)

log = logging.getLogger(__name__)


class Callbacks(NamedTuple):
    """What a source tells the core of its consumer."""

    on_pulled: Callable[[Pulled | DelaydError | None, int], None]
    """A PULL has ended: with messages, with none, or with an error; and how many messages other consumers want."""
    on_wanted: Callable[[int], None]
    """How many messages other consumers want, as the answer to an acknowledgement says it."""
    failures: Failures
    """Takes why words failed that nobody waited for."""


class Lanes:
    """The words of one consumer for one server.

    Words about one message keep their order: a word waits until each earlier one that names one of its messages has its
    answer. Only EXTEND is in no order, because it changes nothing of what becomes of a message.
    """

    def __init__(
        self,
        namings: tuple[Naming, Naming],
        way: Way,
        timeout_ms: float,
        callbacks: Callbacks,
    ) -> None:
        def lane(request: RequestType, naming: Naming) -> AckLane:
            return AckLane(request, naming, way, timeout_ms, callbacks.failures, heard)

        def heard(head: Head) -> None:
            callbacks.on_wanted(wanted_in(head))

        counted, uncounted = namings
        self._acks, self._nacks = lane(RequestType.ACK, counted), lane(RequestType.NACK, counted)
        self.returns = lane(RequestType.NACK, uncounted)
        self._make = lane
        self._of_one: dict[tuple[WordKind, str, int], AckLane] = {}
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
        if kind is WordKind.ACK:
            return self._acks
        if kind is WordKind.NACK:
            return self._nacks
        lease_ms = word.delay_ms if kind is WordKind.EXTEND else 0
        key = (kind, str(names["subject"]), lease_ms)
        found = self._of_one.get(key)
        if found is None:
            if len(self._of_one) >= LANES_MAX:
                self._of_one = {at: lane for at, lane in self._of_one.items() if not lane.is_idle}
            if kind is WordKind.EXTEND:
                found = self._make(RequestType.EXTEND, OneSubject({**names, "lease_ms": lease_ms}))
            else:
                request, field = _LATER[kind]
                found = self._make(request, OneLater(names, field))
            self._of_one[key] = found
        return found

    def _is_held_up(self, lane: AckLane, word: Word, handles: Handles) -> bool:
        """Whether an earlier word about one of these messages has no answer yet."""
        self._busy[lane] = None
        if word.kind is WordKind.EXTEND:
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


class Reached:
    """A realtime server that a source has met: its connection, and the words for it."""

    link: ServerLink
    lanes: Lanes


R = TypeVar("R", bound=Reached)
ByLanes = list[tuple[Lanes, Head, Handles]]
"""Where handles go, the names of their group there, and the handles as requests have them."""


class Source(ABC, Generic[R]):
    """Where messages come from, and takes words to the servers that gave them out. Belongs to a loop.

    Invariant: the place of a handle says which server that is, so no word goes to another one, wherever the subject is
    now.
    """

    def __init__(self, settings: ConsumerSettings, failures: Failures) -> None:
        self._settings = settings
        self._failures = failures
        self._loop = asyncio.get_running_loop()
        self._servers: dict[int, R] = {}
        self._lanes_of: dict[
            int, tuple[Lanes, Head]
        ] = {}  # By place: where words go, and the names of the group there.
        self._settling: set[asyncio.Future[None]] = set()

    @property
    @abstractmethod
    def under_way(self) -> bool:
        """Whether a PULL waits for its answer at each server that can be asked."""

    @property
    @abstractmethod
    def is_asking(self) -> bool:
        """Whether a server that is there has a PULL to answer."""

    @property
    @abstractmethod
    def trouble(self) -> DelaydError | None:
        """Why the last try of a PULL failed; None when it was answered, or there was none."""

    @property
    @abstractmethod
    def is_unfinished(self) -> bool:
        """Whether a server that answered without messages had not looked at all of them."""

    @abstractmethod
    def start(self, most: int, wait_ms: int, ahead: int) -> None:
        """Ask for up to ``most`` messages wherever no PULL is under way; see `PullLane.start`."""

    @abstractmethod
    def withdraw(self) -> None:
        """Nobody waits any more: have the PULLs under way answered at once, with what is given out already."""

    @abstractmethod
    async def disconnect(self) -> None:
        """End the connections; the next request makes others."""

    @abstractmethod
    async def end(self) -> None:
        """Pull no more; what is under way is ended and handed on."""

    def settle(self, handles: Handles, word: Word) -> None:
        """Say something of messages, soon."""
        by_lanes = self._by_lanes(handles, word)
        if by_lanes is not None:
            for lanes, names, of_lane in by_lanes:
                lanes.give(word, names, of_lane)
        else:
            settling = self._loop.create_task(self._settle_unwatched(handles, word))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)

    def settle_and_wait(self, handles: Handles, word: Word) -> asyncio.Future[None]:
        """Say something of messages, durably."""
        by_lanes = self._by_lanes(handles, word)
        if by_lanes is None:
            return self._loop.create_task(self._settle_elsewhere(handles, word))
        durable = [lanes.give_and_wait(word, names, of_lane) for lanes, names, of_lane in by_lanes]
        return durable[0] if len(durable) == 1 else self._loop.create_task(_all(durable))

    async def give_back(self, handles: Handles) -> None:
        """Give back messages that no handler was given."""
        by_lanes = await self._by_lanes_met(handles, NACK)
        await _all([lanes.returns.give_and_wait(of_lane) for lanes, _, of_lane in by_lanes])

    async def flush(self) -> None:
        """Wait until what was settled is durable or failed."""
        if self._settling:
            await asyncio.wait(self._settling)
        # The words of each server leave by themselves, soon after they were said, so one wait after the other will do.
        for server in list(self._servers.values()):
            await server.lanes.flush()

    async def close(self) -> None:
        """Disconnect."""
        await asyncio.gather(*(server.link.close() for server in self._servers.values()))

    @abstractmethod
    async def _meet(self, log_ids: set[int]) -> None:
        """Ask meta for these servers; one that it does not know is left out."""

    def _by_lanes(self, handles: Handles, word: Word) -> ByLanes | None:
        """Where these handles go; None when a server of them was not met."""
        found: ByLanes = []
        for place, of_place in by_place(handles).items():
            lanes_of = self._lanes_of.get(place)
            if lanes_of is None:
                at = self._settings.subjects.at(place)
                server = self._servers.get(at.log_id)
                if server is None:
                    return None
                names: Head = {"subject": at.subject, "group": self._settings.group, "log_id": at.log_id}
                lanes_of = self._lanes_of[place] = (server.lanes, names)
            found.append((*lanes_of, of_place))
        return found

    async def _by_lanes_met(self, handles: Handles, word: Word) -> ByLanes:
        """The same, after meta was asked for a server that was not met: that of an earlier connection of this consumer,
        as after its close or in a forked child.
        """
        by_lanes = self._by_lanes(handles, word)
        if by_lanes is None:
            at = self._settings.subjects.at
            await self._meet({at(handle[3]).log_id for handle in handles})
            by_lanes = self._by_lanes(handles, word)
        if by_lanes is None:
            raise NoRealtimeServer("meta does not know the realtime server of these messages any more")
        return by_lanes

    async def _settle_elsewhere(self, handles: Handles, word: Word) -> None:
        by_lanes = await self._by_lanes_met(handles, word)
        await _all([lanes.give_and_wait(word, names, of_lane) for lanes, names, of_lane in by_lanes])

    async def _settle_unwatched(self, handles: Handles, word: Word) -> None:
        try:
            await self._settle_elsewhere(handles, word)
        except DelaydError as error:
            self._failures.add(error)


class _OneServer(Reached):
    """A realtime server that has the subject, or had it."""

    def __init__(self, address: ServerAddress, exclusive: timedelta | None) -> None:
        silence_ms = math.inf if exclusive is None else exclusive / _MS
        self.link = ServerLink(address.endpoint, address.log_id, silence_ms)


class OneSource(Source[_OneServer]):
    """One subject, at the realtime server to which meta routes it; a Source.

    When the route moves, the next PULL goes to the new server. The servers of before take the words about what they
    gave out. An exclusive consumer stays where it leads until it holds nothing there.

    An example: message A came from server 1, and the subject moves to server 2. At the next look at the route, the PULL
    that waits at 1 is answered without messages, and the next one goes to 2. The ACK of A goes to 1, as its place says.
    """

    is_unfinished = False

    def __init__(self, meta: MetaView, settings: ConsumerSettings, callbacks: Callbacks) -> None:
        super().__init__(settings, callbacks.failures)
        self._meta = meta
        self._callbacks = callbacks
        self._routed: _OneServer | None = None  # Where meta says that the subject is.
        self._asked: _OneServer | None = None  # Where the newest PULL went.
        self._routing = asyncio.Lock()
        self._confirmed_us = 0  # When meta was asked last, and said the same as before.
        self._watching: asyncio.Task[None] | None = None
        names: Head = {"subject": settings.subject, "group": settings.group}
        terms = self._terms = terms_of(settings) | beginning_of(settings) | bound_of(settings)
        self._lane = PullLane(names, terms, self._standing_to_pull, self._connection_to_pull, settings, self._answered)
        self._names = names
        self._began = False  # Whether this server answered a PULL, so that the group was made.
        self._since_ms: int | None = None  # When a server was heard last, until the next answer.
        self._presence: Presence | None = None
        if settings.ephemeral or settings.exclusive is not None:
            self._presence = Presence(self._connection)
        self._incarnations: Incarnations | None = None
        if settings.exclusive is not None:
            self._incarnations = Incarnations(settings.lease / _SECOND, meta.clock.lease_s)

    @property
    def under_way(self) -> bool:
        return self._lane.under_way

    @property
    def is_asking(self) -> bool:
        return self._lane.is_asking

    @property
    def trouble(self) -> DelaydError | None:
        return self._lane.trouble

    def start(self, most: int, wait_ms: int, ahead: int) -> None:
        if self._watching is None:
            self._watching = self._loop.create_task(self._watch())
        self._lane.start(most, wait_ms, ahead)

    def withdraw(self) -> None:
        self._lane.withdraw()

    def settle(self, handles: Handles, word: Word) -> None:
        if self._incarnations is not None:
            self._extends(handles, word)
        known = self._lanes_of.get(handles[0][-1]) if len(handles) == 1 else None
        if known is None:
            super().settle(handles, word)
        else:
            # Written out for speed: most words are about one message.
            lanes, names = known
            lanes.give(word, names, [handles[0][:-1]])

    def settle_and_wait(self, handles: Handles, word: Word) -> asyncio.Future[None]:
        self._extends(handles, word)
        return super().settle_and_wait(handles, word)

    async def disconnect(self) -> None:
        if self._presence is not None:
            self._presence.rest()
        await asyncio.gather(*(server.link.disconnect() for server in self._servers.values()))

    async def end(self) -> None:
        if self._presence is not None:
            self._presence.rest()
        if self._watching is not None:
            self._watching.cancel()
        if await self._lane.end() and self._asked is not None:
            await self._asked.link.disconnect()

    def _answered(self, answer: Frame | DelaydError, asked_us: int) -> None:
        if isinstance(answer, DelaydError):
            self._callbacks.on_pulled(answer, 0)
            return
        server = self._asked
        assert server is not None and server.link.log_id is not None, "an answer came without a connection"
        place = self._settings.subjects.place(self._settings.subject, server.link.log_id)
        try:
            pulled = pulled_in(answer, asked_us, server.link, self._settings, self._meta.clock.lease_s(), place)
            wanted = wanted_in(answer.head)
            self.is_unfinished = unfinished_in(answer.head)
        except DelaydError as error:
            self._callbacks.on_pulled(error, 0)
            return
        if server is self._routed:
            self._began = True
            if self._since_ms is not None:
                self._since_ms = None
                self._begin_from(None)
        if self._incarnations is not None:
            # On another connection the server knows by these that what is in hand is this consumer's own.
            lease_ends = None if pulled is None else pulled.lease_ends
            self._terms["was"] = self._incarnations.answered(need_u64(answer.head, "incarnation"), lease_ends)
        self._callbacks.on_pulled(pulled, wanted)

    def _extends(self, handles: Handles, word: Word) -> None:
        if self._incarnations is not None and word.kind is WordKind.EXTEND:
            self._incarnations.extended(handles, word.delay_ms / 1000)

    def _begin_from(self, since_ms: int | None) -> None:
        self._terms.pop("start", None)
        self._terms |= beginning_of(self._settings, since_ms=since_ms)

    def _present(self, server: _OneServer, connection: Connection) -> Connection:
        """Have the server know that this connection is the consumer's, before anything else is asked on it."""
        presence = self._presence
        if presence is not None and server is self._routed and presence.watched is not connection:
            if self._began:
                if self._since_ms is None:
                    self._since_ms = server.link.left_ms
                # Should the group have ended, it goes on where this consumer was heard last.
                self._begin_from(self._since_ms)
                self._say_present(connection)
            presence.watch(connection)
        return connection

    def _say_present(self, connection: Connection) -> None:
        claim: Head = {name: self._terms[name] for name in ("exclusive_ms", "was") if name in self._terms}

        def answered(answer: Frame | DelaydError) -> None:
            # A server that is just starting refuses. Not heard at all, it is said on the next connection.
            if isinstance(answer, RetryLater) and connection.is_open:
                self._loop.call_later(spread_ms(answer.retry_after_ms) / 1000, self._say_present, connection)

        connection.call(RequestType.PULL_END, {**self._names, **claim}, (), answered, ANSWER_MS_MAX)

    # Servers.

    async def _watch(self) -> None:
        """Look again and again: the subject may move, and meta forgets one without messages that nobody asks for."""
        while True:
            await asyncio.sleep(ROUTE_LOOK_S * random.uniform(0.8, 1.2))
            await self._try_to_look()

    async def _try_to_look(self) -> None:
        try:
            await self._look()
        except DelaydError as error:
            # Without meta, the servers that are known go on.
            log.debug("route_unknown subject=%s code=%s", self._settings.subject, error.code)

    async def _look(self) -> None:
        """Ask meta where the subject is, and where the servers of before are."""
        async with self._routing:
            asked_us = monotonic_us()
            address = await self._meta.route(self._settings.subject)
            if self._servers.keys() - {address.log_id}:
                await self._meet(set())
            server = self._met(address)
            if self._routed is None:
                self._routed = server
            elif server is not self._routed and not (self._incarnations and self._incarnations.hold_any):
                self._follow(self._routed, server)
            self._confirmed_us = asked_us

    def _follow(self, old: _OneServer, new: _OneServer) -> None:
        log.info("consumer_follows subject=%s address=%s", self._settings.subject, new.link.address)
        if self._began:
            # Since meta was asked before, messages may have gone to the new server already.
            self._since_ms = old.link.clock.likely_ms(self._confirmed_us)
            self._begin_from(self._since_ms)
        self._routed, self._began = new, False
        if self._asked is not new:
            self._lane.withdraw()

    async def _meet(self, log_ids: set[int]) -> None:
        for log_id, address in (await self._meta.find_realtime_servers()).items():
            if log_id in log_ids or log_id in self._servers:
                self._met(address)

    def _met(self, address: ServerAddress) -> _OneServer:
        """The server with its newest address."""
        server = self._servers.get(address.log_id)
        if server is None:
            server = self._servers[address.log_id] = _OneServer(address, self._settings.exclusive)
            names: Head = {**self._names, "log_id": address.log_id}
            namings = (OneSubject(names), OneSubject({**names, "uncounted": True}))
            way = Way(partial(self._standing, server), partial(self._connect, server))
            server.lanes = Lanes(namings, way, self._settings.timeout_ms, self._callbacks)
        server.link.move(address.endpoint)
        return server

    def _standing_to_pull(self) -> Connection | None:
        server = self._asked = self._routed
        return None if server is None else self._standing(server)

    def _standing(self, server: _OneServer) -> Connection | None:
        """The connection to a server, if there is one and this consumer is known to be present on it."""
        standing, presence = server.link.standing, self._presence
        return standing if presence is None or server is not self._routed or presence.watched is standing else None

    async def _connection_to_pull(self) -> Connection:
        connection = await self._connection()
        self._asked = self._routed
        return connection

    async def _connection(self) -> Connection:
        """The connection to the server that has the subject."""
        while True:
            if self._routed is None:
                await self._look()
            server = self._routed
            assert server is not None, "a look finds a server or raises"
            connection = await self._connect(server)
            if server is self._routed:
                return connection

    async def _connect(self, server: _OneServer) -> Connection:
        try:
            return self._present(server, await server.link.connection())
        except ServerUnavailable:
            # It may have another address now, or the subject another server.
            await self._try_to_look()
            raise


def by_place(handles: Handles) -> dict[int, Handles]:
    """Handles that carry their place, by it, and without it."""
    found: dict[int, Handles] = {}
    for *handle, place in handles:
        found.setdefault(place, []).append(handle)
    return found


async def _all(durable: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all of them, and then raise what was wrong with any."""
    errors = [error for error in await asyncio.gather(*durable, return_exceptions=True) if error is not None]
    stale = [error for error in errors if isinstance(error, StaleHandle)]
    if len(errors) > len(stale):
        raise next(error for error in errors if not isinstance(error, StaleHandle))
    if len(stale) == 1:
        raise stale[0]
    if all_stale := stale_error(row for error in stale for row in error.handles):
        raise all_stale
