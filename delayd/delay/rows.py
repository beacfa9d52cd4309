"""Pending rows: what the delay server keeps in memory of each message, 32 bytes and never its body.

Invariant: a row fires at its due instant, before its filing hour ends, so ``due_ms < HOUR_MS``.

``due_ms`` counts from the start of the filing hour. A log that was stamped by a clock far ahead files messages in hours
long after they are due: below -COARSE_FROM_MS, 12 days before the hour, the column counts whole seconds, for 34 years.

    due_ms               fires at the start of the hour plus
    5                    5 ms
    -(1 << 30)           -(1 << 30) ms
    -(1 << 30) - 7       -(1 << 30) ms - 7 s

A location (delayd/batch/sequences.py) says where the row rests; bit 62 alone: in the file beside a damaged schedule
log.

The rows of many stored batches are read as a few long columns, in the order of the log, so that later steps cost per
group and not per batch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import FEW_ROWS, SPARSE, BatchKind, ColumnId, Int64s
from delayd.batch.gather import CARRIED, ROW_COLUMNS_BYTES, SPARSE_COLUMN_BYTES, TAGS_COLUMNS_BYTES
from delayd.batch.sequences import OFFSET_BITS, ROW_BITS, Sequences, SequenceSet, pack_locations
from delayd.delay.subjects import Subjects
from delayd.hours import HOUR_MS
from delayd.kernel import choose
from delayd.log.group import CommitGroup

ROW = np.dtype(
    [
        ("due_ms", "<i4"),  # After the start of the filing hour; negative when due before it.
        ("length", "<u4"),  # The row needs this many bytes in a frame.
        ("subject", "<u4"),  # The server's number of the subject.
        ("hour", "<u4"),  # Filing hour, hours since the epoch.
        ("sequence", "<u8"),
        ("location", "<u8"),
    ]
)
ROW_BYTES = 32  # Two rows a cache line; 40 M rows of one hour take 1.3 GB.
assert ROW.itemsize == ROW_BYTES, "the columns of a row leave no gap"
ONE_ROW = struct.Struct("<iIIIQQ")  # The same, to pack a row in plain integers.
assert ONE_ROW.size == ROW_BYTES, "a packed row is a row"

# Added to offsets in the file beside a damaged schedule log (quarantine.py), so such a file holds at most 70 TB.
BESIDE = 1 << (OFFSET_BITS - 1)
COARSE_FROM_MS = 1 << 30  # A row that is due this long before its hour, or longer, fires to the second.
COARSE_MS = 1_000
# 34 years in seconds: a row that was due even longer before its hour fires as if due then, so never early.
COARSE_MAX = (1 << 30) - 1

# Numpy copies opaque items as bytes, but structured ones column by column, which takes 5 to 40 times as long.
OPAQUE_ROW = np.dtype((np.void, ROW_BYTES))

Rows = npt.NDArray[np.void]  # Its dtype is ROW.
NO_ROWS: Final[Rows] = np.zeros(0, ROW)


def new_rows(count: int) -> Rows:
    """Rows of zeros, for a caller to fill column by column."""
    return np.zeros(count, ROW)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Copy rows one after the other into a new array; at least one part."""
    return np.concatenate([rows.view(OPAQUE_ROW) for rows in parts]).view(ROW)


def copy_rows(target: Rows, position: int, rows: Rows) -> None:
    """Copy rows over those of ``target`` from ``position`` on, which must have room for them."""
    target.view(OPAQUE_ROW)[position : position + len(rows)] = rows.view(OPAQUE_ROW)


def due_at_ms(rows: Rows) -> npt.NDArray[np.int64]:
    """Instant at which each row fires: int64[n], a new array."""
    instants = rows["hour"].astype(np.int64)
    instants *= HOUR_MS
    due_ms = rows["due_ms"]
    instants += due_ms
    if len(rows) and due_ms.min() < -COARSE_FROM_MS:
        coarse = np.flatnonzero(due_ms < -COARSE_FROM_MS)
        instants[coarse] += (due_ms.take(coarse).astype(np.int64) + COARSE_FROM_MS) * (COARSE_MS - 1)
    return instants


