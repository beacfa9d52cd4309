"""Tally log: the rows that a realtime server held of each delay server and hour, closed segment by closed segment.

It outlives the segments (docs/formats/tally.md, version 1). A group holds the entries of one segment of the message
log, by origin and hour; a segment without messages has one entry without an origin, so that every segment has an entry.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, encode
from delayd.batch.columns import DTYPES, ROWS_MAX, BatchKind, ColumnId
from delayd.batch.content import Tally
from delayd.log.log import LogPlace
from delayd.log.segment import FileKind

FOLDER = "tally"
TALLY = np.dtype(
    [
        ("begin", "<u8"),  # The segment of the message log: [begin, end), in offsets.
        ("end", "<u8"),
        ("origin_log_id", "<u8"),
        ("hour", "<u4"),
        ("differing", "<u4"),  # Rows whose bytes don't give the content hash that is stored beside them.
        ("rows", "<u8"),
        ("first", "<u8"),
        ("second", "<u8"),
        ("batches", "<u4"),
        ("zero", "<u4"),
    ]
)
Tallies = NDArray[np.void]  # TALLY[n]
NO_TALLIES: Tallies = np.empty(0, TALLY)


def tally_place(folder: str, log_id: int) -> LogPlace:
    """Where the tally log of a realtime server's directory is."""
    return LogPlace(f"{folder}/{FOLDER}", FileKind.TALLY, log_id)


def encode_tallies(entries: Tallies) -> list[bytes]:
    """Make TALLY batches of entries, in order."""
    column = np.ascontiguousarray(entries).view(DTYPES[ColumnId.TALLY])
    parts = [column[first : first + ROWS_MAX] for first in range(0, len(column), ROWS_MAX)]
    return [encode(BatchKind.TALLY, None, len(part), [(ColumnId.TALLY, part)], [b""]) for part in parts]


def decode_tallies(batch: Batch) -> Tallies:
    """View the entries of a verified TALLY batch: TALLY[count]."""
    return np.frombuffer(batch.buffer, TALLY, batch.count, batch.offsets[ColumnId.TALLY])


def sum_tallies(entries: Tallies) -> Iterator[tuple[tuple[int, int], Tally, int]]:
    """The tally of each origin and hour, in this order, with the number of rows that differ from their hash."""
    order = np.lexsort((entries["hour"], entries["origin_log_id"]))
    sums: dict[tuple[int, int], tuple[Tally, int]] = {}
    for entry in entries[order[entries["rows"][order] > 0]]:
        key = int(entry["origin_log_id"]), int(entry["hour"])
        before, differing = sums.get(key, (Tally(), 0))
        own = Tally(int(entry["rows"]), int(entry["first"]), int(entry["second"]))
        sums[key] = before + own, differing + int(entry["differing"])
    return ((key, *found) for key, found in sums.items())


def covered(entries: Tallies) -> list[tuple[int, int]]:
    """The ranges of the message log that entries count, joined where one begins at the end of another."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted(set(zip(entries["begin"].tolist(), entries["end"].tolist(), strict=True))):
        if ranges and begin == ranges[-1][1]:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((begin, end))
    return ranges


def joined(parts: Sequence[Tallies]) -> Tallies:
    """All entries of several batches."""
    return np.concatenate([NO_TALLIES, *parts])
