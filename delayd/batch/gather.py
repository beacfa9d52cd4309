"""Gather: rows of several batches, copied into a new one.

A row's bytes are whole 64-bit words, so neighbours are copied as one slice and scattered rows as words, in pieces of
8,000 rows, by numpy calls that release the GIL. A source is verified, once, before anything is copied out of it.
"""

import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, encode_pieces, encode_subject_table, one_subject_table
from delayd.batch.columns import (
    DTYPES,
    FEW_ROWS,
    KIND_COLUMNS,
    SPARSE,
    BatchKind,
    Buffer,
    ColumnArray,
    ColumnId,
    Int64s,
    KindPart,
    padded,
)
from delayd.batch.content import NOT_STATED, Region, UInt64s, copy_words, hash_items, subject_state, subject_states

DUE = struct.Struct("<q")
U64 = struct.Struct("<Q")
ONE_END = struct.Struct("<I")
TWO_ENDS = struct.Struct("<II")

# Taken out of the enumeration once, because a look-up costs as much as the work that is done with it.
_DUE, _SEQUENCE, _BODY, _HASH = (
    ColumnId.DELIVER_AT_MS,
    ColumnId.SEQUENCE,
    ColumnId.BODY_END,
    ColumnId.CONTENT_HASH,
)
# Rows are copied to be handed over, so only what a DISPATCH batch may have is. Each row has a body, and few rows have
# items of other regions.
CARRIED = KIND_COLUMNS[BatchKind.DISPATCH].regions
BESIDE_BODY = tuple(column for column in CARRIED if column != _BODY)
CARRIED_COLUMNS = KIND_COLUMNS[BatchKind.DISPATCH].kept
BESIDE_BARE = (*BESIDE_BODY, *CARRIED_COLUMNS)  # What a batch that `delayd.batch.batch.encode_bare` makes can't have.
# What the columns of a row take in a DISPATCH batch, and what they take besides where the row has tags.
ROW_COLUMNS_BYTES = sum(DTYPES[column].itemsize for column in (_DUE, _SEQUENCE, ColumnId.HEADERS_END, _BODY, _HASH))
TAGS_COLUMNS_BYTES = DTYPES[ColumnId.TAGS_END].itemsize + DTYPES[ColumnId.TAG_BLOOM].itemsize
SPARSE_COLUMN_BYTES = 8  # And what it takes where it has a value in a column of `delayd.batch.columns.SPARSE`.
NO_COLUMNS: Mapping[ColumnId, ColumnArray] = {}


class Pick(NamedTuple):
    """Rows of one batch: an int64 array in any order, or a range of neighbours."""

    batch: Batch
    rows: range | Int64s


class GatheredItems(NamedTuple):
    """The items of one region: the exact length of each row's item, and all items in pieces, each padded to whole
    words.
    """

    lengths: Int64s
    pieces: list[Buffer]


class Gathered(NamedTuple):
    """Rows copied out: due instants, and the items of each region, in the heap's order. A region in which no row has an
    item may be absent.

    ``hashes`` are the content hashes that the sources state, 0 where they state none; None when none of them does.
    ``kept`` are the columns of `delayd.batch.columns.KEPT` that a source has.
    """

    deliver_at_ms: Int64s
    regions: Mapping[ColumnId, GatheredItems]
    hashes: NDArray[np.uint64] | None = None
    kept: Mapping[ColumnId, ColumnArray] = NO_COLUMNS


def gather(
    picks: Sequence[Pick],
    carried: Sequence[ColumnId] = CARRIED,
    carried_columns: Sequence[ColumnId] = CARRIED_COLUMNS,
) -> Gathered:
    """Copy the picked rows out, in the order of the picks, with these regions and columns: by default those that a
    DISPATCH batch has.

    Raises:
        BatchMalformed: a source's checksum differs.
    """
    due: list[Int64s] = []
    hashes: list[NDArray[np.uint64]] = []
    found = frozenset[int]().union(*[pick.batch.layout.columns for pick in picks])
    states_hashes = _HASH in found
    regions: dict[ColumnId, tuple[list[Int64s], list[Buffer]]] = {
        column: ([], []) for column in carried if column in found
    }
    kept: dict[ColumnId, list[ColumnArray]] = {column: [] for column in carried_columns if column in found}
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
            if column not in batch.offsets:
                lengths.append(np.zeros(len(rows), np.int64))
            elif isinstance(rows, range):
                lengths.append(_copy_neighbours(batch, column, rows, pieces))
            else:
                lengths.append(_copy_scattered(batch, column, rows, pieces))
        for column, parts in kept.items():
            parts.append(_copy_column(batch, column, rows))
    return Gathered(
        _joined(due),
        {column: GatheredItems(_joined(lengths), pieces) for column, (lengths, pieces) in regions.items()},
        np.concatenate(hashes) if states_hashes else None,
        {column: np.concatenate(parts) for column, parts in kept.items()},
    )


