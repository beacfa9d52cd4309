"""Stored content: which rows of a realtime server's message log are not what their content hash says (rule S6).

A batch often has one row, so batches of one layout are hashed together: they have as many rows and the same columns at
the same places, so each column of all of them is a matrix. The hash is that of docs/formats/content.md.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import ColumnId, Int64s
from delayd.batch.content import NOT_STATED, Region, UInt64s, copy_words, differing_row, hash_items, states_of
from delayd.batch.names import SUBJECT_BYTES_MAX
from delayd.batch.validate import check_batch

TABLE_BYTES = 8  # The end of the only subject, before its name.


def differing_rows(buffer: memoryview, batches: Sequence[tuple[int, Batch]]) -> Iterator[tuple[int, int]]:
    """Rows of verified DISPATCH batches that are not what they state: where their batch begins, and their number in it.

    Each batch comes with its beginning in ``buffer``. Of a batch that is hashed alone only the first row is named.

    Raises:
        BatchMalformed, BadSubject, MessageTooLarge: intake would not have taken one of the batches.
    """
    alike: dict[int, list[tuple[int, Batch]]] = {}
    for begin, batch in batches:
        alike.setdefault(id(batch.layout), []).append((begin, batch))
    for some in alike.values():
        alone = some
        if len(some) > 1 and ColumnId.CONTENT_HASH in some[0][1]:
            together = _Alike(buffer, some)
            alone = [some[at] for at in np.flatnonzero(~together.sound).tolist()]
            yield from together.differing()
        for begin, batch in alone:
            check_batch(batch)
            if (row := differing_row(batch)) is not None:
                yield begin, row


class _Alike:
    """Batches of one layout; ``sound`` says whose names and items fill the heap, one behind the other."""

    def __init__(self, buffer: memoryview, batches: Sequence[tuple[int, Batch]]) -> None:
        self._words = np.frombuffer(buffer, np.uint64)
        self._layout, self._rows = batches[0][1].layout, np.arange(batches[0][1].count)
        self._begins = np.array([begin for begin, _ in batches])
        self._heaps = self._begins + batches[0][1].heap_offset
        sizes = self._begins + [batch.total_bytes for _, batch in batches] - self._heaps
        halves = np.frombuffer(buffer, np.uint32)
        self._names = halves.take(self._heaps >> 2, mode="clip").astype(np.int64)
        self.sound = (self._names > 0) & (self._names <= SUBJECT_BYTES_MAX)
        self.sound &= np.array([batch.subject_count == 1 for _, batch in batches])
        self._regions: dict[int, tuple[Int64s, Int64s]] = {}  # Where the items of each region begin and end.
        free = TABLE_BYTES + _padded(self._names)
        for column in self._layout.regions:
            places = (self._begins + self._layout.offsets[column] >> 2)[:, None] + self._rows
            ends = halves.take(places).astype(np.int64)
            starts = np.column_stack((free, _padded(ends[:, :-1])))
            self._regions[column] = starts, ends
            self.sound &= ((starts <= ends) & (ends <= sizes[:, None])).all(axis=1)
            free = _padded(ends[:, -1])
        self.sound &= free == sizes

    def differing(self) -> Iterator[tuple[int, int]]:
        """Rows of the sound batches whose bytes give another hash."""
        kept = np.flatnonzero(self.sound)
        if not len(kept):
            return
        names = self._names[kept]
        states = states_of(Region(self._copied(self._heaps[kept] + TABLE_BYTES, _padded(names)), names))
        headers = self._items(ColumnId.HEADERS_END, kept) if ColumnId.HEADERS_END in self._regions else None
        made = hash_items(states.repeat(len(self._rows)), headers, self._items(ColumnId.BODY_END, kept))
        places = (self._begins[kept] + self._layout.offsets[ColumnId.CONTENT_HASH] >> 3)[:, None] + self._rows
        stated = self._words.take(places).ravel()
        for at in np.flatnonzero((stated != made) & (stated != NOT_STATED)).tolist():
            number, row = divmod(at, len(self._rows))
            yield int(self._begins[kept[number]]), row

    def _items(self, column: int, kept: Int64s) -> Region:
        starts, ends = (each[kept] for each in self._regions[column])
        first = starts[:, 0]
        return Region(self._copied(self._heaps[kept] + first, _padded(ends[:, -1]) - first), (ends - starts).ravel())

    def _copied(self, begins: Int64s, sizes: Int64s) -> UInt64s:
        """The words of one range for each batch, one behind the other."""
        return copy_words(self._words, begins >> 3, sizes >> 3)


def _padded(sizes: Int64s) -> NDArray[np.int64]:
    return (sizes + 7) & ~7
