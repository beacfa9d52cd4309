"""Batch: columns of messages followed by a heap of bytes (docs/formats/batch.md, version 1).

The maker of a batch computes its checksums, and everybody else keeps the batch as it came: nothing here copies a body.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.errors import BatchMalformed

Buffer = bytes | bytearray | memoryview
Int64s = NDArray[np.int64]
Columns = NDArray[np.generic]

MAGIC = 0x48435442
VERSION = 1
HEADER = struct.Struct("<IBBHIIIHHIIII")
HEADER_BYTES = HEADER.size
HEADER_CHECKED = HEADER_BYTES - 4  # The header's own checksum is its last field.
DIRECTORY_ENTRY = struct.Struct("<HHI")

ROWS_MAX = 65_536  # A row of a batch fits the 16 bits of a location.
BYTES_MAX = 16 << 20  # A frame of one batch is then a bounded piece of work for every thread.
COLUMNS_MAX = 32
FEW_ROWS = 32  # Up to this many rows a loop is faster than numpy.
SUBJECTS_MAX = 65_535
# Batches of one shape repeat their directory, and share one layout of at most 32 columns.
DIRECTORIES_REMEMBERED = 4_096
SKIPPABLE_FROM = 0x4000  # Columns from this id on may be skipped by a reader that does not know them.


class BatchKind(IntEnum):
    """The use of a batch; each kind has a kind part of its own."""

    PRODUCER = 1
    SCHEDULE = 2
    DISPATCH = 3
    OUTCOME = 4
    CONTROL = 5
    PULL = 6
    SEAL = 7
    TALLY = 8
    INDEX = 9
    ASKED = 10


class ColumnId(IntEnum):
    """Columns by the number that the directory gives them."""

    DELIVER_AT_MS = 1
    SEQUENCE = 2
    KEY_HASH = 3
    TAG_BLOOM = 4
    SUBJECT = 5
    KEY_END = 6
    TAGS_END = 7
    HEADERS_END = 8
    BODY_END = 9
    ACCEPTED_AT_MS = 10
    ORIGIN_SEQUENCE = 11
    ATTEMPT = 12
    ROW_FLAGS = 13
    ORDERING_KEY_HASH = 14
    EXPIRES_AT_MS = 15
    ENTRY = 16
    SEAL = 17
    BODY_LEFT_OUT = 18
    CONTENT_HASH = 19
    TALLY = 20
    WANTED_AT_MS = 21


DTYPES: dict[int, np.dtype[np.generic]] = {
    ColumnId.DELIVER_AT_MS: np.dtype("<i8"),
    ColumnId.SEQUENCE: np.dtype("<u8"),
    ColumnId.KEY_HASH: np.dtype("<u8"),
    ColumnId.TAG_BLOOM: np.dtype("<u8"),
    ColumnId.SUBJECT: np.dtype("<u4"),
    ColumnId.KEY_END: np.dtype("<u4"),
    ColumnId.TAGS_END: np.dtype("<u4"),
    ColumnId.HEADERS_END: np.dtype("<u4"),
    ColumnId.BODY_END: np.dtype("<u4"),
    ColumnId.ACCEPTED_AT_MS: np.dtype("<i8"),
    ColumnId.ORIGIN_SEQUENCE: np.dtype("<u8"),
    ColumnId.ATTEMPT: np.dtype("<u2"),
    ColumnId.ROW_FLAGS: np.dtype("<u2"),
    ColumnId.ORDERING_KEY_HASH: np.dtype("<u8"),
    ColumnId.EXPIRES_AT_MS: np.dtype("<i8"),
    ColumnId.ENTRY: np.dtype("V48"),
    ColumnId.SEAL: np.dtype("V200"),
    ColumnId.BODY_LEFT_OUT: np.dtype("<u4"),
    ColumnId.CONTENT_HASH: np.dtype("<u8"),
    ColumnId.TALLY: np.dtype("V64"),
    ColumnId.WANTED_AT_MS: np.dtype("<i8"),
}
# The columns of ends: each has a region in the heap. Regions stand in the order of their columns' ids.
REGIONS = (ColumnId.KEY_END, ColumnId.TAGS_END, ColumnId.HEADERS_END, ColumnId.BODY_END)
# Columns without a region that stay with a row wherever it is copied to a batch that may have them; 0 states nothing.
SPARSE = (ColumnId.ORDERING_KEY_HASH, ColumnId.EXPIRES_AT_MS)  # Of these, few rows have one.
KEPT = (ColumnId.TAG_BLOOM, ColumnId.ORIGIN_SEQUENCE, ColumnId.ROW_FLAGS, *SPARSE)


class KindColumns(NamedTuple):
    """The columns of one kind of batch: those that each batch has, and all that one may have."""

    required: frozenset[ColumnId]
    allowed: frozenset[ColumnId]

    @property
    def regions(self) -> tuple[ColumnId, ...]:
        """The regions that a batch of the kind may have, in the heap's order."""
        return tuple(column for column in REGIONS if column in self.allowed)

    @property
    def kept(self) -> tuple[ColumnId, ...]:
        """The columns of `KEPT` that a batch of the kind may have."""
        return tuple(column for column in KEPT if column in self.allowed)


