"""``delayd server``: an operator's word on a server that meta knows."""

import time

import click

from delayd.errors import RequestFailed, RetryLater
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.heads import need_str
from delayd.wire.requests import RequestType

from . import ask, draining
from .exits import OK, TRY_LATER
from .options import LogId, confirm, examples, meta_option, secret_data_option, secret_of, secret_option, yes_option
from .progress import progress

COSTS = {
    "delay": "messages that only it holds are lost for good unless it comes back",
    "realtime": "its subjects stay its own and wait for it; with --routes they get another server",
}
COSTS_WITH_ROUTES = (
    "its subjects get another server when they are next used, consumers that start from now on do not find the "
    "messages that lie at it, and delay servers that hold messages for it need `delayd target lost`"
)


WHICH = "ADDRESS|LOG_ID"


@click.group(
    epilog=examples(
        "delayd server drain 10.0.0.7:7401 --data /var/lib/delayd",
        "delayd server retire 10.0.0.7:7401 --data /var/lib/delayd",
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


@server.command(epilog=examples("delayd server cordon 10.0.0.7:7401 --data /var/lib/delayd"))
@click.argument("which", metavar=WHICH)
@meta_option
@secret_option
@secret_data_option
def cordon(which: str, meta: str, secret_file: str | None, data: str) -> None:
    """Send no new messages to a delay server.

    What it holds stays there and is delivered. Messages with keys that it owns still go there; `delayd server drain`
    moves the keys, too. The cordon lasts until `delayd server uncordon`, also over restarts.
    """
    secret = secret_of(secret_file, data)
    click.echo(ask.run(lambda: _set_standing(meta, secret, which, "cordoned")))


@server.command(epilog=examples("delayd server uncordon 10.0.0.7:7401 --data /var/lib/delayd"))
@click.argument("which", metavar=WHICH)
@meta_option
@secret_option
@secret_data_option
def uncordon(which: str, meta: str, secret_file: str | None, data: str) -> None:
    """Send new messages to a delay server again.

    What a drain has moved away stays where it is. Keys that a drain has begun to move are served when it has ended:
    give `delayd server drain` first.
    """
    secret = secret_of(secret_file, data)
    click.echo(ask.run(lambda: _set_standing(meta, secret, which, "serving")))


@server.command(epilog=examples("delayd server drain 10.0.0.7:7401 --data /var/lib/delayd"))
@click.argument("which", metavar=WHICH)
@meta_option
@secret_option
@secret_data_option
def drain(which: str, meta: str, secret_file: str | None, data: str) -> int:
    """Move the pending messages of a delay server to the others, and the keys that it owns.

    The server is cordoned first. Messages that are due within some seconds stay and are delivered there, so the command
    waits for them. It may be stopped at any moment and given again: what was moved is moved.

    Exit codes: 0 the server holds nothing any more, 4 a server can't be reached: give it again.
    """
    secret = secret_of(secret_file, data)
    began, last = time.monotonic(), draining.Told(0, 0)

    with progress("messages", None) as advance:

        def told(now: draining.Told) -> None:
            nonlocal last
            advance(now.drained - last.drained, now.drained + now.left)
            last = now

        try:
            ask.run(lambda: draining.drain(meta, secret, which, told))
        except (RetryLater, RequestFailed) as error:
            click.echo(f"delayd: {_rate(last.drained, began)}; give the command again: {error.message}", err=True)
            return TRY_LATER
        except KeyboardInterrupt:
            click.echo(f"delayd: stopped; {_rate(last.drained, began)}; give the command again to go on", err=True)
            raise
    click.echo(f"{_rate(last.drained, began)}; the server holds nothing any more")
    return OK


@server.command(epilog=examples("delayd server retire 10.0.0.7:7401 --data /var/lib/delayd"))
@click.argument("which", metavar=WHICH)
@meta_option
@secret_option
@secret_data_option
@yes_option
def retire(which: str, meta: str, secret_file: str | None, data: str, yes: bool) -> None:
    """Let a drained delay server leave the cluster for good.

    It is refused as long as the server holds anything, and says what. Afterwards meta does not know the server, and
    never takes it again. Stop its process; its directory stays as it is, for audits.
    """
    secret = secret_of(secret_file, data)
    confirm(f"{which} leaves the cluster for good: receipts that it gave lead nowhere from then on.", yes)
    said = ask.run(lambda: draining.retire(meta, secret, which))
    click.echo(f"{which} is retired: {said}. Stop its process; keep its directory as long as you want to audit it.")


async def _set_standing(address: str, secret: Secret, which: str, standing: str) -> str:
    async with ask.meta(address) as connection:
        await ask.prove(connection, secret)
        server = draining.server_of(await ask.known_servers(connection, "delay"), which)
        return await draining.set_standing(connection, server.log_id, standing)


def _rate(drained: int, began: float) -> str:
    seconds = max(0.001, time.monotonic() - began)
    return f"moved {drained:,} messages in {seconds:.1f} s ({drained / seconds:,.0f}/s)"
