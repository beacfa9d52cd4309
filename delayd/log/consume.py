"""Consume log of a subject: from consume sequence to location in O(1) (docs/formats/consume.md, version 1).

It is derived from the message log and written at checkpoints only: what a checkpoint does not name is no part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.disk import Disk, File
from delayd.errors import DamagedData
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, create_segment, open_segment

SEGMENT_ENTRIES = 1 << 20
ENTRY_BYTES = 8
ROW_BITS = 16  # A batch has at most 65,536 rows.
ROW_MASK = (1 << ROW_BITS) - 1
NAME_DIGITS = 20
SUBJECT_DIGITS = 8

Entries = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ConsumeTail:
    """How far a consume log is valid: its last segment, how many entries that has, and the CRC32C over them."""

    base: int = 0
    count: int = 0
    crc32c: int = 0

    @property
    def end(self) -> int:
        """The next consume sequence."""
        return self.base + self.count


@dataclass(frozen=True, slots=True)
class ConsumePlace:
    """Where the consume log of one subject lives."""

    folder: str
    log_id: int
    subject_id: int

    def path(self, base: int) -> str:
        """Name the segment that begins at the consume sequence ``base``."""
        return f"{self.folder}/{base:0{NAME_DIGITS}}.log"


def consume_place(folder: str, log_id: int, subject_id: int) -> ConsumePlace:
    """The consume log of a subject in a realtime server's directory."""
    return ConsumePlace(f"{folder}/consume/{subject_id:0{SUBJECT_DIGITS}}", log_id, subject_id)


def entries_of(offsets: Entries, counts: NDArray[np.int64]) -> Entries:
    """Make the entries of whole batches: uint64[sum of counts] of batch offset << 16 | row."""
    total = int(counts.sum())
    starts = np.cumsum(counts) - counts
    rows = np.arange(total, dtype=np.uint64) - np.repeat(starts, counts).astype(np.uint64)
    found: Entries = np.repeat(offsets << np.uint64(ROW_BITS), counts) | rows
    return found


def append_entries(
    disk: Disk, place: ConsumePlace, tail: ConsumeTail, entries: Entries, now_ms: int, unsynced: list[File]
) -> ConsumeTail:
    """Write entries behind ``tail``; the caller syncs and closes each file that is added to ``unsynced``.

    What an unfinished checkpoint left behind the tail is cut.
    """
    while len(entries):
        if tail.count == SEGMENT_ENTRIES:
            tail = ConsumeTail(tail.end, 0, tail.crc32c)
        part = entries[: SEGMENT_ENTRIES - tail.count]
        entries = entries[len(part) :]
        file = _open_at(disk, place, tail, now_ms)
        unsynced.append(file)
        data = part.data.cast("B")
        file.pwritev([data], _position(tail.count))
        crc = crc32c(data, tail.crc32c if tail.count else 0)
        tail = ConsumeTail(tail.base, tail.count + len(part), crc)
    return tail


def read_entries(disk: Disk, place: ConsumePlace, sequence: int, count: int) -> Entries:
    """Read up to ``count`` entries from ``sequence`` on, of one segment, at least one.

    Raises:
        DamagedData: the file does not hold them.
    """
    base = segment_base(sequence)
    count = min(count, base + SEGMENT_ENTRIES - sequence)
    segment = open_segment(disk, place.path(base), FileKind.CONSUME, place.log_id, write=False)
    try:
        data = segment.file.pread(count * ENTRY_BYTES, _position(sequence - base))
    finally:
        segment.close()
    if len(data) != count * ENTRY_BYTES:
        raise DamagedData(segment.path, _position(sequence - base), f"{count} entries are expected there")
    return np.frombuffer(data, np.uint64)


def check_tail(disk: Disk, place: ConsumePlace, tail: ConsumeTail) -> None:
    """Check the last segment against the checkpoint.

    Raises:
        DamagedData: it is shorter or differs.
    """
    if not tail.count:
        return
    path = place.path(tail.base)
    if not disk.exists(path):
        raise DamagedData(path, 0, f"the file is gone, the checkpoint names {tail.count} entries of it")
    data = read_entries(disk, place, tail.base, tail.count)
    if crc32c(data.data.cast("B")) != tail.crc32c:
        raise DamagedData(path, FILE_HEADER_BYTES, "the checksum of its entries differs from the checkpoint")


def segment_bases(disk: Disk, place: ConsumePlace) -> list[int]:
    """Consume sequences at which the kept segments begin, rising."""
    return [int(name[:NAME_DIGITS]) for name in disk.list_folder(place.folder) if name.endswith(".log")]


def remove_segments(disk: Disk, place: ConsumePlace, bases: Sequence[int]) -> None:
    """Remove segments by where they begin, durably."""
    for base in bases:
        disk.remove(place.path(base))
    if bases:
        disk.sync_folder(place.folder)


def segment_base(sequence: int) -> int:
    """Where the segment begins that holds ``sequence``."""
    return sequence // SEGMENT_ENTRIES * SEGMENT_ENTRIES


def _open_at(disk: Disk, place: ConsumePlace, tail: ConsumeTail, now_ms: int) -> File:
    path = place.path(tail.base)
    if not tail.count:
        disk.make_folder(place.folder)
        if disk.exists(path):
            disk.remove(path)
        header = FileHeader(FileKind.CONSUME, place.log_id, tail.base, place.subject_id, now_ms, tail.crc32c)
        return create_segment(disk, path, header).file
    file = open_segment(disk, path, FileKind.CONSUME, place.log_id, write=True).file
    if file.size() > _position(tail.count):
        file.truncate(_position(tail.count))
    return file


def _position(entry: int) -> int:
    return FILE_HEADER_BYTES + entry * ENTRY_BYTES
