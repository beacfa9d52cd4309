"""Ask: one question to one server that meta knows, to all of a role, and page by page; for operators, not for traffic.

A question whose answer is a list is declared as data (`Listed`): which servers it goes to, the request, how a page is
read, and behind what the next page begins. `at_each` asks all servers at once, and joins what they have:

    list_quotas("a:7400")      meta names the delay servers A, B, C
      A: page of 500, page of 20     520 quotas
      B: page of 3                     3 quotas       Listing of 523, and one sentence about C in ``missing``
      C: can't be reached

Invariant: every wait has a limit, and a server that is not there is named with its address; a listing without it never
looks complete. Within `in_time` all waits together have one limit, which is that of a caller's call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Generic, NamedTuple, TypeVar

from delayd.address import Endpoint, completed
from delayd.batch.names import retry_subject
from delayd.config import parse_address
from delayd.errors import (
    BadArgument,
    DelaydError,
    NoDelayServer,
    NotEncrypted,
    RequestFailed,
    RequestTimedOut,
    ServerUnavailable,
    SlowDown,
    UnknownRequest,
)
from delayd.net import trust
from delayd.net.connection import Connection
from delayd.net.entry import connect
from delayd.secret import Secret
from delayd.wire.consuming import GroupInfo, Position, position_value, read_groups, read_subjects
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_int, need_u64
from delayd.wire.meta import ServerInfo, read_servers, read_subject_page
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import DueHour, QuotaInfo, read_due_hours, read_quotas

CONNECT_MS = 3_000  # Enough for any network on which a person would wait.
BUSY_S = 10.0  # How long to repeat a request that a server is too busy for.
HELD_S = 2.0  # How long to ask a server that meta has not heard of: a damaged file may hold it.
ANSWER_MS = 10_000  # A server that replays after a crash answers later than usual.

_UNTIL: ContextVar[float | None] = ContextVar("until", default=None)  # When the time of a call is over, on its loop.


PAGE = 1_000  # Groups asked for at once: an answer takes a few milliseconds of the server.
AGED_PAGE = 100  # The same with the age of their oldest message.


class Known(NamedTuple):
    """A server that meta knows."""

    role: str
    log_id: int
    endpoint: Endpoint  # Where it listens.
    epoch: int
    pid: int
    alive: bool
    seen_ms_ago: int
    cordoned: bool = False

    @property
    def address(self) -> str:
        """As ``host:port``."""
        return str(self.endpoint)


@contextmanager
def in_time(limit_s: float) -> Iterator[None]:
    """Whatever is asked in the block, of however many servers, is given up when so much time is over."""
    token = _UNTIL.set(asyncio.get_running_loop().time() + limit_s)
    try:
        yield
    finally:
        _UNTIL.reset(token)


@asynccontextmanager
async def connected(endpoint: Endpoint, what: str = "server") -> AsyncIterator[Connection]:
    """Connect for the length of the block.

    Raises:
        ServerUnavailable: it can't be connected to.
        RequestTimedOut: the time of `in_time` is over.
    """
    try:
        async with asyncio.timeout_at(_UNTIL.get()), _connected(endpoint, what) as connection:
            yield connection
    except TimeoutError:
        late = f"the {what} at {endpoint} gave no answer in time; look at its log, and try again"
        raise RequestTimedOut(late, sent=True) from None


@asynccontextmanager
async def _connected(endpoint: Endpoint, what: str) -> AsyncIterator[Connection]:
    try:
        connection = await connect(endpoint, timeout_ms=CONNECT_MS)
    except NotEncrypted:
        raise  # It says what is wrong, and the server is there.
    except ServerUnavailable as error:
        raise ServerUnavailable(
            f"no {what} answers at {endpoint}; start it with `delayd up`, or give its address with --meta"
            if what == "meta server"
            else f"the {what} at {endpoint} can't be reached; see `delayd servers`",
            retry_after_ms=error.retry_after_ms,
        ) from error
    try:
        yield connection
    finally:
        connection.close()
        await connection.closed


@asynccontextmanager
async def reached(server: Known) -> AsyncIterator[Connection]:
    """Connect to a server that meta knows. Raises ServerUnavailable when it is away, or another one has its address."""
    async with connected(server.endpoint, f"{server.role} server") as connection:
        status = await ask(connection, RequestType.STATUS, {})
        log_id = need_u64(status, "log_id")
        # A server that can't read its files may not know its own log_id.
        if log_id != server.log_id and not (is_held(status) and log_id == 0):
            raise ServerUnavailable(
                f"{server.address} is another server now: its log is {log_id:016x} instead of {server.log_id:016x}"
            )
        yield connection


async def ask(connection: Connection, request: RequestType, head: Mapping[str, HeadValue]) -> Head:
    """Ask one thing; returns the head of the answer."""
    with _naming(connection):
        return (await connection.request(request, head, timeout_ms=ANSWER_MS)).head


async def patiently(connection: Connection, request: RequestType, head: Mapping[str, HeadValue]) -> Head:
    """Ask, and ask again while the server is busy."""
    loop = asyncio.get_running_loop()
    until = loop.time() + BUSY_S
    while True:
        try:
            return await ask(connection, request, head)
        except SlowDown as error:
            if loop.time() >= until:
                raise
            await asyncio.sleep(max(0.02, (error.retry_after_ms or 0) / 1000))


async def prove(connection: Connection, secret: Secret | None) -> None:
    """Prove the cluster's secret; an operator without it has a token that allows to administer.

    Raises:
        NotTrusted: the other side has another secret.
    """
    if secret is None:
        return
    with _naming(connection):
        await trust.prove(connection, secret, 0, ANSWER_MS)


@contextmanager
def _naming(connection: Connection) -> Iterator[None]:
    """Let an error say which server gave no answer."""
    try:
        yield
    except RequestFailed as error:
        what = f"{connection.peer} gave no answer ({error.message}); look at that server's log, and try again"
        raise type(error)(what, sent=error.sent) from error


async def decide(server: Known, request: RequestType, head: Mapping[str, HeadValue], secret: Secret | None) -> Head:
    """Ask what only an operator may ask; returns the head of the answer."""
    async with reached(server) as connection:
        await prove(connection, secret)
        return await ask(connection, request, head)


def endpoint_of(address: str, setting: str = "meta") -> Endpoint:
    """Where a client connects to for an address, and how it is let in there. BadSetting names ``setting``."""
    return parse_address(completed(address), setting)


def as_operator(address: str, secret: Secret | None) -> str:
    """An address by which every connection proves the cluster's secret, so that it needs no token."""
    found = endpoint_of(address)
    path = "" if secret is None else secret.path
    return found._replace(access=found.access._replace(secret=path)).url


