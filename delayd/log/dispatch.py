"""Dispatch log of an hour: OUTCOME batches (docs/formats/dispatch.md, version 1).

Values that the rows of one handed-over batch have in common are stored once, as a *part* in the heap.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, encode
from delayd.batch.columns import BatchKind, ColumnId, OutcomePart
from delayd.errors import BatchMalformed

PART = np.dtype(
    [
        ("target_log_id", "<u8"),
        ("epoch", "<u8"),
        ("batch_id", "<u8"),
        ("claimed_at_ms", "<i8"),
        ("target_appended_at_ms", "<i8"),
        ("target_offset", "<u8"),
        ("count", "<u4"),
        ("outcome", "u1"),
        ("reason", "u1"),
        ("attempt", "<u2"),
        ("reserved", "<u8"),
    ]
)

PACKED_PART = struct.Struct("<QQQqqQIBBHQ")  # The same, to pack a part in plain integers.
assert PACKED_PART.size == PART.itemsize, "a packed part is a part"

# How much of an hour's dispatch log is durable, as the checkpoint file publishes it; ``length`` counts groups.
END_ROW = np.dtype([("hour", "<u4"), ("zero", "<u4"), ("length", "<u8")])


class Outcome(IntEnum):
    """What became of a message (rule S2)."""

    DISPATCHED = 1
    CANCELLED = 2
    DEAD = 3
    EXPIRED = 4
    IN_DOUBT = 5


class Reason(IntEnum):
    """Why a message was CANCELLED (docs/keys.md); 0 stands in parts of all other outcomes."""

    CANCELLED = 1  # A caller asked for it.
    MOVED = 3
    REPLACED = 4
    REJECTED = 5
    KEPT = 6
    IN_FLIGHT = 7
    DRAINED = 8  # It lives on at another delay server, to which an operator moved it (docs/drain.md).


_REASON_NAMES = {reason.value: reason.name.lower() for reason in Reason}


def reason_name(reason: int) -> str:
    """The reason as people read it; a number that this version does not know stays a number."""
    return _REASON_NAMES.get(reason, str(reason))


class NewPart(NamedTuple):
    """Rows with the same outcome: columns of equal length, and the values that they share."""

    sequences: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.int64]
    outcome: Outcome
    claimed_at_ms: int = 0
    target_log_id: int = 0
    epoch: int = 0
    batch_id: int = 0
    target_appended_at_ms: int = 0
    target_offset: int = 0
    attempt: int = 1
    hashes: NDArray[np.uint64] | None = None  # One content hash a row; None where nobody has read the rows' contents.
    # Of CANCELLED rows; `batch_id` and `target_appended_at_ms` then name the other row. Of DRAINED rows that row is at
    # the delay server ``target_log_id``, and `target_appended_at_ms` is when that one accepted it.
    reason: int = 0

    def stated_hashes(self) -> NDArray[np.uint64]:
        """The content hash of each row, 0 where it is not known."""
        return np.zeros(len(self.sequences), np.uint64) if self.hashes is None else self.hashes

    def only(self, chosen: NDArray[np.bool_]) -> "list[NewPart]":
        """Some of the rows; several parts where each row names another one and a row between them is left out."""
        places = np.flatnonzero(chosen)
        if not len(places):
            return []
        if self.outcome != Outcome.CANCELLED or self.reason <= Reason.CANCELLED:
            return [self._take(places)]
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        return [self._take(run)._replace(batch_id=self.batch_id + int(run[0])) for run in runs]

    def _take(self, places: NDArray[np.intp]) -> "NewPart":
        hashes = None if self.hashes is None else self.hashes.take(places)
        return self._replace(
            sequences=self.sequences.take(places), deliver_at_ms=self.deliver_at_ms.take(places), hashes=hashes
        )


class OutcomeRows(NamedTuple):
    """Decoded outcomes; ``parts`` is PART[m], ``part_of`` is for each row the index of its part."""

    sequences: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.int64]
    parts: NDArray[np.void]
    part_of: NDArray[np.int64]
    content_hash: NDArray[np.uint64]  # 0: not stated.

    def others(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        """The sequences that some rows name: of the row that took their place, or that they met; 0 where there is none.

        The rows of one part name rows that follow one another.
        """
        part_of = self.part_of.take(rows)
        parts = self.parts.take(part_of)
        names = _name_others(parts)
        after_first = rows - np.searchsorted(self.part_of, part_of)
        return np.where(names, parts["batch_id"] + after_first.astype(np.uint64), np.uint64(0))

    def highest_sequence(self) -> int:
        """The highest sequence of their own server that they name, of their rows or of `others`; 0 when there is none.

        The other row of a DRAINED one is at another delay server, so it does not count.
        """
        parts = self.parts[_name_others(self.parts) & (self.parts["reason"] != Reason.DRAINED)]
        others = parts["batch_id"] + parts["count"] - np.uint64(1)
        return max(int(self.sequences.max(initial=0)), int(others.max(initial=0)))


def _name_others(parts: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which parts name another row for each of their rows."""
    found: NDArray[np.bool_] = (parts["outcome"] == Outcome.CANCELLED) & (parts["reason"] > Reason.CANCELLED)
    return found


