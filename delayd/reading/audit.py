"""Audit: compares, for one hour, the scheduled messages with what became of them: the schedule side with the dispatch
log, the targets' logs and the message log.

Invariant: pure. Arrays in, figures and findings out, so that a command, Spark and tests give the same answer. Each
scheduled row is in exactly one class, and the classes add up to ``scheduled``. Tables name a row's class by the same
masks, so a figure and a row never contradict each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.batch.content import NOT_STATED
from delayd.batch.labels import DEAD_KEPT_MS
from delayd.batch.names import RETRY_PREFIX
from delayd.batch.sequences import are_filed
from delayd.hours import hour_start_ms
from delayd.log.hour import NO_ENDED, EndedRows, OutcomeRows, Skipped
from delayd.machine.histogram import count_values
from delayd.outcome import LIVE_ON, Outcome, Proof, Reason
from delayd.reading.explanations import Explanation, explain
from delayd.reading.files.directory import Role
from delayd.reading.files.origins import take_outcomes
from delayd.reading.files.row_arrays import Fields, Join, JoinedFields, ScheduleRows, Sparse, TargetRows, UInt64s
from delayd.reading.findings import (
    FINDING,
    KINDS,
    Cause,
    FindingKind,
    Findings,
    HourSummary,
    ServerRows,
    join_findings,
    join_parts,
)
from delayd.reading.subject_figures import FIGURES, PARTS, SubjectFigures

Mask = NDArray[np.bool_]
Numbers = NDArray[np.generic] | int

LATE_MS_LIMIT = 1_000  # Well above the 30 ms that a busy server takes, well below what a user would call late.
# A column of this many rows is half a MiB; a column of a whole hour would need new memory for each step.
PIECE_ROWS = 65_536
ROWS_A_NAME = 8  # Some work for each subject name is done in each piece, so a piece has this many rows for each name.
WISHED = tuple(outcome for outcome in Outcome if outcome.proof is not Proof.NONE)
# A restart of either side and its recovery takes up to this long; until then a due row may still be in flight.
LOST_GRACE_MS = 10_000
NAMING = tuple(reason for reason in Reason if reason not in (Reason.CANCELLED, Reason.DRAINED))
DECIDED = tuple(outcome for outcome in Outcome if outcome is not Outcome.DISPATCHED)
COUNTED = ("pending", "undecided", "waiting", "missing", "unproven", *PARTS)  # Masks that are figures.
STATES = ("UNDECIDED", "PENDING", "WAITING", "LOST", "DELIVERED", "UNPROVEN", *(outcome.name for outcome in DECIDED))
"""The names of the classes; DELIVERED and UNPROVEN together are what the audit counts as dispatched."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time during which no server held up due messages; the grace counts within it."""

    since_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class Spans:
    """The span of each subject: one for all, and those that differ."""

    common: Span
    of_subject: Mapping[str, Span] = field(default_factory=dict)

    def bounds(self, subjects: Sequence[str], index: NDArray[np.uint32]) -> tuple[NDArray[np.int64], ...]:
        """``since_ms`` and ``until_ms`` for each row; ``index`` is its place in ``subjects``."""
        if not self.of_subject:
            return np.full(len(index), self.common.since_ms), np.full(len(index), self.common.until_ms)
        spans = [self.of_subject.get(subject, self.common) for subject in subjects]
        since = np.array([span.since_ms for span in spans], np.int64)
        until = np.array([span.until_ms for span in spans], np.int64)
        return since[index], until[index]


NO_SPANS = Spans(Span(0, 0))


@dataclass(frozen=True, slots=True)
class AuditTerms:
    """The terms by which the audit judges.

    ``now_ms``: when the books are read; rows due later are pending. ``spans``: when all servers that a row needs were
    up together. A row that was due for longer than the grace within its span, without an outcome, is lost.
    ``explanations``: what may have kept late messages.
    """

    now_ms: int
    spans: Spans = NO_SPANS
    late_ms_limit: int = LATE_MS_LIMIT
    lost_grace_ms: int = LOST_GRACE_MS
    explanations: tuple[Explanation, ...] = ()


NO_OTHERS = Sparse(np.empty(0, np.uint64), np.empty(0, np.uint64))


