"""``delayd servers``, ``delayd server`` and ``delayd clock``: what each server that meta knows may do now, and an
operator's word on it.

Invariant: a server that can't be asked is called so, and nothing is guessed of it.
"""

import asyncio
import time
from collections.abc import Sequence

import click

from delayd.errors import DelaydError, RequestFailed, RetryLater
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.heads import need_bool, need_instant
from delayd.wire.requests import RequestType
from delayd.wire.targets import TargetInfo, read_targets

from . import ask, draining
from .exits import OK, TRY_LATER
from .listing import show
from .operate import Operator, all_pages, decision_options, of_each, operator_options
from .options import (
    Command,
    Group,
    LogId,
    format_option,
    meta_option,
    secret_data_option,
    secret_of,
    secret_option,
)
from .progress import progress
from .table import Cell, Column, Kind

SERVERS = (
    Column("role"),
    Column("log_id"),
    Column("address"),
    Column("alive"),
    Column("state"),
    Column("seen_ago_ms", Kind.DURATION),
    Column("epoch", Kind.NAME),
    Column("pid", Kind.NAME),
)
CLOCKS = (
    Column("role"),
    Column("log_id"),
    Column("address"),
    Column("ahead_ms", Kind.DURATION),
    Column("believed"),
)
SERVES, FENCED, HELD, AWAY, SILENT = "serves", "fenced", "held", "away", "silent"
CORDONED = "cordoned"  # It serves, and gets no new messages.
# What a delay server says of a realtime server, the weightier first.
LOST, REFUSED = "lost", "refused"
COSTS = {
    "delay": "messages that only it holds are lost for good unless it comes back",
    "realtime": "its subjects stay its own and wait for it; with --routes they get another server",
}
COSTS_WITH_ROUTES = (
    "its subjects get another server when they are next used, consumers that start from now on do not find the "
    "messages that lie at it, and delay servers that hold messages for it need `delayd target lost`"
)


WHICH = "ADDRESS|LOG_ID"

role_option = click.option("--role", type=click.Choice(["delay", "realtime"]), help="Servers of this role only.")


@click.command(cls=Command)
@meta_option
@role_option
@format_option
def servers(meta: str, role: str | None, form: str) -> None:
    """List the servers that meta knows.

    A server that meta has not heard from for a whole lease is not alive: it keeps its subjects and gets no new ones.

    States: `serves`; `cordoned` (a delay server that gets no new messages); `away` (meta has not heard from it);
    `silent` (it can't be reached); `fenced`, `held`, `lost` or `refused` (it waits for an operator, and `delayd status`
    says why).

    $ delayd servers
    $ delayd servers --meta 10.0.0.5:7400 --role delay --format json
    """
    show(SERVERS, ask.run(lambda: _servers(meta, role)), form)


async def _servers(address: str, role: str | None) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection)
    states = await states_of(servers)
    return [_row(server, states[server.log_id]) for server in servers if role in (None, server.role)]


def _row(server: ask.Known, state: str) -> tuple[Cell, ...]:
    names = (server.role, f"{server.log_id:016x}", server.address)
    return (*names, server.alive, state, server.seen_ms_ago, server.epoch, server.pid)


@click.group(cls=Group)
def server() -> None:
    """Decide on a server that meta knows.

    $ delayd server drain 10.0.0.7:7401 --data /var/lib/delayd
    $ delayd server retire 10.0.0.7:7401 --data /var/lib/delayd
    $ delayd server forget delay 7c2f1a9e00b4d3f8
    """


