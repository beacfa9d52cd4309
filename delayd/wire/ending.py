"""Ending: what CANCEL and GET ask of rows, and the answer to each row (docs/protocol.md, docs/keys.md).

Invariant: each answer stands where its row was asked.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, encode, lay_out, one_subject_table, parse
from delayd.batch.columns import BatchKind, Buffer, ColumnArray, ColumnId, Int64s
from delayd.batch.validate import check_batch
from delayd.errors import BadKey, BadRequest, BatchMalformed
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.frame import Head
from delayd.wire.heads import need_u64

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
KEY_ROWS_MAX = 8_192  # With the longest keys, so many rows of a request by key fit the body of one (wire/limits.py).
assert ANSWER.itemsize == ANSWER_BYTES, "the columns of an answer leave no gap"

AnswerRows = NDArray[np.void]  # Its dtype is ANSWER.


class CancelAnswer(IntEnum):
    """What a server answers to the wish to cancel one message."""

    CANCELLED = 1
    ALREADY_DISPATCHED = 2
    IN_FLIGHT = 3
    UNKNOWN = 4


class RescheduleAnswer(IntEnum):
    """What a server answers to the wish to move one message to another instant."""

    MOVED = 1
    ALREADY_DISPATCHED = 2
    IN_FLIGHT = 3
    UNKNOWN = 4
    CANCELLED = 5


class MessageState(IntEnum):
    """What became of a message so far."""

    UNKNOWN = 0
    PENDING = 1
    IN_FLIGHT = 2
    DISPATCHED = 3
    DEAD = 4
    EXPIRED = 5
    IN_DOUBT = 6
    CANCELLED = 7
    MOVED = 8
    REPLACED = 9
    REJECTED = 10
    KEPT = 11
    DRAINED = 12  # It is at another delay server: ``target_log_id``, ``other`` and ``target_appended_at_ms`` say where.


class Asked(NamedTuple):
    """The rows that a request names: columns of equal length, in its order."""

    sequences: NDArray[np.uint64]
    deliver_at_ms: Int64s
    accepted_at_ms: Int64s

    def take(self, rows: Sequence[int]) -> "Asked":
        """Some of the rows, in this order."""
        return Asked(self.sequences.take(rows), self.deliver_at_ms.take(rows), self.accepted_at_ms.take(rows))


class AskedKeys(NamedTuple):
    """The rows that a request names by their keys, all of one subject, in its order."""

    subject: bytes
    keys: Sequence[bytes]
    numbers: Sequence[int] = ()  # Of each row's try, the same each time that it is asked (rule I1); or none.

    def take(self, rows: Sequence[int]) -> "AskedKeys":
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

    def take(self, rows: NDArray[np.intp]) -> "Tries":
        """Those of some rows."""
        return self._replace(numbers=self.numbers.take(rows))


class MoveTry(NamedTuple):
    """The number under which a caller asks for a move of rows by their receipts, one for all of them (docs/keys.md,
    Tries).
    """

    asker: int
    low_water: int  # As in `Tries`.
    number: int

    def take(self, rows: NDArray[np.intp]) -> "MoveTry":
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