def _exactly(*columns: ColumnId) -> KindColumns:
    return KindColumns(frozenset(columns), frozenset(columns))


_MESSAGE = frozenset({ColumnId.DELIVER_AT_MS, ColumnId.BODY_END})
_STORED = _MESSAGE | {ColumnId.SEQUENCE}
_FILED = _STORED | {ColumnId.CONTENT_HASH}
_RECEIPT = frozenset({ColumnId.DELIVER_AT_MS, ColumnId.SEQUENCE, ColumnId.ACCEPTED_AT_MS})
_TAGS = {ColumnId.TAGS_END, ColumnId.TAG_BLOOM}
_KEYS_AND_TAGS = {ColumnId.KEY_END, ColumnId.ROW_FLAGS} | _TAGS
# Whatever a copy of rows carries over, and whatever intake lets pass, follows from this table.
KIND_COLUMNS: dict[BatchKind, KindColumns] = {
    # A producer gives no sequence and no instant of acceptance: the server gives both.
    BatchKind.PRODUCER: KindColumns(
        _MESSAGE,
        _MESSAGE | {ColumnId.SUBJECT, ColumnId.HEADERS_END, ColumnId.ORIGIN_SEQUENCE, *SPARSE} | _KEYS_AND_TAGS,
    ),
    BatchKind.SCHEDULE: KindColumns(
        _FILED,
        _FILED
        | {ColumnId.SUBJECT, ColumnId.HEADERS_END, ColumnId.ACCEPTED_AT_MS, ColumnId.BODY_LEFT_OUT}
        | {ColumnId.ORIGIN_SEQUENCE, *SPARSE}
        | _KEYS_AND_TAGS,
    ),
    # A key has done its work when a row is handed over. It goes with the row for the consumer, so without row flags.
    BatchKind.DISPATCH: KindColumns(
        _STORED, _FILED | {ColumnId.KEY_END, ColumnId.HEADERS_END, ColumnId.ACCEPTED_AT_MS, *SPARSE} | _TAGS
    ),
    BatchKind.OUTCOME: _exactly(ColumnId.DELIVER_AT_MS, ColumnId.SEQUENCE, ColumnId.CONTENT_HASH),
    BatchKind.CONTROL: _exactly(ColumnId.BODY_END),
    BatchKind.PULL: _exactly(ColumnId.ENTRY),
    BatchKind.SEAL: _exactly(ColumnId.SEAL),
    BatchKind.TALLY: _exactly(ColumnId.TALLY),
    BatchKind.INDEX: _exactly(),
    BatchKind.ASKED: KindColumns(_RECEIPT, _RECEIPT | {ColumnId.WANTED_AT_MS}),
}
# An ASKED batch that names its rows by their keys, and not by their receipts.
ASKED_BY_KEY = KindColumns(
    frozenset({ColumnId.KEY_END}),
    frozenset({ColumnId.KEY_END, ColumnId.SUBJECT, ColumnId.WANTED_AT_MS, ColumnId.ORIGIN_SEQUENCE}),
)


class ProducerPart(NamedTuple):
    """Kind part of a PRODUCER batch (rule I1)."""

    producer_id: int
    producer_batch: int
    low_water: int


MOVED_PRODUCER_ID = 0  # Of batches that a delay server makes itself, with moved rows; no producer may use it.


class SchedulePart(NamedTuple):
    """Kind part of a SCHEDULE batch: the range of the message log from which it was gathered (rule P3), and its
    hour.
    """

    source_start: int
    source_end: int
    hour: int


class DispatchPart(NamedTuple):
    """Kind part of a DISPATCH batch (rules H1, T2)."""

    origin_log_id: int
    epoch: int
    batch_id: int
    w_epoch: int
    w_id: int
    claimed_at_ms: int
    hour: int


