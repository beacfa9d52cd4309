"""Servers and routes as fields of heads, on both sides of a connection to meta (docs/protocol.md, Meta).

Invariant: every answer fits one head, whatever was asked within these limits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from delayd.address import HOST_BYTES_MAX, PORT_MAX, host_fault
from delayd.batch.names import check_subject
from delayd.errors import BadRequest
from delayd.machine.operating import LogLimit
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    is_u64,
    need_bool,
    need_int,
    need_ints,
    need_list,
    need_map,
    need_maps,
    need_str,
    need_strs,
    need_u32,
    need_u64,
)

# One request or answer names at most this many: 550 KB of a head if all names have the maximal length.
SUBJECTS_MAX = 2_000
SERVERS_MAX = 1_000  # Servers that meta knows: 400 KB of a head.
ROLES = ("delay", "realtime")

log = logging.getLogger(__name__)
limited = LogLimit(log)


@dataclass(frozen=True, slots=True)
class Registered:
    """How a server describes itself."""

    role: str
    log_id: int
    host: str
    port: int
    epoch: int
    pid: int
    place: int = 0  # Where its folder is, see delayd.machine.identity; 0: not known.

    def to_head(self) -> Head:
        """As the head of REGISTER."""
        return {
            "role": self.role,
            "log_id": self.log_id,
            "host": self.host,
            "port": self.port,
            "epoch": self.epoch,
            "pid": self.pid,
            "place": self.place,
        }


class ServerInfo(NamedTuple):
    """A server as meta sees it."""

    server: Registered
    alive: bool
    seen_ms_ago: int
    heard: bool = True  # Whether it has registered in this life of meta; otherwise its address is only remembered.
    cordoned: bool = False  # A delay server to which no new messages go, by an operator's word.

    def to_head(self) -> Head:
        """As one item of `servers`."""
        own: Head = {"alive": self.alive, "seen_ms_ago": self.seen_ms_ago, "heard": self.heard}
        return {**self.server.to_head(), **own, "cordoned": self.cordoned}


class Routes(NamedTuple):
    """The answer of ROUTES: the realtime server of each subject, those servers, and subjects that have none."""

    routes: Mapping[str, int]
    servers: Sequence[ServerInfo]
    unrouted: Sequence[str]

    def to_head(self) -> Head:
        """As the head of the answer."""
        return {"routes": dict(self.routes), "servers": servers_head(self.servers), "unrouted": list(self.unrouted)}


class Move(NamedTuple):
    """A subject that an operator moved to another server; numbers rise."""

    number: int
    subject: str
    log_id: int


class Cordons(NamedTuple):
    """The delay servers that take no new messages, cordoned and retired ones, and those that are alive and do.

    When there are none of the former, nobody is named.
    """

    closed: frozenset[int]
    takes: frozenset[int]

    def to_head(self) -> dict[str, HeadValue]:
        """As fields of the answer of REGISTER."""
        return {"cordoned": [*sorted(self.closed)], "takes": [*sorted(self.takes)]}


def read_cordons(head: Head) -> Cordons:
    """Read these fields; meta of an earlier version has none."""
    if "cordoned" not in head:
        return Cordons(frozenset(), frozenset())
    return Cordons(frozenset(need_ints(head, "cordoned")), frozenset(need_ints(head, "takes")))


class SubjectPage(NamedTuple):
    """The answer of SUBJECTS: names and log_ids, in order of name."""

    subjects: Sequence[tuple[str, int]]
    more: bool

    def to_head(self) -> Head:
        """As the head of the answer."""
        return {"subjects": [[name, log_id] for name, log_id in self.subjects], "more": self.more}


def servers_head(servers: Iterable[ServerInfo]) -> list[HeadValue]:
    """The field `servers` of an answer."""
    return [server.to_head() for server in servers]


def read_registered(head: Head) -> Registered:
    """Read how a server describes itself; BadRequest names a field that is not valid."""
    role = need_str(head, "role")
    if role not in ROLES:
        raise BadRequest(f"role is {role!r} and must be one of {', '.join(ROLES)}", field="role")
    return Registered(
        role,
        need_u64(head, "log_id"),
        need_host(head),
        need_int(head, "port", 1, PORT_MAX),
        need_int(head, "epoch", 1),
        need_u32(head, "pid"),
        need_u64(head, "place") if "place" in head else 0,
    )


def need_host(head: Head) -> str:
    """The field `host`: a name or an address that a connection can be tried to."""
    host = need_str(head, "host", HOST_BYTES_MAX)
    fault = host_fault(host)
    if fault is not None:
        raise BadRequest(f"host is {host!r}, and nobody could reach this server there, for {fault}", field="host")
    return host


def read_servers(head: Head) -> list[ServerInfo]:
    """Read the field `servers` of an answer; an item that is not valid is left out and logged."""
    servers: list[ServerInfo] = []
    for each in need_maps(head, "servers"):
        try:
            servers.append(_server(each))
        except BadRequest as error:
            limited.warning("server_left_out", "server_left_out reason=%r", error.message)
    return servers


def _server(head: Head) -> ServerInfo:
    alive, heard = need_bool(head, "alive"), need_bool(head, "heard")
    cordoned = need_bool(head, "cordoned") if "cordoned" in head else False
    return ServerInfo(read_registered(head), alive, need_int(head, "seen_ms_ago"), heard, cordoned)


def read_routes(head: Head) -> Routes:
    """The answer of ROUTES."""
    routes = need_map(head, "routes")
    return Routes(
        {subject: need_u64(routes, subject) for subject in routes}, read_servers(head), need_strs(head, "unrouted")
    )


def moves_head(moves: Iterable[Move]) -> list[HeadValue]:
    """The field `moves` of an answer to REGISTER."""
    return [list(move) for move in moves]


def read_moves(head: Head) -> list[Move]:
    """The field `moves` of an answer to REGISTER."""
    moves: list[Move] = []
    for item in need_list(head, "moves"):
        match item:
            case [number, str(subject), log_id] if is_u64(number) and is_u64(log_id):
                check_subject(subject.encode())
                moves.append(Move(number, subject, log_id))
            case _:
                raise BadRequest("moves has an item that is no number, name and log_id", field="moves")
    return moves


def read_subject_page(head: Head) -> SubjectPage:
    """The answer of SUBJECTS."""
    subjects: list[tuple[str, int]] = []
    for item in need_list(head, "subjects"):
        match item:
            case [str(name), log_id] if is_u64(log_id):
                subjects.append((name, log_id))
            case _:
                raise BadRequest("subjects has an item that is no pair of a name and a log_id", field="subjects")
    return SubjectPage(subjects, need_bool(head, "more"))