def gather_singles(batches: Sequence[Batch], rows: Sequence[int]) -> Gathered:
    """Do the same as `gather` for row ``rows[i]`` of ``batches[i]``, without the fixed cost of numpy calls: 2 us a row.

    Raises:
        BatchMalformed: a source's checksum differs.
    """
    due, body_lengths, bodies, hashes = list[int](), list[int](), list[Buffer](), list[int]()
    # By region lengths of all rows, and items; regions beside the body come in with the first row that has them.
    regions: dict[ColumnId, tuple[list[int], list[Buffer]]] = {_BODY: (body_lengths, bodies)}
    kept: dict[ColumnId, ColumnArray] = {}
    states_hashes = False
    for at, (batch, row) in enumerate(zip(batches, rows, strict=True)):
        if not batch.verified:
            batch.verify()
        buffer, offsets = batch.buffer, batch.offsets
        due += DUE.unpack_from(buffer, offsets[_DUE] + 8 * row)
        if len(batch.layout.regions) > 1 or batch.layout.kept:
            for column in BESIDE_BODY:
                if column in offsets:
                    lengths, pieces = regions.setdefault(column, ([0] * len(rows), []))
                    lengths[at], piece = item_of(batch, column, row)
                    pieces.append(piece)
            for column in CARRIED_COLUMNS:
                if column in offsets:
                    kept.setdefault(column, np.zeros(len(rows), DTYPES[column]))[at] = batch.column(column)[row]
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
        {c: GatheredItems(np.array(lengths, np.int64), pieces) for c, (lengths, pieces) in sorted(regions.items())},
        np.array(hashes, np.uint64) if states_hashes else None,
        kept,
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
    others: Mapping[ColumnId, ColumnArray] = NO_COLUMNS,
) -> Composed:
    """Make a batch of gathered rows.

    Args:
        kind: of the batch.
        part: its kind part.
        gathered: the rows.
        sequences: a number for each row.
        subjects: the subject table; when it has several names, ``others`` has the column SUBJECT.
        others: more columns. Without CONTENT_HASH among them the hashes are those that the rows' sources state, and
            where a source states none they are made from the bytes.
    """
    columns, heap, hashes = columns_of(gathered, sequences, subjects, others)
    return Composed(*encode_pieces(kind, part, len(sequences), columns, (heap,), len(subjects)), hashes)


def columns_of(
    gathered: Gathered,
    sequences: NDArray[np.uint64],
    subjects: Sequence[bytes],
    others: Mapping[ColumnId, ColumnArray] = NO_COLUMNS,
) -> tuple[list[tuple[ColumnId, ColumnArray]], bytes, NDArray[np.uint64]]:
    """The columns and the heap of a batch of gathered rows, and the rows' hashes; see `compose`."""
    table = one_subject_table(subjects[0]) if len(subjects) == 1 else encode_subject_table(subjects)
    pieces: list[Buffer] = [table]
    columns: list[tuple[ColumnId, ColumnArray]] = [(_DUE, gathered.deliver_at_ms), (_SEQUENCE, sequences)]
    begin = len(table)
    for column, items in gathered.regions.items():
        ends, begin = _ends(items.lengths, begin)
        columns.append((column, ends))
        pieces += items.pieces
    heap = b"".join(pieces)
    if _HASH in others:
        hashes = others[_HASH].astype(np.uint64, copy=False)
    else:
        hashes = _hashes_of(gathered, heap, len(table), subjects, others.get(ColumnId.SUBJECT))
        columns.append((_HASH, hashes))
    if others or gathered.kept:
        columns += (*others.items(), *gathered.kept.items())
        columns.sort(key=itemgetter(0))
    return columns, heap, hashes


