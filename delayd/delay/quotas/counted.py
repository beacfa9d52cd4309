"""Counted rows: the pending rows of all counted subjects, 20 bytes each, found again by their sequences.

They stand in parts, each of which rises (see `delayd.batch.sequences`). A part has at most PART_ROWS rows, because the
loop waits while two are merged; 150 parts are 20 million rows. Invariant: a row that was taken off is found no more.

An example, with parts of at most 8 rows:

1. The sequences 1 3 5 7 8 9 10 11 are here. 12 and 13 come: 1 3 5 7 8 9 10 11 | 12 13.
2. A counting has found 2 and 6, which are older: 1 3 5 7 8 9 10 11 | 2 6 12 13.
3. 1, 3, 8, 9 and 10 end. Less than half of the first part is left, so its rows come once more: 2 5 6 7 11 12 13.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.batch.sequences import Sequences, add_part, find
from delayd.delay.quotas.profile import Profile

PART_ROWS = 131_072  # Two parts of half of this are merged in some milliseconds.
COMPACTED_MAX = 4  # Thin parts of which one call copies what is left; a later call goes on.
ROW_BYTES = 20
GONE = 0xFFFF_FFFF  # The subject of a row that was taken off.


class CountedRows(NamedTuple):
    """Columns of n rows, by rising sequence."""

    sequences: Sequences
    subjects: NDArray[np.uint32]  # Numbers that `Quotas` gives to counted subjects.
    seconds: NDArray[np.uint32]  # Since the epoch.
    sizes: NDArray[np.uint32]  # Bytes of bodies and headers.

    @property
    def n(self) -> int:
        """How many rows these are."""
        return len(self.sequences)

    def take(self, rows: NDArray[np.intp]) -> "CountedRows":
        """Copy some of the rows."""
        sequences, subjects, seconds, sizes = self
        return CountedRows(sequences.take(rows), subjects.take(rows), seconds.take(rows), sizes.take(rows))

    def cut(self) -> "list[CountedRows]":
        """Copy the rows into pieces that are as long as a part may be."""
        return [self.take(np.arange(low, min(self.n, low + PART_ROWS))) for low in range(0, self.n, PART_ROWS)]


def make_rows(sequences: Sequences, subject: int, seconds: Int64s, sizes: Int64s) -> CountedRows:
    """Rows of one subject."""
    subjects = np.full(len(sequences), subject, np.uint32)
    return CountedRows(sequences, subjects, seconds.astype(np.uint32), sizes.astype(np.uint32))


def join(parts: Sequence[CountedRows]) -> CountedRows:
    """Rows of several parts, by rising sequence."""
    sequences, subjects, seconds, sizes = (np.concatenate(columns) for columns in zip(NO_ROWS, *parts, strict=True))
    return CountedRows(sequences, subjects, seconds, sizes).take(np.argsort(sequences, kind="stable"))


NO_ROWS = CountedRows(np.empty(0, np.uint64), *(np.empty(0, np.uint32) for _ in range(3)))


class _Part:
    """Rows of which ``left`` are not gone."""

    __slots__ = ("first", "last", "left", "rows")

    def __init__(self, rows: CountedRows) -> None:
        """Take rows, none of which is gone."""
        self.rows = rows
        self.first, self.last, self.left = int(rows.sequences[0]), int(rows.sequences[-1]), rows.n

    def __len__(self) -> int:
        return self.left

    @property
    def is_thin(self) -> bool:
        return 2 * self.left < self.rows.n

    def rows_left(self) -> CountedRows:
        return self.rows.take(np.flatnonzero(self.rows.subjects != GONE))

    def take_off(self, at: NDArray[np.intp]) -> CountedRows:
        """Take off the rows at these places, but for those that are gone."""
        found = self.rows.take(at.compress(self.rows.subjects.take(at) != GONE))
        self.rows.subjects[at] = GONE
        self.left -= found.n
        return found


class Counted:
    """The rows of all counted subjects."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._new: list[CountedRows] = []  # Rows that came last: mostly one each, so they are joined when many came.
        self._new_rows = 0

    @property
    def held_bytes(self) -> int:
        """Memory of the rows."""
        return ROW_BYTES * (sum(part.rows.n for part in self._parts) + self._new_rows)

    def add(self, rows: CountedRows) -> None:
        """Take rows, by rising sequence."""
        if rows.n == PART_ROWS:
            self._parts.append(_Part(rows))  # No other part is joined with it.
        elif rows.n:
            self._new.append(rows)
            self._new_rows += rows.n
            if self._new_rows >= PART_ROWS:
                self._settle()

    def remove(self, sequences: Sequences) -> CountedRows:
        """Take off those of these rows that are here; returns them. ``sequences`` rise."""
        self._settle()
        if not len(sequences):
            return NO_ROWS
        low, high = int(sequences[0]), int(sequences[-1])
        met = [part for part in self._parts if part.first <= high and low <= part.last]
        found = [part.take_off(np.unique(find(part.rows.sequences, sequences)[1])) for part in met]
        self._compact()
        return join(found)

    def forget(self, *numbers: int) -> None:
        """Forget the rows of subjects that are not counted any more."""
        self._settle()
        for part in self._parts:
            part.take_off(np.flatnonzero(np.isin(part.rows.subjects, np.array(numbers, np.uint32))))
        self._compact()

    def _settle(self) -> None:
        """Put the rows that came last into parts."""
        if self._new:
            new, self._new, self._new_rows = self._new, [], 0
            for rows in join(new).cut():
                add_part(self._parts, _Part(rows), _merged, PART_ROWS)

    def _compact(self) -> None:
        """Give back the memory of rows that are gone: what is left of thin parts comes once more."""
        thin = [part for part in self._parts if part.is_thin][:COMPACTED_MAX]
        if thin:
            self._parts = [part for part in self._parts if part not in thin]
            for part in thin:
                self.add(part.rows_left())


class Pending:
    """How many messages of a subject are pending, with how many bytes, and how many are due in each second."""

    __slots__ = ("bytes", "profile", "rows")

    def __init__(self) -> None:
        self.rows = self.bytes = 0
        self.profile = Profile()

    def add(self, seconds: Int64s, sizes: NDArray[np.integer]) -> None:
        """Count messages."""
        self.rows += len(seconds)
        self.bytes += int(sizes.sum(dtype=np.int64))
        self.profile.add(seconds)

    def remove(self, seconds: Int64s, sizes: NDArray[np.integer], after_s: int = -1) -> None:
        """Count messages no more. Those that have left count in their second up to ``after_s``: a second would have
        room again and again until it is over.
        """
        self.rows -= len(seconds)
        self.bytes -= int(sizes.sum(dtype=np.int64))
        self.profile.remove(seconds.compress(seconds > after_s))

    def merge(self, other: "Pending") -> None:
        """Take what another one counts, which is used no more."""
        self.rows += other.rows
        self.bytes += other.bytes
        # The other one is a reading of all logs, and mostly larger.
        other.profile.merge(self.profile)
        self.profile = other.profile


def _merged(parts: Sequence[_Part]) -> _Part:
    return _Part(join([part.rows_left() for part in parts]))
