"""``delayd meta``, ``delayd delay``, ``delayd realtime`` run one server in this process; ``delayd up`` runs all of them
as its children.

Invariant: an option exists for every setting of the server's config and for nothing else, so a file and the command
line can say the same; the command line wins. No child outlives ``up``: told to stop, it ends them within STOP_S, or at
once at a second signal; and if it is killed itself, their stdin closes and they stop by themselves.

     meta starts ──ready──▶ delay and realtime start ──ready──▶ all serve ──SIGTERM, SIGINT──▶ stopping ──▶ exit
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import NamedTuple

import click

from delayd.address import META_LOCAL, PORT_MAX, TLS_VARIABLES, Access, Endpoint, Tls
from delayd.config import CONFIGS, Value, load_config
from delayd.errors import BadSetting

from .child import GATEWAY, Child, LineWriter, OnChild, called
from .gateway_command import gateway_options, gateway_port_option, gateway_words
from .main import BUG, INTERRUPTED, NOT_BALANCED, OK, USAGE, Programs
from .shared_options import DATA_VARIABLE, Command, bundle, examples

_EXAMPLES = {
    "meta": ("delayd meta --data /var/lib/delayd --host 10.0.0.5 --require-token",),
    "delay": (
        "delayd delay --data /var/lib/delayd --meta 10.0.0.5:7400 --host 10.0.0.6 --require-token",
        "delayd delay --config /etc/delayd.toml --retention-hours 168",
    ),
    "realtime": (
        "delayd realtime --data /var/lib/delayd --meta 10.0.0.5:7400 --host 10.0.0.7 --require-token",
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
    "admin_host": "address of the port below; on one that other machines reach it asks for a token, over TLS",
    "admin_port": "HTTP port of /metrics, /healthz and /readyz; 0 takes a free one, which the log names, -1 is none",
    "meta": "address of the meta server",
    "advertise_host": "name or address under which clients and other servers reach it",
    "secret_file": "file with the cluster's secret, mode 600; on another machine than meta's, a copy of meta's file",
    "tls_cert": "certificate of this server in PEM, with those between it and its authority; then all is over TLS",
    "tls_key": "its key in PEM, mode 600",
    "tls_ca": "who may sign the certificates of the servers that this one connects to, in PEM",
    "tls_client_ca": "who may sign the certificates of those who connect, in PEM; nobody else is let in then",
    "require_token": "serve nothing without a token or the cluster's secret, also while there is no token",
    "insecure": "let other machines in without tokens: whoever connects may do all that clients can",
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
    "replay_lag_bytes_max": "while more bytes of log have no checkpoint, far messages must wait; an eighth later all",
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
    "offer_durable_only": "give consumers a message behind its fsync only, which makes it later by as long",
    "lease_ms_max": "longest lease that a pull may ask for; schedule the rest of longer work as another message",
    "pull_bytes_max": "most bytes in one answer",
    # What stays.
    "segment_bytes": "size of one file of a log, which is removed as a whole",
    "retention_hours": "how long a sealed hour is kept after its end, for audits",
    "seal_hook": "command of the shell that gets a line of each new seal on its stdin",
    "retention_waits": "delete no hour while the command of seal_hook has not taken all seals",
    "retention_ms": "how long messages are kept at least, also when every group has acknowledged them",
}
_METAVARS = {
    "secret_file": "FILE",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "tls_ca": "FILE",
    "tls_client_ca": "FILE",
    "cluster_id": "HEX",
    "seal_hook": "COMMAND",
    "data": "DIR",
    "host": "HOST",
    "advertise_host": "HOST",
    "port": "PORT",
    "admin_host": "HOST",
    "admin_port": "PORT",
    "meta": "HOST:PORT",
}
_DEFAULTS = {
    "advertise_host": "that of --host",
    "secret_file": "cluster.secret in the data directory",
    "tls_cert": "no TLS",
    "tls_key": "no TLS",
    "tls_ca": "the authorities that this machine trusts",
    "tls_client_ca": "clients need no certificate",
    "cluster_id": "a random one",
    "seal_hook": "none",
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


STOP_S = 5.5  # A server has ended five seconds after its SIGTERM; half a second more, so that we hear of it.
# For meta, which stops last: it holds no messages and ends at once, unless the machine stands still for a moment.
STOP_LAST_S = 2.5
GIVE_BACK_S = 2.0  # The servers serve on for so long while the gateway gives back the messages that it holds.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
ROLES = ("meta", "delay", "realtime")
FIRST = "meta"  # Starts first, because the others need its address.
PORTS = len(ROLES) + 1  # The gateway takes the port behind those of the servers.

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # Where we reach a server that listens on all addresses.


class TlsFiles(NamedTuple):
    """The files for TLS of all servers, in PEM."""

    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start the servers; ``ports`` and ``admin_ports`` have the ports that the user asked for, by role."""

    command: Sequence[str]
    options: Sequence[str]
    registering: Sequence[str]  # Further options for servers that register with meta.
    ports: dict[str, int]
    admin_ports: dict[str, int]
    folders: Sequence[str]  # Where the data is; shown to the user.
    tls: Tls | None
    gateway: bool
    gateway_options: Sequence[str]