class OutcomePart(NamedTuple):
    """Kind part of an OUTCOME batch."""

    hour: int


SUBJECTS_CRC32C_AT = HEADER_BYTES + 20  # In a SCHEDULE batch's kind part, behind the fields of `SchedulePart`.
KindPart = ProducerPart | SchedulePart | DispatchPart | OutcomePart | None
PARTS: dict[BatchKind, tuple[struct.Struct, type[ProducerPart | SchedulePart | DispatchPart | OutcomePart]]] = {
    BatchKind.PRODUCER: (struct.Struct("<QQQ"), ProducerPart),
    BatchKind.SCHEDULE: (struct.Struct("<QQI4x"), SchedulePart),
    BatchKind.DISPATCH: (struct.Struct("<QQQQQqI4x"), DispatchPart),
    BatchKind.OUTCOME: (struct.Struct("<I4x"), OutcomePart),
}


def padded(size: int) -> int:
    """Round ``size`` up to a multiple of 8."""
    return (size + 7) & ~7


class Layout(NamedTuple):
    """The places of a batch's columns: one decoded directory, which all batches of one shape share."""

    offsets: Mapping[int, int]  # By column, for the columns that this version knows.
    columns: frozenset[int]  # The same columns.
    regions: tuple[ColumnId, ...]  # Those of them that have a region, in the heap's order.
    kept: tuple[ColumnId, ...]  # Those of them that are in `KEPT`.
    gaps: tuple[tuple[int, int, int], ...]  # Column, begin and end of the unused bytes behind it, if there are any.


