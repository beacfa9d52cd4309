"""Earlier outcomes: what the dispatch logs say of rows that an earlier life of this server handed over (rules H4, L5).

Invariant: a row counts as one that has an outcome when its hour is not known, is sealed, or is quarantined.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from delayd.delay.filing.hour_table import FiledHours, HourTable
from delayd.delay.filing.pending import PendingRows
from delayd.errors import DamagedData
from delayd.sequences import Pile, Sequences


class EarlierOutcomes:
    """Sequences with an outcome, by hour. They are kept while answers about them may come or hours are still to be
    loaded.

    The dispatch logs' outcomes at the start can be all rows of an hour; answers add the rows of one window at most. A
    pile merges the two only when that is cheap, or an hour is loaded: so a batch of an answer costs the same in every
    hour.
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
        self._ended = {hour: Pile(found) for hour, found in decided.items()}
        self._told: list[Sequences] = []  # Rows that the answer being read has named so far.
        self._hours = hours
        self._pending = pending
        self._settle = settle

    def __len__(self) -> int:
        return len(self._ended)

    def of(self, hour: int) -> Sequences:
        """The sequences of one hour, sorted."""
        return self._ended.get(hour, Pile()).in_one()

    def within(self, hours: range) -> dict[int, Sequences]:
        """The sequences of each of these hours that has any."""
        return {hour: pile.in_one() for hour, pile in self._ended.items() if hour in hours}

    def without_outcome(self, hour: int, sequences: Sequences) -> NDArray[np.bool_]:
        """Which rows have no outcome; no row of an hour that is sealed, or deleted and so not known, counts as such
        (rule H4).
        """
        if hour not in self._ended:
            known = hour in self._hours or self._pending.has_hour(hour)
            if not known or self._hours.get(hour).sealed:
                return np.zeros(len(sequences), np.bool_)
        return ~self._ended.get(hour, Pile()).has(sequences)

    def has(self, hours: NDArray[np.uint32], sequences: Sequences) -> NDArray[np.bool_]:
        """Which rows, each of the hour beside it, are known here to have an outcome."""
        found = np.zeros(len(sequences), np.bool_)
        for hour in np.unique(hours).tolist() if self._ended else ():
            if hour in self._ended:
                own = np.flatnonzero(hours == np.uint32(hour))
                found[own] = self._ended[hour].has(sequences.take(own))
        return found

    def claim(self, hour: int, sequences: Sequences) -> None:
        """Note rows of an hour that is not loaded, which a decision ends: the load leaves them out. They rise."""
        self._ended.setdefault(hour, Pile()).add(sequences)

    def unclaim(self, hour: int, sequences: Sequences) -> None:
        """The decision was not stored: the load takes the rows again."""
        self._ended.get(hour, Pile()).remove(sequences)  # The hour may have been forgotten meanwhile.

    def decided(self, hour: int, sequences: Sequences) -> None:
        """Note rows of an earlier epoch that had no outcome and that a target holds: they have one now."""
        sequences = np.sort(sequences)
        self._told.append(sequences)
        self._ended.setdefault(hour, Pile()).add(sequences)

    def learn(self, hour: int, sequences: Sequences) -> None:
        """Take over all outcomes of an hour whose dispatch log was damaged and is whole again, in any order."""
        self._ended.setdefault(hour, Pile()).add(np.sort(sequences, kind="stable"))

    def settle(self) -> None:
        """An answer has ended: drop its rows wherever they wait, in one pass for all of its batches."""
        if self._told:
            self._settle(np.concatenate(self._told))
            self._told = []

    def forget(self, until: int, kept: Collection[int] = ()) -> None:
        """Forget hours up to ``until``, but those ``kept``: no answer about them comes, and nothing of them is loaded
        any more.
        """
        self._ended = {hour: pile for hour, pile in self._ended.items() if hour > until or hour in kept}
