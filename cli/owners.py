"""``delayd route``, ``delayd slots`` and ``delayd target``: which realtime server has a subject, which delay server
judges a key, and realtime servers that lost data or are gone.

Invariant: what a decision leaves behind is counted and told: messages that stay at the old server of a subject, and
pending messages that keep an owner from giving up its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import click
import numpy as np

from delayd.batch.names import is_reserved
from delayd.client.asking import ask
from delayd.client.asking.ask import GroupAt, groups_at
from delayd.errors import BadArgument, DelaydError, NoRealtimeServer, NotReady, ServerUnavailable, UnknownServer
from delayd.machine.operating import counted
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.heads import need_str
from delayd.wire.meta import (
    SUBJECTS_MAX,
    SlotSet,
    Versions,
    need_versions,
    read_subject_page,
    slots_bytes,
    slots_of_text,
    slots_text,
    versions_bytes,
)
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import TargetInfo

from .listing import Cell, columns, show
from .main import OK, TRY_LATER
from .operate import Operator, all_pages, decision_options, run
from .servers import slot_owners, states_of, targets_of
from .shared_options import CommandGroup, LogIdParam, format_option, meta_option, offer_subjects


@click.group(cls=CommandGroup)
def route() -> None:
    """Decide which realtime server has a subject.

    $ delayd route move orders.cancel --to c3d6a1cd20e12b0e
    $ delayd route move --all-from c3d6a1cd20e12b0e
    """


@route.command("move")
@click.argument("subject", required=False, shell_complete=offer_subjects)
@click.option("--to", "log_id", type=LogIdParam(), metavar="LOG_ID", help="The realtime server that gets it.")
@click.option(
    "--all-from", "source", type=LogIdParam(), metavar="LOG_ID", help="Move all subjects of this realtime server."
)
@click.option("--strand", is_flag=True, help="With --all-from: also move subjects of which messages stay behind.")
@decision_options
def move_route(subject: str | None, log_id: int | None, source: int | None, strand: bool, operator: Operator) -> int:
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
        return run(lambda: _move_all(operator, source, strand))
    if subject is None or log_id is None:
        raise BadArgument("name a subject and the server that gets it (--to), or say --all-from")
    operator.confirm(
        f"New messages of {subject} go to {log_id:016x}: those that the old server has stay there, where consumers "
        "that start from now on do not find them; let consumers empty it first, see `delayd groups`."
    )
    click.echo(run(lambda: _move_route(operator, subject, log_id)))
    return OK


async def _move_route(operator: Operator, subject: str, log_id: int) -> str:
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
                    who = f"for the group {group.group}"
                    held = counted(_count(group), f"message {who} is|messages {who} are")
                    click.echo(f"{name} stays: {held} not consumed")
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
    return need_str(
        await ask.patiently(connection, RequestType.MOVE_ROUTE, {"subject": subject, "to": log_id}), "message"
    )


def _count(group: GroupAt) -> int:
    """The messages that a group has not done with."""
    return group.waiting + group.info.outstanding + group.info.redelivering


def _stays(group: GroupAt) -> str:
    """A line about what stays behind for a group, if anything does."""
    if not (count := _count(group)):
        return ""
    server, who = group.server, f"for the group {group.group}"
    return (
        f"\n{counted(count, f'message {who} stays|messages {who} stay')} at {server.log_id:016x} ({server.address}); "
        f"`delayd route move {group.subject} --to {server.log_id:016x}` lets consumers find them"
    )


SLOT_COLUMNS = columns("delay_log_id address:spare state count:number slots")


class SlotsParam(click.ParamType[SlotSet]):
    """A set of slots, as `delayd slots list` shows it."""

    name = "slots"

    def convert(self, value: str | SlotSet, param: click.Parameter | None, ctx: click.Context | None) -> SlotSet:
        """See click."""
        if not isinstance(value, str):
            return value
        try:
            return slots_of_text(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group(cls=CommandGroup)
def slots() -> None:
    """Show which delay server judges which keys, and give keys to another one.

    A subject and a key together fall into one of 1,024 slots. The delay server that owns the slot takes all messages
    with that key, so that no two of them can be pending.

    $ delayd slots list
    $ delayd slots move 0-511 --to da93bd41c4690cd6
    """


@slots.command("list")
@meta_option
@format_option
def list_slots(meta: str, form: str) -> None:
    """List the delay servers and the slots that they own.

    A slot gets its first owner when a message with a key of it is sent. `owner unknown`: meta began anew, or two
    servers claim these slots; `delayd status` says what it waits for.

    $ delayd slots list
    $ delayd slots list --format json
    """
    show(SLOT_COLUMNS, run(lambda: _listed_slots(meta)), form)


@slots.command("move")
@click.argument("slots", type=SlotsParam(), metavar="SLOTS")
@click.option(
    "--to", "log_id", type=LogIdParam(), required=True, metavar="LOG_ID", help="The delay server that gets them."
)
@click.option("--lost", is_flag=True, help="Their owner is gone for good: do not ask it.")
@decision_options
def move_slots(slots: SlotSet, log_id: int, lost: bool, operator: Operator) -> None:
    """Give slots to another delay server.

    The owner gives a slot up only when no message with a key of it is pending. While the slots move, sends with such
    keys wait.

    $ delayd slots move 0-511,600 --to da93bd41c4690cd6 --data /var/lib/delayd
    $ delayd slots move 7 --to da93bd41c4690cd6 --lost --yes
    """
    if lost:
        operator.confirm(
            "If the owner's directory ever serves again, two messages with one key may be pending: one there and one "
            f"at {log_id:016x}."
        )
    click.echo(run(lambda: _move_slots(operator, slots, log_id, lost)))


@slots.command()
@decision_options
def settle(operator: Operator) -> None:
    """Say that each delay server that owns keys has registered with a meta that began anew.

    Such a meta gives keys to nobody before it knows who owns them. It finds out by itself once all delay servers are
    back; say this when one of them is gone for good.

    $ delayd slots settle --data /var/lib/delayd
    $ delayd slots settle --yes
    """
    operator.confirm(
        "If a delay server that has not registered with this meta ever serves again, two messages with one key may be "
        "pending: one there and one elsewhere."
    )
    operator.tell_meta(RequestType.SETTLE_SLOTS, {})


async def _listed_slots(address: str) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        owners = await slot_owners(connection)
        servers = {server.log_id: server for server in await ask.known_servers(connection, "delay")}
    states = await states_of(list(servers.values()))
    rows: list[tuple[Cell, ...]] = []
    if owners.withheld.any():
        withheld = owners.withheld
        rows.append(("", "", "owner unknown", int(np.count_nonzero(withheld)), slots_text(withheld)))
    owning = set(np.unique(owners.log_ids).tolist()) - {0}
    for log_id in sorted(owning | servers.keys()):
        server = servers.get(log_id)
        own = owners.of(log_id)
        rows.append(
            (
                f"{log_id:016x}",
                "" if server is None else server.address,
                "forgotten" if server is None else states[log_id],
                int(np.count_nonzero(own)),
                slots_text(own),
            )
        )
    return rows


async def _move_slots(operator: Operator, slots: SlotSet, log_id: int, lost: bool) -> str:
    async with operator.at_meta() as connection:
        owners = await slot_owners(connection)
        servers = {server.log_id: server for server in await ask.known_servers(connection, "delay")}
        if log_id not in servers:
            raise UnknownServer(f"meta knows no delay server {log_id:016x}; see `delayd servers`")
        if not lost:
            if owners.members and log_id not in owners.members:
                # Nothing may be released before meta will give it on.
                raise NotReady(f"the other delay servers have not heard of {log_id:016x} yet; say it again in a moment")
            for owner in sorted(set(owners.log_ids.compress(slots).tolist()) - {0, log_id}):
                own = slots & owners.of(owner)
                # What counts are the versions that the owner saw when it gave the slots up.
                owners.versions[own] = (await _released(servers.get(owner), owner, own, operator.secret)).compress(own)
        answer = await ask.ask(
            connection,
            RequestType.MOVE_SLOTS,
            {"slots": slots_bytes(slots), "versions": versions_bytes(owners.versions), "to": log_id, "lost": lost},
        )
        return need_str(answer, "message")


async def _released(server: ask.Known | None, log_id: int, slots: SlotSet, secret: Secret | None) -> Versions:
    """Have the owner give slots up; returns their versions."""
    if server is None:
        raise ServerUnavailable(
            f"{log_id:016x} owns the slots {slots_text(slots)}, and meta does not know it any more; "
            "when it is gone for good, say --lost"
        )
    try:
        answer = await ask.decide(server, RequestType.RELEASE_SLOTS, {"slots": slots_bytes(slots)}, secret)
    except ServerUnavailable as error:
        raise ServerUnavailable(f"{error.message}; when it is gone for good, say --lost") from error
    return need_versions(answer)


TARGET_COLUMNS = columns(
    "delay_log_id target_log_id address:spare state subjects:number waiting:number undecided:number alarm"
)
COSTS = {
    RequestType.TARGET_LOST: (
        "messages that it may hold get the outcome IN_DOUBT and are never sent again; its log_id gets nothing "
        "any more, also when it comes back"
    ),
    RequestType.TARGET_ACCEPT: (
        "what it lost of delivered messages is not sent again; if the delay server is the one that was restored, what "
        "was delivered since its backup is delivered a second time, and what it took since then is lost"
    ),
}

server_option = click.option("--server", type=LogIdParam(), metavar="LOG_ID", help="One delay server only; else all.")


@click.group(cls=CommandGroup)
def target() -> None:
    """List realtime servers as delay servers see them, and decide on one that lost data or is gone for good.

    $ delayd target list
    $ delayd target accept c3d6a1cd20e12b0e
    """


@target.command("list")
@meta_option
@format_option
def list_targets(meta: str, form: str) -> None:
    """List the targets of all live delay servers.

    A target is a realtime server to which a delay server hands messages over. A target with an alarm gets no messages
    until somebody mends it or decides with `delayd target accept` or `delayd target lost`.

    $ delayd target list
    $ delayd target list --format json
    """
    show(TARGET_COLUMNS, [_target_row(server, info) for server, info in run(lambda: _all_targets(meta))], form)


@target.command()
@click.argument("log_id", type=LogIdParam(), metavar="LOG_ID")
@server_option
@decision_options
def lost(log_id: int, server: int | None, operator: Operator) -> int:
    """Give a realtime server up for good.

    Messages that it may hold get the outcome IN_DOUBT and are not sent again. Its subjects wait for another realtime
    server: see `delayd server forget --routes` and `delayd route move`.

    $ delayd target lost c3d6a1cd20e12b0e --data /var/lib/delayd
    """
    return _decide(RequestType.TARGET_LOST, log_id, server, operator)


@target.command()
@click.argument("log_id", type=LogIdParam(), metavar="LOG_ID")
@server_option
@decision_options
def accept(log_id: int, server: int | None, operator: Operator) -> int:
    """Go on with a realtime server that lost data, or with a delay server that was restored from a copy.

    $ delayd target accept c3d6a1cd20e12b0e --data /var/lib/delayd
    """
    return _decide(RequestType.TARGET_ACCEPT, log_id, server, operator)


def _decide(kind: RequestType, log_id: int, server: int | None, operator: Operator) -> int:
    needs = [
        each
        for each, info in run(lambda: _all_targets(operator.meta))
        if info.log_id == log_id
        and server in (None, each.log_id)
        and (info.alarm if kind is RequestType.TARGET_ACCEPT else info.state != "lost")
    ]
    if not needs:
        why = "has an alarm for" if kind is RequestType.TARGET_ACCEPT else "holds anything for"
        raise BadArgument(f"no live delay server {why} target {log_id:016x}; see `delayd target list`")
    word = "accepted" if kind is RequestType.TARGET_ACCEPT else "given up"
    at = counted(len(needs), "delay server|delay servers")
    operator.confirm(f"Target {log_id:016x} is {word} at {at}: {COSTS[kind]}.")
    code = OK
    for each in needs:
        try:
            answer = operator.tell(each, kind, {"log_id": log_id})
            click.echo(f"delay server {each.log_id:016x}: {need_str(answer, 'message')}")
        except DelaydError as error:
            click.echo(f"delayd: delay server {each.log_id:016x}: {error.message}", err=True)
            code = TRY_LATER
    return code


async def _all_targets(address: str) -> list[tuple[ask.Known, TargetInfo]]:
    async with ask.meta(address) as connection:
        return await targets_of(await ask.known_servers(connection, "delay"))


def _target_row(server: ask.Known, info: TargetInfo) -> tuple[Cell, ...]:
    numbers = (info.subjects, info.waiting, info.undecided)
    ids = (f"{server.log_id:016x}", f"{info.log_id:016x}")
    return (*ids, info.address or None, info.state, *numbers, info.alarm or None)
