"""Rows of a producer as one PRODUCER batch (docs/formats/batch.md).

Invariant: a batch that is packed here passes a delay server's intake: limits were checked before, layout and checksums
are made here. One row costs as little as possible, because a lone send is common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.batch import (
    BatchKind,
    Buffer,
    ColumnId,
    Columns,
    Int64s,
    ProducerPart,
)
from delayd.client.limits import lengths_of
from delayd.encode import PADS, encode_one, encode_pieces, encode_subject_table, one_subject_table

# A batch of this many rows takes a few ms to make and to check: nobody else waits longer for a turn.
ROWS_TARGET = 8_192
BYTES_TARGET = 4 << 20  # One message of the largest size may come on top, so the limit of 16 MiB is never near.


def pack_rows(
    part: ProducerPart,
    deliver_at_ms: Int64s,
    subjects: Sequence[bytes],
    subject_of: NDArray[np.uint32] | None,
    headers: Sequence[bytes] | None,
    bodies: Sequence[bytes],
    body_bytes: Int64s,
) -> tuple[bytes, bytes]:
    """Make the batch; ``subject_of`` is None when all rows have the one subject, ``headers`` when none has any.

    In two pieces, because the second one holds the only copy that is made of a body.
    """
    table = one_subject_table(subjects[0]) if len(subjects) == 1 else encode_subject_table(subjects)
    columns: list[tuple[ColumnId, Columns]] = [(ColumnId.DELIVER_AT_MS, deliver_at_ms)]
    heap: list[Buffer] = [table]
    begin = len(table)
    if subject_of is not None:
        columns.append((ColumnId.SUBJECT, subject_of))
    if headers is not None:
        headers_end, begin = _lay_out(headers, lengths_of(headers), begin, heap)
        columns.append((ColumnId.HEADERS_END, headers_end))
    body_end, _ = _lay_out(bodies, body_bytes, begin, heap)
    columns.append((ColumnId.BODY_END, body_end))
    return encode_pieces(BatchKind.PRODUCER, part, len(bodies), columns, heap, len(subjects))


def pack_one(part: ProducerPart, deliver_at_ms: int, subject: bytes, body: bytes) -> bytes:
    """Make a batch of one row without headers: the same bytes as `pack_rows`, at a fraction of its cost."""
    return encode_one(BatchKind.PRODUCER, part, (deliver_at_ms,), subject, body, len(body))


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
