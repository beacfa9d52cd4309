"""Consume log of a subject: from consume sequence to location in O(1) (docs/formats/consume.md, version 1).

It is derived from the message log and written at checkpoints only: entries that no checkpoint names don't count.
Entries stand in pages. The checksum of a page also covers the page's log, subject and place, so a reader finds out when
a page is damaged or belongs elsewhere; then the log is rebuilt (rule L9).

An example: the entry of consume sequence 1,049,600 is number 1,024 of the segment that begins at 1,048,576. That is the
first one of page 2, at byte 64 + 2 * 4,104 = 8,272 of the file.
"""

import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch.sequences import ROW_BITS
from delayd.errors import DamagedData, NewerFormat, read_error
from delayd.log.segment import (
    FILE_HEADER_BYTES,
    FileHeader,
    FileKind,
    Segment,
    UnfinishedFile,
    create_segment,
    open_segment,
)
from delayd.machine.disk import Buffer, Disk, File

SEGMENT_ENTRIES = 1 << 20
ENTRY_BYTES = 8
PAGE_ENTRIES = 512  # A page of 4 KiB is what one look-up reads and checks.
TRAILER = struct.Struct("<I4x")  # CRC32C of the page, behind its last entry.
PAGE_BYTES = PAGE_ENTRIES * ENTRY_BYTES + TRAILER.size
NAME_DIGITS = 20
SUBJECT_DIGITS = 8
SUFFIX = ".log"
NEW_SUFFIX = ".new"  # A segment that is being rebuilt.

_PAGE_NAME = struct.Struct("<QQQ")  # log_id, subject id, consume sequence of the page's first entry.

Entries = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ConsumeTail:
    """How far a consume log is valid: its last segment, how many entries that has, and the CRC32C of its last page.

    ``first`` is the lowest consume sequence that it has an entry for. If the tail is not ``valid``, the log has no
    entries and must be rebuilt, up to ``end``.
    """

    base: int = 0
    count: int = 0
    crc32c: int = 0  # Covers the entries of the last page, as far as it is filled.
    first: int = 0
    valid: bool = True

    @property
    def end(self) -> int:
        """The next consume sequence."""
        return self.base + self.count

    @classmethod
    def lost(cls, end: int) -> "ConsumeTail":
        """The tail of a log that must be rebuilt."""
        return cls(end, 0, 0, end, False)


@dataclass(frozen=True, slots=True)
class ConsumePlace:
    """Where the consume log of one subject lives."""

    folder: str
    log_id: int
    subject_id: int
    suffix: str = SUFFIX

    def path(self, base: int) -> str:
        """Name the segment that begins at the consume sequence ``base``."""
        return f"{self.folder}/{base:0{NAME_DIGITS}}{self.suffix}"


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


def tail_before(place: ConsumePlace, first: int) -> ConsumeTail:
    """The tail of a log whose first entry will be that of ``first``; the places before it in its page are zeros."""
    base = segment_base(first)
    zeros = bytes((first - base) % PAGE_ENTRIES * ENTRY_BYTES)
    return ConsumeTail(base, first - base, crc32c(zeros, _seed(place, first)) if zeros else 0, first)


def append_entries(
    disk: Disk, place: ConsumePlace, tail: ConsumeTail, entries: Entries, now_ms: int, unsynced: list[File]
) -> ConsumeTail:
    """Write entries behind ``tail``; the caller syncs and closes each file that is added to ``unsynced``.

    Entries that an unfinished checkpoint left behind the tail are cut off.

    Raises:
        DamagedData: the file that the tail names is gone or has changed; Unreadable, Shortage: the system does
            not read it.
    """
    while len(entries):
        if tail.count == SEGMENT_ENTRIES:
            tail = ConsumeTail(tail.end, 0, 0, tail.first)
        part = entries[: SEGMENT_ENTRIES - tail.count]
        entries = entries[len(part) :]
        file = _open_at(disk, place, tail, now_ms)
        unsynced.append(file)
        buffers, crc = _paged(place, tail, part)
        file.pwritev(buffers, entry_position(tail.count))
        tail = ConsumeTail(tail.base, tail.count + len(part), crc, tail.first)
    return tail


