"""``delayd top``: rates, pending messages, lateness and the lag of groups on one screen, as servers tell them.

Invariant: servers are asked two things a round, whatever they hold; a rate is the difference of two answers of one life
of a server over the time between them by its own clock.
"""

import io
import json
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import click

from delayd.client.asking.ask import groups_at
from delayd.wire.consuming import GroupInfo

from . import ask
from .groups import tell_missing
from .listing import Cell, Column, Table, columns, width_of
from .options import Command, meta_option
from .status import Seen, ask_all
from .times import duration

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


class Look(NamedTuple):
    """What all servers said in one round; each group with its server."""

    seen: list[Seen]
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
    before = _look(meta)
    if once or form == "json" or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _wait(seconds, watched=False)
        screen = screen_of(before, _look(meta))
        click.echo(_json(screen) if form == "json" else _text(screen, width_of(sys.stdout)), nl=form == "json")
        return
    with _keys():
        while not _wait(seconds, watched=True):
            now = _look(meta)
            size = shutil.get_terminal_size()
            lines = _text(screen_of(before, now), size.columns).splitlines()[: size.lines - 1]
            # In raw mode a line feed does not go back to the first column.
            sys.stdout.write(CLEAR + HOME + "\r\n".join(lines))
            sys.stdout.flush()
            before = now
    click.echo()


def screen_of(before: Look, now: Look) -> Screen:
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


def _look(meta: str) -> Look:
    return ask.run(lambda: _ask(meta))


async def _ask(meta: str) -> Look:
    seen = await ask_all(meta)
    async with ask.meta(meta) as connection:
        servers = [server for server in await ask.known_servers(connection, "realtime") if server.alive]
    listed = await groups_at(servers, None)
    tell_missing(listed)
    return Look(seen, [(place.server.log_id, place.info) for place in listed])


def _server_row(before: Seen | None, now: Seen) -> tuple[Cell, ...]:
    def rate(name: str) -> Cell:
        value = now.status.get(name) if name in now.status else now.counter(name)
        earlier = (before.status.get(name) if name in before.status else before.counter(name)) if before else None
        if not isinstance(value, int) or not isinstance(earlier, int):
            return None
        return _rate(value - earlier, _passed_s(before, now))

    log_id = f"{now.log_id:016x}"
    if now.fault:
        return (f"{now.role} (away)", log_id, None, None, None, None, None, *NO_LATE)
    if now.role == "delay":
        held = (now.counter("pending_rows"), now.counter("loaded_rows"), now.counter("waiting_rows"))
        late = map(now.told, LATE)
        return (now.role, log_id, rate("next_sequence"), None, *held, *late)
    return (now.role, log_id, rate("messages"), rate("acked"), None, None, None, *NO_LATE)


def _passed_s(before: Seen | None, now: Seen) -> float | None:
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
            Table(shown, out, width).write(rows)
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
