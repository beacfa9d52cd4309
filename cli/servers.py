"""``delayd servers``: what meta knows of the servers."""

import click

from . import ask
from .listing import show
from .options import examples, format_option, meta_option
from .states import states_of
from .table import Cell, Column, Kind

COLUMNS = (
    Column("role"),
    Column("log_id"),
    Column("address"),
    Column("alive"),
    Column("state"),
    Column("seen_ago_ms", Kind.DURATION),
    Column("epoch", Kind.NAME),
    Column("pid", Kind.NAME),
)


@click.command(
    epilog=examples(
        "delayd servers",
        "delayd servers --meta 10.0.0.5:7400 --role delay --format json",
    )
)
@meta_option
@click.option("--role", type=click.Choice(["delay", "realtime"]), help="Servers of this role only.")
@format_option
def servers(meta: str, role: str | None, form: str) -> None:
    """List the servers that meta knows.

    A server that meta has not heard from for a whole lease is not alive: it keeps its subjects and gets no new ones.

    States: `serves`; `cordoned` (a delay server that gets no new messages); `away` (meta has not heard from it);
    `silent` (it can't be reached); `fenced`, `held`, `lost` or `refused` (it waits for an operator, and `delayd status`
    says why).
    """
    show(COLUMNS, ask.run(lambda: _servers(meta, role)), form)


async def _servers(address: str, role: str | None) -> list[tuple[Cell, ...]]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection)
    states = await states_of(servers)
    return [_row(server, states[server.log_id]) for server in servers if role in (None, server.role)]


def _row(server: ask.Known, state: str) -> tuple[Cell, ...]:
    address = f"{server.host}:{server.port}"
    return (
        server.role,
        f"{server.log_id:016x}",
        address,
        server.alive,
        state,
        server.seen_ms_ago,
        server.epoch,
        server.pid,
    )
