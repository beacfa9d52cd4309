"""Claimed rows: rows that stay in the wheel though they have ended, and are held back when they fall due (rule C1).

Invariant: a claimed row is never handed out. While nothing is claimed, that costs one look at a flag.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from delayd.delay.rows import Rows, hour_span, join_rows
from delayd.sequences import Pile, Sequences, among


class Claimed:
    """Sequences by filing hour; belongs to the loop."""

    def __init__(self) -> None:
        self._of_hour: dict[int, Pile] = {}
        self.some = False  # Whether a row is claimed: whoever hands rows out asks this first.
        self._open: list[tuple[int, Sequences]] = []  # Claims whose decision is not durable yet.
        self._held_back: list[Rows] = []  # Rows that fell due meanwhile.

    def add(self, hour: int, sequences: Sequences) -> None:
        """Claim rows of an hour; ``sequences`` rise."""
        self.some = True
        self._open.append((hour, sequences))
        self._of_hour.setdefault(hour, Pile()).add(sequences)

    def has(self, hour: int, sequences: Sequences) -> NDArray[np.bool_]:
        """Which of an hour's rows are claimed."""
        return self._of_hour.get(hour, Pile()).has(sequences)

    def without(self, rows: Rows) -> Rows:
        """Rows that fall due, without those that are claimed."""
        if not len(rows):
            return rows
        first, last = hour_span(rows)
        for hour in [hour for hour in self._of_hour if first <= hour <= last]:
            found = self.has(hour, rows["sequence"])
            if first < last:
                found &= rows["hour"] == np.uint32(hour)
            if found.any():
                if self._open:
                    self._held_back.append(rows.take(np.flatnonzero(found)))
                rows = rows.take(np.flatnonzero(~found))
        return rows

    def settle(self) -> None:
        """The decisions are durable."""
        self._open, self._held_back = [], []

    def undo(self) -> Rows | None:
        """The decisions were not stored: forget the claims; returns the rows that fell due meanwhile."""
        undone, self._open = self._open, []
        for hour, sequences in undone:
            self._of_hour[hour].remove(sequences)
        self._of_hour = {hour: pile for hour, pile in self._of_hour.items() if len(pile)}
        self.some = bool(self._of_hour)
        held_back, self._held_back = self._held_back, []
        if not held_back:
            return None
        # Rows that were claimed before stay claimed.
        rows = join_rows(held_back)
        again = np.zeros(len(rows), np.bool_)
        for hour, sequences in undone:
            again |= among(rows["sequence"], sequences) & (rows["hour"] == np.uint32(hour))
        return rows.take(np.flatnonzero(again))

    def forget_but(self, hours: Collection[int]) -> None:
        """Forget hours that have left the wheel, and with it each of their rows."""
        if self.some:
            # Rows of the commit that is under way may come into the wheel with it.
            kept = {*hours, *(hour for hour, _ in self._open)}
            self._of_hour = {hour: pile for hour, pile in self._of_hour.items() if hour in kept}
            self.some = bool(self._of_hour)