class FiledByLog(NamedTuple):
    """The facts about an hour's schedule log that the message log and the checkpoint have (rule S5).

    Sequences follow each other in the message log, so it has each sequence between the first that it keeps and the next
    one to be given. A filed row that it does not have in that hour was never accepted.

    ``rows`` are those of the hour below the replay offset, ``first`` the lowest sequence that the message log keeps (0:
    none), ``next_sequence`` the one that the checkpoint gives next; ``counted`` rows are in the schedule log by the
    checkpoint, ``dropped`` were given up by an operator. For an hour that is read in parts, ``before`` says how many
    rows of the schedule log were in the parts before this one; None: more parts follow. ``ended`` are the rows of the
    hour that decisions in the message log have ended, and ``others`` the rows that outcomes name beside theirs.
    """

    rows: ScheduleRows
    first: int
    next_sequence: int
    counted: int
    dropped: int = 0
    skipped: Sequence[Skipped] = ()
    before: int | None = 0
    ended: EndedRows = NO_ENDED
    others: Sparse = NO_OTHERS


class _Piece(NamedTuple):
    """The rows of each log within a range of sequences, by rising sequence."""

    schedule: ScheduleRows
    dispatch: OutcomeRows
    realtime: TargetRows
    accepted: FiledByLog | None
    parts: Fields  # The outcomes' parts and the realtime rows' batches, as fields; pieces share them where they can.
    batches: Fields


def audit_hour(
    origin_log_id: int,
    hour: int,
    schedule: ScheduleRows,
    dispatch: OutcomeRows,
    realtime: TargetRows,
    terms: AuditTerms,
    accepted: FiledByLog | None = None,
) -> tuple[Findings, HourSummary]:
    """Compare the three logs of an hour of one delay server, with all rows by rising sequence: findings, and figures.

    ``accepted`` is what the message log and the checkpoint say of the schedule log; None when nobody knows.
    """
    found: list[tuple[Findings, HourSummary]] = []
    for piece in _cut(_Piece(schedule, dispatch, realtime, accepted, Fields(dispatch.parts), Fields(realtime.batches))):
        books = _Comparison(hour, piece, terms)
        books.find()
        table = np.concatenate(books.found) if books.found else np.empty(0, FINDING)
        if len(books.found) > 1:
            table = table[np.lexsort((table["cause"], table["kind"], table["sequence"]))]
        subjects = (*schedule.subjects, *realtime.subjects, "", *(accepted.rows.subjects if accepted else ()))
        findings = Findings(origin_log_id, hour, table, subjects, terms.explanations)
        found.append((findings, books.summary(findings)))
    return join_findings([each for each, _ in found]), join_parts([each for _, each in found])


def _cut(whole: _Piece) -> Iterator[_Piece]:
    """Cut an hour, or a part of one, so small that the arrays of a piece stay in a processor's cache.

    Each row of each log is in exactly one piece, and rows of one sequence are in the same; so the findings of the
    pieces together are the findings of the hour. Only the last piece has the part's ``accepted.before``.
    """
    schedule, dispatch, realtime, accepted = whole[:4]
    # The rows that operators gave up are compared with a number for the whole hour, so that hour is not cut.
    if accepted is None or accepted.dropped:
        yield whole
        return
    names = len(schedule.subjects) + len(realtime.subjects) + len(accepted.rows.subjects)
    rows_max = max(PIECE_ROWS, ROWS_A_NAME * names)
    if len(schedule) <= rows_max:
        yield whole
        return
    bounds = np.unique(schedule.sequence[rows_max::rows_max])
    left_out = np.sort(schedule.left_out)
    of_log = accepted.rows.sequence, accepted.ended["sequence"]
    columns = schedule.sequence, dispatch.sequences, realtime.sequence, *of_log, left_out
    places = [[0, *np.searchsorted(column, bounds).tolist(), len(column)] for column in columns]
    before = accepted.before
    for number in range(len(bounds) + 1):
        filed, decided, stored, taken, over, bare = (slice(at[number], at[number + 1]) for at in places)
        rows = schedule.take(filed)
        said = accepted._replace(rows=accepted.rows.take(taken), ended=accepted.ended[over])
        own, held = take_outcomes(dispatch, decided), realtime.take(stored)
        yield _Piece(
            replace(rows, left_out=left_out[bare]),
            own,
            held,
            said._replace(before=before if number == len(bounds) else None),
            whole.parts if own.parts is dispatch.parts else Fields(own.parts),
            whole.batches if held.batches is realtime.batches else Fields(held.batches),
        )
        before = None if before is None else before + rows.filed_count()


