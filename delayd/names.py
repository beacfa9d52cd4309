"""Names: subjects and keys of many rows as arrays, so that they are hashed, compared and copied without a loop.

The name of a row is its subject, filled up with zeros to whole words, then its key, filled up likewise. A name is never
compared by its hash alone (rule C3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import Batch, ColumnId, Int64s
from delayd.content import Factors, Region, UInt64s, mixed
from delayd.gather import copy_words

Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]

LENGTHS_SEED = 0x5851F42D4C957F2D  # Another factor than those of the words, for the two lengths of a name.
WORD_SHIFT = 3


class Hasher:
    """Hashes names with factors that nobody outside knows: else a caller could make many keys of one hash, and each
    look-up would have to read all of them (rule B2).
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._factors = Factors(seed)
        self._of_lengths = np.uint64(Factors(seed ^ LENGTHS_SEED).of_length)

    def hashes(self, names: Names) -> UInt64s:
        """The hash of each name: uint64[n]; the names lie one behind the other, as `Names.packed` has them."""
        counts = names.counts()
        if not len(counts):
            return np.empty(0, np.uint64)
        values = Region(names.words, counts << WORD_SHIFT).values(factors=self._factors)
        lengths = names.subject_bytes.astype(np.uint64) << np.uint64(8) | names.key_bytes
        values += lengths * self._of_lengths
        return mixed(values)


class Names(NamedTuple):
    """Names of n rows: name i begins at word ``first[i]`` of ``words``."""

    words: UInt64s
    first: Int64s
    subject_bytes: Bytes
    key_bytes: Bytes

    @classmethod
    def of_lists(cls, subjects: Sequence[bytes], keys: Sequence[bytes]) -> Names:
        """The names of rows that are told one by one: subjects of 1 to 255 bytes, keys of 1 to 255."""
        parts = [part for name in zip(subjects, keys, strict=True) for part in name]
        words = np.frombuffer(b"".join([part + bytes(-len(part) & 7) for part in parts]), np.uint64)
        return cls._behind(words, _lengths(subjects), _lengths(keys))

    @classmethod
    def of_batch(cls, batch: Batch, rows: Int64s) -> Names:
        """The names of some rows of a verified batch, each of which has a key."""
        starts, ends = batch.region(ColumnId.KEY_END)
        starts, key_bytes = starts.take(rows), (ends - starts).take(rows)
        heap = np.frombuffer(batch.buffer, np.uint64, (batch.total_bytes - batch.heap_offset) >> 3, batch.heap_offset)
        names = batch.subjects()
        if ColumnId.SUBJECT in batch:
            used, of_row = np.unique(batch.uint32s(ColumnId.SUBJECT).take(rows), return_inverse=True)
            names = [names[number] for number in used.tolist()]
        else:
            of_row = np.zeros(len(rows), np.int64)
        table = np.frombuffer(b"".join([name + bytes(-len(name) & 7) for name in names]), np.uint64)
        bytes_of = np.fromiter(map(len, names), np.int64, len(names))
        words_of = (bytes_of + 7) >> 3
        first_of = np.cumsum(words_of) - words_of
        # Subject and key of each row in turn, out of the table of subjects with the heap behind it.
        first = np.empty(2 * len(rows), np.int64)
        first[0::2] = first_of.take(of_row)
        first[1::2] = (starts >> 3) + len(table)
        count = np.empty_like(first)
        count[0::2] = words_of.take(of_row)
        count[1::2] = (key_bytes + 7) >> 3
        words = copy_words(np.concatenate((table, heap)), first, count) if len(rows) else np.empty(0, np.uint64)
        subject_bytes = bytes_of.take(of_row)
        return cls._behind(words, subject_bytes.astype(np.uint8), key_bytes.astype(np.uint8))

    @classmethod
    def _behind(cls, words: UInt64s, subject_bytes: Bytes, key_bytes: Bytes) -> Names:
        """Names that lie one behind the other."""
        counts = word_counts(subject_bytes, key_bytes)
        return cls(words, np.cumsum(counts) - counts, subject_bytes, key_bytes)

    @classmethod
    def joined(cls, parts: Sequence[Names]) -> Names:
        """The names of all parts, one part behind the other."""
        if len(parts) == 1:
            return parts[0]
        sizes = np.cumsum([0, *(len(part.words) for part in parts)])
        return cls(
            np.concatenate([part.words for part in parts]),
            np.concatenate([part.first + int(size) for part, size in zip(parts, sizes, strict=False)]),
            np.concatenate([part.subject_bytes for part in parts]),
            np.concatenate([part.key_bytes for part in parts]),
        )

    @property
    def n(self) -> int:
        """How many names these are."""
        return len(self.first)

    def counts(self) -> Int64s:
        """How many words each name has."""
        return word_counts(self.subject_bytes, self.key_bytes)

    def take(self, rows: Int64s) -> Names:
        """Some of the names, in any order; the words are shared."""
        return Names(self.words, self.first.take(rows), self.subject_bytes.take(rows), self.key_bytes.take(rows))

    def packed(self) -> Names:
        """The same names one behind the other in words of their own."""
        words = copy_words(self.words, self.first, self.counts()) if self.n else np.empty(0, np.uint64)
        return Names._behind(words, self.subject_bytes, self.key_bytes)

    def equal(self, other: Names) -> Bools:
        """Whether name i is name i of ``other``: compared whole."""
        same: Bools = (self.subject_bytes == other.subject_bytes) & (self.key_bytes == other.key_bytes)
        rows = np.flatnonzero(same)
        if len(rows):
            counts = self.counts().take(rows)
            starts = np.cumsum(counts) - counts
            places = np.arange(int(counts.sum()))
            mine = self.words.take(places + np.repeat(self.first.take(rows) - starts, counts))
            theirs = other.words.take(places + np.repeat(other.first.take(rows) - starts, counts))
            same[rows] = np.logical_and.reduceat(mine == theirs, starts)
        return same

    def texts(self) -> list[tuple[bytes, bytes]]:
        """Subject and key of each name."""
        texts = []
        for first, subject_bytes, key_bytes in zip(
            self.first.tolist(), self.subject_bytes.tolist(), self.key_bytes.tolist(), strict=True
        ):
            key = first + (subject_bytes + 7 >> WORD_SHIFT)
            data = self.words[first : key + (key_bytes + 7 >> WORD_SHIFT)].tobytes()
            begin = (key - first) << WORD_SHIFT
            texts.append((data[:subject_bytes], data[begin : begin + key_bytes]))
        return texts


SLOTS_HASHER = Hasher(0)
SLOT_SHIFT = np.uint64(54)  # The top ten bits: one of 1,024 slots.


def slots_of_names(names: Names) -> NDArray[np.uint16]:
    """The slot of each name (docs/keys.md, Owners): uint16[n]; the names are packed."""
    return (SLOTS_HASHER.hashes(names) >> SLOT_SHIFT).astype(np.uint16)


def word_counts(subject_bytes: Bytes, key_bytes: Bytes) -> Int64s:
    """How many words names of these lengths have: int64[n]."""
    counts = (subject_bytes.astype(np.int64) + 7) >> WORD_SHIFT
    counts += (key_bytes.astype(np.int64) + 7) >> WORD_SHIFT
    return counts


def _lengths(parts: Sequence[bytes]) -> Bytes:
    return np.fromiter(map(len, parts), np.uint8, len(parts))
