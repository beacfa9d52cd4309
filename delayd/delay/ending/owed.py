"""Owed outcomes: rows that a durable decision has ended, and whose outcomes are not all durable in D_h yet (rule C2).

Invariant: a checkpoint that passes a decision names each row of it, until all of its outcomes are durable.

A decision may end rows of thousands of hours, and each hour's file costs a sync of its own. So only some hours are
written at a time, the nearest first; then outcomes of dispatched rows are not held up.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delayd.batch import ROWS_MAX
from delayd.delay.books.outcomes import OutcomeLog
from delayd.delay.ending.wanted import NO_INDICES, Indices, Pile, Sequences, Wanted
from delayd.log.dispatch import NewPart, Outcome, Reason
from delayd.log.ended import NO_ENDED, EndedRows

HOURS_AT_ONCE = 32
LATELY = 16  # So many decisions are remembered once all of their outcomes are durable.
LATELY_ROWS_MAX = 4_096  # Larger ones are not.


@dataclass(slots=True, eq=False)  # Each is itself only: its arrays are not compared when one is removed.
class _Decision:
    """The rows of one commit, by rising sequence; ``left`` counts the parts whose outcomes are not durable."""

    rows: EndedRows
    sequences: Sequences
    left: int = 0


class Owed:
    """Decisions until all of their outcomes are durable; belongs to the loop."""

    def __init__(
        self, outcomes: OutcomeLog, on_ended: Callable[[NDArray[np.uint64]], None] = lambda sequences: None
    ) -> None:
        """``on_ended`` is called with the sequences of rows that a durable decision has ended."""
        self._on_ended = on_ended
        self._outcomes = outcomes
        self._decisions: list[_Decision] = []
        self._rows = 0
        # The sequences of all decisions, and of some whose outcomes are durable: most rows that are asked about are in
        # no decision.
        self._known = Pile()
        self._gone = 0  # How many of the latter there are.
        self._waiting: dict[int, list[tuple[_Decision, NewPart]]] = {}  # By hour, not recorded yet.
        self._hours: list[int] = []  # A heap of these hours.
        self._lately: deque[_Decision] = deque(maxlen=LATELY)
        self._writing: dict[int, int] = {}  # By hour: how many of its parts are being written.

    def __len__(self) -> int:
        return self._rows

    @property
    def idle(self) -> bool:
        """Whether each outcome is recorded."""
        return not self._waiting

    def take(self, rows: EndedRows) -> None:
        """Give rows, whose decision is durable, their outcomes; ``rows`` rise in sequence."""
        decision = _Decision(rows, rows["sequence"].copy())
        self._on_ended(decision.sequences)
        self._decisions.append(decision)
        self._rows += len(rows)
        self._known.add(decision.sequences)
        ordered = rows.take(np.lexsort((rows["reason"], rows["hour"])))
        cuts = [0, *(np.flatnonzero(~_continues(ordered)) + 1).tolist(), len(ordered)]
        for low, high in pairwise(cuts):
            for begin in range(low, high, ROWS_MAX):
                self._wait(decision, ordered[begin : min(high, begin + ROWS_MAX)])
        self._go_on()

    def find(self, wanted: Wanted) -> tuple[Indices, EndedRows]:
        """The wanted rows that are here, and what they were ended as."""
        if not self._known.has(wanted).any():
            return NO_INDICES, NO_ENDED
        return _find(wanted, self._decisions)

    def find_lately(self, wanted: Wanted) -> tuple[Indices, EndedRows]:
        """The same for rows that were here a moment ago: whoever looked them up then found no outcome in their file."""
        return _find(wanted, self._lately)

    def all(self) -> EndedRows:
        """The rows that a checkpoint names, by rising sequence; some of them may have their outcomes."""
        rows = np.concatenate([NO_ENDED, *(decision.rows for decision in self._decisions)])
        return rows.take(np.argsort(rows["sequence"], kind="stable"))

    def lowest_ms(self) -> int | None:
        """The earliest due instant of these rows."""
        return min((int(decision.rows["deliver_at_ms"].min()) for decision in self._decisions), default=None)

    def _forget(self, decision: _Decision) -> None:
        self._decisions.remove(decision)
        self._rows -= len(decision.rows)
        self._gone += len(decision.rows)
        if self._gone > self._rows:
            self._known, self._gone = Pile(), 0
            for each in self._decisions:
                self._known.add(each.sequences)

    def _wait(self, decision: _Decision, rows: EndedRows) -> None:
        first = rows[0]
        hour = int(first["hour"])
        part = NewPart(
            rows["sequence"].copy(),
            rows["deliver_at_ms"].copy(),
            Outcome.CANCELLED,
            claimed_at_ms=int(first["decided_at_ms"]),
            batch_id=int(first["other"]),
            target_appended_at_ms=int(first["other_at_ms"]),
            reason=int(first["reason"]),
        )
        decision.left += 1
        if hour not in self._waiting:
            self._waiting[hour] = []
            heapq.heappush(self._hours, hour)
        self._waiting[hour].append((decision, part))

    def _go_on(self) -> None:
        while self._hours and len(self._writing) < HOURS_AT_ONCE:
            hour = heapq.heappop(self._hours)
            parts = self._waiting.pop(hour)
            self._writing[hour] = self._writing.get(hour, 0) + len(parts)
            for decision, part in parts:
                self._outcomes.record(hour, part, partial(self._durable, hour, decision))

    def _durable(self, hour: int, decision: _Decision) -> None:
        decision.left -= 1
        if not decision.left:
            self._forget(decision)
            if len(decision.rows) <= LATELY_ROWS_MAX:
                self._lately.append(decision)
        self._writing[hour] -= 1
        if not self._writing[hour]:
            del self._writing[hour]
            self._go_on()


def _continues(rows: EndedRows) -> NDArray[np.bool_]:
    """Which rows, from the second one on, are in the part of the row before: the other row's number rises by one."""
    before, after = rows[:-1], rows[1:]
    same = np.ones(len(after), np.bool_)
    same &= (after["reason"] == Reason.CANCELLED) | (after["other"] == before["other"] + np.uint64(1))
    for name in ("hour", "reason", "decided_at_ms", "other_at_ms"):
        same &= after[name] == before[name]
    return same


def _find(wanted: Wanted, decisions: Iterable[_Decision]) -> tuple[Indices, EndedRows]:
    places, rows = [NO_INDICES], [NO_ENDED]
    first, last = wanted.sequences[0], wanted.sequences[-1]
    for decision in decisions:
        sequences = decision.sequences
        if sequences[-1] < first or sequences[0] > last:
            continue
        found = np.flatnonzero(wanted.among(sequences))
        if len(found):
            ended = decision.rows.take(np.searchsorted(sequences, wanted.sequences.take(found)))
            # A receipt that somebody has made up names no row.
            same = ended["deliver_at_ms"] == wanted.deliver_at_ms.take(found)
            same &= ended["hour"] == wanted.hours.take(found)
            places.append(found.compress(same))
            rows.append(ended.compress(same))
    return np.concatenate(places), np.concatenate(rows)