def read_entries(
    disk: Disk, place: ConsumePlace, sequence: int, count: int, tail: ConsumeTail | None = None
) -> Entries:
    """Read up to ``count`` entries from ``sequence`` on, of one segment, at least one; each page of them is checked.

    Without a ``tail`` the last page of the log, which may not be full, is not checked.

    Raises:
        DamagedData: the file does not hold them, or is not the one that it should be; Unreadable, Shortage: the system
            does not read it.
    """
    base = segment_base(sequence)
    count = min(count, base + SEGMENT_ENTRIES - sequence)
    first, last = (sequence - base) // PAGE_ENTRIES, (sequence + count - 1 - base) // PAGE_ENTRIES
    pages: list[Entries] = []
    segment = _open(disk, place, base, write=False)
    try:
        data = segment.file.pread((last - first + 1) * PAGE_BYTES, FILE_HEADER_BYTES + first * PAGE_BYTES)
    except OSError as error:
        raise read_error(segment.path, entry_position(sequence - base), error) from error
    finally:
        segment.close()
    for page in range(first, last + 1):
        start, size = (page - first) * PAGE_BYTES, PAGE_BYTES - TRAILER.size
        position = FILE_HEADER_BYTES + page * PAGE_BYTES
        crc: int | None = None
        if tail is not None and tail.base == base and tail.count < (page + 1) * PAGE_ENTRIES:
            size, crc = (tail.count - page * PAGE_ENTRIES) * ENTRY_BYTES, tail.crc32c
        elif len(data) >= start + PAGE_BYTES:
            (crc,) = TRAILER.unpack_from(data, start + size)
        elif tail is None:
            size = min(size, (sequence + count - base - page * PAGE_ENTRIES) * ENTRY_BYTES)
        entries = data[start : start + size]
        if len(entries) < size or (crc is None and tail is not None):
            raise DamagedData(segment.path, position, "entries are missing there")
        if crc is not None and crc32c(entries, _seed(place, base + page * PAGE_ENTRIES)) != crc:
            raise DamagedData(segment.path, position, "the checksum of the page differs")
        pages.append(np.frombuffer(entries, np.uint64))
    found: Entries = pages[0] if len(pages) == 1 else np.concatenate(pages)
    skipped = sequence - base - first * PAGE_ENTRIES
    return found[skipped : skipped + count]


def check_tail(disk: Disk, place: ConsumePlace, tail: ConsumeTail) -> None:
    """Check the last segment against the checkpoint: its header, and its last page.

    Raises:
        DamagedData: it is shorter or differs.
    """
    if tail.count and tail.end > tail.first:
        read_entries(disk, place, tail.end - 1, 1, tail)


def read_unchecked(disk: Disk, place: ConsumePlace, base: int) -> Entries:
    """All whole entries of a segment, unchecked, for a reader that has another way to check them."""
    with closing(_open(disk, place, base, write=False)) as segment:
        return entries_in(segment)


