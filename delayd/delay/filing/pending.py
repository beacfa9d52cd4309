"""Pending rows: rows in the message log above the replay offset, which no checkpoint counts yet.

Rows of hours that are not loaded yet stand here until the next checkpoint, because the loader takes them from here.
Rows of loaded hours are in the wheel, and only counted here. The checkpoint reads the log again and needs none of these
rows.

An example, with blocks of four rows. Rows 1 to 5 are of hour 20, which is not loaded, so they are kept: 1 2 3 4 | 5. A
checkpoint begins and takes these five. Rows 6 and 7 of hour 21 come: 1 2 3 4 | 5 6 7. Row 8 is of a loaded hour and is
only counted. The checkpoint is counted, and drops what it took: 6 7 are left, and 8 in the count.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.delay.filing.hour_table import HourTable
from delayd.delay.rows import ROW, Rows, copy_rows, hour_span, join_rows, new_rows

# 2 MB. Rows stand in blocks, because one growing array would copy all its rows and leave up to half of its room unused.
BLOCK_ROWS = 65_536


class Taken(NamedTuple):
    """How many rows a checkpoint takes: all of them, those that stand here, and those that are counted by hour."""

    rows: int
    kept: int
    counted: Counter[int]


class PendingRows:
    """Rows in the order of the log; appended behind, dropped in front by checkpoints."""

    def __init__(self) -> None:
        # All blocks are full but the last, and the first, whose front may have been dropped.
        self._blocks: list[Rows] = []
        self._room = 0  # Rows that still fit the last block.
        self._kept = 0
        self._counted: Counter[int] = Counter()
        self._rows = 0
        self._hours = (1, 0)  # The lowest and the highest hour of kept rows.

    def __len__(self) -> int:
        return self._rows

    @property
    def mostly_later(self) -> bool:
        """Whether at least half of the rows are of hours that are not loaded."""
        return 2 * self._kept >= self._rows

    @property
    def hours_apart(self) -> int:
        """How many hours the kept rows span: at most this many files does a checkpoint write besides those of loaded
        hours.
        """
        return self._hours[1] - self._hours[0] + 1

    def keep(self, rows: Rows) -> None:
        """Copy in rows of hours that are not loaded."""
        if not len(rows):
            return
        low, high = hour_span(rows)
        self._hours = (min(low, self._hours[0]), max(high, self._hours[1])) if self._kept else (low, high)
        self._rows += len(rows)
        self._kept += len(rows)
        at = 0
        while at < len(rows):
            if not self._room:
                self._blocks.append(new_rows(BLOCK_ROWS))
                self._room = BLOCK_ROWS
            count = min(self._room, len(rows) - at)
            copy_rows(self._blocks[-1], len(self._blocks[-1]) - self._room, rows[at : at + count])
            self._room -= count
            at += count

    def count(self, rows: Rows, span: tuple[int, int] | None = None) -> None:
        """Count rows that are in the wheel; ``span`` is the lowest and highest of their hours, where the caller knows
        it.
        """
        if not len(rows):
            return
        self._rows += len(rows)
        first, last = span or hour_span(rows)
        if first == last:
            self._counted[first] += len(rows)
        else:
            self._counted.update(_by_hour(rows["hour"]))

    def drop_loaded(self, loaded_until: int, withheld: Collection[int] = ()) -> None:
        """Hours up to ``loaded_until`` are loaded now: drop their kept rows and only count them, except those of
        ``withheld`` hours.
        """
        blocks = self._views()
        self._blocks, self._room, self._kept, self._hours = [], 0, 0, (1, 0)
        for rows in blocks:
            hours = rows["hour"]
            near = hours <= np.uint32(loaded_until)
            if withheld:
                near &= ~np.isin(hours, list(withheld))
            self._rows -= len(rows)
            if near.any():
                self._rows += int(np.count_nonzero(near))
                self._counted.update(_by_hour(hours[near]))
                rows = rows.take(np.flatnonzero(~near))
            self.keep(rows)

    @property
    def kept(self) -> int:
        """How many rows stand here; later rows are put behind them."""
        return self._kept

    @property
    def first_kept_hour(self) -> int | None:
        """No kept row is of an earlier hour; None when none is kept."""
        return self._hours[0] if self._kept else None

    def of_hour(self, hour: int, first: int = 0) -> Rows:
        """Copy those of the kept rows, from number ``first`` on, that are filed in one hour."""
        return rows_of_hour(self.views(first), hour)

    def between(self, first_sequence: int, last_sequence: int) -> list[Rows]:
        """View the kept rows block by block, without blocks whose sequences all lie outside of these bounds; rows rise
        in sequence.
        """
        return [
            rows
            for rows in self._views()
            if len(rows) and int(rows[0]["sequence"]) <= last_sequence and int(rows[-1]["sequence"]) >= first_sequence
        ]

    def views(self, first: int) -> list[Rows]:
        """View the kept rows from number ``first`` on; other threads may read them, also after they were dropped."""
        views: list[Rows] = []
        for rows in self._views():
            if first < len(rows):
                views.append(rows[first:])
            first = max(0, first - len(rows))
        return views

    def has_hour(self, hour: int) -> bool:
        """Whether any row is of this hour."""
        return self._counted[hour] > 0 or any((rows["hour"] == np.uint32(hour)).any() for rows in self._views())

    def count_by_hour(self) -> dict[int, int]:
        """How many rows each filing hour has."""
        counts = Counter[int]()
        if self._kept:
            first, last = self._hours
            kept = np.zeros(last - first + 1, np.int64)
            # One array for all blocks: with millions of rows, a Counter for each block would hold the loop for a
            # second.
            for rows in self._views():
                kept += np.bincount(rows["hour"] - np.uint32(first), minlength=len(kept))
            counts.update(_counts_from(first, kept))
        counts.update(self._counted)
        return counts

    def take(self) -> Taken:
        """Note which rows stand here now, for a checkpoint that begins."""
        return Taken(self._rows, self._kept, Counter(self._counted))

    def drop(self, taken: Taken) -> None:
        """Forget the rows that a published checkpoint covers."""
        self._rows -= taken.rows
        self._kept -= taken.kept
        self._counted -= taken.counted
        left = taken.kept
        while left:
            first = self._blocks[0]
            filled = len(first) - (self._room if len(self._blocks) == 1 else 0)
            if filled > left:
                # A copy is made, because a view would keep the whole block in memory.
                self._blocks[0] = join_rows([first[left:]])
                break
            del self._blocks[0]
            left -= filled
        if not self._blocks:
            self._room = 0

    def _views(self) -> list[Rows]:
        if not self._room:
            return list(self._blocks)
        return [*self._blocks[:-1], self._blocks[-1][: len(self._blocks[-1]) - self._room]]


def rows_of_hour(views: Sequence[Rows], hour: int) -> Rows:
    """Copy the rows that are filed in one hour."""
    return rows_of_hours(views, range(hour, hour + 1))


def rows_of_hours(views: Sequence[Rows], hours: range) -> Rows:
    """Copy the rows that are filed in these neighbouring hours."""
    found = [rows.take(np.flatnonzero(_after(rows, hours) < np.uint32(len(hours)))) for rows in views]
    return join_rows(found) if found else np.empty(0, ROW)


def counts_of_hours(views: Sequence[Rows], hours: range) -> Int64s:
    """How many rows each of these neighbouring hours has."""
    counts = np.zeros(len(hours), np.int64)
    for rows in views:
        after = _after(rows, hours)
        counts += np.bincount(after.compress(after < np.uint32(len(hours))), minlength=len(hours))
    return counts


def full_hours(hours: HourTable, pending: PendingRows, rows_max: int) -> set[int]:
    """Hours that hold ``rows_max`` rows or more, filed and pending together."""
    # Counting millions of rows takes the loop tens of milliseconds; mostly even all pending rows together would fill no
    # hour.
    near = hours.rows.take(np.flatnonzero(hours.rows["rows"] >= rows_max - len(pending)))
    if not len(near) and len(pending) < rows_max:
        return set()
    counts = pending.count_by_hour()
    for hour, count in zip(near["hour"].tolist(), near["rows"].tolist(), strict=True):
        counts[hour] = counts.get(hour, 0) + count
    return {hour for hour, count in counts.items() if count >= rows_max}


def _after(rows: Rows, hours: range) -> NDArray[np.uint32]:
    """How long after the first of these hours each row is filed. Hours before it wrap around, and are far behind."""
    after: NDArray[np.uint32] = rows["hour"] - np.uint32(hours.start)
    return after


def _by_hour(hours: NDArray[np.uint32]) -> dict[int, int]:
    first = int(hours.min())
    return _counts_from(first, np.bincount(hours - np.uint32(first)))


def _counts_from(first: int, counts: Int64s) -> dict[int, int]:
    """The counts that are not 0, by hour; ``counts`` begins with that of hour ``first``."""
    found = np.flatnonzero(counts)
    return dict(zip((found + first).tolist(), counts.take(found).tolist(), strict=True))
