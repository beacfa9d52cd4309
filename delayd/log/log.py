"""Log: ordered segments that are one sequence of groups, in one folder (docs/formats/segment.md).

One thread appends and flushes; any thread reads what is durable.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from delayd.disk import Disk
from delayd.errors import DamagedData
from delayd.log.group import Group, NewGroup
from delayd.log.segment import (
    FileHeader,
    FileKind,
    Recovered,
    Segment,
    UnfinishedFile,
    create_segment,
    open_segment,
)

SEGMENT_BYTES = 256 << 20  # Small enough that retention frees space often, large enough that rolls are rare.
NAME_DIGITS = 20


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a log lives and what it is."""

    folder: str
    kind: FileKind
    log_id: int
    segment_bytes: int = SEGMENT_BYTES


class Log:
    """An open log; made by `open_log`. ``end`` and ``durable`` are offsets."""

    def __init__(self, disk: Disk, place: LogPlace, segments: list[Segment], recovered: list[Recovered]) -> None:
        self.disk = disk
        self.place = place
        self.recovered = recovered
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]

    @property
    def start(self) -> int:
        """Offset of the first group that is kept."""
        return self._segments[0].base_offset

    @property
    def end(self) -> int:
        """Offset where the next group goes."""
        return self._segments[-1].end

    @property
    def durable(self) -> int:
        """Offset up to which everything is fsynced."""
        return self._segments[-1].durable

    @property
    def crc32c(self) -> int:
        """The header_crc32c of the last group."""
        return self._segments[-1].crc32c

    def append(self, groups: Sequence[NewGroup], now_ms: int) -> list[int]:
        """Write groups at the end, in one segment, not durable yet: their offsets. Rolls first when it is full.

        Raises:
            DiskFull, OSError: nothing was appended.
            ServerStopped: the disk is in a state that only a restart resolves.
        """
        last = self._segments[-1]
        if last.end - last.base_offset >= self.place.segment_bytes:
            self._roll(last, now_ms)
        return self._segments[-1].append(groups)

    def flush(self) -> None:
        """Fsync what was appended."""
        self._segments[-1].flush()

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes of one group at ``offset``; DamagedData when they are not there."""
        return self._segment_of(offset).read(offset, size)

    def read_some(self, offset: int, size: int) -> bytes:
        """Read up to ``size`` bytes at ``offset``, fewer where the segment ends."""
        segment = self._segment_of(offset)
        return segment.file.pread(size, segment.position(offset))

    def scan(self, start: int, stop: int, previous_crc32c: int | None = None) -> Iterator[Group]:
        """Yield the verified groups from ``start`` up to ``stop``, which must be durable.

        Raises:
            DamagedData: a group between them does not check.
        """
        while start < stop:
            segment = self._segment_of(start)
            scan = segment.scan(start, previous_crc32c)
            for group in scan:
                if group.header.offset >= stop:
                    return
                yield group
            if scan.reason or (scan.offset < stop and scan.offset == start):
                raise DamagedData(segment.path, segment.position(scan.offset), scan.reason or "the log ends early")
            start, previous_crc32c = scan.offset, scan.crc32c

    def delete_below(self, offset: int) -> int:
        """Remove whole segments that end at or below ``offset``, never the last one: the bytes freed."""
        freed = 0
        while len(self._segments) > 1 and self._segments[1].base_offset <= offset:
            segment = self._segments.pop(0)
            self._bases.pop(0)
            freed += segment.file.size()
            segment.close()
            self.disk.remove(segment.path)
        if freed:
            self.disk.sync_folder(self.place.folder)
        return freed

    def close(self) -> None:
        """Close every file; what was appended must have been flushed."""
        for segment in self._segments:
            segment.close()

    def _segment_of(self, offset: int) -> Segment:
        index = bisect.bisect_right(self._bases, offset) - 1
        if index < 0:
            path = f"{self.place.folder}/{segment_name(offset)}"
            raise DamagedData(path, 0, f"the log begins at offset {self.start}, {offset} is not kept any more")
        return self._segments[index]

    def _roll(self, last: Segment, now_ms: int) -> None:
        if last.durable < last.end:
            last.flush()
        header = FileHeader(self.place.kind, self.place.log_id, last.end, 0, now_ms, last.crc32c)
        segment = _create(self.disk, self.place, header)
        self._segments.append(segment)
        self._bases.append(segment.base_offset)


def segment_name(base_offset: int) -> str:
    """Name the file of the segment that begins at ``base_offset``."""
    return f"{base_offset:0{NAME_DIGITS}}.log"


def open_log(disk: Disk, place: LogPlace, now_ms: int, start: int = 0, previous_crc32c: int | None = 0) -> Log:
    """Open or create a log and recover its tail: from ``start`` on every group is verified (rules L1, L5).

    Args:
        disk: where the folder is.
        place: what to open.
        now_ms: stamped into a file that is created.
        start: an offset below which everything is known to be durable, of a checkpoint.
        previous_crc32c: header_crc32c of the group that ends there; None when it is not known.

    Raises:
        DamagedData, NewerFormat: with the path and what to do.
    """
    disk.make_folder(place.folder)
    segments = list_segments(disk, place, write=True)
    if not segments:
        if start:
            path = f"{place.folder}/{segment_name(0)}"
            raise DamagedData(path, 0, f"the log is gone, its checkpoint is at offset {start}")
        segments.append(_create(disk, place, FileHeader(place.kind, place.log_id, 0, 0, now_ms, 0)))
    if segments[0].base_offset > start:
        raise DamagedData(segments[0].path, 0, f"the segments before offset {segments[0].base_offset} are gone")
    recovered: list[Recovered] = []
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        following = None if last else segments[index + 1]
        if following is not None and following.base_offset <= start:
            segment.end = segment.durable = following.base_offset
            segment.crc32c = following.header.previous_crc32c
            continue
        begin = max(start, segment.base_offset)
        crc = previous_crc32c if begin == start else segment.header.previous_crc32c
        found = segment.recover(begin, crc, begin, last)
        if begin == start and segment.end == begin and previous_crc32c is not None:
            segment.crc32c = previous_crc32c
        if found.cut_bytes or found.rewritten_bytes:
            recovered.append(found)
        if following is not None and segment.end != following.base_offset:
            what = f"it ends at offset {segment.end}, the next segment begins at {following.base_offset}"
            raise DamagedData(segment.path, segment.position(segment.end), what)
    return Log(disk, place, segments, recovered)


def list_segments(disk: Disk, place: LogPlace, *, write: bool, log_id: int | None = None) -> list[Segment]:
    """Open all segments of a folder in order; with ``write`` a last one whose creation did not finish is removed."""
    names = [name for name in disk.list_folder(place.folder) if name.endswith(".log")]
    segments: list[Segment] = []
    for index, name in enumerate(names):
        path = f"{place.folder}/{name}"
        try:
            segment = open_segment(disk, path, place.kind, place.log_id if log_id is None else log_id, write=write)
        except UnfinishedFile:
            if index != len(names) - 1:
                raise DamagedData(path, 0, "the file header is missing, and later segments exist") from None
            if write:
                disk.remove(path)
                disk.sync_folder(place.folder)
            break
        if name != segment_name(segment.base_offset):
            raise DamagedData(path, 0, f"its header says that it begins at offset {segment.base_offset}")
        segments.append(segment)
    return segments


def _create(disk: Disk, place: LogPlace, header: FileHeader) -> Segment:
    return create_segment(disk, f"{place.folder}/{segment_name(header.base_offset)}", header)
