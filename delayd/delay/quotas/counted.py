"""Counted rows: the pending rows of all counted subjects, 20 bytes each, found again by their sequences.

Invariant: the rows of a block rise in sequence, and a row that was taken off is never found again.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s

BLOCK_ROWS = 65_536
ROW_BYTES = 20
SHORT_BLOCKS_MAX = 8  # Blocks that are less than half full; with so many of them they are joined.
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


NO_ROWS = CountedRows(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(0, np.uint32))


@dataclass(slots=True)
class _Block:
    rows: CountedRows
    alive: int


class Counted:
    """The rows of all counted subjects."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._new: list[CountedRows] = []  # Rows that came last, in parts that make no block yet.
        self._new_rows = 0

    @property
    def held_bytes(self) -> int:
        """Memory of the rows."""
        return ROW_BYTES * (sum(len(block.rows.sequences) for block in self._blocks) + self._new_rows)

    def add(self, rows: CountedRows) -> None:
        """Take rows, by rising sequence."""
        for begin in range(0, len(rows.sequences), BLOCK_ROWS):
            # A copy, because a view would keep a long column in memory for a short block.
            part = rows.take(np.arange(begin, min(len(rows.sequences), begin + BLOCK_ROWS)))
            self._new.append(part)
            self._new_rows += len(part.sequences)
            if self._new_rows >= BLOCK_ROWS:
                self._settle()

    def remove(self, sequences: NDArray[np.uint64]) -> CountedRows:
        """Take off those of these rows that are here; returns them. ``sequences`` rise."""
        self._settle()
        found: list[CountedRows] = []
        for block in self._blocks:
            own = block.rows.sequences
            low, high = np.searchsorted(sequences, (own[0], own[-1] + np.uint64(1))).tolist()
            if low == high:
                continue
            wanted = sequences[low:high]
            at = np.searchsorted(own, wanted)
            at[at == len(own)] = 0
            at = np.unique(at.compress(own.take(at) == wanted))
            at = at.compress(block.rows.subjects.take(at) != GONE)
            if len(at):
                found.append(block.rows.take(at))
                block.rows.subjects[at] = GONE
                block.alive -= len(at)
        if found:
            self._compact()
        return join(found)

    def forget(self, subject: int) -> None:
        """Forget the rows of a subject that is not counted any more."""
        self._settle()
        for block in self._blocks:
            own = block.rows.subjects == subject
            block.alive -= int(np.count_nonzero(own))
            block.rows.subjects[own] = GONE
        self._compact()

    def _settle(self) -> None:
        """Make a block of the rows that came last."""
        if self._new_rows:
            rows = join(self._new)
            self._new, self._new_rows = [], 0
            self._blocks.append(_Block(rows, len(rows.sequences)))

    def _compact(self) -> None:
        """Give back the memory of rows that are gone, and make one block of many small ones."""
        short = sum(2 * block.alive <= BLOCK_ROWS for block in self._blocks)
        if short < SHORT_BLOCKS_MAX and all(2 * block.alive >= len(block.rows.sequences) for block in self._blocks):
            return
        kept: list[_Block] = []
        small: list[CountedRows] = []
        left = 0
        for block in self._blocks:
            if 2 * block.alive > BLOCK_ROWS:
                kept.append(block)
            elif block.alive:
                if left + block.alive > BLOCK_ROWS:
                    kept.append(_Block(join(small), left))
                    small, left = [], 0
                small.append(block.rows.take(np.flatnonzero(block.rows.subjects != GONE)))
                left += block.alive
        if small:
            kept.append(_Block(join(small), left))
        self._blocks = kept
