"""Config: the settings of each server, as one frozen dataclass a server, from its defaults, a TOML file and the command
line.

Invariant: a configuration that exists is valid: every value has its type, lies in its range and agrees with the others;
otherwise BadSetting names the setting and what to do. The unit of a value is the end of its name.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import ClassVar

from delayd.address import (
    META_LOCAL,
    META_PORT,
    OPEN,
    PORT_MAX,
    Access,
    Endpoint,
    Tls,
    host_fault,
    read_address,
)
from delayd.batch.columns import BYTES_MAX as BATCH_BYTES_MAX
from delayd.batch.columns import ROWS_MAX as BATCH_ROWS_MAX
from delayd.batch.names import LEASE_MS_MAX
from delayd.errors import BadSetting

Value = str | int | bool

DATA_DEFAULT = "delayd-data"  # In the folder where the server is started, so that a first try touches no other place.
DELAY_PORT = META_PORT + 1
REALTIME_PORT = META_PORT + 2
GATEWAY_PORT = META_PORT + 3

# The wildcard as the resolver reads it too: one number or four parts, in any base.
_ZERO = re.compile(r"(0x)?0+(\.(0x)?0+){0,3}", re.IGNORECASE)

NO_PORT = -1
MIB = 1 << 20
GIB = 1 << 30
BYTES_UNBOUNDED = 1 << 46  # 64 TiB, beyond any disk: a larger size is a slip of the unit.
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS
HORIZON_DAYS_MAX = 2 * 366  # 17,568 schedule logs: one flush of all of them still takes seconds.
# With this many bytes of unanswered requests, a server reads no more from a connection.
CONNECTION_BYTES_MAX = 64 * MIB
COMMIT_BYTES_MAX = 64 * MIB  # The room in a group of a log (docs/formats/group.md).
HEARTBEATS_A_LEASE = 3  # Two lost or late heartbeats in a row do not make a server count as dead.


def _number(default: int, least: int, most: int) -> int:
    return field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The settings of every server."""

    role: ClassVar[str]

    data: str = DATA_DEFAULT  # The directory of all servers of this machine; each has a folder of its own in it.
    host: str = "127.0.0.1"  # Clients are not asked for a password, so other machines must be let in on purpose.
    port: int = _number(0, 0, PORT_MAX)  # 0 lets the system choose.
    # Where it is measured (docs/metrics.md). There is no such port unless it is asked for: a fixed one would be taken
    # already where two servers share a machine. On an address that other machines reach it has the TLS of this server.
    admin_host: str = "127.0.0.1"
    admin_port: int = _number(NO_PORT, NO_PORT, PORT_MAX)
    # The file with the cluster's secret; empty means cluster.secret in `data`, which is created if it is missing.
    secret_file: str = ""
    # Files in PEM: the certificate of this server with its key; who may sign those of the servers that it connects to,
    # and of those that connect to it. Without a certificate nothing is encrypted.
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_client_ca: str = ""
    require_token: bool = False  # Nothing is served without a token or the secret, also while there is no token.
    insecure: bool = False  # Other machines may connect, and whoever does may do all that clients can.
    exit_with_stdin: bool = False  # For a child process: it ends when the process at the other end of its stdin ends.

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(self.role, each, getattr(self, each.name))
        self._check_tls()
        self._check_address()
        self._check_open()
        self._check_relations()

    @property
    def access(self) -> Access:
        """How it lets others in, and how the servers of its cluster let it in: all over TLS, or none."""
        if not self.tls_cert:
            return OPEN
        return Access(Tls(self.tls_ca, self.tls_cert, self.tls_key, client_ca=self.tls_client_ca))

    @property
    def listens(self) -> Endpoint:
        """Where it listens; the system chooses the port for port 0."""
        return Endpoint(_bare(self.host), self.port, self.access)

    @property
    def admin(self) -> Endpoint | None:
        """Where it is measured; None: nowhere. Scrapers and probes of this machine need no TLS."""
        if self.admin_port == NO_PORT:
            return None
        endpoint = Endpoint(_bare(self.admin_host), self.admin_port)
        return endpoint if endpoint.is_here else endpoint._replace(access=self.access)

    @property
    def folder(self) -> str:
        """This server's own directory."""
        return os.path.join(self.data, self.role)

    def _check_tls(self) -> None:
        paired = bool(self.tls_cert) == bool(self.tls_key)
        self._need(paired, "tls_cert", "a certificate and its key go together: set tls_cert and tls_key, or neither")
        for name in ("tls_ca", "tls_client_ca"):
            alone = bool(getattr(self, name)) and not self.tls_cert
            self._need(not alone, name, "nothing is encrypted without tls_cert and tls_key: set them, too")

    def _check_open(self) -> None:
        """Refuse to serve other machines unless somebody has said on which terms."""
        if self.insecure:
            return
        if not (self.require_token or self.listens.is_here):
            what = f"{self.host} lets other machines in, and whoever reaches the port could send, take and cancel"
            raise _bad(
                self.role,
                "host",
                f"{what}; set require_token, and make tokens with `delayd token create`, or set insecure when only"
                " those who may do all this can reach it",
            )
        admin = self.admin
        # Programs of delayd send their token over TLS alone; a scraper sends it however it is told to.
        if admin is not None and not admin.is_here and not (self.require_token and self.tls_cert):
            what = f"{self.admin_host} lets other machines in, and whoever reaches the port reads names of subjects"
            raise _bad(
                self.role,
                "admin_host",
                f"{what}; set require_token, tls_cert and tls_key, so that it asks for a token over TLS, or set"
                " insecure when only those who may read them can reach it",
            )

    def _check_address(self) -> None:
        """Refuse an address that nobody could use."""

    def _check_relations(self) -> None:
        """Refuse values that contradict each other."""

    def _need(self, holds: bool, name: str, fix: str) -> None:
        if not holds:
            raise _bad(self.role, name, f"{getattr(self, name)} does not go with the other settings; {fix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaConfig(ServerConfig):
    """The meta server."""

    role: ClassVar[str] = "meta"

    port: int = _number(META_PORT, 0, PORT_MAX)
    lease_ms: int = _number(5_000, 100, HOUR_MS)  # A dead server still gets new subjects for at most this long.
    heartbeat_ms: int = _number(1_000, 20, HOUR_MS)  # Each heartbeat is one small frame for each server.
    cluster_id: str = ""  # The id of a lost meta that this one replaces; read at the first start only. Empty: draw one.

    @property
    def wanted_cluster_id(self) -> int:
        """The cluster to take over, 0 for a new one."""
        return int(self.cluster_id, 16) if self.cluster_id else 0

    def _check_relations(self) -> None:
        hexadecimal = not self.cluster_id or re.fullmatch(r"[0-9a-fA-F]{1,16}", self.cluster_id) is not None
        self._need(hexadecimal, "cluster_id", "write the 16 hexadecimal digits that its servers name in their logs")
        least = HEARTBEATS_A_LEASE * self.heartbeat_ms
        self._need(
            self.lease_ms >= least,
            "lease_ms",
            f"a lease lasts at least {HEARTBEATS_A_LEASE} heartbeats: set it to {least} or lower heartbeat_ms",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteringConfig(ServerConfig):
    """A server that tells meta where it is."""

    meta: str = META_LOCAL
    advertise_host: str = ""  # The host by which clients and servers reach it; empty: `host`.

    @property
    def meta_endpoint(self) -> Endpoint:
        """Where meta listens; it lets this server in as this one lets others in."""
        return parse_address(self.meta)._replace(access=self.access)

    def advertised(self, bound: Endpoint) -> Endpoint:
        """Where others reach a server that listens there: what meta is told."""
        return bound._replace(host=_bare(self.advertise_host)) if self.advertise_host else bound

    def _check_address(self) -> None:
        if not self.advertise_host and listens_everywhere(self.host):
            raise _bad(
                self.role,
                "host",
                f"{self.host} is every address of this machine and none that others can connect to; say with "
                "advertise_host under which name or address they reach it",
            )
        if listens_everywhere(self.advertise_host):
            what = f"{self.advertise_host} is none that others can connect to; give this machine's name or address"
            raise _bad(self.role, "advertise_host", what)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig(RegisteringConfig):
    """The delay server."""

    role: ClassVar[str] = "delay"

    port: int = _number(DELAY_PORT, 0, PORT_MAX)

    # Which messages are accepted.
    horizon_days: int = _number(HORIZON_DAYS_MAX, 1, HORIZON_DAYS_MAX)
    hour_rows_max: int = _number(40_000_000, 1, 40_000_000)  # 1.3 GB of wheel in memory, 32 B a row.
    group_bytes_max: int = _number(16 * MIB, 1, COMMIT_BYTES_MAX)  # A larger group makes its first batch wait longer.
    intake_queue_bytes_max: int = _number(
        64 * MIB, 1, 4 * GIB
    )  # Four groups: more only turns a slow disk into latency.
    producer_keep_ms: int = _number(DAY_MS, MINUTE_MS, YEAR_MS)  # Longer than any client retries (rule I1).
    free_bytes_far: int = _number(2 * GIB, 0, BYTES_UNBOUNDED)  # Below it far messages are refused (rule L8).
    # Below it all messages are refused: the rest is for pending messages.
    free_bytes_all: int = _number(512 * MIB, 0, BYTES_UNBOUNDED)

    # From the message log to the schedule logs.
    # Bounds what a restart replays when few messages come in.
    checkpoint_every_ms: int = _number(MINUTE_MS, 10, HOUR_MS)
    checkpoint_bytes: int = _number(GIB, 1, 64 * GIB)  # The same when many do: a replay of 1 GB takes about a second.
    # Two checkpoints: producers must wait while one is overdue.
    replay_lag_bytes_max: int = _number(2 * GIB, 1, 64 * GIB)
    load_ahead_ms: int = _number(
        5 * MINUTE_MS, 500, HOUR_MS
    )  # 40 M rows load within a minute; the rest is for slow disks.
    # The newest groups stay in memory: messages with short delays never read the disk.
    tail_bytes: int = _number(64 * MIB, 0, 16 * GIB)
    source_cache_bytes: int = _number(256 * MIB, MIB, 64 * GIB)  # Batches read for dispatch, each with many due rows.

    # To the realtime servers.
    frames_in_flight_max: int = _number(4, 1, 8)  # More frames lose throughput to queues between the two processes.
    frame_rows_max: int = _number(8_000, 1, BATCH_ROWS_MAX)  # Gathered in one bounded piece of work.
    frame_bytes_max: int = _number(8 * MIB, 1, BATCH_BYTES_MAX - MIB)  # All of it may become one batch.
    # A realtime server may have to keep this many bytes of this server's batches as in doubt (rule H2).
    undecided_bytes_max: int = _number(64 * MIB, 1, GIB)
    # Stops of some seconds are waited out; a frame of 8 MiB takes less.
    target_silence_ms_max: int = _number(10_000, 500, HOUR_MS)
    # How often dispatch logs are synced; syncing late only makes the window larger.
    outcomes_flush_ms: int = _number(50, 1, 10_000)
    # How long a target may refuse a row by name before the row is DEAD (rule S3).
    dispatch_give_up_after_ms: int = _number(DAY_MS, 100, YEAR_MS)

    # How much is kept, and for how long.
    segment_bytes: int = _number(256 * MIB, 4096, 64 * GIB)
    retention_hours: int = _number(72, 1, 100 * 366 * 24)  # Sealed hours are kept for a long weekend's audit.
    seal_hook: str = ""  # A command of the shell that gets a line of each new seal; empty: none.
    retention_waits: bool = False  # Whether hours are kept while the command has not taken all seals.

    def _check_relations(self) -> None:
        self._need(
            self.replay_lag_bytes_max >= self.checkpoint_bytes,
            "replay_lag_bytes_max",
            f"or producers wait for no checkpoint: set it to checkpoint_bytes ({self.checkpoint_bytes}) or more",
        )
        self._need(
            self.intake_queue_bytes_max >= self.group_bytes_max,
            "intake_queue_bytes_max",
            f"the queue holds at least one group: set it to group_bytes_max ({self.group_bytes_max}) or more",
        )
        self._need(
            self.free_bytes_far >= self.free_bytes_all,
            "free_bytes_far",
            f"far messages are refused first: set it to free_bytes_all ({self.free_bytes_all}) or more",
        )
        self._need(
            bool(self.seal_hook) or not self.retention_waits,
            "retention_waits",
            "it waits for the command of seal_hook: set that, too",
        )
        in_flight = self.frames_in_flight_max * self.frame_bytes_max
        self._need(
            self.undecided_bytes_max >= in_flight,
            "undecided_bytes_max",
            f"frames in flight are undecided: set it to frames_in_flight_max * frame_bytes_max ({in_flight}) or more",
        )
        self._need(
            in_flight < CONNECTION_BYTES_MAX,
            "frames_in_flight_max",
            f"a target whose disk is slow must still read the PING behind them: frames_in_flight_max * frame_bytes_max "
            f"({in_flight}) is to be less than {CONNECTION_BYTES_MAX}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeConfig(RegisteringConfig):
    """The realtime server."""

    role: ClassVar[str] = "realtime"

    port: int = _number(REALTIME_PORT, 0, PORT_MAX)

    # Bounds what a restart indexes when few messages come in.
    checkpoint_every_ms: int = _number(MINUTE_MS, 10, HOUR_MS)
    checkpoint_bytes: int = _number(256 * MIB, 1, 64 * GIB)  # The same when many do: a restart indexes 1 GB a second.
    # The newest batches stay in memory: consumers that keep up read no disk.
    tail_bytes: int = _number(64 * MIB, 0, 16 * GIB)
    # Without it consumers get messages that are written, before their fsync (rule L2).
    offer_durable_only: bool = False
    lease_ms: int = _number(MINUTE_MS, 100, LEASE_MS_MAX)  # The lease of a pull that names none.
    lease_ms_max: int = _number(LEASE_MS_MAX, 100, LEASE_MS_MAX)
    # The limit of one answer, as large as one batch may be.
    pull_bytes_max: int = _number(BATCH_BYTES_MAX, 4096, BATCH_BYTES_MAX)
    # Below this dispatches are refused and wait (rule L8). It is far below the delay server's limit: both may share a
    # disk, and the delay server's pending messages must still be taken when it refuses sends.
    free_bytes_all: int = _number(64 * MIB, 0, BYTES_UNBOUNDED)
    segment_bytes: int = _number(256 * MIB, 4096, 64 * GIB)
    retention_ms: int = _number(72 * HOUR_MS, 1_000, 100 * YEAR_MS)  # After every group has acknowledged (rule Q3).

    def _check_relations(self) -> None:
        self._need(
            self.lease_ms <= self.lease_ms_max,
            "lease_ms",
            f"it is what a pull gets that names none: set it to lease_ms_max ({self.lease_ms_max}) or less",
        )


Config = MetaConfig | DelayConfig | RealtimeConfig

CONFIGS: Mapping[str, type[MetaConfig] | type[DelayConfig] | type[RealtimeConfig]] = MappingProxyType(
    {"meta": MetaConfig, "delay": DelayConfig, "realtime": RealtimeConfig}
)


def load_config(role: str, path: str | None = None, overrides: Mapping[str, Value] = MappingProxyType({})) -> Config:
    """The defaults, then the TOML file, then `overrides`, such as options of the command line.

    In the file, settings stand at the top, or below `[meta]`, `[delay]`, `[realtime]` for one role; the tables of other
    roles are not read. Raises BadSetting, also for a setting that the role does not have.
    """
    kind = CONFIGS.get(role)
    if kind is None:
        raise BadSetting(f"there is no role {role!r}; choose one of {', '.join(CONFIGS)}", setting="role")
    given = {} if path is None else _read(role, path)
    given.update(overrides)
    known = {each.name for each in fields(kind)}
    for name in given:
        if name not in known:
            owners = [other for other, their in CONFIGS.items() if name in {each.name for each in fields(their)}]
            if owners:
                where = " or ".join(f"[{owner}]" for owner in owners)
                raise _bad(role, name, f"is a setting of the {' and '.join(owners)} server; put it below {where}")
            raise _bad(role, name, f"is not a setting; take it out or choose one of {', '.join(sorted(known))}")
    build: Callable[..., Config] = kind  # The dataclass checks the type of each value itself.
    return build(**given)


def describe(config: ServerConfig) -> str:
    """One line of `key=value` pairs, for the log at start."""
    pairs = [f"{each.name}={getattr(config, each.name)}" for each in fields(config)]
    return " ".join([f"role={config.role}", *pairs])


def parse_address(text: str, setting: str = "meta") -> Endpoint:
    """Host and port of ``host:port``; an IPv6 host stands in brackets. BadSetting names `setting`."""
    address = read_address(text)
    if isinstance(address, str):
        raise BadSetting(f"{setting} can't be used: {address}", setting=setting)
    return address


def listens_everywhere(host: str) -> bool:
    """Whether a host is the wildcard, which is no address to connect to."""
    if _ZERO.fullmatch(host):
        return True
    try:
        return ipaddress.ip_address(_bare(host)).is_unspecified
    except ValueError:
        return False


def _bare(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")


def _read(role: str, path: str) -> dict[str, Value]:
    try:
        with open(path, "rb") as file:
            document: dict[str, Value | dict[str, Value]] = tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise BadSetting(f"{path} is not TOML ({error}); correct it", setting="config") from error
    except OSError as error:
        raise BadSetting(
            f"{path} can't be read ({error.strerror}); name a file that this user may read", setting="config"
        ) from error
    given: dict[str, Value] = {}
    own: dict[str, Value] = {}
    for name, value in document.items():
        if not isinstance(value, dict):
            given[name] = value
        elif name == role:
            own = value
        elif name not in CONFIGS:
            raise BadSetting(f"{path} has a table [{name}]; tables are {', '.join(CONFIGS)}", setting=name)
    return {**given, **own}


def _check(role: str, setting: Field[Value], value: object) -> None:
    kind = type(setting.default)
    # A bool is an int in Python, but `port = true` is a mistake all the same.
    if type(value) is not kind:
        names = {int: "a whole number", str: "a text", bool: "true or false"}
        raise _bad(role, setting.name, f"{value!r} is not {names[kind]}; write it so")
    if isinstance(value, str) and not value and setting.default:
        raise _bad(role, setting.name, "is empty; leave it out for its default")
    if setting.name == "meta" and isinstance(value, str):
        parse_address(value)
    if setting.name in ("host", "advertise_host", "admin_host") and isinstance(value, str) and value:
        fault = None if listens_everywhere(value) else host_fault(_bare(value))
        if fault is not None:
            raise _bad(role, setting.name, f"{value!r} is no host name or address, for {fault}; correct it")
    if "least" in setting.metadata and isinstance(value, int):
        least, most = setting.metadata["least"], setting.metadata["most"]
        if not least <= value <= most:
            raise _bad(role, setting.name, f"{value} is out of range; choose one within {least} and {most}")


def _bad(role: str, name: str, what: str) -> BadSetting:
    return BadSetting(f"{name} of the {role} server: {what}", setting=name)
