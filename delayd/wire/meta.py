"""Servers, routes and slots as fields of heads, on both sides of a connection to meta (docs/protocol.md, Meta).

Invariant: every answer fits one head, whatever was asked within these limits.

A set of slots of keys (docs/keys.md, Owners; rule I4) is `SLOTS_BYTES` bytes: slot s is bit s & 7 of byte s >> 3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.address import OPEN, Access, Endpoint
from delayd.batch.names import check_subject
from delayd.errors import BadRequest
from delayd.machine.operating import LogLimit
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    U64_MAX,
    is_u64,
    need_bool,
    need_bytes,
    need_int,
    need_ints,
    need_list,
    need_map,
    need_maps,
    need_str,
    need_strs,
    need_u32,
    need_u64,
    read_row,
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
    endpoint: Endpoint  # Where it listens.
    epoch: int
    pid: int
    place: int = 0  # Where its folder is, see delayd.machine.identity; 0: not known.

    def to_head(self) -> Head:
        """As the head of REGISTER."""
        return {
            "role": self.role,
            "log_id": self.log_id,
            "host": self.endpoint.host,
            "port": self.endpoint.port,
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


def read_registered(head: Head, access: Access = OPEN) -> Registered:
    """Read how a server describes itself, and note how this side is let in there; BadRequest names a field that is not
    valid.
    """
    role = need_str(head, "role")
    if role not in ROLES:
        raise BadRequest(f"role is {role!r} and must be one of {', '.join(ROLES)}", field="role")
    return Registered(
        role,
        need_u64(head, "log_id"),
        read_row(Endpoint, head)._replace(access=access),
        need_int(head, "epoch", 1),
        need_u32(head, "pid"),
        need_u64(head, "place") if "place" in head else 0,
    )


def read_servers(head: Head, access: Access = OPEN) -> list[ServerInfo]:
    """Read the field `servers` of an answer; an item that is not valid is left out and logged. All servers of a cluster
    let this side in as meta does: ``access``.
    """
    servers: list[ServerInfo] = []
    for each in need_maps(head, "servers"):
        try:
            servers.append(_server(each, access))
        except BadRequest as error:
            limited.warning("server_left_out", "server_left_out reason=%r", error.message)
    return servers


def _server(head: Head, access: Access) -> ServerInfo:
    alive, heard = need_bool(head, "alive"), need_bool(head, "heard")
    cordoned = need_bool(head, "cordoned") if "cordoned" in head else False
    return ServerInfo(read_registered(head, access), alive, need_int(head, "seen_ms_ago"), heard, cordoned)


def read_routes(head: Head, access: Access = OPEN) -> Routes:
    """The answer of ROUTES; ``access`` as for `read_servers`."""
    routes = need_map(head, "routes")
    servers, unrouted = read_servers(head, access), need_strs(head, "unrouted")
    return Routes({subject: need_u64(routes, subject) for subject in routes}, servers, unrouted)


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


SLOTS = 1_024  # Each slot is moved as a whole, so the share of a server can be set to a thousandth.
SLOTS_BYTES = SLOTS // 8
VERSIONS = np.dtype("<u4")  # How often a slot was given to a server, by an operator or for the first time.

MEMBERS_MAX = 500  # Delay servers that may own slots: their names fit a plain head beside the versions.
OWNER_UNKNOWN = "meta does not know which delay server owns these keys; `delayd status` says what it waits for"
VERSION_MAX = 1 << 31  # Far below the limit of the column: meta goes on from the highest one that it is told.

SlotSet = NDArray[np.bool_]
"""bool[SLOTS]: which slots are meant."""


NO_SLOTS: SlotSet = np.zeros(SLOTS, np.bool_)
Versions = NDArray[np.uint32]
"""uint32[SLOTS]: the version of each slot."""


NO_MEMBERS: frozenset[int] = frozenset()


class SlotOwners(NamedTuple):
    """Which delay server owns each slot, and the version of each slot: it rises with each change of the owner."""

    log_ids: NDArray[np.uint64]  # uint64[SLOTS]; 0: nobody owns it, 2^64 - 1: two servers claim it.
    versions: Versions
    withheld: SlotSet = NO_SLOTS  # Slots that meta gives to nobody, because it does not know who owns them.
    members: frozenset[int] = NO_MEMBERS  # The delay servers that may own slots.

    @classmethod
    def nobody(cls) -> SlotOwners:
        """No slot has an owner."""
        return cls(np.zeros(SLOTS, np.uint64), np.zeros(SLOTS, np.uint32))

    def of(self, log_id: int) -> SlotSet:
        """The slots of one server."""
        own: SlotSet = self.log_ids == np.uint64(log_id)
        return own

    def to_head(self) -> dict[str, HeadValue]:
        """As the answer of SLOTS."""
        owners: list[HeadValue] = []
        for log_id in np.unique(self.log_ids).tolist():
            if log_id not in (0, U64_MAX):
                owners.append([log_id, slots_bytes(self.of(log_id))])
        return {
            "owners": owners,
            "versions": versions_bytes(self.versions),
            "withheld": slots_bytes(self.withheld),
            "members": members_head(self.members),
        }


class SlotClaims(NamedTuple):
    """What a delay server keeps durably about slots, as it tells meta with each registration."""

    owned: SlotSet
    versions: Versions  # Of a slot that it owns: since when. Of another one: at which version it gave it up; else 0.
    peers: frozenset[int] = NO_MEMBERS  # The delay servers that may own slots; its own log when it may own some.

    def to_head(self) -> dict[str, HeadValue]:
        """As fields of REGISTER."""
        return {
            "slots": slots_bytes(self.owned),
            "slot_versions": versions_bytes(self.versions),
            "slot_peers": members_head(self.peers),
        }


def read_slot_owners(head: Head) -> SlotOwners:
    """The answer of SLOTS; BadRequest when it is none."""
    found = SlotOwners.nobody()
    taken = np.zeros(SLOTS, np.bool_)
    for item in need_list(head, "owners"):
        match item:
            case [log_id, bytes(data)] if is_u64(log_id) and len(data) == SLOTS_BYTES:
                slots = slots_of_bytes(data)
                if (taken & slots).any():
                    raise BadRequest("owners names a slot twice", field="owners")
                taken |= slots
                found.log_ids[slots] = log_id
            case _:
                raise BadRequest("owners has an item that is no log_id and set of slots", field="owners")
    found.versions[:] = need_versions(head)
    return found._replace(withheld=need_slots(head, "withheld"), members=need_members(head, "members"))


def read_slot_claims(head: Head) -> SlotClaims:
    """The fields of REGISTER; BadRequest when they are none."""
    versions = need_versions(head, "slot_versions")
    if versions.max() > VERSION_MAX:
        raise BadRequest(f"slot_versions has {versions.max()}; no slot was given so often", field="slot_versions")
    return SlotClaims(need_slots(head, "slots"), versions, need_members(head, "slot_peers"))


def members_head(log_ids: Iterable[int]) -> list[HeadValue]:
    """A field that names delay servers."""
    return [*sorted(log_ids)]


def need_members(head: Head, name: str) -> frozenset[int]:
    """A field that names delay servers; BadRequest when it is none."""
    log_ids = need_ints(head, name)
    if len(log_ids) > MEMBERS_MAX:
        raise BadRequest(f"{name} names {len(log_ids)} servers; at most {MEMBERS_MAX} may own slots", field=name)
    return frozenset(log_ids)


def need_versions(head: Head, name: str = "versions") -> Versions:
    """A field with the version of each slot; BadRequest when it is none."""
    data = need_bytes(head, name)
    if len(data) != SLOTS * VERSIONS.itemsize:
        raise BadRequest(f"{name} has {len(data)} bytes; {SLOTS} slots have u32 each", field=name)
    return np.frombuffer(data, VERSIONS).astype(np.uint32)


def versions_bytes(versions: Versions) -> bytes:
    """The field `versions`."""
    return versions.astype(VERSIONS).tobytes()


def slots_bytes(slots: SlotSet) -> bytes:
    """A set of slots as bytes."""
    return np.packbits(slots, bitorder="little").tobytes()


def need_slots(head: Head, name: str) -> SlotSet:
    """A field that is a set of slots; BadRequest when it is none."""
    data = need_bytes(head, name)
    if len(data) != SLOTS_BYTES:
        raise BadRequest(f"{name} has {len(data)} bytes; a set of slots has {SLOTS_BYTES}", field=name)
    return slots_of_bytes(data)


def slot_set(slots: NDArray[np.integer]) -> SlotSet:
    """The set of some slots."""
    made = np.zeros(SLOTS, np.bool_)
    made[slots] = True
    return made


def slots_text(slots: SlotSet) -> str:
    """A set of slots as a text: numbers and ranges, such as ``0-511,600``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], slots, [False])).astype(np.int8))).tolist()
    ranges = zip(edges[::2], edges[1::2], strict=True)
    return ",".join(str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in ranges)


def slots_of_text(text: str) -> SlotSet:
    """Read what `slots_text` makes; ValueError says what is wrong."""
    slots = np.zeros(SLOTS, np.bool_)
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"{part!r} is no slot and no range of slots, such as 7 or 0-511")
        first, last = int(low), int(high if dash else low)
        if not first <= last < SLOTS:
            raise ValueError(f"{part!r} goes beyond the slots 0 to {SLOTS - 1}")
        slots[first : last + 1] = True
    return slots


def slots_of_bytes(data: bytes) -> SlotSet:
    """Read what `slots_bytes` makes."""
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.bool_)