NO_OUTCOMES = OutcomeRows(
    sequences=np.empty(0, np.uint64),
    deliver_at_ms=np.empty(0, np.int64),
    parts=np.empty(0, PART),
    part_of=np.empty(0, np.int64),
    content_hash=np.empty(0, np.uint64),
)


def encode_outcomes(hour: int, new: Sequence[NewPart]) -> bytes:
    """Make one OUTCOME batch of an hour; at most 65,536 rows in all."""
    parts = [
        PACKED_PART.pack(
            *(part.target_log_id, part.epoch, part.batch_id, part.claimed_at_ms, part.target_appended_at_ms),
            *(part.target_offset, len(part.sequences), part.outcome, part.reason, part.attempt, 0),
        )
        for part in new
    ]
    sequences, deliver_at_ms, hashes = join_columns(new)
    columns = [
        (ColumnId.DELIVER_AT_MS, deliver_at_ms),
        (ColumnId.SEQUENCE, sequences),
        (ColumnId.CONTENT_HASH, hashes),
    ]
    return encode(BatchKind.OUTCOME, OutcomePart(hour), len(sequences), columns, parts)


def join_columns(parts: Sequence[NewPart]) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]]:
    """Sequences, due instants and content hashes of the rows of several parts, one at least."""
    if len(parts) == 1:  # Mostly there is one part, and nothing needs to be copied.
        (part,) = parts
        return part.sequences, part.deliver_at_ms, part.stated_hashes()
    return (
        np.concatenate([part.sequences for part in parts]),
        np.concatenate([part.deliver_at_ms for part in parts]),
        np.concatenate([part.stated_hashes() for part in parts]),
    )


def decode_outcomes(batches: Sequence[Batch]) -> OutcomeRows:
    """Gather the rows of OUTCOME batches, in order.

    Raises:
        BatchMalformed: the parts of a batch do not add up to its rows.
    """
    if not batches:
        return NO_OUTCOMES
    tables = [np.frombuffer(batch.heap, PART) for batch in batches]
    for batch, table in zip(batches, tables, strict=True):
        if int(table["count"].sum()) != batch.count:
            raise BatchMalformed(f"parts of {int(table['count'].sum())} rows do not add up to {batch.count}")
    # numpy joins tables of several fields some hundred times slower than Python joins bytes.
    parts = np.frombuffer(b"".join([batch.heap for batch in batches]), PART)
    return OutcomeRows(
        np.concatenate([batch.uint64s(ColumnId.SEQUENCE) for batch in batches]),
        np.concatenate([batch.int64s(ColumnId.DELIVER_AT_MS) for batch in batches]),
        parts,
        np.repeat(np.arange(len(parts)), parts["count"]),
        np.concatenate([batch.content_hashes() for batch in batches]),
    )
