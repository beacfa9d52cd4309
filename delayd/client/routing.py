"""Routing: which servers there are, and the connection to each.

Retry: how long to wait before the next try.

Invariant: waits grow up to a bound and are random, so that clients do not all come back at the same moment.

Link: the connection to one server, which is opened when it is needed, and opened again after it ended.

Invariant: a connection is handed out only after the server behind it has said which log it holds, so a batch that went
to one log is never repeated to another at the same address (rule I3). A meta server says which cluster it is of, and a
client that has met one cluster speaks to no other.

Meta view: the servers as meta's last answers named them.

Invariant: while meta is away the client goes on with the answers that it has; only a question without an answer waits.

Groups: the delay servers that a producer may send to, and which of them gets the next batch.

Invariant: a batch is bound to one server group, and is unbound only while none of its bytes may have left (rule I3).

With several servers, a batch goes to one whose connection stands. Connections to the others are made in the background,
again and again while batches are sent, so nobody waits for a server that is away, and one that is back is used at once.
Of the servers that can be reached, these are left out as long as another one is left:

1. One that refused a batch by name: its disk is full, it is fenced, starting, stopping. It gets a batch again after a
   while that grows from 25 ms to 2 s; a refused batch moves on at once, so such a try costs one round trip.
2. One that an operator has cordoned, as meta tells.
3. One that has answered nothing for SILENT_S since it was asked: it hangs. An answer, also to a PING, ends that.
4. One that meta calls dead. While it can be reached all the same, meta is asked again every DOUBT_S.

An example with servers A and B. A's disk fills up: it refuses batch 7, which goes to B in the same turn of the loop, as
do batches 8 to 20. Batch 21 goes to A again after 25 ms, is refused, and moves to B. When the disk of A has space
again, A gets a batch at most 2 s later and takes it, and from then on every second one.

Key owners: which delay server judges which keys, as meta said last (docs/keys.md, Owners; rule I4).

Invariant: with one delay server nobody asks: it owns all keys that are used. An owner that was found is a server that
meta knows, and after a try that did not reach it meta is asked again: an operator may have given its keys to another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.address import Endpoint
from delayd.batch.content import Names, slots_of_names
from delayd.client.instants import clock_of, monotonic_us
from delayd.client.limits import need_address
from delayd.errors import (
    AlreadyClosed,
    BadArgument,
    BadRequest,
    BadSetting,
    BadToken,
    ConnectionLost,
    DelaydError,
    NoDelayServer,
    NoRealtimeServer,
    NotAllowed,
    NotOwner,
    OwnerUnknown,
    RequestFailed,
    RequestTimedOut,
    ServerUnavailable,
    UnknownRequest,
    UnknownServer,
)
from delayd.net.connection import Connection
from delayd.net.entry import connect
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import need_instant, need_u64
from delayd.wire.meta import (
    OWNER_UNKNOWN,
    SUBJECTS_MAX,
    ServerInfo,
    SlotOwners,
    SlotSet,
    read_routes,
    read_servers,
    read_slot_owners,
    slot_set,
    slots_bytes,
)
from delayd.wire.requests import RequestType

FIRST_MS = 25.0  # A server that restarts is back within a second; one that drops a connection, at once.
LAST_MS = 2_000.0  # A longer wait would make all users miss a service that is back, for that long.
GROWTH = 2.0


class RetryWaits:
    """Counts the failures in a row."""

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def next_ms(self) -> float:
        """Note another failure; return the wait before the next try."""
        wait_ms = min(LAST_MS, FIRST_MS * GROWTH ** min(self._failures, 16))
        self._failures += 1
        return wait_ms * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Note that it worked."""
        self._failures = 0


def spread_ms(retry_after_ms: int) -> float:
    """A wait that a server asked for, lengthened a little and unequally."""
    return max(retry_after_ms, 1) * random.uniform(1.0, 1.25)


GREETING_MS_MAX = 5_000.0  # A server that accepts connections but answers nothing counts as away.
ALIVE_EVERY_MS = 5_000.0  # This also keeps the sample of the server's clock fresh.
ALIVE_MS_MAX = 10_000.0  # Longer than any server's loop may stall; after it the connection counts as dead.

log = logging.getLogger(__name__)


