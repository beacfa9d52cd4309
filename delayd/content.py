"""Content hash: 64 bits over a message's subject, headers and body (docs/formats/content.md, version 1; rule S6).

A batch is hashed in a few numpy calls, because no work here may be done for each message. The items of a region are
whole words one behind the other, so the halves of words of items of one size are a matrix, and their values are one
matrix product.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import FEW_ROWS, Batch, Buffer, ColumnId, Int64s

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
FEW_BARE = 4  # Up to this many messages are hashed one by one, as fast as with the array calls for all of them.
EVENED_MOST = 4  # Few items are padded to equal length, unless that makes them this many times as long altogether.
PIECE_WORDS = 128 << 10  # Words hashed in one go: 1 MiB stays in the processor's cache between the calls.
RAGGED_WORDS = 32 << 10  # The same for items of different sizes, which need arrays of twice the size of their words.


def content_hash(subject: bytes, headers: Buffer, body: Buffer) -> int:
    """Hash one message, without numpy."""
    return _mix(subject_state(subject) + _value(headers) & _MASK) + _value(body) & _MASK or 1


def hash_items(states: int | UInt64s, headers: "Region | None", bodies: "Region") -> UInt64s:
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


def states_of(names: "Region") -> UInt64s:
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
    """Hash each row of a batch, uint64[n], from its heap, which `Batch.verify` and `delayd.validate` must have
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


def region_of(batch: Batch, column: ColumnId) -> "Region":
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
    """Sums that two machines compare for rows that one handed to the other; tallies of disjoint rows add up."""

    rows: int = 0
    first: int = 0
    second: int = 0

    def __add__(self, other: object) -> "Tally":
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

    def values(self, state: int = 0, factors: "Factors | None" = None) -> UInt64s:
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

    def _ragged(self, factors: "Factors") -> UInt64s:
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


def _add_ragged(values: UInt64s, words: UInt64s, counts: Int64s, factors: "Factors") -> None:
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