@server.command()
@click.argument("role", type=click.Choice(["delay", "realtime"]))
@click.argument("log_id", type=LogId(), metavar="LOG_ID")
@click.option("--routes", is_flag=True, help="Give the subjects of a realtime server to other servers.")
@decision_options
def forget(role: str, log_id: int, routes: bool, operator: Operator) -> None:
    """Make meta forget a server that is gone for good, or was restored from a backup.

    A server that was restored from a backup begins again at an older epoch. Meta refuses that, as long as it knows the
    server; it accepts any epoch of a server that it has forgotten. Meta does not forget a server that is alive.

    $ delayd server forget delay 7c2f1a9e00b4d3f8
    $ delayd server forget realtime c3d6a1cd20e12b0e --routes --yes --data /var/lib/delayd
    """
    costs = COSTS_WITH_ROUTES if role == "realtime" and routes else COSTS[role]
    operator.confirm(f"Meta forgets {role} server {log_id:016x}: {costs}.")
    operator.tell_meta(RequestType.FORGET_SERVER, {"role": role, "log_id": log_id, "routes": routes})


@server.command()
@click.argument("which", metavar=WHICH)
@operator_options
def cordon(which: str, operator: Operator) -> None:
    """Send no new messages to a delay server.

    What it holds stays there and is delivered. Messages with keys that it owns still go there; `delayd server drain`
    moves the keys, too. The cordon lasts until `delayd server uncordon`, also over restarts.

    $ delayd server cordon 10.0.0.7:7401 --data /var/lib/delayd
    """
    click.echo(ask.run(lambda: _set_standing(operator, which, "cordoned")))


@server.command()
@click.argument("which", metavar=WHICH)
@operator_options
def uncordon(which: str, operator: Operator) -> None:
    """Send new messages to a delay server again.

    What a drain has moved away stays where it is. Keys that a drain has begun to move are served when it has ended:
    give `delayd server drain` first.

    $ delayd server uncordon 10.0.0.7:7401 --data /var/lib/delayd
    """
    click.echo(ask.run(lambda: _set_standing(operator, which, "serving")))


@server.command()
@click.argument("which", metavar=WHICH)
@operator_options
def drain(which: str, operator: Operator) -> int:
    """Move the pending messages of a delay server to the others, and the keys that it owns.

    The server is cordoned first. Messages that are due within some seconds stay and are delivered there, so the command
    waits for them. It may be stopped at any moment and given again: what was moved is moved.

    Exit codes: 0 the server holds nothing any more, 4 a server can't be reached: give it again.

    $ delayd server drain 10.0.0.7:7401 --data /var/lib/delayd
    """
    began, last = time.monotonic(), draining.Told(0, 0)

    with progress("messages", None) as advance:

        def told(now: draining.Told) -> None:
            nonlocal last
            advance(now.drained - last.drained, now.drained + now.left)
            last = now

        try:
            ask.run(lambda: draining.drain(operator, which, told))
        except (RetryLater, RequestFailed) as error:
            click.echo(f"delayd: {_rate(last.drained, began)}; give the command again: {error.message}", err=True)
            return TRY_LATER
        except KeyboardInterrupt:
            click.echo(f"delayd: stopped; {_rate(last.drained, began)}; give the command again to go on", err=True)
            raise
    click.echo(f"{_rate(last.drained, began)}; the server holds nothing any more")
    return OK


@server.command()
@click.argument("which", metavar=WHICH)
@decision_options
def retire(which: str, operator: Operator) -> None:
    """Let a drained delay server leave the cluster for good.

    It is refused as long as the server holds anything, and says what. Afterwards meta does not know the server, and
    never takes it again. Stop its process; its directory stays as it is, for audits.

    $ delayd server retire 10.0.0.7:7401 --data /var/lib/delayd
    """
    operator.confirm(f"{which} leaves the cluster for good: receipts that it gave lead nowhere from then on.")
    said = ask.run(lambda: draining.retire(operator, which))
    click.echo(f"{which} is retired: {said}. Stop its process; keep its directory as long as you want to audit it.")


async def _set_standing(operator: Operator, which: str, standing: str) -> str:
    async with operator.at_meta() as connection:
        server = draining.server_of(await ask.known_servers(connection, "delay"), which)
        return await draining.set_standing(connection, server.log_id, standing)