def hour_span(rows: Rows) -> tuple[int, int]:
    """The lowest and the highest filing hour of rows, one at least."""
    if len(rows) > FEW_ROWS:
        return int(rows["hour"].min()), int(rows["hour"].max())
    hours = rows["hour"].tolist()
    return min(hours), max(hours)


def latest_due_ms(rows: Rows) -> int:
    """The latest instant at which one of the rows fires; there must be at least one row."""
    if len(rows) > FEW_ROWS:
        return int(due_at_ms(rows).max())
    # For so few rows plain integers take a third of the time of arrays, and nearly always all rows are of one hour.
    hours: list[int] = rows["hour"].tolist()
    due_ms: list[int] = rows["due_ms"].tolist()
    if hours.count(hours[0]) == len(hours):
        return hours[0] * HOUR_MS + decode_due(max(due_ms))
    return max(hour * HOUR_MS + decode_due(after_ms) for hour, after_ms in zip(hours, due_ms, strict=True))


def encode_due(after_ms: int) -> int:
    """Column ``due_ms`` of a row that is due ``after_ms`` after the start of its filing hour; the row never fires
    early.
    """
    if after_ms >= -COARSE_FROM_MS:
        return after_ms
    return -COARSE_FROM_MS - min((-COARSE_FROM_MS - after_ms) // COARSE_MS, COARSE_MAX)


def decode_due(due_ms: int) -> int:
    """How long after the start of its filing hour a row fires, in ms."""
    return due_ms if due_ms >= -COARSE_FROM_MS else (due_ms + COARSE_FROM_MS) * COARSE_MS - COARSE_FROM_MS


def due_by(after_ms: int) -> int:
    """The highest ``due_ms`` of rows that are due when ``after_ms`` have passed since the start of their filing
    hour.
    """
    return after_ms if after_ms >= -COARSE_FROM_MS else (after_ms + COARSE_FROM_MS) // COARSE_MS - COARSE_FROM_MS


def filing_hours(
    deliver_at_ms: npt.NDArray[np.int64], appended_at_ms: int | npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Hour in which rows are filed (rule P5): that of the later of the two instants; ``appended_at_ms`` may be one for
    all.
    """
    return (np.maximum(deliver_at_ms, appended_at_ms) // np.int64(HOUR_MS)).astype(np.uint32)


def due_within(deliver_at_ms: npt.NDArray[np.int64], hours: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """Column ``due_ms`` of rows filed in ``hours``; negative for rows that are due before their hour began (rule
    P5).
    """
    due = deliver_at_ms - hours.astype(np.int64) * HOUR_MS
    if len(due) and due.min() < -COARSE_FROM_MS:
        coarse = np.flatnonzero(due < -COARSE_FROM_MS)
        due[coarse] = -COARSE_FROM_MS - np.minimum((-COARSE_FROM_MS - due[coarse]) // COARSE_MS, COARSE_MAX)
    assert not len(due) or int(due.max()) < HOUR_MS, "a row is filed no earlier than the hour in which it is due"
    return due.astype(np.int32)


def without(rows: Rows, ended: Sequences) -> Rows:
    """The rows whose sequences are not among ``ended``, which is sorted."""
    return rows if not len(rows) else SequenceSet(ended, len(rows)).without(rows)


class Stored(NamedTuple):
    """A verified batch in a log: its offset there, and the sequence of its first row."""

    offset: int
    base_sequence: int
    batch: Batch


def stored_batches(group: CommitGroup) -> list[Stored]:
    """The batches of messages of a data group, with their places and first sequences.

    A CONTROL batch that stands before them has decisions about rows, and no row of its own.
    """
    stored: list[Stored] = []
    sequence = group.header.base_sequence
    for offset, batch in group.batches():
        if batch.kind is BatchKind.CONTROL:
            continue
        stored.append(Stored(offset, sequence, batch))
        sequence += batch.count
    return stored


_CARRIED = frozenset(CARRIED)


class Tabulated(NamedTuple):
    """Columns of n rows. Of each region that a batch has: where each row's item starts, counted from the heap of the
    row's batch, and the item's exact length.
    """

    deliver_at_ms: Int64s
    sequences: NDArray[np.uint64]
    batch_of: Int64s
    row_of: Int64s
    regions: dict[ColumnId, tuple[Int64s, Int64s]]


def tabulate(stored: Sequence[Stored], regions: Sequence[ColumnId] = CARRIED) -> Tabulated:
    """Join the columns of batches, at least one, one batch behind the other, with the places of items in ``regions``.

    Rows that wait to be handed over are as long as what a DISPATCH batch carries of them, hence the default.
    """
    batches = [entry.batch for entry in stored]
    counts = np.fromiter((batch.count for batch in batches), np.int64, len(batches))
    firsts = np.cumsum(counts) - counts
    total = int(firsts[-1] + counts[-1])
    batch_of = np.repeat(np.arange(len(batches)), counts)
    row_of = np.arange(total)
    row_of -= np.repeat(firsts, counts)
    deliver_at_ms = np.frombuffer(_joined(batches, ColumnId.DELIVER_AT_MS, 8), np.int64)
    if ColumnId.SEQUENCE in batches[0]:
        sequences = np.frombuffer(_joined(batches, ColumnId.SEQUENCE, 8), np.uint64)
    else:
        bases = np.fromiter((entry.base_sequence for entry in stored), np.int64, len(stored))
        sequences = (np.repeat(bases, counts) + row_of).astype(np.uint64)
    items: dict[ColumnId, tuple[Int64s, Int64s]] = {}
    # Most batches have one of few shapes, and share its set of columns.
    found = frozenset[int]().union(*{batch.layout.columns for batch in batches})
    for column in regions:
        if column not in found:
            continue
        having = [batch for batch in batches if column in batch.offsets]
        if len(having) == len(batches):
            ends = np.frombuffer(_joined(batches, column, 4), np.uint32).astype(np.int64)
        else:
            ends = np.concatenate([_ends(batch, column) for batch in batches])
        starts = _starts(batches, column, ends, firsts)
        items[column] = starts, ends - starts
    return Tabulated(deliver_at_ms, sequences, batch_of, row_of, items)


def subjects_of(stored: Sequence[Stored], per_batch: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    """The server's number of each row's subject, u32[n], by the numbers of each batch's subject table."""
    counts = [entry.batch.count for entry in stored]
    if any(ColumnId.SUBJECT in entry.batch.offsets for entry in stored):
        columns = [
            numbers.take(entry.batch.uint32s(ColumnId.SUBJECT))
            if ColumnId.SUBJECT in entry.batch.offsets
            else np.full(entry.batch.count, numbers[0])
            for entry, numbers in zip(stored, per_batch, strict=True)
        ]
        return np.concatenate(columns)
    return np.repeat(np.array([numbers[0] for numbers in per_batch], np.uint32), counts)


def rows_of(
    stored: Sequence[Stored],
    table: Tabulated,
    subject_of: NDArray[np.uint32],
    hours: NDArray[np.uint32],
    *,
    in_schedule_log: bool,
) -> Rows:
    """Make pending rows, filed in ``hours``, in the order of the table: ROW[n]."""
    rows = new_rows(len(hours))
    offsets = np.fromiter((entry.offset for entry in stored), np.uint64, len(stored))
    length = np.zeros(len(hours), np.int64)
    length += ROW_COLUMNS_BYTES
    for column, (_, lengths) in table.regions.items():
        length += (lengths + 7) & ~7
        if column == ColumnId.TAGS_END:
            length[lengths > 0] += TAGS_COLUMNS_BYTES
    for at, entry in enumerate(stored):
        for sparse in SPARSE:
            if sparse in entry.batch.offsets:
                length[table.batch_of == at] += SPARSE_COLUMN_BYTES * (entry.batch.uint64s(sparse) > 0)
    rows["due_ms"] = due_within(table.deliver_at_ms, hours)
    rows["length"] = length
    rows["subject"] = subject_of
    rows["hour"] = hours
    rows["sequence"] = table.sequences
    rows["location"] = pack_locations(in_schedule_log, offsets.take(table.batch_of), table.row_of.astype(np.uint16))
    return rows


def message_rows(stored: Sequence[Stored], subjects: Subjects, appended_at_ms: int) -> Rows:
    """Make the pending rows of batches that one group of the message log holds, filed by rule P5."""
    numbers = [subjects.of_batch(entry.batch) for entry in stored]
    return np.frombuffer(_pack_rows(stored, numbers, appended_at_ms), ROW)


def replayed_rows(stored: Sequence[Stored], subjects: Subjects, appended_at_ms: Sequence[int]) -> Rows:
    """Make the pending rows of batches of several groups; ``appended_at_ms`` is that of each batch's group."""
    table = tabulate(stored)
    instants = np.array(appended_at_ms, np.int64).take(table.batch_of)
    return _message_rows(stored, numbers_of(stored, subjects), table, instants)


def numbers_of(stored: Sequence[Stored], subjects: Subjects) -> list[NDArray[np.uint32]]:
    """The server's numbers of the subjects in each batch's table."""
    return [subjects.of_batch(entry.batch) for entry in stored]


def _message_rows(
    stored: Sequence[Stored], numbers: Sequence[NDArray[np.uint32]], table: Tabulated, appended_at_ms: int | Int64s
) -> Rows:
    hours = filing_hours(table.deliver_at_ms, appended_at_ms)
    return rows_of(stored, table, subjects_of(stored, numbers), hours, in_schedule_log=False)


def pack_rows(stored: Sequence[Stored], numbers: Sequence[NDArray[np.uint32]], appended_at_ms: int) -> Rows | bytearray:
    """The bytes of `message_rows`, by the numbers of each batch's subjects; the twin of a compiled piece."""
    if sum([entry.batch.count for entry in stored]) > FEW_ROWS:
        return _message_rows(stored, numbers, tabulate(stored), appended_at_ms)
    # Most groups are a few single messages, for which numpy calls would have a fixed cost above all else.
    packed = bytearray()
    for (offset, base_sequence, batch), subject_numbers in zip(stored, numbers, strict=True):
        count, buffer, offsets = batch.count, batch.buffer, batch.offsets
        lengths = [ROW_COLUMNS_BYTES] * count
        for column in batch.layout.regions:
            if column in _CARRIED:
                besides = TAGS_COLUMNS_BYTES if column == ColumnId.TAGS_END else 0
                start = batch.region_start(column)
                for row, end in enumerate(struct.unpack_from(f"<{count}I", buffer, offsets[column])):
                    if end > start:
                        lengths[row] += ((end - start + 7) & ~7) + besides
                    start = (end + 7) & ~7
        for sparse in SPARSE:
            if sparse in offsets:
                for row, value in enumerate(struct.unpack_from(f"<{count}Q", buffer, offsets[sparse])):
                    if value:
                        lengths[row] += SPARSE_COLUMN_BYTES
        named = subject_numbers.tolist()
        subject_of: Sequence[int] = [0] * count
        if ColumnId.SUBJECT in offsets:
            subject_of = struct.unpack_from(f"<{count}I", buffer, offsets[ColumnId.SUBJECT])
        location = offset << ROW_BITS
        for row, due in enumerate(struct.unpack_from(f"<{count}q", buffer, offsets[ColumnId.DELIVER_AT_MS])):
            hour = max(due, appended_at_ms) // HOUR_MS
            due_ms = due - hour * HOUR_MS
            if due_ms < -COARSE_FROM_MS:
                due_ms = encode_due(due_ms)
            subject = named[subject_of[row]]
            packed += ONE_ROW.pack(due_ms, lengths[row], subject, hour, base_sequence + row, location | row)
    return packed


_pack_rows = choose("message_rows", pack_rows)


def _joined(batches: Sequence[Batch], column: ColumnId, width: int) -> bytes:
    pieces = []
    for batch in batches:
        offset = batch.offsets[column]
        pieces.append(batch.buffer[offset : offset + width * batch.count])
    return b"".join(pieces)


def _starts(batches: Sequence[Batch], column: ColumnId, ends: Int64s, firsts: Int64s) -> Int64s:
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1]
    starts[1:] += 7
    starts[1:] &= ~7
    starts[firsts] = np.fromiter((batch.region_start(column) for batch in batches), np.int64, len(batches))
    return starts


def _ends(batch: Batch, column: ColumnId) -> Int64s:
    """The ends of a batch's items in a region; without the region its items are empty."""
    if column in batch:
        return batch.uint32s(column).astype(np.int64)
    return np.full(batch.count, batch.region_start(column))