class Batch:
    """A view of one batch in ``buffer``; made by `parse`, which verifies the header and the column directory.

    Columns and heap are views of the buffer, valid as long as it is. Only `verify` verifies their contents.
    """

    __slots__ = (
        "buffer",
        "columns_crc32c",
        "count",
        "heap_crc32c",
        "heap_offset",
        "kind",
        "kind_bytes",
        "layout",
        "offsets",
        "subject_count",
        "total_bytes",
        "verified",
    )

    def __init__(self, buffer: memoryview, kind: BatchKind, fields: tuple[int, ...], layout: Layout) -> None:
        self.buffer = buffer
        self.kind = kind
        _, _, _, _, self.total_bytes, self.count, self.heap_offset, _, *others = fields
        self.kind_bytes, self.subject_count, self.columns_crc32c, self.heap_crc32c, _ = others
        self.layout = layout
        self.offsets = layout.offsets
        self.verified = False

    def __contains__(self, column: int) -> bool:
        return column in self.offsets

    def column(self, column: int) -> Columns:
        """View a column: ``count`` items of its dtype; KeyError when it is absent."""
        return np.frombuffer(self.buffer, DTYPES[column], self.count, self.offsets[column])

    def int64s(self, column: int) -> Int64s:
        """View a column of i64."""
        return np.frombuffer(self.buffer, np.int64, self.count, self.offsets[column])

    def uint64s(self, column: int) -> NDArray[np.uint64]:
        """View a column of u64."""
        return np.frombuffer(self.buffer, np.uint64, self.count, self.offsets[column])

    def uint32s(self, column: int) -> NDArray[np.uint32]:
        """View a column of u32."""
        return np.frombuffer(self.buffer, np.uint32, self.count, self.offsets[column])

    def range_of(self, column: int) -> tuple[int, int]:
        """The lowest and the highest value of a column of i64."""
        if self.count <= FEW_ROWS:
            values = struct.unpack_from(f"<{self.count}q", self.buffer, self.offsets[column])
            return min(values), max(values)
        array = self.int64s(column)
        return int(array.min()), int(array.max())

    def highest(self, column: int) -> int:
        """The highest value of a column of u64. In a column of i64 a negative value counts as higher than all
        others.
        """
        if self.count <= FEW_ROWS:
            values: tuple[int, ...] = struct.unpack_from(f"<{self.count}Q", self.buffer, self.offsets[column])
            return max(values)
        return int(self.uint64s(column).max())

    @property
    def heap(self) -> memoryview:
        """View the heap."""
        return self.buffer[self.heap_offset : self.total_bytes]

    @property
    def part(self) -> KindPart:
        """Decode the kind part; None for kinds without one."""
        known = PARTS.get(self.kind)
        return known[1]._make(known[0].unpack_from(self.buffer, HEADER_BYTES)) if known else None

    @property
    def producer(self) -> ProducerPart:
        """The kind part of a PRODUCER batch."""
        return ProducerPart._make(PARTS[BatchKind.PRODUCER][0].unpack_from(self.buffer, HEADER_BYTES))

    @property
    def schedule(self) -> SchedulePart:
        """The kind part of a SCHEDULE batch."""
        return SchedulePart._make(PARTS[BatchKind.SCHEDULE][0].unpack_from(self.buffer, HEADER_BYTES))

    @property
    def dispatch(self) -> DispatchPart:
        """The kind part of a DISPATCH batch."""
        return DispatchPart._make(PARTS[BatchKind.DISPATCH][0].unpack_from(self.buffer, HEADER_BYTES))

    @property
    def outcome(self) -> OutcomePart:
        """The kind part of an OUTCOME batch."""
        return OutcomePart._make(PARTS[BatchKind.OUTCOME][0].unpack_from(self.buffer, HEADER_BYTES))

    @property
    def subject_table(self) -> bytes:
        """The bytes of the subject table, ends and names: equal tables name equal subjects."""
        return bytes(self.buffer[self.heap_offset : self.heap_offset + self._subject_table_bytes()])

    def subjects(self) -> list[bytes]:
        """Decode the subject table."""
        ends = struct.unpack_from(f"<{self.subject_count}I", self.buffer, self.heap_offset)
        names = self.heap_offset + padded(4 * self.subject_count)
        starts = (0, *ends[:-1])
        return [bytes(self.buffer[names + start : names + end]) for start, end in zip(starts, ends, strict=True)]

    def region(self, column: int) -> tuple[Int64s, Int64s]:
        """Starts and exact ends, int64[count], of the items of one `_end` column, relative to the heap."""
        ends = self.uint32s(column).astype(np.int64)
        starts = np.empty_like(ends)
        starts[0] = self.region_start(column)
        starts[1:] = ends[:-1]
        starts[1:] += 7
        starts[1:] &= ~7
        return starts, ends

    def keyed_rows(self) -> Int64s:
        """The rows that have a key, int64[n]; `delayd.names.Names.of_batch` takes them."""
        if ColumnId.KEY_END not in self.offsets:
            return np.empty(0, np.int64)
        starts, ends = self.region(ColumnId.KEY_END)
        return np.flatnonzero(ends > starts)

    def body_bytes(self) -> Int64s:
        """The exact length of each body, int64[count], also of bodies that a schedule log leaves out."""
        starts, ends = self.region(ColumnId.BODY_END)
        ends -= starts
        if ColumnId.BODY_LEFT_OUT in self.offsets:
            ends += self.uint32s(ColumnId.BODY_LEFT_OUT)
        return ends

    def content_hashes(self) -> NDArray[np.uint64]:
        """The content hash of each row, uint64[count]; zeros where the batch states none."""
        if ColumnId.CONTENT_HASH in self.offsets:
            return self.uint64s(ColumnId.CONTENT_HASH)
        return np.zeros(self.count, np.uint64)

    def region_start(self, column: int) -> int:
        """Where the first item of the region begins, or would begin if the batch had the region: behind the last item
        of the region before it.
        """
        begin = self._subject_table_bytes()
        for other in self.layout.regions:
            if other >= column:
                break
            last = self.offsets[other] + 4 * (self.count - 1)
            begin = padded(struct.unpack_from("<I", self.buffer, last)[0])
        return begin

    def verify(self) -> None:
        """Check the checksums of columns and heap, unless that was done before; BatchMalformed when one differs."""
        if self.verified:
            return
        self.verify_columns()
        if crc32c(self.heap) != self.heap_crc32c:
            raise BatchMalformed("the checksum of its heap differs")
        self.verified = True

    def verify_columns(self) -> None:
        """Check the checksum of directory and columns; BatchMalformed when it differs."""
        columns = self.buffer[HEADER_BYTES + self.kind_bytes : self.heap_offset]
        if crc32c(columns) != self.columns_crc32c:
            raise BatchMalformed("the checksum of its columns differs")

    def verify_subjects(self) -> None:
        """Check the checksum of a SCHEDULE batch's subject table, which a load reads without the rest of the heap.

        `delayd.validate.check_subjects` must have proved before that the whole table is there. BatchMalformed when it
        differs.
        """
        (known,) = struct.unpack_from("<I", self.buffer, SUBJECTS_CRC32C_AT)
        if crc32c(self.subject_table) != known:
            raise BatchMalformed("the checksum of its subject table differs")

    def _subject_table_bytes(self) -> int:
        if not self.subject_count:
            return 0
        ends_bytes = 4 * self.subject_count
        last: int = struct.unpack_from("<I", self.buffer, self.heap_offset + ends_bytes - 4)[0]
        # The same as `padded`, without a call, because this runs for each batch that is dispatched.
        return (ends_bytes + 7 & ~7) + (last + 7 & ~7)


