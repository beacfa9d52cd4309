"""Looking: what all servers of a cluster say of themselves: which serve, what waits for an operator and which command
helps, and what is refused for now.

Invariant: whatever one server answers, or does not answer, the others are shown. What waits at a realtime server that
nobody asks, no server can know: it is found here, by comparing the groups of each realtime server with the routes of
meta.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from delayd.address import Endpoint
from delayd.client.asking import ask
from delayd.client.asking.ask import GROUPS, groups_head
from delayd.errors import DelaydError
from delayd.hours import duration_text
from delayd.machine.operating import Wait, WaitKind, counted
from delayd.net.connection import Connection
from delayd.wire.consuming import GroupInfo
from delayd.wire.frame import Head
from delayd.wire.heads import need_int, need_map, need_str, need_u64
from delayd.wire.meta import SUBJECTS_MAX, read_routes
from delayd.wire.requests import RequestType
from delayd.wire.status import read_waits

NEEDED = {"delay": WaitKind.NO_DELAY_SERVER, "realtime": WaitKind.NO_REALTIME_SERVER}
MISSING = {"delay": WaitKind.DELAY_AWAY, "realtime": WaitKind.REALTIME_AWAY}
SERVES, FENCED, HELD, AWAY, SILENT = "serves", "fenced", "held", "away", "silent"
CORDONED = "cordoned"  # It serves, and gets no new messages.
CLOCK_MS_MAX = 1_000  # A clock that differs by more from this machine's is shown; the way there and back is in it.

Named = tuple[str, Wait]  # With the name of the server that says so.


class AskedServer(NamedTuple):
    """One server, and what it answered; ``fault`` says why it did not."""

    role: str
    log_id: int
    address: str
    status: Head
    clock_ahead_ms: int | None
    waits: list[Wait]
    refuses: list[Wait]
    fault: str
    groups: Sequence[GroupInfo] = ()  # Of a realtime server.
    state: str = ""  # Of a server that registers with meta: what it may do now.
    endpoint: Endpoint | None = None  # Where a server was asked that may have groups.

    @property
    def name(self) -> str:
        """What it is called below the table."""
        return self.role if self.role == "meta" else f"{self.role} {self.log_id:016x}"

    def counter(self, name: str) -> int:
        """A figure; 0 when the server, of another version, does not tell it."""
        return self.told(name) or 0

    def told(self, name: str) -> int | None:
        """A figure; None when the server does not tell it."""
        counters = self.status.get("counters")
        value = counters.get(name) if isinstance(counters, dict) else None
        return value if isinstance(value, int) else None

    @property
    def up_ms(self) -> int:
        """How long ago a server that has answered was started."""
        return max(0, need_int(self.status, "now_ms") - need_int(self.status, "started_at_ms"))

    @property
    def clock_text(self) -> str:
        """What a person is told of its clock."""
        if self.status.get("clock_confirmed") is False:
            return "not confirmed"
        ahead_ms = self.clock_ahead_ms or 0
        if abs(ahead_ms) <= CLOCK_MS_MAX:
            return "as here"
        return f"{duration_text(abs(ahead_ms))} {'ahead' if ahead_ms > 0 else 'behind'}"

    @property
    def slowest(self) -> GroupInfo | None:
        """The group with the oldest message that is not acknowledged: it holds the log of a realtime server."""
        holders = [group for group in self.groups if group.oldest_ms_ago is not None]
        return max(holders, key=lambda group: group.oldest_ms_ago or 0, default=None)


class Look(NamedTuple):
    """What all servers say at one moment.

    Fields:
        servers: meta first.
        elsewhere: what waits at realtime servers that nobody asks for it.
    """

    servers: list[AskedServer]
    elsewhere: Sequence[Named] = ()

    @property
    def waits(self) -> list[Named]:
        """What waits for an operator."""
        return [*waits_of(self.servers), *_missing(self.servers), *self.elsewhere]

    @property
    def refuses(self) -> list[Named]:
        """What is refused for now; each of these states ends by itself."""
        return [(seen.name, wait) for seen in self.servers for wait in seen.refuses]


def waits_of(servers: Sequence[AskedServer]) -> list[Named]:
    """What servers themselves say that waits."""
    return [(seen.name, wait) for seen in servers for wait in seen.waits]


async def look(address: str, *, ages: bool = True) -> Look:
    """Ask meta, and all servers that it knows; ``ages``: also for how long groups have had their oldest message."""
    found = await ask_all(address)
    groups = await asyncio.gather(*(groups_of(seen, ages=ages) for seen in found))
    found = [seen._replace(groups=of_seen) for seen, of_seen in zip(found, groups, strict=True)]
    return Look(found, await _elsewhere(address, found))


async def look_at(servers: Sequence[ask.Known]) -> list[AskedServer]:
    """Ask servers for their STATUS, all at once."""
    return await asyncio.gather(*map(_ask, servers))


async def ask_all(address: str) -> list[AskedServer]:
    """Ask meta, and all servers that it knows, for their STATUS."""
    async with ask.meta(address) as connection:
        known = await ask.known_servers(connection)
        meta = await _read("meta", connection)
    return [meta, *await look_at(known)]


async def look_at_one(address: str) -> AskedServer:
    """Ask the server at an address, and not meta."""
    endpoint = ask.endpoint_of(address, "server")
    async with ask.connected(endpoint) as connection:
        seen = await _read("", connection)
    seen = seen._replace(role=need_str(seen.status, "role"), endpoint=endpoint)
    return seen._replace(groups=await groups_of(seen, ages=True))


async def groups_of(seen: AskedServer, *, ages: bool) -> list[GroupInfo]:
    """The groups of a realtime server; none of one that does not serve now, which is told elsewhere."""
    if seen.role != "realtime" or seen.fault or seen.endpoint is None or ask.is_held(seen.status):
        return []
    try:
        async with ask.connected(seen.endpoint) as connection:
            return await GROUPS.at(connection, groups_head(None, ages=ages))
    except DelaydError:
        return []


def silence(server: ask.Known) -> str:
    """A sentence that says why a server that is not alive is not asked."""
    return f"meta has not heard of it for {duration_text(server.seen_ms_ago)}; see `delayd servers`"


async def _elsewhere(address: str, found: list[AskedServer]) -> list[Named]:
    """Groups with messages at a realtime server that does not have their subject any more."""
    behind = [(seen, group) for seen in found for group in seen.groups if left_of(group) and not group.paused]
    subjects = sorted({group.subject for _, group in behind})
    routes: dict[str, int] = {}
    async with ask.meta(address) as connection:
        for start in range(0, len(subjects), SUBJECTS_MAX):
            asked: Head = {"subjects": [*subjects[start : start + SUBJECTS_MAX]], "assign": False}
            routes |= read_routes(await ask.ask(connection, RequestType.ROUTES, asked)).routes
    waits: list[Named] = []
    for seen, group in behind:
        to = routes.get(group.subject)
        if to is not None and to != seen.log_id:
            why = f"the subject is at realtime server {to:016x} now, so consumers that start do not ask here"
            words = {"subject": group.subject, "group": group.group, "log_id": f"{seen.log_id:016x}"}
            left = counted(left_of(group), "message|messages")
            waits.append((seen.name, WaitKind.LEFT_BEHIND.wait(why, messages=left, **words)))
    return waits


def left_of(group: GroupInfo) -> int:
    """How many messages of a group are not acknowledged."""
    return group.end - group.next + group.outstanding + group.redelivering


async def _ask(known: ask.Known) -> AskedServer:
    fault, state = silence(known), AWAY
    if known.alive:
        try:
            async with ask.reached(known) as connection:
                seen = await _read(known.role, connection)
                state = _state(seen.status, CORDONED if known.cordoned else SERVES)
                return seen._replace(state=state, endpoint=known.endpoint)
        except DelaydError as error:
            fault, state = error.message, SILENT
    elif (held := await ask.held_status(known)) is not None:
        seen = _seen(known.role, known.log_id, known.address, held, None)
        return seen._replace(state=_state(held, FENCED), endpoint=known.endpoint)
    return AskedServer(known.role, known.log_id, known.address, {}, None, [], [], fault, state=state)


def _state(status: Head, otherwise: str) -> str:
    return HELD if ask.is_held(status) else FENCED if ask.is_fenced(status) else otherwise


async def _read(role: str, connection: Connection) -> AskedServer:
    before_ns = time.time_ns()
    answer = await ask.ask(connection, RequestType.STATUS, {})
    halfway_ms = (before_ns + time.time_ns()) // 2_000_000
    ahead_ms = need_int(answer, "now_ms") - halfway_ms
    return _seen(role, need_u64(answer, "log_id"), connection.peer, answer, ahead_ms)


def _seen(role: str, log_id: int, address: str, answer: Head, ahead_ms: int | None) -> AskedServer:
    need_map(answer, "counters")
    need_int(answer, "now_ms")
    waits, refuses = read_waits(answer, "waits"), read_waits(answer, "refuses")
    need_int(answer, "started_at_ms")
    need_str(answer, "role")
    return AskedServer(role, log_id, address, answer, ahead_ms, waits, refuses, "")


def _missing(found: list[AskedServer]) -> list[Named]:
    """Servers that do not serve, as something that waits for whoever can start them."""
    missing = [
        (seen.name, MISSING[seen.role].wait(seen.fault, log_id=f"{seen.log_id:016x}")) for seen in found if seen.fault
    ]
    for role, kind in NEEDED.items():
        if not any(seen.role == role for seen in found):
            missing.append(
                (
                    role,
                    kind.wait(f"meta knows no {role} server; one that runs says in its log why", meta=found[0].address),
                )
            )
    return missing
