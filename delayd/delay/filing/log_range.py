"""Log range: rows of a stretch of the message log. Their columns are read once; their bodies are copied out in parts,
in any order.

Invariant: every byte that is copied out was verified in the same reading. Only the place of each body stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.columns import DTYPES, KIND_COLUMNS, BatchKind, ColumnArray, ColumnId, Int64s
from delayd.batch.content import HASHED_REGIONS, NOT_STATED, Region
from delayd.batch.gather import ROW_COLUMNS_BYTES, GatheredItems
from delayd.batch.sequences import among
from delayd.delay.rows import Stored, filing_hours, numbers_of, stored_batches, subjects_of, tabulate
from delayd.delay.subjects import Subjects
from delayd.errors import DamagedData
from delayd.hours import HOUR_MS
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.log import Log

# This much of the log is in memory at a time; a column of its rows stays below `MMAP_BYTES` of delayd.net.machine.
WINDOW_BYTES = 16 << 20
WINDOW_BATCHES = 2_000  # Each costs some 20 us of Python: a window of batches of one row has 50,000 of them.
PIECE_BYTES = 1 << 20
PIECE_WORDS = 128 << 10  # Words copied in one call: they stay in the processor's cache between being read and written.

Rising = NDArray[np.intp]


class RegionItems(NamedTuple):
    """The items of one region, one a row: 64-bit words, which begin behind the words of the row before, and exact
    lengths in bytes.
    """

    words: NDArray[np.uint64]
    ends: Int64s  # In words.
    lengths: Int64s

    def gathered(self, low: int, high: int) -> GatheredItems:
        """The items from ``low`` up to ``high``, as views."""
        return GatheredItems(self.lengths[low:high], [self._words(low, high).data.cast("B")])

    def any(self, low: int, high: int) -> bool:
        """Whether a row from ``low`` up to ``high`` has an item that is not empty."""
        return bool(self.lengths[low:high].any())

    def hashed(self, low: int, high: int) -> Region:
        """The same items, to be hashed."""
        return Region(self._words(low, high), self.lengths[low:high])

    def _words(self, low: int, high: int) -> NDArray[np.uint64]:
        return self.words[(self.ends[low - 1] if low else 0) : self.ends[high - 1]]


class _Places(NamedTuple):
    """Where one item of each row lies in the log: offset in bytes, and length."""

    offset: Int64s
    length: NDArray[np.uint32]


class _ReadAhead(NamedTuple):
    """Neighbouring groups that are read at once: their offsets, one checksum over all, and the number of their first
    row.
    """

    start: int
    end: int
    crc32c: int
    first_row: int


class LogRange:
    """The rows from ``start`` up to ``stop`` of the message log, ``count`` of them in the log's order.

    ``give_way`` is called between windows, so that more urgent jobs can run.

    Raises:
        DamagedData: a group does not check.
    """

    def __init__(
        self, log: Log, start: int, stop: int, previous_crc32c: int, count: int, give_way: Callable[[], None]
    ) -> None:
        self._log = log
        self._give_way = give_way
        self._windows: list[_ReadAhead] = []
        self._regions = KIND_COLUMNS[BatchKind.SCHEDULE].regions
        self._places: dict[ColumnId, _Places] = {}  # For each of these regions in which a row has an item.
        self._kept = KIND_COLUMNS[BatchKind.SCHEDULE].kept
        self.kept: dict[ColumnId, ColumnArray] = {}  # Each of these columns that a batch has.
        self._words = np.empty(0, np.uint64)  # Room for the window that is copied from.
        self._subjects = Subjects()  # Its own numbers, because the server's numbers are given on the loop only.
        self.deliver_at_ms = np.empty(count, np.int64)
        self.sequences = np.empty(count, np.uint64)
        self.accepted_at_ms = np.empty(count, np.int64)
        self.hours = np.empty(count, np.uint32)
        self.subject_of = np.empty(count, np.uint32)
        self.left_out: NDArray[np.uint32] | None = None  # Lengths of bodies that are not copied.
        self.hashes: NDArray[np.uint64] | None = None  # Content hashes of the rows whose bodies are not copied.
        at = 0
        for window in _windows(log.scan(start, stop, previous_crc32c)):
            checksum = 0
            for group in window:
                checksum = crc32c(group.buffer, checksum)
            self._windows.append(_ReadAhead(window[0].header.offset, window[-1].end, checksum, at))
            at = self._index(window, at)
            give_way()
        assert at == count, f"the range holds {at} rows, {count} are pending"

    @property
    def names(self) -> list[bytes]:
        """The subjects by the numbers in ``subject_of``."""
        return self._subjects.names

    def size_bytes(self) -> Int64s:
        """Bytes of each row's columns and items in a new batch: int64[n], a new array, never 0."""
        sizes = np.full(len(self.sequences), ROW_COLUMNS_BYTES)
        for places in self._places.values():
            sizes += (places.length.astype(np.int64) + 7) & ~7
        return sizes

    def filing_order(self, rows: Rising) -> Rising:
        """Order of ``rows`` in the schedule logs: rows that are due together are then read together.

        1. Rows of an earlier filing hour come first.
        2. Within an hour rows come by their due instant. A row that was due before its hour began counts as due at its
           begin: it was accepted late, and fires at once.
        3. Rows that are due in the same millisecond keep the order of the message log.

        An example, in the order of the log: a is due at 10:05; b was due at 09:50, but was accepted at 10:01 and so is
        filed in the hour of 10:00; c is due at 11:00; d is due at 10:05. The order is b, a, d, c.
        """
        hours = self.hours.take(rows)
        due_ms = self.deliver_at_ms.take(rows)
        due_ms -= hours.astype(np.int64) * HOUR_MS
        np.maximum(due_ms, 0, out=due_ms)
        # Sorts of 16-bit keys are radix sorts: half the time of one sort of the whole.
        low, high = due_ms.astype(np.uint16), (due_ms >> 16).astype(np.uint16)
        return np.lexsort((low, high, (hours - hours.min()).astype(np.uint16)))

    def leave_out(self, sequences: NDArray[np.uint64], hashes: NDArray[np.uint64]) -> None:
        """Copy no bodies and headers of rows whose sequence is among ``sequences``, which is sorted.

        ``hashes`` are their content hashes. A row without a hash keeps its body, because its hash must still be
        computed from it.
        """
        stated = np.flatnonzero(hashes != NOT_STATED)
        if len(stated) < len(hashes):
            sequences, hashes = sequences.take(stated), hashes.take(stated)
        body_bytes = self._places[ColumnId.BODY_END].length
        gone = np.flatnonzero(among(self.sequences, sequences) & (body_bytes > 0))
        if not len(gone):
            return
        self.hashes = np.zeros(len(self.sequences), np.uint64)
        self.hashes[gone] = hashes.take(np.searchsorted(sequences, self.sequences.take(gone)))
        self.left_out = np.zeros(len(self.sequences), np.uint32)
        self.left_out[gone] = body_bytes[gone]
        # The hash stands for them. Items of other regions stay.
        for column in HASHED_REGIONS:
            if column in self._places:
                self._places[column].length[gone] = 0

    def copy(self, rows: Rising, order: Rising) -> dict[ColumnId, RegionItems]:
        """Copy the items of ``rows`` in each region, in the heap's order; the i-th item is that of row
        ``rows[order[i]]``.

        Raises:
            DamagedData: the log has changed since its columns were read.
        """
        regions: dict[ColumnId, _Region] = {}
        for column in self._regions:
            if column in self._places:
                regions[column] = _Region(self._places[column], rows, order)
                self._give_way()
        bounds = np.searchsorted(rows, [*(window.first_row for window in self._windows), len(self.sequences)]).tolist()
        for window, low, high in zip(self._windows, bounds, bounds[1:], strict=False):
            if low < high:
                self._give_way()
                words = self._read(window)
                for region in regions.values():
                    region.fill(words, window.start, low, high)
        return {column: region.items() for column, region in regions.items()}

    def _read(self, window: _ReadAhead) -> NDArray[np.uint64]:
        """Read and verify the bytes of a window, valid until the next one is read; a segment may end within it."""
        size = window.end - window.start
        if len(self._words) < size >> 3:
            self._words = np.empty(size >> 3, np.uint64)
        data = self._words.data.cast("B")[:size]
        checksum = at = 0
        # Pieces are small enough to be still in the processor's cache when they are verified.
        while at < size and (count := self._log.read_into(window.start + at, data[at : at + PIECE_BYTES])):
            checksum = crc32c(data[at : at + count], checksum)
            at += count
        if at < size or checksum != window.crc32c:
            path, position = self._log.file_position(window.start)
            raise DamagedData(path, position, f"{size} bytes from there on have changed")
        return self._words[: size >> 3]

    def _index(self, window: list[CommitGroup], at: int) -> int:
        stored = _stored(window)
        if not stored:
            return at
        table = tabulate(stored, self._regions)
        heaps = np.fromiter((entry.offset + entry.batch.heap_offset for entry in stored), np.int64, len(stored))
        base = heaps.take(table.batch_of)
        rows = slice(at, at + len(base))
        counts = [group.header.row_count for group in window]
        accepted_at_ms = np.repeat([group.header.appended_at_ms for group in window], counts)
        self.accepted_at_ms[rows] = accepted_at_ms
        self.deliver_at_ms[rows] = table.deliver_at_ms
        self.sequences[rows] = table.sequences
        self.hours[rows] = filing_hours(table.deliver_at_ms, accepted_at_ms)
        self.subject_of[rows] = subjects_of(stored, numbers_of(stored, self._subjects))
        for column, (starts, lengths) in table.regions.items():
            if column not in self._places:
                count = len(self.sequences)
                self._places[column] = _Places(np.zeros(count, np.int64), np.zeros(count, np.uint32))
            places = self._places[column]
            places.offset[rows] = base + starts
            places.length[rows] = lengths
        found = frozenset[int]().union(*{entry.batch.layout.columns for entry in stored})
        for column in self._kept:
            if column in found:
                values = self.kept.setdefault(column, np.zeros(len(self.sequences), DTYPES[column]))
                first = at
                for _, _, batch in stored:
                    if column in batch.offsets:
                        values[first : first + batch.count] = batch.column(column)
                    first += batch.count
        return rows.stop


