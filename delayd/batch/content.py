"""Content hash: 64 bits over a message's subject, headers and body (docs/formats/content.md, version 1; rule S6).

A batch is hashed in a few numpy calls, because no work here may be done for each message. The items of a region are
whole words one behind the other, so the halves of words of items of one size are a matrix, and their values are one
matrix product.

`Names` does the same for subjects and keys of many rows: they are hashed, compared and copied without a loop. The name
of a row is its subject, filled up with zeros to whole words, then its key, filled up likewise. A name is never compared
by its hash alone (rule C3).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import FEW_ROWS, Buffer, ColumnId, Int64s

UInt64s = NDArray[np.uint64]

NOT_STATED = 0  # No hash has this value: a row with it states nothing about its content.
HASHED_REGIONS = (ColumnId.HEADERS_END, ColumnId.BODY_END)  # Beside the subject the hash covers their items.
WORD_BYTES = 8
HALVES = np.dtype("<u4")  # Factors are multiplied with halves of words, so that no product overflows.
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FACTOR = 0xD6E8FEB86659FD93
_HALF = np.uint64(32)
_FACTOR_WORD = np.uint64(_FACTOR)
_ONE = np.uint64(1)
_SUBJECTS_REMEMBERED = 65_536  # 255 bytes each at most: 20 MB.
FEW_SUBJECTS = 32  # Most of so few subjects are remembered; more of them are hashed together.
PIECE_ROWS = 8_000  # The index of a piece stays in the cache.
FEW_BARE = 4  # Up to this many messages are hashed one by one, as fast as with the array calls for all of them.
EVENED_MOST = 4  # Few items are padded to equal length, unless that makes them this many times as long altogether.
PIECE_WORDS = 128 << 10  # Words hashed in one go: 1 MiB stays in the processor's cache between the calls.
RAGGED_WORDS = 32 << 10  # The same for items of different sizes, which need arrays of twice the size of their words.


def content_hash(subject: bytes, headers: Buffer, body: Buffer) -> int:
    """Hash one message, without numpy."""
    return _mix(subject_state(subject) + _value(headers) & _MASK) + _value(body) & _MASK or 1


def hash_items(states: int | UInt64s, headers: Region | None, bodies: Region) -> UInt64s:
    """Hash the rows of a batch: uint64[n], a new array.

    ``states`` is the `subject_state` of all rows, or an array with the state of each row. ``headers`` is None when no
    row has any.
    """
    if headers is not None:
        hashes = bodies.values()
        hashes += mixed(headers.values(states) if isinstance(states, int) else headers.values() + states)
    elif isinstance(states, int):
        hashes = bodies.values(_bare_state(states))
    else:
        hashes = bodies.values()
        hashes += mixed(states.copy())
    return np.maximum(hashes, _ONE, out=hashes)


def states_of(names: Region) -> UInt64s:
    """`subject_state` of subjects whose names lie one behind the other: uint64[n]."""
    return mixed(names.values())


def hash_bare(subject: bytes, body: Buffer, length: int) -> int:
    """Hash one message without headers, at half the cost of `hash_items`; ``body`` is whole words."""
    halves = np.frombuffer(body, HALVES)
    products = int(halves @ _FACTORS.of_halves(len(halves))) if length else 0
    return _bare_state(subject_state(subject)) + length * _KEY_0 + products & _MASK or 1


def hash_bares(subjects: Sequence[bytes], bodies: Sequence[Buffer], lengths: Sequence[int]) -> list[int]:
    """`hash_bare` for several messages, whose bodies are copied to be hashed together: from ten on below 1 us each."""
    if len(subjects) < FEW_BARE:
        return [hash_bare(*each) for each in zip(subjects, bodies, lengths, strict=True)]
    hashes = Region(np.frombuffer(b"".join(bodies), np.uint64), np.array(lengths, np.int64)).values()
    hashes += np.array([_bare_state(subject_state(subject)) for subject in subjects], np.uint64)
    made: list[int] = np.maximum(hashes, _ONE, out=hashes).tolist()
    return made


def hash_rows(batch: Batch) -> UInt64s:
    """Hash each row of a batch, uint64[n], from its heap, which `Batch.verify` and `delayd.batch.validate` must have
    verified.
    """
    states: int | UInt64s
    names = batch.subjects()
    if ColumnId.SUBJECT in batch:
        states = subject_states(names).take(batch.uint32s(ColumnId.SUBJECT))
    else:
        states = subject_state(names[0])
    headers = region_of(batch, ColumnId.HEADERS_END) if ColumnId.HEADERS_END in batch else None
    return hash_items(states, headers, region_of(batch, ColumnId.BODY_END))


def differing_row(batch: Batch) -> int | None:
    """The first row of a SCHEDULE or DISPATCH batch whose bytes don't give its stated hash; None when all do.

    Rows that state no hash, or whose body is left out, are not checked. The batch must have been verified before.
    """
    if ColumnId.CONTENT_HASH not in batch:
        return None
    stated = batch.uint64s(ColumnId.CONTENT_HASH)
    differs = (stated != hash_rows(batch)) & (stated != NOT_STATED)
    if ColumnId.BODY_LEFT_OUT in batch:
        differs &= batch.uint32s(ColumnId.BODY_LEFT_OUT) == 0
    return int(differs.argmax()) if differs.any() else None


def region_of(batch: Batch, column: ColumnId) -> Region:
    """The items of one region of a batch's heap, as views of it."""
    starts, ends = batch.region(column)
    first, last = int(starts[0]), int(ends[-1])
    words = np.frombuffer(batch.buffer, np.uint64, (last - first + 7) >> 3, batch.heap_offset + first)
    ends -= starts
    return Region(words, ends)