def _rate(drained: int, began: float) -> str:
    seconds = max(0.001, time.monotonic() - began)
    return f"moved {drained:,} messages in {seconds:.1f} s ({drained / seconds:,.0f}/s)"


@click.command(cls=Command)
@meta_option
@role_option
@click.option("--trust", is_flag=True, help="Tell the servers that their wall clocks are right.")
@secret_option
@secret_data_option
@format_option
def clock(meta: str, role: str | None, trust: bool, secret_file: str | None, data: str, form: str) -> None:
    """Compare the clocks of live servers with this machine's.

    When a wall clock jumps ahead by more than 5 s, its server believes it only after 30 s. After a reboot, a server
    believes its clock after 30 s, or as soon as meta's clock agrees. Until then a server counts the time that has
    passed.

    With --trust a server believes its clock at once, and hands out the messages that are due by it. A delay server
    whose log has instants ahead of a right clock, because its clock was wrong before, goes back to the right clock.
    --trust needs the cluster's secret.

    $ delayd clock
    $ delayd clock --role delay --trust --data /var/lib/delayd
    """
    secret = secret_of(secret_file, data) if trust else None
    show(CLOCKS, ask.run(lambda: _clocks(meta, role, secret)), form)


async def _clocks(address: str, role: str | None, secret: Secret | None) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, role)
    for server in servers:
        if not server.alive:
            place = f"{server.role} server at {server.address}"
            click.echo(f"delayd: the clock of the {place} is missing: {ask.silence(server)}", err=True)
    return [await _clock(server, secret) for server in servers if server.alive]


async def _clock(server: ask.Known, secret: Secret | None) -> tuple[Cell, ...]:
    async with ask.reached(server) as connection:
        if secret is not None:
            await ask.prove(connection, secret)
            await ask.ask(connection, RequestType.TRUST_CLOCK, {})
        before_ns = time.time_ns()
        status = await ask.ask(connection, RequestType.STATUS, {})
        halfway_ms = (before_ns + time.time_ns()) // 2_000_000
    ahead_ms = need_instant(status, "now_ms") - halfway_ms
    believed = need_bool(status, "clock_confirmed")
    return (server.role, f"{server.log_id:016x}", server.address, ahead_ms, believed)


async def states_of(servers: Sequence[ask.Known]) -> dict[int, str]:
    """By log_id: serves or cordoned; fenced, held, lost or refused, which waits for an operator; away or silent."""
    found = dict(zip([server.log_id for server in servers], await asyncio.gather(*map(_state, servers)), strict=True))
    asked = (SERVES, CORDONED, FENCED)
    reached = [server for server in servers if server.role == "delay" and found[server.log_id] in asked]
    seen = [info for _, info in await targets_of(reached)]
    for state in (REFUSED, LOST):
        found.update((info.log_id, state) for info in seen if info.state == state and info.log_id in found)
    return found


async def targets_of(servers: Sequence[ask.Known]) -> list[tuple[ask.Known, TargetInfo]]:
    """The targets of delay servers; stderr names those that can't be asked."""

    async def read(connection: Connection) -> list[TargetInfo]:
        pages = all_pages(connection, RequestType.TARGETS, read_targets, lambda info: info.log_id, {"after": 0})
        return [info async for page in pages for info in page]

    return [(server, info) for server, infos in await of_each(servers, "targets", read) for info in infos]


async def _state(server: ask.Known) -> str:
    if not server.alive:
        found = await ask.held_status(server)
        return AWAY if found is None else HELD if ask.is_held(found) else FENCED
    try:
        async with ask.reached(server) as connection:
            answer = await ask.ask(connection, RequestType.STATUS, {})
    except DelaydError:
        return SILENT
    if ask.is_held(answer):
        return HELD
    if need_bool(answer, "fenced"):
        return FENCED
    return CORDONED if server.cordoned else SERVES