class ServerLink:
    """One server; belongs to a loop, and any number of tasks may ask for its connection at once."""

    def __init__(self, endpoint: Endpoint, log_id: int | None = None, silence_ms: float = math.inf) -> None:
        """The server counts a connection as gone that says nothing for ``silence_ms``."""
        self.log_id = log_id
        self.cluster_id = 0  # The first one that the server named; 0 while it has named none.
        self.clock = clock_of(endpoint.host).server_clock(str(endpoint))
        self.failing = False  # The last try to connect failed.
        self.failure: ServerUnavailable | None = None  # Why it did.
        self.left_ms = 0  # The server's clock when it was heard last on the connection before.
        self._heard_ms = 0  # The same on this one.
        self.heard_at = 0.0  # When the server last answered anything, on the loop's clock.
        self._endpoint = endpoint
        self._silence_ms = silence_ms
        self._connection: Connection | None = None
        self._attempt: asyncio.Task[Connection] | None = None
        self._alive: asyncio.Task[None] | None = None
        self._backoff = RetryWaits()
        self._not_before = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> str:
        """The address as users write it."""
        return str(self._endpoint)

    @property
    def standing(self) -> Connection | None:
        """The connection, if there is one now."""
        connection = self._connection
        return connection if connection is not None and connection.is_open else None

    @property
    def connecting(self) -> bool:
        """Whether a try to connect is under way."""
        return self._attempt is not None

    def move(self, endpoint: Endpoint) -> None:
        """Use a new address of the server; requests under way stay on their connection."""
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._backoff.reset()
            self._not_before = 0.0
            if self._connection is not None:
                self._connection.close()

    async def connection(self) -> Connection:
        """The connection, made if need be, after the back-off of earlier failures.

        Raises:
            ServerUnavailable: this try failed; nothing was sent.
        """
        standing = self.standing
        if standing is not None:
            return standing
        # If one caller gives up, the try must go on for the others.
        return await asyncio.shield(self.knock())

    def knock(self) -> asyncio.Task[Connection]:
        """The try to connect that is under way; one begins if there is none. Only while no connection stands."""
        if self._attempt is None:
            self._attempt = self._loop.create_task(self._connect())
            self._attempt.add_done_callback(self._attempted)
        return self._attempt

    def hear(self, asked_us: int, head: Head) -> None:
        """Take the clock of an answer; ``asked_us``: when its request left."""
        self.heard_at = self._loop.time()
        self.clock.hear(asked_us, monotonic_us(), head)
        self._heard_ms = need_instant(head, "now_ms") if "now_ms" in head else self._heard_ms

    def heard(self) -> None:
        """Note that the server has answered, whatever it said."""
        self.heard_at = self._loop.time()

    async def disconnect(self) -> None:
        """End the connection, so that the server forgets the requests on it; the next use opens another."""
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed

    async def close(self) -> None:
        """Let written frames leave, and end the connection for good."""
        for task in (self._alive, self._attempt):
            if task is not None:
                task.cancel()
        await self.disconnect()

    async def _connect(self) -> Connection:
        wait_s = self._not_before - self._loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        try:
            connection = await connect(self._endpoint)
            self.left_ms = self._heard_ms
            try:
                await self._greet(connection)
            except BaseException:
                connection.abort()
                raise
        except ServerUnavailable:
            self._failed()
            raise
        except RequestTimedOut as error:
            self._failed()
            # Only the greeting was asked, so no request can have been served.
            raise ServerUnavailable(f"{self.address} takes connections and answers nothing: it hangs") from error
        except (AlreadyClosed, BadToken, BadArgument, BadSetting, NotAllowed):
            # The home of this client is in this process, and was closed: it never comes back. Or this client is not let
            # in: another try would change nothing, and somebody should hear of it at once.
            self._failed()
            raise
        except DelaydError as error:
            self._failed()
            raise ServerUnavailable(f"{self.address} takes no requests: {error.message}") from error
        self.failing = False
        self._backoff.reset()
        self._connection = connection
        if self._alive is not None:
            self._alive.cancel()
        self._alive = self._loop.create_task(self._keep_alive(connection))
        return connection

    async def _greet(self, connection: Connection) -> None:
        asked_us = monotonic_us()
        answer = await connection.request(RequestType.STATUS, {}, timeout_ms=GREETING_MS_MAX)
        self.hear(asked_us, answer.head)
        cluster_id = need_u64(answer.head, "cluster_id") if "cluster_id" in answer.head else 0
        if self.cluster_id and cluster_id and cluster_id != self.cluster_id:
            raise ServerUnavailable(
                f"{self.address} belongs to another cluster now: {cluster_id:016x} instead of {self.cluster_id:016x}"
            )
        self.cluster_id = self.cluster_id or cluster_id
        if self.log_id is None:
            return
        log_id = need_u64(answer.head, "log_id")
        if log_id != self.log_id:
            raise ServerUnavailable(
                f"{self.address} is another server now: its log is {log_id:016x} instead of {self.log_id:016x}"
            )

    def _failed(self) -> None:
        if not self.failing:
            log.warning("server_unavailable address=%s", self.address)
        self.failing = True
        self._not_before = self._loop.time() + self._backoff.next_ms() / 1000

    def _attempted(self, attempt: asyncio.Task[Connection]) -> None:
        self._attempt = None
        if not attempt.cancelled():
            # The caller may have given up; an exception that nobody fetches would be logged as a bug.
            error = attempt.exception()
            self.failure = error if isinstance(error, ServerUnavailable) else None

    async def _keep_alive(self, connection: Connection) -> None:
        # If a server hangs, or a network drops everything, the connection stays open; so PINGs find that out.
        # The server hears them also while nothing else is asked: of three in its time, two may be late.
        every_ms = min(ALIVE_EVERY_MS, self._silence_ms / 3)
        while connection.is_open:
            await asyncio.sleep(every_ms / 1000)
            asked_us = monotonic_us()
            try:
                answer = await connection.request(RequestType.PING, {}, timeout_ms=ALIVE_MS_MAX)
                self.hear(asked_us, answer.head)
            except DelaydError as error:
                if connection.is_open:
                    log.warning("server_silent address=%s code=%s", self.address, error.code)
                    connection.abort()


