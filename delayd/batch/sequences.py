"""Sequences: sorted arrays of u64 in which rows are found by their sequences, and sets of sequences that grow.

A set that grows is held in a few parts. Invariant: each part rises, and is more than twice as long as the next one. So
a million sequences stand in 20 parts at most, and no sequence is moved often, however many additions there are. An
example, with the lengths of the parts:

    parts       added    parts then    why
    none        40       40
    40          12       40 12         40 is more than twice 12
    40 12       10       62            12 is not more than twice 10, nor is 40 more than twice 22: one merge of all
    62          10       62 10

Whenever a sequence is moved, its part becomes half as long again at least: 1, 1.5, 2.25 and so on, so it is moved 35
times at most while its part grows to a million.

A *location* says where a row of a log lies, as one u64, in memory and in the entries of consume logs. Invariant: the
three parts fill the u64, and locations of one log compare as the bytes that they name. Locations in the message log are
lower than all in schedule logs, so the lowest of many locations is the first byte of the message log that is still
needed, if any byte is (rule P6).

    bit 63       0 = message log, 1 = the schedule log of the row's hour
    bits 62..16  offset of the batch in that log, bytes
    bits 15..0   number of the row in its batch

An example: row 3 of the batch at byte 4,096 of the message log has the location 4,096 << 16 | 3 = 268,435,459; in the
schedule log of its hour it has that with bit 63 added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

Sequences = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]
NO_SEQUENCES: Final[Sequences] = np.empty(0, np.uint64)
NO_INDICES: Final[Indices] = np.empty(0, np.intp)
TABLE_ROWS = 8  # A look-up table may have this many entries a row; then it is as large as one u64 column.
PART_ROWS_MAX = 1 << 62  # More than any part has: no bound.

P = TypeVar("P", bound=Sized)


def among(sequences: Sequences, known: Sequences) -> npt.NDArray[np.bool_]:
    """Tell which sequences are among those ``known``, which are sorted."""
    return SequenceSet(known, len(sequences)).has(sequences)


def find(known: Sequences, wanted: Sequences) -> tuple[Indices, Indices]:
    """Which of the ``wanted`` sequences are among those ``known``, which are sorted, and the first place of each."""
    if not len(known):
        return NO_INDICES, NO_INDICES
    at = known.searchsorted(wanted)
    at[at == len(known)] = 0
    found = known.take(at) == wanted
    return found.nonzero()[0], at.compress(found)


def find_each(known: Sequences, wanted: Sequences) -> Iterator[tuple[Indices, Indices]]:
    """The same where a sequence may be known several times: first the first place of each, then the second, and so
    on.
    """
    which, at = find(known, wanted)
    while len(which):
        yield which, at
        before, at = at, at + 1
        again = (known.take(at, mode="clip") == known.take(before)) & (at < len(known))
        which, at = which.compress(again), at.compress(again)


def add_part(parts: list[P], part: P, merge: Callable[[Sequence[P]], P], rows_max: int = PART_ROWS_MAX) -> None:
    """Add a part to ``parts``, of which each is more than twice as long as the next.

    ``merge`` makes one of several, the oldest first. It is not asked for more than ``rows_max`` rows, where the loop
    must not be held for long; then there are more parts. Another thread that copies the list meanwhile misses nothing.
    """
    first, rows = len(parts), len(part)
    while first and len(parts[first - 1]) <= min(2 * rows, rows_max - rows):
        first -= 1
        rows += len(parts[first])
    parts[first:] = [merge([*parts[first:], part]) if first < len(parts) else part]


class Pile:
    """Sequences that come in many pieces, each of which rises."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: Sequences) -> None:
        self._parts = list(parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, sequences: Sequences) -> None:
        """Take sequences that rise; nobody writes into the array any more."""
        add_part(self._parts, sequences, _merged)

    def remove(self, sequences: Sequences) -> None:
        """Leave out sequences, which are sorted, as often as they are here."""
        left = [part.compress(~among(part, sequences)) for part in self._parts]
        self._parts = [part for part in left if len(part)]

    def has(self, sequences: Sequences) -> npt.NDArray[np.bool_]:
        """Which sequences are here: bool[n], a new array."""
        found = np.zeros(len(sequences), np.bool_)
        for part in self._parts:
            found |= among(sequences, part)
        return found

    def in_one(self) -> Sequences:
        """All of them in one array, by rising sequence, which is kept in place of the parts."""
        if len(self._parts) != 1:
            self._parts = [_merged([NO_SEQUENCES, *self._parts])]
        return self._parts[0]


