"""Join: which rows of another log belong to which scheduled row, without a shuffle.

Invariant: the schedule side rises in sequence, so a binary search finds each row's place; the other side may be in any
order and may repeat a sequence.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.reading.columns import UInt64s

Mask = NDArray[np.bool_]


class Join:
    """Rows of another log by the schedule row that they belong to."""

    def __init__(self, scheduled: UInt64s, sequence: UInt64s) -> None:
        count = len(scheduled)
        place = np.searchsorted(scheduled, sequence)
        inside = np.minimum(place, max(count - 1, 0))
        self.known: Mask = (place < count) & (scheduled[inside] == sequence) if count else np.zeros(len(sequence), bool)
        self.rows = np.flatnonzero(self.known)  # Rows of the other log that have a schedule row, and which.
        self.scheduled = place[self.rows]
        self.times = np.bincount(self.scheduled, minlength=count)
        # Filled from behind, so that the first row of each sequence is the one that stays.
        self.first = np.full(count, -1, np.int64)
        self.first[self.scheduled[::-1]] = self.rows[::-1]


class Facts:
    """The fields of a table's rows, one for each scheduled row; zeros where it has none. A field is made when asked."""

    def __init__(self, table: NDArray[np.void], row_of: Int64s, first: Int64s) -> None:
        """``first`` is an index into ``row_of``, -1 for none; ``row_of`` is one into ``table``."""
        self._table = table
        self._index = np.full(len(first), len(table))  # Behind the last row stands a zero.
        there = first >= 0
        self._index[there] = row_of[first[there]]
        self._fields: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        field = self._fields.get(name)
        if field is None:
            column = np.append(self._table[name], np.zeros(1, self._table.dtype[name]))
            field = self._fields[name] = column.take(self._index)
        return field
