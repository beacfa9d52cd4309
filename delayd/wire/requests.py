"""Requests: each declared once, with all that servers and their connections must know of it before they read its head.

Invariant: nothing else lists requests. What a connection reads, refuses, counts or waits for follows from the terms
here, and docs/protocol.md is compared with them both ways. To add a request, declare it here, read its head, serve it.

An example. `PLACES` is served by delay servers to anyone; it is the one with instants as its body, of at most 512 KiB.
So a connection of a delay server takes such a body, that of a meta server reads 64 KiB of it and says which server to
ask, and neither asks for a proof of the cluster's secret.

How large a request may be follows from its type, from the server that reads it, and from whether its peer is trusted.
Invariant: a request that needs no room is refused at its header when it claims some. So a stranger can make a server
hold only as many bytes as the requests need that a stranger may send (rule B1).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, Self

from delayd.errors import UnknownRequest
from delayd.wire.frame import BODY_BYTES_MAX, HEAD_BYTES_MAX, SEND_BODY_BYTES_MAX, Room

# Room for names and numbers: three texts at their longest, and fields that this version ignores.
HEAD_BYTES_PLAIN = 16 << 10
# A body of a request that should have none is read up to this size, and only that request is refused.
STRAY_BODY_BYTES_MAX = 64 << 10
ASKED_BODY_BYTES_MAX = 2 << 20  # One batch of 65,536 rows, 24 bytes each.
PLACES_BODY_BYTES_MAX = 512 << 10  # 65,536 instants.
MOVES_BODY_BYTES_MAX = 3 << 20  # Rows of CANCEL with the wanted instants: 32 bytes each.

META, DELAY, REALTIME = "meta", "delay", "realtime"
LOGS = (DELAY, REALTIME)
ANY = (META, DELAY, REALTIME)
GROUP = "subject:str group:group"
ROWS = "log_id:u64 subject?:str"  # The server that a receipt names, or the owner of keys.
TRIES = "asker?:1..u64 low_water?:u64"
HANDLES = "subjects?:[named] handles:[handle] log_id?:u64"
# A group of one subject, or a subscription to many on this connection.
WHOSE = "subject?:str group?:group subscription?:int"
# How a group begins that is not there yet.
BEGINNING = "start?:position ephemeral?:bool tags_any?:[str] tags_all?:[str] ordered?:bool"


class Cost(IntEnum):
    """What a request may take of a turn of the loop, besides what its bytes take."""

    PLAIN = 0
    COUNTERS = 1  # It reads all counters.
    HEAVY = 2  # Its answer may be as large as a server makes it.
    LISTING = 3  # Its answer has a thousand rows: one such request is a turn.


class Terms(NamedTuple):
    """On which terms a request is served."""

    servers: tuple[str, ...]  # The roles of the servers that serve it.
    # What its head has, each as ``name:type``; one with a question mark may be left out. Servers ignore all others.
    # Types: u32, u64, int (63 bits), instant, 0..2 (from, to), bool, str, host, group (the name of one), a/b (one of
    # these words), bytes, bytes32 (so many), slots, versions (of slots), position, pair (of a subject and a group).
    # [u64] is a list, str|nil may be nil. Rows of lists: named (subject, count), handle (incarnation, pull sequence,
    # count), retry, reject (a handle and two more). tests/fuzz/test_declared.py tries values around them.
    fields: str = ""
    trusted: bool = False  # Only for peers that have proved the cluster's secret: servers and operators (rule H8).
    fenced: bool = False  # Not by a server that may be a copy: it would take messages, or give them to consumers.
    body_bytes_max: int = 0  # 0: it has no body.
    has_lists: bool = False  # Its head has lists that clients make, so it may be as large as that of an answer.
    cost: Cost = Cost.PLAIN
    in_frames: bool = False  # Its answer may come in several frames.

    @property
    def types(self) -> dict[str, str]:
        """The type of each field by its name, as it is declared."""
        return {name.removesuffix("?"): kind for name, _, kind in (each.partition(":") for each in self.fields.split())}


OF_ANY_SERVER = Terms(ANY)


class RequestType(IntEnum):
    """The type of a frame; an answer repeats it."""

    terms: Terms

    def __new__(cls, number: int, terms: Terms = OF_ANY_SERVER) -> Self:
        """A number that says on which terms its request is served."""
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.terms = terms
        return kind

    # Any server.
    PING = 1
    STATUS = 2, Terms(ANY, cost=Cost.COUNTERS)
    TRUST_CLOCK = 3, Terms(LOGS, trusted=True)
    CHALLENGE = 4, Terms(ANY, "nonce:bytes32")
    PROVE = 5, Terms(ANY, "proof:bytes cluster_id:u64")
    MEND_LIST = 6, Terms(LOGS, "after:str limit:int", cost=Cost.LISTING)
    MEND = 7, Terms(LOGS, "id:str decision:str", trusted=True)
    CUT = 50, Terms(ANY, "hold_ms:0..5000 moment_ms?:instant", trusted=True)
    CUT_READY = 51, Terms(ANY, "cut:u64", trusted=True)

    # Meta.
    REGISTER = (
        10,
        Terms(
            (META,),
            "role:delay/realtime log_id:u64 host:host port:1..65535 epoch:1..int pid:u32 place?:u64 moves_seen?:u64 "
            "slots?:slots slot_versions?:versions slot_peers?:[u64]",
            trusted=True,
        ),
    )
    SERVERS = 11, Terms((META,), "role:str|nil", cost=Cost.LISTING)
    ROUTES = 12, Terms((META,), "subjects:[str] assign:bool", has_lists=True, cost=Cost.LISTING)
    META_SUBJECTS = 13, Terms((META,), "prefix:str after:str limit:1..int", cost=Cost.LISTING)
    FORGET_SERVER = 14, Terms((META,), "role:str log_id:u64 routes:bool", trusted=True)
    MOVE_ROUTE = 15, Terms((META,), "subject:str to:u64", trusted=True)
    SLOTS = 16, Terms((META,), "wanted:slots")
    MOVE_SLOTS = 17, Terms((META,), "slots:slots versions:versions to:u64 lost:bool", trusted=True)
    SETTLE_SLOTS = 18, Terms((META,), trusted=True)
    CORDON_SERVER = 19, Terms((META,), "log_id:u64 standing:serving/cordoned/retired", trusted=True)

    # Delay servers.
    SEND = 20, Terms((DELAY,), body_bytes_max=SEND_BODY_BYTES_MAX)
    OUTCOME = 21, Terms((DELAY,), "log_id:u64 producer_id:u64 producer_batch:u64")
    CHECKPOINT = 22, Terms((DELAY,), trusted=True)
    TARGETS = 23, Terms((DELAY,), "after:u64")
    TARGET_LOST = 24, Terms((DELAY,), "log_id:u64", trusted=True)
    TARGET_ACCEPT = 25, Terms((DELAY,), "log_id:u64", trusted=True)
    CANCEL = 26, Terms((DELAY,), f"{ROWS} {TRIES}", body_bytes_max=ASKED_BODY_BYTES_MAX)
    GET = 27, Terms((DELAY,), ROWS, body_bytes_max=ASKED_BODY_BYTES_MAX)
    RESCHEDULE = 28, Terms((DELAY,), f"{ROWS} {TRIES} number?:u64", body_bytes_max=MOVES_BODY_BYTES_MAX)
    FIND = (
        29,
        Terms(
            (DELAY,),
            "log_id:u64 subject:str from_ms:instant to_ms:instant hour:u32 sequence:u64 until_sequence:u64 "
            "limit:1..65536 tag:str content:0..2 origin:u64",
        ),
    )
    QUOTAS = 32, Terms((DELAY,), "after:str prefix:str")
    SET_QUOTA = (
        33,
        Terms((DELAY,), "subject:str per_second:int|nil pending:int|nil pending_bytes:int|nil", trusted=True),
    )
    PLACES = 34, Terms((DELAY,), "subject:str spread_ms:int", body_bytes_max=PLACES_BODY_BYTES_MAX)
    RELEASE_SLOTS = 36, Terms((DELAY,), "slots:slots", trusted=True)
    SEND_AGAIN = 37, Terms((DELAY,), trusted=True, body_bytes_max=SEND_BODY_BYTES_MAX)
    DRAIN = 38, Terms((DELAY,), "to:u64 slots:slots|nil hour:u32 sequence:u64 until_sequence:u64", trusted=True)
    RETIRE = 39, Terms((DELAY,), trusted=True)
    SEND_DRAINED = 63, Terms((DELAY,), trusted=True, body_bytes_max=SEND_BODY_BYTES_MAX)

    # Realtime servers.
    HELLO = (
        30,
        Terms(
            (REALTIME,),
            "log_id:u64 target:u64 epoch:int instance:u64 session:int w:[u64] named_offset?:int unread_hours?:[u32] "
            "next_sequence:u64",
            trusted=True,
            fenced=True,
            cost=Cost.LISTING,
            in_frames=True,
        ),
    )
    DISPATCH = 31, Terms((REALTIME,), "session:int epoch:int", trusted=True, fenced=True, body_bytes_max=BODY_BYTES_MAX)
    PULL = (
        40,
        Terms(
            (REALTIME,),
            f"{WHOSE} max_messages:1..int max_bytes:1..int wait_ms:int lease_ms:0..43200000 consumer:str ahead?:u32 "
            f"{BEGINNING} exclusive_ms?:1000..600000 was?:[u64] in_flight_max?:u32",
            fenced=True,
            cost=Cost.HEAVY,
        ),
    )
    ACK = 41, Terms((REALTIME,), f"{WHOSE} {HANDLES}", fenced=True, has_lists=True)
    NACK = 42, Terms((REALTIME,), f"{WHOSE} {HANDLES} uncounted?:bool", fenced=True, has_lists=True)
    GROUPS = 43, Terms((REALTIME,), "subject:str|nil after?:pair|nil limit?:1..int ages?:bool", cost=Cost.LISTING)
    SUBJECTS = 44, Terms((REALTIME,), "prefix:str after:str limit:1..int", cost=Cost.LISTING)
    DELETE_GROUP = 45, Terms((REALTIME,), GROUP, trusted=True)
    ORIGIN_ACCEPT = 46, Terms((REALTIME,), "log_id:u64", trusted=True)
    PULL_END = 47, Terms((REALTIME,), f"{WHOSE} exclusive_ms?:1000..600000 was?:[u64]")
    RETRY = 48, Terms((REALTIME,), f"{GROUP} retries:[retry] log_id?:u64", fenced=True, has_lists=True)
    REJECT = 49, Terms((REALTIME,), f"{GROUP} rejects:[reject] log_id?:u64", fenced=True, has_lists=True)
    EXTEND = (
        52,
        Terms((REALTIME,), f"{GROUP} lease_ms:1..43200000 handles:[handle] log_id?:u64", fenced=True, has_lists=True),
    )
    MOVE_GROUP = 53, Terms((REALTIME,), f"{GROUP} to:position dry_run?:bool", trusted=True)
    PAUSE_GROUP = 54, Terms((REALTIME,), f"{GROUP} paused:bool", trusted=True)
    SUBSCRIBE = (
        55,
        Terms(
            (REALTIME,),
            f"group:group subjects?:[str] pattern?:str {BEGINNING} in_flight_max?:u32",
            fenced=True,
            has_lists=True,
        ),
    )


ANSWERED_IN_FRAMES = frozenset(kind for kind in RequestType if kind.terms.in_frames)


def request_type(number: int) -> RequestType:
    """The type of a request; UnknownRequest when this version has none of that number."""
    try:
        return RequestType(number)
    except ValueError as error:
        raise UnknownRequest(f"requests of type {number} are not known here") from error


def not_served(role: str, number: int) -> UnknownRequest:
    """The error for a request that a server of this role has no handler for."""
    kind = request_type(number)
    return UnknownRequest(f"a {role} server does not serve {kind.name}; ask a {' or '.join(kind.terms.servers)} server")


class RequestLimits(NamedTuple):
    """Limits by type of request: `plain` is the limit of every other type."""

    plain: Room
    by_type: Mapping[int, Room]
    by_type_trusted: Mapping[int, Room]
    bodies: frozenset[int]  # The types of request that have a body at this server.


def _limits_of(role: str) -> RequestLimits:
    lists: dict[int, Room] = {
        kind: Room(HEAD_BYTES_MAX, STRAY_BODY_BYTES_MAX) for kind in RequestType if kind.terms.has_lists
    }
    here = [kind for kind in RequestType if role in kind.terms.servers and kind.terms.body_bytes_max]
    bodies = {kind: Room(HEAD_BYTES_PLAIN, kind.terms.body_bytes_max) for kind in here}
    of_anyone = {kind: room for kind, room in bodies.items() if not kind.terms.trusted}
    return RequestLimits(
        Room(HEAD_BYTES_PLAIN, STRAY_BODY_BYTES_MAX), lists | of_anyone, lists | bodies, frozenset(bodies)
    )


META_LIMITS, DELAY_LIMITS, REALTIME_LIMITS = _limits_of(META), _limits_of(DELAY), _limits_of(REALTIME)
