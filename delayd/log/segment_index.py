"""Index of a segment: the realtime server's message log without columns and bodies (docs/formats/index.md, version 1).

Invariant: an index is made from verified groups of a complete segment, and it is derived (rule L9): a reader compares
it with the segment's own checksums, and reads the segment itself where the index is missing or differs.
"""

import struct
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.batch import PADS, Batch, encode
from delayd.batch.columns import MAGIC, BatchKind, Buffer, Int64s, padded
from delayd.errors import BatchMalformed, DamagedData, DataError
from delayd.log.group import (
    HEADER,
    BadGroup,
    CommitGroup,
    GroupHeader,
    GroupKind,
    NewGroup,
    batch_sizes,
    content_position,
    parse_header,
    verify_group,
)
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FileHeader, FileKind, Segment, UnfinishedFile, create_segment, open_segment
from delayd.machine.disk import Disk

FOLDER = "index"
FRONT_BYTES = 112  # The first bytes of a DISPATCH batch: header, kind part, and the first two columns' entries.
SUBJECT_COUNT_AT, HEAP_OFFSET_AT = 24, 16
BATCH_BYTES_MIN = 8 << 10  # With smaller batches an index would be a tenth of its segment and save little.
CHUNK_BYTES = 4 << 20  # One INDEX batch holds this much.
CHUNKS_MAX = 8
RECORD = struct.Struct("<II")  # Whether the whole group follows, and the bytes of the record.
U32 = struct.Struct("<I")
WHOLE = 1

UInt32s = NDArray[np.uint32]
UInt64s = NDArray[np.uint64]


class IndexedGroup(NamedTuple):
    """A group as an index has it: everything that its checksum covers, with CRCs in place of columns and bodies.

    ``fronts`` are 112 bytes of each batch, as words; ``rests`` the checksum of each heap behind its subject table;
    ``names`` are the words of the subject tables, which begin at ``name_starts``.
    """

    header: GroupHeader
    sizes: Int64s
    fronts: UInt64s
    rests: UInt32s
    names: UInt64s
    name_starts: Int64s

    @property
    def end(self) -> int:
        """Offset behind the group."""
        return self.header.offset + self.header.total_bytes


class IndexRecord(NamedTuple):
    """The facts of a record, for people."""

    offset: int
    total_bytes: int
    batches: int
    rows: int
    whole: bool


class IndexMaker:
    """Makes the index of one segment from its groups, which are taken in order."""

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._chunks: list[bytes] = []
        self._size = self._batches = self._batch_bytes = 0
        self._fits = True

    def take(self, group: CommitGroup) -> None:
        """Note the part of a verified group that the index keeps."""
        if not self._fits:
            return
        header = group.header
        if header.kind == GroupKind.DATA:
            record = self._fronts(group)
            self._batches += header.batch_count
            self._batch_bytes += header.total_bytes
            if self._batches > 4_096 and self._batch_bytes < BATCH_BYTES_MIN * self._batches:
                self._fits = False
        else:
            record = RECORD.pack(WHOLE, RECORD.size + header.total_bytes) + bytes(group.buffer)
        self._records.append(record)
        self._size += len(record)
        if self._size >= CHUNK_BYTES:
            self._close_chunk()

    def groups(self, epoch: int, now_ms: int) -> list[NewGroup]:
        """The groups of the index file: a group of INDEX batches, unless reading the segment itself is better, and a
        TICK.
        """
        self._close_chunk()
        small = self._batch_bytes < BATCH_BYTES_MIN * self._batches
        tick = NewGroup(GroupKind.TICK, [], epoch, now_ms)
        if not self._fits or small or not self._chunks or len(self._chunks) > CHUNKS_MAX:
            return [tick]
        return [NewGroup(GroupKind.DATA, self._chunks, epoch, now_ms, 0, len(self._chunks)), tick]

    def _close_chunk(self) -> None:
        if self._records:
            self._chunks.append(encode(BatchKind.INDEX, None, 1, [], self._records))
            self._records, self._size = [], 0

    def _fronts(self, group: CommitGroup) -> bytes:
        buffer, sizes = group.buffer, batch_sizes(group.buffer, group.header)
        begin = content_position(len(sizes))
        fronts: list[memoryview] = [buffer[:begin]]
        rests: list[int] = []
        names: list[memoryview] = []
        for start, size in zip(accumulate(sizes, initial=begin), sizes, strict=False):
            batch = buffer[start : start + size]
            heap = _heap_of(batch)
            if heap is None:
                self._fits = False
                return b""
            table_end = heap + 8 + padded(U32.unpack_from(batch, heap)[0])
            fronts.append(batch[:FRONT_BYTES])
            names.append(batch[heap:table_end])
            rests.append(crc32c(batch[table_end:]))
        packed = struct.pack(f"<{len(rests)}I", *rests)
        pieces: list[Buffer] = [*fronts, packed, PADS[-len(packed) & 7], *names]
        return b"".join((RECORD.pack(0, RECORD.size + sum(map(len, pieces))), *pieces))


