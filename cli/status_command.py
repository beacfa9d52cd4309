"""``delayd status`` says on one screen whether all is well, and if not, what waits for whom and which command helps;
``delayd top`` draws rates and lags anew.

Invariant: whatever one server answers, or does not answer, the others are shown; and the exit code says what the last
line says. What waits at a realtime server that nobody asks, no server can know: it is found here, by comparing the
groups of each realtime server with the routes of meta.
"""

import io
import json
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import click

from delayd.client.asking import ask
from delayd.client.asking.ask import groups_at
from delayd.client.asking.looking import AskedServer, Look, Named, ask_all, look, look_at_one, waits_of
from delayd.hours import duration_text
from delayd.kernel import TWINS
from delayd.machine.operating import counted
from delayd.wire.consuming import GroupInfo
from delayd.wire.status import COMMAND_MAX

from .group_commands import tell_missing
from .listing import Cell, Column, ListingTable, columns, printable, show, size_text, width_of
from .main import NOT_BALANCED, OK
from .operate import run
from .shared_options import Command, meta_option
from .times import duration

COLUMNS = columns("role log_id address:spare serves up_ms:duration clock backlog")
TEXT_LENGTH = 500


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
        seen = run(lambda: look(meta))
        waits = seen.waits
    else:
        seen = Look([run(lambda: look_at_one(server))])
        waits = waits_of(seen.servers)
    code = NOT_BALANCED if waits else OK
    if form == "json":
        _write_json(seen.servers, waits, seen.refuses, code)
    else:
        _write_screen(seen.servers, waits, seen.refuses)
    return code


def _write_screen(found: list[AskedServer], waits: list[Named], refuses: list[Named]) -> None:
    show(COLUMNS, map(_row, found), "table")
    for title, entries in (("waits for an operator", waits), ("is refused for now", refuses)):
        if entries:
            click.echo(f"\n{title}:")
        for name, wait in entries:
            what, why = (printable(text.encode(), TEXT_LENGTH) for text in (wait.what, wait.why))
            command = printable(wait.command.encode(), COMMAND_MAX)  # Whole: it is there to be typed.
            click.echo(f"  {name}: {what}: {why}" + (f"\n    -> {command}" if command else ""))
    things = f"{counted(len(waits), 'thing waits|things wait')} for an operator"
    click.echo(f"\n{things if waits else 'all is well'}")


def _row(seen: AskedServer) -> tuple[Cell, ...]:
    role, log_id, address = seen.role, f"{seen.log_id:016x}", seen.address
    if seen.fault:
        return (role, log_id, address, "no", None, None, None)
    up_ms = seen.up_ms
    if ask.is_held(seen.status):
        return (role, log_id, address, "held", up_ms, None, None)
    serves = "fenced" if ask.is_fenced(seen.status) else "yes"
    return (role, log_id, address, serves, up_ms, seen.clock_text, _backlog_text(seen))


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
    ),
}
# A realtime server counts these anew when it starts, and a delay server what expired.
SINCE_START = {
    "delay": (("ended_expired", "expired"),),
    "realtime": (("messages", "taken"), ("pulled", "pulled"), ("acked", "acknowledged")),
}
ALWAYS = frozenset(
    {"servers", "routes", "pending", "loaded_rows", "waiting_rows", "messages", "acked"}
)  # The others if not 0.


def _backlog_text(seen: AskedServer) -> str:
    told = _counts(seen, BACKLOG)
    if since_start := _counts(seen, SINCE_START):
        told.append(f"{', '.join(since_start)} since its start")
    if seen.role == "delay":
        letters = seen.told("dead_letters")
        told += ["dead letters not counted"] if letters is None else []
        told += [counted(letters, "dead letter|dead letters")] if letters else []
    if (kept := seen.told("kept_bytes")) is not None:
        told.append(f"{size_text(kept)} kept{_for_whom(seen)}")
    if (free := seen.told("free_bytes")) is not None:
        told.append(f"{size_text(free)} free")
    if isinstance(kernel := seen.status.get("kernel"), str) and kernel != TWINS:
        told.append(f"kernel {kernel}")
    return ", ".join(told)