def unreadable(connection: Connection, error: DelaydError) -> ConnectionLost:
    """The error for an answer that can't be read: nobody knows what it says, and the connection is ended.

    It must not be treated as a refusal, because the request may have been served (rule I3).
    """
    connection.abort()
    why = f"{connection.peer} gave an answer that can't be read ({error.message})"
    return ConnectionLost(f"{why}; the request may have been served", sent=True)


REFRESH_MS = 5_000.0  # After this long a server that joins gets its share of the work.
ANSWER_MS_MAX = 5_000.0  # Meta answers from memory; a route costs it one commit.


class ServerAddress(NamedTuple):
    """One server as meta knows it."""

    log_id: int
    endpoint: Endpoint
    alive: bool
    cordoned: bool = False


class MetaView:
    """Asks meta for servers and routes; keeps the last answer."""

    def __init__(self, address: str) -> None:
        endpoint = need_address(address)
        self._access = endpoint.access
        self.link = ServerLink(endpoint)
        self.clock = clock_of(endpoint.host)
        self.delay_servers: dict[int, ServerAddress] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_now = asyncio.Event()

    async def find_delay_servers(self) -> dict[int, ServerAddress]:
        """Ask for the delay servers and keep the answer; an empty answer does not replace the last one.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.SERVERS, {"role": "delay"})
        found = [_address(info) for info in read_servers(answer.head, self._access)]
        self.delay_servers = {server.log_id: server for server in found} or self.delay_servers
        return self.delay_servers

    async def route(self, subject: str) -> ServerAddress:
        """The realtime server of a subject, which gets one now if it has none.

        Raises:
            NoRealtimeServer: none is alive that could get it.
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.ROUTES, {"subjects": [subject], "assign": True})
        found = read_routes(answer.head, self._access)
        if subject not in found.routes:
            raise NoRealtimeServer(f"no live realtime server serves {subject}; start one, it is found by itself")
        log_id = found.routes[subject]
        for info in found.servers:
            if info.server.log_id == log_id:
                return _address(info)
        raise NoRealtimeServer(f"{subject} is served by {log_id:016x}, which has not registered with this meta yet")

    async def find_realtime_servers(self) -> dict[int, ServerAddress]:
        """Ask for the realtime servers.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.SERVERS, {"role": "realtime"})
        return {info.server.log_id: _address(info) for info in read_servers(answer.head, self._access)}

    async def routes(self, subjects: Sequence[str]) -> dict[str, int]:
        """The realtime server of each subject, by log_id; one that can't have any now is left out.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        found: dict[str, int] = {}
        for start in range(0, len(subjects), SUBJECTS_MAX):
            part: Head = {"subjects": [*subjects[start : start + SUBJECTS_MAX]], "assign": True}
            found |= read_routes((await self._ask(RequestType.ROUTES, part)).head).routes
        return found

    async def slot_owners(self, wanted: SlotSet) -> SlotOwners:
        """Who owns the slots of keys; wanted ones that nobody owns get an owner, if a delay server is alive.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.SLOTS, {"wanted": slots_bytes(wanted)})
        try:
            return read_slot_owners(answer.head)
        except BadRequest as error:
            raise unreadable(await self.link.connection(), error) from error

    def keep_fresh(self) -> None:
        """Ask again every few seconds from now on, until `close`."""
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    def refresh_soon(self) -> None:
        """Ask now, because something has happened that meta may know of."""
        self._refresh_now.set()

    async def close(self) -> None:
        """Ask no more."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self.link.close()

    async def _ask(self, request: RequestType, head: Head) -> Frame:
        connection = await self.link.connection()
        try:
            return await connection.request(request, head, timeout_ms=ANSWER_MS_MAX)
        except UnknownRequest as error:
            # To give another server's port is an easy slip, because the three ports follow one another.
            raise UnknownRequest(f"{self.link.address} is no meta server; give the address of one") from error

    async def _refresh(self) -> None:
        backoff = RetryWaits()
        away = False
        while True:
            try:
                await self.find_delay_servers()
                away = False
                backoff.reset()
                wait_ms = REFRESH_MS * random.uniform(0.8, 1.2)
            except DelaydError as error:
                if not away:
                    log.warning("meta_unavailable address=%s code=%s", self.link.address, error.code)
                away = True
                wait_ms = backoff.next_ms()
            # Even if news is wanted all the time, meta is asked at most at the pace of the back-off.
            await asyncio.sleep(min(wait_ms, 100.0) / 1000)
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._refresh_now.wait()
            except TimeoutError:
                pass
            self._refresh_now.clear()