def entries_in(segment: Segment) -> Entries:
    """All whole entries of an open segment, unchecked; Unreadable when the system can't read it."""
    try:
        data = segment.file.pread(SEGMENT_ENTRIES // PAGE_ENTRIES * PAGE_BYTES, FILE_HEADER_BYTES)
    except OSError as error:
        raise read_error(segment.path, 0, error) from error
    pages = [data[at : at + PAGE_BYTES - TRAILER.size] for at in range(0, len(data), PAGE_BYTES)]
    whole = b"".join(pages)
    return np.frombuffer(whole[: len(whole) // ENTRY_BYTES * ENTRY_BYTES], np.uint64)


def segment_bases(disk: Disk, place: ConsumePlace) -> list[int]:
    """Consume sequences at which the kept segments begin, rising; other files are no segments."""
    names = [name for name in disk.list_folder(place.folder) if name.endswith(place.suffix)]
    stems = [name.removesuffix(place.suffix) for name in names]
    return [int(stem) for stem in stems if len(stem) == NAME_DIGITS and stem.isdecimal()]


def remove_segments(disk: Disk, place: ConsumePlace, bases: Sequence[int]) -> None:
    """Remove segments by where they begin, durably."""
    for base in bases:
        disk.remove(place.path(base))
    if bases:
        disk.sync_folder(place.folder)


def segment_base(sequence: int) -> int:
    """Where the segment begins that holds ``sequence``."""
    return sequence // SEGMENT_ENTRIES * SEGMENT_ENTRIES


def check_pages(place: ConsumePlace, segment: Segment, base: int) -> tuple[int, int]:
    """Check every full page of a segment; return the number of entries, and of bytes behind the last whole one.

    Raises:
        DamagedData: a page does not check. A page of zeros alone is no damage: it lies before the first entry of a
        rebuilt log.
    """
    entries, position = 0, FILE_HEADER_BYTES
    while data := segment.file.pread(PAGE_BYTES, position):
        if len(data) < PAGE_BYTES:
            # Only a full page has a checksum.
            count = min(len(data) // ENTRY_BYTES, PAGE_ENTRIES - 1)
            return entries + count, len(data) - count * ENTRY_BYTES
        (crc,) = TRAILER.unpack_from(data, PAGE_BYTES - TRAILER.size)
        if crc32c(data[: -TRAILER.size], _seed(place, base + entries)) != crc and data.strip(b"\0"):
            raise DamagedData(segment.path, position, "the checksum of the page differs")
        entries, position = entries + PAGE_ENTRIES, position + PAGE_BYTES
    return entries, 0


def _seed(place: ConsumePlace, sequence: int) -> int:
    """The initial value of a page's checksum: with it no page of another log or place passes for this one."""
    return crc32c(_PAGE_NAME.pack(place.log_id, place.subject_id, sequence // PAGE_ENTRIES * PAGE_ENTRIES))


def _paged(place: ConsumePlace, tail: ConsumeTail, entries: Entries) -> tuple[list[Buffer], int]:
    """The bytes of entries as they stand in the file behind ``tail``, and the checksum of the last page."""
    buffers: list[Buffer] = []
    at, crc = tail.count, tail.crc32c
    data = entries.data.cast("B")
    while len(data):
        if at % PAGE_ENTRIES == 0:
            crc = _seed(place, tail.base + at)
        part = data[: (PAGE_ENTRIES - at % PAGE_ENTRIES) * ENTRY_BYTES]
        data = data[len(part) :]
        at += len(part) // ENTRY_BYTES
        crc = crc32c(part, crc)
        buffers.append(part)
        if at % PAGE_ENTRIES == 0:
            buffers.append(TRAILER.pack(crc))
    return buffers, crc


def _open(disk: Disk, place: ConsumePlace, base: int, *, write: bool) -> Segment:
    """Open a segment; any other file in its place is damage, because the message log can rebuild the right one."""
    path = place.path(base)
    try:
        segment = open_segment(disk, path, FileKind.CONSUME, place.log_id, write=write)
    except FileNotFoundError:
        raise DamagedData(path, 0, "the file is gone") from None
    except UnfinishedFile:
        raise DamagedData(path, 0, "the file header is missing") from None
    except NewerFormat as error:
        raise DamagedData(path, 0, f"it has the format version {error.version}") from None
    except OSError as error:
        raise read_error(path, 0, error) from error
    try:
        _check_place(place, segment, base)
    except DamagedData:
        segment.close()
        raise
    return segment


def _check_place(place: ConsumePlace, segment: Segment, base: int) -> None:
    header = segment.header
    if (header.number, header.base_offset) != (place.subject_id, base):
        what = (
            f"it is of the subject {header.number} from {header.base_offset} on, not of {place.subject_id} from {base}"
        )
        raise DamagedData(segment.path, 0, what)


def _open_at(disk: Disk, place: ConsumePlace, tail: ConsumeTail, now_ms: int) -> File:
    path = place.path(tail.base)
    if not tail.count or tail.end == tail.first:
        disk.make_folder(place.folder)
        if disk.exists(path):
            disk.remove(path)
        header = FileHeader(FileKind.CONSUME, place.log_id, tail.base, place.subject_id, now_ms)
        file = create_segment(disk, path, header).file
        if tail.count:
            # A log that was rebuilt begins within a segment: the bytes before its first entry are a hole.
            file.truncate(entry_position(tail.count))
        return file
    segment = _open(disk, place, tail.base, write=True)
    end, size = entry_position(tail.count), segment.file.size()
    try:
        if size < end:
            raise DamagedData(path, size, f"the file ends {end - size} bytes early")
        if size > end:
            segment.file.truncate(end)
    except BaseException:
        segment.close()
        raise
    return segment.file


def entry_position(entry: int) -> int:
    """Where the entry with this number, counted from the beginning of its segment, stands in the file."""
    page, at = divmod(entry, PAGE_ENTRIES)
    return FILE_HEADER_BYTES + page * PAGE_BYTES + at * ENTRY_BYTES