class Supervisor:
    """Runs the three servers, and a gateway beside them: it keeps nothing, so the servers go on without it."""

    def __init__(self, plan: Plan, out: LineWriter, errors: LineWriter) -> None:
        self._plan = plan
        self._roles = (*ROLES, GATEWAY) if plan.gateway else ROLES
        self._out = out
        self._errors = errors
        self._children: dict[str, Child] = {}
        self._tasks: dict[str, asyncio.Task[int]] = {}
        self._told_ready = False
        self._down: dict[str, int] = {}
        self._stop = asyncio.Event()
        self._at_once = False

    async def run(self) -> int:
        """Start all servers, keep them running until a signal comes, and stop them. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        self._start(FIRST)
        await self._stop.wait()
        return await self._end()

    def _start(self, role: str) -> None:
        child = Child(
            role,
            lambda port: self._command(role, port),
            self._say,
            self._errors,
            OnChild(line=self._echo, ready=self._on_ready, held=self._on_held, down=self._on_down),
        )
        self._children[role] = child
        task = asyncio.create_task(child.keep())
        task.add_done_callback(self._on_bug)
        self._tasks[role] = task

    def _command(self, role: str, port: int | None) -> list[str]:
        command = [*self._plan.command, role, "--exit-with-stdin"]
        if role != GATEWAY:
            command += self._plan.options
        wanted = self._plan.ports.get(role) if port is None else port
        if wanted is not None:
            command += ["--port", str(wanted)]
        if role in self._plan.admin_ports:
            command += ["--admin-port", str(self._plan.admin_ports[role])]
        meta = self._children[FIRST].ready
        if role == GATEWAY:
            tls = self._plan.tls
            command += ["--meta", self._meta_address(), *self._plan.gateway_options]
            if tls is not None:
                command += ["--tls-cert", tls.cert, "--tls-key", tls.key]
        elif role != FIRST and meta is not None:
            command += self._plan.registering
            command += ["--meta", str(from_here(meta.endpoint))]
        return command

    def _meta_address(self) -> str:
        """Meta's address, as clients are given it, with who signs its certificate: they may have no DELAYD_TLS_CA."""
        meta, tls = self._children[FIRST].ready, self._plan.tls
        if meta is None:
            raise AssertionError("the others start when meta serves")
        if tls is not None:
            ca = tls.ca or os.environ.get(TLS_VARIABLES["ca"], "")
            tls = Tls(ca=os.path.abspath(ca) if ca else "")
        return from_here(meta.endpoint)._replace(access=Access(tls)).url

    def _echo(self, line: str) -> None:
        self._out.write(f"{line}\n".encode())

    def _say(self, sentence: str) -> None:
        self._errors.write(f"delayd: {sentence}\n".encode())

    def _on_ready(self, child: Child) -> None:
        if child.role == FIRST and len(self._children) == 1 and not self._stop.is_set():
            for role in self._roles:
                if role != FIRST:
                    self._start(role)
        self._tell_ready()

    def _tell_ready(self) -> None:
        """Print the last ready line once each server serves, is held, or is down; it names those that do not serve."""
        away = [role for role in self._roles if role in self._down or self._is_held(role)]
        serving = [role for role, child in self._children.items() if child.ready is not None and role not in away]
        if self._told_ready or not serving or len(serving) + len(away) < len(self._roles):
            return
        self._told_ready = True
        self._echo(f"ready without {' and '.join(away)}" if away else "ready")
        for sentence in self._advice():
            self._say(sentence)

    def _advice(self) -> Iterator[str]:
        """Advice for the user who has just started the servers."""
        address = self._meta_address()
        scheme = "http" if self._plan.tls is None else "https"
        others = [
            f"{called(role)} at {f'{scheme}://' if role == GATEWAY else ''}{from_here(child.ready.endpoint)}"
            for role, child in self._children.items()
            if child.ready is not None and role != FIRST and role not in self._down and not child.held
        ]
        yield "; ".join((f"meta is at {address}, which producers and consumers are given", *others))
        yield f"the data is in {' and '.join(self._plan.folders)}"
        option = "" if address == META_LOCAL else f" --meta {shlex.quote(address)}"
        yield f"Ctrl-C here or `kill {os.getpid()}` stops all; to try it: delayd send hello world --in 5s{option}"

    def _on_held(self, child: Child) -> None:
        self._say(
            f"{called(child.role)} does not start, for its data is damaged; it waits until the file that its log "
            "above names is mended, and then starts by itself; the others go on"
        )
        self._tell_ready()

    def _is_held(self, role: str) -> bool:
        child = self._children.get(role)
        return child is not None and child.held

    def _on_down(self, child: Child, code: int) -> None:
        if child.role == GATEWAY:
            self._down[GATEWAY] = code
            self._say("the gateway can't start, its reason is above; the servers go on without it")
            self._tell_ready()
            return
        self._down[child.role] = code
        others = [role for role in self._children if role not in self._down and role != GATEWAY]
        if code != NOT_BALANCED:
            self._say(f"the {child.role} server can't start, its reason is above; all servers stop")
            self._stop.set()
        elif others:
            what = "stopped itself" if child.ready is not None else "does not start"
            self._say(
                f"the {child.role} server {what}, for its data is damaged or an fsync failed, and stays down until "
                f"`delayd up` is started anew; the {' and '.join(others)} server{'s' * (len(others) > 1)} "
                f"go{'es' * (len(others) == 1)} on; look at the disk and the file that its log above names"
            )
            self._tell_ready()
        else:
            self._say(
                f"the {child.role} server stopped itself on damaged data or a failed fsync, and no other runs; "
                "look at the disk and the file that its log names, then start `delayd up` again"
            )
            self._stop.set()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._at_once = True
            for child in self._children.values():
                child.kill()
        self._stop.set()

    def _on_bug(self, task: asyncio.Task[int]) -> None:
        # Nobody watches this child any more, so it must end.
        if not task.cancelled() and task.exception() is not None:
            self._stop.set()

    async def _end(self) -> int:
        # The gateway gives its messages back to servers that serve.
        if GATEWAY in self._tasks:
            self._children[GATEWAY].stop()
            await asyncio.wait([self._tasks[GATEWAY]], timeout=GIVE_BACK_S)
        # Meta stops last, because the others may need it while they stop.
        others_stopped = await self._stop_all([role for role in self._tasks if role != FIRST], STOP_S)
        first_stopped = await self._stop_all([FIRST], STOP_LAST_S)
        for task in self._tasks.values():
            await task  # Raises a bug in the code that watched it.
        return self._exit_code(stopped_by_themselves=others_stopped and first_stopped)

    async def _stop_all(self, roles: Sequence[str], limit_s: float) -> bool:
        for role in roles:
            self._children[role].stop()
        tasks = [self._tasks[role] for role in roles]
        late = (await asyncio.wait(tasks, timeout=limit_s))[1] if tasks else ()
        stopped = True
        for role in roles:
            if self._tasks[role] in late:
                # On a busy machine a server may have ended before this process hears of it.
                if self._children[role].runs:
                    self._say(f"{called(role)} did not stop within {limit_s:g} s and is killed")
                    stopped = False
                self._children[role].kill()
        return stopped

    def _exit_code(self, *, stopped_by_themselves: bool) -> int:
        codes = [code for role, code in self._down.items() if role != GATEWAY]
        if NOT_BALANCED in codes or any(map(self._is_held, ROLES)):
            return NOT_BALANCED
        if codes:
            return USAGE if USAGE in codes else BUG
        if self._at_once:
            return INTERRUPTED
        return OK if stopped_by_themselves else BUG