def _address(info: ServerInfo) -> ServerAddress:
    server = info.server
    return ServerAddress(server.log_id, server.endpoint, info.alive, info.cordoned)


DOUBT_S = 1.0  # Meta hears of a server that is back within a heartbeat; asking more often finds nothing new.
SILENT_S = 1.0  # Far above a slow fsync; what is under way at a server that hangs may not move, so little should be.


class DelayGroup:
    """One delay server group, named by its log."""

    __slots__ = ("_asked_at", "_backoff", "_left_out_until", "alive", "cordoned", "in_flight", "link", "log_id")

    def __init__(self, server: ServerAddress) -> None:
        self.log_id = server.log_id
        self.link = ServerLink(server.endpoint, server.log_id)
        self.alive = server.alive
        self.cordoned = server.cordoned  # It takes no new messages; keys that it owns are still its own.
        self.in_flight = 0
        self._asked_at = 0.0  # When it was first asked for something since it last answered.
        self._left_out_until = 0.0
        self._backoff = RetryWaits()

    def asked(self, now: float) -> None:
        """A batch leaves to it."""
        if self._asked_at <= self.link.heard_at:
            self._asked_at = now

    def refused(self, now: float) -> None:
        """It refused a batch by name, for a reason of its own."""
        # Batches that were under way together are refused together, and count once.
        if now >= self._left_out_until:
            self._left_out_until = now + self._backoff.next_ms() / 1000

    def accepted(self) -> None:
        """It took a batch."""
        if self._left_out_until:
            self._left_out_until = 0.0
            self._backoff.reset()

    def is_left_out(self, now: float) -> bool:
        """Whether batches had better go elsewhere."""
        silent = self._asked_at > self.link.heard_at and now - self._asked_at > SILENT_S
        return self.cordoned or silent or now < self._left_out_until