def _counts(seen: AskedServer, names: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    counts = [(seen.counter(name), name, words) for name, words in names.get(seen.role, ())]
    return [counted(count, words) for count, name, words in counts if count or name in ALWAYS]


def _for_whom(seen: AskedServer) -> str:
    slowest = seen.slowest
    if slowest is None:
        return ""
    return f", since {duration_text(slowest.oldest_ms_ago or 0)} for {slowest.group} of {slowest.subject}"


def _kept_for(group: GroupInfo) -> dict[str, str | int | None]:
    return {"subject": group.subject, "group": group.group, "oldest_ms_ago": group.oldest_ms_ago}


def _write_json(found: list[AskedServer], waits: list[Named], refuses: list[Named], code: int) -> None:
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
            "kernel": seen.status.get("kernel"),
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


SERVER_COLUMNS = columns(
    "server log_id:spare in_per_s:number out_per_s:number not_filed:number,spare loaded:number waiting:number "
    "late_p50_ms:duration,spare late_p99_ms:duration late_max_ms:duration,spare"
)
LATE = ("late_ms_p50", "late_ms_p99", "late_ms_max")  # A delay server that handed over nothing tells none of them.
NO_LATE = (None, None, None)
GROUP_COLUMNS = columns("subject group lag:number outstanding:number,spare out_per_s:number realtime_log_id:spare")
GROUPS_MAX = 100  # Those with the largest lag; more fit no screen.
EVERY_MIN = timedelta(milliseconds=200)
HOME, CLEAR = "\x1b[H", "\x1b[2J"
ENDS = frozenset("qQ\x03\x04")


class StatusRound(NamedTuple):
    """What all servers said in one round; each group with its server."""

    seen: list[AskedServer]
    groups: list[tuple[int, GroupInfo]]


class Screen(NamedTuple):
    """The rows of both lists."""

    servers: list[tuple[Cell, ...]]
    groups: list[tuple[Cell, ...]]


@click.command(cls=Command)
@meta_option
@click.option("--once", is_flag=True, help="Print one snapshot; this is what a pipe gets.")
@click.option("--every", type=duration, default="2s", show_default=True, help="How often the screen is drawn anew.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A screen for people; JSON with one object, once, for programs.",
)
def top(meta: str, once: bool, every: timedelta, form: str) -> None:
    """Watch rates, pending messages, lateness and the lag of groups; q ends it.

    Rates are those between two looks. Without a terminal one snapshot is printed.

    $ delayd top
    $ delayd top --once --format json
    """
    seconds = max(every, EVERY_MIN).total_seconds()
    before = _seen_now(meta)
    if once or form == "json" or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _wait(seconds, watched=False)
        screen = screen_of(before, _seen_now(meta))
        click.echo(_json(screen) if form == "json" else _text(screen, width_of(sys.stdout)), nl=form == "json")
        return
    with _keys():
        while not _wait(seconds, watched=True):
            now = _seen_now(meta)
            size = shutil.get_terminal_size()
            lines = _text(screen_of(before, now), size.columns).splitlines()[: size.lines - 1]
            # In raw mode a line feed does not go back to the first column.
            sys.stdout.write(CLEAR + HOME + "\r\n".join(lines))
            sys.stdout.flush()
            before = now
    click.echo()


def screen_of(before: StatusRound, now: StatusRound) -> Screen:
    """The rows of two rounds: counts of the second one, and rates between them."""
    old = {(each.role, each.log_id): each for each in before.seen}
    servers = [
        _server_row(old.get((each.role, each.log_id)), each) for each in now.seen if each.role in ("delay", "realtime")
    ]
    clocks = {each.log_id: _passed_s(old.get((each.role, each.log_id)), each) for each in now.seen}
    places = {(log_id, info.subject, info.group): info.next for log_id, info in before.groups}
    groups: list[tuple[Cell, ...]] = []
    for log_id, info in sorted(now.groups, key=lambda each: each[1].next - each[1].end)[:GROUPS_MAX]:
        place = places.get((log_id, info.subject, info.group))
        rate = None if place is None else _rate(info.next - place, clocks.get(log_id))
        groups.append((info.subject, info.group, info.end - info.next, info.outstanding, rate, f"{log_id:016x}"))
    return Screen(servers, groups)


def _seen_now(meta: str) -> StatusRound:
    return run(lambda: _ask_all_now(meta))


async def _ask_all_now(meta: str) -> StatusRound:
    seen = await ask_all(meta)
    async with ask.meta(meta) as connection:
        servers = [server for server in await ask.known_servers(connection, "realtime") if server.alive]
    listed = await groups_at(servers, None)
    tell_missing(listed)
    return StatusRound(seen, [(place.server.log_id, place.info) for place in listed])


def _server_row(before: AskedServer | None, now: AskedServer) -> tuple[Cell, ...]:
    def rate(name: str) -> Cell:
        value, earlier = now.told(name), before.told(name) if before else None
        return None if value is None or earlier is None else _rate(value - earlier, _passed_s(before, now))

    log_id = f"{now.log_id:016x}"
    if now.fault:
        return (f"{now.role} (away)", log_id, None, None, None, None, None, *NO_LATE)
    if now.role == "delay":
        held = (now.counter("pending_rows"), now.counter("loaded_rows"), now.counter("waiting_rows"))
        late = map(now.told, LATE)
        return (now.role, log_id, rate("accepted_rows"), None, *held, *late)
    return (now.role, log_id, rate("messages"), rate("acked"), None, None, None, *NO_LATE)


def _passed_s(before: AskedServer | None, now: AskedServer) -> float | None:
    """Seconds between two answers of one life of a server; None when there are no two."""
    if before is None or before.status.get("epoch") != now.status.get("epoch"):
        return None
    first, last = before.status.get("now_ms"), now.status.get("now_ms")
    if not isinstance(first, int) or not isinstance(last, int) or last <= first:
        return None
    return (last - first) / 1000


def _rate(count: int, seconds: float | None) -> int | None:
    return None if seconds is None or count < 0 else round(count / seconds)


def _text(screen: Screen, width: int | None) -> str:
    out = io.StringIO()
    for shown, rows in ((SERVER_COLUMNS, screen.servers), (GROUP_COLUMNS, screen.groups)):
        if rows:
            out.write("\n" if out.tell() else "")
            # The columns that a narrow screen has no room for are not named each time that it is drawn.
            ListingTable(shown, out, width).write(rows)
    return out.getvalue()


def _json(screen: Screen) -> str:
    def maps(columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]) -> list[dict[str, Cell]]:
        return [dict(zip((column.name for column in columns), row, strict=True)) for row in rows]

    return json.dumps({"servers": maps(SERVER_COLUMNS, screen.servers), "groups": maps(GROUP_COLUMNS, screen.groups)})


@contextmanager
def _keys() -> Iterator[None]:
    """Read single keys while the screen is drawn, and give the terminal back as it was."""
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _wait(seconds: float, *, watched: bool) -> bool:
    """Wait until the next round; True when a key ends the watch, or its terminal is gone."""
    if not watched:
        select.select((), (), (), seconds)
        return False
    ready, _, _ = select.select((sys.stdin,), (), (), seconds)
    if not ready:
        return False
    key = sys.stdin.read(1)
    return not key or key in ENDS
