"""``delayd groups``: how far the consumers of each group are, asked of the realtime servers."""

from collections.abc import AsyncIterator

import click

from delayd.errors import BadArgument, DelaydError
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.frame import HeadValue
from delayd.wire.listings import GroupInfo, read_groups
from delayd.wire.requests import RequestType

from . import ask
from .listing import show
from .offers import offer_groups, offer_subjects
from .options import (
    confirm,
    examples,
    format_option,
    meta_option,
    secret_data_option,
    secret_of,
    secret_option,
    yes_option,
)
from .table import Cell, Column, Kind

COSTS = "what it has not acknowledged is never delivered to it, and retention may remove it"
PAGE = 1_000  # Groups asked for at once: an answer takes a few milliseconds of the server.
COLUMNS = (
    Column("subject"),
    Column("group"),
    Column("waiting", Kind.NUMBER),
    Column("outstanding", Kind.NUMBER),
    Column("redelivering", Kind.NUMBER),
    Column("quarantined", Kind.NUMBER),
    Column("leaving", Kind.NUMBER, spare=True),
    Column("next", Kind.NUMBER, spare=True),
    Column("end", Kind.NUMBER, spare=True),
)


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "delayd groups",
        "delayd groups --subject orders.cancel",
        "delayd groups delete orders.cancel billing",
    ),
)
@meta_option
@click.option("--subject", metavar="NAME", shell_complete=offer_subjects, help="Groups of this subject only.")
@format_option
@click.pass_context
def groups(context: click.Context, meta: str, subject: str | None, form: str) -> None:
    """List consumer groups and their progress.

    `waiting` messages are due and were not pulled yet. `outstanding` messages were pulled and not acknowledged.
    `redelivering` messages came back and are offered again. `quarantined` messages can't be read because their file is
    damaged; the server's log names them. `leaving` messages are to come again later, or are dead letters, and their
    delay server has not taken them yet.

    When a server can't be asked, its groups are missing, and stderr says so.
    """
    if context.invoked_subcommand is None:
        show(COLUMNS, ask.run(lambda: _rows(meta, subject)), form)


@groups.command(
    epilog=examples(
        "delayd groups delete orders.cancel billing",
    )
)
@click.argument("subject", shell_complete=offer_subjects)
@click.argument("group", shell_complete=offer_groups)
@meta_option
@secret_option
@secret_data_option
@yes_option
def delete(subject: str, group: str, meta: str, secret_file: str | None, data: str, yes: bool) -> None:
    """Delete a consumer group.

    The group never gets the messages that it has not acknowledged. Delete a group that nobody uses any more, because
    the server keeps messages for it beyond their retention. A consumer that names the group later makes a new one,
    which begins at the earliest message that is kept. The command needs the cluster's secret.
    """
    secret = secret_of(secret_file, data)
    confirm(f"{group} of {subject}: {COSTS}", yes)
    ask.run(lambda: _delete(meta, secret, subject, group))
    click.echo(f"group {group} of {subject} is deleted")


async def _delete(address: str, secret: Secret, subject: str, group: str) -> None:
    async with ask.meta(address) as connection:
        servers = [server for server in await ask.known_servers(connection, "realtime") if server.alive]
    for server in servers:
        async with ask.reached(server) as connection:
            await ask.prove(connection, secret)
            try:
                await ask.ask(connection, RequestType.DELETE_GROUP, {"subject": subject, "group": group})
            except BadArgument:
                continue
            return
    raise BadArgument(f"no realtime server that lives has a group {group} of {subject}; see `delayd groups`")


async def _rows(address: str, subject: str | None) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, "realtime")
    found = [info for server in servers for info in await groups_of(server, subject)]
    return [_row(info) for info in sorted(found, key=lambda info: (info.subject, info.group))]


def _row(info: GroupInfo) -> tuple[Cell, ...]:
    counts = (info.end - info.next, info.outstanding, info.redelivering, info.quarantined, info.leaving)
    return (info.subject, info.group, *counts, info.next, info.end)


async def groups_of(server: ask.Known, subject: str | None) -> list[GroupInfo]:
    """The groups of a realtime server; stderr says when they can't be had."""
    found: list[GroupInfo] = []
    place = f"{server.host}:{server.port}"
    if not server.alive:
        click.echo(f"delayd: groups of {place} are missing: {server.silence}", err=True)
        return found
    try:
        async with ask.reached(server) as connection:
            async for page in _pages(connection, subject):
                found.extend(page)
    except DelaydError as error:
        click.echo(f"delayd: groups of {place} are missing: {error.message}", err=True)
    return found


async def _pages(connection: Connection, subject: str | None) -> AsyncIterator[list[GroupInfo]]:
    after: list[HeadValue] = ["", ""]
    more = True
    while more:
        answer = await ask.ask(connection, RequestType.GROUPS, {"subject": subject, "after": after, "limit": PAGE})
        page, more = read_groups(answer)
        yield page
        more = more and bool(page)
        if page:
            after = [page[-1].subject, page[-1].group]
