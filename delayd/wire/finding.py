"""Finding: the pending messages of a subject and a window of due instants, a piece at a time (docs/protocol.md, FIND).

Invariant: pieces rise by filing hour and, within an hour, by sequence; the place where a piece ends is where the next
one begins. The batch of a piece, if one was asked for, has the piece's rows in the same order.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BatchKind, Buffer, ColumnId
from delayd.batch.labels import encode_tags
from delayd.batch.names import check_subject
from delayd.batch.validate import check_batch
from delayd.errors import BadArgument, BadRequest
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.ending import Asked
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_instant,
    need_int,
    need_str,
    need_u32,
    need_u64,
)

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


class Window(NamedTuple):
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
    ``in_flight`` counts rows that a target may hold at this moment; they are not among the rows.
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


def read_window(head: Head) -> Window:
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
    return Window(subject, from_ms, to_ms, place, until, limit, tag, content, need_u64(head, "origin"))


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
