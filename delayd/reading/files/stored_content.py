"""Stored content: which rows of a realtime server's message log are not what their content hash says (rule S6).

A batch often has one row, so the small batches of a group are hashed together: a batch costs a few entries of arrays,
and no calls of its own. The hash is that of docs/formats/content.md.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import parse
from delayd.batch.columns import HEADER_BYTES, MAGIC, REGIONS, VERSION, BatchKind, ColumnId, Int64s
from delayd.batch.content import (
    HASHED_REGIONS,
    NOT_STATED,
    Region,
    UInt64s,
    differing_row,
    hash_items,
    states_of,
)
from delayd.batch.names import SUBJECT_BYTES_MAX
from delayd.batch.validate import check_batch
from delayd.log.group import HEADER, CommitGroup, content_position
from delayd.reading.files.target_index import FRONT, FRONT_WORDS

Bools = NDArray[np.bool_]

KIND_PART_BYTES = 56
DIRECTORY_AT = HEADER_BYTES + KIND_PART_BYTES
# Batches from a delay server have these columns, and tags and headers where a row has some; any other batch is read
# alone.
PLAIN = ((ColumnId.DELIVER_AT_MS, 8), (ColumnId.SEQUENCE, 8), (ColumnId.BODY_END, 4), (ColumnId.CONTENT_HASH, 8))
WITH_HEADERS = (*PLAIN[:2], (ColumnId.HEADERS_END, 4), *PLAIN[2:])
WITH_TAGS = (*PLAIN[:2], (ColumnId.TAG_BLOOM, 8), (ColumnId.TAGS_END, 4), *PLAIN[2:])
WITH_BOTH = (*WITH_TAGS[:4], (ColumnId.HEADERS_END, 4), *PLAIN[2:])
SHAPES = (PLAIN, WITH_HEADERS, WITH_TAGS, WITH_BOTH)  # Each has another number of columns.
SMALL_ROWS = 4_096  # A batch with more rows is worth calls and memory of its own.


def differing_rows(group: CommitGroup) -> Iterator[tuple[int, int]]:
    """Rows of a verified group of DISPATCH batches that are not what they state: their batch's offset, and their number
    in it. Of a batch that is read alone only the first one is named.

    Raises:
        BatchMalformed, BadSubject, MessageTooLarge: intake would not have taken one of the batches.
    """
    header, buffer = group.header, group.buffer
    sizes = np.frombuffer(buffer, np.uint32, header.batch_count, HEADER.size).astype(np.int64)
    begins = np.cumsum(sizes) - sizes + content_position(header.batch_count)
    alone = np.ones(len(begins), np.bool_)
    if (sizes >= FRONT.itemsize).all() and not (sizes & 7).any():
        words = np.frombuffer(buffer, np.uint64)
        fronts = words.take((begins >> 3)[:, None] + FRONT_WORDS).view(FRONT).ravel()
        small = fronts["count"] <= SMALL_ROWS
        small &= (fronts["magic"] == MAGIC) & (fronts["version"] == VERSION) & (fronts["kind"] == BatchKind.DISPATCH)
        small &= (fronts["kind_bytes"] == KIND_PART_BYTES) & (fronts["count"] > 0) & (fronts["subject_count"] == 1)
        small &= fronts["total_bytes"] == sizes
        for shape in SHAPES:
            chosen = np.flatnonzero(small & (fronts["column_count"] == len(shape)))
            if len(chosen):
                several = _Several(buffer, begins[chosen], fronts[chosen], shape)
                alone[chosen[several.sound]] = False
                yield from ((header.offset + begin, row) for begin, row in several.differing())
    for place in np.flatnonzero(alone).tolist():
        begin = int(begins[place])
        batch = parse(buffer[begin : begin + int(sizes[place])])
        if batch.kind is BatchKind.DISPATCH:
            check_batch(batch)
            if (row := differing_row(batch)) is not None:
                yield header.offset + begin, row


class _Several:
    """Small batches of one shape; ``sound`` says which of them have everything where the shape has it."""

    def __init__(
        self, buffer: memoryview, begins: Int64s, fronts: NDArray[np.void], shape: tuple[tuple[ColumnId, int], ...]
    ) -> None:
        self._words = np.frombuffer(buffer, np.uint64)
        self._halves = np.frombuffer(buffer, np.uint32)
        counts = fronts["count"].astype(np.int64)
        at = DIRECTORY_AT + 8 * len(shape) + np.zeros(len(counts), np.int64)
        entries, places = [], dict[ColumnId, Int64s]()
        for column, width in shape:
            places[column] = begins + at
            entries.append(np.uint64(column | width << 16) | at.astype(np.uint64) << np.uint64(32))
            at += (counts * width + 7) & ~7
        # The directory must agree: then all columns are within the batch, and the heap is behind them.
        heap_bytes = fronts["total_bytes"].astype(np.int64) - at
        self.sound = (fronts["heap_offset"] == at) & (heap_bytes >= 16)
        for number, entry in enumerate(entries):
            self.sound &= self._words.take((begins + DIRECTORY_AT + 8 * number >> 3), mode="clip") == entry
        heaps = begins + at
        names = self._halves.take(heaps >> 2, mode="clip").astype(np.int64)
        self.sound &= (names > 0) & (names <= SUBJECT_BYTES_MAX) & (8 + ((names + 7) & ~7) <= heap_bytes)
        regions = [column for column, _ in shape if column in REGIONS]
        kept = np.flatnonzero(self.sound)
        self._keep(kept, counts, heaps, names, places)
        self._regions: dict[ColumnId, tuple[Int64s, Int64s]] = {}
        first = 8 + ((self._names + 7) & ~7)
        whole = np.ones(len(kept), np.bool_)
        for column in regions:
            first, fits = self._bounds(column, first, heap_bytes[kept])
            whole &= fits
        whole &= first == heap_bytes[kept]
        if not whole.all():
            # These batches don't fit the shape, so they are read one by one; the others are laid out once more without
            # them.
            self.sound[kept[~whole]] = False
            kept = np.flatnonzero(self.sound)
            self._keep(kept, counts, heaps, names, places)
            self._regions = {}
            first = 8 + ((self._names + 7) & ~7)
            for column in regions:
                first, _ = self._bounds(column, first, heap_bytes[kept])
        self._begins = begins[kept]

    def differing(self) -> Iterator[tuple[int, int]]:
        """Rows of the sound batches whose bytes give another hash: where their batch begins, and the row in it."""
        if not len(self._begins):
            return
        states = states_of(Region(self._gather(self._heaps + 8, (self._names + 7) & ~7), self._names))
        parts = {
            column: Region(self._gather(*self._range_of(bounds)), bounds[1] - bounds[0])
            for column, bounds in self._regions.items()
            if column in HASHED_REGIONS
        }
        made = hash_items(states.take(self._batch_of), parts.get(ColumnId.HEADERS_END), parts[ColumnId.BODY_END])
        stated = self._words.take((self._places[ColumnId.CONTENT_HASH] >> 3).take(self._batch_of) + self._row)
        for row in np.flatnonzero((stated != made) & (stated != NOT_STATED)).tolist():
            yield int(self._begins[self._batch_of[row]]), int(self._row[row])

    def _keep(self, kept: Int64s, counts: Int64s, heaps: Int64s, names: Int64s, places: dict[ColumnId, Int64s]) -> None:
        self._counts, self._heaps, self._names = counts[kept], heaps[kept], names[kept]
        self._places = {column: at[kept] for column, at in places.items()}
        self._batch_of = np.repeat(np.arange(len(kept)), self._counts)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._row = np.arange(len(self._batch_of)) - self._firsts.take(self._batch_of)

    def _bounds(self, column: ColumnId, first: Int64s, heap_bytes: Int64s) -> tuple[Int64s, Bools]:
        """Note where the items of a region begin and end in their heaps; return where the next region begins, and what
        fits.
        """
        ends = self._halves.take((self._places[column] >> 2).take(self._batch_of) + self._row).astype(np.int64)
        starts = np.empty_like(ends)
        starts[1:] = (ends[:-1] + 7) & ~7
        starts[self._firsts] = first
        self._regions[column] = starts, ends
        lengths = ends - starts
        fits = np.ones(len(first), np.bool_)
        if len(ends):
            fits = np.minimum.reduceat(lengths, self._firsts) >= 0
            fits &= np.maximum.reduceat(ends, self._firsts) <= heap_bytes
        return (ends[self._firsts + self._counts - 1] + 7) & ~7, fits

    def _range_of(self, bounds: tuple[Int64s, Int64s]) -> tuple[Int64s, Int64s]:
        """Where a region begins in the group, and its bytes, batch by batch."""
        starts, ends = bounds
        begins = starts[self._firsts]
        return self._heaps + begins, ((ends[self._firsts + self._counts - 1] + 7) & ~7) - begins

    def _gather(self, begins: Int64s, sizes: Int64s) -> UInt64s:
        """The words of one range for each batch, one behind the other."""
        counts = sizes >> 3
        places = np.repeat((begins >> 3) - (np.cumsum(counts) - counts), counts)
        places += np.arange(len(places))
        return self._words.take(places)
