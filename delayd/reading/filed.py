"""What was accepted against what is filed: the message log, as far as it is kept, and an hour's schedule log (rule S5).

Invariant: pure. Sequences follow each other in the message log, so each one between the first that it keeps and the
next that is given is in it: a schedule log that holds such a row, and not in its hour, holds what was not accepted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.location import are_filed
from delayd.log.schedule import Skipped
from delayd.reading.columns import ScheduleRows
from delayd.reading.findings import FindingKind, Reason
from delayd.reading.join import Join

Numbers = NDArray[np.generic] | int


class Accepted(NamedTuple):
    """What the message log and the checkpoint say of an hour's schedule log.

    ``rows`` are those of the hour below the replay offset, ``first`` the lowest sequence that the message log keeps (0:
    none), ``next_sequence`` the one that the checkpoint gives next; ``counted`` rows are in the schedule log by the
    checkpoint, ``dropped`` were given up by an operator. Of an hour that is read in parts ``before`` rows of the
    schedule log stood in the parts before this one; None: more parts follow.
    """

    rows: ScheduleRows
    first: int
    next_sequence: int
    counted: int
    dropped: int = 0
    skipped: Sequence[Skipped] = ()
    before: int | None = 0


class Noted(NamedTuple):
    """A finding for each of some rows of the schedule side."""

    kind: FindingKind
    reason: Reason
    rows: Int64s
    value: Numbers = 0
    other: Numbers = 0


def not_filed(schedule: ScheduleRows, accepted: Accepted) -> Int64s:
    """Rows of the message log that their hour's schedule log does not hold, as indices into ``accepted.rows``."""
    missing = np.flatnonzero(~Join(schedule.sequence, accepted.rows.sequence).known)
    # An operator's word gave up as many.
    return missing[:0] if len(missing) <= accepted.dropped else missing


def differences(hour: int, schedule: ScheduleRows, accepted: Accepted) -> Iterator[Noted]:
    """What filed rows say otherwise than the message log, or than their own file."""
    filed: Int64s = np.flatnonzero(are_filed(schedule.location))
    kind = FindingKind.MISMATCH
    hours = schedule.hours()[filed]
    yield Noted(kind, Reason.OTHER_HOUR, filed[hours != hour])
    sequence = schedule.sequence[filed]
    never = sequence >= np.uint64(accepted.next_sequence)
    for first, count in accepted.skipped:
        never |= (sequence >= np.uint64(first)) & (sequence < np.uint64(first + count))
    yield Noted(FindingKind.ORPHAN, Reason.NEVER_GIVEN, filed[never])
    rows = accepted.rows
    join = Join(rows.sequence, sequence)
    if accepted.first:
        elsewhere = ~join.known & ~never & (sequence >= np.uint64(accepted.first))
        yield Noted(kind, Reason.FILED_ELSEWHERE, filed[elsewhere])
    both, own = filed[join.rows], join.scheduled
    differs = np.flatnonzero(schedule.deliver_at_ms[both] != rows.deliver_at_ms[own])
    said = _spread(len(schedule), both[differs], rows.deliver_at_ms[own[differs]])
    yield Noted(kind, Reason.ACCEPTED_DUE, both[differs], said, schedule.deliver_at_ms)
    # Where nothing says when it was accepted, it was not past due then.
    past_due = rows.appended_at_ms[own] > rows.deliver_at_ms[own]
    known = schedule.appended_at_ms[both]
    differs = np.flatnonzero(((known > 0) | past_due) & (known != rows.appended_at_ms[own]))
    said = _spread(len(schedule), both[differs], rows.appended_at_ms[own[differs]])
    yield Noted(kind, Reason.ACCEPTED_AT, both[differs], said, schedule.appended_at_ms)
    names, index = same_subjects(schedule.subjects, rows.subjects)
    differs = np.flatnonzero(names[schedule.subject[both]] != index[rows.subject[own]])
    yield Noted(kind, Reason.ACCEPTED_SUBJECT, both[differs])
    differs = np.flatnonzero(schedule.body_bytes[both] != rows.body_bytes[own])
    said = _spread(len(schedule), both[differs], rows.body_bytes[own[differs]])
    yield Noted(kind, Reason.ACCEPTED_BODY, both[differs], said, schedule.body_bytes)
    hashes = schedule.hashes()
    differs = hashes[both] != rows.hashes()[own]
    said = _spread(len(schedule), both, rows.hashes()[own])
    yield Noted(kind, Reason.ACCEPTED_CONTENT, both[differs], said, hashes)


def same_subjects(first: Sequence[str], second: Sequence[str]) -> tuple[Int64s, Int64s]:
    """Numbers for two lists of subjects: equal where the names are."""
    numbers: dict[str, int] = {}
    both = [[numbers.setdefault(name, len(numbers)) for name in names] or [0] for names in (first, second)]
    return np.array(both[0], np.int64), np.array(both[1], np.int64)


def _spread(count: int, rows: Int64s, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Values of some rows as a column of all."""
    column = np.zeros(count, values.dtype)
    column[rows] = values
    return column