def write_index(disk: Disk, folder: str, header: FileHeader, maker: IndexMaker, epoch: int) -> None:
    """Write the index of a segment, whose facts ``header`` has, beside its log; an older file in its place is removed.

    Raises:
        OSError, DataError, SyncFailed: it can't be written.
    """
    path = index_path(folder, header.base_offset)
    disk.make_folder(path.rpartition("/")[0])
    if disk.exists(path):
        disk.remove(path)
    with closing(create_segment(disk, path, header)) as file:
        file.append(maker.groups(epoch, header.created_at_ms))
        file.flush()


def index_segment(disk: Disk, folder: str, segment: Segment, end: int, epoch: int, now_ms: int) -> None:
    """Read a segment that is complete and ends at an offset, and write its index.

    Raises:
        DamagedData: a group of the segment does not check.
        OSError, DataError, SyncFailed: the index can't be written.
    """
    maker, header = IndexMaker(), segment.header
    scan = segment.scan(header.base_offset, header.previous_crc32c)
    for group in scan:
        maker.take(group)
    if scan.reason or scan.offset != end:
        raise DamagedData(segment.path, segment.position(scan.offset), scan.reason or "the segment is not complete")
    last = scan.crc32c or 0
    write_index(disk, folder, index_header(header.log_id, header.base_offset, end, last, now_ms), maker, epoch)


def index_header(log_id: int, base: int, end: int, last_crc32c: int, now_ms: int) -> FileHeader:
    """The header of an index: of a segment from ``base`` to ``end``, whose last group has that header_crc32c."""
    return FileHeader(FileKind.INDEX, log_id, base, end, now_ms, last_crc32c)


def index_path(folder: str, base: int) -> str:
    """Name the index of a segment; ``folder`` is the server's."""
    return f"{folder}/{FOLDER}/{segment_name(base)}"


def read_index(
    disk: Disk, place: LogPlace, base: int, end: int, last_crc32c: int
) -> list[CommitGroup | IndexedGroup] | None:
    """The groups of a segment from its index, none of them compared with the segment yet.

    None when there is no index that is whole, belongs to the segment from ``base`` to ``end`` whose last group has that
    header_crc32c, and is worth reading.
    """
    groups = index_groups(disk, place.folder.rpartition("/")[0], place.log_id, base, end, last_crc32c)
    if groups is None or len(groups) == 1:
        return None
    try:
        return [each for group in groups[:-1] for _, batch in group.batches() for each in _decode(batch, place.log_id)]
    except (DataError, BadGroup, struct.error, ValueError, IndexError):
        # The index's own checksums hold, so its contents are a lie or a bug: either way it is not the segment's index.
        return None


