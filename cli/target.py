"""``delayd target``: realtime servers as delay servers see them, and an operator's word on one that lost data."""

from functools import partial

import click

from delayd.errors import BadArgument, DelaydError
from delayd.secret import Secret
from delayd.wire.heads import need_str
from delayd.wire.requests import RequestType
from delayd.wire.targets import TargetInfo

from . import ask
from .exits import OK, TRY_LATER
from .listing import show
from .options import (
    LogId,
    confirm,
    examples,
    format_option,
    meta_option,
    secret_data_option,
    secret_of,
    secret_option,
    yes_option,
)
from .states import targets_of
from .table import Cell, Column, Kind

COLUMNS = (
    Column("delay_log_id"),
    Column("target_log_id"),
    Column("address", spare=True),
    Column("state"),
    Column("subjects", Kind.NUMBER),
    Column("waiting", Kind.NUMBER),
    Column("undecided", Kind.NUMBER),
    Column("alarm"),
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


@click.group(
    epilog=examples(
        "delayd target list",
        "delayd target accept c3d6a1cd20e12b0e",
    )
)
def target() -> None:
    """List realtime servers as delay servers see them, and decide on one that lost data or is gone for good."""


@target.command(
    "list",
    epilog=examples(
        "delayd target list",
        "delayd target list --format json",
    ),
)
@meta_option
@format_option
def list_(meta: str, form: str) -> None:
    """List the targets of all live delay servers.

    A target is a realtime server to which a delay server hands messages over. A target with an alarm gets no messages
    until somebody mends it or decides with `delayd target accept` or `delayd target lost`.
    """
    show(COLUMNS, [_row(server, info) for server, info in ask.run(lambda: _all(meta))], form)


@target.command(
    epilog=examples(
        "delayd target lost c3d6a1cd20e12b0e --data /var/lib/delayd",
    )
)
@click.argument("log_id", type=LogId(), metavar="LOG_ID")
@meta_option
@server_option
@secret_option
@secret_data_option
@yes_option
def lost(log_id: int, meta: str, server: int | None, secret_file: str | None, data: str, yes: bool) -> int:
    """Give a realtime server up for good.

    Messages that it may hold get the outcome IN_DOUBT and are not sent again. Its subjects wait for another realtime
    server: see `delayd server forget --routes` and `delayd route move`.
    """
    return _decide(RequestType.TARGET_LOST, log_id, meta, server, secret_of(secret_file, data), yes)


@target.command(
    epilog=examples(
        "delayd target accept c3d6a1cd20e12b0e --data /var/lib/delayd",
    )
)
@click.argument("log_id", type=LogId(), metavar="LOG_ID")
@meta_option
@server_option
@secret_option
@secret_data_option
@yes_option
def accept(log_id: int, meta: str, server: int | None, secret_file: str | None, data: str, yes: bool) -> int:
    """Go on with a realtime server that lost data, or with a delay server that was restored from a copy."""
    return _decide(RequestType.TARGET_ACCEPT, log_id, meta, server, secret_of(secret_file, data), yes)


def _decide(kind: RequestType, log_id: int, meta: str, server: int | None, secret: Secret, yes: bool) -> int:
    needs = [
        each
        for each, info in ask.run(lambda: _all(meta))
        if info.log_id == log_id
        and server in (None, each.log_id)
        and (info.alarm if kind is RequestType.TARGET_ACCEPT else info.state != "lost")
    ]
    if not needs:
        why = "has an alarm for" if kind is RequestType.TARGET_ACCEPT else "holds anything for"
        raise BadArgument(f"no live delay server {why} target {log_id:016x}; see `delayd target list`")
    word = "accepted" if kind is RequestType.TARGET_ACCEPT else "given up"
    confirm(f"Target {log_id:016x} is {word} at {len(needs)} delay servers: {COSTS[kind]}.", yes)
    code = OK
    for each in needs:
        try:
            answer = ask.run(partial(ask.decide, each, kind, {"log_id": log_id}, secret))
            click.echo(f"delay server {each.log_id:016x}: {need_str(answer, 'message')}")
        except DelaydError as error:
            click.echo(f"delayd: delay server {each.log_id:016x}: {error.message}", err=True)
            code = TRY_LATER
    return code


async def _all(address: str) -> list[tuple[ask.Known, TargetInfo]]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, "delay")
    return [(server, info) for server in servers for info in await targets_of(server)]


def _row(server: ask.Known, info: TargetInfo) -> tuple[Cell, ...]:
    numbers = (info.subjects, info.waiting, info.undecided)
    ids = (f"{server.log_id:016x}", f"{info.log_id:016x}")
    return (*ids, info.address or None, info.state, *numbers, info.alarm or None)