def compose_new(
    kind: BatchKind,
    part: KindPart,
    gathered: Gathered,
    subjects: Sequence[bytes],
    others: Mapping[ColumnId, ColumnArray],
) -> bytes:
    """Make a batch of gathered rows that have no sequences and no hashes yet; ``others`` has the other columns."""
    pieces: list[Buffer] = [encode_subject_table(subjects)]
    columns = list(others.items())
    begin = len(pieces[0])
    for column, items in gathered.regions.items():
        ends, begin = _ends(items.lengths, begin)
        columns.append((column, ends))
        pieces += items.pieces
    columns.sort(key=itemgetter(0))
    front, heap = encode_pieces(kind, part, len(gathered.deliver_at_ms), columns, (b"".join(pieces),), len(subjects))
    return front + heap


def _hashes_of(
    gathered: Gathered, heap: bytes, begin: int, subjects: Sequence[bytes], subject_of: ColumnArray | None
) -> NDArray[np.uint64]:
    """The content hashes of gathered rows, whose regions stand in ``heap`` from ``begin`` on."""
    stated = gathered.hashes
    if stated is not None and bool((stated != NOT_STATED).all()):
        return stated
    states: int | UInt64s = subject_state(subjects[0])
    if subject_of is not None:
        states = subject_states(subjects).take(subject_of.astype(np.uint32, copy=False))
    words = np.frombuffer(heap, np.uint64)[begin >> 3 :]
    regions: dict[ColumnId, Region] = {}
    for column, items in gathered.regions.items():
        count = sum(map(len, items.pieces)) >> 3
        regions[column], words = Region(words[:count], items.lengths), words[count:]
    made = hash_items(states, regions.get(ColumnId.HEADERS_END), regions[_BODY])
    return made if stated is None else np.where(stated == NOT_STATED, made, stated)


def content_hashes_of(gathered: Gathered, subject: bytes) -> UInt64s:
    """The content hashes of gathered rows of one subject."""
    heap = b"".join(piece for items in gathered.regions.values() for piece in items.pieces)
    return _hashes_of(gathered, heap, 0, [subject], None)


def reorder(gathered: Gathered, order: Int64s) -> Gathered:
    """Copy gathered rows into another order: row i of the result is row ``order[i]``."""
    return Gathered(
        gathered.deliver_at_ms.take(order),
        {column: _reordered(items, order) for column, items in gathered.regions.items()},
        None if gathered.hashes is None else gathered.hashes.take(order),
        {column: values.take(order) for column, values in gathered.kept.items()},
    )


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
    """Bytes that each of some rows of a verified batch needs in a new one: its items, padded, and its columns.

    The cost depends on ``rows`` only: a large batch may be given out one message at a time.
    """
    size = np.full(rows, ROW_COLUMNS_BYTES, np.int64)
    size += SPARSE_COLUMN_BYTES * sum(column in batch.offsets for column in SPARSE)
    for column in batch.layout.regions:
        if column == ColumnId.TAGS_END:
            size += TAGS_COLUMNS_BYTES
        ends = batch.uint32s(column)
        # Each item begins at a multiple of 8 behind the one before it.
        begin = padded(int(ends[first - 1])) if first else batch.region_start(column)
        padded_ends = ends[first : first + rows].astype(np.int64) + 7 & ~7
        size += np.diff(padded_ends, prepend=begin)
    return size


def _copy_column(batch: Batch, column: ColumnId, rows: range | Int64s) -> ColumnArray:
    """Some rows of a column; zeros where the batch does not have it."""
    if column not in batch.offsets:
        return np.zeros(len(rows), DTYPES[column])
    values = batch.column(column)
    return values[rows.start : rows.stop] if isinstance(rows, range) else values.take(rows)


def _joined(parts: list[Int64s]) -> Int64s:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _ends(lengths: Int64s, begin: int) -> tuple[ColumnArray, int]:
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


def _reordered(items: GatheredItems, order: Int64s) -> GatheredItems:
    words = np.frombuffer(b"".join(items.pieces), np.uint64)
    count = (items.lengths + 7) >> 3
    first = np.cumsum(count) - count
    copied = copy_words(words, first.take(order), count.take(order))
    return GatheredItems(items.lengths.take(order), [copied.data.cast("B")])


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
