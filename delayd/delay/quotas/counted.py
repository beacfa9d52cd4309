"""Counted rows: the pending rows of all counted subjects, 20 bytes each, found again by their sequences.

They stand in blocks of at most 65,536 rows, in one order: all rows of a block have lower sequences than those of the
next one. So a row is looked for in one block only, however many there are. Invariant: a row that was taken off is never
found again.

An example, with blocks of 4 rows: the sequences 1 3 5 7 | 8 9 are here.

1. 10, 11 and 12 come: 1 3 5 7 | 8 9 10 11 | 12.
2. A counting has found 2 and 6, which are older: 1 2 3 | 5 6 7 | 8 9 10 11 | 12.
3. 2, 3, 8, 9 and 10 end: 1 5 6 7 | 11 12. A block of which less than half is left is made smaller, and joined with the
   one before it when both are small.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.batch.sequences import find

BLOCK_ROWS = 65_536
NEW_ROWS = 1_024  # A block begins with room for so many rows, and doubles it.
TURN_ROWS = 1 << 18  # So many rows are copied in one call, some milliseconds; a later call goes on.
ROW_BYTES = 20
GONE = 0xFFFF_FFFF  # The subject of a row that was taken off.


class CountedRows(NamedTuple):
    """Columns of n rows, by rising sequence."""

    sequences: NDArray[np.uint64]
    subjects: NDArray[np.uint32]  # Numbers that `Quotas` gives to counted subjects.
    seconds: NDArray[np.uint32]  # Since the epoch.
    sizes: NDArray[np.uint32]  # Bytes of bodies and headers.

    def take(self, rows: NDArray[np.intp]) -> "CountedRows":
        """Copy some of the rows."""
        sequences, subjects, seconds, sizes = self
        return CountedRows(sequences.take(rows), subjects.take(rows), seconds.take(rows), sizes.take(rows))

    def cut(self, begin: int, end: int | None = None) -> "CountedRows":
        """View rows that follow each other."""
        sequences, subjects, seconds, sizes = self
        of = slice(begin, end)
        return CountedRows(sequences[of], subjects[of], seconds[of], sizes[of])

    def put(self, begin: int, rows: "CountedRows") -> None:
        """Copy other rows into these columns, from ``begin`` on."""
        of = slice(begin, begin + len(rows.sequences))
        self.sequences[of], self.subjects[of] = rows.sequences, rows.subjects
        self.seconds[of], self.sizes[of] = rows.seconds, rows.sizes


def make_rows(sequences: NDArray[np.uint64], subject: int, seconds: Int64s, sizes: Int64s) -> CountedRows:
    """Rows of one subject."""
    subjects = np.full(len(sequences), subject, np.uint32)
    return CountedRows(sequences, subjects, seconds.astype(np.uint32), sizes.astype(np.uint32))


def join(parts: list[CountedRows]) -> CountedRows:
    """Rows of several parts, by rising sequence."""
    if not parts:
        return NO_ROWS
    sequences, subjects, seconds, sizes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return CountedRows(sequences, subjects, seconds, sizes).take(np.argsort(sequences, kind="stable"))


def _room_for(rows: int) -> CountedRows:
    return CountedRows(np.empty(rows, np.uint64), *(np.empty(rows, np.uint32) for _ in range(3)))


NO_ROWS = _room_for(0)


class _Block:
    """Rows of rising sequence, of which ``alive`` are not gone; the columns may have room for more."""

    __slots__ = ("_columns", "alive", "count")

    def __init__(self, rows: CountedRows) -> None:
        """Take rows, none of which is gone; they are copied when one is added."""
        self._columns = rows
        self.count = self.alive = len(rows.sequences)

    @property
    def rows(self) -> CountedRows:
        """A view of the rows, those that are gone included."""
        return self._columns.cut(0, self.count)

    @property
    def first(self) -> int:
        return int(self._columns.sequences[0])

    @property
    def last(self) -> int:
        return int(self._columns.sequences[self.count - 1])

    def left(self) -> CountedRows:
        """A copy of the rows that are not gone."""
        return self.rows.take(np.flatnonzero(self.rows.subjects != GONE))

    def append(self, rows: CountedRows) -> None:
        """Take rows that are newer than the others."""
        end = self.count + len(rows.sequences)
        if end > len(self._columns.sequences):
            room = min(BLOCK_ROWS, max(NEW_ROWS, 2 * end))
            wider = _room_for(room)
            wider.put(0, self.rows)
            self._columns = wider
        self._columns.put(self.count, rows)
        self.count, self.alive = end, self.alive + len(rows.sequences)


class Counted:
    """The rows of all counted subjects."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._new: list[CountedRows] = []  # Rows that came last, in parts that stand in no block yet.
        self._rows = 0  # Of all blocks and parts, those that are gone included.
        self._thin = False  # Whether blocks may be left of which most rows are gone.

    @property
    def held_bytes(self) -> int:
        """Memory of the rows."""
        return ROW_BYTES * self._rows

    def add(self, rows: CountedRows) -> None:
        """Take rows, by rising sequence."""
        if len(rows.sequences):
            self._new.append(rows)
            self._rows += len(rows.sequences)

    def merge(self, rows: CountedRows) -> CountedRows:
        """Take as many rows as one turn may, by rising sequence, between those that are here; returns the others."""
        self._settle()
        return self._merge(rows)

    def remove(self, sequences: NDArray[np.uint64]) -> CountedRows:
        """Take off those of these rows that are here; returns them. ``sequences`` rise."""
        self._settle()
        found: list[CountedRows] = []
        for block, wanted in self._where(sequences):
            own = block.rows
            at = np.unique(find(own.sequences, wanted)[1])
            at = at.compress(own.subjects.take(at) != GONE)
            if len(at):
                found.append(own.take(at))
                own.subjects[at] = GONE
                block.alive -= len(at)
                self._thin |= 2 * block.alive < block.count
        self._compact()
        return join(found)

    def forget(self, *numbers: int) -> None:
        """Forget the rows of subjects that are not counted any more."""
        self._settle()
        forgotten = np.array(numbers, np.uint32)
        for block in self._blocks:
            subjects = block.rows.subjects
            own = np.isin(subjects, forgotten)
            if own.any():
                subjects[own] = GONE
                block.alive -= int(np.count_nonzero(own))
                self._thin |= 2 * block.alive < block.count
        self._compact()

    def _where(self, sequences: NDArray[np.uint64]) -> Iterator[tuple[_Block, NDArray[np.uint64]]]:
        """The blocks in which some of these sequences may stand, each with its own; as many steps as there are of the
        fewer.
        """
        low, count = 0, len(sequences)
        while self._blocks and low < count:
            index = max(0, bisect_right(self._blocks, int(sequences[low]), key=_first) - 1)
            high = count
            if index + 1 < len(self._blocks):
                high = int(np.searchsorted(sequences, self._blocks[index + 1].first))
            yield self._blocks[index], sequences[low:high]
            low = high

    def _settle(self) -> None:
        """Put the rows that came last into blocks: behind all others, as nearly always, or between them."""
        if not self._new:
            return
        rows, self._new = join(self._new), []
        self._rows -= len(rows.sequences)
        while len(rows.sequences):
            rows = self._merge(rows)

    def _merge(self, rows: CountedRows) -> CountedRows:
        """See `merge`."""
        taken = 0
        while len(rows.sequences) and taken < TURN_ROWS:
            index = bisect_right(self._blocks, int(rows.sequences[0]), key=_first) - 1
            cut = BLOCK_ROWS
            if index + 1 < len(self._blocks):
                following = self._blocks[index + 1].first
                cut = min(cut, int(np.searchsorted(rows.sequences[:cut], following)))
            part, rows = rows.cut(0, cut), rows.cut(cut)
            taken += self._insert(index, part)
        return rows

    def _insert(self, index: int, part: CountedRows) -> int:
        """Put rows into the block ``index`` or behind it, below the next one; returns how many rows were copied."""
        count = len(part.sequences)
        self._rows += count
        block = self._blocks[index] if index >= 0 else None
        if block is None or (block.last < part.sequences[0] and block.count + count > BLOCK_ROWS):
            # A copy, because a view would keep a long column in memory for a short block.
            self._blocks.insert(index + 1, _Block(part.take(np.arange(count))))
        elif block.last < part.sequences[0]:
            block.append(part)
        else:
            self._rows -= block.count - block.alive
            joined = join([block.left(), part])
            count = len(joined.sequences)
            half = -(-count // (1 + (count > BLOCK_ROWS)))
            self._blocks[index : index + 1] = [
                _Block(joined.take(np.arange(low, min(count, low + half)))) for low in range(0, count, half)
            ]
        return count

    def _compact(self) -> None:
        """Give back the memory of rows that are gone, and join small blocks with their neighbours."""
        if not self._thin:
            return
        self._thin = False
        kept: list[_Block] = []
        copied = 0
        for block in self._blocks:
            if copied >= TURN_ROWS:
                self._thin = True
                kept.append(block)
                continue
            if 2 * block.alive < block.count:
                self._rows -= block.count - block.alive
                copied += block.alive
                block = _Block(block.left())
            if kept and kept[-1].alive + block.alive <= BLOCK_ROWS // 2:
                for each in (kept[-1], block):
                    self._rows -= each.count - each.alive
                block = _Block(join([kept.pop().left(), block.left()]))
                copied += block.alive
            if block.alive:
                kept.append(block)
        self._blocks = kept


def _first(block: _Block) -> int:
    return block.first
