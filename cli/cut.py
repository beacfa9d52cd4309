"""``delayd cut``: all servers of the cluster keep one moment while a command copies them (docs/backup.md).

Invariant: a cut ends with its connection, so the command learns in any case whether the servers kept the moment until
it had ended.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import click

from delayd.config import parse_address
from delayd.errors import DelaydError, NotReady
from delayd.secret import Secret
from delayd.wire.requests import RequestType

from . import ask, cutting
from .cutting import Running
from .exits import OK, TRY_LATER
from .options import Command, meta_option, secret_data_option, secret_of, secret_option
from .times import instant_text

LOOK_S = 5.0  # How often each server is asked whether it is still there.


@click.command(cls=Command)
@click.argument("command", nargs=-1, required=True)
@secret_data_option
@meta_option
@secret_option
def cut(command: Sequence[str], data: str, meta: str, secret_file: str | None) -> int:
    """Cut all servers of the cluster at one moment, and run COMMAND while they keep it.

    COMMAND runs `delayd backup DIR --data DIR --cut` for each data directory, on whichever machine it is. The servers
    serve on meanwhile. Backups of one cut fit each other; they can be restored in any order.

    Exit codes: that of COMMAND; 4 a server can't be reached, or did not keep the moment until COMMAND had ended.

    $ delayd cut -- delayd backup /mnt/backup --data /var/lib/delayd --cut
    $ delayd cut -- sh backup-all.sh
    """
    secret = secret_of(secret_file, data)
    return ask.run(lambda: _cut(command, meta, secret))


async def _cut(command: Sequence[str], meta: str, secret: Secret) -> int:
    async with AsyncExitStack() as stack:
        servers: list[Running] = []
        host, port = parse_address(meta)
        asked = await stack.enter_async_context(ask.connected(host, port, "meta server"))
        for known in await ask.known_servers(asked):
            name = f"{known.role} server {known.log_id:016x}"
            if not known.alive:
                click.echo(f"delayd: the {name} is away: leave it stopped until its directory is copied", err=True)
                continue
            servers.append(Running(known.role, name, await stack.enter_async_context(ask.reached(known))))
        servers.append(Running("meta", "meta server", asked))
        for server in servers:
            await ask.prove(server.connection, secret)
        moment_ms = time.time_ns() // 1_000_000
        fixed = await cutting.cut(servers, {"moment_ms": moment_ms})
        if not fixed.held:
            raise NotReady("the servers were too slow to be cut at one moment; try again", retry_after_ms=1_000)
        click.echo(f"{len(servers)} servers are cut at {instant_text(moment_ms)}", err=True)
        return await _run(command, servers)


async def _run(command: Sequence[str], servers: Sequence[Running]) -> int:
    try:
        child = await asyncio.create_subprocess_exec(*command)
    except OSError as error:
        raise click.UsageError(f"{command[0]} can't be run: {error.strerror}") from error
    ended = asyncio.create_task(child.wait())
    lost = set[str]()
    while not ended.done():
        await asyncio.wait([ended], timeout=LOOK_S)
        for server in servers:
            try:
                await ask.ask(server.connection, RequestType.PING, {})
            except DelaydError as error:
                if server.name not in lost:
                    click.echo(f"delayd: the cut of the {server.name} has ended: {error.message}", err=True)
                lost.add(server.name)
    code = ended.result()
    return TRY_LATER if lost else OK if code == 0 else code if code > 0 else 128 - code
