"""Log range: rows of a stretch of the message log, found once by their columns, then copied out in parts of any order.

Invariant: every byte that is copied out was verified in the same reading; of a body only its place stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.delay.table import Stored, tabulate
from delayd.log.group import Group, GroupKind
from delayd.log.log import Log

WINDOW_BYTES = 32 << 20  # Of the log in memory at a time.
PIECE_ROWS = 8_000  # Copied in one call: their index arrays stay in the processor's cache.

Rising = NDArray[np.intp]


class Items(NamedTuple):
    """One item a row: words that begin behind those of the row before, and exact lengths in bytes."""

    words: NDArray[np.uint64]
    ends: Int64s  # In words.
    lengths: Int64s

    def slice(self, low: int, high: int) -> memoryview:
        """Bytes of the items from ``low`` up to ``high``."""
        return self.words[(self.ends[low - 1] if low else 0) : self.ends[high - 1]].data.cast("B")


class _Places(NamedTuple):
    """Where one item of each row lies in the log: offset in bytes, and length."""

    offset: Int64s
    length: NDArray[np.uint32]


class _Window(NamedTuple):
    """Groups read at once: where the first begins, the checksum before it, and the number of its first row."""

    start: int
    previous_crc32c: int
    first_row: int


class LogRange:
    """The rows from ``start`` up to ``stop`` of the message log, ``count`` of them in the log's order.

    Raises:
        DamagedData: a group does not check.
    """

    def __init__(self, log: Log, start: int, stop: int, previous_crc32c: int, count: int) -> None:
        self._log = log
        self._stop = stop
        self._windows: list[_Window] = []
        self._bodies = _Places(np.empty(count, np.int64), np.empty(count, np.uint32))
        self._headers: _Places | None = None
        self.deliver_at_ms = np.empty(count, np.int64)
        self.sequences = np.empty(count, np.uint64)
        self.accepted_at_ms = np.empty(count, np.int64)
        at = 0
        for window in _windows(log.scan(start, stop, previous_crc32c)):
            first = window[0].header
            self._windows.append(_Window(first.offset, first.previous_crc32c, at))
            at = self._index(window, at)
        assert at == count, f"the range holds {at} rows, {count} are pending"

    def copy(self, rows: Rising, order: Rising) -> tuple[Items, Items | None]:
        """Copy bodies and headers of ``rows``; the i-th item is that of row ``rows[order[i]]``; None without headers.

        Raises:
            DamagedData: a group does not check.
        """
        regions = [_Region(self._bodies, rows, order)]
        if self._headers is not None:
            regions.append(_Region(self._headers, rows, order))
        firsts = [window.first_row for window in self._windows]
        begin = int(np.searchsorted(firsts, rows[0], "right")) - 1
        scan = self._log.scan(self._windows[begin].start, self._stop, self._windows[begin].previous_crc32c)
        bounds = np.searchsorted(rows, [*firsts[begin:], len(self.sequences)]).tolist()
        for window, low, high in zip(_windows(scan), bounds, bounds[1:], strict=False):
            if low < high:
                words = _words(window)
                for region in regions:
                    region.fill(words, window[0].header.offset, low, high)
            if high == len(rows):
                break
        items = [region.items() for region in regions]
        return items[0], items[1] if len(items) > 1 else None

    def _index(self, window: list[Group], at: int) -> int:
        stored = _stored(window)
        if not stored:
            return at
        table = tabulate(stored)
        heaps = np.fromiter((entry.offset + entry.batch.heap_offset for entry in stored), np.int64, len(stored))
        base = heaps.take(table.batch_of)
        rows = slice(at, at + len(base))
        counts = [group.header.row_count for group in window]
        self.accepted_at_ms[rows] = np.repeat([group.header.appended_at_ms for group in window], counts)
        self.deliver_at_ms[rows] = table.deliver_at_ms
        self.sequences[rows] = table.sequences
        self._bodies.offset[rows] = base + table.body_starts
        self._bodies.length[rows] = table.body_lengths
        if table.headers is not None:
            if self._headers is None:
                count = len(self.sequences)
                self._headers = _Places(np.zeros(count, np.int64), np.zeros(count, np.uint32))
            self._headers.offset[rows] = base + table.headers[0]
            self._headers.length[rows] = table.headers[1]
        return rows.stop


class _Region:
    """The items of one kind of the wanted rows, being copied to where the order wants them."""

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
        """Copy rows ``low`` to ``high``, which lie in ``words``, the log's bytes from ``offset`` on."""
        for at in range(low, high, PIECE_ROWS):
            piece = slice(at, min(high, at + PIECE_ROWS))
            count = self._count[piece]
            ends = np.cumsum(count)
            index = np.arange(int(ends[-1]))
            source = np.repeat(((self._source[piece] - offset) >> 3) - (ends - count), count)
            source += index
            index += np.repeat(self._target[piece] - (ends - count), count)
            self._words[index] = words.take(source, mode="clip")

    def items(self) -> Items:
        return Items(self._words, self._ends, self._lengths)


def _windows(groups: Iterator[Group]) -> Iterator[list[Group]]:
    """Neighbouring groups, those without rows among them, so that offsets in a window have no gap."""
    window: list[Group] = []
    size = 0
    for group in groups:
        if window and size + group.header.total_bytes > WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(group)
        size += group.header.total_bytes
    if window:
        yield window


def _stored(window: list[Group]) -> list[Stored]:
    stored: list[Stored] = []
    for group in window:
        if group.header.kind == GroupKind.DATA:
            sequence = group.header.base_sequence
            for offset, batch in group.batches():
                stored.append(Stored(offset, sequence, batch))
                sequence += batch.count
    return stored


def _words(window: list[Group]) -> NDArray[np.uint64]:
    words = np.empty(sum(group.header.total_bytes for group in window) >> 3, np.uint64)
    at = 0
    for group in window:
        end = at + (group.header.total_bytes >> 3)
        words[at:end] = np.frombuffer(group.buffer, np.uint64)
        at = end
    return words
