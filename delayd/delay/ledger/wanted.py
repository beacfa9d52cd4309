"""Wanted rows: the rows of a request, by rising sequence, as they are compared with rows in memory.

Invariant: a row of memory is the wanted one only when sequence, filing hour and due instant are the same. So a receipt
that somebody has made up names no row.

While a target is away, millions of rows may wait for it, in the order in which they fell due. A search through all of
them for each request would hold the loop. So when many are not sorted, `Outside` has them sorted once, beside the loop;
what is left is searched as it is.

     arrays  a (3 rows)  b (2 rows)  c (1 row)       run: sequences 4 5 7 8 9      and c as it is
             9 4 7       5 8         6                    array     a b a b a
                                                          row       1 0 2 1 0

What is found stands in an array that the caller has named; a run may name arrays that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.batch.sequences import NO_INDICES, Indices, Sequences, SequenceSet, find, find_each
from delayd.delay.rows import Rows, due_within, filing_hours
from delayd.delay.subjects import Subjects
from delayd.errors import BadRequest
from delayd.wire.asked import Asked

TABLE_FROM_ROWS = 4_096  # An array of this many rows is worth a table of the wanted ones.
TABLE_ROWS_MIN = 512 << 10  # The table then has up to eight times as many entries, of one byte.


class OfSubject:
    """The subject that all messages of a request must have, and whether one of another subject was found."""

    __slots__ = ("_subjects", "name", "strangers")

    def __init__(self, name: bytes, subjects: Subjects) -> None:
        self.name = name
        self.strangers = False
        self._subjects = subjects

    def keep(self, numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which rows in memory have the subject, by the server's numbers of theirs."""
        # A name that no row in memory has may have no number, and may have got another one since it was asked for.
        own = self._subjects.find(self.name)
        found: NDArray[np.bool_] = numbers == np.uint32(own) if own is not None else np.zeros(len(numbers), np.bool_)
        self.strangers = self.strangers or not bool(found.all())
        return found

    def keep_named(self, names: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which filed rows have the subject."""
        found = np.array([name == self.name for name in names], np.bool_)
        self.strangers = self.strangers or not bool(found.all())
        return found


class Wanted:
    """Columns of rows, each sequence once. With a subject, a row of another one is not the wanted row."""

    __slots__ = ("_set", "deliver_at_ms", "due_ms", "hours", "of_subject", "sequences")

    def __init__(
        self,
        sequences: Sequences,
        deliver_at_ms: Int64s,
        hours: NDArray[np.uint32],
        of_subject: OfSubject | None = None,
    ) -> None:
        self.sequences = sequences  # Rising.
        self.deliver_at_ms = deliver_at_ms
        self.hours = hours  # Filing hours.
        self.due_ms = due_within(deliver_at_ms, hours)
        self.of_subject = of_subject
        self._set: SequenceSet | None = None  # To hold many rows against, in several arrays.

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, chosen: Indices) -> Wanted:
        """Some of the rows; ``chosen`` rises."""
        columns = (self.sequences.take(chosen), self.deliver_at_ms.take(chosen), self.hours.take(chosen))
        return Wanted(*columns, self.of_subject)

    def of_hour(self, hour: int) -> Indices:
        """Which rows are filed in one hour."""
        return np.flatnonzero(self.hours == np.uint32(hour))

    def are(self, sequences: Sequences) -> NDArray[np.bool_]:
        """Which sequences are those of wanted rows: bool[n], a new array."""
        if len(sequences) < TABLE_FROM_ROWS:
            return SequenceSet(self.sequences, len(sequences)).has(sequences)
        if self._set is None:
            self._set = SequenceSet(self.sequences, TABLE_ROWS_MIN)
        return self._set.has(sequences)

    def find(self, rows: Rows) -> tuple[Indices, Indices]:
        """Which of ``rows`` are wanted, and which wanted row each of these is."""
        if not len(rows) or not len(self):
            return NO_INDICES, NO_INDICES
        sequences = rows["sequence"]
        found = np.flatnonzero(SequenceSet(self.sequences, len(rows)).has(sequences))
        if not len(found):
            return NO_INDICES, NO_INDICES
        places = np.searchsorted(self.sequences, sequences.take(found))
        same = rows["due_ms"].take(found) == self.due_ms.take(places)
        same &= rows["hour"].take(found) == self.hours.take(places)
        return self.own(rows, found.compress(same), places.compress(same))

    def find_rising(self, rows: Rows) -> tuple[Indices, Indices]:
        """The same for rows that rise in sequence: many rows cost little when few are wanted."""
        if not len(rows) or not len(self):
            return NO_INDICES, NO_INDICES
        sequences = rows["sequence"].copy()  # A search in a column between others would copy it too.
        found, at = find(sequences, self.sequences)
        rows_found = rows.take(at)
        same = (rows_found["due_ms"] == self.due_ms.take(found)) & (rows_found["hour"] == self.hours.take(found))
        return self.own(rows, at.compress(same), found.compress(same))

    def own(self, rows: Rows, at: Indices, found: Indices) -> tuple[Indices, Indices]:
        """Keep those of the wanted subject, of rows that were found ``at`` places and are the wanted rows ``found``."""
        if self.of_subject is None or not len(at):
            return at, found
        kept = self.of_subject.keep(rows["subject"].take(at))
        return at.compress(kept), found.compress(kept)

    def places_of(self, sequences: Sequences) -> Indices:
        """Which wanted rows have one of these sequences, in any order."""
        found = sequences.compress(SequenceSet(self.sequences, len(sequences)).has(sequences))
        return np.searchsorted(self.sequences, found)


def wanted_of(asked: Asked) -> tuple[Wanted, Indices]:
    """The rows of a request, each once, and for each row of the request its place among them.

    Raises:
        BadRequest: the request names one sequence with different instants.
    """
    wanted, places, made_up = _gather(asked, np.zeros(len(asked.sequences), np.bool_))
    if made_up.any():
        raise BadRequest("it names one sequence with different instants", field="sequence")
    return wanted, places


def wanted_newest(asked: Asked, told: NDArray[np.bool_]) -> tuple[Wanted, Indices]:
    """The same for a request of which this server has followed some rows; ``told`` are those whose instants it has said
    itself.

    So two rows may come together at one sequence, with different instants:

        asked    row 1, due at 5 o'clock     row 2, due at 7 o'clock    a receipt that somebody has made up
        followed row 2, due at 6 o'clock     row 2, due at 7 o'clock    row 1 was moved, and row 2 took its place

    What this server has said is true, so the other row never was: it stands for NO_SEQUENCE, which no row has.
    """
    wanted, places, made_up = _gather(asked, told)
    if not made_up.any():
        return wanted, places
    real = ~made_up
    columns = (np.where(real, column, np.zeros(1, column.dtype)) for column in asked)
    wanted, places, _ = _gather(Asked._make(columns), told)
    return wanted, places


def _gather(asked: Asked, told: NDArray[np.bool_]) -> tuple[Wanted, Indices, NDArray[np.bool_]]:
    """The rows, the place of each row of the request, and which of these say something else than the row that was taken
    for their sequence: of rows that differ the first one that was ``told``, if there is one.
    """
    hours = filing_hours(asked.deliver_at_ms, asked.accepted_at_ms)
    order = np.lexsort((asked.deliver_at_ms, hours, ~told, asked.sequences))
    sequences, due, hours = asked.sequences.take(order), asked.deliver_at_ms.take(order), hours.take(order)
    firsts = np.concatenate((np.ones(1, np.bool_), sequences[1:] != sequences[:-1]))
    places = np.empty(len(order), np.intp)
    numbers = np.cumsum(firsts) - 1
    places[order] = numbers
    wanted = Wanted(sequences.compress(firsts), due.compress(firsts), hours.compress(firsts))
    made_up = np.empty(len(order), np.bool_)
    made_up[order] = (due != wanted.deliver_at_ms.take(numbers)) | (hours != wanted.hours.take(numbers))
    return wanted, places, made_up


SORT_FROM_ROWS = 65_536  # So many rows may be searched as they are, in some 200 us; more are sorted first.
RUN_ROWS_MAX = 262_144  # The worker sorts so many at a time, in some 20 ms.


class RowsAt(NamedTuple):
    """Wanted rows that stand in one array."""

    array: Rows
    rows: Indices
    wanted: Indices


@dataclass(slots=True, eq=False)  # Each is itself only: its arrays are not compared.
class SortedRows:
    """Rows of several arrays by rising sequence."""

    arrays: list[ReferenceType[Rows]]
    sequences: Sequences
    array_of: NDArray[np.int32]
    row_of: NDArray[np.int32]
    counts: list[int]  # Rows of each array.
    left: int  # Rows of arrays that are not gone.


class _Known(NamedTuple):
    """An array that was sorted."""

    array: ReferenceType[Rows]
    run: SortedRows
    number: int  # Among the arrays of the run.


class Outside:
    """Belongs to the loop; `sort_rows` may run beside it."""

    def __init__(self) -> None:
        self._runs: list[SortedRows] = []
        self._known: dict[int, _Known] = {}  # By id of an array.

    def unsorted(self, arrays: Sequence[Rows]) -> list[Rows]:
        """Arrays that should be sorted before rows are looked for; none while few rows would have to be searched."""
        self._forget_but(arrays)
        left = [rows for rows in arrays if id(rows) not in self._known]
        if sum(map(len, left)) < SORT_FROM_ROWS:
            return []
        # Short runs are sorted together with them, so that there are never many.
        short = [run for run in self._runs if run.left < RUN_ROWS_MAX // 2]
        again = [rows for run in short for each in run.arrays if (rows := each()) is not None and self._has(rows, run)]
        return left + again

    def take(self, runs: Sequence[SortedRows]) -> None:
        """Take what `sort_rows` has made of `unsorted` arrays."""
        for run in runs:
            self._runs.append(run)
            for number, each in enumerate(run.arrays):
                rows = each()
                if rows is None:
                    run.left -= run.counts[number]
                    continue
                self._drop(id(rows))
                self._known[id(rows)] = _Known(each, run, number)
        self._runs = [run for run in self._runs if run.left]

    def find(self, wanted: Wanted, arrays: Sequence[Rows]) -> Iterator[RowsAt]:
        """The wanted rows that stand in some arrays."""
        self._forget_but(arrays)
        for run in self._runs:
            yield from self._find_in(run, wanted)
        for rows in arrays:
            if id(rows) not in self._known:
                at, found = wanted.find(rows)
                if len(found):
                    yield RowsAt(rows, at, found)

    def _find_in(self, run: SortedRows, wanted: Wanted) -> Iterator[RowsAt]:
        # A row may stand in an array that is gone, and in one that has taken its place: then it stands here twice.
        for left, at in find_each(run.sequences, wanted.sequences):
            numbers = run.array_of.take(at)
            for number in np.unique(numbers).tolist():
                rows = run.arrays[number]()
                if rows is None or not self._has(rows, run):
                    continue
                own = np.flatnonzero(numbers == number)
                places, names = run.row_of.take(at.take(own)).astype(np.intp), left.take(own)
                found = rows.take(places)
                same = found["due_ms"] == wanted.due_ms.take(names)
                same &= found["hour"] == wanted.hours.take(names)
                if same.any():
                    yield RowsAt(rows, *wanted.own(rows, places.compress(same), names.compress(same)))

    def _has(self, rows: Rows, run: SortedRows) -> bool:
        known = self._known.get(id(rows))
        return known is not None and known.run is run and known.array() is rows

    def _forget_but(self, arrays: Sequence[Rows]) -> None:
        """Forget arrays that are gone, and runs of which most rows are."""
        if not self._runs:
            return
        here = {id(rows): rows for rows in arrays}
        gone = [key for key, known in self._known.items() if key not in here or known.array() is not here[key]]
        for key in gone:
            self._drop(key)
        for run in self._runs if gone else ():
            if 2 * run.left < len(run.sequences):
                for key in [key for key, known in self._known.items() if known.run is run]:
                    self._drop(key)
        self._runs = [run for run in self._runs if run.left]

    def _drop(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            known.run.left -= known.run.counts[known.number]


def sort_rows(arrays: Sequence[Rows]) -> list[SortedRows]:
    """Sort the rows of some arrays by their sequences, which nobody writes into; any thread may call it."""
    runs: list[SortedRows] = []
    some: list[Rows] = []
    for rows in arrays:
        if some and sum(map(len, some)) + len(rows) > RUN_ROWS_MAX:
            runs.append(_run(some))
            some = []
        some.append(rows)
    if some:
        runs.append(_run(some))
    return runs


def _run(arrays: Sequence[Rows]) -> SortedRows:
    sequences = np.concatenate([rows["sequence"] for rows in arrays])
    order = np.argsort(sequences, kind="stable")
    counts = [len(rows) for rows in arrays]
    array_of = np.repeat(np.arange(len(arrays), dtype=np.int32), counts)
    row_of = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return SortedRows(
        [ref(rows) for rows in arrays],
        sequences.take(order),
        array_of.take(order),
        row_of.take(order),
        counts,
        len(order),
    )
