"""One hour of the wheel: 7,200 slots of 500 ms, each gathered and sorted only when it opens.

Invariant: slots open in order; the rows of opened slots, and those due before the hour begins, stand in `ReadyRows`,
all others in runs or in the tail.

A run is an array of rows ordered by slot; within a slot only big slots are sorted. `prepare` makes one run of the rows
that an hour has on disk. Live rows go to a tail in the order they come, and a full tail becomes a run. After Varghese
and Lauck, "Hashed and Hierarchical Timing Wheels" (1987): the hours on disk are the upper level, a slot is the lower
one, and its sort the last step.

Ready rows are sorted runs, and rows are taken from the front of each. Late rows arrive when their slot is open already:
they wait unsorted until the next take, and are then merged into runs that double in size (a log-structured merge), so
that one late row costs little however many rows stand ready.

An example, in ms after the start of an hour. Rows due at 300, 100 and 7,000 are loaded:

1. `prepare` makes a run of them: slot 0 has 300 and 100, as they came, and slot 14 has 7,000.
2. At -50 slot 0 is opened, before its time: 100 and 300 stand ready, in this order.
3. At 200 the row due at 100 is taken. One that is due at 150 comes: its slot is open, so it is late, and waits
   unsorted. One that is due at 7,400 goes to the tail.
4. At 350 the late row is merged, and 150 and 300 are taken. Nothing happens until 6,950, when slot 14 is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from delayd.batch.columns import FEW_ROWS
from delayd.batch.sequences import SCHEDULE_BIT, Sequences, add_part
from delayd.delay.rows import COARSE_FROM_MS, NO_ROWS, Rows, copy_rows, decode_due, due_by, join_rows, new_rows
from delayd.hours import HOUR_MS, hour_start_ms

SLOT_MS = 500  # At most this much is sorted at once; rows still fire to the millisecond.
SLOTS = HOUR_MS // SLOT_MS
assert SLOTS * SLOT_MS == HOUR_MS, "slots fill the hour"
OPEN_AHEAD_MS = 50  # To open a slot of 1 M rows takes less time than this, so it never delays the slot's first row.
OPEN_SLOTS_MAX = (1 << 16) // SLOT_MS  # Due times within slots opened at once fit a u16, whose sort is a radix sort.
TAIL_ROWS = 65_536  # Rows in arrival order; ordering a full tail takes 2 to 3 ms.
# This many runs of at most a quarter tail each are merged into one: short delays would leave thousands of runs
# otherwise.
FOLD_RUNS = 4


_GONE = 0xFFFF  # Slot of a tail row that was taken out.
_NOT_IN_MESSAGE_LOG = 0xFFFF_FFFF_FFFF_FFFF
_SLOT_EDGES = np.arange(1, SLOTS + 2, dtype=np.uint16)  # 0 is left for rows due before the hour begins.


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows of one hour ordered by slot: slot s is ``rows[bounds[s]:bounds[s + 1]]``; rows that are due before the hour
    begins stand before slot 0.

    ``lowest_location[s]`` is the lowest location of the rows in slot s and after; message log locations compare lower
    than those of a schedule log.
    """

    rows: Rows
    bounds: npt.NDArray[np.int64]
    lowest_location: npt.NDArray[np.uint64]


