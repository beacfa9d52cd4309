"""``delayd server``: an operator's word on a server that meta knows."""

import click

from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.requests import RequestType, need_str

from . import ask
from .options import LogId, confirm, examples, meta_option, secret_data_option, secret_of, secret_option, yes_option

COSTS = {
    "delay": "messages that only it holds are lost for good unless it comes back",
    "realtime": "its subjects stay its own and wait for it; with --routes they get another server",
}
COSTS_WITH_ROUTES = (
    "its subjects get another server when they are next used, consumers that start from now on do not find the "
    "messages that lie at it, and delay servers that hold messages for it need `delayd target lost`"
)


@click.group(
    epilog=examples(
        "delayd server forget delay 7c2f1a9e00b4d3f8",
    )
)
def server() -> None:
    """Decide on a server that meta knows."""


@server.command(
    epilog=examples(
        "delayd server forget delay 7c2f1a9e00b4d3f8",
        "delayd server forget realtime c3d6a1cd20e12b0e --routes --yes --data /var/lib/delayd",
    )
)
@click.argument("role", type=click.Choice(["delay", "realtime"]))
@click.argument("log_id", type=LogId(), metavar="LOG_ID")
@click.option("--routes", is_flag=True, help="Give the subjects of a realtime server to other servers.")
@meta_option
@secret_option
@secret_data_option
@yes_option
def forget(role: str, log_id: int, routes: bool, meta: str, secret_file: str | None, data: str, yes: bool) -> None:
    """Make meta forget a server that is gone for good, or was restored from a backup.

    A server that was restored from a backup begins again at an older epoch. Meta refuses that, as long as it knows the
    server; it accepts any epoch of a server that it has forgotten. Meta does not forget a server that is alive.
    """
    secret = secret_of(secret_file, data)
    costs = COSTS_WITH_ROUTES if role == "realtime" and routes else COSTS[role]
    confirm(f"Meta forgets {role} server {log_id:016x}: {costs}.", yes)
    click.echo(ask.run(lambda: _forget(meta, secret, role, log_id, routes)))


async def _forget(address: str, secret: Secret, role: str, log_id: int, routes: bool) -> str:
    async with ask.meta(address) as connection:
        await ask.prove(connection, secret)
        head: Head = {"role": role, "log_id": log_id, "routes": routes}
        return need_str(await ask.ask(connection, RequestType.FORGET_SERVER, head), "message")