@asynccontextmanager
async def meta(address: str) -> AsyncIterator[Connection]:
    """Connect to the meta server at an address."""
    endpoint = endpoint_of(address)
    async with connected(endpoint, "meta server") as connection:
        try:
            yield connection
        except UnknownRequest as error:
            raise UnknownRequest(f"{endpoint} is no meta server; give the address of one with --meta") from error


async def known_servers(connection: Connection, role: str | None = None) -> list[Known]:
    """Ask meta for its servers, by role and log_id."""
    answer = await ask(connection, RequestType.SERVERS, {"role": role})
    return sorted(map(_known, read_servers(answer, connection.access)))


def is_held(status: Head) -> bool:
    """Whether what answered STATUS is a server that could not start and waits for its files (delayd.net.held_start)."""
    return status.get("held") is True


def is_fenced(status: Head) -> bool:
    """Whether what answered STATUS may not serve (rule H8)."""
    return status.get("fenced") is True


async def held_status(server: Known) -> Head | None:
    """What a held or fenced server says of itself, when meta does not call it alive. None when it does not answer."""
    try:
        async with asyncio.timeout(HELD_S), reached(server) as connection:
            answer = await ask(connection, RequestType.STATUS, {})
            return answer if is_held(answer) or is_fenced(answer) else None
    except (DelaydError, TimeoutError):
        return None


def _known(info: ServerInfo) -> Known:
    server = info.server
    where = (server.role, server.log_id, server.endpoint, server.epoch, server.pid)
    return Known(*where, info.alive, info.seen_ms_ago, info.cordoned)


T = TypeVar("T")


class Listing(list[T]):
    """A list of what the servers that answered have.

    Fields:
        missing: a sentence for each server that could not be asked; what it has is not in the list.
    """

    def __init__(self, items: Iterable[T] = (), missing: Iterable[str] = ()) -> None:
        super().__init__(items)
        self.missing = tuple(missing)