def prepare(rows: Rows) -> PreparedRows:
    """Order the rows of one hour by slot: pure, and made of numpy calls that release the GIL."""
    due_ms = np.ascontiguousarray(rows["due_ms"])
    assert not len(due_ms) or int(due_ms.max()) < HOUR_MS, "a row is due before its filing hour ends"
    slots = (np.maximum(due_ms, np.int32(-1)) // np.int32(SLOT_MS) + np.int32(1)).astype(np.uint16)
    order = slots.argsort(kind="stable")  # A stable sort of a 16-bit key is a radix sort.
    bounds = slots.take(order).searchsorted(_SLOT_EDGES)
    for slot in np.flatnonzero(np.diff(bounds) >= SORTED_ROWS_MIN).tolist():
        # A big slot is sorted here: on the loop that would take long.
        members = order[bounds[slot] : bounds[slot + 1]]
        within = (due_ms.take(members) - np.int32(slot * SLOT_MS)).astype(np.uint16)
        order[bounds[slot] : bounds[slot + 1]] = members.take(within.argsort(kind="stable"))
    ordered = rows.take(order)
    lowest = np.full(SLOTS + 1, _NOT_IN_MESSAGE_LOG, np.uint64)
    filled = np.flatnonzero(bounds[:-1] != bounds[1:])
    if len(filled):
        lowest[filled] = np.minimum.reduceat(ordered["location"], bounds[filled])
    return PreparedRows(ordered, bounds, np.minimum.accumulate(lowest[::-1])[::-1])


class HourWheel:
    """Pending rows of one filing hour; every ``due_ms`` counts from the hour's start."""

    __slots__ = (
        "_alive",
        "_next_slot",
        "_opened",
        "_ready",
        "_runs",
        "_tail",
        "_tail_count",
        "_tail_slots",
        "start_ms",
    )

    def __init__(self, hour: int, tail_rows: int = TAIL_ROWS, *, all_open: bool = False) -> None:
        """With ``all_open`` its rows stand ready from the beginning: they are few, and mostly due already."""
        if all_open:
            tail_rows = 0
        self.start_ms = hour_start_ms(hour)
        self._ready = ReadyRows()
        self._runs: list[PreparedRows] = []
        self._tail = new_rows(tail_rows)
        self._tail_slots = np.empty(tail_rows, np.uint16)
        self._tail_count = 0  # Rows in the tail, including those that were taken out.
        self._alive = 0  # Rows in runs and tail that are not yet in ready.
        self._opened = SLOTS if all_open else 0  # First slot that is not open.
        self._next_slot = SLOTS  # First slot from there that holds a row; SLOTS when none does.

    def __len__(self) -> int:
        return self._alive + len(self._ready)

    @property
    def closed_from_ms(self) -> int:
        """Every row that came in and is due so long after the hour's start, or later, is still here."""
        return self._opened * SLOT_MS

    def attach(self, prepared: PreparedRows) -> None:
        """Take over prepared rows: rows of slots that are open become ready; for all others this costs nothing."""
        late = int(prepared.bounds[self._opened])
        if late:
            rows = prepared.rows[:late]
            self._ready.add(rows, int(rows["due_ms"].min()))
        if late < len(prepared.rows):
            self._runs.append(prepared)
            self._alive += len(prepared.rows) - late
            self._next_slot = min(self._next_slot, _slot_at(prepared, late))

    def insert(self, rows: Rows) -> None:
        """Copy in live rows, in any order and number."""
        if len(rows) == 1:  # The commonest case, in plain integers: a third of the time of the arrays below.
            due_ms = int(rows["due_ms"][0])
            slot = due_ms // SLOT_MS
            assert slot < SLOTS, "a row is due before its filing hour ends"
            if slot < self._opened:
                self._ready.add(rows, due_ms)
                return
            at = self._tail_count
            copy_rows(self._tail, at, rows)
            self._tail_slots[at] = slot
            self._tail_added(1, slot)
            return
        if not len(rows):
            return
        due = rows["due_ms"]
        if len(rows) <= FEW_ROWS:
            times = due.tolist()
            first_ms, last_ms = min(times), max(times)
        else:
            first_ms, last_ms = int(due.min()), int(due.max())
        assert last_ms < HOUR_MS, "a row is due before its filing hour ends"
        opened_ms = self._opened * SLOT_MS
        if first_ms < opened_ms:
            late = due < np.int32(opened_ms)
            self._ready.add(rows.take(np.flatnonzero(late)), first_ms)
            rows = rows.take(np.flatnonzero(~late))
            if not len(rows):
                return
            due = rows["due_ms"]
            first_ms = int(due.min())
        slots = (due // np.int32(SLOT_MS)).astype(np.uint16)
        start = 0
        while start < len(rows):
            at = self._tail_count
            count = min(len(rows) - start, len(self._tail) - at)
            copy_rows(self._tail, at, rows[start : start + count])
            self._tail_slots[at : at + count] = slots[start : start + count]
            self._tail_added(count, first_ms // SLOT_MS)
            start += count

    def take_due(self, now_ms: int, rows_max: int) -> Rows:
        """Hand out up to ``rows_max`` rows due at ``now_ms``, in due order, opening no more slots than that takes."""
        due_ms_max = min(now_ms - self.start_ms, HOUR_MS - 1)
        if due_ms_max < -COARSE_FROM_MS:
            due_ms_max = due_by(due_ms_max)
        parts: list[Rows] = []
        while True:
            rows = self._ready.take(due_ms_max, rows_max)
            if len(rows):
                parts.append(rows)
                rows_max -= len(rows)
            if rows_max <= 0 or self._next_slot * SLOT_MS > due_ms_max:
                break
            self._open_until(due_ms_max // SLOT_MS + 1)
        if not parts:
            return NO_ROWS
        return parts[0] if len(parts) == 1 else join_rows(parts)

    def open_ahead(self, now_ms: int) -> None:
        """Open the next slot when its time is near. While due rows wait it stays closed, because closed slots cost
        little.
        """
        ahead_ms = min(now_ms - self.start_ms + OPEN_AHEAD_MS, HOUR_MS - 1)
        if self._next_slot * SLOT_MS <= ahead_ms and self._ready.first_due_ms > now_ms - self.start_ms:
            self._open_until(ahead_ms // SLOT_MS + 1)

    def next_due_ms(self) -> int | None:
        """Instant at which a row is due or a slot is to be opened, whichever is first; it may have passed."""
        due_ms = self._ready.first_due_ms
        if self._next_slot < SLOTS:
            due_ms = min(due_ms, self._next_slot * SLOT_MS - OPEN_AHEAD_MS)
        if due_ms < -COARSE_FROM_MS:
            due_ms = decode_due(due_ms)
        return None if due_ms == NEVER else self.start_ms + due_ms

    def count_until(self, until_ms: int) -> int:
        """How many rows are due before an instant, to half a second: whole slots count, without a look at their
        rows.
        """
        slot = min(max(-(-(until_ms - self.start_ms) // SLOT_MS), 0), SLOTS)
        if slot <= self._opened:
            return len(self._ready) if slot else 0
        in_runs = sum([int(run.bounds[slot] - run.bounds[self._opened]) for run in self._runs])
        in_tail = int(np.count_nonzero(self._tail_slots[: self._tail_count] < np.uint16(slot)))
        return len(self._ready) + in_runs + in_tail

    def lowest_location(self) -> int | None:
        """Lowest location of any row held, exactly; None when no row refers to the message log."""
        locations = [int(run.lowest_location[self._opened]) for run in self._runs]
        parts = self._ready.parts()
        if self._tail_count:
            parts.append(self._tail.take(self._tail_alive()))
        locations += [int(rows["location"].min()) for rows in parts if len(rows)]
        lowest = min(locations, default=_NOT_IN_MESSAGE_LOG)
        return None if lowest >= SCHEDULE_BIT else lowest

    def rows(self) -> Rows:
        """Copy all rows held, in no particular order."""
        return join_rows(self.parts())

    def parts(self) -> list[Rows]:
        """View all rows held, in several arrays, which are not written into any more."""
        parts = self._ready.parts() + [run.rows[int(run.bounds[self._opened]) :] for run in self._runs]
        return [*parts, self._tail.take(self._tail_alive())]

    def find(self, due_ms: npt.NDArray[np.int32], wanted: Callable[[Sequences], npt.NDArray[np.bool_]]) -> list[Rows]:
        """Copy or view the rows of wanted sequences that are due at these instants, in several arrays; others may be
        among them. The instants count from the hour's start. Only the slots in which they lie are searched.
        """
        slots = np.unique(np.maximum(due_ms, np.int32(-1)) // np.int32(SLOT_MS))
        parts = self._ready.parts() if int(slots[0]) < self._opened else []
        slots = slots.compress(slots >= self._opened)
        if not len(slots):
            return parts
        for run in self._runs:
            starts, counts = run.bounds.take(slots), run.bounds.take(slots + 1) - run.bounds.take(slots)
            firsts = np.cumsum(counts) - counts
            places = np.repeat(starts - firsts, counts) + np.arange(int(counts.sum()))
            # A few rows of many are wanted, so the others are not copied.
            parts.append(run.rows.take(places.compress(wanted(run.rows["sequence"][places]))))
        if self._tail_count:
            is_slot = np.zeros(_GONE + 1, np.bool_)
            is_slot[slots] = True
            parts.append(self._tail.take(np.flatnonzero(is_slot.take(self._tail_slots[: self._tail_count]))))
        return parts

    def _tail_added(self, count: int, first_slot: int) -> None:
        self._tail_count += count
        self._alive += count
        if first_slot < self._next_slot:
            self._next_slot = first_slot
        if self._tail_count == len(self._tail):
            self._empty_tail()

    def _tail_alive(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._tail_slots[: self._tail_count] != np.uint16(_GONE))

    def _empty_tail(self) -> None:
        """Make room in a full tail: when half of its rows or more are gone move the others together, else order it into
        a run.
        """
        alive = self._tail_alive()
        rows = self._tail if len(alive) == len(self._tail) else self._tail.take(alive)
        if len(alive) <= len(self._tail) // 2:
            copy_rows(self._tail, 0, rows)
            self._tail_slots[: len(alive)] = self._tail_slots.take(alive)
            self._tail_count = len(alive)
            return
        self._tail_count = 0
        self._runs.append(prepare(rows))
        left_max = len(self._tail) // FOLD_RUNS
        small = [index for index, run in enumerate(self._runs) if self._left(run) <= left_max][:FOLD_RUNS]
        if len(small) == FOLD_RUNS:  # Only this many at once: together they make one tail at most.
            folded = [self._runs.pop(index) for index in reversed(small)]
            self._runs.append(prepare(join_rows([run.rows[int(run.bounds[self._opened]) :] for run in folded])))

    def _left(self, run: PreparedRows) -> int:
        return len(run.rows) - int(run.bounds[self._opened])

    def _open_until(self, end: int) -> None:
        """Open slots from the next one that holds rows up to slot ``end`` at most, few enough to be sorted at once."""
        first = self._next_slot
        if self._alive > SPARSE_ROWS:
            end = self._opening_end(first, min(end, first + OPEN_SLOTS_MAX))
        parts = [run.rows[int(run.bounds[first]) : int(run.bounds[end])] for run in self._runs]
        if self._tail_count:
            picked = np.flatnonzero(self._tail_slots[: self._tail_count] < np.uint16(end))
            parts.append(self._tail.take(picked))
            self._tail_slots[picked] = _GONE
        parts = [rows for rows in parts if len(rows)]
        rows = parts[0] if len(parts) == 1 else join_rows(parts)
        self._opened = end
        self._alive -= len(rows)
        self._runs = [run for run in self._runs if self._left(run)]
        self._next_slot = self._find_next_slot()
        self._ready.push(rows, np.ascontiguousarray(rows["due_ms"]))

    def _opening_end(self, first: int, end: int) -> int:
        """Shorten an opening to about a tail of rows, so that after a long silence the wheel catches up in short
        steps.
        """
        if end <= first + 1:
            return first + 1
        rows_before = np.zeros(end - first, np.int64)
        for run in self._runs:
            rows_before += run.bounds[first + 1 : end + 1]
            rows_before -= run.bounds[first]
        return first + 1 + int(rows_before[:-1].searchsorted(np.int64(len(self._tail))))

    def _find_next_slot(self) -> int:
        slots = [_slot_at(run, int(run.bounds[self._opened])) for run in self._runs]
        if self._tail_count:
            tail_slot = int(self._tail_slots[: self._tail_count].min())
            if tail_slot == _GONE:
                self._tail_count = 0
            else:
                slots.append(tail_slot)
        return min(slots, default=SLOTS)


def _slot_at(prepared: PreparedRows, position: int) -> int:
    return int(prepared.rows["due_ms"][position]) // SLOT_MS


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