class Groups:
    """All groups that meta has named so far; batches go to them in turn."""

    def __init__(self, meta: MetaView) -> None:
        self._meta = meta
        self._groups: dict[int, DelayGroup] = {}
        self._turn = 0
        self._doubt_again_at = 0.0
        self._heard: dict[int, ServerAddress] = {}
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._groups)

    def known(self, log_id: int) -> DelayGroup | None:
        """The group that holds a log, if meta has named it."""
        self._take_news()
        return self._groups.get(log_id)

    @property
    def only(self) -> int | None:
        """The log of the only group that is known; None when there are several, or none."""
        self._take_news()
        return next(iter(self._groups)) if len(self._groups) == 1 else None

    def choose(self, refusers: Collection[int] = (), roomy: int = 0) -> DelayGroup | None:
        """Choose a group for a batch: the only one; of several one that can be reached and takes batches as far as is
        known, with the fewest batches under way; equal ones in turn.

        ``refusers``: the logs of groups that have refused this batch for its own sake; they come last. ``roomy``: the
        log of one that has room for all of it, as it has just said; 0 if none has said so.

        None while no group is known, and while none of several can be reached.
        """
        self._take_news()
        groups = list(self._groups.values())
        if len(groups) < 2:
            return groups[0] if groups else None
        self._turn = (self._turn + 1) % len(groups)
        standing: list[DelayGroup] = []
        for group in groups[self._turn :] + groups[: self._turn]:
            if group.link.standing is not None:
                standing.append(group)
            elif group.log_id in self._heard and not group.link.connecting:
                group.link.knock().add_done_callback(self._knocked)
        now = self._loop.time()
        if now >= self._doubt_again_at and any(not group.alive and not group.is_left_out(now) for group in standing):
            # It answers, so it is back, and meta may know by now.
            self._doubt_again_at = now + DOUBT_S
            self._meta.refresh_soon()
        # If meta calls all of them dead it may only have lost contact; the servers themselves know better.
        return min(
            standing,
            key=lambda group: (
                group.log_id in refusers,
                group.is_left_out(now),
                not group.alive,
                group.log_id != roomy,
                group.in_flight,
            ),
            default=None,
        )

    def another_takes(self, refusers: Collection[int] = ()) -> bool:
        """Whether a group that can be reached is neither left out nor one of the refusers."""
        now = self._loop.time()
        return any(
            group.link.standing is not None and group.log_id not in refusers and not group.is_left_out(now)
            for group in self._groups.values()
        )

    def another_may_come(self, refusers: Collection[int]) -> bool:
        """Whether a group that is no refuser is just being connected to for the first time."""
        return any(
            group.link.standing is None and not group.link.failing and group.log_id not in refusers
            for group in self._groups.values()
        )

    async def find(self) -> DelayGroup:
        """As `choose`, after meta was asked if it has not named any, and after the first one was reached.

        Raises:
            NoDelayServer: meta knows none.
            ServerUnavailable: there are several, and none can be reached.
            DelaydError: meta can't be reached or refuses.
        """
        if self.choose() is None and not self._groups:
            await self._ask()
        group = self.choose()
        if group is None and self._groups:
            group = await self._reach()
        if group is None:
            raise NoDelayServer("meta knows no delay server; start one, it is found by itself")
        return group

    async def all(self, until: float) -> list[int]:
        """The log of each group, after meta was asked.

        Raises:
            NoDelayServer: meta knows none.
            DelaydError: meta can't be reached or refuses, or has not answered when it is ``until`` on the loop's clock.
        """
        try:
            async with asyncio.timeout_at(until):
                await self._ask()
        except TimeoutError:
            raise self.unreached(None) from None
        self._take_news()
        if not self._groups:
            raise NoDelayServer("meta knows no delay server; start one, it is found by itself")
        return sorted(self._groups)

    async def reached(self, log_id: int, until: float) -> tuple[DelayGroup, Connection]:
        """The group that holds a log, and the connection to it.

        Raises:
            UnknownServer: meta does not know it either.
            DelaydError: it, or meta, can't be reached, or could not until this instant of the loop's clock.
        """
        group: DelayGroup | None = None
        try:
            async with asyncio.timeout_at(until):
                group = await self._named(log_id)
                return group, await group.link.connection()
        except TimeoutError:
            raise self.unreached(group) from None

    def unreached(self, group: DelayGroup | None) -> ServerUnavailable:
        """The error of a caller whose time is over before this group was reached; None: before meta was."""
        who, link = ("meta", self._meta.link) if group is None else ("the delay server", group.link)
        return link.failure or ServerUnavailable(f"{who} at {link.address} gave no answer in time; nothing was sent")

    async def _named(self, log_id: int) -> DelayGroup:
        self._meta.keep_fresh()
        self._take_news()
        if log_id not in self._groups:
            await self._meta.find_delay_servers()
            self._take_news()
        if log_id not in self._groups:
            raise UnknownServer(f"no delay server with the log {log_id:016x} is known to meta")
        group = self._groups[log_id]
        if group.link.failing:
            # It may have started again at another address.
            self._meta.refresh_soon()
        return group

    async def close(self) -> None:
        """End all connections."""
        await asyncio.gather(*(group.link.close() for group in self._groups.values()))

    async def _ask(self) -> None:
        self._meta.keep_fresh()
        await self._meta.find_delay_servers()

    async def _reach(self) -> DelayGroup | None:
        """As `choose`, when one of several groups was reached; ServerUnavailable when none of them can be."""
        tries = {self._loop.create_task(group.link.connection()) for group in self._groups.values()}
        for each in tries:
            each.add_done_callback(self._knocked)
        failure: DelaydError | None = None
        try:
            while tries:
                done, tries = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
                if (group := self.choose()) is not None:
                    return group
                errors = [each.exception() for each in done if not each.cancelled()]
                failure = next((error for error in errors if isinstance(error, DelaydError)), failure)
        finally:
            # The tries of the links themselves go on.
            for each in tries:
                each.cancel()
        if failure is not None:
            raise failure
        return None

    def _knocked(self, attempt: asyncio.Task[Connection]) -> None:
        """Take the end of a try in the background: meta may know where the server is now, or that it is back."""
        if not attempt.cancelled():
            attempt.exception()
            self._meta.refresh_soon()

    def _take_news(self) -> None:
        if self._meta.delay_servers is self._heard:
            return
        self._heard = self._meta.delay_servers
        for server in self._meta.delay_servers.values():
            group = self._groups.get(server.log_id)
            if group is None:
                self._groups[server.log_id] = DelayGroup(server)
            else:
                group.alive, group.cordoned = server.alive, server.cordoned
                group.link.move(server.endpoint)