def _picked(values: NDArray[Any], mask: Mask) -> NDArray[Any]:
    return values if mask.all() else values[mask]


class Classes:
    """Masks over an hour's scheduled rows; of several outcomes, or rows at targets, the first one counts."""

    def __init__(
        self,
        schedule: ScheduleRows,
        dispatch: OutcomeRows,
        realtime: TargetRows,
        terms: AuditTerms,
        parts: Fields | None = None,
    ) -> None:
        """``parts`` are the fields of ``dispatch.parts``, where the caller has them already."""
        self.due_from_ms = schedule.due_from_ms()
        self.outcomes = Join(schedule.sequence, dispatch.sequences)
        self.stored = Join(schedule.sequence, realtime.sequence)
        self.has_outcome: Mask = self.outcomes.times > 0
        self.at_target: Mask = self.stored.times > 0
        self.part = JoinedFields(parts or Fields(dispatch.parts), dispatch.part_of, self.outcomes.first_rows)
        self.outcome = self.part["outcome"]
        self.dispatched: Mask = self.outcome == Outcome.DISPATCHED
        self.target_ids = np.array([target.log_id for target in realtime.targets] or [0], np.uint64)
        self.unproven, self.not_there = self._split_missing(realtime)
        self.without_word: Mask = ~self.has_outcome & ~self.at_target
        self.overdue: Mask = self.without_word
        self.pending: Mask = self.without_word
        self.waiting: Mask = self.without_word
        # In most hours each row has an outcome, and there is nothing to split.
        if self.without_word.any():
            self._split_without_word(schedule, terms)
        self.undecided: Mask = ~self.has_outcome & ~self.pending & ~self.waiting & ~self.overdue
        self.missing: Mask = self.not_there | self.overdue
        self.proved: Mask = self.dispatched & ~self.not_there
        self.moved, self.redriven = self._split_cancelled(schedule)

    def states(self) -> NDArray[np.int64]:
        """For each row the index of its class in `STATES`."""
        masks = {"PENDING": self.pending, "WAITING": self.waiting, "LOST": self.missing}
        masks |= {"DELIVERED": self.proved & ~self.unproven, "UNPROVEN": self.unproven}
        masks |= {outcome.name: self.outcome == outcome for outcome in DECIDED}
        states = np.zeros(len(self.outcome), np.int64)
        for word, mask in masks.items():
            states[mask] = STATES.index(word)
        return states

    def _split_without_word(self, schedule: ScheduleRows, terms: AuditTerms) -> None:
        """Split the rows of which no log says anything, by when they were due."""
        since_ms, until_ms = terms.spans.bounds(schedule.subjects, schedule.subject)
        grace_ms = terms.lost_grace_ms
        self.overdue = self.without_word & (np.maximum(self.due_from_ms, since_ms) + grace_ms < until_ms)
        self.pending = self.without_word & (self.due_from_ms > terms.now_ms)
        self.waiting = self.without_word & ~self.overdue & (self.due_from_ms + grace_ms < terms.now_ms)

    def _split_cancelled(self, schedule: ScheduleRows) -> tuple[Mask, Mask]:
        """Those of the cancelled rows that live on as other rows, and those of these that were dead letters.

        A dead letter is sent again by moving it from its end to the instant at which it died. Its tag says the same as
        this distance, but an archive has no tags.
        """
        moved: Mask = self.outcome == Outcome.CANCELLED
        if not moved.any():
            return moved, moved
        reason = self.part["reason"]
        moved = moved & np.isin(reason, LIVE_ON)
        redriven: Mask = moved & (reason == Reason.MOVED)
        redriven &= schedule.deliver_at_ms - self.part["target_appended_at_ms"] == DEAD_KEPT_MS
        comes_again = [name.startswith(RETRY_PREFIX) for name in schedule.subjects]
        return moved, redriven & np.array([*comes_again, False], np.bool_)[schedule.subject]

    def _split_missing(self, realtime: TargetRows) -> tuple[Mask, Mask]:
        """Split rows that are called DISPATCHED and that no target holds: those that can't be proved, and those that
        are lost.

        A row can't be proved when the target's retention removed it, or when the target's log is not here. If the
        target's log is here and should have it, it is lost.
        """
        missing: Mask = self.dispatched & ~self.at_target
        if not missing.any():
            return missing, missing
        starts = np.zeros(len(missing), np.uint64)
        for target_id, target in zip(self.target_ids, realtime.targets, strict=False):
            starts[self.part["target_log_id"] == target_id] = target.start
        here = np.isin(self.part["target_log_id"], self.target_ids)
        unproven: Mask = missing & (~here | (self.part["target_offset"] < starts))
        return unproven, missing & ~unproven


