"""Encode: makes batches from columns and a heap (docs/formats/batch.md); `delayd.batch` reads them."""

import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch import (
    BYTES_MAX,
    COLUMNS_MAX,
    DIRECTORY_ENTRY,
    DTYPES,
    HEADER,
    HEADER_BYTES,
    HEADER_CHECKED,
    MAGIC,
    PARTS,
    ROWS_MAX,
    VERSION,
    BatchKind,
    Buffer,
    ColumnId,
    Columns,
    DispatchPart,
    KindPart,
    ProducerPart,
)
from delayd.errors import BatchMalformed

_ONE_DUE = struct.Struct("<HHIHHI qI4x")  # Directory and columns of one row.
_HEADER_CHECKED = struct.Struct(HEADER.format[:-1])  # The header without its own checksum.
_PRODUCER_PART = PARTS[BatchKind.PRODUCER][0]
_DISPATCH_PART = PARTS[BatchKind.DISPATCH][0]
_BARE_COLUMNS = struct.Struct("<qQI4xQ")
BARE_COLUMNS_AT = HEADER_BYTES + _DISPATCH_PART.size + 4 * DIRECTORY_ENTRY.size
# The directory of a DISPATCH batch of one row with a hash and without headers: all such batches share it.
BARE_DIRECTORY = struct.pack(
    "<HHIHHIHHIHHI",
    *(ColumnId.DELIVER_AT_MS, 8, BARE_COLUMNS_AT, ColumnId.SEQUENCE, 8, BARE_COLUMNS_AT + 8),
    *(ColumnId.BODY_END, 4, BARE_COLUMNS_AT + 16, ColumnId.CONTENT_HASH, 8, BARE_COLUMNS_AT + 24),
)
BARE_HEAP_AT = BARE_COLUMNS_AT + _BARE_COLUMNS.size

SINGLE_TABLES_REMEMBERED = 16_384  # Some 0.4 KB each: 6 MB. With many subjects each is used every few seconds.
PADS = tuple(bytes(count) for count in range(8))
DIRECTORY_FORMATS = tuple("<" + count * "HHI" for count in range(COLUMNS_MAX + 1))


def encode(
    kind: BatchKind,
    part: KindPart,
    count: int,
    columns: Sequence[tuple[ColumnId, Columns]],
    heap: Sequence[Buffer],
    subject_count: int = 0,
) -> bytes:
    """Make a batch of ``columns``, in rising order of their ids, and a heap whose parts are already laid out."""
    return b"".join(encode_pieces(kind, part, count, columns, heap, subject_count))


def encode_pieces(
    kind: BatchKind,
    part: KindPart,
    count: int,
    columns: Sequence[tuple[ColumnId, Columns]],
    heap: Sequence[Buffer],
    subject_count: int = 0,
) -> tuple[bytes, bytes]:
    """`encode` in two pieces, header and columns, and the heap, so that the heap is not copied once more."""
    kind_part = PARTS[kind][0].pack(*part) if part is not None else b""
    offset = HEADER_BYTES + len(kind_part) + DIRECTORY_ENTRY.size * len(columns)
    directory: list[int] = []
    pieces: list[Buffer] = [b""]
    for column, values in columns:
        dtype = DTYPES[column]
        data = values.tobytes() if values.dtype == dtype else values.astype(dtype).tobytes()
        size = len(data)
        directory += (column, dtype.itemsize, offset)
        pieces.append(data)
        if size & 7:
            pieces.append(PADS[-size & 7])
        offset += (size + 7) & ~7
    pieces[0] = struct.pack(DIRECTORY_FORMATS[len(columns)], *directory)
    columns_bytes = b"".join(pieces)
    heap_bytes = b"".join(heap)
    if len(heap_bytes) & 7:
        raise BatchMalformed(f"a heap of {len(heap_bytes)} bytes is not a multiple of 8")
    if offset + len(heap_bytes) > BYTES_MAX or not 0 < count <= ROWS_MAX:
        raise BatchMalformed(f"{count} rows in {offset + len(heap_bytes)} bytes are over the limit of a batch")
    if kind is BatchKind.SCHEDULE:
        kind_part = kind_part[:-4] + crc32c(_table_of(heap_bytes, subject_count)).to_bytes(4, "little")
    return _front(kind, kind_part, count, len(columns), columns_bytes, heap_bytes, subject_count), heap_bytes