LogIds = NDArray[np.uint64]

OWNER_LOST = (NotOwner, ServerUnavailable, RequestFailed)
"""After these errors the keys may have another owner."""


class KeyOwners:
    """Used by one producer, on one loop."""

    def __init__(self, meta: MetaView, groups: Groups) -> None:
        self._meta = meta
        self._groups = groups
        self._owners: SlotOwners | None = None

    def known(self, subjects: Sequence[bytes], keys: Sequence[bytes]) -> LogIds | None:
        """The log of the owner of each key; None when meta must be asked first."""
        only = self._groups.only
        if only is not None:
            return np.full(len(keys), only, np.uint64)
        if self._owners is None:
            return None
        log_ids = self._owners.log_ids.take(slots_of_names(Names.of_lists(subjects, keys)))
        return None if any(self._groups.known(log_id) is None for log_id in np.unique(log_ids).tolist()) else log_ids

    async def find(self, subjects: Sequence[bytes], keys: Sequence[bytes]) -> LogIds:
        """As `known`, after meta was asked where that is needed.

        Raises:
            NoDelayServer: no delay server is alive that could own a key.
            OwnerUnknown: meta began anew, and gives the keys to nobody before it knows their owner.
            ServerUnavailable: meta does not know the owner of a key.
            DelaydError: meta can't be reached or refuses.
        """
        if not len(self._groups):
            await self._groups.find()
        found = self.known(subjects, keys)
        if found is not None:
            return found
        slots = slots_of_names(Names.of_lists(subjects, keys))
        self._owners = await self._meta.slot_owners(slot_set(slots))
        log_ids = self._owners.log_ids.take(slots)
        if self._owners.withheld.take(slots).any():
            raise OwnerUnknown(OWNER_UNKNOWN)
        if not log_ids.all():
            raise NoDelayServer("no delay server is alive that could own these keys")
        for log_id in np.unique(log_ids).tolist():
            await self._need_known(log_id)
        return log_ids

    def heard(self, error: DelaydError) -> None:
        """Hear how a try with a key failed; after some errors meta is asked for the owner again."""
        if isinstance(error, OWNER_LOST):
            self._owners = None
            self._meta.refresh_soon()

    async def _need_known(self, log_id: int) -> None:
        if self._groups.known(log_id) is None:
            await self._meta.find_delay_servers()
        if self._groups.known(log_id) is None:
            what = f"the delay server {log_id:016x} owns these keys, and meta does not know it"
            raise ServerUnavailable(f"{what}; start it, or move its slots with `delayd slots`")