class SequenceSet:
    """Sorted sequences, against which rows are held that come in several pieces.

    Mostly the sequences of an hour lie close together. Then a table says of each number between the lowest and the
    highest whether it is one of them, and to look into the table takes a tenth of a search.
    """

    __slots__ = ("_before", "_sorted", "_table")

    def __init__(self, sequences: Sequences, rows: int) -> None:
        """``rows`` is how many rows will be looked up in all: it bounds the table."""
        self._sorted = sequences
        self._table: npt.NDArray[np.bool_] | None = None
        if not len(sequences):
            return
        self._before = sequences[:1] - np.uint64(1)  # Wraps around below 0, as the differences to it do.
        span = int(sequences[-1] - sequences[0]) + 1
        if span <= TABLE_ROWS * rows:
            # The first and the last entry answer for whatever is below or above all sequences.
            self._table = np.zeros(span + 2, np.bool_)
            self._table[(sequences - self._before).view(np.int64)] = True

    def has(self, sequences: Sequences) -> npt.NDArray[np.bool_]:
        """Which sequences are among these: bool[n], a new array."""
        found: npt.NDArray[np.bool_]
        if not len(self._sorted):
            return np.zeros(len(sequences), np.bool_)
        if self._table is not None:
            # A number far below wraps around to a huge difference, or to a negative one: both are clipped to an end.
            found = self._table.take((sequences - self._before).view(np.int64), mode="clip")
            return found
        places = np.searchsorted(self._sorted, sequences)
        places[places == len(self._sorted)] = 0
        found = self._sorted.take(places) == sequences
        return found

    def without(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Rows whose column ``sequence`` is not among these: the given ones when none is."""
        if not len(self._sorted):
            return rows
        found = self.has(rows["sequence"])
        return rows.take(np.flatnonzero(~found)) if found.any() else rows


def _merged(parts: Sequence[Sequences]) -> Sequences:
    # This sort finds the runs that are sorted already. numpy's union costs a hundred times as much.
    return np.sort(np.concatenate(parts), kind="stable")


ROW_BITS = 16  # A batch has at most 65,536 rows.
ROW_MASK = (1 << ROW_BITS) - 1
OFFSET_BITS = 47  # 140 TB of one log.
OFFSET_MAX = (1 << OFFSET_BITS) - 1
SCHEDULE_BIT = 1 << (OFFSET_BITS + ROW_BITS)
assert SCHEDULE_BIT == 1 << 63, "the three parts of a location fill a u64"

Locations = npt.NDArray[np.uint64]


def pack_locations(
    in_schedule_log: bool, batch_offset: int | npt.NDArray[np.uint64], batch_row: npt.NDArray[np.unsignedinteger]
) -> Locations:
    """Locations of rows of one kind of log: u64[n]; one offset for all rows, or one for each."""
    offsets = np.asarray(batch_offset, np.uint64)
    assert not offsets.size or int(offsets.max()) <= OFFSET_MAX, "a batch lies within the first 140 TB"
    assert not len(batch_row) or int(batch_row.max()) >> ROW_BITS == 0, "a batch has at most 65,536 rows"
    base = offsets << np.uint64(ROW_BITS)
    if in_schedule_log:
        base = base | np.uint64(SCHEDULE_BIT)
    return base | batch_row.astype(np.uint64)


def locate(location: int) -> tuple[bool, int, int]:
    """Split a location: whether the row is in its hour's schedule log or in the message log, its batch's offset, its
    number there.
    """
    return location >= SCHEDULE_BIT, location >> ROW_BITS & OFFSET_MAX, location & ROW_MASK


def are_filed(locations: Locations) -> npt.NDArray[np.bool_]:
    """Which rows rest in a schedule log: bool[n]."""
    return locations >= np.uint64(SCHEDULE_BIT)


def message_log_offset(location: int) -> int | None:
    """Offset in the message log of the batch that a location names, None when it names a schedule log."""
    return None if location >= SCHEDULE_BIT else location >> ROW_BITS
