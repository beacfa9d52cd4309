"""Join: finds the rows of another log that belong to each scheduled row, without a shuffle.

Invariant: the schedule side rises in sequence, so each sequence has one place there. The other side may be in any order
and may repeat a sequence. Where the sequences of an hour lie close together, as they do on all but the quietest
servers, places are read from a table with an entry for each number; otherwise a binary search finds them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.log.dispatch import OutcomeRows
from delayd.reading.columns import UInt64s
from delayd.reading.realtime import TargetRows

Mask = NDArray[np.bool_]
Places = NDArray[np.int64]

TABLE_ENTRIES_PER_ROW_MAX = 8  # A table may be this sparse; then it has 64 bytes a row, and is freed at once.


class Join:
    """Rows of another log by the schedule row that they belong to.

    ``same``: each scheduled row is there once, in the same order, so columns can be compared directly.
    """

    def __init__(self, scheduled: UInt64s, sequence: UInt64s) -> None:
        count = len(scheduled)
        self.same = _are_the_same(scheduled, sequence)
        if self.same:
            self.known: Mask = np.ones(count, np.bool_)
            self.rows = self.scheduled = self.first = np.arange(count)
            self.times = np.ones(count, np.int64)
            return
        place = _places(scheduled, sequence)
        self.known = place >= 0
        # Rows of the other log that have a schedule row; ``scheduled`` has that row for each.
        self.rows = np.flatnonzero(self.known)
        self.scheduled = place if len(self.rows) == len(place) else place[self.rows]
        self.times = np.bincount(self.scheduled, minlength=count)
        # Filled from behind, so that the first row of each sequence is written last and stays.
        self.first = np.full(count, -1, np.int64)
        self.first[self.scheduled[::-1]] = self.rows[::-1]

    @property
    def first_rows(self) -> Places | None:
        """``first`` as `JoinedFields` takes it."""
        return None if self.same else self.first

    def of_first(self, values: NDArray[Any]) -> NDArray[Any]:
        """The value in the first row that belongs to each scheduled row; anything where there is none; not to be
        written to.

        ``values`` is a column of the other log, which has rows.
        """
        return values if self.same else values[np.maximum(self.first, 0)]

    def lowest(self, values: Int64s, lowest: Int64s, which: Mask | None = None) -> None:
        """Lower an entry of ``lowest`` for each scheduled row; ``values`` has one for each of `rows`, or of some."""
        if self.same and (which is None or which.all()):
            np.minimum(lowest, values, out=lowest)
            return
        scheduled = self.scheduled
        if which is not None and not which.all():
            scheduled, values = scheduled[which], values[which]
        if self.times.max(initial=0) > 1:
            # Nearly all rows are there once, and need no slow loop.
            again = self.times[scheduled] > 1
            np.minimum.at(lowest, scheduled[again], values[again])
            scheduled, values = scheduled[~again], values[~again]
        lowest[scheduled] = np.minimum(lowest[scheduled], values)


class Fields:
    """The fields of a table as contiguous columns, each with a zero behind the last row; made when they are asked
    for.
    """

    def __init__(self, table: NDArray[np.void]) -> None:
        self.table = table
        self._fields: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        field = self._fields.get(name)
        if field is None:
            field = self._fields[name] = np.append(self.table[name], np.zeros(1, self.table.dtype[name]))
        return field


class JoinedFields:
    """The fields of a table's rows, one value for each scheduled row; zeros where it has no row. A field is made when
    asked for.
    """

    def __init__(self, table: Fields, row_of: Int64s, first: Int64s | None) -> None:
        """``row_of`` is an index into ``table``, ``first`` one into that, -1 for none; None: each row, in its order."""
        self._table = table
        # A zero stands behind the last row, and an index of -1 names it.
        self._index = row_of if first is None else np.append(row_of, len(table.table)).take(first)
        self._fields: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        field = self._fields.get(name)
        if field is None:
            field = self._fields[name] = self._table[name].take(self._index)
        return field


def reordered(columns: Sequence[NDArray[Any]], order: NDArray[np.intp]) -> list[NDArray[Any]]:
    """Copy columns into another order; they are used up, because one column's memory takes the next one of its
    width.
    """
    spare: dict[int, NDArray[Any]] = {}
    moved: list[NDArray[Any]] = []
    for column in columns:
        # Columns with the same value in each row are not rare: one subject, nothing past due, bodies of one size.
        if len(column) == len(order) and len(column) and (column == column[0]).all():
            moved.append(column)
            continue
        room = spare.pop(column.itemsize, None)
        # With any other mode numpy would fill a buffer of its own first.
        moved.append(np.take(column, order, out=None if room is None else room.view(column.dtype), mode="clip"))
        if column.flags.writeable and len(column) == len(order):
            spare[column.itemsize] = column
    return moved


def rising(sequences: UInt64s) -> NDArray[np.intp]:
    """The order in which sequences rise; of equal ones the first stays first."""
    table = _table(sequences)
    if table is not None:
        order = table if len(table) == len(sequences) else table[table >= 0]
        if len(order) == len(sequences) and (order is not table or int(table.min()) >= 0):
            return order
    return np.argsort(sequences, kind="stable")


class Sorter:
    """Puts the rows of several logs in the order of their sequences.

    Messages are filed, handed over and recorded in the order in which they are due, so the logs of an hour mostly hold
    the same sequences. To compare two of them costs a tenth of sorting one.
    """

    def __init__(self) -> None:
        # Sequences as a log has them, their order, and the sequences in it.
        self._known: list[tuple[UInt64s, NDArray[np.intp], UInt64s]] = []

    def sort(self, sequence: UInt64s, columns: Sequence[NDArray[Any]]) -> tuple[UInt64s, list[NDArray[Any]]]:
        """Sort the rows of a log by rising sequence; of one sequence the first stays first.

        Args:
            sequence: of each row.
            columns: are used up.

        Returns:
            ``sequence``, which is not to be written to, and ``columns`` in the new order.
        """
        for known, order, ordered in self._known:
            if np.array_equal(known, sequence):
                return ordered, reordered(columns, order)
        order = rising(sequence)
        ordered = sequence.take(order)
        ordered.flags.writeable = False
        self._known.append((sequence, order, ordered))
        return ordered, reordered(columns, order)

    def outcomes(self, found: OutcomeRows) -> OutcomeRows:
        """Outcomes by rising sequence; they are used up."""
        if rises(found.sequences):
            return found
        columns = found.deliver_at_ms, found.content_hash, found.part_of
        sequences, (due, hashes, part_of) = self.sort(found.sequences, columns)
        return OutcomeRows(sequences, due, found.parts, part_of, hashes)

    def stored(self, rows: TargetRows) -> TargetRows:
        """The rows of targets by rising sequence; they are used up."""
        if rises(rows.sequence):
            return rows
        columns = rows.deliver_at_ms, rows.hashes(), rows.batch_of
        sequence, (due, hashes, batch_of) = self.sort(rows.sequence, columns)
        return TargetRows(sequence, due, batch_of, rows.batches, rows.targets, rows.subjects, hashes)


def rises(sequences: UInt64s) -> bool:
    """Whether the rows stand by rising sequence already."""
    return bool((sequences[1:] >= sequences[:-1]).all())


def _are_the_same(scheduled: UInt64s, sequence: UInt64s) -> bool:
    """Whether each scheduled row is there once, in the same order, as in nearly all hours."""
    return np.array_equal(scheduled, sequence) and bool((scheduled[1:] > scheduled[:-1]).all())


def _places(scheduled: UInt64s, sequence: UInt64s) -> Places:
    """For each sequence its first place in ``scheduled``, which rises; -1 where it is not there."""
    if not len(scheduled) or not len(sequence):
        return np.full(len(sequence), -1, np.int64)
    table = _table(scheduled)
    if table is not None:
        numbers = sequence - scheduled[0]  # A number below the first one wraps around and becomes very large.
        outside = numbers >= len(table)
        if outside.any():
            numbers[outside] = 0
        places: Places = table.take(numbers.view(np.int64))
        places[outside] = -1
        return places
    found: Places = np.searchsorted(scheduled, sequence).astype(np.int64)
    inside = np.minimum(found, len(scheduled) - 1)
    found[(found >= len(scheduled)) | (scheduled[inside] != sequence)] = -1
    return found


def _table(sequences: UInt64s) -> Places | None:
    """The first index of each number from the lowest sequence on, -1 for none; None if the table would be too
    sparse.
    """
    if not len(sequences):
        return None
    lowest = int(sequences.min())
    span = int(sequences.max()) - lowest + 1
    if span > TABLE_ENTRIES_PER_ROW_MAX * len(sequences):
        return None
    table = np.full(span, -1, np.int64)
    table[(sequences - np.uint64(lowest)).view(np.int64)[::-1]] = np.arange(len(sequences))[::-1]
    return table
