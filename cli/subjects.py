"""``delayd subjects``: each subject, the realtime server that serves it, and what is kept there.

Invariant: the list is meta's, complete and in order of the names; numbers of a realtime server that can't be asked are
missing, never guessed.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import click

from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.wire.frame import Head
from delayd.wire.listings import SubjectInfo, read_subjects
from delayd.wire.meta import read_subject_page
from delayd.wire.requests import RequestType

from . import ask, quotas
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

Row = TypeVar("Row")


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "delayd subjects --prefix orders.",
        "delayd subjects set mails --per-second 500 --data /var/lib/delayd",
        "delayd subjects show",
    ),
)
@meta_option
@click.option("--prefix", default="", metavar="TEXT", help="Subjects that begin with this only.")
@limit_option
@format_option
@click.pass_context
def subjects(context: click.Context, meta: str, prefix: str, limit: int, form: str) -> None:
    """List subjects and the servers that serve them; set and show their quotas.

    The list has each subject from its first send on. `messages`, `first` and `end` count the messages that were
    delivered and are still kept. `state` is that of the realtime server, as in `delayd servers`.

    `quarantined` messages can't be read; the server counts them once a consumer came to them, and its log names them.
    When a subject has no groups, its messages are removed unseen once they are older than the retention: `oldest ago`
    is the age of the oldest one.
    """
    if context.invoked_subcommand is None:
        show(COLUMNS, ask.run(lambda: _rows(meta, prefix, limit)), form, limit)


subjects.add_command(quotas.set_)
subjects.add_command(quotas.show)


async def _rows(address: str, prefix: str, limit: int) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        known_servers = await ask.known_servers(connection)
        servers = {server.log_id: server for server in known_servers if server.role == "realtime"}
        routes = await _routes(connection, prefix, limit)
    states = await states_of(known_servers)
    wanted = {log_id for _, log_id in routes}
    kept: dict[tuple[int, str], SubjectInfo] = {}
    for log_id, server in servers.items():
        if log_id in wanted:
            kept.update({(log_id, info.name): info for info in await _kept(server, prefix)})
    rows: list[tuple[Cell, ...]] = []
    for name, log_id in routes:
        known = servers.get(log_id)
        place = f"{known.host}:{known.port}" if known else None
        cells: tuple[Cell, ...] = (name, f"{log_id:016x}", place, states.get(log_id, "unknown"))
        rows.append((*cells, *_figures(kept.get((log_id, name)))))
    return rows


def _figures(info: SubjectInfo | None) -> tuple[Cell, ...]:
    if info is None:
        return (None,) * (len(SubjectInfo._fields) - 1)
    return (info.messages, info.first, info.end, info.quarantined, info.groups, info.oldest_ms_ago)


async def _routes(connection: Connection, prefix: str, limit: int) -> list[tuple[str, int]]:
    routes: list[tuple[str, int]] = []
    async for page in _pages(connection, RequestType.META_SUBJECTS, prefix, read_subject_page, lambda route: route[0]):
        routes.extend(page)
        # One more than is shown, so that the listing can say that there are more.
        if limit and len(routes) > limit:
            break
    return routes


async def _kept(server: ask.Known, prefix: str) -> list[SubjectInfo]:
    kept: list[SubjectInfo] = []
    if not server.alive:
        click.echo(f"delayd: numbers of {server.host}:{server.port} are missing: {ask.silence(server)}", err=True)
        return kept
    try:
        async with ask.reached(server) as connection:
            async for page in _pages(connection, RequestType.SUBJECTS, prefix, read_subjects, lambda info: info.name):
                kept.extend(page)
    except DelaydError as error:
        click.echo(f"delayd: numbers of {server.host}:{server.port} are missing: {error.message}", err=True)
    return kept


async def _pages(
    connection: Connection,
    request: RequestType,
    prefix: str,
    read: Callable[[Head], tuple[Sequence[Row], bool]],
    name_of: Callable[[Row], str],
) -> AsyncIterator[Sequence[Row]]:
    """The pages of a listing; the next one is asked for behind the last name of the one before."""
    after, more = "", True
    while more:
        page, more = read(await ask.ask(connection, request, {"prefix": prefix, "after": after, "limit": PAGE}))
        yield page
        more = more and bool(page)
        after = name_of(page[-1]) if page else after