class _Comparison:
    def __init__(self, hour: int, piece: _Piece, terms: AuditTerms) -> None:
        self.found: list[NDArray[np.void]] = []
        self._hour, self._terms = hour, terms
        self._schedule, self._dispatch, self._realtime, self._accepted, self._parts, self._batches = piece
        classes = self._classes = Classes(*piece[:3], terms, self._parts)
        self._outcomes, self._stored = classes.outcomes, classes.stored
        self._part, self._outcome = classes.part, classes.outcome
        # Taken from the first row at a target.
        self._batch = JoinedFields(self._batches, self._realtime.batch_of, self._stored.first_rows)

    @property
    def _batch_target(self) -> UInt64s:
        """The target that holds each row, 0 where none does."""
        ids = self._classes.target_ids
        return np.where(self._classes.at_target, ids[self._batch["target"]], np.uint64(0)).astype(np.uint64)

    @cached_property
    def _again(self) -> NDArray[np.intp]:
        """The places of rows whose sequence the row before them has, too."""
        sequence = self._schedule.sequence
        return np.flatnonzero(sequence[1:] == sequence[:-1]) + 1

    def find(self) -> None:
        if self._accepted is not None:
            self._find_not_filed(self._accepted)
            self._find_not_decided(self._accepted)
        self._find_lost()
        self._find_duplicates()
        self._find_early()
        self._find_orphans()
        self._find_mismatches()
        self._find_late()

    def summary(self, found: Findings) -> HourSummary:
        classes, proved, table = self._classes, self._classes.proved, found.table
        counted = np.bincount(self._outcome, minlength=max(Outcome) + 1).tolist()
        states = {name: getattr(classes, name) for name in COUNTED}
        # The table is sorted by sequence and kind: a message counts once for each kind of finding.
        first = np.ones(len(table), np.bool_)
        same = (table["sequence"][1:] == table["sequence"][:-1]) & (table["kind"][1:] == table["kind"][:-1])
        first[1:] = ~same
        subjects = self._subjects(states, table[first], found.subjects)
        rows_of_kind = np.bincount(table["kind"][first], minlength=len(FindingKind) + 1).tolist()
        lateness_ms = _picked(self._appended_ms() - classes.due_from_ms, proved)
        past_due = _picked(self._schedule.appended_at_ms > self._schedule.deliver_at_ms, proved)
        on_time = np.maximum(_picked(lateness_ms, ~past_due), 0)
        return HourSummary(
            log_id=found.log_id,
            hour=found.hour,
            scheduled=len(self._schedule),
            dispatched=int(proved.sum()),
            **{outcome.word: counted[outcome] for outcome in DECIDED},
            **{name: int(mask.sum()) for name, mask in states.items()},
            **{kind.name.lower(): rows_of_kind[kind] for kind in FindingKind},
            past_due=int(past_due.sum()),
            lateness=count_values(on_time),
            past_due_lateness=count_values(lateness_ms[past_due]),
            late_ms_max=int(on_time.max(initial=0)),
            subjects=subjects,
            elsewhere=tuple(self._elsewhere()),
        )

    def _elsewhere(self) -> Iterator[ServerRows]:
        """The rows of which servers say more whose directories were not read for this hour."""
        unproven = self._classes.unproven
        if unproven.any():
            ids = self._part["target_log_id"][unproven]
            yield from _of_servers(Role.REALTIME, ids[~np.isin(ids, self._classes.target_ids)])
        cancelled = self._outcome == Outcome.CANCELLED
        if cancelled.any():
            ids = self._part["target_log_id"][cancelled]
            yield from _of_servers(Role.DELAY, ids[self._part["reason"][cancelled] == Reason.DRAINED])

    def _subjects(self, states: Mapping[str, Mask], found: NDArray[np.void], names: tuple[str, ...]) -> SubjectFigures:
        """The figures of each subject, to be summed up; ``found`` has a message once for each kind of finding."""
        own, every = self._schedule.subject, np.ones(len(self._schedule), np.bool_)
        masks = {"scheduled": every, "dispatched": self._classes.proved, **states}
        masks |= {outcome.word: self._outcome == outcome for outcome in DECIDED}
        counts = np.zeros((len(names), len(FIGURES)), np.int64)
        for number, figure in enumerate(FIGURES):
            if figure in masks and masks[figure].any():
                counts[:, number] = np.bincount(_picked(own, masks[figure]), minlength=len(names))
        late = found["kind"] == FindingKind.LATE
        for figure, rows in (("faults", found[~late]), ("late", found[late])):
            counts[:, FIGURES.index(figure)] = np.bincount(rows["subject"], minlength=len(names))
        return SubjectFigures(names, counts)

    def _find_not_filed(self, accepted: FiledByLog) -> None:
        """Accepted messages must be filed once, as they were accepted, and as many as the checkpoint counts."""
        schedule, rows = self._schedule, accepted.rows
        nameless = len(schedule.subjects) + len(self._realtime.subjects)
        join = Join(schedule.sequence, rows.sequence)
        missing = np.flatnonzero(~join.known)
        # No more rows are missing than an operator gave up.
        if len(missing) > accepted.dropped:
            gone = rows.take(missing)
            subject = gone.subject + np.uint32(nameless + 1)
            self._add(Cause.NOT_FILED, gone.sequence, gone.deliver_at_ms, subject, 0, 0)
        filed = are_filed(schedule.location)
        due_from_ms, hour = self._classes.due_from_ms, self._hour
        elsewhere = (due_from_ms < hour_start_ms(hour)) | (due_from_ms >= hour_start_ms(hour + 1))
        self._note(Cause.OTHER_HOUR, filed & elsewhere, 0)
        never = schedule.sequence >= np.uint64(accepted.next_sequence)
        for first, count in accepted.skipped:
            never |= (schedule.sequence >= np.uint64(first)) & (schedule.sequence < np.uint64(first + count))
        never &= filed
        self._note(Cause.NEVER_GIVEN, never, 0)
        if accepted.first:
            elsewhere = filed & (join.times == 0) & ~never & (schedule.sequence >= np.uint64(accepted.first))
            elsewhere[self._again] = False  # The join finds the first row of a sequence; the others are duplicates.
            self._note(Cause.FILED_ELSEWHERE, elsewhere, 0)
        if len(rows):
            self._find_other_than_accepted(rows, join, filed & (join.times > 0))
        if accepted.before is not None:
            count = accepted.before + int(filed.sum())
            if count != accepted.counted:
                one, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64)
                self._add(Cause.COUNTED, one, zero, nameless, accepted.counted, count)

    def _find_other_than_accepted(self, accepted: ScheduleRows, join: Join, both: Mask) -> None:
        """Compare filed rows with those of the message log; ``both`` marks the rows that both have."""
        filed, said = self._schedule, join.of_first
        differs = self._differ_from_first
        differs(Cause.ACCEPTED_DUE, said(accepted.deliver_at_ms), filed.deliver_at_ms, both)
        # A schedule log leaves the accept instant out of a row that was not past due when it was accepted.
        judged = both & (filed.appended_at_ms > 0) | both & said(accepted.appended_at_ms > accepted.deliver_at_ms)
        differs(Cause.ACCEPTED_AT, said(accepted.appended_at_ms), filed.appended_at_ms, judged)
        own, theirs = same_subjects(filed.subjects, accepted.subjects)
        if len(own) > 1 or not np.array_equal(own, theirs):
            other = both & (own[filed.subject] != theirs[said(accepted.subject)])
            self._note(Cause.ACCEPTED_SUBJECT, other, 0)
        differs(Cause.ACCEPTED_BODY, said(accepted.body_bytes), filed.body_bytes, both)
        differs(Cause.ACCEPTED_CONTENT, said(accepted.hashes()), filed.hashes(), both)
        if filed.expiring or accepted.expiring:
            differs(Cause.ACCEPTED_EXPIRY, said(accepted.expires_at_ms()), filed.expires_at_ms(), both)
        if filed.labelled or accepted.labelled:
            differs(Cause.ACCEPTED_LABELS, said(accepted.label_hashes()), filed.label_hashes(), both)

    def _find_not_decided(self, accepted: FiledByLog) -> None:
        """A decision stands behind its message in the message log: where that log has the message, it has both."""
        if not (self._parts["outcome"] == Outcome.CANCELLED).any():
            return
        cancelled = np.flatnonzero((self._outcome == Outcome.CANCELLED) & (self._part["reason"] != 0))
        sequences = self._schedule.sequence[cancelled]
        join = Join(accepted.ended["sequence"], sequences)
        if accepted.first:
            missing = cancelled[~join.known & (sequences >= np.uint64(accepted.first))]
            self._note(Cause.NOT_DECIDED, missing, self._part["claimed_at_ms"])
        decided = np.zeros(len(self._schedule), np.uint8)
        decided[cancelled[join.rows]] = accepted.ended["reason"][join.scheduled]
        own = self._part["reason"]
        self._note(Cause.OTHER_REASON, (decided != 0) & (decided != own), own, decided)
        # That of a drained row is at another delay server, and only the outcome says which it is.
        named = (decided == own) & np.isin(own, NAMING)
        if named.any():
            self._find_other_rows(accepted, named)

    def _find_other_rows(self, accepted: FiledByLog, named: Mask) -> None:
        """What an outcome says of the row that took its message's place, or met it, is what the decision says."""
        rows = np.flatnonzero(named)
        sequences = self._schedule.sequence[rows]
        decision = accepted.ended[np.searchsorted(accepted.ended["sequence"], sequences)]
        said = accepted.others.of(sequences)
        differs = (said != decision["other"]) | (self._part["target_appended_at_ms"][rows] != decision["other_at_ms"])
        value, other = np.zeros((2, len(self._schedule)), np.uint64)
        value[rows], other[rows] = said, decision["other"]
        self._note(Cause.OTHER_ROW, rows[differs], value, other)

    def _find_lost(self) -> None:
        classes = self._classes
        waited_ms = self._terms.now_ms - classes.due_from_ms
        self._note(Cause.NO_OUTCOME, classes.overdue, waited_ms)
        if classes.not_there.any():
            self._note(Cause.NOT_AT_TARGET, classes.not_there, self._part["target_log_id"])

    def _find_duplicates(self) -> None:
        self._note(Cause.OUTCOMES, self._outcomes.times > 1, self._outcomes.times)
        self._note(Cause.TWICE_AT_TARGET, self._stored.times > 1, self._stored.times)
        self._note(Cause.TWICE_SCHEDULED, self._again, 2)

    def _find_early(self) -> None:
        """Rows that left early, by the dispatch log and by the batch itself: so a false claim instant hides nothing."""
        due = self._schedule.deliver_at_ms
        claimed = np.full(len(due), np.iinfo(np.int64).max)
        said, stored = self._part, self._batch
        if self._outcomes.rows is not self._outcomes.first:
            said = JoinedFields(self._parts, self._dispatch.part_of, self._outcomes.rows)
        self._outcomes.lowest(said["claimed_at_ms"], claimed, said["outcome"] == Outcome.DISPATCHED)
        if self._stored.rows is not self._stored.first:
            stored = JoinedFields(self._batches, self._realtime.batch_of, self._stored.rows)
        self._stored.lowest(stored["claimed_at_ms"], claimed)
        early = claimed < due
        if early.any():
            self._note(Cause.CLAIMED_EARLY, early, claimed, due - claimed)

    def _find_orphans(self) -> None:
        targets = self._realtime.targets
        unknown = np.flatnonzero(~self._stored.known)
        unknown = unknown[self._batches["newer"].take(self._realtime.batch_of[unknown]) == 0]
        batches = self._realtime.batches[self._realtime.batch_of[unknown]]
        target_ids = np.array([target.log_id for target in targets] or [0], np.uint64)
        subject = batches["subject"] + np.uint32(len(self._schedule.subjects))
        self._add(
            *(Cause.TARGET_UNSCHEDULED, self._realtime.sequence[unknown]),
            *(self._realtime.deliver_at_ms[unknown], subject, target_ids[batches["target"]], batches["offset"]),
        )
        unknown = np.flatnonzero(~self._outcomes.known)
        nameless = len(self._schedule.subjects) + len(self._realtime.subjects)
        sequences, due = self._dispatch.sequences[unknown], self._dispatch.deliver_at_ms[unknown]
        self._add(Cause.OUTCOME_UNSCHEDULED, sequences, due, nameless, 0, 0)
        missing = self._classes.at_target & ~self._classes.has_outcome
        if missing.any():
            decided = missing & (self._batch["decided"] == 1)
            self._note(Cause.OUTCOME_MISSING, decided, self._batch_target, self._batch["offset"])

    def _find_mismatches(self) -> None:
        self._find_disagreements()
        attempt = self._parts["attempt"]
        if (attempt[:-1] != 1).any():
            own = self._part["attempt"]
            self._note(Cause.OTHER_ATTEMPT, self._classes.dispatched & (own != 1), own)
        if np.isin(self._parts["outcome"], WISHED).any():
            self._note(Cause.NOBODY_DECIDES, self._without_proof(), self._outcome)
        own, theirs = same_subjects(self._schedule.subjects, self._realtime.subjects)
        if (len(own) > 1 or not np.array_equal(own, theirs)) and self._classes.at_target.any():
            differs = self._classes.at_target & (own[self._schedule.subject] != theirs[self._batch["subject"]])
            self._note(Cause.OTHER_SUBJECT, differs, 0)
        due, hashes = self._schedule.deliver_at_ms, self._schedule.hashes()
        for join, dues, contents, must_state in (
            (self._outcomes, self._dispatch.deliver_at_ms, self._dispatch.content_hash, self._classes.dispatched),
            (self._stored, self._realtime.deliver_at_ms, self._realtime.hashes(), self._classes.at_target),
        ):
            if len(dues):
                has = join.times > 0
                self._differ_from_first(Cause.OTHER_DUE, due, join.of_first(dues), has)
                # A message that was not handed over may have been decided without anybody reading its content.
                said = join.of_first(contents)
                self._differ_from_first(Cause.OTHER_CONTENT, hashes, said, has & (must_state | (said != NOT_STATED)))
        if len(self._schedule.left_out):
            left_out = np.zeros(len(due), np.bool_)
            left_out[Join(self._schedule.sequence, self._schedule.left_out).scheduled] = True
            self._note(Cause.LEFT_OUT, left_out & self._classes.without_word, 0)

    def _without_proof(self) -> Mask:
        """Rows whose outcome must have been wished, and of which nothing shows that it was."""
        without = np.zeros(len(self._outcome), np.bool_)
        for outcome in WISHED:
            own: Mask = self._outcome == outcome
            if outcome.proof is Proof.REASON:
                without |= own & (self._part["reason"] == 0)
            elif own.any():
                expires = self._schedule.expires_at_ms()
                without |= own & ((expires == 0) | (self._part["claimed_at_ms"] < expires))
        return without

    def _find_disagreements(self) -> None:
        """Compare what the dispatch log and the target's log say of each batch that was handed over."""
        part, batch, batch_target = self._part, self._batch, self._batch_target
        once = (self._outcomes.times == 1) & (self._stored.times == 1)
        # An operator decided that a message is in doubt when the target's log was believed lost, so its presence there
        # is no contradiction.
        cancelled = once & (self._outcome == Outcome.CANCELLED)
        self._note(Cause.CANCELLED_AT_TARGET, cancelled, part["claimed_at_ms"], batch["offset"])
        other = once & ~self._classes.dispatched & ~cancelled & (self._outcome != Outcome.IN_DOUBT)
        self._note(Cause.NOT_DISPATCHED, other, self._outcome, batch["offset"])
        both = once & self._classes.dispatched
        same_target = part["target_log_id"] == batch_target
        self._note(Cause.OTHER_TARGET, both & ~same_target, part["target_log_id"], batch_target)
        both &= same_target
        for cause, own, theirs in (
            (Cause.OTHER_OFFSET, "target_offset", "offset"),
            (Cause.OTHER_CLAIM, "claimed_at_ms", "claimed_at_ms"),
            (Cause.OTHER_APPEND, "target_appended_at_ms", "appended_at_ms"),
        ):
            self._differ_from_first(cause, part[own], batch[theirs], both)
        differs = both & ((part["epoch"] != batch["epoch"]) | (part["batch_id"] != batch["batch_id"]))
        self._note(Cause.OTHER_BATCH, differs, part["batch_id"], batch["batch_id"])

    def _appended_ms(self) -> Int64s:
        """When each row came to its target, by the target's own log if that still has it."""
        said = self._part["target_appended_at_ms"]
        return np.where(self._classes.at_target, self._batch["appended_at_ms"], said).astype(np.int64)

    def _late_ms(self) -> Int64s:
        """How much later than due each dispatched row was claimed or appended, whichever is later; 0 for others."""
        proved = self._classes.proved
        last = np.maximum(self._appended_ms(), self._part["claimed_at_ms"])
        late_ms: Int64s = np.where(proved, last - self._classes.due_from_ms, 0)
        return late_ms

    def _find_late(self) -> None:
        late_ms, limit_ms = self._late_ms(), self._terms.late_ms_limit
        late = np.flatnonzero(late_ms > limit_ms)
        if not len(late):
            return
        due_from_ms = self._classes.due_from_ms[late]
        in_time = self._part["claimed_at_ms"][late] - due_from_ms <= limit_ms
        to = self._part["target_log_id"][late]
        number = np.zeros(len(late_ms), np.int64)
        number[late] = explain(self._terms.explanations, due_from_ms, due_from_ms + late_ms[late], in_time, to)
        self._note(Cause.LATE, late, late_ms, number)

    def _differ_from_first(self, cause: Cause, value: Numbers, other: Numbers, judged: Mask) -> None:
        """Note the rows of which two logs differ; ``judged`` marks those that both have."""
        differs = np.not_equal(value, other)
        if differs.any():
            self._note(cause, differs & judged, value, other)

    def _note(self, cause: Cause, which: NDArray[np.generic], value: Numbers, other: Numbers = 0) -> None:
        """Add a finding for each scheduled row that a mask or an index array picks."""
        rows = np.flatnonzero(which) if which.dtype == bool else which
        schedule = self._schedule
        self._add(
            *(cause, schedule.sequence[rows], schedule.deliver_at_ms[rows], schedule.subject[rows]),
            *(number if isinstance(number, int) else number[rows] for number in (value, other)),
        )

    def _add(
        self,
        cause: Cause,
        sequence: UInt64s,
        deliver_at_ms: Int64s,
        subject: Numbers,
        value: Numbers,
        other: Numbers,
    ) -> None:
        if not len(sequence):
            return
        rows = np.zeros(len(sequence), FINDING)
        rows["kind"], rows["cause"] = KINDS[cause], cause
        rows["sequence"], rows["deliver_at_ms"], rows["subject"] = sequence, deliver_at_ms, subject
        rows["value"], rows["other"] = value, other
        self.found.append(rows)


def _of_servers(role: Role, log_ids: UInt64s) -> Iterator[ServerRows]:
    ids, counts = np.unique(log_ids, return_counts=True)
    yield from (ServerRows(role, *pair) for pair in zip(ids.tolist(), counts.tolist(), strict=True))


def same_subjects(first: Sequence[str], second: Sequence[str]) -> tuple[Int64s, Int64s]:
    """Numbers for two lists of subjects: equal where the names are."""
    numbers: dict[str, int] = {}
    both = [[numbers.setdefault(name, len(numbers)) for name in names] or [0] for names in (first, second)]
    return np.array(both[0], np.int64), np.array(both[1], np.int64)