@lru_cache(maxsize=_SUBJECTS_REMEMBERED)
def _bare_state(state: int) -> int:
    """The state of a subject after empty headers."""
    return _mix(state)


class Tally(NamedTuple):
    """Sums over rows, by which they are compared without being there; those of disjoint rows add up."""

    rows: int = 0
    first: int = 0
    second: int = 0

    def __add__(self, other: object) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        return Tally(self.rows + other.rows, self.first + other.first & _MASK, self.second + other.second & _MASK)

    @property
    def digest(self) -> str:
        """The two sums as people compare them."""
        return f"{self.first:016x}{self.second:016x}"


def tally(sequences: UInt64s, deliver_at_ms: Int64s, hashes: UInt64s) -> Tally:
    """The tally of rows, in any order."""
    sums = [0, 0]
    # Pieces stay in the processor's cache between the calls.
    for low in range(0, len(sequences), PIECE_WORDS):
        piece = slice(low, low + PIECE_WORDS)
        for lane in (0, 1):
            states = mixed(sequences[piece] + np.uint64(_mix(lane + 1)))
            states += deliver_at_ms[piece].view(np.uint64)
            states = mixed(states)
            states += hashes[piece]
            sums[lane] += int(mixed(states).sum(dtype=np.uint64))
    return Tally(len(sequences), sums[0] & _MASK, sums[1] & _MASK)


def copy_words(words: NDArray[np.uint64], first: Int64s, count: Int64s) -> NDArray[np.uint64]:
    """Copy runs of words, each ``count`` long from ``first`` on, behind one another: a new array."""
    until = np.cumsum(count)
    copied = np.empty(int(until[-1]), np.uint64)
    for at in range(0, len(first), PIECE_ROWS):
        begin, size, end = first[at : at + PIECE_ROWS], count[at : at + PIECE_ROWS], until[at : at + PIECE_ROWS]
        low = int(end[0] - size[0])
        index = np.arange(low, int(end[-1]))
        index += np.repeat(begin - (end - size), size)
        words.take(index, out=copied[low : low + len(index)], mode="clip")
    return copied


def subject_states(names: Sequence[bytes]) -> UInt64s:
    """`subject_state` of several names: uint64[n]."""
    if len(names) <= FEW_SUBJECTS:
        return np.array([subject_state(name) for name in names], np.uint64)
    padded = b"".join([name + bytes(-len(name) % WORD_BYTES) for name in names])
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    return states_of(Region(np.frombuffer(padded, np.uint64), lengths))


@lru_cache(maxsize=_SUBJECTS_REMEMBERED)
def subject_state(name: bytes) -> int:
    """The state of the hash after the subject; it goes on with headers, then body."""
    return _mix(_value(name))


class Region:
    """Items of rows, one behind the other: ``words`` holds all of them, each rounded up to whole words with zeros.

    ``lengths`` are exact, in bytes: int64[n], n at least 1. Together the items use all words.
    """

    __slots__ = ("_lengths", "_words")

    def __init__(self, words: UInt64s, lengths: Int64s) -> None:
        self._words = words
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Int64s:
        """The exact length of each item in bytes: int64[n], not to be changed."""
        return self._lengths

    @property
    def words(self) -> UInt64s:
        """The words of all items."""
        return self._words

    @property
    def word_count(self) -> int:
        """How many words all items have."""
        return len(self._words)

    def values(self, state: int = 0, factors: Factors | None = None) -> UInt64s:
        """The value of each item, as the page defines it, added to ``state``: uint64[n], a new array.

        ``factors`` are other ones than those of the page, for hashes that nobody outside may compute.
        """
        factors = factors or _FACTORS
        lengths, words, count = self._lengths, self._words, len(self._lengths)
        if count <= FEW_ROWS:
            exact = lengths.tolist()
            shortest, longest = min(exact), max(exact)
        else:
            exact = []
            shortest, longest = int(lengths.min()), int(lengths.max())
        size = (longest + 7) >> 3
        values: UInt64s
        if exact and size * count != len(words) and size * count <= EVENED_MOST * len(words):
            words = _evened(words, exact, size)
        if size * count == len(words):
            values = np.einsum("ij,j->i", words.view(HALVES).reshape(count, 2 * size), factors.of_halves(2 * size))
        else:
            values = self._ragged(factors)
        if shortest == longest:
            values += np.uint64(state + longest * factors.of_length & _MASK)
        else:
            values += lengths.view(np.uint64) * np.uint64(factors.of_length)
            values += np.uint64(state)
        return values

    def _ragged(self, factors: Factors) -> UInt64s:
        """Sums for items that have different numbers of words."""
        counts = (self._lengths + 7) >> 3
        values = np.zeros(len(counts), np.uint64)
        ends = np.cumsum(counts)
        low = begin = 0
        while low < len(counts):
            # A piece has the items that fit into it, and at least one.
            high = max(low + 1, int(np.searchsorted(ends, begin + RAGGED_WORDS, "right")))
            until = int(ends[high - 1])
            if begin < until:
                _add_ragged(values[low:high], self._words[begin:until], counts[low:high], factors)
            low, begin = high, until
        return values


