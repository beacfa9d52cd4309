"""Owed outcomes: rows that a durable decision has ended, and whose outcomes are not all durable in D_h yet (rule C2).

Invariant: a checkpoint that passes a decision names each row of it, until all of its outcomes are durable.

A decision may end rows of thousands of hours, and each hour's file costs a sync of its own. So only some hours are
written at a time, the nearest first; then outcomes of dispatched rows are not held up. What waits is left as it came:

     decision 1: hours 5 5 6 9      heap: (5, decision 1), (6, decision 2)     hour 5 is written, then
     decision 2: hours 6 7          heap: (6, decision 1), (6, decision 2)     hour 6 of both, and so on

A turn of the loop takes up a decision with a sort, and PARTS_AT_ONCE parts of it at most, however many hours it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import ROWS_MAX
from delayd.batch.sequences import NO_INDICES, Indices, Sequences, add_part, find_each
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.ledger.wanted import Wanted
from delayd.log.hour import ENDED, ENDED_BYTES, NO_ENDED, EndedRows, NewPart
from delayd.outcome import Outcome, Reason

HOURS_AT_ONCE = 8  # Each costs a sync. More of them would hold up outcomes of deliveries, and callers.
PARTS_AT_ONCE = 1_024  # Some 10 us each. A row that met another one is a part of its own.
_OPAQUE = np.dtype((np.void, ENDED_BYTES))
MERGED_ROWS_MAX = 131_072  # Arrays are merged up to this length, which takes some milliseconds.


@dataclass(slots=True, eq=False)  # Each is itself only: its arrays are not compared.
class _Decision:
    """Rows of one commit, by rising sequence."""

    rows: EndedRows
    order: NDArray[np.int32]  # The rows by hour and reason.
    begins: NDArray[np.int32]  # Where each part begins in this order, and where the last one ends.
    hours: NDArray[np.uint32]  # The hour of each part.
    to: int = 0  # The delay server that has them now, when they were drained.
    at: int = 0  # How many parts were given to the outcome log.
    left: int = 0  # Those of them that are not durable.

    @property
    def hour(self) -> int | None:
        """The nearest hour that was not given to the outcome log; None when all were."""
        return int(self.hours[self.at]) if self.at < len(self.hours) else None

    def parts(self, parts_max: int) -> list[EndedRows]:
        """Take the next parts of the nearest hour."""
        end = int(np.searchsorted(self.hours, self.hours[self.at], "right"))
        cuts = self.begins[self.at : min(end, self.at + parts_max) + 1].tolist()
        self.at += len(cuts) - 1
        return [self.rows.take(self.order[low:high]) for low, high in pairwise(cuts)]


@dataclass(slots=True, eq=False)
class Leaving:
    """Rows that go to another delay server as one batch, until that server has taken it (docs/drain.md).

    After a crash rows whose outcomes are durable are missing here; then the other server has the whole batch.
    """

    to: int  # The log_id of that server.
    number: int  # The number of the batch, drawn at random.
    rows: EndedRows  # By their places in the batch.


@dataclass(slots=True, eq=False)
class _Sorted:
    """Ended rows by rising sequence, as they are looked up."""

    rows: EndedRows  # Nobody writes into it: other threads may read it.
    sequences: Sequences = field(init=False)
    is_owed: NDArray[np.bool_] = field(init=False)
    owed: int = field(init=False)
    first: int = field(init=False)  # The lowest and the highest sequence.
    last: int = field(init=False)
    lowest_ms: int = field(init=False)
    earliest_ms: int = field(init=False)  # When the first of these decisions was made.

    def __post_init__(self) -> None:
        self.sequences = self.rows["sequence"].copy()
        self.is_owed, self.owed = np.ones(len(self.rows), np.bool_), len(self.rows)
        self.first, self.last = int(self.sequences[0]), int(self.sequences[-1])
        self.lowest_ms = int(self.rows["deliver_at_ms"].min())
        self.earliest_ms = int(self.rows["decided_at_ms"].min())

    def __len__(self) -> int:
        return self.owed

    def find(self, wanted: Wanted) -> tuple[Indices, Indices]:
        """Which wanted rows stand here, and where."""
        if int(wanted.sequences[-1]) < self.first or int(wanted.sequences[0]) > self.last:
            return NO_INDICES, NO_INDICES
        found, places = [NO_INDICES], [NO_INDICES]
        # A receipt that somebody has made up names no row. Rows of one sequence and different hours stand side by side.
        for own, at in find_each(self.sequences, wanted.sequences):
            rows = self.rows.take(at)
            same = rows["deliver_at_ms"] == wanted.deliver_at_ms.take(own)
            same &= rows["hour"] == wanted.hours.take(own)
            found.append(own.compress(same))
            places.append(at.compress(same))
        return np.concatenate(found), np.concatenate(places)


class Owed:
    """Decisions until all of their outcomes are durable; belongs to the loop."""

    def __init__(self, outcomes: OutcomeLog) -> None:
        # Called with the sequences of rows that a durable decision has ended.
        self.on_ended: Callable[[list[Sequences]], None] = lambda sequences: None
        self.on_leaving: Callable[[Leaving], None] = lambda leaving: None
        self._outcomes = outcomes
        self._rows = 0
        self._sorted: list[_Sorted] = []
        self._waiting: list[tuple[int, int, _Decision]] = []  # A heap of the nearest hours of decisions.
        self._numbers = count()
        self._writing: dict[int, int] = {}  # By hour: how many of its parts are being written.
        self._parts = 0  # All hours together.

    def __len__(self) -> int:
        return self._rows

    @property
    def idle(self) -> bool:
        """Whether each outcome is recorded."""
        return not self._waiting

    def take(self, rows: EndedRows) -> None:
        """Give rows, whose decision is durable, their outcomes; ``rows`` rise in sequence."""
        self.on_ended([rows["sequence"].copy()])
        leaves = rows["reason"] == Reason.DRAINED
        stays = rows.compress(~leaves) if leaves.any() else rows
        for first in range(0, len(stays), ROWS_MAX):
            part = stays[first : first + ROWS_MAX]
            self._keep(part)
            self._give(part)
        self._go_on()
        if len(stays) < len(rows):
            for leaving in _batches(rows.compress(leaves)):
                self._keep(_rising(leaving.rows))
                self.on_leaving(leaving)

    def arrived(self, leaving: Leaving, base_sequence: int, appended_at_ms: int) -> None:
        """Give the rows of a batch their outcomes: the other delay server has taken it durably."""
        rows = _rising(leaving.rows)
        rows["other"] = np.uint64(base_sequence) + rows["place"]
        rows["other_at_ms"] = appended_at_ms
        self._give(rows, leaving.to)
        self._go_on()

    def find(self, wanted: Wanted) -> tuple[Indices, EndedRows]:
        """The wanted rows that are here, and what they were ended as."""
        found, ended = [NO_INDICES], [NO_ENDED]
        for part in self._sorted:
            own, at = part.find(wanted)
            if not len(own):
                continue
            is_owed = part.is_owed.take(at)
            found.append(own.compress(is_owed))
            ended.append(part.rows.take(at.compress(is_owed)))
        return np.concatenate(found), np.concatenate(ended)

    def parts(self) -> list[EndedRows]:
        """View the rows that a checkpoint names, in several arrays, each by rising sequence; some of them may have
        their outcomes. Other threads may read them.
        """
        return [part.rows for part in self._sorted]

    def all(self) -> EndedRows:
        """The same rows in one array, by rising sequence: this takes a while when there are millions."""
        return in_one(self.parts())

    def lowest_ms(self) -> int | None:
        """No row is due earlier."""
        return min((part.lowest_ms for part in self._sorted), default=None)

    def earliest_ms(self) -> int | None:
        """No decision was made earlier: the message log must be kept from there on, for readers (docs/keys.md)."""
        return min((part.earliest_ms for part in self._sorted), default=None)

    def _keep(self, rows: EndedRows) -> None:
        """Know rows until their outcomes are durable."""
        self._rows += len(rows)
        add_part(self._sorted, _Sorted(rows), _still_owed, MERGED_ROWS_MAX)

    def _give(self, rows: EndedRows, to: int = 0) -> None:
        """Have outcomes of rows that are known written, as what stands in the rows says."""
        keys = rows["hour"].astype(np.uint64) << np.uint64(8) | rows["reason"]
        order = np.argsort(keys, kind="stable").astype(np.int32)
        ordered = rows.take(order)
        begins = np.concatenate(([0], np.flatnonzero(~_continues(ordered)) + 1)).astype(np.int32)
        hours = ordered["hour"].take(begins)
        self._wait(_Decision(rows, order, np.append(begins, np.int32(len(rows))), hours, to))

    def _wait(self, decision: _Decision) -> None:
        if decision.hour is not None:
            heapq.heappush(self._waiting, (decision.hour, next(self._numbers), decision))

    def _go_on(self) -> None:
        while self._waiting and self._parts < PARTS_AT_ONCE:
            hour = self._waiting[0][0]
            if len(self._writing) >= HOURS_AT_ONCE and hour not in self._writing:
                return
            decision = heapq.heappop(self._waiting)[2]
            parts = decision.parts(PARTS_AT_ONCE - self._parts)
            self._wait(decision)
            decision.left += len(parts)
            self._parts += len(parts)
            self._writing[hour] = self._writing.get(hour, 0) + len(parts)
            for rows in parts:
                self._outcomes.record(hour, _new_part(rows, decision.to), partial(self._durable, hour, decision))

    def _durable(self, hour: int, decision: _Decision) -> None:
        decision.left -= 1
        self._parts -= 1
        self._writing[hour] -= 1
        if not self._writing[hour]:
            del self._writing[hour]
        if not decision.left and decision.hour is None:
            self._forget(decision)
        if hour not in self._writing or not self._parts:
            self._go_on()

    def _forget(self, decision: _Decision) -> None:
        rows = decision.rows
        self._rows -= len(rows)
        gone = Wanted(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), rows["hour"].copy())
        kept: list[_Sorted] = []
        for part in self._sorted:
            _, at = part.find(gone)
            part.owed -= int(np.count_nonzero(part.is_owed.take(at)))
            part.is_owed[at] = False
            if part.owed:
                kept.append(part)
        self._sorted = kept


def _still_owed(parts: Iterable[_Sorted]) -> _Sorted:
    return _Sorted(in_one(part.rows.compress(part.is_owed) for part in parts))


def in_one(parts: Iterable[EndedRows]) -> EndedRows:
    """Rows that stand in several arrays as one array by rising sequence; any thread may call it."""
    some = [NO_ENDED, *parts]
    # Columns side by side are copied faster as bytes.
    rows = np.concatenate([part.view(_OPAQUE) for part in some]).view(ENDED)
    filled = [part for part in some if len(part)]
    if all(before["sequence"][-1] < after["sequence"][0] for before, after in pairwise(filled)):
        return rows
    return rows.take(np.argsort(rows["sequence"], kind="stable"))


def joined_bytes(parts: Iterable[EndedRows]) -> bytes:
    """The same as the value that a checkpoint keeps of them."""
    return in_one(parts).tobytes()


def _batches(rows: EndedRows) -> Iterator[Leaving]:
    """Rows that leave, batch by batch."""
    rows = rows.take(np.lexsort((rows["place"], rows["other_at_ms"])))
    numbers, begins = np.unique(rows["other_at_ms"], return_index=True)
    for number, own in zip(numbers.tolist(), np.split(rows, begins[1:]), strict=True):
        yield Leaving(int(own["other"][0]), number, own)


def _rising(rows: EndedRows) -> EndedRows:
    return rows.take(np.argsort(rows["sequence"], kind="stable"))


def _new_part(rows: EndedRows, to: int) -> NewPart:
    first = rows[0]
    return NewPart(
        rows["sequence"].copy(),
        rows["deliver_at_ms"].copy(),
        Outcome.CANCELLED,
        claimed_at_ms=int(first["decided_at_ms"]),
        target_log_id=to,
        batch_id=int(first["other"]),
        target_appended_at_ms=int(first["other_at_ms"]),
        reason=int(first["reason"]),
    )


def _continues(rows: EndedRows) -> NDArray[np.bool_]:
    """Which rows, from the second one on, are in the part of the row before: the other row's number rises by one."""
    before, after = rows[:-1], rows[1:]
    same = np.ones(len(after), np.bool_)
    same &= (after["reason"] == Reason.CANCELLED) | (after["other"] == before["other"] + np.uint64(1))
    for name in ("hour", "reason", "decided_at_ms", "other_at_ms"):
        same &= after[name] == before[name]
    return same
