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
    "host": "address to listen on; the default lets no other machine in",
    "port": "port to listen on; 0 takes a free one, which the ready line names",
    "meta": "address of the meta server",
    "advertise_host": "name or address under which clients and other servers reach it",
    "secret_file": "file with the cluster's secret, mode 600; on another machine than meta's, a copy of meta's file",
    "exit_with_stdin": "stop when stdin closes, as the child of a supervisor should",
    # Settings of meta.
    "cluster_id": "hexadecimal id of the cluster of a lost meta server; this server takes its place at its first start",
    "heartbeat_ms": "how often servers tell meta that they are alive",
    # What a delay server accepts.
    "horizon_days": "how far ahead a message may be due",
    "hour_rows_max": "most messages that may be due in one hour, which is loaded whole at 32 bytes each",
    "group_bytes_max": "most bytes that one fsync of the message log makes durable",
    "intake_queue_bytes_max": "bytes that may wait for that fsync, at least a group; beyond that, producers must wait",
    "producer_keep_ms": "how long a batch that is sent again is recognised: longer than any client tries",
    "free_bytes_far": "below this much free disk, messages of later hours are refused; at least free_bytes_all",
    "free_bytes_all": "below this much free disk, all messages are refused; the rest is for pending ones",
    # From log to log.
    "checkpoint_every_ms": "time between checkpoints; a restart replays the log since the last one",
    "checkpoint_bytes": "most bytes of log between two checkpoints; a restart replays 1 GB in about a second",
    "replay_lag_bytes_max": "producers are told to wait while more bytes of log than this have no checkpoint",
    "load_ahead_ms": "how long before its beginning an hour is loaded",
    "tail_bytes": "bytes of the newest part of the log that are kept in memory, so that no disk is read for them",
    "source_cache_bytes": "memory for batches that are read for dispatch",
    # From a delay server to realtime servers.
    "frames_in_flight_max": "most frames on their way to one realtime server; times frame_bytes_max below 64 MiB",
    "frame_rows_max": "most messages in one frame",
    "frame_bytes_max": "most bytes in one frame",
    "undecided_bytes_max": "most bytes at a realtime server without durable outcomes; at least all its frames",
    "target_silence_ms_max": "a realtime server that answers nothing for this long is connected to anew",
    "outcomes_flush_ms": "how often dispatch logs are fsynced; later only means more to ask after a crash",
    "dispatch_give_up_after_ms": "a message that a realtime server has refused by name for this long is DEAD",
    # Settings for consumers.
    "lease_ms_max": "longest lease that a pull may ask for; schedule the rest of longer work as another message",
    "pull_bytes_max": "most bytes in one answer",
    # What stays.
    "segment_bytes": "size of one file of a log, which is removed as a whole",
    "retention_hours": "how long a sealed hour is kept after its end, for audits",
    "retention_ms": "how long messages are kept at least, also when every group has acknowledged them",
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
    (
        "meta",
        "lease_ms",
    ): "a server silent for this long gets no new subjects; at least 3 heartbeats",
    ("realtime", "lease_ms"): "lease of a pull that names no lease",
    (
        "realtime",
        "free_bytes_all",
    ): "below this much free disk, the server takes no messages; they wait at the delay servers",
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
        ["--config"], metavar="FILE", help=f"TOML file with settings; those of this server may stand below [{role}]."
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


def setting_text(role: str, name: str) -> str:
    """What a setting of a server is: the help of its option, and its row in docs/operations.md."""
    return _TEXTS_OF.get((role, name)) or _TEXTS[name]


def _option(role: str, setting: Field[Value]) -> click.Option:
    name = f"--{setting.name.replace('_', '-')}"
    text = setting_text(role, setting.name)
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
