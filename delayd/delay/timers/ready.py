"""Ready rows: the rows of an hour whose slots are open, handed out in due order.

Invariant: every run is sorted by due time, and rows are taken from its front only.

Opened slots come as sorted runs. Late rows arrive when their slot is open already; they wait unsorted until the next
take. They are merged into runs that double in size (a log-structured merge), so that one late row costs little however
many rows stand ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from delayd.batch.sequences import add_part
from delayd.delay.rows import NO_ROWS, Rows, join_rows
from delayd.hours import HOUR_MS

SPARSE_ROWS = 512  # So few rows are sorted at once however far apart they are due.
SORTED_ROWS_MIN = 5_000  # With this many rows or more it pays to check whether opened rows are in order already.
LATE_ARRAYS_MAX = 64  # Bounds the Python objects that late rows cost while nobody takes rows.
NEVER: Final = HOUR_MS  # No row of an hour is due this late after its start.


class ReadyRows:
    """Rows in due order: `add` late ones, `push` an opened slot, `take` what is due."""

    __slots__ = ("_count", "_late", "_late_runs", "_opened_runs", "first_due_ms")

    def __init__(self) -> None:
        self.first_due_ms = NEVER  # Smallest due_ms that stands ready.
        self._opened_runs: list[_Run] = []
        self._late_runs: list[_Run] = []
        self._late: list[Rows] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, rows: Rows, due_ms: npt.NDArray[np.int32]) -> None:
        """Take over the rows of opened slots, one at least, with their column ``due_ms`` as a contiguous array.

        Rows that are not in due order yet are copied into it when they are taken, a slice at a time.
        """
        if len(rows) >= SORTED_ROWS_MIN and bool((due_ms[1:] >= due_ms[:-1]).all()):
            run = _Run(rows, due_ms, None)
        else:
            since = due_ms - due_ms.min()
            # Many rows come of few slots, so that due times fit a u16, whose sort is a radix sort.
            if len(rows) > SPARSE_ROWS:
                assert int(since.max()) < 1 << 16, "slots opened at once span 65 s"
                since = since.astype(np.uint16)
            order = since.argsort(kind="stable")
            run = _Run(rows, due_ms.take(order), order)
        self._opened_runs.append(run)
        self._count += len(rows)
        self.first_due_ms = min(self.first_due_ms, run.first_due_ms())

    def add(self, rows: Rows, first_due_ms: int) -> None:
        """Copy in late rows in any order; the first of them is due at ``first_due_ms``."""
        self._late.append(join_rows([rows]))
        self._count += len(rows)
        self.first_due_ms = min(self.first_due_ms, first_due_ms)
        if len(self._late) == LATE_ARRAYS_MAX:
            self._merge_late()

    def take(self, due_ms_max: int, rows_max: int) -> Rows:
        """Hand out up to ``rows_max`` rows due at ``due_ms_max`` or before, in due order: views or new arrays."""
        if self.first_due_ms > due_ms_max or rows_max <= 0:
            return NO_ROWS
        if self._late:
            self._merge_late()
        runs = self._opened_runs + self._late_runs
        key = np.int32(due_ms_max)  # A plain int would make searchsorted copy the array to i64 first.
        # No run can give more than rows_max rows, so only that many of each are looked at.
        due = [(run, count) for run in runs if (count := run.count_due(key, rows_max))]
        rows = due[0][0].pop(due[0][1]) if len(due) == 1 else _take_across(due, rows_max)
        self._count -= len(rows)
        self._opened_runs = [run for run in self._opened_runs if len(run)]
        self._late_runs = [run for run in self._late_runs if len(run)]
        self.first_due_ms = min([run.first_due_ms() for run in runs if len(run)], default=NEVER)
        return rows

    def parts(self) -> list[Rows]:
        """View all rows that stand ready, array by array, in no particular order."""
        return [run.front(len(run)) for run in self._opened_runs + self._late_runs] + self._late

    def _merge_late(self) -> None:
        add_part(
            self._late_runs, _sorted_run(self._late), lambda runs: _sorted_run([run.front(len(run)) for run in runs])
        )
        self._late = []


@dataclass(slots=True)
class _Run:
    """Rows that ``order`` (None when they are in order) sorts by due time; ``at`` counts those handed out."""

    rows: Rows
    due_ms: npt.NDArray[np.int32]  # Sorted.
    order: npt.NDArray[np.int64] | None
    at: int = 0

    def __len__(self) -> int:
        return len(self.due_ms) - self.at

    def first_due_ms(self) -> int:
        return int(self.due_ms[self.at])

    def count_due(self, due_ms_max: np.int32, rows_max: int) -> int:
        return int(self.due_ms[self.at : self.at + rows_max].searchsorted(due_ms_max, "right"))

    def front(self, count: int) -> Rows:
        if self.order is None:
            return self.rows[self.at : self.at + count]
        return self.rows.take(self.order[self.at : self.at + count])

    def pop(self, count: int) -> Rows:
        rows = self.front(count)
        self.at += count
        return rows


def _sorted_run(parts: list[Rows]) -> _Run:
    rows = join_rows(parts) if len(parts) > 1 else parts[0]
    due_ms = np.ascontiguousarray(rows["due_ms"])
    order = due_ms.argsort(kind="stable")  # Timsort: merging two runs is linear.
    return _Run(rows.take(order), due_ms.take(order), None)


def _take_across(due: list[tuple[_Run, int]], rows_max: int) -> Rows:
    """Merge the due fronts of several runs and hand out the first ``rows_max`` of them."""
    rows = join_rows([run.front(count) for run, count in due])
    counts = [count for _, count in due]
    # A stable sort keeps each run's own order, so the rows that are taken from a run are its front.
    order = np.ascontiguousarray(rows["due_ms"]).argsort(kind="stable")[:rows_max]
    owners = np.repeat(np.arange(len(due)), counts).take(order)
    for (run, _), taken in zip(due, np.bincount(owners, minlength=len(due)).tolist(), strict=True):
        run.at += taken
    return rows.take(order)
