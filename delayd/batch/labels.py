"""Labels: what a message carries beside its body (docs/formats/batch.md).

*Headers* are one msgpack map from text to text or bytes. Intake checks those of every row, so that no producer can send
headers that a consumer can't decode (rule E2). Rows of plain short text are checked in arrays; checking a row alone
costs 0.7 us. A row without headers has no bytes at all.

*Tags* are one msgpack array of distinct texts, and the bloom that goes with it. A reader that looks for a tag compares
blooms, 64 bits a row, and reads the tags only of rows whose bloom has the bits of that tag. Clients use few
combinations of tags, so each combination is checked once and remembered.

An *ordering key* leaves its hash in the column ordering_key_hash (rule Q8). 0, or no such column, means a message
without one. Two keys with one hash wait for each other.

*Lives*: a message that comes to its group again is a new message; its headers say what it was before (rule Q2).
Subjects, tags and headers that begin as theirs are reserved. Invariant: a batch that a client sends has none of them,
so what has them was made by a server of the cluster. Consumers see them as attributes of a message.

A *trace* joins what many programs did for one cause. Its identity travels as the header `traceparent` of the W3C; a
worker puts it into `traceparent` while a handler runs, and producers add it to what is sent meanwhile. No tracing
library is needed for that.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from hashlib import blake2b
from typing import cast

import msgpack
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import FEW_ROWS, RECORD_FLAG, ColumnId, Int64s, padded
from delayd.batch.content import UInt64s, region_of
from delayd.batch.names import (
    RECORD_SUBJECT,
    RECURRING_SUBJECT,
    RESERVED,
    RETRY_PREFIX,
    TAG_BYTES_MAX,
    TAGS_MAX,
    is_reserved,
)
from delayd.errors import BadHeaders, BadSubject, BadTags, BatchMalformed

Headers = dict[str, str | bytes]

IN_ARRAYS_FROM = 16  # From this many rows on arrays are as fast as a loop.
PIECE_ROWS = 8_192  # The arrays of a piece stay in the cache.
TEXT_BYTES_MAX = 127  # A longer text has a length of two bytes, or one that looks like a byte of no ASCII text.

_FIXMAP, _FIXMAP_MASK = 0x80, 0xF0
_FIXSTR, _FIXSTR_MASK = 0xA0, 0xE0
_STR8 = 0xD9


def decode_headers(packed: bytes) -> Headers:
    """Decode one message's headers; BadHeaders when they are not as the format says."""
    if not packed:
        return {}
    try:
        headers = msgpack.unpackb(packed, max_ext_len=0)
    except ValueError as error:
        raise BadHeaders(f"the headers of a message can't be decoded: {undecoded_reason(error)}") from error
    if not isinstance(headers, dict):
        raise BadHeaders(f"the headers of a message are {type(headers).__name__} and no map")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str | bytes):
            kinds = f"{type(name).__name__} to {type(value).__name__}"
            raise BadHeaders(f"the headers of a message map {kinds}; a header maps text to text or bytes")
    return headers


def undecoded_reason(error: ValueError) -> str:
    """The reason why msgpack could not decode bytes. Two of its errors have no text."""
    if isinstance(error, msgpack.FormatError):
        return "a byte of it begins no value of msgpack"
    if isinstance(error, msgpack.StackError):
        return "it is nested too deeply"
    return str(error)


def bad_headers(batch: Batch, rows_max: int) -> Iterator[tuple[int, BadHeaders]]:
    """Rows whose headers can't be decoded, with the reason: at most ``rows_max`` rows. The batch's ends must have been
    checked.
    """
    heap, found = batch.heap, 0
    for row, start, end in _unproved(batch):
        try:
            decode_headers(bytes(heap[start:end]))
        except BadHeaders as error:
            yield row, error
            found += 1
            if found == rows_max:
                return


