"""Gather: rows of several batches, copied into a new one.

A row's bytes are whole 64-bit words, so neighbours are copied as one slice and scattered rows as words, in pieces of
8,000 rows, by numpy calls that release the GIL. A source is verified, once, before anything is copied out of it.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import FEW_ROWS, Batch, BatchKind, Buffer, ColumnId, Columns, Int64s, KindPart
from delayd.content import NOT_STATED, Region, hash_items, subject_state, subject_states
from delayd.encode import encode_pieces, encode_subject_table, one_subject_table

DUE = struct.Struct("<q")
U64 = struct.Struct("<Q")
ONE_END = struct.Struct("<I")
TWO_ENDS = struct.Struct("<II")
PIECE_ROWS = 8_000  # The index of a piece stays in the cache.
# Taken out of the enumeration once, because a look-up costs as much as the work that is done with it.
_DUE, _SEQUENCE, _HEADERS, _BODY, _HASH = (
    ColumnId.DELIVER_AT_MS,
    ColumnId.SEQUENCE,
    ColumnId.HEADERS_END,
    ColumnId.BODY_END,
    ColumnId.CONTENT_HASH,
)
SUBJECT_NONE = np.empty(0, np.uint32)


class Pick(NamedTuple):
    """Rows of one batch: an int64 array in any order, or a range of neighbours."""

    batch: Batch
    rows: range | Int64s


class Gathered(NamedTuple):
    """Rows copied out: due instants, exact lengths and bytes of headers and bodies; headers None without any.

    ``hashes`` are the content hashes that the sources state, 0 where they state none; None when none of them does.
    """

    deliver_at_ms: Int64s
    headers_lengths: Int64s | None
    headers: list[Buffer]
    body_lengths: Int64s
    bodies: list[Buffer]
    hashes: NDArray[np.uint64] | None = None


def gather(picks: Sequence[Pick]) -> Gathered:
    """Copy the picked rows out, in the order of the picks.

    Raises:
        BatchMalformed: a source's checksum differs.
    """
    due: list[Int64s] = []
    hashes: list[NDArray[np.uint64]] = []
    states_hashes = any(ColumnId.CONTENT_HASH in pick.batch for pick in picks)
    regions: dict[ColumnId, tuple[list[Int64s], list[Buffer]]] = {ColumnId.BODY_END: ([], [])}
    if any(ColumnId.HEADERS_END in pick.batch for pick in picks):
        regions[ColumnId.HEADERS_END] = ([], [])
    for batch, rows in picks:
        batch.verify()
        if isinstance(rows, range):
            due.append(batch.int64s(ColumnId.DELIVER_AT_MS)[rows.start : rows.stop])
        else:
            due.append(batch.int64s(ColumnId.DELIVER_AT_MS).take(rows))
        if states_hashes:
            stated = batch.content_hashes()
            hashes.append(stated[rows.start : rows.stop] if isinstance(rows, range) else stated.take(rows))
        for column, (lengths, pieces) in regions.items():
            if column not in batch:
                lengths.append(np.zeros(len(rows), np.int64))
            elif isinstance(rows, range):
                lengths.append(_copy_neighbours(batch, column, rows, pieces))
            else:
                lengths.append(_copy_scattered(batch, column, rows, pieces))
    body_lengths, bodies = regions[ColumnId.BODY_END]
    headers_lengths, headers = regions.get(ColumnId.HEADERS_END, (None, []))
    return Gathered(
        due[0] if len(due) == 1 else np.concatenate(due),
        None if headers_lengths is None else np.concatenate(headers_lengths),
        headers,
        body_lengths[0] if len(body_lengths) == 1 else np.concatenate(body_lengths),
        bodies,
        np.concatenate(hashes) if states_hashes else None,
    )


def gather_singles(batches: Sequence[Batch], rows: Sequence[int]) -> Gathered:
    """Do the same as `gather` for row ``rows[i]`` of ``batches[i]``, without the fixed cost of numpy calls: 2 us a row.

    Raises:
        BatchMalformed: a source's checksum differs.
    """
    due, headers_lengths, headers, body_lengths, bodies = list[int](), [], list[Buffer](), [], list[Buffer]()
    hashes: list[int] = []
    states_hashes = False
    for batch, row in zip(batches, rows, strict=True):
        if not batch.verified:
            batch.verify()
        buffer, offsets = batch.buffer, batch.offsets
        due += DUE.unpack_from(buffer, offsets[_DUE] + 8 * row)
        if _HEADERS in offsets:
            length, piece = item_of(batch, _HEADERS, row)
            headers_lengths.append(length)
            headers.append(piece)
        else:
            headers_lengths.append(0)
        if row:
            # As `item_of` has it: nearly every row comes here.
            before, end = TWO_ENDS.unpack_from(buffer, offsets[_BODY] + 4 * row - 4)
            start = (before + 7) & ~7
            body_lengths.append(end - start)
            heap = batch.heap_offset
            bodies.append(buffer[heap + start : heap + ((end + 7) & ~7)])
        else:
            length, piece = item_of(batch, _BODY, row)
            body_lengths.append(length)
            bodies.append(piece)
        if _HASH in offsets:
            states_hashes = True
            hashes += U64.unpack_from(buffer, offsets[_HASH] + 8 * row)
        else:
            hashes.append(NOT_STATED)
    return Gathered(
        np.array(due, np.int64),
        np.array(headers_lengths, np.int64) if headers else None,
        headers,
        np.array(body_lengths, np.int64),
        bodies,
        np.array(hashes, np.uint64) if states_hashes else None,
    )


class Composed(NamedTuple):
    """A batch of gathered rows in two pieces, so that its heap is not copied once more, and the rows' hashes."""

    front: bytes
    heap: bytes
    hashes: NDArray[np.uint64]

    def joined(self) -> bytes:
        """The batch in one piece, for callers that don't write the two pieces one behind the other."""
        return b"".join((self.front, self.heap))


