"""Subject figures: how many messages of each subject there are, by what became of them.

Invariant: the figures of parts, hours and servers merge by adding, whoever counted which. In a sum names are in order,
and none has only zeros; so two audits of the same files have equal figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CLASSES = ("dispatched", "dead", "cancelled", "expired", "in_doubt", "pending", "undecided", "waiting", "missing")
"""What may have become of a scheduled row."""
PARTS = ("moved", "redriven")
"""What is counted of the cancelled rows, and what of these."""
FIGURES = ("scheduled", *CLASSES, *PARTS, "faults", "late")
"""The figures of a subject. ``faults`` counts messages with a finding that unbalances the books, once for each kind."""


@dataclass(frozen=True, slots=True, eq=False)
class SubjectFigures:
    """``counts`` is int64[n, len(FIGURES)], a row for each of the ``names``."""

    names: tuple[str, ...]
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SubjectFigures):
            return NotImplemented
        return self.names == other.names and np.array_equal(self.counts, other.counts)

    def of(self, figure: str) -> NDArray[np.int64]:
        """One of FIGURES, of each subject."""
        found: NDArray[np.int64] = self.counts[:, FIGURES.index(figure)]
        return found


NO_SUBJECTS = SubjectFigures((), np.zeros((0, len(FIGURES)), np.int64))


class SubjectSums:
    """Adds figures up; a name may come more than once, because both sides of a handoff name the subject."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._counts = np.zeros((16, len(FIGURES)), np.int64)

    def add(self, names: Sequence[str], counts: NDArray[np.int64]) -> None:
        """Add some figures: int64[n, len(FIGURES)]."""
        own = np.flatnonzero(counts.any(axis=1))
        at = [self._places.setdefault(names[number], len(self._places)) for number in own.tolist()]
        if len(self._places) > len(self._counts):
            more = np.zeros((2 * len(self._places), len(FIGURES)), np.int64)
            more[: len(self._counts)] = self._counts
            self._counts = more
        if len(set(at)) == len(at):
            self._counts[at] += counts[own]
        else:
            np.add.at(self._counts, at, counts[own])

    def figures(self) -> SubjectFigures:
        """The sums so far."""
        names = sorted(self._places)
        return SubjectFigures(tuple(names), self._counts[np.array([self._places[name] for name in names], np.intp)])
