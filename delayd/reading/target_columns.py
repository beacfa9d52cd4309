"""The rows of handed-over batches as columns: decoded from stored bytes, and kept from a scan until they are asked for.

Invariant: a batch's columns are used only when they fit its own checksum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch import ColumnId, Int64s
from delayd.content import NOT_STATED
from delayd.reading.columns import NO_INT64S, NO_UINT64S, Growing, UInt64s
from delayd.reading.groups import Memory

Batches = NDArray[np.void]  # Its dtype is `delayd.reading.realtime.BATCH`.

PENDING_BYTES = 2 << 20  # Columns that wait to be decoded; this much stays in the processor's cache.
ROW_BYTES_MIN = 24  # A row of a batch without hashes has 16 bytes of columns and a place in its heap.


class Columns(NamedTuple):
    """Sequences, due instants and content hashes of rows; a hash is 0 where it is not stated."""

    sequence: UInt64s
    deliver_at_ms: Int64s
    content_hash: UInt64s


NO_COLUMNS = Columns(NO_UINT64S, NO_INT64S, NO_UINT64S)


def columns_of(words: UInt64s, starts: Int64s, batches: Batches) -> Columns:
    """The rows of batches that begin at the bytes ``starts`` of ``words``, which hold their columns."""
    counts = batches["count"].astype(np.int64)
    # For each row the word of its due instant; the word of its sequence is as many words further as its batch has rows.
    first_rows = np.cumsum(counts) - counts
    places = np.repeat(((starts + batches["deliver_at"]) >> 3) - first_rows, counts)
    places += np.arange(len(places))
    due = words.take(places).view(np.int64)
    places += np.repeat(counts, counts)
    return Columns(words.take(places), due, _hashes_of(words, starts >> 3, batches, counts))


def _hashes_of(words: UInt64s, starts: Int64s, batches: Batches, counts: Int64s) -> UInt64s:
    """The content hashes of batches that begin at the words ``starts``; zeros for a batch that states none.

    No column has a higher number, so the hash column is the last one, and ends where the columns end.
    """
    last_entries = words.take(starts + (batches["deliver_at"].astype(np.int64) >> 3) - 1)
    begins = (batches["columns_end"].astype(np.int64) >> 3) - counts
    expected = (begins.astype(np.uint64) << np.uint64(35)) | np.uint64(8 << 16 | ColumnId.CONTENT_HASH)
    places = np.repeat(starts + begins - (np.cumsum(counts) - counts), counts)
    places += np.arange(len(places))
    hashes = words.take(places)
    states_none = last_entries != expected
    if states_none.any():
        hashes[np.repeat(states_none, counts)] = NOT_STATED
    return hashes


class RowKeeper:
    """Keeps the rows of the first batches of a scan, so that rows which fit into memory are read only once.

    Columns are copied out of their groups as they come, and decoded once their batches are verified; ``rows_max`` is
    about how many rows are kept.
    """

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._rows = Growing(NO_COLUMNS)
        self._memory = Memory(PENDING_BYTES)
        self._pending = 0  # Bytes of columns that wait to be decoded.

    @property
    def is_full(self) -> bool:
        """Whether no more rows are kept."""
        return self._rows.count >= self._rows_max

    @property
    def must_decode(self) -> bool:
        """Whether the waiting columns must be decoded."""
        return self._pending >= PENDING_BYTES

    def add(self, buffer: memoryview, begins: Int64s, ends: Int64s, crcs: Sequence[int]) -> int | None:
        """Take the columns that lie between some bytes of a group: directory and columns of each batch.

        Returns:
            The first batch whose columns do not fit its checksum; None when all do.
        """
        room = self._memory.view(self._pending + int((ends - begins).sum()), self._pending)
        at = self._pending
        for number, (begin, end, crc) in enumerate(zip(begins.tolist(), ends.tolist(), crcs, strict=True)):
            columns = buffer[begin:end]
            if crc32c(columns) != crc:
                return number
            until = at + end - begin
            room[at:until] = columns
            at = until
        self._pending = at
        return None

    def decode(self, batches: Batches, columns_at: int) -> Int64s:
        """Keep the rows of the batches that were added since the last call; return where the rows of each begin.

        ``columns_at`` is where in a batch its directory begins.
        """
        lengths = batches["columns_end"].astype(np.int64) - columns_at
        starts = np.cumsum(lengths) - lengths - columns_at
        words = np.frombuffer(self._memory.view(self._pending), np.uint64)
        self._pending = 0
        counts = batches["count"].astype(np.int64)
        begins = np.cumsum(counts) - counts + self._rows.count
        decoded = columns_of(words, starts, batches)
        for room, column in zip(self._rows.more(len(decoded.sequence)), decoded, strict=True):
            room[:] = column
        return begins

    def expect(self, size_bytes: int) -> None:
        """Reserve memory for the rows that a log of this size can have."""
        self._rows.reserve(self._rows.count + min(self._rows_max, size_bytes // ROW_BYTES_MIN))

    def rows(self) -> Columns:
        """All rows that were kept."""
        kept = self._rows.columns()
        for column in kept:
            column.flags.writeable = False
        return Columns._make(kept)


def take_kept(kept: Columns, batches: Batches) -> Columns:
    """The kept rows of some batches; ``row`` of each says where they begin, counted from 1."""
    begins, counts = batches["row"].astype(np.int64) - 1, batches["count"].astype(np.int64)
    first_rows = np.cumsum(counts) - counts
    if not len(batches) or (begins - begins[0] == first_rows).all():
        # They lie one behind the other, as those of an hour mostly do.
        first = int(begins[0]) if len(batches) else 0
        rows = slice(first, first + int(counts.sum()))
        return Columns._make(column[rows] for column in kept)
    places = np.repeat(begins - first_rows, counts)
    places += np.arange(len(places))
    return Columns._make(column.take(places) for column in kept)
