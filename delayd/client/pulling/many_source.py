"""Many source: many subjects, over one connection to each realtime server that has some of them.

A list is asked of the servers to which meta routes its subjects, a pattern of all servers. Each server gets one
subscription and one PULL at a time, whatever the number of subjects (docs/protocol.md, Many subjects).

Invariant: a server that is away keeps nothing from the others. Only when all are away the consumer hears of it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from delayd.client.instants import monotonic_us
from delayd.client.pulling.acks import Handles, Way, Word, merge
from delayd.client.pulling.consume_options import ConsumedSubjects, ConsumerSettings
from delayd.client.pulling.pull_lane import (
    ANSWER_MS_MAX,
    Presence,
    PullLane,
    beginning_of,
    bound_of,
    pulled_in,
    terms_of,
    unfinished_in,
    wanted_in,
)
from delayd.client.pulling.source import ByLanes, Callbacks, Lanes, Reached, Source, by_place
from delayd.client.routing import MetaView, RetryWaits, ServerAddress, ServerLink, unreadable
from delayd.errors import (
    BadRequest,
    DelaydError,
    NoRealtimeServer,
    RequestFailed,
    RetryLater,
    ServerUnavailable,
)
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.heads import need_int, need_list
from delayd.wire.requests import RequestType

HANDLES_MAX = 3_000  # One request has no more: each may bring the name of its subject, at most 290 bytes.
LOOK_S = 5.0  # Between questions to meta that may bring another server.
MANY_PARTS_MAX = 1 << 16  # More than any server puts into an answer.
SETTLED_LOOK_S = 10.0  # The same for a list, whose routes are more to ask for, while none of its servers is away.

log = logging.getLogger(__name__)


Answered = Callable[["_Server", Frame | DelaydError, int], None]


class ManySource(Source["_Server"]):
    """A list of subjects or a pattern; a Source."""

    def __init__(self, meta: MetaView, settings: ConsumerSettings, callbacks: Callbacks) -> None:
        super().__init__(settings, callbacks.failures)
        self._meta = meta
        self._callbacks = callbacks
        # Those that are asked for messages. Callers on other threads look at it, so it is replaced as a whole.
        self._asked: tuple[_Server, ...] = ()
        self._wish = (1, 0, 0)  # The last start said it: most, wait_ms, ahead.
        self._unfound: DelaydError | None = None  # Why the last look for servers found none.
        self._unrouted = 0
        self._confirmed_us: int | None = None  # When meta was asked last, and answered.
        self._finding: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ended = False

    @property
    def under_way(self) -> bool:
        asked = self._asked
        if not asked:
            return self._finding is not None
        return all([server.lane.under_way for server in asked if not server.away] or [asked[0].lane.under_way])

    @property
    def is_asking(self) -> bool:
        return any(server.lane.is_asking for server in self._asked)

    @property
    def trouble(self) -> DelaydError | None:
        if not self._asked:
            return self._unfound
        return next((server.lane.trouble for server in self._asked if server.lane.trouble), None)

    @property
    def is_unfinished(self) -> bool:
        return any(server.is_unfinished for server in self._asked)

    def start(self, most: int, wait_ms: int, ahead: int) -> None:
        self._wish = (most, wait_ms, ahead)
        if self._asked:
            for server in self._asked:
                self._ask(server)
        elif self._finding is None:
            self._finding = self._loop.create_task(self._find())

    def withdraw(self) -> None:
        for server in self._asked:
            server.lane.withdraw()

    async def disconnect(self) -> None:
        await asyncio.gather(*(server.disconnect() for server in self._servers.values()))

    async def end(self) -> None:
        self._ended = True
        for task in (self._finding, self._watching):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(server.end() for server in self._servers.values()))

    # Servers.

    async def _find(self) -> None:
        """Find the servers, and ask them; as long as a PULL may be tried."""
        deadline = self._loop.time() + self._settings.timeout_ms / 1000
        backoff = RetryWaits()
        while not self._asked:
            try:
                await self._look()
            except DelaydError as error:
                self._unfound = error
                wait_s = backoff.next_ms() / 1000
                until = deadline - (self._settings.unreached_s if isinstance(error, ServerUnavailable) else 0.0)
                if not isinstance(error, RequestFailed | RetryLater) or self._loop.time() + wait_s >= until:
                    self._finding = None
                    self._callbacks.on_pulled(error, 0)
                    return
                await asyncio.sleep(wait_s)
        self._finding = None
        if self._watching is None:
            self._watching = self._loop.create_task(self._watch())
        self.start(*self._wish)

    async def _watch(self) -> None:
        """Look again and again: servers join, get another address, or get a subject of the list."""
        looked_s = self._loop.time()
        while True:
            await asyncio.sleep(LOOK_S * random.uniform(0.8, 1.2))
            settled = self._settings.subjects.pattern is None and not self._unrouted
            settled = settled and not any(server.away or server.link.failing for server in self._asked)
            if settled and self._loop.time() - looked_s < SETTLED_LOOK_S:
                continue
            looked_s = self._loop.time()
            try:
                await self._look()
            except DelaydError as error:
                # Without meta, the servers that are known go on.
                log.debug("servers_unknown subject=%s code=%s", self._settings.subject, error.code)

    async def _look(self) -> None:
        """Ask meta once.

        Raises:
            NoRealtimeServer: no server is known, nor was one before.
            DelaydError: meta can't be reached or refuses.
        """
        subjects = self._settings.subjects
        asked_us = monotonic_us()
        found = await self._meta.find_realtime_servers()
        names: dict[int, list[str]] = {log_id: [] for log_id in found}
        if subjects.pattern is None:
            routes = await self._meta.routes(subjects.names)
            for name, log_id in routes.items():
                names.setdefault(log_id, []).append(name)
            self._unrouted = len(subjects.names) - len(routes)
        # Since meta was asked before, messages may have gone to where a subject is now.
        confirmed = self._confirmed_us
        since_ms = None if confirmed is None else self._meta.link.clock.likely_ms(confirmed)
        for log_id, address in found.items():
            known = self._servers.get(log_id)
            if known is None:
                known = self._servers[log_id] = _Server(self._settings, address, self._callbacks, self._answered)
                if subjects.pattern is not None:
                    known.since_ms = since_ms
            known.link.move(address.endpoint)
            if known.add(names[log_id], since_ms):
                await known.renew()
        gone = [server for log_id, server in self._servers.items() if log_id not in found and server.away]
        self._confirmed_us = asked_us
        self._asked = tuple(server for server in self._servers.values() if server.is_asked and server not in gone)
        if not self._asked:
            raise NoRealtimeServer(f"no live realtime server serves {subjects.label}; start one, it is found by itself")
        if self.is_asking and not self._ended:
            self.start(*self._wish)

    def _ask(self, server: _Server) -> None:
        if not server.lane.under_way and not self._ended:
            most, wait_ms, ahead = self._wish
            server.lane.start(-(-most // len(self._asked)), wait_ms, ahead)

    def _answered(self, server: _Server, answer: Frame | DelaydError, asked_us: int) -> None:
        if isinstance(answer, DelaydError):
            self._failed(server, answer)
            return
        try:
            places = _places(answer.head, self._settings.subjects, server.log_id)
            pulled = pulled_in(answer, asked_us, server.link, self._settings, self._meta.clock.lease_s(), places)
            wanted = wanted_in(answer.head)
            server.is_unfinished = unfinished_in(answer.head)
        except DelaydError as error:
            self._callbacks.on_pulled(error, 0)
            return
        if server.away:
            log.info("consumer_server_back subject=%s address=%s", self._settings.subject, server.link.address)
        server.away = False
        self._callbacks.on_pulled(pulled, wanted)

    def _failed(self, server: _Server, error: DelaydError) -> None:
        if isinstance(error, RequestFailed | RetryLater):
            if not server.away:
                at = (self._settings.subject, server.link.address, error.code)
                log.warning("consumer_server_away subject=%s address=%s code=%s", *at)
            server.away = True
            if not all(each.away for each in self._asked):
                if any(each.lane.under_way for each in self._asked):
                    self._ask(server)
                return
        self._callbacks.on_pulled(error, 0)

    # Acknowledgements.

    async def _meet(self, log_ids: set[int]) -> None:
        try:
            await self._look()
        except NoRealtimeServer:
            pass

    def _by_lanes(self, handles: Handles, word: Word) -> ByLanes | None:
        if word.is_of_one:
            return super()._by_lanes(handles, word)
        at = self._settings.subjects.at
        found: dict[int, Handles] = {}
        for handle in handles:
            found.setdefault(at(handle[3]).log_id, []).append(handle)
        if not found.keys() <= self._servers.keys():
            return None
        return [(self._servers[log_id].lanes, {}, of_server) for log_id, of_server in found.items()]


class _Server(Reached):
    """One realtime server: its connection, its subscription, and what is under way there."""

    def __init__(
        self,
        settings: ConsumerSettings,
        address: ServerAddress,
        callbacks: Callbacks,
        answered: Answered,
    ) -> None:
        self.log_id = address.log_id
        self.link = ServerLink(address.endpoint, address.log_id)
        self.is_unfinished = False  # It had not looked at all messages when it answered the last PULL.
        self.away = False  # The last PULL found it away, until one is answered.
        self._subjects = settings.subjects
        self._settings = settings
        self._names: dict[str, None] = {}  # Those of a list that are routed here, or were.
        self._who: Head = {}  # The subscription, once there is one.
        self._subscribed: Connection | None = None
        # Since when messages may have come of which the next subscription is to hear: the server was heard last then.
        self.since_ms: int | None = None
        self._presence = Presence(self._connection)
        self._subscribing = asyncio.Lock()
        self.lane = PullLane(
            self._who,
            terms_of(settings),
            self._standing,
            self._connection,
            settings,
            partial(answered, self),
        )
        names: Head = {"group": settings.group, "log_id": self.log_id}
        namings = (
            _ManySubjects(names, self._who, settings.subjects),
            _ManySubjects({**names, "uncounted": True}, self._who, settings.subjects),
        )
        self.lanes = Lanes(namings, Way(self._standing, self._connection), settings.timeout_ms, callbacks)

    @property
    def is_asked(self) -> bool:
        """Whether it has subjects of this consumer; another one only takes acknowledgements."""
        return self._subjects.pattern is not None or bool(self._names)

    def add(self, names: Iterable[str], since_ms: int | None) -> bool:
        """Take subjects of the list, which may be here since then; return whether the subscription that stands lacks
        one.
        """
        before = len(self._names)
        self._names.update(dict.fromkeys(names))
        if len(self._names) == before:
            return False
        if self.since_ms is None:
            self.since_ms = since_ms
        return self._subscribed is not None

    async def renew(self) -> None:
        """Make another subscription, of all its subjects: at once for groups of its own, else with the next request."""
        await self.lane.end()
        await self.link.disconnect()

    async def end(self) -> None:
        """End the PULL under way; its messages are handed on."""
        self._presence.rest()
        if await self.lane.end():
            await self.link.disconnect()

    async def disconnect(self) -> None:
        """End the connection; the next request makes another."""
        self._presence.rest()
        await self.link.disconnect()

    def _standing(self) -> Connection | None:
        standing = self.link.standing
        return standing if standing is self._subscribed else None

    async def _connection(self) -> Connection:
        """The connection with its subscription."""
        standing = self._standing()
        if standing is not None:
            return standing
        async with self._subscribing:
            connection = await self.link.connection()
            if self._subscribed is not connection and self.is_asked:
                await self._subscribe(connection)
            return connection

    async def _subscribe(self, connection: Connection) -> None:
        pattern = self._subjects.pattern
        what: Head = {"subjects": [*self._names]} if pattern is None else {"pattern": pattern.text}
        if self._subscribed is not None and self.since_ms is None:
            self.since_ms = self.link.left_ms
        beginning = beginning_of(self._settings, since_ms=self.since_ms)
        head: Head = {"group": self._settings.group, **what, **beginning, **bound_of(self._settings)}
        answer = await connection.request(RequestType.SUBSCRIBE, head, timeout_ms=ANSWER_MS_MAX)
        try:
            self._who["subscription"] = need_int(answer.head, "subscription")
        except BadRequest as error:
            raise unreadable(connection, error) from error
        self._subscribed, self.since_ms = connection, None
        self._presence.watch(connection)
        if not self._settings.ephemeral:
            # Groups that last wait for their consumer, which comes when it pulls.
            self._presence.rest()


class _ManySubjects:
    """Handles of one group name over many subjects; a Naming. ``who`` names the subscription of the connection."""

    handles_max = HANDLES_MAX

    def __init__(
        self, names: Mapping[str, HeadValue], who: Mapping[str, HeadValue], subjects: ConsumedSubjects
    ) -> None:
        self._names = names
        self._who = who
        self._subjects = subjects

    def merged(self, handles: Handles) -> Handles:
        """See Naming."""
        return [[*handle, place] for place, of_place in by_place(handles).items() for handle in merge(of_place)]

    def head(self, handles: Handles) -> Head:
        """See Naming."""
        subjects: list[HeadValue] = []
        last, count = -1, 0
        for number, handle in enumerate([*handles, [-1]]):
            if handle[-1] != last:
                if number > count:
                    subjects.append([self._subjects.at(last).subject, number - count])
                last, count = handle[-1], number
        return {**self._names, **self._who, "subjects": subjects, "handles": [handle[:3] for handle in handles]}


def _places(head: Head, subjects: ConsumedSubjects, log_id: int) -> list[int]:
    """The place of each part of an answer."""
    places: list[int] = []
    for row in need_list(head, "subjects") if "subjects" in head else ():
        name, count = row if isinstance(row, list) and len(row) == 2 else (None, None)
        if not isinstance(name, str) or type(count) is not int or not 0 < count <= MANY_PARTS_MAX:
            raise BadRequest("subjects has rows of a name and how many parts are its own", field="subjects")
        places += [subjects.place(name, log_id)] * count
    return places
