"""``delayd status``: one screen that says whether all is well, and if not, what waits for whom and which command helps.

Invariant: whatever one server answers, or does not answer, the others are shown; and the exit code says what the last
line says.
"""

import asyncio
import json
import time
from typing import NamedTuple

import click

from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType, need_int, need_map, need_str, need_u64
from delayd.wire.waits import Wait, read_waits

from . import ask
from .exits import NOT_BALANCED, OK
from .listing import printable, show
from .options import examples, meta_option
from .table import Cell, Column, Kind
from .times import duration_text

COLUMNS = (
    Column("role"),
    Column("log_id"),
    Column("address", spare=True),
    Column("serves"),
    Column("up_ms", Kind.DURATION),
    Column("clock"),
    Column("backlog"),
)
CLOCK_MS_MAX = 1_000  # A clock that differs by more from this machine's is shown; the way there and back is in it.
NEEDED = ("delay", "realtime")
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


@click.command(
    epilog=examples(
        "delayd status",
        "delayd status --format json | jq .waits",
        "delayd status > /dev/null || echo 'somebody should look'",
    )
)
@meta_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A screen for people; JSON with one object for programs.",
)
def status(meta: str, form: str) -> int:
    """Show which servers serve, what waits for whom, and what servers refuse.

    Exit codes: 0 all is well, 3 something waits for an operator or a server does not serve, 4 meta can't be reached.
    """
    found = ask.run(lambda: ask_all(meta))
    waits = [*_of_all(found, "waits"), *_missing(found)]
    refuses = _of_all(found, "refuses")
    code = NOT_BALANCED if waits else OK
    if form == "json":
        _write_json(found, waits, refuses, code)
    else:
        _write_screen(found, waits, refuses)
    return code


async def ask_all(address: str) -> list[Seen]:
    """Ask meta, and all servers that it knows, for their STATUS."""
    async with ask.meta(address) as connection:
        known = await ask.known_servers(connection)
        meta = await _read("meta", connection)
    return [meta, *await asyncio.gather(*map(_ask, known))]


async def _ask(known: ask.Known) -> Seen:
    address = f"{known.host}:{known.port}"
    fault = ask.silence(known)
    if known.alive:
        try:
            async with ask.reached(known) as connection:
                return await _read(known.role, connection)
        except DelaydError as error:
            fault = error.message
    elif (held := await ask.held_status(known)) is not None:
        return _seen(known.role, known.log_id, address, held, None)
    return Seen(known.role, known.log_id, address, {}, None, [], [], fault)


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
        (
            seen.name,
            Wait(_what_rests(seen.role), seen.fault, _helps(seen)),
        )
        for seen in found
        if seen.fault
    ]
    for role in NEEDED:
        if not any(seen.role == role for seen in found):
            missing.append((role, Wait(_what_rests(role), f"meta knows no {role} server", f"delayd {role}")))
    return missing


def _helps(seen: Seen) -> str:
    forget = f"delayd server forget {seen.role} {seen.log_id:016x}"
    # Without --routes meta keeps a realtime server that has subjects, and they wait for it.
    return f"start it, or look at its log; gone for good: {forget}{' --routes' * (seen.role == 'realtime')}"


def _what_rests(role: str) -> str:
    return "sends to it, and messages that it holds" if role == "delay" else "messages of its subjects"


def _write_screen(found: list[Seen], waits: list[tuple[str, Wait]], refuses: list[tuple[str, Wait]]) -> None:
    show(COLUMNS, map(_row, found), "table")
    for title, entries in (("waits for an operator", waits), ("is refused for now", refuses)):
        if entries:
            click.echo(f"\n{title}:")
        for name, wait in entries:
            what, why, command = (printable(text.encode(), TEXT_LENGTH) for text in wait)
            click.echo(f"  {name}: {what}: {why}" + (f"\n    -> {command}" if command else ""))
    things = f"{len(waits)} thing{'s' * (len(waits) != 1)} wait{'s' * (len(waits) == 1)} for an operator"
    click.echo(f"\n{things if waits else 'all is well'}")


def _row(seen: Seen) -> tuple[Cell, ...]:
    role, log_id, address = seen.role, f"{seen.log_id:016x}", seen.address
    if seen.fault:
        return (role, log_id, address, "no", None, None, None)
    up_ms = max(0, need_int(seen.status, "now_ms") - need_int(seen.status, "started_at_ms"))
    if ask.is_held(seen.status):
        return (role, log_id, address, "held", up_ms, None, None)
    return (role, log_id, address, "yes", up_ms, _clock_text(seen), _backlog_text(seen))


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
ALWAYS = frozenset({"servers", "routes", "loaded_rows", "waiting_rows", "messages", "acked"})  # The others if not 0.


def _backlog_text(seen: Seen) -> str:
    counts = [(seen.counter(name), name, words) for name, words in BACKLOG.get(seen.role, ())]
    return ", ".join(_counted(count, words) for count, name, words in counts if count or name in ALWAYS)


def _counted(count: int, words: str) -> str:
    """A number and what it counts; ``words`` may be one for one thing and another one for several."""
    one, _, several = words.partition("|")
    return f"{count:,} {one if count == 1 or not several else several}"


def _write_json(found: list[Seen], waits: list[tuple[str, Wait]], refuses: list[tuple[str, Wait]], code: int) -> None:
    servers = [
        {
            "role": seen.role,
            "log_id": f"{seen.log_id:016x}",
            "address": seen.address,
            "serves": not seen.fault and not ask.is_held(seen.status),
            "fault": seen.fault or None,
            "epoch": seen.status.get("epoch"),
            "pid": seen.status.get("pid"),
            "started_at_ms": seen.status.get("started_at_ms"),
            "clock_ahead_ms": seen.clock_ahead_ms,
            "clock_confirmed": seen.status.get("clock_confirmed"),
            "counters": seen.status.get("counters", {}),
        }
        for seen in found
    ]
    entries = {
        name: [{"server": server, **wait._asdict()} for server, wait in listed]
        for name, listed in (("waits", waits), ("refuses", refuses))
    }
    click.echo(json.dumps({"well": code == OK, "servers": servers, **entries}, ensure_ascii=False, indent=1))
