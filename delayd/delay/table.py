"""Table: the rows of many stored batches as a few long columns, so that later steps cost per group and not per batch.

Rows stand in the order of the log; no body is read.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import FEW_ROWS, SPARSE, ColumnId, Int64s
from delayd.batch.gather import CARRIED, ROW_COLUMNS_BYTES, SPARSE_COLUMN_BYTES, TAGS_COLUMNS_BYTES
from delayd.batch.sequences import ROW_BITS, pack_locations
from delayd.delay.rows import COARSE_FROM_MS, ONE_ROW, ROW, Rows, due_within, encode_due, filing_hours, new_rows
from delayd.delay.stored import Stored
from delayd.delay.subjects import Subjects
from delayd.hours import HOUR_MS

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


def subjects_of(stored: Sequence[Stored], table: Tabulated, subjects: Subjects) -> NDArray[np.uint32]:
    """The server's number of each row's subject: u32[n]."""
    per_batch = [subjects.of_batch(entry.batch) for entry in stored]
    counts = [entry.batch.count for entry in stored]
    if any(ColumnId.SUBJECT in entry.batch for entry in stored):
        columns = [
            numbers.take(entry.batch.uint32s(ColumnId.SUBJECT))
            if ColumnId.SUBJECT in entry.batch
            else np.full(entry.batch.count, numbers[0])
            for entry, numbers in zip(stored, per_batch, strict=True)
        ]
        return np.concatenate(columns)
    return np.repeat(np.fromiter((numbers[0] for numbers in per_batch), np.uint32, len(counts)), counts)


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
    if sum([entry.batch.count for entry in stored]) <= FEW_ROWS:
        return _few_message_rows(stored, subjects, appended_at_ms)
    return _message_rows(stored, subjects, tabulate(stored), appended_at_ms)


def replayed_rows(stored: Sequence[Stored], subjects: Subjects, appended_at_ms: Sequence[int]) -> Rows:
    """Make the pending rows of batches of several groups; ``appended_at_ms`` is that of each batch's group."""
    table = tabulate(stored)
    return _message_rows(stored, subjects, table, np.array(appended_at_ms, np.int64).take(table.batch_of))


def _message_rows(stored: Sequence[Stored], subjects: Subjects, table: Tabulated, appended_at_ms: int | Int64s) -> Rows:
    hours = filing_hours(table.deliver_at_ms, appended_at_ms)
    return rows_of(stored, table, subjects_of(stored, table, subjects), hours, in_schedule_log=False)


def _few_message_rows(stored: Sequence[Stored], subjects: Subjects, appended_at_ms: int) -> Rows:
    """Do the same as the rest of `message_rows`, without the fixed cost of numpy calls: most groups are a few single
    messages.
    """
    packed = bytearray()
    for offset, base_sequence, batch in stored:
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
        numbers = subjects.of_batch(batch).tolist()
        subject_of: Sequence[int] = [0] * count
        if ColumnId.SUBJECT in offsets:
            subject_of = struct.unpack_from(f"<{count}I", buffer, offsets[ColumnId.SUBJECT])
        location = offset << ROW_BITS
        for row, due in enumerate(struct.unpack_from(f"<{count}q", buffer, offsets[ColumnId.DELIVER_AT_MS])):
            hour = max(due, appended_at_ms) // HOUR_MS
            due_ms = due - hour * HOUR_MS
            if due_ms < -COARSE_FROM_MS:
                due_ms = encode_due(due_ms)
            subject = numbers[subject_of[row]]
            packed += ONE_ROW.pack(due_ms, lengths[row], subject, hour, base_sequence + row, location | row)
    return np.frombuffer(packed, ROW)


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
