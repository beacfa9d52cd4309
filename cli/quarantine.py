"""``delayd quarantine``: what servers can't read and have set aside, and an operator's word on it (rule L10)."""

from typing import NamedTuple

import click

from delayd.errors import BadArgument, DelaydError
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.heads import need_bool, need_str
from delayd.wire.quarantine import PAGE_MAX, Quarantined, read_list
from delayd.wire.requests import RequestType

from . import ask
from .exits import NOT_BALANCED, OK
from .listing import show
from .options import (
    Group,
    confirm,
    format_option,
    meta_option,
    secret_data_option,
    secret_of,
    secret_option,
    yes_option,
)
from .table import Cell, Column, Kind

ROLES = ("delay", "realtime")
COLUMNS = (
    Column("role"),
    Column("log_id"),
    Column("id"),
    Column("messages", Kind.NUMBER),
    Column("since", Kind.INSTANT),
    Column("position", Kind.NUMBER, spare=True),
    Column("path", spare=True),
    Column("reason"),
)

server_option = click.option("--server", metavar="LOG_ID", help="The server that lists it; needed when several do.")


class Found(NamedTuple):
    """An entry and the server that lists it."""

    server: ask.Known
    entry: Quarantined


@click.group(cls=Group)
def quarantine() -> None:
    """List what servers can't read and have set aside, and decide on it.

    A damaged or missing file stops only its own messages. The server tries each entry again every 30 s, so it finds by
    itself a file that you restored from a copy. When there is no copy, give the entry up with `drop`.

    $ delayd quarantine list
    $ delayd quarantine drop schedule/2026112203
    """


@quarantine.command("list")
@meta_option
@format_option
def list_(meta: str, form: str) -> None:
    """List what is quarantined at all live servers.

    When a server can't be asked, its entries are missing, and stderr says so.

    $ delayd quarantine list
    $ delayd quarantine list --format json
    """
    show(COLUMNS, [_row(found) for found in ask.run(lambda: _all(meta))], form)


@quarantine.command()
@click.argument("id_", metavar="ID")
@meta_option
@server_option
@secret_option
@secret_data_option
@yes_option
def release(id_: str, meta: str, server: str | None, secret_file: str | None, data: str, yes: bool) -> int:
    """Make the server try an entry again at once, or take it as it is.

    The command first says what that does and costs, and asks.

    $ delayd quarantine release schedule/2026112203
    """
    return _decide(RequestType.QUARANTINE_RELEASE, id_, meta, server, secret_of(secret_file, data), yes)


@quarantine.command()
@click.argument("id_", metavar="ID")
@meta_option
@server_option
@secret_option
@secret_data_option
@yes_option
def drop(id_: str, meta: str, server: str | None, secret_file: str | None, data: str, yes: bool) -> int:
    """Give an entry up for good, when there is no copy of its file.

    The command first says what is lost by that, and asks.

    $ delayd quarantine drop schedule/2026112203
    """
    return _decide(RequestType.QUARANTINE_DROP, id_, meta, server, secret_of(secret_file, data), yes)


def _decide(request: RequestType, id_: str, meta: str, server: str | None, secret: Secret, yes: bool) -> int:
    found = _only(id_, [each for each in ask.run(lambda: _all(meta)) if each.entry.id == id_], server)
    dropping = request is RequestType.QUARANTINE_DROP
    costs = found.entry.drop if dropping else found.entry.release
    if not costs:
        raise BadArgument(f"{id_} can't be {'dropped' if dropping else 'released'}; {found.entry.reason}")
    confirm(f"{id_}: {costs}", yes)
    answer = ask.run(lambda: ask.decide(found.server, request, {"id": id_}, secret))
    click.echo(need_str(answer, "message"))
    return OK if need_bool(answer, "done") else NOT_BALANCED


def _only(id_: str, found: list[Found], server: str | None) -> Found:
    if server is not None:
        found = [each for each in found if f"{each.server.log_id:016x}" == server.lower()]
    if not found:
        raise BadArgument(f"nothing is quarantined as {id_}; see `delayd quarantine list`")
    if len(found) > 1:
        raise BadArgument(f"{len(found)} servers list {id_}; say which one with --server")
    return found[0]


async def _all(address: str) -> list[Found]:
    async with ask.meta(address) as connection:
        servers = [server for server in await ask.known_servers(connection) if server.role in ROLES]
    return [found for server in servers for found in await _of(server)]


async def _of(server: ask.Known) -> list[Found]:
    place = f"the {server.role} server at {server.host}:{server.port}"
    found: list[Found] = []
    try:
        async with ask.reached(server) as connection:
            after, more = "", True
            while more:
                head: Head = {"after": after, "limit": PAGE_MAX}
                entries, more = read_list(await ask.ask(connection, RequestType.QUARANTINE_LIST, head))
                found += [Found(server, entry) for entry in entries]
                more = more and bool(entries)
                after = entries[-1].id if entries else after
    except DelaydError as error:
        click.echo(f"delayd: what {place} has quarantined is missing: {error.message}", err=True)
    return found


def _row(found: Found) -> tuple[Cell, ...]:
    entry = found.entry
    where = (entry.position, entry.path, entry.reason)
    return (found.server.role, f"{found.server.log_id:016x}", entry.id, entry.rows, entry.since_ms, *where)