def compose(
    kind: BatchKind,
    part: KindPart,
    gathered: Gathered,
    sequences: NDArray[np.uint64],
    subjects: Sequence[bytes],
    subject_of: NDArray[np.uint32] = SUBJECT_NONE,
    accepted_at_ms: Int64s | None = None,
    left_out: NDArray[np.uint32] | None = None,
    hashes: NDArray[np.uint64] | None = None,
) -> Composed:
    """Make a batch of gathered rows; ``subject_of`` is empty when all rows have the one subject.

    ``left_out`` has the lengths of bodies that are not among the gathered ones, where there are such. ``hashes`` are
    the content hashes of the rows; without them they are those that the sources state, and where a source states none
    they are made from the bytes.
    """
    table = one_subject_table(subjects[0]) if len(subjects) == 1 else encode_subject_table(subjects)
    heap = b"".join((table, *gathered.headers, *gathered.bodies))
    if hashes is None:
        hashes = _hashes_of(gathered, heap, len(table), subjects, subject_of)
    columns: list[tuple[ColumnId, Columns]] = [(_DUE, gathered.deliver_at_ms), (_SEQUENCE, sequences)]
    if len(subject_of):
        columns.append((ColumnId.SUBJECT, subject_of))
    begin = len(table)
    if gathered.headers_lengths is not None:
        ends, begin = _ends(gathered.headers_lengths, begin)
        columns.append((_HEADERS, ends))
    ends, _ = _ends(gathered.body_lengths, begin)
    columns.append((_BODY, ends))
    if accepted_at_ms is not None:
        columns.append((ColumnId.ACCEPTED_AT_MS, accepted_at_ms))
    if left_out is not None:
        columns.append((ColumnId.BODY_LEFT_OUT, left_out))
    columns.append((_HASH, hashes))
    return Composed(*encode_pieces(kind, part, len(sequences), columns, (heap,), len(subjects)), hashes)