class Listed(NamedTuple, Generic[T]):
    """A question to all servers of a role, whose answers are pages of a list."""

    what: str  # It lists, as a sentence about a server says that can't be asked.
    role: str
    request: RequestType
    read: Callable[[Head], tuple[Sequence[T], bool]]  # A page, and whether there are more.
    place: Callable[[T], HeadValue]  # Behind an item the next page begins.
    first: HeadValue  # The place before all items.

    async def at(self, connection: Connection, head: Mapping[str, HeadValue]) -> list[T]:
        """All that the server at the other end has, page by page; ``head``: what is asked beside the place."""
        return [item async for page in self.pages(connection, head, self.first) for item in page]

    async def pages(
        self, connection: Connection, head: Mapping[str, HeadValue], place: HeadValue
    ) -> AsyncIterator[Sequence[T]]:
        """The same behind a place, as long as the caller wants more."""
        while True:
            page, more = self.read(await ask(connection, self.request, {**head, "after": place}))
            yield page
            # A server that has more and lists none would be asked for ever.
            if not more or not page:
                return
            place = self.place(page[-1])

    async def of(self, server: Known, head: Mapping[str, HeadValue]) -> list[T]:
        """All that one server has."""
        async with reached(server) as connection:
            return await self.at(connection, head)


ROUTES = Listed[tuple[str, int]](
    "subjects", "meta", RequestType.META_SUBJECTS, read_subject_page, lambda route: route[0], ""
)
SUBJECTS = Listed("numbers", "realtime", RequestType.SUBJECTS, read_subjects, lambda info: info.name, "")
GROUPS = Listed(
    "groups", "realtime", RequestType.GROUPS, read_groups, lambda info: [info.subject, info.group], ["", ""]
)
QUOTAS = Listed("quotas", "delay", RequestType.QUOTAS, read_quotas, lambda info: info.subject, "")
DUE_HOURS = Listed("messages", "delay", RequestType.DUE_HOURS, read_due_hours, lambda due: due.hour, 0)


async def at_each(
    servers: Iterable[Known], act: Callable[[Known], Awaitable[list[T]]], lacks: Callable[[Known], str]
) -> Listing[T]:
    """Ask, or decide, at all servers; ``lacks`` begins the sentence about one that can't be asked."""
    missing: list[str] = []

    async def at(server: Known) -> list[T]:
        try:
            return await act(server)
        except DelaydError as error:
            missing.append(f"{lacks(server)}: {error.message}")
            return []

    # All at once, so that one which hangs leaves the others their time.
    found = await asyncio.gather(*map(at, servers))
    return Listing([item for items in found for item in items], sorted(missing))


def _are_missing(listed: Listed[T]) -> Callable[[Known], str]:
    return lambda server: f"{listed.what} of {server.address} are missing"


class GroupAt(NamedTuple):
    """A consumer group at one realtime server.

    Fields:
        server: the realtime server.
        info: its numbers there, see `delayd.wire.consuming.GroupInfo`.
    """

    server: Known
    info: GroupInfo

    @property
    def subject(self) -> str:
        """The subject that it consumes."""
        return self.info.subject

    @property
    def group(self) -> str:
        """Its name."""
        return self.info.group

    @property
    def waiting(self) -> int:
        """Messages that are due and were not pulled yet."""
        return self.info.end - self.info.next

    @property
    def oldest_age(self) -> timedelta | None:
        """How long ago the oldest message was handed over that it has not acknowledged; None when there is none."""
        age_ms = self.info.oldest_ms_ago
        return None if age_ms is None else timedelta(milliseconds=age_ms)

    @property
    def kept_as(self) -> str:
        """The subject under which delay servers keep its dead letters, and what is to come to it again."""
        return retry_subject(self.server.log_id, self.info.group_id)

    @property
    def names(self) -> Head:
        """As a request names it."""
        return {"subject": self.info.subject, "group": self.info.group}


class Moved(NamedTuple):
    """What a rewind of a group does, or has done.

    Fields:
        before: the sequence of the message that the group would have been given next.
        next: the one that it is given next now.
        dropped: messages that the group held, or was to be offered again, and that are nobody's then.
    """

    before: int
    next: int
    dropped: int


async def list_groups(address: str, subject: str | None = None, *, ages: bool = True) -> Listing[GroupAt]:
    """The groups of a subject, or of all, by subject and group."""
    listed = await groups_at(await _servers_of(address, GROUPS.role), subject, ages=ages)
    return Listing(sorted(listed, key=lambda place: (place.subject, place.group)), listed.missing)