class Regions:
    """Regions copied one behind the other into memory that is used again, so that many regions are hashed as one."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.uint64)
        self._lengths: list[Int64s] = []
        self.word_count = 0

    def add(self, region: Region) -> None:
        """Copy the items of a region."""
        first, until = self.word_count, self.word_count + region.word_count
        if until > len(self._room):
            room = np.empty(max(until, 2 * len(self._room)), np.uint64)
            room[:first] = self._room[:first]
            self._room = room
        self._room[first:until] = region.words
        self.word_count = until
        self._lengths.append(region.lengths)

    def add_empty(self, count: int) -> None:
        """Add items that have no bytes."""
        self._lengths.append(np.zeros(count, np.int64))

    def take(self) -> Region:
        """All items since the last call; they stay valid until the next one is added."""
        taken = Region(self._room[: self.word_count], np.concatenate(self._lengths))
        self._lengths, self.word_count = [], 0
        return taken


def _evened(words: UInt64s, lengths: list[int], size: int) -> UInt64s:
    """The words of few items, each filled up with zeros to ``size`` words: zeros change no value."""
    data, width = words.tobytes(), WORD_BYTES * size
    items: list[bytes] = []
    start = 0
    for length in lengths:
        end = start + (length + 7 & ~7)
        items.append(data[start:end].ljust(width, b"\0"))
        start = end
    return np.frombuffer(b"".join(items), np.uint64)


def _add_ragged(values: UInt64s, words: UInt64s, counts: Int64s, factors: Factors) -> None:
    """Add to ``values`` the sums of items of ``counts`` words each."""
    starts = np.cumsum(counts)
    starts -= counts
    places = np.arange(len(words))
    places -= np.repeat(starts, counts)
    # The two factors of a word are taken together.
    products = factors.of_halves(2 * int(counts.max())).reshape(-1, 2).take(places, axis=0).reshape(-1)
    products *= words.view(HALVES)
    # An empty item has no word at which its sum could begin.
    filled = np.flatnonzero(counts)
    values[filled] += np.add.reduceat(products, 2 * starts.take(filled))


def mixed(numbers: UInt64s) -> UInt64s:
    """`_mix` of each number, in place."""
    for _ in range(2):
        numbers ^= numbers >> _HALF
        numbers *= _FACTOR_WORD
    numbers ^= numbers >> _HALF
    return numbers


def _mix(number: int) -> int:
    for _ in range(2):
        number ^= number >> 32
        number = number * _FACTOR & _MASK
    return number ^ number >> 32


def _value(part: Buffer) -> int:
    """The value of one item, as the page defines it."""
    data = bytes(part)
    data += bytes(-len(data) % WORD_BYTES)
    count = len(data) // HALVES.itemsize
    value: int = len(part) * _KEY_0
    for half, key in zip(struct.unpack(f"<{count}I", data), _FACTORS.of_halves(count).tolist(), strict=True):
        value += half * key
    return value & _MASK


class Factors:
    """The factors of the places, computed once for as many places as the longest item so far.

    Those of the page have the seed 0.
    """

    def __init__(self, seed: int = 0) -> None:
        self.of_length = _mix(_STEP + seed & _MASK) | 1
        self._seed = np.uint64(seed)
        self._lock = Lock()
        self._factors = np.empty(0, np.uint64)

    def of_halves(self, count: int) -> UInt64s:
        """The factors of the first ``count`` halves of an item, for the places from 1 on."""
        factors = self._factors
        if len(factors) < count:
            with self._lock:
                places = np.arange(2, max(64, 2 * count) + 2, dtype=np.uint64)
                factors = mixed(places * np.uint64(_STEP) + self._seed)
                factors |= np.uint64(1)
                self._factors = factors
        return factors[:count]


_FACTORS = Factors()
_KEY_0 = _FACTORS.of_length


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
