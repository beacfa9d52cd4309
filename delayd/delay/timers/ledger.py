"""Ledger: which rows have ended, and the gate that every row passes before it may be delivered (rules C1, P7, S1).

Invariant: a row that has ended passes no gate, whatever happens to its hour meanwhile. Rows pass a gate twice: when
they enter the wheel (a load, or an hour that was mended), and when they leave it, before a frame is made of them.

A row ends in one of three ways, and each is noted here by the row's filing hour:

    a dispatch log names it                a start, or mending, tells the ledger what the file says
    a target's window names it             `EarlierOutcomes.decided`: an earlier life had handed it over
    a decision of this life ends it        `end`: the decision is not durable yet, and may be undone

An example. Hour H is being mended, and a worker reads its files. A row of H arrives and is REJECTED at once: `end`
notes it, though H is not in the wheel. When the read is done, the row stands among those that are to enter the wheel.
`may_enter` leaves it out. If the commit of that decision is still under way, the row enters; then `may_leave` holds it
back, and an undo gives it back.

A note about an hour is forgotten when no row of the hour can pass a gate any more: the hour was loaded, has left the
wheel, and is not set aside.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from delayd.delay.rows import Rows, without
from delayd.delay.timers.claimed import Claimed
from delayd.delay.timers.earlier import EarlierOutcomes
from delayd.sequences import NO_SEQUENCES, Sequences, among


class Ledger:
    """The rows that have ended; belongs to the loop."""

    def __init__(self, earlier: EarlierOutcomes) -> None:
        self._earlier = earlier
        self._claimed = Claimed()
        self._settled = NO_SEQUENCES  # Rows that windows have named, in any hour; sorted.
        self._open: list[tuple[int, Sequences]] = []  # What the commit that is under way has ended.

    @property
    def settled(self) -> Sequences:
        """The rows that answers of targets have named, sorted."""
        return self._settled

    @property
    def open_hours(self) -> set[int]:
        """Hours of rows that the commit under way has ended."""
        return {hour for hour, _ in self._open}

    def end(self, hour: int, sequences: Sequences) -> None:
        """Note rows of an hour that the commit under way ends; ``sequences`` rise."""
        self._claimed.add(hour, sequences)
        self._earlier.claim(hour, sequences)
        self._open.append((hour, sequences))

    def settle(self, sequences: Sequences) -> None:
        """Note rows of any hours that a target has, so that those in the wheel don't leave."""
        self._settled = np.sort(np.concatenate((self._settled, sequences)), kind="stable")

    def committed(self) -> None:
        """What the commit has ended is durable."""
        self._claimed.settle()
        self._open = []

    def undo(self) -> Rows | None:
        """The commit was not stored: its rows are pending again. Returns those that a gate has held back meanwhile."""
        undone, self._open = self._open, []
        for hour, sequences in undone:
            self._earlier.unclaim(hour, sequences)
        return self._claimed.undo()

    def have_ended(self, hours: NDArray[np.uint32], sequences: Sequences) -> NDArray[np.bool_]:
        """Which rows, each of the hour beside it, are known here to have ended."""
        found = self._earlier.has(hours, sequences)
        if self._claimed.some:
            for hour in np.unique(hours).tolist():
                own = np.flatnonzero(hours == np.uint32(hour))
                found[own] |= self._claimed.has(hour, sequences.take(own))
        return found

    def are_settled(self, sequences: Sequences) -> NDArray[np.bool_]:
        """Which rows a target has, by its window, though they may still stand in the wheel."""
        return among(sequences, self._settled)

    def may_enter(self, rows: Rows) -> Rows:
        """Those of some rows that may enter the wheel."""
        if not len(rows):
            return rows
        sequences, hours = rows["sequence"].copy(), rows["hour"].copy()
        ended = self.have_ended(hours, sequences)
        for hour, under_way in self._open:
            # They enter, and are held back when they fall due: an undo finds them there.
            ended &= ~(among(sequences, under_way) & (hours == np.uint32(hour)))
        return rows.take(np.flatnonzero(~ended)) if ended.any() else rows

    def may_leave(self, rows: Rows) -> Rows:
        """Those of some due rows that may be handed over. While nothing has ended, this costs two looks at flags."""
        if len(self._settled):
            rows = without(rows, self._settled)
        return self._claimed.without(rows) if self._claimed.some else rows

    def forget(
        self, loaded_until: int, in_wheel: Collection[int], set_aside: Collection[int], *, answers_may_come: bool
    ) -> None:
        """Forget hours up to ``loaded_until``, but those ``set_aside``, whose rows may enter the wheel again.

        Of hours ``in_wheel`` only the rows that may stand there are kept. ``answers_may_come``: targets may still name
        rows of earlier lives, which are compared with what is known.
        """
        self._claimed.forget_but({*in_wheel, *set_aside})
        if not answers_may_come:
            self._earlier.forget(loaded_until, set_aside)
