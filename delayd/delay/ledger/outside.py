"""Outside: finds rows by their sequences among those that have left the wheel and are not decided.

While a target is away, millions of rows may wait for it, in the order in which they fell due. A search through all of
them for each request would hold the loop. So when many are not sorted, they are sorted once, beside the loop; what is
left is searched as it is.

     arrays  a (3 rows)  b (2 rows)  c (1 row)       run: sequences 4 5 7 8 9      and c as it is
             9 4 7       5 8         6                    array     a b a b a
                                                          row       1 0 2 1 0

Invariant: what is found stands in an array that the caller has named. A run may name arrays that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from delayd.batch.sequences import Indices, Sequences, find_each
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.rows import Rows

SORT_FROM_ROWS = 65_536  # So many rows may be searched as they are, in some 200 us; more are sorted first.
RUN_ROWS_MAX = 262_144  # The worker sorts so many at a time, in some 20 ms.


class Found(NamedTuple):
    """Wanted rows that stand in one array."""

    array: Rows
    rows: Indices
    wanted: Indices


@dataclass(slots=True, eq=False)  # Each is itself only: its arrays are not compared.
class Run:
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
    run: Run
    number: int  # Among the arrays of the run.


class Outside:
    """Belongs to the loop; `sort_rows` may run beside it."""

    def __init__(self) -> None:
        self._runs: list[Run] = []
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

    def take(self, runs: Sequence[Run]) -> None:
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

    def find(self, wanted: Wanted, arrays: Sequence[Rows]) -> Iterator[Found]:
        """The wanted rows that stand in some arrays."""
        self._forget_but(arrays)
        for run in self._runs:
            yield from self._find_in(run, wanted)
        for rows in arrays:
            if id(rows) not in self._known:
                at, found = wanted.find(rows)
                if len(found):
                    yield Found(rows, at, found)

    def _find_in(self, run: Run, wanted: Wanted) -> Iterator[Found]:
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
                    yield Found(rows, *wanted.own(rows, places.compress(same), names.compress(same)))

    def _has(self, rows: Rows, run: Run) -> bool:
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


def sort_rows(arrays: Sequence[Rows]) -> list[Run]:
    """Sort the rows of some arrays by their sequences, which nobody writes into; any thread may call it."""
    runs: list[Run] = []
    some: list[Rows] = []
    for rows in arrays:
        if some and sum(map(len, some)) + len(rows) > RUN_ROWS_MAX:
            runs.append(_run(some))
            some = []
        some.append(rows)
    if some:
        runs.append(_run(some))
    return runs


def _run(arrays: Sequence[Rows]) -> Run:
    sequences = np.concatenate([rows["sequence"] for rows in arrays])
    order = np.argsort(sequences, kind="stable")
    counts = [len(rows) for rows in arrays]
    array_of = np.repeat(np.arange(len(arrays), dtype=np.int32), counts)
    row_of = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return Run(
        [ref(rows) for rows in arrays],
        sequences.take(order),
        array_of.take(order),
        row_of.take(order),
        counts,
        len(order),
    )
