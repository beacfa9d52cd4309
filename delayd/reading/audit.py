"""Audit: compares, for one hour, the scheduled messages with what became of them, by the dispatch log and the targets'
logs.

Invariant: pure. Arrays in, figures and findings out, so that a command, Spark and tests give the same answer. Each
scheduled row is counted in exactly one class, and the classes add up to ``scheduled``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Int64s
from delayd.content import NOT_STATED
from delayd.log.dispatch import Outcome, OutcomeRows
from delayd.reading.classes import Classes
from delayd.reading.columns import ScheduleRows, UInt64s
from delayd.reading.filed import FiledByLog, differences, not_filed, same_subjects
from delayd.reading.findings import FINDING, FindingKind, Findings, Reason
from delayd.reading.histogram import count_ms
from delayd.reading.join import Fields, Join, JoinedFields
from delayd.reading.lives import Spans
from delayd.reading.realtime import TargetRows
from delayd.reading.summary import HourSummary

Mask = NDArray[np.bool_]
Numbers = NDArray[np.generic] | int

LATE_MS_LIMIT = 1_000  # Well above the 30 ms that a busy server takes, well below what a user would call late.
# Fields of a part of the dispatch log, and the fields of the target's batch that should be equal.
SAID_BY_BOTH = {
    "target_offset": "offset",
    "claimed_at_ms": "claimed_at_ms",
    "target_appended_at_ms": "appended_at_ms",
    "epoch": "epoch",
    "batch_id": "batch_id",
}
AGREE_ROWS = 65_536
UNASKED = (Outcome.CANCELLED, Outcome.EXPIRED)  # What must have been asked for: by a reason, or by an expiry.
# A restart of either side and its recovery takes up to this long; until then a due row may still be in flight.
LOST_GRACE_MS = 10_000


@dataclass(frozen=True, slots=True)
class AuditTerms:
    """The terms by which the audit judges.

    ``now_ms``: when the books are read; rows due later are pending. ``spans``: when all servers that a row needs were
    up together. A row that was due for longer than the grace within its span, without an outcome, is lost.
    """

    now_ms: int
    spans: Spans
    late_ms_limit: int = LATE_MS_LIMIT
    lost_grace_ms: int = LOST_GRACE_MS


def audit_hour(
    origin_log_id: int,
    hour: int,
    schedule: ScheduleRows,
    dispatch: OutcomeRows,
    realtime: TargetRows,
    terms: AuditTerms,
    accepted: FiledByLog | None = None,
    fields: tuple[Fields, Fields] | None = None,
    *,
    agreed: bool | None = None,
) -> tuple[Findings, HourSummary]:
    """Compare the three logs of an hour of one delay server.

    Args:
        origin_log_id: of the delay server.
        hour: hours since the epoch.
        schedule: its schedule side, by rising sequence.
        dispatch: its outcomes, in any order.
        realtime: the rows of this hour and origin that the targets hold.
        terms: what to judge by.
        accepted: what the message log and the checkpoint say of the schedule log; None when nobody knows.
        fields: those of ``dispatch.parts`` and of ``realtime.batches``, where the caller has them already.
        agreed: what `agree` says of the whole hour, where these rows are a piece of one.

    Returns:
        The findings, by sequence, and the figures.
    """
    fields = fields or (Fields(dispatch.parts), Fields(realtime.batches))
    agreed = agree(dispatch, realtime) if agreed is None else agreed
    books = _Books(hour, _Sides(schedule, dispatch, realtime, *fields, agreed), terms, accepted)
    books.find()
    table = np.concatenate(books.found) if books.found else np.empty(0, FINDING)
    if len(books.found) > 1:
        table = table[np.lexsort((table["reason"], table["kind"], table["sequence"]))]
    subjects = (*schedule.subjects, *realtime.subjects, "", *(accepted.rows.subjects if accepted else ()))
    return Findings(origin_log_id, table, subjects), books.summary(origin_log_id, table)


def agree(dispatch: OutcomeRows, realtime: TargetRows) -> bool:
    """Whether both logs hold the same rows, all DISPATCHED, and agree about each batch that was handed over.

    The comparison goes batch by batch, not row by row. Nearly all hours agree, and then no row is compared again.
    """
    if not np.array_equal(dispatch.sequences, realtime.sequence):
        return False
    parts, batches = dispatch.parts, realtime.batches
    batch_of = np.full(len(parts), -1, np.int64)
    batch_of[dispatch.part_of] = realtime.batch_of
    for start in range(0, len(realtime.batch_of), AGREE_ROWS):
        piece = slice(start, start + AGREE_ROWS)
        if not np.array_equal(batch_of.take(dispatch.part_of[piece]), realtime.batch_of[piece]):
            return False
    used = np.flatnonzero(batch_of >= 0)
    batch_of = batch_of[used]
    target_ids = np.array([target.log_id for target in realtime.targets] or [0], np.uint64)
    same = parts["outcome"][used] == Outcome.DISPATCHED
    same &= parts["target_log_id"][used] == target_ids[batches["target"][batch_of]]
    for name, theirs in SAID_BY_BOTH.items():
        same &= parts[name][used] == batches[theirs][batch_of]
    return bool(same.all())


def _picked(values: NDArray[Any], mask: Mask) -> NDArray[Any]:
    """The values that a mask picks, mostly all of them."""
    return values if mask.all() else values[mask]


class _Sides(NamedTuple):
    """The three logs of an hour: what was filed, what became of it, and what the targets hold."""

    schedule: ScheduleRows
    dispatch: OutcomeRows
    realtime: TargetRows
    parts: Fields  # Of ``dispatch``.
    batches: Fields  # Of ``realtime``.
    agreed: bool


class _Books:
    def __init__(self, hour: int, sides: _Sides, terms: AuditTerms, accepted: FiledByLog | None) -> None:
        self.found: list[NDArray[np.void]] = []
        self._hour = hour
        self._schedule, self._dispatch, self._realtime, self._parts, self._batches, self._agreed = sides
        self._terms = terms
        self._accepted = accepted
        classes = self._classes = Classes(self._schedule, self._dispatch, self._realtime, terms, self._parts)
        self._due_from_ms, self._part, self._outcome = classes.due_from_ms, classes.part, classes.outcome
        self._outcomes, self._stored = classes.outcomes, classes.stored
        self._has_outcome, self._at_target = classes.has_outcome, classes.at_target
        self._dispatched, self._lost, self._overdue = classes.dispatched, classes.not_there, classes.overdue
        # Taken from the first row at a target.
        self._batch = JoinedFields(self._batches, self._realtime.batch_of, self._stored.first_rows)

    @property
    def _batch_target(self) -> UInt64s:
        """The target that holds each row, 0 where none does."""
        ids = self._classes.target_ids
        return np.where(self._at_target, ids[self._batch["target"]], np.uint64(0)).astype(np.uint64)

    def find(self) -> None:
        if self._accepted is not None:
            self._find_not_filed(self._accepted)
            self._find_not_decided(self._accepted)
        self._find_lost()
        self._find_duplicates()
        self._find_early()
        self._find_orphans()
        self._find_mismatches()
        late_ms = self._late_ms()
        self._note(FindingKind.LATE, Reason.LATE, late_ms > self._terms.late_ms_limit, late_ms)

    def summary(self, origin_log_id: int, table: NDArray[np.void]) -> HourSummary:
        classes, proved = self._classes, self._classes.proved
        counted = np.bincount(self._outcome, minlength=max(Outcome) + 1)
        # The table is sorted by sequence and kind: a message counts once for each kind of finding.
        first = np.ones(len(table), np.bool_)
        same = (table["sequence"][1:] == table["sequence"][:-1]) & (table["kind"][1:] == table["kind"][:-1])
        first[1:] = ~same
        rows_of_kind = np.bincount(table["kind"][first], minlength=len(FindingKind) + 1).tolist()
        lateness_ms = _picked(self._appended_ms() - self._due_from_ms, proved)
        past_due = _picked(self._schedule.appended_at_ms > self._schedule.deliver_at_ms, proved)
        on_time = np.maximum(_picked(lateness_ms, ~past_due), 0)
        return HourSummary(
            log_id=origin_log_id,
            hour=self._hour,
            scheduled=len(self._schedule),
            dispatched=int(proved.sum()),
            dead=int(counted[Outcome.DEAD]),
            cancelled=int(counted[Outcome.CANCELLED]),
            expired=int(counted[Outcome.EXPIRED]),
            in_doubt=int(counted[Outcome.IN_DOUBT]),
            pending=int(classes.pending.sum()),
            undecided=int(classes.undecided.sum()),
            waiting=int(classes.waiting.sum()),
            missing=int(classes.missing.sum()),
            lost=rows_of_kind[FindingKind.LOST],
            duplicate=rows_of_kind[FindingKind.DUPLICATE],
            early=rows_of_kind[FindingKind.EARLY],
            orphan=rows_of_kind[FindingKind.ORPHAN],
            mismatch=rows_of_kind[FindingKind.MISMATCH],
            conservation=rows_of_kind[FindingKind.CONSERVATION],
            late=rows_of_kind[FindingKind.LATE],
            unproven=int(classes.unproven.sum()),
            past_due=int(past_due.sum()),
            lateness=count_ms(on_time),
            past_due_lateness=count_ms(lateness_ms[past_due]),
            late_ms_max=int(on_time.max(initial=0)),
        )

    def _find_not_filed(self, accepted: FiledByLog) -> None:
        """Accepted messages must be filed once, as they were accepted, and as many as the checkpoint counts."""
        schedule, nameless = self._schedule, len(self._schedule.subjects) + len(self._realtime.subjects)
        rows = not_filed(schedule, accepted)
        missing = accepted.rows.take(rows)
        subject = missing.subject + np.uint32(nameless + 1)
        self._add(FindingKind.LOST, Reason.NOT_FILED, missing.sequence, missing.deliver_at_ms, subject, 0, 0)
        for noted in differences(self._hour, schedule, accepted):
            self._note(*noted)
        if accepted.before is None:
            return
        filed = accepted.before + schedule.filed_count()
        if filed != accepted.counted:
            one, zero = np.zeros(1, np.uint64), np.zeros(1, np.int64)
            self._add(FindingKind.CONSERVATION, Reason.COUNTED, one, zero, nameless, accepted.counted, filed)

    def _find_not_decided(self, accepted: FiledByLog) -> None:
        """A decision stands behind its message in the message log: where that log has the message, it has both."""
        if not (self._parts["outcome"] == Outcome.CANCELLED).any():
            return
        cancelled = np.flatnonzero((self._outcome == Outcome.CANCELLED) & (self._part["reason"] != 0))
        sequences, kind = self._schedule.sequence[cancelled], FindingKind.MISMATCH
        join = Join(accepted.ended["sequence"], sequences)
        if accepted.first:
            missing = cancelled[~join.known & (sequences >= np.uint64(accepted.first))]
            self._note(kind, Reason.NOT_DECIDED, missing, self._part["claimed_at_ms"])
        decided = np.zeros(len(self._schedule), np.uint8)
        decided[cancelled[join.rows]] = accepted.ended["reason"][join.scheduled]
        own = self._part["reason"]
        self._note(kind, Reason.OTHER_REASON, (decided != 0) & (decided != own), own, decided)

    def _find_lost(self) -> None:
        if self._overdue.any():
            waited_ms = self._terms.now_ms - self._due_from_ms
            self._note(FindingKind.LOST, Reason.NO_OUTCOME, self._overdue, waited_ms)
        if self._lost.any():
            self._note(FindingKind.LOST, Reason.NOT_AT_TARGET, self._lost, self._part["target_log_id"])

    def _find_duplicates(self) -> None:
        kind = FindingKind.DUPLICATE
        self._note(kind, Reason.OUTCOMES, self._outcomes.times > 1, self._outcomes.times)
        self._note(kind, Reason.TWICE_AT_TARGET, self._stored.times > 1, self._stored.times)
        sequence = self._schedule.sequence
        again = np.flatnonzero(sequence[1:] == sequence[:-1]) + 1
        self._note(kind, Reason.TWICE_SCHEDULED, again, 2)

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
        if not self._agreed:
            self._stored.lowest(stored["claimed_at_ms"], claimed)
        early = claimed < due
        if early.any():
            self._note(FindingKind.EARLY, Reason.CLAIMED_EARLY, early, claimed, due - claimed)

    def _find_orphans(self) -> None:
        kind = FindingKind.ORPHAN
        targets = self._realtime.targets
        unknown = np.flatnonzero(~self._stored.known)
        unknown = unknown[self._batches["newer"].take(self._realtime.batch_of[unknown]) == 0]
        batches = self._realtime.batches[self._realtime.batch_of[unknown]]
        target_ids = np.array([target.log_id for target in targets] or [0], np.uint64)
        subject = batches["subject"] + np.uint32(len(self._schedule.subjects))
        self._add(
            *(kind, Reason.TARGET_UNSCHEDULED, self._realtime.sequence[unknown]),
            *(self._realtime.deliver_at_ms[unknown], subject, target_ids[batches["target"]], batches["offset"]),
        )
        unknown = np.flatnonzero(~self._outcomes.known)
        nameless = len(self._schedule.subjects) + len(self._realtime.subjects)
        sequences, due = self._dispatch.sequences[unknown], self._dispatch.deliver_at_ms[unknown]
        self._add(kind, Reason.OUTCOME_UNSCHEDULED, sequences, due, nameless, 0, 0)
        missing = self._at_target & ~self._has_outcome
        if missing.any():
            decided = missing & (self._batch["decided"] == 1)
            self._note(kind, Reason.OUTCOME_MISSING, decided, self._batch_target, self._batch["offset"])

    def _find_mismatches(self) -> None:
        kind = FindingKind.MISMATCH
        if not self._agreed:
            self._find_disagreements()
        attempt = self._parts["attempt"]
        if (attempt[:-1] != 1).any():
            own = self._part["attempt"]
            self._note(kind, Reason.OTHER_ATTEMPT, self._dispatched & (own != 1), own)
        if np.isin(self._parts["outcome"], UNASKED).any():
            asked = (self._outcome == Outcome.CANCELLED) & (self._part["reason"] != 0)
            is_expired = self._outcome == Outcome.EXPIRED
            if is_expired.any():
                expires = self._schedule.expires_at_ms()
                asked |= is_expired & (expires > 0) & (self._part["claimed_at_ms"] >= expires)
            self._note(kind, Reason.NOBODY_DECIDES, np.isin(self._outcome, UNASKED) & ~asked, self._outcome)
        own, theirs = same_subjects(self._schedule.subjects, self._realtime.subjects)
        if (len(own) > 1 or not np.array_equal(own, theirs)) and self._at_target.any():
            differs = self._at_target & (own[self._schedule.subject] != theirs[self._batch["subject"]])
            self._note(kind, Reason.OTHER_SUBJECT, differs, 0)
        due = self._schedule.deliver_at_ms
        for join, said in (
            (self._outcomes, self._dispatch.deliver_at_ms),
            (self._stored, self._realtime.deliver_at_ms),
        ):
            if len(said):
                said = join.of_first(said)
                self._note(kind, Reason.OTHER_DUE, (join.times > 0) & (said != due), due, said)
        self._find_other_content()
        if len(self._schedule.left_out):
            left_out = np.zeros(len(due), np.bool_)
            left_out[Join(self._schedule.sequence, self._schedule.left_out).scheduled] = True
            self._note(kind, Reason.LEFT_OUT, left_out & self._classes.without_word, 0)

    def _find_disagreements(self) -> None:
        """Compare what the dispatch log and the target's log say of each batch that was handed over."""
        kind = FindingKind.MISMATCH
        part, batch, batch_target = self._part, self._batch, self._batch_target
        once = (self._outcomes.times == 1) & (self._stored.times == 1)
        # An operator decided that a message is in doubt when the target's log was believed lost, so its presence there
        # is no contradiction.
        cancelled = once & (self._outcome == Outcome.CANCELLED)
        self._note(kind, Reason.CANCELLED_AT_TARGET, cancelled, part["claimed_at_ms"], batch["offset"])
        other = once & ~self._dispatched & ~cancelled & (self._outcome != Outcome.IN_DOUBT)
        self._note(kind, Reason.NOT_DISPATCHED, other, self._outcome, batch["offset"])
        both = once & self._dispatched
        same_target = part["target_log_id"] == batch_target
        self._note(kind, Reason.OTHER_TARGET, both & ~same_target, part["target_log_id"], batch_target)
        both &= same_target
        differs = both & (part["target_offset"] != batch["offset"])
        self._note(kind, Reason.OTHER_OFFSET, differs, part["target_offset"], batch["offset"])
        differs = both & (part["claimed_at_ms"] != batch["claimed_at_ms"])
        self._note(kind, Reason.OTHER_CLAIM, differs, part["claimed_at_ms"], batch["claimed_at_ms"])
        differs = both & (part["target_appended_at_ms"] != batch["appended_at_ms"])
        self._note(kind, Reason.OTHER_APPEND, differs, part["target_appended_at_ms"], batch["appended_at_ms"])
        differs = both & ((part["epoch"] != batch["epoch"]) | (part["batch_id"] != batch["batch_id"]))
        self._note(kind, Reason.OTHER_BATCH, differs, part["batch_id"], batch["batch_id"])

    def _find_other_content(self) -> None:
        """Compare subject, headers and body, by the hashes that the three logs state (rule S6)."""
        filed = self._schedule.hashes()
        for join, hashes, must_state in (
            (self._outcomes, self._dispatch.content_hash, self._dispatched),
            (self._stored, self._realtime.hashes(), self._at_target),
        ):
            if len(hashes):
                said = join.of_first(hashes)
                # A message that was not handed over may have been decided without anybody reading its content.
                judged = (join.times > 0) & (must_state | (said != NOT_STATED))
                self._note(FindingKind.MISMATCH, Reason.OTHER_CONTENT, judged & (said != filed), filed, said)

    def _appended_ms(self) -> Int64s:
        """When each row came to its target, by the target's own log if that still has it."""
        said: Int64s = self._part["target_appended_at_ms"]
        if self._agreed and self._outcomes.same:
            return said
        return np.where(self._at_target, self._batch["appended_at_ms"], said).astype(np.int64)

    def _late_ms(self) -> Int64s:
        """How much later than due each dispatched row was claimed or appended, whichever is later; 0 for others."""
        proved = self._classes.proved
        last = np.maximum(self._appended_ms(), self._part["claimed_at_ms"])
        late_ms: Int64s = np.where(proved, last - self._due_from_ms, 0)
        return late_ms

    def _note(
        self, kind: FindingKind, reason: Reason, which: NDArray[np.generic], value: Numbers, other: Numbers = 0
    ) -> None:
        """Add a finding for each scheduled row that a mask or an index array picks."""
        rows = np.flatnonzero(which) if which.dtype == bool else which
        schedule = self._schedule
        self._add(
            *(kind, reason, schedule.sequence[rows], schedule.deliver_at_ms[rows], schedule.subject[rows]),
            *(number if isinstance(number, int) else number[rows] for number in (value, other)),
        )

    def _add(
        self,
        kind: FindingKind,
        reason: Reason,
        sequence: UInt64s,
        deliver_at_ms: Int64s,
        subject: Numbers,
        value: Numbers,
        other: Numbers,
    ) -> None:
        if not len(sequence):
            return
        rows = np.zeros(len(sequence), FINDING)
        rows["kind"], rows["reason"], rows["hour"] = kind, reason, self._hour
        rows["sequence"], rows["deliver_at_ms"], rows["subject"] = sequence, deliver_at_ms, subject
        rows["value"], rows["other"] = value, other
        self.found.append(rows)