def from_here(endpoint: Endpoint) -> Endpoint:
    """Where a child on this machine reaches a server that listens there."""
    return endpoint._replace(host=_ANYWHERE.get(endpoint.host, endpoint.host))


tls_options = bundle(
    "tls",
    TlsFiles,
    click.option("--tls-cert", metavar="FILE", help="Certificate of all servers, in PEM.  [default: no TLS]"),
    click.option("--tls-key", metavar="FILE", help="Its key in PEM, mode 600.  [default: no TLS]"),
    click.option("--tls-ca", metavar="FILE", help="Who may sign it, in PEM.  [default: whom this machine trusts]"),
)

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
    type=click.IntRange(0, PORT_MAX - PORTS + 1),
    metavar="PORT",
    help="Port of meta; delay, realtime and the gateway take the next three; 0 takes free ones.  [default: 7400]",
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, PORT_MAX - len(ROLES) + 1),
    metavar="PORT",
    help="Port of meta's metrics; delay takes the next, realtime the one after; 0 takes free ones.  [default: none]",
)
@click.option("--host", metavar="HOST", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--advertise-host",
    metavar="HOST",
    help="Name or address under which others reach this machine.  [default: that of --host]",
)
@click.option("--require-token", is_flag=True, help="Serve nothing without a token or the cluster's secret.")
@click.option("--insecure", is_flag=True, help="Let other machines in without tokens.")
@tls_options
@click.option("--config", metavar="FILE", help="TOML file with settings below [meta], [delay] and [realtime].")
@click.option("--gateway/--no-gateway", default=True, show_default=True, help="Serve HTTP, too.")
@gateway_port_option
@gateway_options
@click.pass_obj
def up(
    programs: Programs,
    data: str | None,
    port: int | None,
    admin_port: int | None,
    host: str | None,
    advertise_host: str | None,
    config: str | None,
    tls: TlsFiles,
    gateway: bool,
    gateway_port: int | None,
    gateway_given: list[str],
    require_token: bool,
    insecure: bool,
) -> int:
    """Run all servers on this machine, and a gateway for HTTP.

    Each server prints its ready line. The line `ready` says that all servers serve. stderr says where the servers are
    and how to stop them.

    The gateway needs a web server: pip install 'delayd[gateway]'. Without that the servers run alone. It listens on
    this machine alone, whatever --host says, unless --gateway-host says otherwise.

    When a server dies, it is started again. A server that stopped itself on damaged data or a failed fsync is not
    started again, and the other servers go on.

    Ctrl-C or SIGTERM stops all servers within five seconds; a second one stops them at once. Acknowledged messages are
    safe either way.

    Exit codes: 0 stopped, 1 a server can't start or had to be killed, 2 a setting or the directory is wrong,
    3 a server stopped itself on damage or a failed fsync, 130 stopped at once by a second signal.

    $ delayd up
    $ delayd up --data /var/lib/delayd --config /etc/delayd.toml --admin-port 7410
    $ delayd up --data /var/lib/delayd --host 0.0.0.0 --advertise-host node-1.internal --require-token
    """
    common = {"data": data, "host": host, **tls._asdict()}
    flags = {"require_token": require_token, "insecure": insecure}
    given = {**common, "config": config}
    options = [
        word for name, value in given.items() if value is not None for word in (f"--{name.replace('_', '-')}", value)
    ]
    options += [f"--{name.replace('_', '-')}" for name, said in flags.items() if said]
    settings = {**common, **{name: True for name, said in flags.items() if said}}
    registering = [] if advertise_host is None else ["--advertise-host", advertise_host]
    folders = _folders(config, settings, advertise_host)
    missing = programs.gateway_lacks() if gateway else None
    if missing is not None:
        click.echo(f"delayd: no gateway runs, for it needs {missing}: pip install 'delayd[gateway]'", err=True)
    first = load_config(FIRST, config, _set(settings))
    ports = _by_role(port, (*ROLES, GATEWAY))
    if gateway_port is not None:
        ports[GATEWAY] = gateway_port
    secret = ["--secret-file", first.secret_file] if first.secret_file else ["--data", os.path.abspath(first.data)]
    plan = Plan(
        programs.command,
        options,
        registering,
        ports,
        _by_role(admin_port, ROLES),
        folders,
        first.access.tls,
        gateway=gateway and missing is None,
        gateway_options=[
            *secret,
            *gateway_words(require_token=first.require_token, insecure=first.insecure),
            *gateway_given,
        ],
    )
    return asyncio.run(_run(plan))


def _by_role(port: int | None, roles: Sequence[str]) -> dict[str, int]:
    """Neighbouring ports, or free ones."""
    return {} if port is None else {role: port + index if port else 0 for index, role in enumerate(roles)}


def _folders(config: str | None, given: Mapping[str, Value | None], advertise_host: str | None) -> list[str]:
    """The data directories of all servers, mostly one; BadSetting before any server starts that could not."""
    settings = _set(given)
    own: dict[str, Value] = {} if advertise_host is None else {"advertise_host": advertise_host}
    loaded = [load_config(role, config, settings if role == FIRST else settings | own) for role in ROLES]
    return sorted({os.path.abspath(each.data) for each in loaded})


def _set(given: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in given.items() if value is not None}


async def _run(plan: Plan) -> int:
    out, errors = (LineWriter(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    try:
        return await Supervisor(plan, out, errors).run()
    finally:
        for writer in (out, errors):
            writer.close(LAST_LINES_S)
