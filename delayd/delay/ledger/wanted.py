"""Wanted rows: the rows of a request, by rising sequence, as they are compared with rows in memory.

Invariant: a row of memory is the wanted one only when sequence, filing hour and due instant are the same. So a receipt
that somebody has made up names no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.batch.sequences import NO_INDICES, Indices, Sequences, SequenceSet, find
from delayd.delay.rows import Rows, due_within, filing_hours
from delayd.delay.subjects import Subjects
from delayd.errors import BadRequest
from delayd.wire.asked import Asked

TABLE_FROM_ROWS = 4_096  # An array of this many rows is worth a table of the wanted ones.
TABLE_ROWS_MIN = 512 << 10  # The table then has up to eight times as many entries, of one byte.


class OfSubject:
    """The subject that all messages of a request must have, and whether one of another subject was found."""

    __slots__ = ("_subjects", "name", "strangers")

    def __init__(self, name: bytes, subjects: Subjects) -> None:
        self.name = name
        self.strangers = False
        self._subjects = subjects

    def keep(self, numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which rows in memory have the subject, by the server's numbers of theirs."""
        # A name that no row in memory has may have no number, and may have got another one since it was asked for.
        own = self._subjects.find(self.name)
        found: NDArray[np.bool_] = numbers == np.uint32(own) if own is not None else np.zeros(len(numbers), np.bool_)
        self.strangers = self.strangers or not bool(found.all())
        return found

    def keep_named(self, names: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which filed rows have the subject."""
        found = np.array([name == self.name for name in names], np.bool_)
        self.strangers = self.strangers or not bool(found.all())
        return found


class Wanted:
    """Columns of rows, each sequence once. With a subject, a row of another one is not the wanted row."""

    __slots__ = ("_set", "deliver_at_ms", "due_ms", "hours", "of_subject", "sequences")

    def __init__(
        self,
        sequences: Sequences,
        deliver_at_ms: Int64s,
        hours: NDArray[np.uint32],
        of_subject: OfSubject | None = None,
    ) -> None:
        self.sequences = sequences  # Rising.
        self.deliver_at_ms = deliver_at_ms
        self.hours = hours  # Filing hours.
        self.due_ms = due_within(deliver_at_ms, hours)
        self.of_subject = of_subject
        self._set: SequenceSet | None = None  # To hold many rows against, in several arrays.

    def __len__(self) -> int:
        return len(self.sequences)

    def take(self, chosen: Indices) -> Wanted:
        """Some of the rows; ``chosen`` rises."""
        columns = (self.sequences.take(chosen), self.deliver_at_ms.take(chosen), self.hours.take(chosen))
        return Wanted(*columns, self.of_subject)

    def of_hour(self, hour: int) -> Indices:
        """Which rows are filed in one hour."""
        return np.flatnonzero(self.hours == np.uint32(hour))

    def are(self, sequences: Sequences) -> NDArray[np.bool_]:
        """Which sequences are those of wanted rows: bool[n], a new array."""
        if len(sequences) < TABLE_FROM_ROWS:
            return SequenceSet(self.sequences, len(sequences)).has(sequences)
        if self._set is None:
            self._set = SequenceSet(self.sequences, TABLE_ROWS_MIN)
        return self._set.has(sequences)

    def find(self, rows: Rows) -> tuple[Indices, Indices]:
        """Which of ``rows`` are wanted, and which wanted row each of these is."""
        if not len(rows) or not len(self):
            return NO_INDICES, NO_INDICES
        sequences = rows["sequence"]
        found = np.flatnonzero(SequenceSet(self.sequences, len(rows)).has(sequences))
        if not len(found):
            return NO_INDICES, NO_INDICES
        places = np.searchsorted(self.sequences, sequences.take(found))
        same = rows["due_ms"].take(found) == self.due_ms.take(places)
        same &= rows["hour"].take(found) == self.hours.take(places)
        return self.own(rows, found.compress(same), places.compress(same))

    def find_rising(self, rows: Rows) -> tuple[Indices, Indices]:
        """The same for rows that rise in sequence: many rows cost little when few are wanted."""
        if not len(rows) or not len(self):
            return NO_INDICES, NO_INDICES
        sequences = rows["sequence"].copy()  # A search in a column between others would copy it too.
        found, at = find(sequences, self.sequences)
        rows_found = rows.take(at)
        same = (rows_found["due_ms"] == self.due_ms.take(found)) & (rows_found["hour"] == self.hours.take(found))
        return self.own(rows, at.compress(same), found.compress(same))

    def own(self, rows: Rows, at: Indices, found: Indices) -> tuple[Indices, Indices]:
        """Of rows that were found ``at`` places, and are the wanted rows ``found``, those of the wanted subject."""
        if self.of_subject is None or not len(at):
            return at, found
        kept = self.of_subject.keep(rows["subject"].take(at))
        return at.compress(kept), found.compress(kept)

    def places_of(self, sequences: Sequences) -> Indices:
        """Which wanted rows have one of these sequences, in any order."""
        found = sequences.compress(SequenceSet(self.sequences, len(sequences)).has(sequences))
        return np.searchsorted(self.sequences, found)


def wanted_of(asked: Asked) -> tuple[Wanted, Indices]:
    """The rows of a request, each once, and for each row of the request its place among them.

    Raises:
        BadRequest: the request names one sequence with different instants.
    """
    wanted, places, made_up = _gather(asked, np.zeros(len(asked.sequences), np.bool_))
    if made_up.any():
        raise BadRequest("it names one sequence with different instants", field="sequence")
    return wanted, places


def wanted_newest(asked: Asked, told: NDArray[np.bool_]) -> tuple[Wanted, Indices]:
    """The same for a request of which this server has followed some rows; ``told`` are those whose instants it has said
    itself.

    So two rows may come together at one sequence, with different instants:

        asked    row 1, due at 5 o'clock     row 2, due at 7 o'clock    a receipt that somebody has made up
        followed row 2, due at 6 o'clock     row 2, due at 7 o'clock    row 1 was moved, and row 2 took its place

    What this server has said is true, so the other row never was: it stands for NO_SEQUENCE, which no row has.
    """
    wanted, places, made_up = _gather(asked, told)
    if not made_up.any():
        return wanted, places
    real = ~made_up
    columns = (np.where(real, column, np.zeros(1, column.dtype)) for column in asked)
    wanted, places, _ = _gather(Asked._make(columns), told)
    return wanted, places


def _gather(asked: Asked, told: NDArray[np.bool_]) -> tuple[Wanted, Indices, NDArray[np.bool_]]:
    """The rows, the place of each row of the request, and which of these say something else than the row that was taken
    for their sequence: of rows that differ the first one that was ``told``, if there is one.
    """
    hours = filing_hours(asked.deliver_at_ms, asked.accepted_at_ms)
    order = np.lexsort((asked.deliver_at_ms, hours, ~told, asked.sequences))
    sequences, due, hours = asked.sequences.take(order), asked.deliver_at_ms.take(order), hours.take(order)
    firsts = np.concatenate((np.ones(1, np.bool_), sequences[1:] != sequences[:-1]))
    places = np.empty(len(order), np.intp)
    numbers = np.cumsum(firsts) - 1
    places[order] = numbers
    wanted = Wanted(sequences.compress(firsts), due.compress(firsts), hours.compress(firsts))
    made_up = np.empty(len(order), np.bool_)
    made_up[order] = (due != wanted.deliver_at_ms.take(numbers)) | (hours != wanted.hours.take(numbers))
    return wanted, places, made_up
