"""Earlier outcomes: what the dispatch logs say of rows that an earlier life of this server handed over (rules H4, L5).

Invariant: a row counts as one that has an outcome when its hour is not known, is sealed, or is quarantined.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from delayd.delay.filing.hour_table import FiledHours, HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.errors import DamagedData
from delayd.sequences import NO_SEQUENCES, Sequences, among


class EarlierOutcomes:
    """Sequences with an outcome, sorted, by hour. They are kept while answers about them may come or hours are still to
    be loaded.

    The dispatch logs' outcomes at the start can be all rows of an hour; answers add the rows of one window at most. The
    two are merged only when an hour is loaded, so a batch of an answer costs the same in every hour.
    """

    def __init__(
        self,
        decided: dict[int, Sequences],
        quarantined: Mapping[int, DamagedData],
        hours: HourTable | FiledHours,
        pending: PendingRows,
        settle: Callable[[Sequences], None],
    ) -> None:
        self.quarantined = quarantined
        self._decided = decided
        self._answered: dict[int, list[Sequences]] = {}  # Each array is more than twice as long as the next.
        self._told: list[Sequences] = []  # Rows that the answer being read has named so far.
        self._hours = hours
        self._pending = pending
        self._settle = settle

    def __len__(self) -> int:
        return len(self._decided) + len(self._answered)

    def of(self, hour: int) -> Sequences:
        """The sequences of one hour."""
        answered = self._answered.pop(hour, None)
        if answered is not None:
            self._decided[hour] = np.sort(
                np.concatenate((self._decided.get(hour, NO_SEQUENCES), *answered)), kind="stable"
            )
        return self._decided.get(hour, NO_SEQUENCES)

    def within(self, hours: range) -> dict[int, Sequences]:
        """The sequences of each of these hours that has any."""
        return {hour: self.of(hour) for hour in {*self._decided, *self._answered} if hour in hours}

    def without_outcome(self, hour: int, sequences: Sequences) -> NDArray[np.bool_]:
        """Which rows have no outcome; no row of an hour that is sealed, or deleted and so not known, counts as such
        (rule H4).
        """
        if hour not in self._decided and hour not in self._answered:
            known = hour in self._hours or self._pending.has_hour(hour)
            if not known or self._hours.get(hour).sealed:
                return np.zeros(len(sequences), np.bool_)
        has_outcome = among(sequences, self._decided.get(hour, NO_SEQUENCES))
        for answered in self._answered.get(hour, ()):
            has_outcome |= among(sequences, answered)
        return ~has_outcome

    def has(self, hours: NDArray[np.uint32], sequences: Sequences) -> NDArray[np.bool_]:
        """Which rows, each of the hour beside it, are known here to have an outcome."""
        found = np.zeros(len(sequences), np.bool_)
        for hour in np.unique(hours).tolist() if self._decided or self._answered else ():
            parts = self._answered.get(hour, [])
            decided = self._decided.get(hour)
            if decided is not None:
                parts = [*parts, decided]
            if parts:
                own = np.flatnonzero(hours == np.uint32(hour))
                for part in parts:
                    found[own] |= among(sequences.take(own), part)
        return found

    def claim(self, hour: int, sequences: Sequences) -> None:
        """Note rows of an hour that is not loaded, which a decision ends: the load leaves them out."""
        self._note(hour, sequences)

    def unclaim(self, hour: int, sequences: Sequences) -> None:
        """The decision was not stored: the load takes the rows again."""
        decided = self.of(hour)
        self._decided[hour] = decided.compress(~among(decided, sequences))

    def decided(self, hour: int, sequences: Sequences) -> None:
        """Note rows of an earlier epoch that had no outcome and that a target holds: they have one now."""
        sequences = np.sort(sequences)
        self._told.append(sequences)
        self._note(hour, sequences)

    def _note(self, hour: int, sequences: Sequences) -> None:
        """Take in sequences that rise."""
        answered = self._answered.setdefault(hour, [])
        # Arrays of about the same length are merged, so that each sequence is moved only a few times however many
        # batches come.
        while answered and len(answered[-1]) <= 2 * len(sequences):
            sequences = _merged(answered.pop(), sequences)
        answered.append(sequences)

    def learn(self, hour: int, sequences: Sequences) -> None:
        """Take over all outcomes of an hour whose dispatch log was damaged and is whole again, in any order."""
        self._decided[hour] = np.sort(np.concatenate((self.of(hour), sequences)), kind="stable")

    def settle(self) -> None:
        """An answer has ended: drop its rows wherever they wait, in one pass for all of its batches."""
        if self._told:
            self._settle(np.concatenate(self._told))
            self._told = []

    def forget(self, until: int, kept: Collection[int] = ()) -> None:
        """Forget hours up to ``until``, but those ``kept``: no answer about them comes, and nothing of them is loaded
        any more.
        """
        self._decided = {hour: found for hour, found in self._decided.items() if hour > until or hour in kept}
        self._answered = {hour: found for hour, found in self._answered.items() if hour > until or hour in kept}


def _merged(*parts: Sequences) -> Sequences:
    # The parts share no sequence. numpy's union costs a hundred times as much as this sort, which finds runs that are
    # sorted.
    return np.sort(np.concatenate(parts), kind="stable")
