"""Headers of a message: one msgpack map from text to text or bytes (docs/formats/batch.md).

Intake checks the headers of every row, so that no producer can send headers that a consumer can't decode (rule E2).
Rows of plain short text are checked in arrays; checking a row alone costs 0.7 us. A row without headers has no bytes at
all.
"""

import struct
from collections.abc import Iterator

import msgpack
import numpy as np
from numpy.typing import NDArray

from delayd.batch import Batch, ColumnId, Int64s, padded
from delayd.errors import BadHeaders

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
