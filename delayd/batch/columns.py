"""Columns: the data model of delayd, which is the same on the wire and in every log (docs/formats/batch.md).

A batch holds messages as columns, each an array with one item a row. Here stand the columns with their types, the kinds
of batches with the columns that each must or may have, and the part of the header that belongs to a kind.
Invariant: what intake lets pass, and what a copy of rows carries over, follows from `KIND_COLUMNS` alone.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview
Int64s = NDArray[np.int64]
ColumnArray = NDArray[np.generic]

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
    ASKED = 10  # 8 and 9 are no longer used.


class ColumnId(IntEnum):
    """Columns by the number that the directory gives them; docs/formats/batch.md has these lines as a table."""

    DELIVER_AT_MS = 1  # When the message is due, as its sender wished.
    SEQUENCE = 2  # The delay server's number. Absent: rows count up from the group's base_sequence.
    KEY_HASH = 3  # Reserved.
    TAG_BLOOM = 4  # Bits of the row's tags (docs/formats/batch.md, Tags); 0: no tags.
    SUBJECT = 5  # Index into the subject table. Absent: all rows have subject 0.
    KEY_END = 6  # End of the row's key in the heap. Absent: no row has one, as with the next two.
    TAGS_END = 7  # End of the row's tags in the heap.
    HEADERS_END = 8  # End of the row's headers in the heap.
    BODY_END = 9  # End of the row's body in the heap.
    ACCEPTED_AT_MS = 10  # When the delay server appended it; there where a row was already due then.
    ORIGIN_SEQUENCE = 11  # Of a moved row: the sequence of the message's first row at this server; else 0.
    ATTEMPT = 12  # Reserved.
    ROW_FLAGS = 13  # What to do when the key is taken: 0 reject, 1 keep, 2 replace, 3 record (docs/keys.md). Absent: 0.
    ORDERING_KEY_HASH = 14  # The first 8 bytes of a BLAKE2b of 8 bytes of the ordering key, 1 in place of 0; 0: none.
    EXPIRES_AT_MS = 15  # From this instant on the message is not delivered; 0, or no column: never.
    ENTRY = 16  # A row of the pull log (docs/formats/pull.md).
    SEAL = 17  # A seal (docs/formats/seal.md).
    BODY_LEFT_OUT = 18  # Length of a body that is not in the heap, else 0 (docs/formats/schedule.md).
    CONTENT_HASH = 19  # Of subject, headers and body; 0: not stated (docs/formats/content.md).
    WANTED_AT_MS = 21  # The instant to which a caller wants the row moved (docs/protocol.md).


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
    ColumnId.WANTED_AT_MS: np.dtype("<i8"),
}
RECORD_FLAG = 3  # In ROW_FLAGS: the row behind it in the batch is kept only with this one (docs/once.md).
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
    BatchKind.ASKED: KindColumns(_RECEIPT, _RECEIPT | {ColumnId.WANTED_AT_MS}),
}
# Two facts on which readers rest. A column that breaks one needs another way to be read there first.
assert all(DTYPES[column].itemsize == 8 for column in SPARSE)  # `delayd.delay.rows` counts and reads them as words.
assert (
    max(KIND_COLUMNS[BatchKind.DISPATCH].allowed) == ColumnId.CONTENT_HASH
)  # The audit looks for it in the last place.
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


KINDS = {kind.value: kind for kind in BatchKind}
KIND_BYTES = {kind.value: PARTS[kind][0].size if kind in PARTS else 0 for kind in BatchKind}


def padded(size: int) -> int:
    """Round ``size`` up to a multiple of 8."""
    return (size + 7) & ~7