def _unproved(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Rows with headers that the arrays can't decide about, and where these begin and end."""
    if batch.count < IN_ARRAYS_FROM:
        start = batch.region_start(ColumnId.HEADERS_END)
        ends_at = batch.offsets[ColumnId.HEADERS_END]
        for row, end in enumerate(struct.unpack_from(f"<{batch.count}I", batch.buffer, ends_at)):
            if start < end:
                yield row, start, end
            start = padded(end)
        return
    starts, ends = batch.region(ColumnId.HEADERS_END)
    rows = np.flatnonzero(ends > starts)
    heap = np.frombuffer(batch.heap, np.uint8)
    for at in range(0, len(rows), PIECE_ROWS):
        piece = rows[at : at + PIECE_ROWS]
        left = piece[~_plain_text(heap, starts.take(piece), ends.take(piece))]
        yield from zip(left.tolist(), starts.take(left).tolist(), ends.take(left).tolist(), strict=True)


def _plain_text(heap: NDArray[np.uint8], starts: Int64s, ends: Int64s) -> NDArray[np.bool_]:
    """Which items are certainly maps of at most 15 short ASCII texts to such texts; the others may be valid too.

    All items are read in step: the map's byte, then key, value, key … of each. Item i is not empty and lies before item
    i + 1, with zeros between.
    """
    first = heap.take(starts)
    is_map: NDArray[np.bool_] = (first & _FIXMAP_MASK) == _FIXMAP
    texts = np.where(is_map, 2 * (first & 0x0F).astype(np.int64), 0)
    position = starts + 1
    beyond = len(heap) - 1
    for step in range(int(texts.max())):
        reading = texts > step
        is_map &= ~reading | (position < ends)
        mark = heap.take(position, mode="clip")
        short = (mark & _FIXSTR_MASK) == _FIXSTR
        long = mark == _STR8
        is_map &= ~reading | short | long
        size = np.where(short, 1 + (mark & 0x1F).astype(np.int64), 0)
        if long.any():
            length = heap.take(position + 1, mode="clip")
            is_map &= ~(reading & long) | (length <= TEXT_BYTES_MAX)
            size = np.where(long, 2 + length.astype(np.int64), size)
        # An invalid text may claim any length: its end is used only if all texts check.
        position = np.minimum(position + np.where(reading, size, 0), beyond + 1)
    is_map &= position == ends
    # Bytes of ASCII texts are below 0x80, and bytes that announce a value are not. So the number of the latter shows
    # other text.
    low, high = int(starts[0]), int(ends[-1])
    above_ascii = np.add.reduceat(heap[low:high] >> 7, starts - low, dtype=np.int64)
    is_map &= above_ascii == 1 + texts
    return is_map


# 16 tags of 64 bytes each as the shortest msgpack: 3 bytes before the array, 2 before each tag.
ITEM_BYTES_MAX = 3 + TAGS_MAX * (2 + TAG_BYTES_MAX)
ITEMS_REMEMBERED = 4_096  # Of at most 1,059 bytes: 5 MB.

_BITS_OF_TAG = 3  # A row of 4 tags then passes for a tag that it does not have once in 200.
_BIT_NUMBER_BITS = 6
_LAST_BIT = 62  # Of tags that clients give; the last bit of a bloom stands for the servers' own tags.
OWN_TAGS_BIT = np.uint64(1 << 63)


def encode_tags(tags: Iterable[str]) -> bytes:
    """Encode the tags of one message; none are no bytes at all. BadTags when they are not as the format says."""
    listed = list(tags)
    for tag in listed:
        if not isinstance(tag, str):
            raise BadTags(f"a tag is {type(tag).__name__} and no text")
    try:
        item: bytes = msgpack.packb(listed) if listed else b""
    except UnicodeEncodeError as error:
        raise BadTags(f"a tag can't be written as UTF-8: {error.reason}") from error
    decode_tags(item)
    return item


def decode_tags(item: bytes) -> tuple[str, ...]:
    """Decode one message's tags; BadTags when they are not as the format says."""
    return _checked(item)[0]


def bloom_of_item(item: bytes) -> int:
    """The bloom of one message's tags as they stand in the heap; BadTags when they are not as the format says."""
    return _checked(item)[1]


def bloom_of(tags: Iterable[str]) -> int:
    """The bits of all of these tags: a row that has the tags has these bits."""
    bloom = 0
    for tag in tags:
        if tag.startswith(TAG_PREFIX):
            bloom |= int(OWN_TAGS_BIT)
            continue
        number = crc32c(tag.encode())
        for _ in range(_BITS_OF_TAG):
            bloom |= 1 << min(number & (1 << _BIT_NUMBER_BITS) - 1, _LAST_BIT)
            number >>= _BIT_NUMBER_BITS
    return bloom


def rows_with_tags(batch: Batch, tags: Sequence[str], among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the rows ``among`` (bool[n]) have all of these tags; the batch is whole."""
    found = np.zeros(batch.count, np.bool_)
    if ColumnId.TAGS_END in batch:
        heap, wanted = batch.heap, set(tags)
        starts, ends = batch.region(ColumnId.TAGS_END)
        for row in np.flatnonzero(among & may_have_tags(batch, tags)).tolist():
            found[row] = wanted <= set(decode_tags(bytes(heap[int(starts[row]) : int(ends[row])])))
    return found


def may_have_tags(batch: Batch, tags: Sequence[str]) -> NDArray[np.bool_]:
    """Which rows may have all of these tags, by their blooms: bool[n]; a batch without its heap will do."""
    if ColumnId.TAG_BLOOM not in batch:
        return np.zeros(batch.count, np.bool_)
    bloom = np.uint64(bloom_of(tags))
    may: NDArray[np.bool_] = batch.uint64s(ColumnId.TAG_BLOOM) & bloom == bloom
    return may


def dead_letters(batch: Batch) -> NDArray[np.intp]:
    """Which rows are dead letters; a batch without its heap will do, because no client sends a tag of the servers."""
    if ColumnId.TAG_BLOOM not in batch.offsets:
        return np.empty(0, np.intp)
    return np.flatnonzero(batch.uint64s(ColumnId.TAG_BLOOM) & OWN_TAGS_BIT)


def bad_tags(batch: Batch, rows_max: int) -> Iterator[tuple[int, BadTags]]:
    """Rows whose tags are not as the format says, with the reason: at most ``rows_max`` rows. The batch's ends must
    have been checked.
    """
    if batch.count <= FEW_ROWS:
        if _few_are_good(batch):
            return
    else:
        blooms = _blooms(batch)
        if blooms is not None and bool((blooms == batch.uint64s(ColumnId.TAG_BLOOM)).all()):
            return
    heap, found = batch.heap, 0
    starts, ends = batch.region(ColumnId.TAGS_END)
    columns = zip(starts.tolist(), ends.tolist(), batch.uint64s(ColumnId.TAG_BLOOM).tolist(), strict=True)
    for row, (start, end, bloom) in enumerate(columns):
        try:
            if end - start > ITEM_BYTES_MAX:
                raise BadTags(f"the tags of a message have {end - start} bytes; {ITEM_BYTES_MAX} are the most")
            if bloom_of_item(bytes(heap[start:end])) != bloom:
                raise BadTags(f"the bloom {bloom:#x} of a message is not that of its tags")
        except BadTags as error:
            yield row, error
            found += 1
            if found == rows_max:
                return


@lru_cache(maxsize=ITEMS_REMEMBERED)
def _checked(item: bytes) -> tuple[tuple[str, ...], int]:
    if not item:
        return (), 0
    if len(item) > ITEM_BYTES_MAX:
        raise BadTags(f"the tags of a message have {len(item)} bytes; {ITEM_BYTES_MAX} are the most")
    try:
        tags = msgpack.unpackb(item, max_ext_len=0)
    except ValueError as error:
        raise BadTags(f"the tags of a message can't be decoded: {undecoded_reason(error)}") from error
    if not isinstance(tags, list) or not 0 < len(tags) <= TAGS_MAX:
        what = f"an array of {len(tags)}" if isinstance(tags, list) else type(tags).__name__
        raise BadTags(f"the tags of a message are {what}; they are an array of 1 to {TAGS_MAX} texts")
    for tag in tags:
        if not isinstance(tag, str):
            raise BadTags(f"a tag is {type(tag).__name__} and no text")
        if not 0 < len(tag.encode()) <= TAG_BYTES_MAX:
            raise BadTags(f"a tag of {len(tag.encode())} bytes; it has 1 to {TAG_BYTES_MAX}")
    if len(set(tags)) < len(tags):
        raise BadTags("a message has a tag twice")
    return tuple(tags), bloom_of(tags)


def _few_are_good(batch: Batch) -> bool:
    """Whether the tags of a small batch are certainly valid, without the fixed cost of numpy calls."""
    count, buffer, heap_offset, offsets = batch.count, batch.buffer, batch.heap_offset, batch.offsets
    stated = struct.unpack_from(f"<{count}Q", buffer, offsets[ColumnId.TAG_BLOOM])
    start = batch.region_start(ColumnId.TAGS_END)
    for end, bloom in zip(struct.unpack_from(f"<{count}I", buffer, offsets[ColumnId.TAGS_END]), stated, strict=True):
        if end - start > ITEM_BYTES_MAX:
            return False
        try:
            if bloom_of_item(bytes(buffer[heap_offset + start : heap_offset + end])) != bloom:
                return False
        except BadTags:
            return False
        start = (end + 7) & ~7
    return True


def _blooms(batch: Batch) -> UInt64s | None:
    """The bloom of each row's tags: uint64[n]. None when an item is not as the format says, or can't be told from
    another one by its hash.
    """
    region = region_of(batch, ColumnId.TAGS_END)
    lengths, words = region.lengths, region.words
    if int(lengths.max()) > ITEM_BYTES_MAX:
        return None
    _, firsts, which = np.unique(region.values(), return_index=True, return_inverse=True)
    counts = (lengths + 7) >> 3
    starts = np.cumsum(counts) - counts
    if not _all_equal(words, starts, counts, lengths, firsts.take(which)):
        return None
    try:
        blooms = [_bloom_at(words, starts, lengths, row) for row in firsts.tolist()]
    except BadTags:
        return None
    return np.array(blooms, np.uint64).take(which)


def _all_equal(words: UInt64s, starts: Int64s, counts: Int64s, lengths: Int64s, other: Int64s) -> bool:
    """Whether the item of each row i is that of row ``other[i]``, compared whole."""
    if not bool((lengths == lengths.take(other)).all()):
        return False
    places = np.arange(len(words))
    places += np.repeat(starts.take(other) - starts, counts)
    return bool((words == words.take(places)).all())


def _bloom_at(words: UInt64s, starts: Int64s, lengths: Int64s, row: int) -> int:
    start, length = int(starts[row]), int(lengths[row])
    return bloom_of_item(words[start : start + (length + 7 >> 3)].tobytes()[:length])


LIFE_PREFIX = "delayd."
ATTEMPT = "delayd.attempt"  # How often handlers of the group got the message in its earlier lives.
ORIGIN = "delayd.origin"  # The sequence of its first life, at the delay server that took it then.
FIRST_DUE_MS = "delayd.first_due_ms"  # When it was due the first time.
ERROR = "delayd.error"  # What its last handler said.
HISTORY = "delayd.history"  # JSON: [attempts, when, error] of its latest lives.
KEY = "delayd.key"  # The key of its first life: a label, because the message does not hold the key any more.
REASON = "delayd.reason"  # Why it is a dead letter.
DEAD_AT_MS = "delayd.dead_at_ms"  # Since when.

LIFE_DIGITS_MAX = 19  # An instant or a sequence fits into 63 bits.
HISTORY_MAX = 10  # Lives that the history names.
ERROR_BYTES_MAX = 4_096  # A longer error is cut; the answer of a push target fits.
REASON_BYTES_MAX = 2_000  # A longer reason is cut, and so is what the history has of an error.

TAG_PREFIX = "%"  # Tags that begin with it are the servers' own, too.
DEAD_TAG = "%dead"  # Of a message that is kept as a dead letter.
DEAD_KEPT_MS = 725 * 24 * 3_600_000  # How long a dead letter is kept: a week less than the furthest due instant.


def number_in(headers: Headers, name: str) -> int:
    """A number in the headers that tell of earlier lives; 0 when there is none."""
    value = headers.get(name, "")
    is_one = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= LIFE_DIGITS_MAX
    return int(value) if is_one else 0


def cut_text(text: str, bytes_max: int) -> str:
    """A text of at most ``bytes_max`` bytes: its beginning."""
    data = text.encode(errors="replace")
    return text if len(data) <= bytes_max and data.decode() == text else data[:bytes_max].decode(errors="ignore")


# What an occurrence of a recurring schedule says of itself, in all its lives (docs/recurring.md).
SCHEDULE = "delayd.schedule"  # The name of the schedule.
OCCURRENCE_MS = "delayd.occurrence_ms"  # The instant for which it was decided; of a range of skips the first one.
SKIPPED = "delayd.skipped"  # Why it is not delivered.
SKIPPED_UNTIL_MS = "delayd.skipped_until_ms"  # The last instant of the range,
SKIPPED_COUNT = "delayd.skipped_count"  # and how many occurrences it has.

_MARK = cast(bytes, msgpack.packb(SCHEDULE))
# Behind it the length of the name as msgpack has it: of up to 31 bytes, or of up to 255.
_MARK_AND_LENGTH = re.compile(re.escape(_MARK) + rb"(?:([\xa0-\xbf])|\xd9([\x20-\xff]))")


def marks_of_schedules(batch: Batch) -> Iterator[tuple[int, bytes]]:
    """Where the heap of a verified batch has what looks like the header that names a schedule, rising, and that name.

    One search settles a batch without any; each mark costs 0.4 us. Texts of other headers may look like that, too.
    """
    if ColumnId.HEADERS_END not in batch.offsets:
        return
    begin = batch.region_start(ColumnId.HEADERS_END)
    region = bytes(batch.heap[begin : int(batch.uint32s(ColumnId.HEADERS_END)[-1])])
    if _MARK not in region:
        return
    for mark in _MARK_AND_LENGTH.finditer(region):
        short, long = mark.groups()
        end = mark.end() + (short[0] & 31 if short else long[0])
        yield begin + mark.start(), region[mark.end() : end]


def rows_of_marks(batch: Batch, places: Sequence[int]) -> list[int]:
    """The rows whose headers have these places of the heap."""
    rows: list[int] = np.searchsorted(batch.uint32s(ColumnId.HEADERS_END), places, "right").tolist()
    return rows


def occurrences_in(batch: Batch) -> Iterator[tuple[int, str]]:
    """The rows of a batch that recurring schedules have sent, rising, each with the name of its schedule.

    Rows that stand for skipped occurrences are not among them.
    """
    places = [place for place, _ in marks_of_schedules(batch)]
    if not places:
        return
    starts, ends = batch.region(ColumnId.HEADERS_END)
    heap = batch.heap
    for row in dict.fromkeys(rows_of_marks(batch, places)):
        found = decode_headers(bytes(heap[int(starts[row]) : int(ends[row])]))
        name = found.get(SCHEDULE)
        if isinstance(name, str) and SKIPPED not in found:
            yield row, name


_RETRY, _RECURRING, _RECORD = RETRY_PREFIX.encode(), RECURRING_SUBJECT.encode(), RECORD_SUBJECT.encode()
_LIFE = LIFE_PREFIX.encode()
_TAG = TAG_PREFIX.encode()


def comes_again(batch: Batch) -> bool:
    """Whether a batch has messages of a retry subject."""
    return any(name.startswith(_RETRY) for name in batch.subjects())


def check_own(batch: Batch) -> None:
    """Check a batch of a client, whose layout was checked: nothing of it is reserved.

    Raises:
        BatchMalformed, BadSubject, BadTags, BadHeaders: what is reserved.
    """
    if ColumnId.ORIGIN_SEQUENCE in batch.offsets:
        raise BatchMalformed("the column origin_sequence is given by the server, to rows that it moves")
    table = batch.subject_table
    if _RECORD in table or ColumnId.ROW_FLAGS in batch.offsets:
        _check_records(batch)
    if (_RETRY in table or _RECURRING in table) and any(
        is_reserved(name.decode()) for name in batch.subjects() if name != _RECORD
    ):
        raise BadSubject(RESERVED)
    # One search over a region settles nearly every batch.
    if ColumnId.TAGS_END in batch.offsets and _TAG in _region(batch, ColumnId.TAGS_END):
        for item in _items(batch, ColumnId.TAGS_END):
            if item and any(tag.startswith(TAG_PREFIX) for tag in decode_tags(item)):
                raise BadTags(f"tags that begin with {TAG_PREFIX} are the servers' own; choose another one")
    if ColumnId.HEADERS_END in batch.offsets and _LIFE in _region(batch, ColumnId.HEADERS_END):
        for item in _items(batch, ColumnId.HEADERS_END):
            if item and any(name.startswith(LIFE_PREFIX) for name in decode_headers(item)):
                raise BadHeaders(f"headers that begin with {LIFE_PREFIX} are the servers' own; choose another name")


def _check_records(batch: Batch) -> None:
    """Check that the rows on the record subject, and no others, are records."""
    names = batch.subjects()
    flags = (
        batch.column(ColumnId.ROW_FLAGS) if ColumnId.ROW_FLAGS in batch.offsets else np.zeros(batch.count, np.uint16)
    )
    on_subject = np.array([name == _RECORD for name in names], np.bool_)
    number = batch.uint32s(ColumnId.SUBJECT) if ColumnId.SUBJECT in batch.offsets else np.zeros(batch.count, np.uint32)
    if (on_subject.take(number) & (flags != RECORD_FLAG)).any():
        raise BadSubject(RESERVED)
    if (~on_subject.take(number) & (flags == RECORD_FLAG)).any():
        raise BatchMalformed(f"row_flags is {RECORD_FLAG} for a row that is no record: it is not on {RECORD_SUBJECT}")


def check_again(batch: Batch) -> None:
    """Check a batch that a realtime server sends again.

    Raises:
        BatchMalformed, BadSubject: it is none.
    """
    if ColumnId.ORIGIN_SEQUENCE not in batch.offsets or ColumnId.KEY_END in batch.offsets:
        raise BatchMalformed("what comes again names its first messages, and has no keys")
    if not all(name.startswith(_RETRY) for name in batch.subjects()):
        raise BadSubject(f"what comes again is on a subject that begins with {RETRY_PREFIX}")


def check_drained(batch: Batch) -> None:
    """Check a batch that another delay server sends, because it is drained.

    Raises:
        BatchMalformed: it is none.
    """
    if ColumnId.ORIGIN_SEQUENCE not in batch.offsets:
        raise BatchMalformed("messages of another delay server name their first ones")


def _region(batch: Batch, column: ColumnId) -> bytes:
    starts, ends = batch.region(column)
    return bytes(batch.heap[int(starts[0]) : int(ends[-1])])


def _items(batch: Batch, column: ColumnId) -> list[bytes]:
    starts, ends = batch.region(column)
    return [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def ordering_hash(key: bytes) -> int:
    """The hash of a key that was checked."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") or 1


TRACE_HEADER = "traceparent"

traceparent: ContextVar[str] = ContextVar(TRACE_HEADER, default="")
"""The trace that the present work belongs to; empty when it belongs to none."""

# Version, trace, parent and flags (https://www.w3.org/TR/trace-context/). A later version may add fields behind them.
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def traceparent_of(headers: Mapping[str, str | bytes]) -> str:
    """The trace that headers name; empty when they name none, or not in the form of the W3C."""
    found = headers.get(TRACE_HEADER, "")
    text = found if isinstance(found, str) else found.decode("ascii", "replace")
    return text if _FORM.fullmatch(text) else ""
