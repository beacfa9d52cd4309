"""``delayd target``: realtime servers as delay servers see them, and an operator's word on one that lost data."""

import click

from delayd.errors import BadArgument, DelaydError
from delayd.wire.heads import need_str
from delayd.wire.requests import RequestType
from delayd.wire.scheduling import TargetInfo

from . import ask
from .exits import OK, TRY_LATER
from .listing import Cell, columns, show
from .operate import Operator, decision_options
from .options import Group, LogId, format_option, meta_option
from .servers import targets_of

COLUMNS = columns(
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

server_option = click.option("--server", type=LogId(), metavar="LOG_ID", help="One delay server only; else all.")


@click.group(cls=Group)
def target() -> None:
    """List realtime servers as delay servers see them, and decide on one that lost data or is gone for good.

    $ delayd target list
    $ delayd target accept c3d6a1cd20e12b0e
    """


@target.command("list")
@meta_option
@format_option
def list_(meta: str, form: str) -> None:
    """List the targets of all live delay servers.

    A target is a realtime server to which a delay server hands messages over. A target with an alarm gets no messages
    until somebody mends it or decides with `delayd target accept` or `delayd target lost`.

    $ delayd target list
    $ delayd target list --format json
    """
    show(COLUMNS, [_row(server, info) for server, info in ask.run(lambda: _all(meta))], form)


@target.command()
@click.argument("log_id", type=LogId(), metavar="LOG_ID")
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
@click.argument("log_id", type=LogId(), metavar="LOG_ID")
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
        for each, info in ask.run(lambda: _all(operator.meta))
        if info.log_id == log_id
        and server in (None, each.log_id)
        and (info.alarm if kind is RequestType.TARGET_ACCEPT else info.state != "lost")
    ]
    if not needs:
        why = "has an alarm for" if kind is RequestType.TARGET_ACCEPT else "holds anything for"
        raise BadArgument(f"no live delay server {why} target {log_id:016x}; see `delayd target list`")
    word = "accepted" if kind is RequestType.TARGET_ACCEPT else "given up"
    operator.confirm(f"Target {log_id:016x} is {word} at {len(needs)} delay servers: {COSTS[kind]}.")
    code = OK
    for each in needs:
        try:
            answer = operator.tell(each, kind, {"log_id": log_id})
            click.echo(f"delay server {each.log_id:016x}: {need_str(answer, 'message')}")
        except DelaydError as error:
            click.echo(f"delayd: delay server {each.log_id:016x}: {error.message}", err=True)
            code = TRY_LATER
    return code


async def _all(address: str) -> list[tuple[ask.Known, TargetInfo]]:
    async with ask.meta(address) as connection:
        return await targets_of(await ask.known_servers(connection, "delay"))


def _row(server: ask.Known, info: TargetInfo) -> tuple[Cell, ...]:
    numbers = (info.subjects, info.waiting, info.undecided)
    ids = (f"{server.log_id:016x}", f"{info.log_id:016x}")
    return (*ids, info.address or None, info.state, *numbers, info.alarm or None)
