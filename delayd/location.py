"""Locations: where a row of a log lies, as one u64, in memory and in the entries of consume logs.

Invariant: the three parts fill the u64, and locations of one log compare as the bytes that they name. Locations in the
message log are lower than all in schedule logs, so the lowest of many locations is the first byte of the message log
that is still needed, if any byte is (rule P6).

    bit 63       0 = message log, 1 = the schedule log of the row's hour
    bits 62..16  offset of the batch in that log, bytes
    bits 15..0   number of the row in its batch

An example: row 3 of the batch at byte 4,096 of the message log has the location 4,096 << 16 | 3 = 268,435,459; in the
schedule log of its hour it has that with bit 63 added.
"""

import numpy as np
import numpy.typing as npt

ROW_BITS = 16  # A batch has at most 65,536 rows.
ROW_MASK = (1 << ROW_BITS) - 1
OFFSET_BITS = 47  # 140 TB of one log.
OFFSET_MAX = (1 << OFFSET_BITS) - 1
SCHEDULE_BIT = 1 << (OFFSET_BITS + ROW_BITS)
assert SCHEDULE_BIT == 1 << 63, "the three parts of a location fill a u64"

Locations = npt.NDArray[np.uint64]


def pack_locations(
    in_schedule_log: bool, batch_offset: int | npt.NDArray[np.uint64], batch_row: npt.NDArray[np.unsignedinteger]
) -> Locations:
    """Locations of rows of one kind of log: u64[n]; one offset for all rows, or one for each."""
    offsets = np.asarray(batch_offset, np.uint64)
    assert not offsets.size or int(offsets.max()) <= OFFSET_MAX, "a batch lies within the first 140 TB"
    assert not len(batch_row) or int(batch_row.max()) >> ROW_BITS == 0, "a batch has at most 65,536 rows"
    base = offsets << np.uint64(ROW_BITS)
    if in_schedule_log:
        base = base | np.uint64(SCHEDULE_BIT)
    return base | batch_row.astype(np.uint64)


def locate(location: int) -> tuple[bool, int, int]:
    """Split a location: whether the row is in its hour's schedule log or in the message log, its batch's offset, its
    number there.
    """
    return location >= SCHEDULE_BIT, location >> ROW_BITS & OFFSET_MAX, location & ROW_MASK


def are_filed(locations: Locations) -> npt.NDArray[np.bool_]:
    """Which rows rest in a schedule log: bool[n]."""
    return locations >= np.uint64(SCHEDULE_BIT)


def message_log_offset(location: int) -> int | None:
    """Offset in the message log of the batch that a location names, None when it names a schedule log."""
    return None if location >= SCHEDULE_BIT else location >> ROW_BITS
