"""The books of the messages with keys: what schedule and dispatch logs say, row by row, beside the ledger.

Invariant: each row of the subject belongs to one message of the ledger, and each message ends as its answers said.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from delayd import SendVerdict
from delayd.errors import DamagedData
from delayd.machine.disk import RealDisk
from delayd.outcome import Outcome, Reason
from delayd.reading.data import schedules

from .torture_keys import Keyed, KeyLedger, State
from .torture_ledger import Ledger, Name

PENDING = "pending"
DISPATCHED = "dispatched"
ENDED = {
    State.LEFT: DISPATCHED,
    State.CANCELLED: "cancelled",
    State.REPLACED: "replaced",
    State.OPEN: PENDING,
}
MET = {SendVerdict.REJECTED: "rejected", SendVerdict.KEPT: "kept", SendVerdict.IN_FLIGHT: "in_flight"}


class Row(NamedTuple):
    """One row of a schedule log, and what the dispatch log says of it."""

    due_ms: int
    ended: str
    other: int  # The row that took its place, or that it met.


@dataclass
class KeyBooks:
    """What the files say of the subject whose messages have keys."""

    rows: dict[int, Row]
    by_end: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.by_end = Counter(row.ended for row in self.rows.values())

    @property
    def cancelled(self) -> int:
        """Rows whose outcome is CANCELLED, for whatever reason."""
        return sum(count for end, count in self.by_end.items() if end not in (PENDING, DISPATCHED))

    @property
    def line(self) -> str:
        """One line for people."""
        ends = " + ".join(f"{end} {self.by_end[end]}" for end in (DISPATCHED, *map(_name, Reason), PENDING))
        return f"with keys: rows {len(self.rows)} = {ends}"


def read_key_books(data: Path, subject: str) -> KeyBooks:
    """Read all rows of the subject, of one delay server."""
    damage: list[DamagedData] = []
    (schedule,) = schedules(RealDisk(), str(data), damage)
    assert not damage, damage
    due: dict[int, int] = {}
    ends: dict[int, tuple[str, int]] = {}
    for hour in schedule.hours():
        read = schedule.read(hour)
        if subject in read.rows.subjects:
            mine = read.rows.subject == read.rows.subjects.index(subject)
            due |= zip(read.rows.sequence[mine].tolist(), read.rows.deliver_at_ms[mine].tolist(), strict=True)
        outcomes = read.outcomes
        parts = outcomes.parts.take(outcomes.part_of)
        others = outcomes.others(np.arange(len(outcomes.sequences)))
        columns = (outcomes.sequences, parts["outcome"], parts["reason"], others)
        for sequence, outcome, reason, other in zip(*(column.tolist() for column in columns), strict=True):
            ends[sequence] = (_end(outcome, reason), other)
    nothing = (PENDING, 0)
    return KeyBooks({sequence: Row(at, *ends.get(sequence, nothing)) for sequence, at in due.items()})


def check_keys(books: KeyBooks, keys: KeyLedger, ledger: Ledger, found: Mapping[int, Name], *, stopped: bool) -> None:
    """Compare each message's rows with what is known of it; faults go into the ledger."""
    seen: set[int] = set()
    unnamed: Counter[str] = Counter()
    for number in keys.numbers:
        keyed = keys.of(number)
        if keyed.first is not None:
            _check(number, keyed, books, ledger, found, seen, stopped)
        elif keyed.state is State.MET:
            unnamed[MET[keyed.verdict]] += 1
    left = Counter(row.ended for sequence, row in books.rows.items() if sequence not in seen)
    if stopped and left != unnamed:
        ledger.broken(f"rows that no receipt names: {dict(left)}; answers say {dict(unnamed)}")


def _check(
    number: int,
    keyed: Keyed,
    books: KeyBooks,
    ledger: Ledger,
    found: Mapping[int, Name],
    seen: set[int],
    stopped: bool,
) -> None:
    assert keyed.first is not None
    log_id, sequence = keyed.first.name
    row = books.rows.get(sequence)
    while row is not None and row.ended == "moved" and sequence not in seen:
        seen.add(sequence)
        sequence = row.other
        row = books.rows.get(sequence)
    told = f"key {keyed.key}, {keyed.state.value}, {ledger.tell(number)}"
    if row is None or sequence in seen:
        ledger.broken(f"no schedule log has row {sequence}, or two messages have it: {told}")
        return
    seen.add(sequence)
    wanted = {MET[keyed.verdict]} if keyed.state is State.MET else {ENDED[keyed.state]}
    if keyed.state is State.OPEN:
        # It may have left since, or ended by a request that got no answer.
        wanted |= {DISPATCHED, "cancelled"} if keyed.cancel_asked else {DISPATCHED}
    if not stopped:
        wanted.add(PENDING)  # An outcome is written a while after the decision.
    if row.ended not in wanted:
        ledger.broken(f"row {sequence} is {row.ended} by the dispatch log: {told}")
    if keyed.state is not State.MET and row.ended in (PENDING, DISPATCHED) and row.due_ms not in keyed.instants:
        ledger.broken(f"row {sequence} is due at {row.due_ms}: {told}")
    if row.ended == DISPATCHED and found.get(number, (log_id, sequence)) != (log_id, sequence):
        ledger.broken(f"row {sequence} is dispatched, and the realtime log has {found[number]}: {told}")
    if stopped and (row.ended == DISPATCHED) != (number in found):
        ledger.broken(f"row {sequence} is {row.ended}, in the realtime log: {number in found}: {told}")


def _end(outcome: int, reason: int) -> str:
    return _name(Reason(reason)) if outcome == Outcome.CANCELLED else Outcome(outcome).name.lower()


def _name(reason: Reason) -> str:
    return reason.name.lower()
