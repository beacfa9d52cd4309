"""A ledger without a server around it, for tests of its gates and its notes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from delayd.batch.sequences import Sequences
from delayd.delay.filing.hour_table import HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.ledger.owed import Owed
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.rows import Rows, due_within, new_rows
from delayd.delay.subjects import Subjects
from delayd.delay.timers.loading import Hours
from delayd.delay.timers.wheel import Wheel

HOUR = 500_000


class Handoff:
    """Keeps what it is told to drop; no row has left the wheel."""

    def __init__(self) -> None:
        self.dropped: list[Sequences] = []

    def drop(self, ended: Sequences) -> None:
        """Note which rows are dropped."""
        self.dropped.append(ended)


class Unowed(Owed):
    """Owes nothing."""

    def __init__(self) -> None:
        pass

    def take(self, rows: Any) -> None:
        """These tests write no outcomes."""


def rows_of(*sequences: int, hour: int = HOUR) -> Rows:
    """Rows of one hour, due 5 ms after it begins."""
    rows = new_rows(len(sequences))
    rows["sequence"], rows["hour"], rows["due_ms"] = sequences, hour, 5
    return rows


def array(*sequences: int) -> Sequences:
    """Sequences."""
    return np.array(sequences, np.uint64)


def of(*sequences: int, hour: int = HOUR) -> Wanted:
    """The same rows as a question names them."""
    hours = np.full(len(sequences), hour, np.uint32)
    due_at_ms = hours.astype(np.int64) * 3_600_000 + 5
    assert (due_within(due_at_ms, hours) == 5).all()
    return Wanted(array(*sequences), due_at_ms, hours)


def bare_ledger(decided: dict[int, Sequences], loaded: range = range(HOUR, HOUR + 2)) -> tuple[Ledger, Handoff]:
    """A ledger that a start has made: the dispatch logs of some hours name some rows."""
    parts = (HourTable(), HourTable(), PendingRows(), Wheel(), Subjects())
    hours = Hours(*parts, set(), loaded)
    nothing = cast(Any, None)
    ledger, handoff = Ledger(hours, decided, nothing, nothing, nothing), Handoff()
    ledger.owed, ledger.handoff = Unowed(), cast(Any, handoff)
    return ledger, handoff
