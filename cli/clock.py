"""``delayd clock``: the servers' clocks beside this machine's, and an operator's word that they are right (rule T1)."""

import time

import click

from delayd.secret import Secret
from delayd.wire.heads import need_bool, need_instant
from delayd.wire.requests import RequestType

from . import ask
from .listing import show
from .options import examples, format_option, meta_option, secret_data_option, secret_of, secret_option
from .table import Cell, Column, Kind

COLUMNS = (
    Column("role"),
    Column("log_id"),
    Column("address"),
    Column("ahead_ms", Kind.DURATION),
    Column("believed"),
)


@click.command(
    epilog=examples(
        "delayd clock",
        "delayd clock --role delay --trust --data /var/lib/delayd",
    )
)
@meta_option
@click.option("--role", type=click.Choice(["delay", "realtime"]), help="Servers of this role only.")
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
    """
    secret = secret_of(secret_file, data) if trust else None
    show(COLUMNS, ask.run(lambda: _clocks(meta, role, secret)), form)


async def _clocks(address: str, role: str | None, secret: Secret | None) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, role)
    for server in servers:
        if not server.alive:
            place = f"{server.role} server at {server.host}:{server.port}"
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
    return (server.role, f"{server.log_id:016x}", f"{server.host}:{server.port}", ahead_ms, believed)
