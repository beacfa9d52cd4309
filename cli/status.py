"""``delayd status``: one screen that says whether all is well, and if not, what waits for whom and which command helps.

Invariant: whatever one server answers, or does not answer, the others are shown; and the exit code says what the last
line says. What waits at a realtime server that nobody asks, no server can know: it is found here, by comparing the
groups of each realtime server with the routes of meta.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import NamedTuple

import click

from delayd.client.asking.ask import GROUPS, groups_head
from delayd.config import parse_address
from delayd.errors import DelaydError
from delayd.machine.operating import Wait, WaitKind
from delayd.net.connection import Connection
from delayd.wire.consuming import GroupInfo
from delayd.wire.frame import Head
from delayd.wire.heads import need_int, need_map, need_str, need_u64
from delayd.wire.meta import SUBJECTS_MAX, read_routes
from delayd.wire.requests import RequestType
from delayd.wire.status import COMMAND_MAX, read_waits

from . import ask
from .exits import NOT_BALANCED, OK
from .listing import Cell, columns, printable, show, size_text
from .options import Command, meta_option
from .times import duration_text

COLUMNS = columns("role log_id address:spare serves up_ms:duration clock backlog")
CLOCK_MS_MAX = 1_000  # A clock that differs by more from this machine's is shown; the way there and back is in it.
NEEDED = {"delay": WaitKind.NO_DELAY_SERVER, "realtime": WaitKind.NO_REALTIME_SERVER}
MISSING = {"delay": WaitKind.DELAY_AWAY, "realtime": WaitKind.REALTIME_AWAY}
SERVES, FENCED, HELD, AWAY, SILENT = "serves", "fenced", "held", "away", "silent"
CORDONED = "cordoned"  # It serves, and gets no new messages.
TEXT_LENGTH = 500


class Seen(NamedTuple):
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
    def slowest(self) -> GroupInfo | None:
        """The group with the oldest message that is not acknowledged: it holds the log of a realtime server."""
        holders = [group for group in self.groups if group.oldest_ms_ago is not None]
        return max(holders, key=lambda group: group.oldest_ms_ago or 0, default=None)


@click.command(cls=Command)
@meta_option
@click.option("--server", metavar="HOST:PORT", help="Ask this one server only, and not meta, which may be away.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A screen for people; JSON with one object for programs.",
)
def status(meta: str, server: str | None, form: str) -> int:
    """Show which servers serve, what waits for whom, and what servers refuse.

    `pending` are all messages of a delay server without an outcome, whether they are in memory or not. `kept` is the
    log of a realtime server, and for whom: the group with the oldest message that is not acknowledged.

    Exit codes: 0 all is well, 3 something waits for an operator or a server does not serve, 4 meta can't be reached.

    $ delayd status
    $ delayd status --format json | jq .waits
    $ delayd status > /dev/null || echo 'somebody should look'
    $ delayd status --server 10.0.0.7:7401
    """
    if server is None:
        found, elsewhere = ask.run(lambda: _look(meta))
        waits = [*_of_all(found, "waits"), *_missing(found), *elsewhere]
    else:
        found = [ask.run(lambda: _ask_one(server))]
        waits = _of_all(found, "waits")
    refuses = _of_all(found, "refuses")
    code = NOT_BALANCED if waits else OK
    if form == "json":
        _write_json(found, waits, refuses, code)
    else:
        _write_screen(found, waits, refuses)
    return code


async def look_at(servers: Sequence[ask.Known]) -> list[Seen]:
    """Ask servers for their STATUS, all at once."""
    return await asyncio.gather(*map(_ask, servers))


async def ask_all(address: str) -> list[Seen]:
    """Ask meta, and all servers that it knows, for their STATUS."""
    async with ask.meta(address) as connection:
        known = await ask.known_servers(connection)
        meta = await _read("meta", connection)
    return [meta, *await look_at(known)]


async def _look(address: str) -> tuple[list[Seen], list[tuple[str, Wait]]]:
    """All servers, and what waits at realtime servers that nobody asks for it."""
    found = await ask_all(address)
    groups = await asyncio.gather(*map(_groups_of, found))
    found = [seen._replace(groups=of_seen) for seen, of_seen in zip(found, groups, strict=True)]
    return found, await _elsewhere(address, found)


async def _ask_one(address: str) -> Seen:
    host, port = parse_address(address, "server")
    async with ask.connected(host, port) as connection:
        seen = await _read("", connection)
    seen = seen._replace(role=need_str(seen.status, "role"))
    return seen._replace(groups=await _groups_of(seen))


async def _groups_of(seen: Seen) -> list[GroupInfo]:
    """The groups of a realtime server; none of one that does not serve now, which is told elsewhere."""
    if seen.role != "realtime" or seen.fault or ask.is_held(seen.status):
        return []
    host, _, port = seen.address.rpartition(":")
    try:
        async with ask.connected(host, int(port)) as connection:
            return await GROUPS.at(connection, groups_head(None, ages=True))
    except DelaydError:
        return []


async def _elsewhere(address: str, found: list[Seen]) -> list[tuple[str, Wait]]:
    """Groups with messages at a realtime server that does not have their subject any more."""
    behind = [(seen, group) for seen in found for group in seen.groups if _left(group) and not group.paused]
    subjects = sorted({group.subject for _, group in behind})
    routes: dict[str, int] = {}
    async with ask.meta(address) as connection:
        for start in range(0, len(subjects), SUBJECTS_MAX):
            asked: Head = {"subjects": [*subjects[start : start + SUBJECTS_MAX]], "assign": False}
            routes |= read_routes(await ask.ask(connection, RequestType.ROUTES, asked)).routes
    waits: list[tuple[str, Wait]] = []
    for seen, group in behind:
        to = routes.get(group.subject)
        if to is not None and to != seen.log_id:
            why = f"the subject is at realtime server {to:016x} now, so consumers that start do not ask here"
            words = {"subject": group.subject, "group": group.group, "log_id": f"{seen.log_id:016x}"}
            waits.append((seen.name, WaitKind.LEFT_BEHIND.wait(why, rows=f"{_left(group):,}", **words)))
    return waits


def _left(group: GroupInfo) -> int:
    """How many messages of a group are not acknowledged."""
    return group.end - group.next + group.outstanding + group.redelivering


async def _ask(known: ask.Known) -> Seen:
    fault, state = ask.silence(known), AWAY
    if known.alive:
        try:
            async with ask.reached(known) as connection:
                seen = await _read(known.role, connection)
                return seen._replace(state=_state(seen.status, CORDONED if known.cordoned else SERVES))
        except DelaydError as error:
            fault, state = error.message, SILENT
    elif (held := await ask.held_status(known)) is not None:
        return _seen(known.role, known.log_id, known.address, held, None)._replace(state=_state(held, FENCED))
    return Seen(known.role, known.log_id, known.address, {}, None, [], [], fault, state=state)


def _state(status: Head, otherwise: str) -> str:
    return HELD if ask.is_held(status) else FENCED if ask.is_fenced(status) else otherwise


async def _read(role: str, connection: Connection) -> Seen:
    before_ns = time.time_ns()
    answer = await ask.ask(connection, RequestType.STATUS, {})
    halfway_ms = (before_ns + time.time_ns()) // 2_000_000
    ahead_ms = need_int(answer, "now_ms") - halfway_ms
    return _seen(role, need_u64(answer, "log_id"), connection.peer, answer, ahead_ms)


def _seen(role: str, log_id: int, address: str, answer: Head, ahead_ms: int | None) -> Seen:
    need_map(answer, "counters")
    need_int(answer, "now_ms")
    waits, refuses = read_waits(answer, "waits"), read_waits(answer, "refuses")
    need_int(answer, "started_at_ms")
    need_str(answer, "role")
    return Seen(role, log_id, address, answer, ahead_ms, waits, refuses, "")


def _of_all(found: list[Seen], name: str) -> list[tuple[str, Wait]]:
    return [(seen.name, wait) for seen in found for wait in (seen.waits if name == "waits" else seen.refuses)]


def _missing(found: list[Seen]) -> list[tuple[str, Wait]]:
    """Servers that do not serve, as something that waits for whoever can start them."""
    missing = [
        (seen.name, MISSING[seen.role].wait(seen.fault, log_id=f"{seen.log_id:016x}")) for seen in found if seen.fault
    ]
    for role, kind in NEEDED.items():
        if not any(seen.role == role for seen in found):
            missing.append((role, kind.wait(f"meta knows no {role} server", meta=found[0].address)))
    return missing


def _write_screen(found: list[Seen], waits: list[tuple[str, Wait]], refuses: list[tuple[str, Wait]]) -> None:
    show(COLUMNS, map(_row, found), "table")
    for title, entries in (("waits for an operator", waits), ("is refused for now", refuses)):
        if entries:
            click.echo(f"\n{title}:")
        for name, wait in entries:
            what, why = (printable(text.encode(), TEXT_LENGTH) for text in (wait.what, wait.why))
            command = printable(wait.command.encode(), COMMAND_MAX)  # Whole: it is there to be typed.
            click.echo(f"  {name}: {what}: {why}" + (f"\n    -> {command}" if command else ""))
    things = f"{len(waits)} thing{'s' * (len(waits) != 1)} wait{'s' * (len(waits) == 1)} for an operator"
    click.echo(f"\n{things if waits else 'all is well'}")


def _row(seen: Seen) -> tuple[Cell, ...]:
    role, log_id, address = seen.role, f"{seen.log_id:016x}", seen.address
    if seen.fault:
        return (role, log_id, address, "no", None, None, None)
    up_ms = _up_ms(seen)
    if ask.is_held(seen.status):
        return (role, log_id, address, "held", up_ms, None, None)
    serves = "fenced" if ask.is_fenced(seen.status) else "yes"
    return (role, log_id, address, serves, up_ms, _clock_text(seen), _backlog_text(seen))


def _up_ms(seen: Seen) -> int:
    """How long ago a server that has answered was started."""
    return max(0, need_int(seen.status, "now_ms") - need_int(seen.status, "started_at_ms"))


def _clock_text(seen: Seen) -> str:
    if seen.status.get("clock_confirmed") is False:
        return "not confirmed"
    ahead_ms = seen.clock_ahead_ms or 0
    if abs(ahead_ms) <= CLOCK_MS_MAX:
        return "as here"
    return f"{duration_text(abs(ahead_ms))} {'ahead' if ahead_ms > 0 else 'behind'}"


BACKLOG = {
    "meta": (("servers", "server|servers"), ("routes", "route|routes")),
    "delay": (
        ("pending", "pending"),
        ("loaded_rows", "loaded"),
        ("pending_rows", "not filed"),
        ("waiting_rows", "due and waiting"),
        ("undecided_batches", "batch under way|batches under way"),
        ("targets_away", "target away|targets away"),
        ("quarantined_rows", "quarantined"),
        ("quarantined_hours", "hour quarantined|hours quarantined"),
        ("dead_rows", "dead"),
        ("expired_rows", "expired"),
    ),
    "realtime": (("messages", "taken"), ("pulled", "pulled"), ("acked", "acknowledged")),
}
ALWAYS = frozenset(
    {"servers", "routes", "pending", "loaded_rows", "waiting_rows", "messages", "acked"}
)  # The others if not 0.


def _backlog_text(seen: Seen) -> str:
    counts = [(seen.counter(name), name, words) for name, words in BACKLOG.get(seen.role, ())]
    told = [_counted(count, words) for count, name, words in counts if count or name in ALWAYS]
    # No server counts the dead letters that are kept without reading all that is pending, so the line says since when.
    if (died := seen.told("died")) is not None:
        letters = _counted(died, "dead letter|dead letters")
        told.append(f"{letters} made in {duration_text(_up_ms(seen))}")
    if (kept := seen.told("kept_bytes")) is not None:
        told.append(f"{size_text(kept)} kept{_for_whom(seen)}")
    if (free := seen.told("free_bytes")) is not None:
        told.append(f"{size_text(free)} free")
    return ", ".join(told)


def _for_whom(seen: Seen) -> str:
    slowest = seen.slowest
    if slowest is None:
        return ""
    return f", since {duration_text(slowest.oldest_ms_ago or 0)} for {slowest.group} of {slowest.subject}"


def _counted(count: int, words: str) -> str:
    """A number and what it counts; ``words`` may be one for one thing and another one for several."""
    one, _, several = words.partition("|")
    return f"{count:,} {one if count == 1 or not several else several}"


def _kept_for(group: GroupInfo) -> dict[str, str | int | None]:
    return {"subject": group.subject, "group": group.group, "oldest_ms_ago": group.oldest_ms_ago}


def _write_json(found: list[Seen], waits: list[tuple[str, Wait]], refuses: list[tuple[str, Wait]], code: int) -> None:
    servers = [
        {
            "role": seen.role,
            "log_id": f"{seen.log_id:016x}",
            "address": seen.address,
            "serves": not seen.fault and not ask.is_held(seen.status) and not ask.is_fenced(seen.status),
            "fault": seen.fault or None,
            "epoch": seen.status.get("epoch"),
            "pid": seen.status.get("pid"),
            "started_at_ms": seen.status.get("started_at_ms"),
            "clock_ahead_ms": seen.clock_ahead_ms,
            "clock_confirmed": seen.status.get("clock_confirmed"),
            "counters": seen.status.get("counters", {}),
            "kept_for": None if seen.slowest is None else _kept_for(seen.slowest),
        }
        for seen in found
    ]
    entries = {
        name: [{"server": server, **wait._asdict()} for server, wait in listed]
        for name, listed in (("waits", waits), ("refuses", refuses))
    }
    click.echo(json.dumps({"well": code == OK, "servers": servers, **entries}, ensure_ascii=False, indent=1))
