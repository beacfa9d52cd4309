"""``delayd up``: everything on this machine, in one command."""

import asyncio
import os
import sys
from collections.abc import Mapping

import click

from delayd.address import PORT_MAX
from delayd.config import Value, load_config

from .lines import LineWriter
from .options import DATA_VARIABLE, Command
from .programs import Programs
from .supervisor import FIRST, ROLES, Plan, Supervisor

LAST_LINES_S = 2.0  # For a slow terminal, when all servers have ended.


@click.command(cls=Command)
@click.option(
    "--data",
    envvar=DATA_VARIABLE,
    show_envvar=True,
    metavar="DIR",
    help="Directory of all servers; made if it is missing.  [default: delayd-data]",
)
@click.option(
    "--port",
    type=click.IntRange(0, PORT_MAX - len(ROLES) + 1),
    metavar="PORT",
    help="Port of meta; delay takes the next, realtime the one after; 0 takes free ones.  [default: 7400]",
)
@click.option("--host", metavar="HOST", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--advertise-host",
    metavar="HOST",
    help="Name or address under which others reach this machine.  [default: that of --host]",
)
@click.option("--config", metavar="FILE", help="TOML file with settings below [meta], [delay] and [realtime].")
@click.pass_obj
def up(
    programs: Programs,
    data: str | None,
    port: int | None,
    host: str | None,
    advertise_host: str | None,
    config: str | None,
) -> int:
    """Run all servers on this machine.

    Each server prints its ready line. The line `ready` says that all servers serve. stderr says where the servers are
    and how to stop them.

    When a server dies, it is started again. A server that stopped itself on damaged data or a failed fsync is not
    started again, and the other servers go on.

    Ctrl-C or SIGTERM stops all servers within five seconds; a second one stops them at once. Acknowledged messages are
    safe either way.

    Exit codes: 0 stopped, 1 a server can't start or had to be killed, 2 a setting or the directory is wrong,
    3 a server stopped itself on damage or a failed fsync, 130 stopped at once by a second signal.

    $ delayd up
    $ delayd up --data /var/lib/delayd --config /etc/delayd.toml
    $ delayd up --data /var/lib/delayd --host 0.0.0.0 --advertise-host node-1.internal
    """
    given = (("--data", data), ("--host", host), ("--config", config))
    options = [word for name, value in given if value is not None for word in (name, value)]
    ports = {} if port is None else {role: port + index if port else 0 for index, role in enumerate(ROLES)}
    registering = [] if advertise_host is None else ["--advertise-host", advertise_host]
    folders = _folders(config, {"data": data, "host": host}, advertise_host)
    return asyncio.run(_run(Plan(programs.command, options, registering, ports, folders)))


def _folders(config: str | None, given: Mapping[str, str | None], advertise_host: str | None) -> list[str]:
    """The data directories of all servers, mostly one; BadSetting before any server starts that could not."""
    settings: dict[str, Value] = {name: value for name, value in given.items() if value is not None}
    own: dict[str, Value] = {} if advertise_host is None else {"advertise_host": advertise_host}
    loaded = [load_config(role, config, settings if role == FIRST else settings | own) for role in ROLES]
    return sorted({os.path.abspath(each.data) for each in loaded})


async def _run(plan: Plan) -> int:
    out, errors = (LineWriter(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    try:
        return await Supervisor(plan, out, errors).run()
    finally:
        for writer in (out, errors):
            writer.close(LAST_LINES_S)
