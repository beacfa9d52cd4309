"""Control records: the notes that a log keeps about itself, as batches between those of messages
(docs/formats/batch.md).

Each body of a CONTROL batch is one msgpack map with a ``type``; a reader skips types that it does not know. The classes
below are the types that are known, with the fields of each. `QuotaLimits`, which an operator sets for a subject, stand
in the state instead (docs/quotas.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np

from delayd.batch.batch import Batch, encode, lay_out
from delayd.batch.columns import BatchKind, ColumnId
from delayd.errors import BatchMalformed

RecordValue = int | str | bytes | list[int]
Record = Mapping[str, RecordValue]


class TargetNote(NamedTuple):
    """Rows of a subject may be at this realtime server from here on (rule H5)."""

    subject: bytes
    log_id: int


class SkippedSequences(NamedTuple):
    """An operator accepted a restored server: so many sequences, directly before the base_sequence of this group,
    stay unused (rule S5).
    """

    sequences: int


class LogTime(NamedTuple):
    """An operator has set ``appended_at_ms`` back, from this group on (rule T4)."""

    from_ms: int
    to_ms: int


class OperatorWord(NamedTuple):
    """What an operator decided about so many rows that are set aside: they were given up (``drop``), or they were taken
    or released (``release``; rule S5).
    """

    action: str
    id: str
    rows: int


class HelloHeard(NamedTuple):
    """A delay server has greeted this realtime server, with ``w`` as its W (rule H3)."""

    log_id: int
    epoch: int
    instance: int
    session: int
    w: list[int]


class OriginAccepted(NamedTuple):
    """An operator takes a delay server as it is: what was heard of it before is forgotten (rule H8)."""

    log_id: int


class GroupCreated(NamedTuple):
    """A consumer group begins."""

    group_id: int
    subject: str
    group: str


class GroupDeleted(NamedTuple):
    """A consumer group ends."""

    group_id: int


class GroupIdsSkipped(NamedTuple):
    """So many ids stay unused from here on: groups of which nothing is known here may have had them (rule Q2)."""

    ids: int


class GroupMoved(NamedTuple):
    """A consumer group goes on at the consume sequence ``next``; nobody holds a message of it any more."""

    group_id: int
    next: int


class GroupSetBack(NamedTuple):
    """A power cut took the messages from the consume sequence ``next`` on, so the group goes on there. ``void`` are the
    pull sequences of what it was given of them: msgpack, ``[[first, end]…]`` (rule L2).
    """

    group_id: int
    next: int
    void: bytes


class GroupHeldBack(NamedTuple):
    """A consumer group is given no messages (1), or is given them again (0)."""

    group_id: int
    held_back: int


class GroupEphemeral(NamedTuple):
    """A consumer group ends when it has no consumers any more."""

    group_id: int


class GroupFiltered(NamedTuple):
    """A consumer group wants only messages with these tags: msgpack, ``[[any…], [all…]]``."""

    group_id: int
    tags: bytes


class GroupOrdered(NamedTuple):
    """A consumer group gets the messages of each ordering key one after the other (rule Q8)."""

    group_id: int


class GroupBounded(NamedTuple):
    """The consumers of a group hold so many messages at most; 0 is any number (rule Q10)."""

    group_id: int
    in_flight_max: int


class GroupBegins(NamedTuple):
    """A consumer group gets nothing that was handed over before this instant."""

    group_id: int
    begins_at_ms: int


class RetryDecided(NamedTuple):
    """Messages of a group live on at a delay server as one batch (docs/formats/pull.md, Retries)."""

    producer: int
    number: int
    group_id: int
    origin: int
    at_ms: int
    rows: bytes


class RetryAccepted(NamedTuple):
    """The delay server has taken that batch."""

    producer: int
    number: int
    group_id: int


class Ended(NamedTuple):
    """Decisions of the delay server have ended these rows (docs/keys.md, Records)."""

    rows: bytes


class Tried(NamedTuple):
    """Numbers of the requests that ended these rows, which stand in the record beside it (docs/keys.md, Tries)."""

    rows: bytes


Known = (
    TargetNote
    | Ended
    | Tried
    | SkippedSequences
    | LogTime
    | OperatorWord
    | HelloHeard
    | OriginAccepted
    | GroupCreated
    | GroupDeleted
    | GroupIdsSkipped
    | GroupMoved
    | GroupSetBack
    | GroupHeldBack
    | GroupEphemeral
    | GroupFiltered
    | GroupOrdered
    | GroupBounded
    | GroupBegins
    | RetryDecided
    | RetryAccepted
)

# By log: the delay server's message log, that of a realtime server, and the pull log.
CLASSES: dict[RecordValue, type[Known]] = {
    "target": TargetNote,
    "skipped": SkippedSequences,
    "log_time": LogTime,
    "operator": OperatorWord,
    "ended": Ended,
    "tried": Tried,
    "hello": HelloHeard,
    "origin_accepted": OriginAccepted,
    "group": GroupCreated,
    "group_deleted": GroupDeleted,
    "group_ids_skipped": GroupIdsSkipped,
    "group_moved": GroupMoved,
    "group_set_back": GroupSetBack,
    "group_held_back": GroupHeldBack,
    "group_ephemeral": GroupEphemeral,
    "group_filtered": GroupFiltered,
    "group_ordered": GroupOrdered,
    "group_bounded": GroupBounded,
    "group_begins": GroupBegins,
    "retry": RetryDecided,
    "retried": RetryAccepted,
}
_TYPES = {made: name for name, made in CLASSES.items()}
FIELDS: dict[type[Known], tuple[type, ...]] = {
    TargetNote: (bytes, int),
    SkippedSequences: (int,),
    LogTime: (int, int),
    OperatorWord: (str, str, int),
    HelloHeard: (int, int, int, int, list),
    OriginAccepted: (int,),
    GroupCreated: (int, str, str),
    GroupDeleted: (int,),
    GroupIdsSkipped: (int,),
    GroupMoved: (int, int),
    GroupSetBack: (int, int, bytes),
    GroupHeldBack: (int, int),
    GroupEphemeral: (int,),
    GroupFiltered: (int, bytes),
    GroupOrdered: (int,),
    GroupBounded: (int, int),
    GroupBegins: (int, int),
    RetryDecided: (int, int, int, int, int, bytes),
    RetryAccepted: (int, int, int),
    Ended: (bytes,),
    Tried: (bytes,),
}


def as_record(known: Known) -> Record:
    """The map as it stands in the log."""
    return {"type": _TYPES[type(known)], **known._asdict()}


def encode_records(records: Sequence[Record]) -> bytes:
    """Make one CONTROL batch of at most 65,536 records."""
    ends, bodies = lay_out([cast(bytes, msgpack.packb(record)) for record in records], 0)
    padding = bytes(-len(bodies) & 7)
    return encode(
        BatchKind.CONTROL, None, len(records), [(ColumnId.BODY_END, ends.astype(np.uint32))], [bodies, padding]
    )


def decode_records(batch: Batch) -> list[dict[str, RecordValue]]:
    """Read the records of a verified CONTROL batch.

    Raises:
        BatchMalformed: a body is no map.
    """
    starts, ends = batch.region(ColumnId.BODY_END)
    records: list[dict[str, RecordValue]] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        record: object = msgpack.unpackb(batch.heap[start:end])
        if not isinstance(record, dict):
            raise BatchMalformed(f"a control record is a {type(record).__name__} instead of a map")
        records.append(record)
    return records


def encode_known(records: Sequence[Known]) -> bytes:
    """Make one CONTROL batch of known records."""
    return encode_records([as_record(known) for known in records])


def decode_known(batch: Batch) -> list[Known]:
    """Read the records of a verified CONTROL batch whose types are known.

    Raises:
        BatchMalformed: a body is no map, or lacks a field of its type.
    """
    found = [_known(record) for record in decode_records(batch)]
    return [known for known in found if known is not None]


def decode_sound(batch: Batch) -> list[Known]:
    """Do the same for a reader of another server's log, which must go on: records that lack a field of their type are
    skipped.

    Raises:
        BatchMalformed: a body is no map.
    """
    found: list[Known] = []
    for record in decode_records(batch):
        try:
            known = _known(record)
        except BatchMalformed:
            continue
        if known is not None:
            found.append(known)
    return found


def _known(record: Record) -> Known | None:
    kind = record.get("type")
    made = CLASSES.get(kind) if isinstance(kind, str) else None
    if made is None:
        return None
    values = [record.get(name) for name in made._fields]
    for name, value, needed in zip(made._fields, values, FIELDS[made], strict=True):
        if not isinstance(value, needed) or (isinstance(value, list) and not _is_watermark(value)):
            raise BatchMalformed(f"a control record of type {kind!r} has no {name}")
    return made._make(cast("list[Any]", values))


def _is_watermark(value: list[int]) -> bool:
    return len(value) == 2 and all(isinstance(number, int) for number in value)


QUOTA_PREFIX = b"quota/"  # `<subject>` [per_second, pending, pending_bytes], each a number or nil (docs/quotas.md).


class QuotaLimits(NamedTuple):
    """What may be pending for a subject; None is no limit."""

    per_second: int | None = None
    pending: int | None = None
    pending_bytes: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self != NO_LIMITS

    def share(self, place: int, servers: int) -> "QuotaLimits":
        """The part of each limit that one of several delay servers has; the parts of all add up to the limit.

        An example: of 100 messages the servers 0, 1 and 2 have 34, 33 and 33.
        """
        return QuotaLimits(*(None if most is None else most // servers + (place < most % servers) for most in self))


NO_LIMITS = QuotaLimits()


def quota_key(subject: bytes) -> bytes:
    """The key of a subject's quota in the state."""
    return QUOTA_PREFIX + subject


def encode_limits(limits: QuotaLimits) -> bytes:
    """The value of a quota in the state."""
    return cast(bytes, msgpack.packb(list(limits)))


def decode_limits(value: bytes) -> QuotaLimits:
    """Read what `encode_limits` has encoded."""
    return QuotaLimits._make(cast("list[int | None]", msgpack.unpackb(value)))
