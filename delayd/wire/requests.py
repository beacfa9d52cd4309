"""Requests: each declared once, with all that servers and their connections must know of it before they read its head.

Invariant: nothing else lists requests. What a connection reads, refuses, counts or waits for follows from the terms
here, the tables of docs/protocol.md are written from them ("Adding a request"), and tests hold the heads of requests
and of answers to them.

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

from delayd.address import Endpoint
from delayd.errors import UnknownRequest
from delayd.wire.consuming import GroupInfo, SubjectInfo
from delayd.wire.frame import BODY_BYTES_MAX, HEAD_BYTES_MAX, SEND_BODY_BYTES_MAX, Room
from delayd.wire.heads import declared
from delayd.wire.push import PushTarget
from delayd.wire.scheduling import DueHour, QuotaInfo, TargetInfo
from delayd.wire.tokens import Right, TokenRecord

# Room for names and numbers: three texts at their longest, and fields that this version ignores.
HEAD_BYTES_PLAIN = 16 << 10
# A body of a request that should have none is read up to this size, and only that request is refused.
STRAY_BODY_BYTES_MAX = 64 << 10
ASKED_BODY_BYTES_MAX = 2 << 20  # One batch of 65,536 rows, 24 bytes each.
PLACES_BODY_BYTES_MAX = 512 << 10  # 65,536 instants.
RECURRING_BODY_BYTES_MAX = 512 << 10  # Body and headers of a schedule's messages, and a thousand dates.
MOVES_BODY_BYTES_MAX = 3 << 20  # Rows of CANCEL with the wanted instants: 32 bytes each.

META, DELAY, REALTIME = "meta", "delay", "realtime"
LOGS = (DELAY, REALTIME)
ANY = (META, DELAY, REALTIME)
GROUP = "subject:str group:group"
ROWS = "log_id:u64 subject?:str"  # The server that a receipt names, or the owner of keys.
TRIES = "asker?:1..u64 low_water?:u64"
EXACT = "exact?:bool"  # By receipt: rows that were moved since stay as they are.
HANDLES = "subjects?:[named] handles:[handle] log_id?:u64"
# A group of one subject, or a subscription to many on this connection.
WHOSE = "subject?:str group?:group subscription?:int"
REGISTERED = f"role:delay/realtime log_id:u64 {declared(Endpoint)} epoch:1..int pid:u32"
# How a group begins that is not there yet.
BEGINNING = "start?:position ephemeral?:bool tags_any?:[str] tags_all?:[str] ordered?:bool"


class Cost(IntEnum):
    """What a request may take of a turn of the loop, besides what its bytes take."""

    PLAIN = 0
    COUNTERS = 1  # It reads all counters.
    HEAVY = 2  # Its answer may be as large as a server makes it.
    LISTING = 3  # Its answer has a thousand rows: one such request is a turn.


# What answers have in common.
OF_META = "cluster_id:u64 now_ms:instant"
OF_DELAY = "log_id:u64 now_ms:instant clock_in_doubt?:bool"
RESULTS = f"{OF_DELAY} results:[result]"
ASKED = f"{OF_DELAY} retry_after_ms:int"
STATUS = (
    f"role:meta/delay/realtime log_id:u64 epoch:int pid:u32 started_at_ms:instant {OF_META} counters:{{int}} "
    "waits:[wait] refuses:[wait] connections:int connections_max:int loop_wait_ms_max:int loop_wait_ms_max_minute:int "
    "kernel?:str boot?:str clock_confirmed?:bool clock_in_doubt?:bool fenced?:bool cordoned?:bool held?:bool "
    "end_offset?:int indexed_offset?:int next_sequence?:u64 in_doubt?:int subjects?:int groups?:int"
)
STALE = "stale:[handle] why:[int] wanted:int"
DECIDED = f"{OF_META} message:str"
FOUND = f"{OF_DELAY} in_flight:int unread:int until_sequence:u64 next:place|nil"

# Rows that are lists: their items, in this order.
LISTS = {
    "named": "subject:str count:int",
    "handle": "incarnation:u64 pull_first:int count:u32",
    "retry": "incarnation:u64 pull_first:int count:u32 delay_ms:int error:str",
    "reject": "incarnation:u64 pull_first:int count:u32 reason:str error:str",
    "pair": "subject:str group:str",
    "schedule": "subject:str name:str",
    "part": "pull_first:int consume_first:int count:u32 attempt:u32",
    "wait": "what:str why:str command:text",
    "move": "number:u64 subject:str log_id:u64",
    "routed": "subject:str log_id:u64",
    "owner": "log_id:u64 slots:slots",
    "place": "hour:u32 sequence:u64",
    "held": "epoch:u64 batch_id:u64 hour:u32 offset:int appended_at_ms:instant claimed_at_ms:instant count:u32",
    "landed": "batch_id:u64 offset:int",
}
# Rows that are maps: their fields.
MAPS = {
    "server": f"{REGISTERED} place:u64 alive:bool seen_ms_ago:int heard:bool cordoned:bool",
    "entry": "id:str path:str position:int reason:str rows:int since_ms:int hour:str|nil subject:str|nil costs:{str}",
    # Of a batch that was taken, or refused by name.
    "result": "base_sequence?:u64 count?:u32 appended_at_ms?:instant duplicate?:bool decided?:int "
    "error?:str message?:str retry_after_ms?:int rows?:[int] next_free_ms?:instant",
    "target": declared(TargetInfo),
    "quota": declared(QuotaInfo),
    "due_hour": declared(DueHour),
    "push_target": declared(PushTarget),
    "token": declared(TokenRecord),
    "listed_group": declared(GroupInfo),
    "listed_subject": declared(SubjectInfo),
}


class Terms(NamedTuple):
    """On which terms a request is served."""

    servers: tuple[str, ...]  # The roles of the servers that serve it.
    # What its head has, each as ``name:type``; one with a question mark may be left out. Servers ignore all others.
    # Types: u32, u64, int (63 bits), instant, 0..2 (from, to), bool, str, text (a longer one), host, group (the name of
    # one), a/b (one of these words), bytes, bytes32 (so many), slots, versions (of slots), position, a row of `LISTS`
    # or `MAPS`. [u64] is a list, {int} a map with any names, str|nil may be nil. tests/fuzz/test_declared.py tries
    # values around them.
    fields: str = ""
    answer: str = ""  # What the head of its answer has, in the same way. Clients ignore all others.
    trusted: bool = False  # Only for peers that have proved the cluster's secret: servers and operators (rule H8).
    fenced: bool = False  # Not by a server that may be a copy: it would take messages, or give them to consumers.
    body_bytes_max: int = 0  # 0: it has no body.
    has_lists: bool = False  # Its head has lists that clients make, so it may be as large as that of an answer.
    cost: Cost = Cost.PLAIN
    in_frames: bool = False  # Its answer may come in several frames.
    # Each of these is enough; none: what all tokens may ask, or of trusted requests `Right.ADMINISTER`.
    rights: tuple[Right, ...] = ()
    body_names: bool = False  # Its subjects are in its body, too, so that its handler asks for the right.

    @property
    def needs(self) -> tuple[Right, ...]:
        """The rights of which one is enough."""
        return self.rights or ((Right.ADMINISTER,) if self.trusted else (Right.ANY,))

    @property
    def types(self) -> dict[str, str]:
        """The type of each field by its name, as it is declared."""
        return {name.removesuffix("?"): kind for name, kind in named_types(self.fields)}


def named_types(fields: str) -> list[tuple[str, str]]:
    """The names, with their question marks, and the types of declared fields."""
    return [(name, kind) for name, _, kind in (each.partition(":") for each in fields.split())]


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
    PING = 1, Terms(ANY, answer="now_ms:instant log_id?:u64 clock_in_doubt?:bool")
    STATUS = 2, Terms(ANY, answer=STATUS, cost=Cost.COUNTERS)
    TRUST_CLOCK = 3, Terms(LOGS, answer="now_ms:instant", trusted=True)
    CHALLENGE = (
        4,
        Terms(
            ANY,
            "nonce:bytes32",
            "nonce:bytes32 role:meta/delay/realtime log_id:u64 cluster_id:u64 proof:bytes32",
            rights=(Right.ENTER,),
        ),
    )
    PROVE = 5, Terms(ANY, "proof:bytes cluster_id:u64", rights=(Right.ENTER,))
    MEND_LIST = (
        6,
        Terms(LOGS, "after:str limit:int", "entries:[entry] more:bool", cost=Cost.LISTING, rights=(Right.INSPECT,)),
    )
    MEND = 7, Terms(LOGS, "id:str decision:str", "id:str done:bool message:str", trusted=True)
    TOKEN = (
        8,
        Terms(ANY, "token:str", "name:str rights:str expires_ms:instant now_ms:instant", rights=(Right.ENTER,)),
    )
    CUT = 50, Terms(ANY, "hold_ms:0..5000 moment_ms?:instant", "log_id:u64 cut:u64 folder:str", trusted=True)
    CUT_READY = 51, Terms(ANY, "cut:u64", "log_id:u64 cut:u64 held:bool moment_ms:int", trusted=True)

    # Meta.
    REGISTER = (
        10,
        Terms(
            (META,),
            f"{REGISTERED} place?:u64 used?:{{int}} moves_seen?:u64 slots?:slots slot_versions?:versions "
            "slot_peers?:[u64]",
            f"{OF_META} lease_ms:int heartbeat_ms:int moves:[move] cordoned:[u64] takes:[u64] boot:str "
            "tokens?:u64 slots_lost?:slots slot_peers?:[u64]|nil",
            trusted=True,
            rights=(Right.SERVE,),
        ),
    )
    SERVERS = 11, Terms((META,), "role:str|nil", f"{OF_META} servers:[server]", cost=Cost.LISTING)
    ROUTES = (
        12,
        Terms(
            (META,),
            "subjects:[str] assign:bool",
            f"{OF_META} routes:{{u64}} servers:[server] unrouted:[str]",
            has_lists=True,
            cost=Cost.LISTING,
        ),
    )
    META_SUBJECTS = (
        13,
        Terms(
            (META,),
            "prefix:str after:str limit:1..int",
            "subjects:[routed] more:bool now_ms:instant",
            cost=Cost.LISTING,
            rights=(Right.INSPECT,),
        ),
    )
    FORGET_SERVER = 14, Terms((META,), "role:str log_id:u64 routes:bool", DECIDED, trusted=True)
    MOVE_ROUTE = 15, Terms((META,), "subject:str to:u64", DECIDED, trusted=True)
    SLOTS = (
        16,
        Terms((META,), "wanted:slots", f"{OF_META} owners:[owner] versions:versions withheld:slots members:[u64]"),
    )
    MOVE_SLOTS = 17, Terms((META,), "slots:slots versions:versions to:u64 lost:bool", DECIDED, trusted=True)
    SETTLE_SLOTS = 18, Terms((META,), answer=DECIDED, trusted=True)
    CORDON_SERVER = 19, Terms((META,), "log_id:u64 standing:serving/cordoned/retired", DECIDED, trusted=True)
    PUSH_TARGETS = (
        70,
        Terms(
            (META,),
            "after:str seen?:u64 gateway?:u64",
            f"{OF_META} revision:u64 targets:[push_target] more:bool gateways:int",
            trusted=True,
            cost=Cost.LISTING,
            rights=(Right.SERVE,),
        ),
    )
    SET_PUSH_TARGET = 71, Terms((META,), f"{declared(PushTarget)} was:int", DECIDED, trusted=True)
    DELETE_PUSH_TARGET = 72, Terms((META,), "name:str", DECIDED, trusted=True)
    TOKENS = (
        73,
        Terms(
            (META,),
            "after:str used?:{int}",
            f"{OF_META} revision:u64 tokens:[token] more:bool required:bool",
            trusted=True,
        ),
    )
    SET_TOKEN = 74, Terms((META,), f"{declared(TokenRecord)} is_new:bool", DECIDED, trusted=True)
    REVOKE_TOKEN = 75, Terms((META,), "name:str", DECIDED, trusted=True)

    # Delay servers.
    SEND = (
        20,
        Terms((DELAY,), answer=RESULTS, body_bytes_max=SEND_BODY_BYTES_MAX, rights=(Right.SEND,), body_names=True),
    )
    OUTCOME = (
        21,
        Terms(
            (DELAY,),
            "log_id:u64 producer_id:u64 producer_batch:u64",
            f"{OF_DELAY} state:accepted/unknown result:result|nil",
            rights=(Right.SEND,),
            body_names=True,
        ),
    )
    CHECKPOINT = 22, Terms((DELAY,), answer=f"{OF_DELAY} replay_offset:int", trusted=True)
    TARGETS = 23, Terms((DELAY,), "after:u64", f"{OF_DELAY} targets:[target] more:bool", rights=(Right.INSPECT,))
    TARGET_LOST = 24, Terms((DELAY,), "log_id:u64", f"{OF_DELAY} message:str", trusted=True)
    TARGET_ACCEPT = 25, Terms((DELAY,), "log_id:u64", f"{OF_DELAY} message:str", trusted=True)
    CANCEL = (
        26,
        Terms(
            (DELAY,),
            f"{ROWS} {TRIES} {EXACT}",
            ASKED,
            body_bytes_max=ASKED_BODY_BYTES_MAX,
            rights=(Right.CANCEL,),
            body_names=True,
        ),
    )
    GET = (
        27,
        Terms((DELAY,), ROWS, ASKED, body_bytes_max=ASKED_BODY_BYTES_MAX, rights=(Right.INSPECT,), body_names=True),
    )
    RESCHEDULE = (
        28,
        Terms(
            (DELAY,),
            f"{ROWS} {TRIES} number?:u64 {EXACT}",
            ASKED,
            body_bytes_max=MOVES_BODY_BYTES_MAX,
            rights=(Right.CANCEL,),
            body_names=True,
        ),
    )
    FIND = (
        29,
        Terms(
            (DELAY,),
            "log_id:u64 subject:str from_ms:instant to_ms:instant hour:u32 sequence:u64 until_sequence:u64 "
            "limit:1..65536 tag:str content:0..2 origin:u64",
            f"{FOUND} rows:int",
            rights=(
                Right.INSPECT,
                Right.CANCEL,
            ),
        ),
    )
    QUOTAS = (
        32,
        Terms((DELAY,), "after:str prefix:str", f"{OF_DELAY} quotas:[quota] more:bool", rights=(Right.INSPECT,)),
    )
    SET_QUOTA = (
        33,
        Terms((DELAY,), "subject:str per_second:int|nil pending:int|nil pending_bytes:int|nil", OF_DELAY, trusted=True),
    )
    PLACES = (
        34,
        Terms(
            (DELAY,), "subject:str spread_ms:int", OF_DELAY, body_bytes_max=PLACES_BODY_BYTES_MAX, rights=(Right.SEND,)
        ),
    )
    RELEASE_SLOTS = 36, Terms((DELAY,), "slots:slots", f"{OF_DELAY} versions:versions", trusted=True)
    SEND_AGAIN = (
        37,
        Terms((DELAY,), answer=RESULTS, trusted=True, body_bytes_max=SEND_BODY_BYTES_MAX, rights=(Right.SERVE,)),
    )
    DRAIN = (
        38,
        Terms(
            (DELAY,),
            "to:u64 slots:slots|nil hour:u32 sequence:u64 until_sequence:u64",
            f"{FOUND} found:int drained:int leaving:int left:int",
            trusted=True,
        ),
    )
    RETIRE = 39, Terms((DELAY,), answer=f"{OF_DELAY} message:str", trusted=True)
    SEND_DRAINED = (
        63,
        Terms((DELAY,), answer=RESULTS, trusted=True, body_bytes_max=SEND_BODY_BYTES_MAX, rights=(Right.SERVE,)),
    )

    RECUR = (
        64,
        Terms(
            (DELAY,),
            "log_id:u64 wish:put/pause/resume/run name:str if_version?:int note?:str number?:u64",
            OF_DELAY,
            body_bytes_max=RECURRING_BODY_BYTES_MAX,
            rights=(Right.SEND,),
        ),
    )

    DUE_HOURS = (
        65,
        Terms(
            (DELAY,), "after:int", f"{OF_DELAY} hours:[due_hour] more:bool", cost=Cost.LISTING, rights=(Right.INSPECT,)
        ),
    )

    # Realtime servers.
    HELLO = (
        30,
        Terms(
            (REALTIME,),
            "log_id:u64 target:u64 epoch:int instance:u64 session:int w:[u64] named_offset?:int unread_hours?:[u32] "
            "next_sequence:u64",
            "log_id:u64 end_offset:int highest_sequence:u64 decided_offset:int lost_epoch?:int lost_age_ms?:int "
            "batches:[held]",
            trusted=True,
            fenced=True,
            cost=Cost.LISTING,
            in_frames=True,
            rights=(Right.SERVE,),
        ),
    )
    DISPATCH = (
        31,
        Terms(
            (REALTIME,),
            "session:int epoch:int",
            "log_id:u64 appended_at_ms:instant batches:[landed]",
            trusted=True,
            fenced=True,
            body_bytes_max=BODY_BYTES_MAX,
            rights=(Right.SERVE,),
        ),
    )
    PULL = (
        40,
        Terms(
            (REALTIME,),
            f"{WHOSE} max_messages:1..int max_bytes:1..int wait_ms:int lease_ms:0..43200000 consumer:str ahead?:u32 "
            f"{BEGINNING} exclusive_ms?:1000..600000 was?:[u64] in_flight_max?:u32 stands?:bool",
            "log_id:u64 incarnation:u64 parts:[part] now_ms:instant wanted:int unfinished?:bool subjects?:[named]",
            fenced=True,
            cost=Cost.HEAVY,
            in_frames=True,
            rights=(Right.CONSUME,),
        ),
    )
    ACK = 41, Terms((REALTIME,), f"{WHOSE} {HANDLES}", STALE, fenced=True, has_lists=True, rights=(Right.CONSUME,))
    NACK = (
        42,
        Terms(
            (REALTIME,),
            f"{WHOSE} {HANDLES} uncounted?:bool",
            STALE,
            fenced=True,
            has_lists=True,
            rights=(Right.CONSUME,),
        ),
    )
    GROUPS = (
        43,
        Terms(
            (REALTIME,),
            "subject:str|nil after?:pair|nil limit?:1..int ages?:bool",
            "groups:[listed_group] more:bool",
            cost=Cost.LISTING,
            rights=(Right.INSPECT,),
        ),
    )
    SUBJECTS = (
        44,
        Terms(
            (REALTIME,),
            "prefix:str after:str limit:1..int",
            "subjects:[listed_subject] more:bool",
            cost=Cost.LISTING,
            rights=(Right.INSPECT,),
        ),
    )
    DELETE_GROUP = 45, Terms((REALTIME,), GROUP, GROUP, trusted=True)
    ORIGIN_ACCEPT = 46, Terms((REALTIME,), "log_id:u64", "log_id:u64 epoch:int highest_sequence:u64", trusted=True)
    PULL_END = 47, Terms((REALTIME,), f"{WHOSE} exclusive_ms?:1000..600000 was?:[u64]", rights=(Right.CONSUME,))
    RETRY = (
        48,
        Terms(
            (REALTIME,),
            f"{GROUP} retries:[retry] log_id?:u64",
            STALE,
            fenced=True,
            has_lists=True,
            rights=(Right.CONSUME,),
        ),
    )
    REJECT = (
        49,
        Terms(
            (REALTIME,),
            f"{GROUP} rejects:[reject] log_id?:u64",
            STALE,
            fenced=True,
            has_lists=True,
            rights=(Right.CONSUME,),
        ),
    )
    EXTEND = (
        52,
        Terms(
            (REALTIME,),
            f"{GROUP} lease_ms:1..43200000 handles:[handle] log_id?:u64",
            STALE,
            fenced=True,
            has_lists=True,
            rights=(Right.CONSUME,),
        ),
    )
    MOVE_GROUP = (
        53,
        Terms(
            (REALTIME,), f"{GROUP} to:position dry_run?:bool", f"{GROUP} before:int next:int dropped:int", trusted=True
        ),
    )
    PAUSE_GROUP = 54, Terms((REALTIME,), f"{GROUP} paused:bool", f"{GROUP} paused:bool", trusted=True)
    SUBSCRIBE = (
        55,
        Terms(
            (REALTIME,),
            f"group:group subjects?:[str] pattern?:str {BEGINNING} in_flight_max?:u32",
            "subscription:int now_ms:instant",
            fenced=True,
            has_lists=True,
            rights=(Right.CONSUME,),
        ),
    )
    UNFINISHED = (
        56,
        Terms(
            (REALTIME,),
            "schedules:[schedule]",
            "log_id:u64 unfinished:[int] ungrouped:[int] unknown:[int] again:[u64]",
            trusted=True,
            fenced=True,
            has_lists=True,
            cost=Cost.LISTING,
            rights=(Right.SERVE,),
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
