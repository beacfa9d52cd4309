"""Tags of a message: one msgpack array of distinct texts, and the bloom that goes with it (docs/formats/batch.md).

A reader that looks for a tag compares blooms, 64 bits a row, and reads the tags only of rows whose bloom has the bits
of that tag. Clients use few combinations of tags, so each combination is checked once and remembered.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgpack
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch import FEW_ROWS, Batch, ColumnId, Int64s
from delayd.content import UInt64s, region_of
from delayd.errors import BadTags
from delayd.headers import undecoded_reason
from delayd.limits import TAG_BYTES_MAX, TAGS_MAX

# 16 tags of 64 bytes each as the shortest msgpack: 3 bytes before the array, 2 before each tag.
ITEM_BYTES_MAX = 3 + TAGS_MAX * (2 + TAG_BYTES_MAX)
ITEMS_REMEMBERED = 4_096  # Of at most 1,059 bytes: 5 MB.

_BITS_OF_TAG = 3  # A row of 4 tags then passes for a tag that it does not have once in 200.
_BIT_NUMBER_BITS = 6


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
        number = crc32c(tag.encode())
        for _ in range(_BITS_OF_TAG):
            bloom |= 1 << (number & (1 << _BIT_NUMBER_BITS) - 1)
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
