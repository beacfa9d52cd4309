"""``delayd meta``, ``delayd delay``, ``delayd realtime``: one server in this process.

Invariant: an option exists for every setting of the server's config and for nothing else, so a file and the command
line can say the same; the command line wins.
"""

import os
from dataclasses import Field, fields

import click

from delayd.config import CONFIGS, Value, load_config
from delayd.errors import BadSetting

from .programs import Programs

_EXAMPLES = {
    "meta": "delayd meta --data /var/lib/delayd --port 7400",
    "delay": "delayd delay --data /var/lib/delayd --meta 127.0.0.1:7400",
    "realtime": "delayd realtime --config /etc/delayd.toml --lease-ms 30000",
}
_SUMMARIES = {
    "meta": "Run the meta server: who is alive, who serves what.",
    "delay": "Run a delay server: it holds messages until they are due.",
    "realtime": "Run a realtime server: it serves due messages to consumers.",
}
_TEXTS = {
    "data": "directory of all servers of this machine; each has a folder of its own in it",
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one, which the ready line names",
    "meta": "address of the meta server, host:port",
    "exit_with_stdin": "stop when stdin closes, as a child of a supervisor does",
}


def server_command(role: str) -> click.Command:
    """The command that runs one server of a role until it is told to stop."""

    def run(config: str | None, **options: Value | None) -> int:
        programs = click.get_current_context().find_object(Programs)
        if programs is None:
            raise AssertionError("a server is started through the launcher only")
        given = {name: value for name, value in options.items() if value is not None}
        settings = load_config(role, config, given)
        try:
            return programs.run_server[role](settings)
        except OSError as error:
            # A file in the way of the directory, or a place that takes no folders, such as /proc.
            if os.path.isdir(settings.folder):
                raise
            in_the_way = next((path for path in (settings.data, settings.folder) if os.path.isfile(path)), None)
            what = f"{in_the_way} is a file" if in_the_way else f"{settings.folder} can't be made ({error.strerror})"
            raise BadSetting(f"{what}; choose another directory with --data", setting="data") from error

    config = click.Option(
        ["--config"],
        metavar="FILE",
        help=f"TOML file with settings; those of this server may stand below [{role}].",
    )
    return click.Command(
        role,
        params=[config, *(_option(each) for each in fields(CONFIGS[role]))],
        callback=run,
        help=f"""{_SUMMARIES[role]}

        It prints `ready {role} HOST:PORT pid=PID` when it serves, and logs to stderr. SIGTERM stops it within five
        seconds; what it acknowledged is safe. It exits with 3 when a failed fsync or damaged data made it stop itself:
        then look at the disk before you start it again.

        Example: {_EXAMPLES[role]}""",
    )


def _option(setting: Field[Value]) -> click.Option:
    name = f"--{setting.name.replace('_', '-')}"
    text = _TEXTS.get(setting.name, "")
    if isinstance(setting.default, bool):
        return click.Option([name], is_flag=True, default=None, help=text)
    bounds = ""
    if "least" in setting.metadata and setting.name not in _TEXTS:
        bounds = f"{setting.metadata['least']} to {setting.metadata['most']}, "
    shown = f"{text}{' ' if text else ''}[{bounds}default {setting.default}]"
    kind = int if isinstance(setting.default, int) else str
    return click.Option([name], type=kind, default=None, metavar="N" if kind is int else "TEXT", help=shown)


meta = server_command("meta")
delay = server_command("delay")
realtime = server_command("realtime")