def index_groups(
    disk: Disk, folder: str, log_id: int, base: int, end: int, last_crc32c: int
) -> list[CommitGroup] | None:
    """The groups of an index file; None when it is not a whole one, or not of this segment."""
    try:
        file = open_segment(disk, index_path(folder, base), FileKind.INDEX, log_id, write=False)
    except (FileNotFoundError, UnfinishedFile, DataError):
        return None
    try:
        header = file.header
        if (header.base_offset, header.number, header.previous_crc32c) != (base, end, last_crc32c):
            return None
        scan = file.scan(base, last_crc32c)
        groups = list(scan)
    except DataError:
        return None
    finally:
        file.close()
    whole = bool(groups) and not scan.reason and groups[-1].header.kind == GroupKind.TICK
    return groups if whole and len(groups) <= 2 else None


def index_records(batch: Batch) -> Iterator[IndexRecord]:
    """Read the records of an INDEX batch; BatchMalformed when it has none."""
    try:
        for record, whole in _records(batch):
            fields = HEADER.unpack_from(record)
            yield IndexRecord(fields[8], fields[5], fields[6], fields[14], whole)
    except (ValueError, struct.error) as error:
        raise BatchMalformed(f"it holds no records of an index: {error}") from error


def _heap_of(batch: memoryview) -> int | None:
    """Where the heap of a DISPATCH batch begins; None if the batch is of another kind, or has not exactly one
    subject.
    """
    if len(batch) < FRONT_BYTES or U32.unpack_from(batch)[0] != MAGIC or batch[5] != BatchKind.DISPATCH:
        return None
    heap: int = U32.unpack_from(batch, HEAP_OFFSET_AT)[0]
    (subjects,) = U32.unpack_from(batch, SUBJECT_COUNT_AT)
    if subjects != 1 or heap & 7 or heap < FRONT_BYTES or heap + 8 > len(batch):
        return None
    return heap if heap + 8 + padded(U32.unpack_from(batch, heap)[0]) <= len(batch) else None


def _decode(batch: Batch, log_id: int) -> Iterator[CommitGroup | IndexedGroup]:
    for record, whole in _records(batch):
        # The reader compares the record's own offset with the groups around it.
        header = parse_header(record, 0, log_id, int.from_bytes(record[24:32], "little"))
        if whole:
            verify_group(record, header, None)
            yield CommitGroup(header, record[: header.total_bytes])
        else:
            yield _decode_fronts(header, record)


def _records(batch: Batch) -> Iterator[tuple[memoryview, bool]]:
    heap = batch.heap
    position = 0
    while position < len(heap):
        whole, size = RECORD.unpack_from(heap, position)
        if size <= RECORD.size or size & 7 or position + size > len(heap):
            raise ValueError("a record does not fit")
        yield heap[position + RECORD.size : position + size], whole == WHOLE
        position += size


def _decode_fronts(header: GroupHeader, record: memoryview) -> IndexedGroup:
    count, begin = header.batch_count, content_position(header.batch_count)
    rests_at = begin + FRONT_BYTES * count
    names_at = rests_at + padded(4 * count)
    sizes = np.array(batch_sizes(record, header), np.int64)
    fronts = np.frombuffer(record, np.uint64, FRONT_BYTES // 8 * count, begin)
    rests = np.frombuffer(record, np.uint32, count, rests_at)
    names = np.frombuffer(record, np.uint64, (len(record) - names_at) // 8, names_at)
    starts = _name_starts(record, names_at, count)
    return IndexedGroup(header, sizes, fronts, rests, names, starts)


def _name_starts(record: memoryview, position: int, count: int) -> Int64s:
    """Where each subject table begins, in words; one more value is the end of the last one."""
    starts = [0]
    for _ in range(count):
        starts.append(starts[-1] + 1 + (U32.unpack_from(record, position + 8 * starts[-1])[0] + 7 >> 3))
    if position + 8 * starts[-1] != len(record):
        raise ValueError("the names do not fill the record")
    return np.array(starts, np.int64)