def _hashes_of(
    gathered: Gathered, heap: bytes, begin: int, subjects: Sequence[bytes], subject_of: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """The content hashes of gathered rows, whose headers and bodies stand in ``heap`` from ``begin`` on."""
    stated = gathered.hashes
    if stated is not None and bool((stated != NOT_STATED).all()):
        return stated
    states = subject_states(subjects).take(subject_of) if len(subject_of) else subject_state(subjects[0])
    words = np.frombuffer(heap, np.uint64)[begin >> 3 :]
    headers = None
    if gathered.headers_lengths is not None:
        split = sum(map(len, gathered.headers)) >> 3
        headers, words = Region(words[:split], gathered.headers_lengths), words[split:]
    made = hash_items(states, headers, Region(words, gathered.body_lengths))
    return made if stated is None else np.where(stated == NOT_STATED, made, stated)


def reorder(gathered: Gathered, order: Int64s) -> Gathered:
    """Copy gathered rows into another order: row i of the result is row ``order[i]``."""
    headers_lengths, headers = gathered.headers_lengths, gathered.headers
    if headers_lengths is not None:
        headers = _reordered(headers, headers_lengths, order)
        headers_lengths = headers_lengths.take(order)
    return Gathered(
        gathered.deliver_at_ms.take(order),
        headers_lengths,
        headers,
        gathered.body_lengths.take(order),
        _reordered(gathered.bodies, gathered.body_lengths, order),
        None if gathered.hashes is None else gathered.hashes.take(order),
    )


def copy_words(words: NDArray[np.uint64], first: Int64s, count: Int64s) -> NDArray[np.uint64]:
    """Copy runs of words, each ``count`` long from ``first`` on, behind one another: a new array."""
    until = np.cumsum(count)
    copied = np.empty(int(until[-1]), np.uint64)
    for at in range(0, len(first), PIECE_ROWS):
        begin, size, end = first[at : at + PIECE_ROWS], count[at : at + PIECE_ROWS], until[at : at + PIECE_ROWS]
        low = int(end[0] - size[0])
        index = np.arange(low, int(end[-1]))
        index += np.repeat(begin - (end - size), size)
        words.take(index, out=copied[low : low + len(index)], mode="clip")
    return copied


def item_of(batch: Batch, column: ColumnId, row: int) -> tuple[int, Buffer]:
    """The exact length of a row's item in a region, and its padded bytes."""
    offset = batch.offsets[column] + 4 * row
    if row:
        before, end = TWO_ENDS.unpack_from(batch.buffer, offset - 4)
        start = (before + 7) & ~7
    else:
        start, (end,) = batch.region_start(column), ONE_END.unpack_from(batch.buffer, offset)
    return end - start, batch.buffer[batch.heap_offset + start : batch.heap_offset + ((end + 7) & ~7)]


def row_bytes(batch: Batch, first: int, rows: int) -> Int64s:
    """Bytes that each of some rows of a verified batch needs in a new one: headers and body, padded, and its columns.

    The cost depends on ``rows`` only: a large batch may be given out one message at a time.
    """
    size = np.full(rows, ROW_COLUMNS_BYTES, np.int64)
    for column in (ColumnId.HEADERS_END, ColumnId.BODY_END):
        if column in batch:
            ends = batch.uint32s(column)
            # Each item begins at a multiple of 8 behind the one before it.
            begin = int(ends[first - 1]) + 7 & ~7 if first else batch.region_start(column)
            padded_ends = ends[first : first + rows].astype(np.int64) + 7 & ~7
            size += np.diff(padded_ends, prepend=begin)
    return size


ROW_COLUMNS_BYTES = 32  # deliver_at_ms, sequence, headers_end, body_end, content_hash of a DISPATCH batch.


def _ends(lengths: Int64s, begin: int) -> tuple[Columns, int]:
    if len(lengths) <= FEW_ROWS:
        exact: list[int] = []
        for length in lengths.tolist():
            begin += length
            exact.append(begin)
            begin = (begin + 7) & ~7
        return np.array(exact, np.uint32), begin
    pads = -lengths & 7
    ends = np.cumsum(lengths + pads)
    ends += begin
    following = int(ends[-1])
    ends -= pads
    return ends, following


def _reordered(pieces: list[Buffer], lengths: Int64s, order: Int64s) -> list[Buffer]:
    words = np.frombuffer(b"".join(pieces), np.uint64)
    count = (lengths + 7) >> 3
    first = np.cumsum(count) - count
    return [copy_words(words, first.take(order), count.take(order)).data.cast("B")]


def _copy_neighbours(batch: Batch, column: ColumnId, rows: range, pieces: list[Buffer]) -> Int64s:
    offset = batch.offsets[column]
    if len(rows) == 1:
        length, piece = item_of(batch, column, rows.start)
        pieces.append(piece)
        return np.array([length], np.int64)
    ends = np.frombuffer(batch.buffer, np.uint32, len(rows), offset + 4 * rows.start).astype(np.int64)
    first_length, _ = item_of(batch, column, rows.start)
    lengths = np.empty_like(ends)
    lengths[0] = first_length
    np.subtract(ends[1:], (ends[:-1] + 7) & ~7, out=lengths[1:])
    pieces.append(batch.heap[int(ends[0]) - first_length : (int(ends[-1]) + 7) & ~7])
    return lengths


def _copy_scattered(batch: Batch, column: ColumnId, rows: Int64s, pieces: list[Buffer]) -> Int64s:
    all_ends = batch.uint32s(column)
    ends = all_ends.take(rows).astype(np.int64)
    starts = all_ends.take(rows - 1).astype(np.int64)
    starts += 7
    starts &= ~7
    starts[rows == 0] = batch.region_start(column)
    lengths = ends - starts
    words = np.frombuffer(batch.buffer, np.uint64, (batch.total_bytes - batch.heap_offset) >> 3, batch.heap_offset)
    pieces.append(copy_words(words, starts >> 3, (lengths + 7) >> 3).data.cast("B"))
    return lengths