class _Region:
    """The items of the wanted rows in one region, while they are copied into their order."""

    def __init__(self, places: _Places, rows: Rising, order: Rising) -> None:
        lengths = places.length.take(rows).astype(np.int64)
        self._source = places.offset.take(rows)
        self._count = (lengths + 7) >> 3
        counts = self._count.take(order)
        self._ends = np.cumsum(counts)
        self._target = np.empty_like(self._ends)
        self._target[order] = self._ends - counts
        self._lengths = lengths.take(order)
        self._words = np.empty(int(self._ends[-1]), np.uint64)

    def fill(self, words: NDArray[np.uint64], offset: int, low: int, high: int) -> None:
        """Copy rows ``low`` to ``high``; ``words`` are the log's bytes from ``offset`` on, and hold these rows."""
        source, target = (self._source[low:high] - offset) >> 3, self._target[low:high]
        counts = self._count[low:high]
        order = np.argsort(counts)
        sizes = counts.take(order)
        # Items of the same size are copied whole; copying word by word would need an index for each word.
        for first, last in pairwise([0, *(np.flatnonzero(sizes[1:] != sizes[:-1]) + 1).tolist(), len(sizes)]):
            size = int(sizes[first])
            if not size:
                continue
            read, written = _runs_of(words, size), _runs_of(self._words, size)
            step = max(1, PIECE_WORDS // size)
            for at in range(first, last, step):
                rows = order[at : min(last, at + step)]
                written[target.take(rows)] = read[source.take(rows)]

    def items(self) -> RegionItems:
        return RegionItems(self._words, self._ends, self._lengths)


def _runs_of(words: NDArray[np.uint64], size: int) -> NDArray[np.void]:
    """View the ``size`` words from each word on as one opaque item, which numpy copies as bytes."""
    return np.ndarray((len(words) - size + 1,), np.dtype((np.void, 8 * size)), words, strides=(8,))


def _windows(groups: Iterator[CommitGroup]) -> Iterator[list[CommitGroup]]:
    """Collect neighbouring groups, also those without rows, so that the offsets in a window have no gap."""
    window: list[CommitGroup] = []
    size = batches = 0
    for group in groups:
        size += group.header.total_bytes
        batches += group.header.batch_count
        if window and (size > WINDOW_BYTES or batches > WINDOW_BATCHES):
            yield window
            window, size, batches = [], group.header.total_bytes, group.header.batch_count
        window.append(group)
    if window:
        yield window


def _stored(window: list[CommitGroup]) -> list[Stored]:
    stored: list[Stored] = []
    for group in window:
        if group.header.kind == GroupKind.DATA:
            stored += stored_batches(group)
    return stored


class HandedOver(NamedTuple):
    """Rows whose outcome DISPATCHED is durable: their sequences, and the content hashes under which they left."""

    sequences: NDArray[np.uint64]
    hashes: NDArray[np.uint64]


NOTHING_HANDED_OVER = HandedOver(np.empty(0, np.uint64), np.empty(0, np.uint64))


def sort_handed_over(pieces: Sequence[HandedOver]) -> HandedOver:
    """Join several, by rising sequence."""
    sequences, hashes = map(np.concatenate, zip(NOTHING_HANDED_OVER, *pieces, strict=True))
    order = np.argsort(sequences, kind="stable")
    return HandedOver(sequences.take(order), hashes.take(order))
