"""Pending rows: what the delay server keeps in memory of each message, 32 bytes and never its body.

Invariant: a row fires at ``hour_start_ms(hour) + due_ms``, before its filing hour ends, so ``due_ms < HOUR_MS``.

A location is one u64, and locations of one log compare as the bytes they name:

    bit 63       0 = message log, 1 = the schedule log of the row's hour
    bits 62..16  offset of the batch in that log, bytes
    bits 15..0   number of the row in its batch
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delayd.hours import HOUR_MS

ROW = np.dtype(
    [
        ("due_ms", "<i4"),  # Milliseconds after the start of the filing hour; negative when due before it.
        ("length", "<u4"),  # Bytes that the row needs in a frame.
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

BATCH_OFFSET_BITS = 47  # 140 TB of one log.
BATCH_ROW_BITS = 16  # A batch has at most 65,536 rows.
BATCH_OFFSET_MAX = (1 << BATCH_OFFSET_BITS) - 1
BEFORE_HOUR_MS_MAX = (1 << 31) - 1  # 24 days: what was due longer before its hour fires then, which is never early.
SCHEDULE_BIT = 1 << (BATCH_OFFSET_BITS + BATCH_ROW_BITS)
assert SCHEDULE_BIT == 1 << 63, "the three parts of a location fill a u64"

# Numpy copies opaque items as bytes, but structured ones column by column, which takes 5 to 40 times as long.
OPAQUE_ROW = np.dtype((np.void, ROW_BYTES))

Rows = npt.NDArray[np.void]  # Of dtype ROW.


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
    instants += rows["due_ms"]
    return instants


def filing_hours(
    deliver_at_ms: npt.NDArray[np.int64], appended_at_ms: int | npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """Hour in which rows are filed (rule P5): that of the later of the two instants; one of the second serves all."""
    return (np.maximum(deliver_at_ms, appended_at_ms) // np.int64(HOUR_MS)).astype(np.uint32)


def due_within(deliver_at_ms: npt.NDArray[np.int64], hours: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """Column ``due_ms`` of rows filed in ``hours``; negative for what is due before its hour began (rule P5)."""
    due = deliver_at_ms - hours.astype(np.int64) * HOUR_MS
    np.maximum(due, -BEFORE_HOUR_MS_MAX, out=due)
    assert not len(due) or int(due.max()) < HOUR_MS, "a row is filed no earlier than the hour in which it is due"
    return due.astype(np.int32)


def pack_locations(
    in_schedule_log: bool,
    batch_offset: int | npt.NDArray[np.uint64],
    batch_row: npt.NDArray[np.unsignedinteger],
) -> npt.NDArray[np.uint64]:
    """Locations of rows of one kind of log: u64[n]; one offset serves all rows, or each has its own."""
    offsets = np.asarray(batch_offset, np.uint64)
    assert not offsets.size or int(offsets.max()) <= BATCH_OFFSET_MAX, "a batch lies within the first 140 TB"
    assert not len(batch_row) or int(batch_row.max()) >> BATCH_ROW_BITS == 0, "a batch has at most 65,536 rows"
    base = offsets << np.uint64(BATCH_ROW_BITS)
    if in_schedule_log:
        base = base | np.uint64(SCHEDULE_BIT)
    return base | batch_row.astype(np.uint64)


def unpack_locations(
    locations: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Whether each row rests in the schedule log, its batch's offset and its number there: bool, int64, int64 [n]."""
    in_schedule_log = locations >= np.uint64(SCHEDULE_BIT)
    # Signed, as offsets meet plain lengths next, and numpy makes floats of u64 plus int64.
    offsets = ((locations & np.uint64(SCHEDULE_BIT - 1)) >> np.uint64(BATCH_ROW_BITS)).astype(np.int64)
    return in_schedule_log, offsets, (locations & np.uint64((1 << BATCH_ROW_BITS) - 1)).astype(np.int64)


def message_log_offset(location: int) -> int | None:
    """Offset in the message log of the batch that a location names, None when it names a schedule log."""
    return None if location >= SCHEDULE_BIT else location >> BATCH_ROW_BITS
