"""Entries: which row took a name, sorted by the hash of the name; in memory, or as a piece of a file.

Invariant: nothing here is changed after it was made, so any thread may look up in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.batch.content import Bools, Hasher, Names, UInt64s

ROW = np.dtype([("sequence", "<u8"), ("deliver_at_ms", "<i8"), ("hour", "<u4")])
NO_SEQUENCE = 0  # No row has this sequence.

Rows = NDArray[np.void]
Index = NDArray[np.intp]


class Asked(NamedTuple):
    """Names that are looked up, with their hashes."""

    names: Names
    hashes: UInt64s

    def take(self, rows: Int64s | Index) -> Asked:
        """Some of them."""
        return Asked(self.names.take(rows), self.hashes.take(rows))


class Found:
    """The newest entry of each name that was looked up: ``rows`` (ROW[n]), with sequence 0 where there is none."""

    __slots__ = ("rows",)

    def __init__(self, n: int) -> None:
        self.rows: Rows = np.zeros(n, ROW)

    @property
    def known(self) -> Bools:
        """Whether each name has an entry."""
        known: Bools = self.rows["sequence"] != NO_SEQUENCE
        return known

    def take_newer(self, asked: Int64s | Index, rows: Rows) -> None:
        """Note entries of the names ``asked``, each at most once, where they are newer than what was found."""
        newer = rows["sequence"] > self.rows["sequence"].take(asked)
        self.rows[asked[newer]] = rows[newer]


@dataclass(frozen=True, slots=True)
class Entries:
    """Sorted entries: by hash, and the entries of one hash by sequence."""

    hashes: UInt64s
    rows: Rows
    names: Names

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return self.hashes.nbytes + self.rows.nbytes + sum(part.nbytes for part in self.names)

    def take(self, places: Int64s | Index) -> Entries:
        """Some of the entries, in the same order; the words of their names are shared."""
        return Entries(self.hashes.take(places), self.rows.take(places), self.names.take(places))

    def packed(self) -> Entries:
        """The same entries with words of their own."""
        return replace(self, names=self.names.packed())

    def find(self, asked: Asked, found: Found) -> None:
        """Note the newest entry of each name that has one here."""
        places = self.hashes.searchsorted(asked.hashes, "right") - 1
        rows = np.flatnonzero(places >= 0)
        # The newest entry of a hash stands last. Only names that share a hash take a second round.
        while len(rows):
            rows = rows[self.hashes.take(places.take(rows)) == asked.hashes.take(rows)]
            at = places.take(rows)
            same = self.names.take(at).equal(asked.names.take(rows))
            found.take_newer(rows[same], self.rows.take(at[same]))
            rows = rows[~same]
            places[rows] -= 1
            rows = rows[places.take(rows) >= 0]


NO_ENTRIES = Entries(np.empty(0, np.uint64), np.empty(0, ROW), Names.of_lists([], []))


def new_entries(
    hasher: Hasher, names: Names, sequences: UInt64s, deliver_at_ms: Int64s, hours: NDArray[np.uint32]
) -> Entries:
    """Entries of rows by rising sequence; ``names`` are packed."""
    rows = np.empty(len(sequences), ROW)
    rows["sequence"], rows["deliver_at_ms"], rows["hour"] = sequences, deliver_at_ms, hours
    hashes = hasher.hashes(names)
    order = np.argsort(hashes, kind="stable")
    return Entries(hashes.take(order), rows.take(order), names.take(order))


def merge(parts: Sequence[Entries]) -> Entries:
    """The newest entry of each name out of all parts, in any order."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return NO_ENTRIES
    hashes = np.concatenate([part.hashes for part in parts])
    rows = np.concatenate([part.rows for part in parts])
    names = Names.joined([part.names for part in parts])
    # A stable sort of runs that are sorted takes linear time.
    order = np.argsort(hashes, kind="stable")
    hashes = hashes.take(order)
    twins = hashes[1:] == hashes[:-1]
    if twins.any():
        order, kept = _newest(order, twins, rows, names)
        hashes = hashes[kept]
    return Entries(hashes, rows.take(order), names.take(order))


def _newest(order: Index, twins: Bools, rows: Rows, names: Names) -> tuple[Index, Bools]:
    """Sort the entries of each hash by sequence, and leave out those that have a newer one of the same name.

    ``twins`` says of each entry but the last whether the next one has the same hash.
    """
    shared = np.zeros(len(order), np.bool_)
    shared[:-1] |= twins
    shared[1:] |= twins
    places = np.flatnonzero(shared)
    # Entries of one hash have one number.
    group = np.cumsum(np.concatenate(([True], ~twins)))[places]
    sequences = rows["sequence"].take(order.take(places))
    order[places] = order.take(places).take(np.lexsort((sequences, group)))
    kept = np.ones(len(order), np.bool_)
    first = np.flatnonzero(twins)
    same = names.take(order.take(first)).equal(names.take(order.take(first + 1)))
    kept[first[same]] = False
    if not same.all():
        # Two names share a hash: then an older entry of a name need not stand directly before the newer one.
        ends = np.flatnonzero(np.concatenate((group[1:] != group[:-1], [True])))
        starts = np.concatenate(([0], ends[:-1] + 1))
        mixed_groups = set(np.searchsorted(places, first[~same]).tolist())
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if not mixed_groups.isdisjoint(range(start, end + 1)):
                _newest_of_one_hash(order, places[start : end + 1], names, kept)
    return order[kept], kept


def _newest_of_one_hash(order: Index, places: Index, names: Names, kept: Bools) -> None:
    seen: set[tuple[bytes, bytes]] = set()
    for place in reversed(places.tolist()):
        (text,) = names.take(order[place : place + 1]).texts()
        kept[place] = text not in seen
        seen.add(text)
