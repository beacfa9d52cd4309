"""Recurring schedules as they travel and rest (docs/recurring.md, docs/formats/recurring.md).

A *specification* is what a caller asks for: when, what is sent, and what is made up for after an outage. A *record* is
that and what the owner has decided so far; it is the body of the schedule's carrier, the row that stands for it.

Invariant: each is one msgpack map with a version, of which every field is checked when it is read; unknown fields are
refused. So what a server has stored is what this version understands.

UNFINISHED asks a realtime server which schedules have messages that nobody is done with. Invariant: an answer names
schedules by their places in the question, and only places that the question has.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple, TypeGuard, TypeVar, cast

import msgpack

from delayd.batch.batch import PADS
from delayd.batch.columns import Buffer
from delayd.batch.labels import LIFE_PREFIX, Headers, decode_headers, encode_tags, undecoded_reason
from delayd.batch.names import HEADERS_BYTES_MAX, check_subject, is_reserved
from delayd.batch.validate import check_key
from delayd.errors import BadArgument, BadRequest
from delayd.hours import INSTANT_MS_MAX
from delayd.recurrence.deciding import RunPolicy, SkipReason
from delayd.recurrence.recurrence import Recurrence
from delayd.wire.frame import Head
from delayd.wire.heads import INT_MAX, U64_MAX, need_int, need_ints, need_list, need_str, need_u64

VERSION = 1
CONTENT_BYTES_MAX = 256 << 10  # Body and headers: they are stored anew with each occurrence.
NOTE_BYTES_MAX = 1_000
SPECS_REMEMBERED = 4_096
REMEMBERED_BYTES_MAX = 2 << 10  # With a specification of some kilobytes as objects: 16 MB.
SCHEDULES_ASKED_MAX = 1_024  # With the longest subjects and names half of what the head of a request may have.
RUNS_KEPT = 16  # Numbers of `RUN` that a schedule remembers: as many retries may be under way at once.


class RecurringWish(Enum):
    """What a caller wants of a schedule."""

    PUT = "put"
    PAUSE = "pause"
    RESUME = "resume"
    RUN = "run"


_WISHES = {wish.value: wish for wish in RecurringWish}
_REASONS = frozenset(map(str, SkipReason))
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RecurringSpec:
    """What a caller asks for.

    Fields:
        recurrence: when.
        policy: what is made up for after an outage, and what meets an earlier one.
        subject, body, headers, tags: of each message.
        ttl_ms: how long after its instant a message expires; 0: never.
        ordering_hash: of its ordering key (`delayd.batch.labels.ordering_hash`); 0: none.
    """

    recurrence: Recurrence
    policy: RunPolicy
    subject: str
    body: bytes
    headers: Headers = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    ttl_ms: int = 0
    ordering_hash: int = 0
    _packed: bytes = field(default=b"", init=False, compare=False, repr=False)  # As it came, where it was read.

    def encode(self) -> bytes:
        """As it travels."""
        return self._packed or _pack(
            {
                "v": VERSION,
                "when": self.recurrence.encoded(),
                "policy": self.policy.encoded(),
                "subject": self.subject,
                "body": self.body,
                "headers": dict(self.headers),
                "tags": list(self.tags),
                "ttl_ms": self.ttl_ms,
                "order": self.ordering_hash,
            }
        )

    @classmethod
    def decode(cls, packed: Buffer) -> RecurringSpec:
        """Read one. BadArgument names the field at fault."""
        packed = bytes(packed)
        return _spec_of(packed) if len(packed) <= REMEMBERED_BYTES_MAX else _read_spec(packed)


@dataclass(frozen=True, slots=True)
class RecurringRecord:
    """A schedule as its owner has stored it.

    Fields:
        spec: what was asked for.
        version: how often it was changed by callers, 1 for the first time.
        created_ms, changed_ms: when it was made, and when its version began.
        decided_ms: whatever recurs up to this instant is decided.
        sent: occurrences that were sent, without those of `RUN`.
        last_ms: the instant of the last one; 0: none yet.
        skipped: how many were skipped, by reason.
        paused: whether it is paused, since ``changed_ms`` or earlier.
        note: why it is paused.
        runs: the numbers of the last calls of `RUN`.
    """

    spec: RecurringSpec
    version: int
    created_ms: int
    changed_ms: int
    decided_ms: int
    sent: int = 0
    last_ms: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    paused: bool = False
    note: str = ""
    runs: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """As the body of its carrier."""
        state = {name: getattr(self, name) for name in _STATE}
        return _pack({"v": VERSION, "spec": self.spec.encode(), **state, "skipped": dict(self.skipped)})

    @classmethod
    def decode(cls, packed: Buffer) -> RecurringRecord:
        """Read the body of a carrier. BadArgument names the field at fault."""
        fields = _unpack(packed)
        _need_fields(fields, {"v", "spec", "skipped", "note", "paused", "runs", *_COUNTS})
        skipped = _need(fields, "skipped", dict)
        runs = _need(fields, "runs", list)
        if not all(reason in _REASONS and _is_int(count, INT_MAX) for reason, count in skipped.items()):
            raise BadArgument("skipped has a reason or a count that this version does not know")
        if len(runs) > RUNS_KEPT or not all(_is_int(number, U64_MAX) for number in runs):
            raise BadArgument("runs is no list of numbers of calls")
        counts = {name: _need_number(fields, name, INSTANT_MS_MAX) for name in _COUNTS}
        return cls(
            RecurringSpec.decode(_need(fields, "spec", bytes)),
            **counts,
            skipped=skipped,
            paused=_need(fields, "paused", bool),
            note=_need(fields, "note", str),
            runs=tuple(runs),
        )

    def changed(self, now_ms: int, **fields: object) -> RecurringRecord:
        """The next version."""
        return replace(self, version=self.version + 1, changed_ms=now_ms, **fields)  # type: ignore[arg-type]


_COUNTS = ("version", "created_ms", "changed_ms", "decided_ms", "sent", "last_ms")
_STATE = (*_COUNTS, "paused", "note", "runs")


@dataclass(frozen=True, slots=True)
class RecurringRequest:
    """One request about a schedule: RECUR.

    Fields:
        wish: what is wanted.
        name: of the schedule, as bytes of UTF-8.
        if_version: only in this version; None: in any, but `PUT` changes nothing then.
        spec: of `PUT`.
        note: of `PAUSE`.
        number: of `RUN`: one that is asked again is done once.
    """

    wish: RecurringWish
    name: bytes
    if_version: int | None = None
    spec: RecurringSpec | None = None
    note: str = ""
    number: int = 0

    def to_head(self, log_id: int) -> Head:
        """The head of the request to this server."""
        head: Head = {"log_id": log_id, "wish": self.wish.value, "name": self.name.decode()}
        if self.if_version is not None:
            head["if_version"] = self.if_version
        if self.note:
            head["note"] = self.note
        if self.number:
            head["number"] = self.number
        return head


def read_recurring(head: Head, body: Buffer) -> RecurringRequest:
    """Read a request about a schedule.

    Raises:
        BadRequest, BadKey, BadSubject, BadHeaders, BadTags, BadArgument: what is wrong with it.
    """
    word = need_str(head, "wish")
    if word not in _WISHES:
        raise BadRequest(f"wish is {word!r}, not one of {', '.join(_WISHES)}", field="wish")
    wish = _WISHES[word]
    name = need_str(head, "name").encode()
    check_key(name)
    spec = RecurringSpec.decode(read_body(body)) if wish is RecurringWish.PUT else None
    if spec is None and len(body):
        raise BadRequest(f"a request to {wish.value} has no body")
    note = need_str(head, "note", NOTE_BYTES_MAX) if "note" in head else ""
    number = need_u64(head, "number") if "number" in head else 0
    if (wish is RecurringWish.RUN) != bool(number):
        raise BadRequest("a request to run has a number, and no other one has", field="number")
    return RecurringRequest(
        wish, name, need_int(head, "if_version") if "if_version" in head else None, spec, note, number
    )


class AskedSchedule(NamedTuple):
    """A schedule whose messages a realtime server is asked about."""

    subject: str  # The one of its messages.
    name: str


class Unfinished(NamedTuple):
    """The answer to UNFINISHED, with schedules as places in the question. One in none of the lists has no message that
    is unacknowledged.

    Fields:
        unfinished: a message is unacknowledged, or may be among so many that the server does not search them all.
        ungrouped: the same, and no group of the subject is there; nothing follows from that where the subject has
            moved to another server.
        unknown: the server can't tell now, and is to be asked again.
        again: ids of groups of these subjects to which messages come again through their delay servers.
    """

    unfinished: Sequence[int]
    ungrouped: Sequence[int]
    unknown: Sequence[int]
    again: Sequence[int]

    def to_head(self, log_id: int) -> Head:
        """The head of the answer of this server."""
        return {"log_id": log_id, **{name: list(value) for name, value in self._asdict().items()}}


def schedules_head(asked: Sequence[AskedSchedule]) -> Head:
    """The head of UNFINISHED about at most `SCHEDULES_ASKED_MAX` schedules. A server that has too much to search tells
    what it has found of the first ones; those with one subject are searched together when they stand side by side.
    """
    assert len(asked) <= SCHEDULES_ASKED_MAX, "the caller asks piece by piece"
    return {"schedules": [list(each) for each in asked]}


def read_schedules(head: Head) -> list[AskedSchedule]:
    """Read the head of UNFINISHED; BadRequest when it is none."""
    rows = need_list(head, "schedules")
    if len(rows) > SCHEDULES_ASKED_MAX:
        raise BadRequest(f"{len(rows)} schedules; ask about at most {SCHEDULES_ASKED_MAX} at once")
    asked: list[AskedSchedule] = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(AskedSchedule._fields):
            raise BadRequest("schedules has a row that is not a subject and a name", field="schedules")
        asked.append(AskedSchedule(*(need_str({"schedules": text}, "schedules") for text in row)))
    return asked


def read_unfinished(head: Head, asked: int) -> Unfinished:
    """Read the answer to UNFINISHED about so many schedules; BadRequest when it is none."""
    places = {name: need_ints(head, name) for name in ("unfinished", "ungrouped", "unknown")}
    for name, numbers in places.items():
        if numbers and max(numbers) >= asked:
            raise BadRequest(f"{name} has the place {max(numbers)} of {asked} schedules", field=name)
    return Unfinished(**places, again=need_ints(head, "again"))


def body_of(packed: bytes) -> list[bytes]:
    """The body of a request or an answer with a specification or a record: its length, it, and zeros."""
    return [_LENGTH.pack(len(packed)), packed, PADS[-len(packed) & 7]]


def read_body(body: Buffer) -> memoryview:
    """What such a body holds. BadRequest when it is none."""
    view = memoryview(body)
    size = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else -1
    if not 0 <= len(view) - _LENGTH.size - size < _LENGTH.size:
        raise BadRequest(f"a body of {len(view)} bytes holds no schedule")
    return view[_LENGTH.size : _LENGTH.size + size]


def check_content(spec: RecurringSpec) -> None:
    """Check what a schedule sends: its subject, headers, tags and sizes.

    Raises:
        BadSubject, BadHeaders, BadTags, BadArgument: what is wrong.
    """
    check_subject(spec.subject.encode("utf-8", "replace"))
    if is_reserved(spec.subject):
        raise BadArgument(f"{spec.subject} is a subject of the servers' own; choose another name")
    headers = _pack(spec.headers)
    decode_headers(headers)
    if any(name.startswith(LIFE_PREFIX) for name in spec.headers):
        raise BadArgument(f"headers that begin with {LIFE_PREFIX} are the servers' own; choose another name")
    if len(headers) > HEADERS_BYTES_MAX or len(headers) + len(spec.body) > CONTENT_BYTES_MAX:
        raise BadArgument(
            f"{len(spec.body)} bytes of body and {len(headers)} of headers; a schedule has at most"
            f" {CONTENT_BYTES_MAX} of both and {HEADERS_BYTES_MAX} of headers, so send a reference instead"
        )
    encode_tags(spec.tags)


def _read_spec(packed: bytes) -> RecurringSpec:
    fields = _unpack(packed)
    _need_fields(fields, {"v", "when", "policy", "subject", "body", "headers", "tags", "ttl_ms", "order"})
    spec = RecurringSpec(
        Recurrence.decoded(_need(fields, "when", dict)),
        RunPolicy.decoded(_need(fields, "policy", dict)),
        _need(fields, "subject", str),
        _need(fields, "body", bytes),
        _need(fields, "headers", dict),
        tuple(_need(fields, "tags", list)),
        _need_number(fields, "ttl_ms", INSTANT_MS_MAX),
        _need_number(fields, "order", U64_MAX),
    )
    check_content(spec)
    object.__setattr__(spec, "_packed", packed)
    return spec


# A schedule is read for each of its occurrences, and to check its line takes longer than to find the next instant.
_spec_of = lru_cache(maxsize=SPECS_REMEMBERED)(_read_spec)


def _pack(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value))


def _unpack(packed: Buffer) -> Mapping[str, object]:
    try:
        fields = msgpack.unpackb(packed, max_ext_len=0)
    except ValueError as error:
        raise BadArgument(f"a schedule can't be decoded: {undecoded_reason(error)}") from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise BadArgument("a schedule is no map of fields")
    if fields.get("v") != VERSION:
        raise BadArgument(f"a schedule of version {fields.get('v')!r:.20}; this program knows version {VERSION}")
    return fields


def _need_fields(fields: Mapping[str, object], known: set[str]) -> None:
    if fields.keys() != known:
        odd = ", ".join(sorted(map(str, fields.keys() ^ known)))
        raise BadArgument(f"a schedule lacks fields, or has some that this program does not know: {odd:.200}")


T = TypeVar("T")


def _need(fields: Mapping[str, object], name: str, kind: type[T]) -> T:
    value = fields[name]
    if type(value) is not kind:
        raise BadArgument(f"field {name} of a schedule is {type(value).__name__}, not {kind.__name__}")
    return value


def _need_number(fields: Mapping[str, object], name: str, most: int) -> int:
    value = fields[name]
    if not _is_int(value, most):
        raise BadArgument(f"field {name} of a schedule is {value!r:.40}, no whole number up to {most}")
    return value


def _is_int(value: object, most: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= most