def encode_column(kind: BatchKind, column: ColumnId, packed: bytes, count: int) -> bytes:
    """`encode` for rows of one column, packed already and a multiple of 8 bytes, without a heap."""
    entry = DIRECTORY_ENTRY.pack(column, DTYPES[column].itemsize, HEADER_BYTES + DIRECTORY_ENTRY.size)
    if len(packed) & 7 or not 0 < count <= ROWS_MAX:
        raise BatchMalformed(f"{count} rows in {len(packed)} bytes are not possible")
    return _front(kind, b"", count, 1, entry + packed, b"", 0)


def encode_single(part: ProducerPart, deliver_at_ms: int, subject: bytes, body: bytes) -> bytes:
    """`encode` a PRODUCER batch of one row without headers, at a fifth of the cost: a lone send is common."""
    kind_part = _PRODUCER_PART.pack(*part)
    table = one_subject_table(subject)
    begin = HEADER_BYTES + len(kind_part)
    places = (ColumnId.DELIVER_AT_MS, 8, begin + 16, ColumnId.BODY_END, 4, begin + 24)
    columns = _ONE_DUE.pack(*places, deliver_at_ms, len(table) + len(body))
    heap = b"".join((table, body, PADS[-len(body) & 7]))
    return b"".join((_front(BatchKind.PRODUCER, kind_part, 1, 2, columns, heap, 1), heap))


def encode_bare(part: DispatchPart, row: tuple[int, int, int], subject: bytes, body: Buffer, length: int) -> bytes:
    """`encode` a DISPATCH batch of one row without headers: with many subjects most batches of a frame are like this.

    Args:
        part: the kind part.
        row: deliver_at_ms, sequence and content hash.
        subject: its name.
        body: ``length`` bytes, then zeros up to a multiple of 8.
        length: of the body.
    """
    due, sequence, content_hash = row
    table = one_subject_table(subject)
    heap = b"".join((table, body))
    columns = BARE_DIRECTORY + _BARE_COLUMNS.pack(due, sequence, len(table) + length, content_hash)
    kind_part = _DISPATCH_PART.pack(*part)
    checked = _HEADER_CHECKED.pack(
        *(MAGIC, VERSION, BatchKind.DISPATCH, 0, BARE_HEAP_AT + len(heap), 1, BARE_HEAP_AT),
        *(4, len(kind_part), 1, crc32c(columns), crc32c(heap)),
    )
    header_crc32c = crc32c(kind_part, crc32c(checked))
    return b"".join((checked, header_crc32c.to_bytes(4, "little"), kind_part, columns, heap))


def _front(
    kind: BatchKind, kind_part: bytes, count: int, column_count: int, columns: bytes, heap: bytes, subject_count: int
) -> bytes:
    """Everything before the heap."""
    heap_offset = HEADER_BYTES + len(kind_part) + len(columns)
    checked = HEADER.pack(
        *(MAGIC, VERSION, kind, 0, heap_offset + len(heap), count, heap_offset),
        *(column_count, len(kind_part), subject_count, crc32c(columns), crc32c(heap), 0),
    )[:HEADER_CHECKED]
    header_crc32c = crc32c(kind_part, crc32c(checked))
    return b"".join((checked, header_crc32c.to_bytes(4, "little"), kind_part, columns))


def _table_of(heap: bytes, subject_count: int) -> bytes:
    """The subject table that a heap begins with."""
    ends = 4 * subject_count
    names = int.from_bytes(heap[max(0, ends - 4) : ends], "little")
    return heap[: ends + (-ends & 7) + names + (-names & 7)]


@lru_cache(maxsize=SINGLE_TABLES_REMEMBERED)
def one_subject_table(subject: bytes) -> bytes:
    """The subject table of one name."""
    return encode_subject_table([subject])


def encode_subject_table(names: Sequence[bytes]) -> bytes:
    """Make the subject table: ends, then names, each padded to a multiple of 8."""
    ends: list[int] = []
    end = 0
    for name in names:
        end += len(name)
        ends.append(end)
    table = struct.pack(f"<{len(ends)}I", *ends)
    return b"".join((table, PADS[-len(table) & 7], *names, PADS[-end & 7]))


def lay_out(items: Sequence[Buffer], begin: int) -> tuple[NDArray[np.int64], bytes]:
    """Place ``items`` one behind the other from ``begin``, each at a multiple of 8; return their ends, and the
    bytes.
    """
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    pads = -lengths & 7
    ends = (begin + np.cumsum(lengths + pads)) - pads
    if not pads.any():
        return ends, b"".join(items)
    pieces: list[Buffer] = [b""] * (2 * len(items))
    pieces[0::2] = items
    pieces[1::2] = [PADS[pad] for pad in pads.tolist()]
    return ends, b"".join(pieces)