def parse(buffer: Buffer, position: int = 0, *, front: bool = False) -> Batch:
    """View the batch at ``position``; its bounds, header checksum and column directory are verified, nothing else.

    With ``front`` the buffer may end anywhere in the heap.

    Raises:
        BatchMalformed: the bytes are not a whole batch of a known version and kind.
    """
    view = memoryview(buffer)[position:]
    available = len(view)
    if available < HEADER_BYTES:
        raise BatchMalformed(f"{available} bytes are too few for a header")
    fields = HEADER.unpack_from(view)
    magic, version, kind, flags, total_bytes, count, heap_offset, column_count, kind_bytes, subject_count, _, _, crc = (
        fields
    )
    if magic != MAGIC:
        raise BatchMalformed(f"magic {magic:#x} is not that of a batch")
    if version != VERSION:
        raise BatchMalformed(f"version {version} is not known; this is version {VERSION}")
    if flags:
        raise BatchMalformed(f"flags {flags:#x} are not known; version {VERSION} has none")
    directory = HEADER_BYTES + kind_bytes
    columns_start = directory + DIRECTORY_ENTRY.size * column_count
    needed = heap_offset if front else total_bytes
    if not columns_start <= heap_offset <= total_bytes <= BYTES_MAX or needed > available:
        raise BatchMalformed(f"{total_bytes} bytes with the heap at {heap_offset} do not fit {available} bytes")
    if (heap_offset | total_bytes | kind_bytes) & 7 or column_count > COLUMNS_MAX or not 0 < count <= ROWS_MAX:
        raise BatchMalformed(f"{count} rows, {column_count} columns, {total_bytes} bytes are not possible")
    if crc32c(view[HEADER_BYTES:directory], crc32c(view[:HEADER_CHECKED])) != crc:
        raise BatchMalformed("the checksum of its header differs")
    if KIND_BYTES.get(kind) != kind_bytes:
        raise BatchMalformed(f"kind {kind} with {kind_bytes} bytes is not known")
    if subject_count > SUBJECTS_MAX or 4 * subject_count > total_bytes - heap_offset:
        raise BatchMalformed(f"{subject_count} subjects do not fit its heap")
    layout = read_directory(bytes(view[directory:columns_start]), count, columns_start, heap_offset)
    return Batch(view if total_bytes >= available else view[:total_bytes], KINDS[kind], fields, layout)


KINDS = {kind.value: kind for kind in BatchKind}
KIND_BYTES = {kind.value: PARTS[kind][0].size if kind in PARTS else 0 for kind in BatchKind}


@lru_cache(maxsize=DIRECTORIES_REMEMBERED)
def read_directory(entries: bytes, count: int, low: int, high: int) -> Layout:
    """Decode a column directory for ``count`` rows whose columns lie between ``low`` and ``high``.

    Raises:
        BatchMalformed: a column is not known, or not where it must be.
    """
    offsets: dict[int, int] = {}
    gaps: list[tuple[int, int, int]] = []
    before, free = 0, low
    for column, width, offset in DIRECTORY_ENTRY.iter_unpack(entries):
        if column <= before:
            raise BatchMalformed(f"column {column} comes behind column {before}")
        before = column
        dtype = DTYPES.get(column)
        if dtype is None and column < SKIPPABLE_FROM:
            raise BatchMalformed(f"column {column} must be understood and is not known")
        if dtype is not None and dtype.itemsize != width:
            raise BatchMalformed(f"column {column} is {width} bytes wide instead of {dtype.itemsize}")
        # Each column begins where the one before it ended, so each byte belongs to exactly one column.
        if offset != free:
            raise BatchMalformed(f"column {column} is at {offset} and must be at {free}, behind what is before it")
        end = offset + width * count
        free += padded(width * count)
        if free > high:
            raise BatchMalformed(f"column {column} has fewer than {count} rows before the heap at {high}")
        if dtype is not None:
            offsets[column] = offset
            if end < free:
                gaps.append((column, end, free))
    if free != high:
        raise BatchMalformed(f"its columns of {count} rows end at {free}, its heap begins at {high}")
    regions = tuple(column for column in REGIONS if column in offsets)
    kept = tuple(column for column in KEPT if column in offsets)
    return Layout(offsets, frozenset(offsets), regions, kept, tuple(gaps))
