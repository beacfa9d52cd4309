"""What requests ask of rows at a delay server, and the answer to each row (docs/protocol.md, docs/keys.md).

CANCEL, GET and RESCHEDULE name rows by receipt or by key. Invariant: each answer stands where its row was asked.

FIND asks for the pending messages of a subject and a window of due instants, a piece at a time. Invariant: pieces rise
by filing hour and, within an hour, by sequence; the place where a piece ends is where the next one begins. The batch of
a piece, if one was asked for, has the piece's rows in the same order.

DRAIN is an operator's command to a delay server whose pending messages move to others, piece by piece (docs/drain.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, encode, lay_out, one_subject_table, parse
from delayd.batch.columns import BatchKind, Buffer, ColumnArray, ColumnId, Int64s
from delayd.batch.labels import encode_tags
from delayd.batch.names import check_subject
from delayd.batch.validate import check_batch
from delayd.errors import BadArgument, BadKey, BadRequest, BatchMalformed
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_instant,
    need_int,
    need_str,
    need_u32,
    need_u64,
)
from delayd.wire.meta import SlotSet, need_slots, slots_bytes

ANSWER = np.dtype(
    [
        ("answer", "u1"),
        ("state", "u1"),
        ("attempt", "<u2"),
        ("zero", "<u4"),
        ("deliver_at_ms", "<i8"),
        ("decided_at_ms", "<i8"),  # When it was handed over or ended; 0 while it is pending.
        ("target_log_id", "<u8"),
        ("target_appended_at_ms", "<i8"),
        ("target_offset", "<u8"),
        ("other", "<u8"),  # The sequence of the row that took its place, or that it met.
        ("other_at_ms", "<i8"),
        # The row that is told about, with ``deliver_at_ms`` all that a receipt says: the newest row of a moved message.
        ("sequence", "<u8"),
        ("accepted_at_ms", "<i8"),
    ]
)
ANSWER_BYTES = 80
# With the longest keys, so many rows fit the body of a request (`requests.ASKED_BODY_BYTES_MAX`).
KEY_ROWS_MAX = 8_192
assert ANSWER.itemsize == ANSWER_BYTES, "the columns of an answer leave no gap"

AnswerRows = NDArray[np.void]  # Its dtype is ANSWER.


class CancelAnswer(IntEnum):
    """What a server answers to the wish to cancel one message."""

    CANCELLED = 1
    ALREADY_DISPATCHED = 2
    IN_FLIGHT = 3
    UNKNOWN = 4
    CHANGED = 6


class RescheduleAnswer(IntEnum):
    """What a server answers to the wish to move one message to another instant."""

    MOVED = 1
    ALREADY_DISPATCHED = 2
    IN_FLIGHT = 3
    UNKNOWN = 4
    CANCELLED = 5
    CHANGED = 6


class Asked(NamedTuple):
    """The rows that a request names: columns of equal length, in its order."""

    sequences: NDArray[np.uint64]
    deliver_at_ms: Int64s
    accepted_at_ms: Int64s

    def take(self, rows: Sequence[int]) -> Asked:
        """Some of the rows, in this order."""
        return Asked(self.sequences.take(rows), self.deliver_at_ms.take(rows), self.accepted_at_ms.take(rows))


class AskedKeys(NamedTuple):
    """The rows that a request names by their keys, all of one subject, in its order."""

    subject: bytes
    keys: Sequence[bytes]
    numbers: Sequence[int] = ()  # Of each row's try, the same each time that it is asked (rule I1); or none.

    def take(self, rows: Sequence[int]) -> AskedKeys:
        """Some of the rows, in this order."""
        numbers = [self.numbers[row] for row in rows] if self.numbers else ()
        return AskedKeys(self.subject, [self.keys[row] for row in rows], numbers)


def encode_asked_keys(asked: AskedKeys, wanted_at_ms: Int64s | None = None) -> bytes:
    """Make the body of a request by key, of at most `KEY_ROWS_MAX` rows; ``wanted_at_ms`` as in `encode_asked`."""
    table = one_subject_table(asked.subject)
    ends, keys = lay_out(asked.keys, len(table))
    columns: list[tuple[ColumnId, ColumnArray]] = [(ColumnId.KEY_END, ends)]
    if asked.numbers:
        columns.append((ColumnId.ORIGIN_SEQUENCE, np.array(asked.numbers, np.uint64)))
    if wanted_at_ms is not None:
        columns.append((ColumnId.WANTED_AT_MS, wanted_at_ms))
    return encode(BatchKind.ASKED, None, len(asked.keys), columns, [table, keys], 1)


def read_asked_keys(body: Buffer) -> Batch | None:
    """Read the body of a request by key: a verified batch in which each row has a key. None when the request names
    rows by their receipts: `read_asked` reads it.

    Raises:
        BadKey, BadSubject, BatchMalformed: it is not one ASKED batch, or names what is no key.
    """
    batch = _parse_asked(body)
    if ColumnId.KEY_END not in batch.offsets:
        return None
    batch.verify()
    check_batch(batch)
    if len(batch.keyed_rows()) < batch.count:
        raise BadKey("a row of a request by key has none")
    return batch


class Tries(NamedTuple):
    """The numbers under which a caller asks for a change of rows by their keys (docs/keys.md, Tries)."""

    asker: int
    low_water: int  # The caller asks under no lower number again.
    numbers: NDArray[np.uint64]  # For each row of the request.

    def take(self, rows: NDArray[np.intp]) -> Tries:
        """Those of some rows."""
        return self._replace(numbers=self.numbers.take(rows))


class MoveTry(NamedTuple):
    """The number under which a caller asks for a move of rows by their receipts, one for all of them (docs/keys.md,
    Tries).
    """

    asker: int
    low_water: int  # As in `Tries`.
    number: int

    def take(self, rows: NDArray[np.intp]) -> MoveTry:
        """That of some rows."""
        return self


def read_tries(head: Head, names: Batch) -> Tries | None:
    """The numbers of a request by key; None when it has none.

    Raises:
        BadRequest: it names an asker and no numbers, or the other way round.
    """
    numbered = ColumnId.ORIGIN_SEQUENCE in names.offsets
    if ("asker" in head) != numbered:
        raise BadRequest("the numbers of tries and their asker come together", field="asker")
    if not numbered:
        return None
    return Tries(*_asker(head), names.uint64s(ColumnId.ORIGIN_SEQUENCE))


def read_move_try(head: Head) -> MoveTry | None:
    """The number of a move by receipt; None when it has none.

    Raises:
        BadRequest: it names an asker and no number, or the other way round.
    """
    if ("asker" in head) != ("number" in head):
        raise BadRequest("the number of a try and its asker come together", field="asker")
    return MoveTry(*_asker(head), need_u64(head, "number")) if "asker" in head else None


def _asker(head: Head) -> tuple[int, int]:
    """The asker of a request with numbers, and its low-water mark."""
    asker, low_water = need_u64(head, "asker"), need_u64(head, "low_water")
    if not asker:
        raise BadRequest("asker 0 is the server itself", field="asker")
    return asker, low_water


def wanted_of_keys(names: Batch, *, moves: bool) -> Int64s | None:
    """The instants to which a request by key wants its rows moved, None unless it ``moves`` rows.

    Raises:
        BatchMalformed: it does not say to which instants, or says so and moves nothing.
    """
    says = ColumnId.WANTED_AT_MS in names.offsets
    if moves and not says:
        raise BatchMalformed("it does not say to which instants the rows are to be moved")
    if says and not moves:
        raise BatchMalformed("it wants rows moved, which only a RESCHEDULE does")
    return names.int64s(ColumnId.WANTED_AT_MS) if moves else None


def encode_asked(asked: Asked, wanted_at_ms: Int64s | None = None) -> bytes:
    """Make the body of a request; ``wanted_at_ms`` are the instants to which the rows are to be moved."""
    columns = [
        (ColumnId.DELIVER_AT_MS, asked.deliver_at_ms),
        (ColumnId.SEQUENCE, asked.sequences),
        (ColumnId.ACCEPTED_AT_MS, asked.accepted_at_ms),
    ]
    if wanted_at_ms is not None:
        columns.append((ColumnId.WANTED_AT_MS, wanted_at_ms))
    return encode(BatchKind.ASKED, None, len(asked.sequences), columns, [])


def read_asked(body: Buffer) -> Asked:
    """Read the body of a request.

    Raises:
        BadRequest, BatchMalformed: it is not one ASKED batch of rows that a server can have.
    """
    asked, wanted_at_ms = _read(body)
    if wanted_at_ms is not None:
        raise BatchMalformed("it wants rows moved, which only a RESCHEDULE does")
    return asked


def read_moves(body: Buffer) -> tuple[Asked, Int64s]:
    """Read the body of a request that moves rows: the rows, and the instant that is wanted for each; raises as
    `read_asked`.
    """
    asked, wanted_at_ms = _read(body)
    if wanted_at_ms is None:
        raise BatchMalformed("it does not say to which instants the rows are to be moved")
    return asked, wanted_at_ms


def _read(body: Buffer) -> tuple[Asked, Int64s | None]:
    batch = _parse_asked(body)
    if ColumnId.KEY_END in batch.offsets:
        raise BadRequest("it names its rows by their keys", field="body")
    batch.verify()
    check_batch(batch)
    asked = Asked(
        batch.uint64s(ColumnId.SEQUENCE), batch.int64s(ColumnId.DELIVER_AT_MS), batch.int64s(ColumnId.ACCEPTED_AT_MS)
    )
    for name in ("deliver_at_ms", "accepted_at_ms"):
        column: Int64s = getattr(asked, name)
        if not 0 <= int(column.min()) <= int(column.max()) <= INSTANT_MS_MAX:
            raise BadRequest(f"{name} has an instant that no message has", field=name)
    return asked, batch.int64s(ColumnId.WANTED_AT_MS) if ColumnId.WANTED_AT_MS in batch else None


def _parse_asked(body: Buffer) -> Batch:
    batch = parse(memoryview(body))
    if batch.kind is not BatchKind.ASKED:
        raise BatchMalformed(f"a batch of kind {batch.kind.name} asks for nothing; a request has an ASKED batch")
    return batch


def decode_answers(body: Buffer) -> AnswerRows:
    """Read the body of an answer; BadRequest when it is not made of answers."""
    if len(body) % ANSWER_BYTES:
        raise BadRequest(f"a body of {len(body)} bytes is not made of answers", field="body")
    return np.frombuffer(body, ANSWER)


ROWS_MAX = 65_536  # Of one piece.
FOUND = np.dtype([("sequence", "<u8"), ("deliver_at_ms", "<i8"), ("accepted_at_ms", "<i8")])
FoundRows = NDArray[np.void]  # Its dtype is FOUND.


class Content(IntEnum):
    """What a piece has beside its rows: nothing; keys, tags and sizes; or headers and bodies, too."""

    NONE = 0
    LABELS = 1
    WHOLE = 2


class Place(NamedTuple):
    """Where a walk through the rows goes on: behind this row of this filing hour."""

    hour: int = 0
    sequence: int = 0


class AskedWindow(NamedTuple):
    """What is looked for, and from where on.

    ``until_sequence`` bounds the walk to rows that were there when it began; 0: it begins with this piece.
    """

    subject: bytes  # Empty for every subject, which only a server asks itself.
    from_ms: int
    to_ms: int
    place: Place = Place()
    until_sequence: int = 0
    rows_max: int = ROWS_MAX
    tag: str = ""  # Only messages with this tag; "": with any, or none.
    content: Content = Content.NONE
    origin: int = 0  # Only later lives of the message with this sequence; 0: all messages.
    # Only a server asks these itself: of which subjects, in place of one; `RETRY_PREFIX` stands for all that begin so.
    # Rows that a target may hold are listed, too, and dead letters are not.
    subjects: frozenset[bytes] = frozenset()

    def to_head(self, log_id: int) -> dict[str, HeadValue]:
        """As the head of FIND."""
        return {
            "log_id": log_id,
            "subject": self.subject.decode("ascii"),
            "from_ms": self.from_ms,
            "to_ms": self.to_ms,
            "hour": self.place.hour,
            "sequence": self.place.sequence,
            "until_sequence": self.until_sequence,
            "limit": self.rows_max,
            "tag": self.tag,
            "content": self.content,
            "origin": self.origin,
        }


class Piece(NamedTuple):
    """What was found, and where the walk goes on; ``place`` is None at its end.

    ``accepted_at_ms`` of a row is an instant of its filing hour, which is all that a request about it needs.
    ``in_flight`` counts rows that a target may hold at this moment; they are among the rows only if the window says so.
    ``unread`` counts the hours of which something could not be read: rows of them may be missing.
    ``batch`` is a SCHEDULE batch of the rows, when their content was asked for and there are any. With
    `Content.LABELS` its bodies are left out: their lengths are in the column BODY_LEFT_OUT.
    """

    rows: FoundRows
    in_flight: int
    unread: int
    until_sequence: int
    place: Place | None
    batch: Batch | None = None

    def to_head(self) -> dict[str, HeadValue]:
        """As the head of the answer."""
        place: HeadValue = None if self.place is None else list(self.place)
        return {
            "rows": len(self.rows),
            "in_flight": self.in_flight,
            "unread": self.unread,
            "until_sequence": self.until_sequence,
            "next": place,
        }

    def to_body(self) -> list[Buffer]:
        """As the body of the answer: the rows, and behind them the batch."""
        rows: Buffer = self.rows.tobytes()
        return [rows] if self.batch is None else [rows, self.batch.buffer]

    def asked(self) -> Asked:
        """The rows as a request names them."""
        rows = self.rows
        return Asked(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), rows["accepted_at_ms"].copy())


def read_window(head: Head) -> AskedWindow:
    """Read the head of FIND; BadRequest, BadSubject, BadTags or BadArgument when it is none."""
    subject = need_str(head, "subject").encode()
    check_subject(subject)
    from_ms, to_ms = need_instant(head, "from_ms"), need_instant(head, "to_ms")
    if from_ms >= to_ms:
        raise BadArgument(f"the window from {from_ms} to {to_ms} has no instant in it")
    place = Place(need_u32(head, "hour"), need_u64(head, "sequence"))
    until, limit = need_u64(head, "until_sequence"), need_int(head, "limit", 1, ROWS_MAX)
    tag = need_str(head, "tag")
    if tag:
        encode_tags([tag])
    content = Content(need_int(head, "content", 0, max(Content)))
    return AskedWindow(subject, from_ms, to_ms, place, until, limit, tag, content, need_u64(head, "origin"))


def read_piece(head: Head, body: Buffer) -> Piece:
    """Read the answer to FIND.

    Raises:
        BadRequest, BatchMalformed, CallerError: it is none, or its batch is not one of its rows.
    """
    count = need_int(head, "rows", 0, ROWS_MAX)
    view = memoryview(body)
    if len(view) < count * FOUND.itemsize:
        raise BadRequest(f"a body of {len(view)} bytes has no {count} rows", field="body")
    rows = np.frombuffer(view, FOUND, count)
    for name in ("deliver_at_ms", "accepted_at_ms"):
        if count and not 0 <= int(rows[name].min()) <= int(rows[name].max()) <= INSTANT_MS_MAX:
            raise BadRequest(f"{name} has an instant that no message has", field=name)
    match head.get("next"):
        case None:
            place = None
        case [int(hour), int(sequence)] if hour >= 0 and sequence >= 0:
            place = Place(hour, sequence)
        case _:
            raise BadRequest("next is no hour and sequence", field="next")
    rest = view[count * FOUND.itemsize :]
    batch = _batch_of(rows, rest) if rest else None
    in_flight, unread = need_int(head, "in_flight"), need_int(head, "unread")
    return Piece(rows, in_flight, unread, need_u64(head, "until_sequence"), place, batch)


def _batch_of(rows: FoundRows, rest: memoryview) -> Batch:
    batch = parse(rest)
    batch.verify()
    check_batch(batch)
    if batch.kind is not BatchKind.SCHEDULE or batch.count != len(rows) or batch.total_bytes != len(rest):
        raise BadRequest("what follows the rows is not one SCHEDULE batch of them", field="body")
    for column in (ColumnId.SEQUENCE, ColumnId.DELIVER_AT_MS):
        if not bool((batch.column(column) == rows[column.name.lower()]).all()):
            raise BadRequest("the batch has other messages than the rows", field="body")
    return batch


class DrainOrder(NamedTuple):
    """One piece of a walk through the pending messages."""

    to: int  # The delay server that gets them; 0: they are only counted.
    slots: SlotSet | None  # Messages whose keys fall into these slots; None: those without a key.
    place: Place = Place()
    until_sequence: int = 0

    def to_head(self) -> dict[str, HeadValue]:
        """As the head of DRAIN."""
        return {
            "to": self.to,
            "slots": None if self.slots is None else slots_bytes(self.slots),
            "hour": self.place.hour,
            "sequence": self.place.sequence,
            "until_sequence": self.until_sequence,
        }


class DrainProgress(NamedTuple):
    """What became of one piece."""

    found: int  # Pending messages that the piece looked at.
    drained: int  # Those of them that leave, durably decided.
    in_flight: int
    unread: int  # Schedule logs that could not be read.
    leaving: int  # Messages that have been decided about and that no other server has taken yet.
    left: int  # At the end of a walk through slots: messages with keys of them that are still here.
    until_sequence: int
    place: Place | None  # Where the next piece begins; None at the end.

    def to_head(self) -> dict[str, HeadValue]:
        """As the head of the answer."""
        head: dict[str, HeadValue] = {**self._asdict()}
        head["next"] = None if self.place is None else list(self.place)
        del head["place"]
        return head


def read_drain_order(head: Head) -> DrainOrder:
    """Read the head of DRAIN; BadRequest when it is none."""
    slots = None if head.get("slots") is None else need_slots(head, "slots")
    place = Place(need_u32(head, "hour"), need_u64(head, "sequence"))
    return DrainOrder(need_u64(head, "to"), slots, place, need_u64(head, "until_sequence"))


def read_drain_progress(head: Head) -> DrainProgress:
    """Read the answer to DRAIN; BadRequest when it is none."""
    match head.get("next"):
        case None:
            place = None
        case [int(hour), int(sequence)] if hour >= 0 and sequence >= 0:
            place = Place(hour, sequence)
        case _:
            raise BadRequest("next is no hour and sequence", field="next")
    return DrainProgress(
        found=need_int(head, "found"),
        drained=need_int(head, "drained"),
        in_flight=need_int(head, "in_flight"),
        unread=need_int(head, "unread"),
        leaving=need_int(head, "leaving"),
        left=need_int(head, "left"),
        until_sequence=need_u64(head, "until_sequence"),
        place=place,
    )