async def groups_at(servers: Iterable[Known], subject: str | None, *, ages: bool = False) -> Listing[GroupAt]:
    """The groups of some realtime servers."""

    async def act(server: Known) -> list[GroupAt]:
        if not server.alive:
            silent_s = server.seen_ms_ago // 1_000
            raise ServerUnavailable(f"meta has not heard of it for {silent_s} s; see `delayd servers`")
        return [GroupAt(server, info) for info in await GROUPS.of(server, groups_head(subject, ages=ages))]

    return await at_each(servers, act, _are_missing(GROUPS))


def groups_head(subject: str | None, *, ages: bool) -> Head:
    """What is asked of groups; their ages may cost a server some reads for each, so it is asked for fewer at once."""
    return {"subject": subject, "limit": AGED_PAGE if ages else PAGE, "ages": ages}


async def find_group(address: str, subject: str, group: str) -> Listing[GroupAt]:
    """A group at each realtime server that has it.

    Raises:
        BadArgument: no server that lives has it.
        ServerUnavailable: nobody knows, because a server can't be asked.
    """
    listed = await list_groups(address, subject)
    found = [place for place in listed if place.group == group]
    if not found and listed.missing:
        raise ServerUnavailable(f"where the group {group} of {subject} is can't be told: {'; '.join(listed.missing)}")
    if not found:
        raise BadArgument(f"no realtime server that lives has a group {group} of {subject}; see `delayd groups`")
    return Listing(found, listed.missing)


async def delete_group(place: GroupAt, secret: Secret | None) -> None:
    """Delete a group at one server."""
    await decide(place.server, RequestType.DELETE_GROUP, place.names, secret)


async def pause_group(place: GroupAt, secret: Secret | None, *, paused: bool) -> None:
    """Let nobody pull messages of a group at one server, or let them pull again."""
    await decide(place.server, RequestType.PAUSE_GROUP, {**place.names, "paused": paused}, secret)


async def move_group(place: GroupAt, secret: Secret | None, to: Position, *, dry_run: bool) -> Moved:
    """Let a group go on at another message, or only tell what that would do."""
    head = {**place.names, "to": position_value(to), "dry_run": dry_run}
    answer = await decide(place.server, RequestType.MOVE_GROUP, head, secret)
    return Moved(need_int(answer, "before"), need_int(answer, "next"), need_int(answer, "dropped"))


def one_place(places: Listing[GroupAt]) -> GroupAt:
    """The place of a group that is at one server; BadArgument when it is at several."""
    (place, *more) = places
    if more:
        where = ", ".join(each.server.address for each in (place, *more))
        what = f"{place.group} of {place.subject} is at several realtime servers, {where}"
        raise BadArgument(f"{what}; delete those that are empty")
    return place


class QuotaAt(NamedTuple):
    """A subject's quota at one delay server, and how much of it is used.

    Fields:
        server: the delay server.
        info: its numbers there, see `delayd.wire.scheduling.QuotaInfo`.
    """

    server: Known
    info: QuotaInfo

    @property
    def subject(self) -> str:
        """The subject that it is for."""
        return self.info.subject


async def list_quotas(address: str, prefix: str = "") -> Listing[QuotaAt]:
    """The quotas of subjects that begin with ``prefix``, by subject and server."""

    async def act(server: Known) -> list[QuotaAt]:
        return [QuotaAt(server, info) for info in await QUOTAS.of(server, {"prefix": prefix})]

    listed = await at_each(await _delay_servers(address), act, _are_missing(QUOTAS))
    return Listing(sorted(listed, key=lambda each: (each.subject, each.server.log_id)), listed.missing)


async def list_due_hours(address: str) -> Listing[DueHour]:
    """How many messages are pending at each delay server, by hour."""

    async def act(server: Known) -> list[DueHour]:
        return await DUE_HOURS.of(server, {})

    return await at_each(await _delay_servers(address), act, _are_missing(DUE_HOURS))


async def set_quota(
    address: str, subject: str, limits: Mapping[str, int | None], secret: Secret | None
) -> Listing[Known]:
    """Set a subject's quota as a whole at all delay servers; returns those where it is set now, by their log."""

    async def act(server: Known) -> list[Known]:
        await decide(server, RequestType.SET_QUOTA, {"subject": subject, **limits}, secret)
        return [server]

    servers = await _delay_servers(address)
    return await at_each(servers, act, lambda server: f"the quota is not set at {server.log_id:016x}")


async def _servers_of(address: str, role: str) -> list[Known]:
    async with meta(address) as connection:
        return await known_servers(connection, role)


async def _delay_servers(address: str) -> list[Known]:
    servers = await _servers_of(address, "delay")
    if not servers:
        raise NoDelayServer("meta knows no delay server; start one with `delayd up`")
    return servers
