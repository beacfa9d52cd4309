"""States: what each server that meta knows may do now, as the servers themselves and their peers say it.

Invariant: a server that can't be asked is called so, and nothing is guessed of it.
"""

import asyncio
from collections.abc import Sequence

import click

from delayd.errors import DelaydError
from delayd.wire.heads import need_bool
from delayd.wire.requests import RequestType
from delayd.wire.targets import TargetInfo, read_targets

from . import ask

SERVES, FENCED, HELD, AWAY, SILENT = "serves", "fenced", "held", "away", "silent"
CORDONED = "cordoned"  # It serves, and gets no new messages.
# What a delay server says of a realtime server, the weightier first.
LOST, REFUSED = "lost", "refused"


async def states_of(servers: Sequence[ask.Known]) -> dict[int, str]:
    """By log_id: serves or cordoned; fenced, held, lost or refused, which waits for an operator; away or silent."""
    found = dict(zip([server.log_id for server in servers], await asyncio.gather(*map(_state, servers)), strict=True))
    asked = (SERVES, CORDONED, FENCED)
    reached = [server for server in servers if server.role == "delay" and found[server.log_id] in asked]
    seen = [info for infos in await asyncio.gather(*map(targets_of, reached)) for info in infos]
    for state in (REFUSED, LOST):
        found.update((info.log_id, state) for info in seen if info.state == state and info.log_id in found)
    return found


async def targets_of(server: ask.Known) -> list[TargetInfo]:
    """The targets of a delay server; stderr says so when it can't be asked."""
    found: list[TargetInfo] = []
    try:
        async with ask.reached(server) as connection:
            after, more = 0, True
            while more:
                page, more = read_targets(await ask.ask(connection, RequestType.TARGETS, {"after": after}))
                found += page
                more = more and bool(page)
                after = page[-1].log_id if page else after
    except DelaydError as error:
        click.echo(f"delayd: targets of {server.host}:{server.port} are missing: {error.message}", err=True)
    return found


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
