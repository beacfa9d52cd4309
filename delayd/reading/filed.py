"""Filed: compares the accepted messages with the filed ones: the message log, as far as it is kept, with an hour's
schedule log (rule S5).

Invariant: pure. Sequences follow each other in the message log, so it has each sequence between the first that it keeps
and the next one to be given. If a schedule log holds such a row, and the message log does not have it in that hour, the
row was never accepted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.hours import hour_start_ms
from delayd.location import are_filed
from delayd.log.ended import NO_ENDED, EndedRows
from delayd.log.schedule import Skipped
from delayd.reading.columns import ScheduleRows
from delayd.reading.findings import FindingKind, Reason
from delayd.reading.join import Join

Numbers = NDArray[np.generic] | int


class FiledByLog(NamedTuple):
    """The facts about an hour's schedule log that the message log and the checkpoint have.

    ``rows`` are those of the hour below the replay offset, ``first`` the lowest sequence that the message log keeps (0:
    none), ``next_sequence`` the one that the checkpoint gives next; ``counted`` rows are in the schedule log by the
    checkpoint, ``dropped`` were given up by an operator. For an hour that is read in parts, ``before`` says how many
    rows of the schedule log were in the parts before this one; None: more parts follow. ``ended`` are the rows of the
    hour that decisions in the message log have ended.
    """

    rows: ScheduleRows
    first: int
    next_sequence: int
    counted: int
    dropped: int = 0
    skipped: Sequence[Skipped] = ()
    before: int | None = 0
    ended: EndedRows = NO_ENDED


class Noted(NamedTuple):
    """A finding for each of some rows of the schedule side."""

    kind: FindingKind
    reason: Reason
    rows: Int64s
    value: Numbers = 0
    other: Numbers = 0


def not_filed(schedule: ScheduleRows, accepted: FiledByLog) -> Int64s:
    """Rows of the message log that their hour's schedule log does not hold, as indices into ``accepted.rows``."""
    missing = np.flatnonzero(~Join(schedule.sequence, accepted.rows.sequence).known)
    # No more rows are missing than an operator gave up.
    return missing[:0] if len(missing) <= accepted.dropped else missing


def differences(hour: int, schedule: ScheduleRows, accepted: FiledByLog) -> Iterator[Noted]:
    """Where filed rows differ from the message log, or from their own file."""
    filed = are_filed(schedule.location)
    kind = FindingKind.MISMATCH
    due_from_ms = schedule.due_from_ms()
    begin_ms, end_ms = hour_start_ms(hour), hour_start_ms(hour + 1)
    elsewhere = filed & ((due_from_ms < begin_ms) | (due_from_ms >= end_ms))
    yield Noted(kind, Reason.OTHER_HOUR, np.flatnonzero(elsewhere))
    never = schedule.sequence >= np.uint64(accepted.next_sequence)
    for first, count in accepted.skipped:
        never |= (schedule.sequence >= np.uint64(first)) & (schedule.sequence < np.uint64(first + count))
    never &= filed
    yield Noted(FindingKind.ORPHAN, Reason.NEVER_GIVEN, np.flatnonzero(never))
    pairs = _Pairs(schedule, accepted.rows, filed)
    if accepted.first:
        elsewhere = filed & ~pairs.known & ~never & (schedule.sequence >= np.uint64(accepted.first))
        yield Noted(kind, Reason.FILED_ELSEWHERE, np.flatnonzero(elsewhere))
    yield from pairs.differences()


class _Pairs:
    """Filed rows with the message log's rows of the same sequences; ``known`` marks the filed rows that have one."""

    def __init__(self, schedule: ScheduleRows, accepted: ScheduleRows, filed: NDArray[np.bool_]) -> None:
        self._count = len(schedule)
        rows = None if filed.all() else np.flatnonzero(filed)
        join = Join(accepted.sequence, schedule.sequence if rows is None else schedule.sequence[rows])
        self.known = join.known
        if rows is not None:
            self.known = np.zeros(self._count, np.bool_)
            self.known[rows] = join.known
        # Mostly both logs have the same rows: then their columns are compared directly.
        self._rows: Int64s | None = None
        self._schedule, self._accepted = schedule, accepted
        if rows is not None or not join.same:
            self._rows = join.rows if rows is None else rows[join.rows]
            self._schedule, self._accepted = schedule.take(self._rows), accepted.take(join.scheduled)

    def differences(self) -> Iterator[Noted]:
        """Where the two rows of a pair differ."""
        filed, taken = self._schedule, self._accepted
        yield from self._noted(Reason.ACCEPTED_DUE, filed.deliver_at_ms, taken.deliver_at_ms)
        # A schedule log leaves the accept instant out of a row that was not past due when it was accepted.
        past_due = taken.appended_at_ms > taken.deliver_at_ms
        judged = (filed.appended_at_ms > 0) | past_due
        yield from self._noted(Reason.ACCEPTED_AT, filed.appended_at_ms, taken.appended_at_ms, judged)
        names, index = same_subjects(filed.subjects, taken.subjects)
        if len(names) > 1 or not np.array_equal(names, index):
            differs = np.flatnonzero(names[filed.subject] != index[taken.subject])
            yield Noted(FindingKind.MISMATCH, Reason.ACCEPTED_SUBJECT, self._places(differs))
        yield from self._noted(Reason.ACCEPTED_BODY, filed.body_bytes, taken.body_bytes)
        yield from self._noted(Reason.ACCEPTED_CONTENT, filed.hashes(), taken.hashes())
        if len(filed.expiring.sequence) or len(taken.expiring.sequence):
            yield from self._noted(Reason.ACCEPTED_EXPIRY, filed.expires_at_ms(), taken.expires_at_ms())

    def _places(self, pairs: Int64s) -> Int64s:
        return pairs if self._rows is None else self._rows[pairs]

    def _noted(
        self,
        reason: Reason,
        filed: NDArray[np.generic],
        taken: NDArray[np.generic],
        judged: NDArray[np.bool_] | None = None,
    ) -> Iterator[Noted]:
        """The pairs whose two columns differ; with ``judged`` only pairs that it marks."""
        differs = filed != taken
        pairs = np.flatnonzero(differs if judged is None else differs & judged)
        if len(pairs):
            rows = self._places(pairs)
            said, own = _spread(self._count, rows, taken[pairs]), _spread(self._count, rows, filed[pairs])
            yield Noted(FindingKind.MISMATCH, reason, rows, said, own)


def same_subjects(first: Sequence[str], second: Sequence[str]) -> tuple[Int64s, Int64s]:
    """Numbers for two lists of subjects: equal where the names are."""
    numbers: dict[str, int] = {}
    both = [[numbers.setdefault(name, len(numbers)) for name in names] or [0] for names in (first, second)]
    return np.array(both[0], np.int64), np.array(both[1], np.int64)


def _spread(count: int, rows: Int64s, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Values of some rows as a column of all rows."""
    column = np.zeros(count, values.dtype)
    column[rows] = values
    return column
