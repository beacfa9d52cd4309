"""Decisions: the rows that a delay server's message log says have ended: cancelled, moved, replaced, or never taken.

A decision counts from the moment at which it is durable, and its outcome may reach the dispatch log much later: 32
hours are written at a time, and a full disk or a stopped server delays the rest. Invariant: whoever tells what is
pending asks here, too. A server keeps its message log as long as an outcome of a decision in it is missing.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import BatchKind
from delayd.log.control import Ended, decode_sound
from delayd.log.dispatch import PART, Outcome, OutcomeRows, Reason
from delayd.log.ended import NO_ENDED, EndedRows, decode_ended
from delayd.reading.columns import rows_of_part
from delayd.reading.groups import Group, whole_batch
from delayd.sequences import find


class Decisions(NamedTuple):
    """Ended rows by rising sequence, and for each the offset of the batch that says so."""

    rows: EndedRows
    offsets: NDArray[np.uint64]

    def find(self, sequences: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The place of each of these rows here; -1 for rows of which nothing is decided."""
        found = np.full(len(sequences), -1)
        which, at = find(self.rows["sequence"], sequences)
        found[which] = at
        return found

    def hours(self) -> set[int]:
        """The filing hours of the rows."""
        return set(np.unique(self.rows["hour"]).tolist())

    def of_hour(self, hour: int, part: range | None = None) -> EndedRows:
        """The decided rows of an hour; with a ``part`` of these sequences only."""
        own = self.rows.compress(self.rows["hour"] == hour)
        return own if part is None else own.take(rows_of_part(own["sequence"], part))

    def behind(self, hour: int, outcomes: OutcomeRows, part: range | None = None) -> OutcomeRows:
        """The outcomes of an hour, and behind them those that its dispatch log does not have yet; with a ``part`` of
        these sequences only.
        """
        own = self.of_hour(hour, part)
        own = own.compress(~np.isin(own["sequence"], outcomes.sequences))
        if not len(own):
            return outcomes
        more = as_outcomes(own)
        return OutcomeRows(
            np.concatenate((outcomes.sequences, more.sequences)),
            np.concatenate((outcomes.deliver_at_ms, more.deliver_at_ms)),
            np.concatenate((outcomes.parts, more.parts)),
            np.concatenate((outcomes.part_of, len(outcomes.parts) + more.part_of)),
            np.concatenate((outcomes.content_hash, more.content_hash)),
        )


NO_DECISIONS = Decisions(NO_ENDED, np.empty(0, np.uint64))


class DecisionCollector:
    """Gathers the decisions of a message log, group by group."""

    def __init__(self) -> None:
        self._found: list[tuple[int, EndedRows]] = []

    def take(self, group: Group) -> None:
        """Look at the next group. Raises BatchMalformed when a record of it is none."""
        for offset, batch in group.batches():
            if batch.kind != BatchKind.CONTROL:
                break  # Records stand before the rows of their commit.
            for record in decode_sound(whole_batch(group, offset, batch)):
                if isinstance(record, Ended):
                    self._found.append((offset, decode_ended(record.rows)))

    def decisions(self) -> Decisions:
        """All of them."""
        if not self._found:
            return NO_DECISIONS
        rows = np.concatenate([rows for _, rows in self._found])
        counts = [len(rows) for _, rows in self._found]
        offsets = np.repeat(np.array([offset for offset, _ in self._found], np.uint64), counts)
        order = np.argsort(rows["sequence"], kind="stable")
        return Decisions(rows.take(order), offsets.take(order))


def as_outcomes(rows: EndedRows) -> OutcomeRows:
    """The outcomes that these rows get, each with a part of its own.

    Nobody knows yet which row a drained one is at its taker: its decision names the taker alone.
    """
    parts = np.zeros(len(rows), PART)
    leaves = rows["reason"] == Reason.DRAINED
    parts["target_log_id"] = np.where(leaves, rows["other"], 0)
    parts["batch_id"] = np.where(leaves, 0, rows["other"])
    parts["target_appended_at_ms"] = np.where(leaves, 0, rows["other_at_ms"])
    parts["claimed_at_ms"], parts["reason"] = rows["decided_at_ms"], rows["reason"]
    parts["outcome"], parts["count"], parts["attempt"] = Outcome.CANCELLED, 1, 1
    hashes = np.zeros(len(rows), np.uint64)
    return OutcomeRows(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), parts, np.arange(len(rows)), hashes)
