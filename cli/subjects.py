"""``delayd subjects``: each subject, the realtime server that serves it, and what is kept there.

Invariant: the list is meta's, complete and in order of the names; numbers of a realtime server that can't be asked are
missing, never guessed.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

import click

from delayd.errors import BadRequest, DelaydError
from delayd.net.connection import Connection
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType, is_u64, need_bool, need_int, need_list, need_maps, need_str

from . import ask
from .listing import show
from .options import examples, format_option, limit_option, meta_option
from .states import states_of
from .table import Cell, Column, Kind

PAGE = 1_000  # Subjects asked for at once: an answer of at most 256 KB.
COLUMNS = (
    Column("subject"),
    Column("realtime_log_id", spare=True),
    Column("address", spare=True),
    Column("state"),
    Column("messages", Kind.NUMBER),
    Column("first", Kind.NUMBER, spare=True),
    Column("end", Kind.NUMBER, spare=True),
    Column("quarantined", Kind.NUMBER),
    Column("groups", Kind.NUMBER),
    Column("oldest_ago_ms", Kind.DURATION),
)


class Kept(NamedTuple):
    """What a realtime server keeps of a subject: messages, the consume sequences [first, end), and for whom."""

    messages: int
    first: int
    end: int
    quarantined: int
    groups: int
    oldest_ms_ago: int | None


@click.command(epilog=examples("delayd subjects --prefix orders."))
@meta_option
@click.option("--prefix", default="", metavar="TEXT", help="Subjects that begin with this only.")
@limit_option
@format_option
def subjects(meta: str, prefix: str, limit: int, form: str) -> None:
    """List subjects and the servers that serve them.

    A subject is listed from its first send on; messages, first and end count what was delivered and is still kept.
    State is that of the realtime server, as `delayd servers` has it. Quarantined messages can't be read, as far as that
    was noticed: the server's log names them. Without any group
    messages are removed unseen when they are older than the retention: see the age of the oldest one.
    """
    show(COLUMNS, ask.run(lambda: _rows(meta, prefix, limit)), form, limit)


async def _rows(address: str, prefix: str, limit: int) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        known_servers = await ask.known_servers(connection)
        servers = {server.log_id: server for server in known_servers if server.role == "realtime"}
        routes = await _routes(connection, prefix, limit)
    states = await states_of(known_servers)
    wanted = {log_id for _, log_id in routes}
    kept: dict[tuple[int, str], Kept] = {}
    for log_id, server in servers.items():
        if log_id in wanted:
            kept.update({(log_id, name): found for name, found in (await _kept(server, prefix)).items()})
    rows: list[tuple[Cell, ...]] = []
    for name, log_id in routes:
        known = servers.get(log_id)
        found = kept.get((log_id, name))
        place = f"{known.host}:{known.port}" if known else None
        rows.append(
            (name, f"{log_id:016x}", place, states.get(log_id, "unknown"), *(found or (None,) * len(Kept._fields)))
        )
    return rows


async def _routes(connection: Connection, prefix: str, limit: int) -> list[tuple[str, int]]:
    routes: list[tuple[str, int]] = []
    async for answer in _pages(connection, RequestType.META_SUBJECTS, prefix):
        routes.extend(_route(item) for item in need_list(answer, "subjects"))
        # One more than is shown, so that the listing can say that there are more.
        if limit and len(routes) > limit:
            break
    return routes


async def _kept(server: ask.Known, prefix: str) -> dict[str, Kept]:
    kept: dict[str, Kept] = {}
    if not server.alive:
        click.echo(f"delayd: numbers of {server.host}:{server.port} are missing: {server.silence}", err=True)
        return kept
    try:
        async with ask.reached(server) as connection:
            async for answer in _pages(connection, RequestType.SUBJECTS, prefix):
                for head in need_maps(answer, "subjects"):
                    kept[need_str(head, "name")] = _read_kept(head)
    except DelaydError as error:
        click.echo(f"delayd: numbers of {server.host}:{server.port} are missing: {error.message}", err=True)
    return kept


def _read_kept(head: Head) -> Kept:
    age_ms = None if head.get("oldest_ms_ago") is None else need_int(head, "oldest_ms_ago")
    messages, first, end, quarantined, groups = (need_int(head, name) for name in Kept._fields[:-1])
    return Kept(messages, first, end, quarantined, groups, age_ms)


async def _pages(connection: Connection, request: RequestType, prefix: str) -> AsyncIterator[Head]:
    after, more = "", True
    while more:
        answer = await ask.ask(connection, request, {"prefix": prefix, "after": after, "limit": PAGE})
        yield answer
        names = [_name(item) for item in need_list(answer, "subjects")]
        more = need_bool(answer, "more") and bool(names)
        after = names[-1] if names else after


def _route(item: HeadValue) -> tuple[str, int]:
    match item:
        case [str(name), log_id] if is_u64(log_id):
            return name, log_id
    raise BadRequest("meta answered a subject that is no pair of a name and a log_id", field="subjects")


def _name(item: HeadValue) -> str:
    match item:
        case [str(name), *_] | {"name": str(name)}:
            return name
    raise BadRequest("a server answered a subject without a name", field="subjects")
