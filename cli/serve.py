"""``delayd meta``, ``delayd delay``, ``delayd realtime``: one server in this process.

Invariant: an option exists for every setting of the server's config and for nothing else, so a file and the command
line can say the same; the command line wins.
"""

import os
from dataclasses import Field, fields

import click

from delayd.config import CONFIGS, Value, load_config
from delayd.errors import BadSetting

from .options import DATA_VARIABLE, examples
from .programs import Programs

_EXAMPLES = {
    "meta": ("delayd meta --data /var/lib/delayd --host 10.0.0.5",),
    "delay": (
        "delayd delay --data /var/lib/delayd --meta 10.0.0.5:7400 --host 10.0.0.6",
        "delayd delay --config /etc/delayd.toml --retention-hours 168",
    ),
    "realtime": (
        "delayd realtime --data /var/lib/delayd --meta 10.0.0.5:7400 --host 10.0.0.7",
        "delayd realtime --config /etc/delayd.toml --lease-ms 30000",
    ),
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
    "meta": "address of the meta server",
    "advertise_host": "name or address under which clients and other servers reach it",
    "secret_file": "the cluster's secret, a file with mode 600; on another machine than meta's, a copy of meta's",
    "exit_with_stdin": "stop when stdin closes, as a child of a supervisor does",
    # Settings of meta.
    "cluster_id": "hexadecimal id of a lost meta's cluster, whose place this one takes at its first start",
    "heartbeat_ms": "how often servers tell that they live",
    # What a delay server accepts.
    "horizon_days": "how far ahead a message may be due",
    "hour_rows_max": "messages of one hour",
    "group_bytes_max": "what one fsync of the message log makes durable",
    "intake_queue_bytes_max": "what waits for that fsync; producers are told to wait beyond it",
    "producer_keep_ms": "how long a batch that comes again is known",
    "free_bytes_far": "below this much free disk, messages of later hours are refused",
    "free_bytes_all": "below this much free disk, all messages are refused",
    # From log to log.
    "checkpoint_every_ms": "time between checkpoints, which bound what a restart replays",
    "checkpoint_bytes": "bytes of log between checkpoints",
    "replay_lag_bytes_max": "producers wait while more than this is not checkpointed",
    "load_ahead_ms": "how long before it begins an hour is loaded",
    "tail_bytes": "newest part of the log that is kept in memory",
    "source_cache_bytes": "memory for batches that are read for dispatch",
    # From a delay server to realtime servers.
    "frames_in_flight_max": "frames to one realtime server that are not acknowledged",
    "frame_rows_max": "messages of one frame",
    "frame_bytes_max": "bytes of one frame",
    "undecided_bytes_max": "bytes sent to one realtime server whose outcome is not durable",
    "target_silence_ms_max": "a realtime server that says nothing for so long, though asked, is connected to anew",
    "outcomes_flush_ms": "how often dispatch logs are fsynced",
    "dispatch_give_up_after_ms": "a message that is refused by name for so long is dead",
    # Settings for consumers.
    "lease_ms_max": "longest lease that a pull may ask for",
    "pull_bytes_max": "bytes of one answer",
    # What stays.
    "segment_bytes": "size of one file of a log",
    "retention_hours": "how long an hour is kept when all of it is sealed",
    "retention_ms": "how long messages are kept when every group has acknowledged them",
}
_METAVARS = {
    "secret_file": "FILE",
    "cluster_id": "HEX",
    "data": "DIR",
    "host": "HOST",
    "advertise_host": "HOST",
    "port": "PORT",
    "meta": "HOST:PORT",
}
_DEFAULTS = {
    "advertise_host": "that of --host",
    "secret_file": "cluster.secret in the data directory",
    "cluster_id": "a random one",
}
# Settings that servers have in common and that mean another thing to each.
_TEXTS_OF = {
    ("meta", "lease_ms"): "a server that was not heard of for so long gets no new subjects",
    ("realtime", "lease_ms"): "lease of a pull that names none",
    ("realtime", "free_bytes_all"): "below this much free disk, messages are not taken and wait at the delay servers",
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
        params=[config, *(_option(role, each) for each in fields(CONFIGS[role]))],
        callback=run,
        help=f"""{_SUMMARIES[role]}

        It prints `ready {role} HOST:PORT pid=PID` when it serves, and logs to stderr. SIGTERM stops it within five
        seconds; what it acknowledged is safe. It exits with 3 when a failed fsync or damaged data made it stop itself:
        then look at the disk before you start it again.""",
        epilog=examples(*_EXAMPLES[role]),
    )


def _option(role: str, setting: Field[Value]) -> click.Option:
    name = f"--{setting.name.replace('_', '-')}"
    text = _TEXTS_OF.get((role, setting.name)) or _TEXTS[setting.name]
    if isinstance(setting.default, bool):
        return click.Option([name], is_flag=True, default=None, help=text)
    bounds = ""
    # The text of a port says all.
    if "least" in setting.metadata and setting.name != "port":
        bounds = f"{setting.metadata['least']} to {setting.metadata['most']}, "
    kind = int if isinstance(setting.default, int) else str
    metavar = _METAVARS.get(setting.name, "N" if kind is int else "TEXT")
    default = _DEFAULTS.get(setting.name, setting.default)
    shown = f"{text} [{bounds}default {default}]"
    variable = DATA_VARIABLE if setting.name == "data" else None
    return click.Option([name], type=kind, default=None, envvar=variable, show_envvar=True, metavar=metavar, help=shown)


meta = server_command("meta")
delay = server_command("delay")
realtime = server_command("realtime")
