"""Classes: what became of each scheduled row, in one word, by all three logs and by what the delay server says.

Invariant: pure, and each row is in exactly one class. The audit counts by these masks, and tables name a row's class by
them, so a figure and a row never contradict each other.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from delayd.log.dispatch import Outcome, OutcomeRows
from delayd.reading.columns import ScheduleRows
from delayd.reading.join import Fields, Join, JoinedFields
from delayd.reading.lives import Spans
from delayd.reading.realtime import TargetRows

Mask = NDArray[np.bool_]

DECIDED = {
    Outcome.CANCELLED: "CANCELLED",
    Outcome.DEAD: "DEAD",
    Outcome.EXPIRED: "EXPIRED",
    Outcome.IN_DOUBT: "IN_DOUBT",
}
STATES = ("UNDECIDED", "PENDING", "WAITING", "LOST", "DELIVERED", "UNPROVEN", *DECIDED.values())
"""The names of the classes; DELIVERED and UNPROVEN together are what the audit counts as dispatched."""


class Terms(Protocol):
    """The terms by which a row's class is judged."""

    @property
    def now_ms(self) -> int:
        """When the books are read."""

    @property
    def spans(self) -> Spans:
        """Up to when all rows that fell due are settled."""

    @property
    def lost_grace_ms(self) -> int:
        """A row that is due without an outcome is lost only after this long."""


class Classes:
    """Masks over the scheduled rows of an hour. If a row has several outcomes, or is at targets several times, the
    first one counts.
    """

    def __init__(
        self,
        schedule: ScheduleRows,
        dispatch: OutcomeRows,
        realtime: TargetRows,
        terms: Terms,
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

    def states(self) -> NDArray[np.int64]:
        """For each row the index of its class in `STATES`."""
        masks = {"PENDING": self.pending, "WAITING": self.waiting, "LOST": self.missing}
        masks |= {"DELIVERED": self.proved & ~self.unproven, "UNPROVEN": self.unproven}
        masks |= {word: self.outcome == outcome for outcome, word in DECIDED.items()}
        states = np.zeros(len(self.outcome), np.int64)
        for word, mask in masks.items():
            states[mask] = STATES.index(word)
        return states

    def _split_without_word(self, schedule: ScheduleRows, terms: Terms) -> None:
        """Split the rows of which no log says anything, by when they were due."""
        since_ms, until_ms = terms.spans.bounds(schedule.subjects, schedule.subject)
        grace_ms = terms.lost_grace_ms
        self.overdue = self.without_word & (np.maximum(self.due_from_ms, since_ms) + grace_ms < until_ms)
        self.pending = self.without_word & (self.due_from_ms > terms.now_ms)
        self.waiting = self.without_word & ~self.overdue & (self.due_from_ms + grace_ms < terms.now_ms)

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
