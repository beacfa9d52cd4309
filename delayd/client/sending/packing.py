"""Rows of a producer as one PRODUCER batch (docs/formats/batch.md).

Invariant: a batch that is packed here passes a delay server's intake: limits were checked before, layout and checksums
are made here. A row alone is made by `delayd.encode.encode_single`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from delayd.batch import REGIONS, BatchKind, Buffer, ColumnId, Columns, Int64s, ProducerPart
from delayd.encode import PADS, encode_pieces, encode_subject_table, one_subject_table

# A batch of this many rows takes a few ms to make and to check: nobody else waits longer for a turn.
ROWS_TARGET = 8_192
BYTES_TARGET = 4 << 20  # One message of the largest size may come on top, so the limit of 16 MiB is never near.


class Items(NamedTuple):
    """The items of one region, one a row, and their lengths."""

    items: Sequence[bytes]
    lengths: Int64s


def pack_rows(
    part: ProducerPart,
    subjects: Sequence[bytes],
    columns: Mapping[ColumnId, Columns],
    regions: Mapping[ColumnId, Items],
) -> tuple[bytes, bytes]:
    """Make the batch in two pieces, because the second one holds the only copy that is made of a body.

    Args:
        part: the kind part.
        subjects: the subject table; when it has several names, ``columns`` says which row has which.
        columns: all columns that have no region.
        regions: bodies, and what else a row has.
    """
    table = one_subject_table(subjects[0]) if len(subjects) == 1 else encode_subject_table(subjects)
    ordered = list(columns.items())
    heap: list[Buffer] = [table]
    begin = len(table)
    for column in REGIONS:
        if column in regions:
            ends, begin = _lay_out(*regions[column], begin, heap)
            ordered.append((column, ends))
    ordered.sort(key=itemgetter(0))
    count = len(columns[ColumnId.DELIVER_AT_MS])
    return encode_pieces(BatchKind.PRODUCER, part, count, ordered, heap, len(subjects))


def split_rows(sizes: Int64s) -> list[range]:
    """Cut rows of ``sizes`` bytes into runs within the targets; a row above them is a run of its own."""
    ends = sizes.cumsum()
    if 0 < len(sizes) <= ROWS_TARGET and ends[-1] <= BYTES_TARGET:
        return [range(len(sizes))]
    runs: list[range] = []
    start, before = 0, 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, before + BYTES_TARGET, side="right"))
        stop = max(min(stop, start + ROWS_TARGET), start + 1)
        runs.append(range(start, stop))
        start, before = stop, int(ends[stop - 1])
    return runs


def _lay_out(items: Sequence[bytes], lengths: Int64s, begin: int, heap: list[Buffer]) -> tuple[Int64s, int]:
    """Put items behind one another on the heap, each at a multiple of 8; return their ends, and where the next one
    begins.
    """
    pads = -lengths & 7
    ends = (lengths + pads).cumsum()
    ends += begin
    following = int(ends[-1])
    ends -= pads
    first = int(pads[0])
    # Messages of one length are common: then their pads need no look at each.
    same = bool((pads == first).all())
    if same and not first:
        heap += items
    else:
        pieces: list[Buffer] = [b""] * (2 * len(items))
        pieces[0::2] = items
        pieces[1::2] = [PADS[first]] * len(items) if same else [PADS[pad] for pad in pads.tolist()]
        heap += pieces
    return ends, following
