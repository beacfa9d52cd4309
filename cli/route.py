"""``delayd route``: an operator's word on which realtime server has a subject.

Invariant: what stays at the old server is counted and told before a subject is moved away from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import click

from delayd.batch.names import is_reserved
from delayd.client.asking.ask import GroupAt, groups_at
from delayd.errors import BadArgument, NoRealtimeServer, ServerUnavailable
from delayd.net.connection import Connection
from delayd.wire.frame import Head
from delayd.wire.heads import need_str
from delayd.wire.meta import SUBJECTS_MAX, read_subject_page
from delayd.wire.requests import RequestType

from . import ask
from .exits import OK, TRY_LATER
from .operate import Operator, all_pages, decision_options, patiently
from .options import Group, LogId, offer_subjects


@click.group(cls=Group)
def route() -> None:
    """Decide which realtime server has a subject.

    $ delayd route move orders.cancel --to c3d6a1cd20e12b0e
    $ delayd route move --all-from c3d6a1cd20e12b0e
    """


@route.command()
@click.argument("subject", required=False, shell_complete=offer_subjects)
@click.option("--to", "log_id", type=LogId(), metavar="LOG_ID", help="The realtime server that gets it.")
@click.option("--all-from", "source", type=LogId(), metavar="LOG_ID", help="Move all subjects of this realtime server.")
@click.option("--strand", is_flag=True, help="With --all-from: also move subjects of which messages stay behind.")
@decision_options
def move(subject: str | None, log_id: int | None, source: int | None, strand: bool, operator: Operator) -> int:
    """Give a subject to another realtime server, or all subjects of a server to the others.

    Delay servers hear of the move within a heartbeat. They use the new server as soon as no message of the subject is
    in doubt at the old one. While the old server is away, the subject's messages wait until it comes back, or until
    you run `delayd target lost`.

    Messages that the old server has stay there, where consumers that start from now on do not find them: the command
    counts them. With --all-from it leaves subjects of which messages would stay behind where they are, unless you say
    --strand; exit code 4 says so.

    $ delayd route move orders.cancel --to c3d6a1cd20e12b0e --data /var/lib/delayd
    $ delayd route move --all-from c3d6a1cd20e12b0e --yes
    """
    if source is not None:
        if subject is not None or log_id is not None:
            raise BadArgument("--all-from moves all subjects to the other servers; name no subject and no --to")
        operator.confirm(f"New messages of all subjects of {source:016x} go to the other realtime servers.")
        return ask.run(lambda: _move_all(operator, source, strand))
    if subject is None or log_id is None:
        raise BadArgument("name a subject and the server that gets it (--to), or say --all-from")
    operator.confirm(
        f"New messages of {subject} go to {log_id:016x}: those that the old server has stay there, where consumers "
        "that start from now on do not find them; let consumers empty it first, see `delayd groups`."
    )
    click.echo(ask.run(lambda: _move(operator, subject, log_id)))
    return OK


async def _move(operator: Operator, subject: str, log_id: int) -> str:
    async with operator.at_meta() as connection:
        servers = await ask.known_servers(connection, "realtime")
        told = await _say(connection, subject, log_id)
        # Counted behind the move: whoever consumes on makes it less. Delay servers may still hand some messages over.
        for server in servers:
            if server.log_id != log_id and server.alive:
                for group in await groups_at([server], subject):
                    told += _stays(group)
        return told


async def _move_all(operator: Operator, source: int, strand: bool) -> int:
    async with operator.at_meta() as connection:
        servers = {server.log_id: server for server in await ask.known_servers(connection, "realtime")}
        others = sorted(log_id for log_id, server in servers.items() if server.alive and log_id != source)
        if not others:
            raise NoRealtimeServer("no other realtime server is alive; start one")
        routes = await _routes(connection)
        stays = await _all_that_stays(servers.get(source), strand)
        loads = {log_id: sum(each == log_id for _, each in routes) for log_id in others}
        mine = [name for name, log_id in routes if log_id == source]
        left = 0
        for name in mine:
            groups = [group for group in stays.get(name, ()) if _count(group)]
            if groups and not strand:
                left += 1
                for group in groups:
                    click.echo(f"{name} stays: {_count(group):,} messages for the group {group.group} are not consumed")
                continue
            to = min(others, key=lambda log_id: (loads[log_id], log_id))
            loads[to] += 1
            click.echo(await _say(connection, name, to) + "".join(_stays(group) for group in groups))
        click.echo(f"moved {len(mine) - left} of {len(mine)} subjects")
        if left:
            click.echo("delayd: let consumers empty the others first, or say --strand", err=True)
        return TRY_LATER if left else OK


async def _all_that_stays(server: ask.Known | None, strand: bool) -> dict[str, Sequence[GroupAt]]:
    """By subject, the groups of a server. Raises ServerUnavailable when nobody knows what it has, unless ``strand``."""
    listed = await groups_at([server], None) if server is not None else None
    if listed is None or listed.missing:
        if strand:
            return {}
        why = listed.missing[0] if listed is not None else "meta does not know it"
        raise ServerUnavailable(f"what lies at that server can't be counted ({why}); start it, or say --strand")
    return {name: list(groups) for name, groups in groupby(listed, lambda group: group.subject)}


async def _routes(connection: Connection) -> list[tuple[str, int]]:
    """All subjects that can be moved, and the server of each."""
    head: Head = {"prefix": "", "after": "", "limit": SUBJECTS_MAX}
    pages = all_pages(connection, RequestType.META_SUBJECTS, read_subject_page, lambda found: found[0], head)
    return [(name, log_id) async for page in pages for name, log_id in page if not is_reserved(name)]


async def _say(connection: Connection, subject: str, log_id: int) -> str:
    # Meta stores one word at a time.
    return need_str(await patiently(connection, RequestType.MOVE_ROUTE, {"subject": subject, "to": log_id}), "message")


def _count(group: GroupAt) -> int:
    """The messages that a group has not done with."""
    return group.waiting + group.info.outstanding + group.info.redelivering


def _stays(group: GroupAt) -> str:
    """A line about what stays behind for a group, if anything does."""
    if not (count := _count(group)):
        return ""
    server = group.server
    return (
        f"\n{count:,} messages for the group {group.group} stay at {server.log_id:016x} ({server.address}); "
        f"`delayd route move {group.subject} --to {server.log_id:016x}` lets consumers find them"
    )
