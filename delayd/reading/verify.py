"""Verification: every byte of a data directory's files against its checksums, file by file.

Invariant: damage in one file is named, with path and position, and does not keep the others from being read.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from delayd.batch import Batch, BatchKind, ColumnId
from delayd.disk import Disk, RealDisk
from delayd.errors import BatchMalformed, DamagedData, DataError
from delayd.hours import hour_name
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_checkpoint
from delayd.log.consume import ENTRY_BYTES, NAME_DIGITS, SEGMENT_ENTRIES
from delayd.log.group import Group, GroupKind
from delayd.log.schedule import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, UnfinishedFile, open_segment
from delayd.reading.directory import Directory, Role, find_directories
from delayd.reading.groups import TornTail, read_groups
from delayd.reading.schedule import take_snapshot

LOGS = {
    Role.DELAY: (("message", FileKind.MESSAGE), ("schedule", FileKind.SCHEDULE), ("dispatch", FileKind.DISPATCH)),
    Role.REALTIME: (("message", FileKind.REALTIME), ("consume", FileKind.CONSUME), ("pull", FileKind.PULL)),
}
ONE_LOG = (FileKind.MESSAGE, FileKind.REALTIME, FileKind.PULL)  # The files of these folders follow one another.
HOURLY = (FileKind.SCHEDULE, FileKind.DISPATCH)
KINDS = {
    FileKind.MESSAGE: BatchKind.PRODUCER,
    FileKind.SCHEDULE: BatchKind.SCHEDULE,
    FileKind.DISPATCH: BatchKind.OUTCOME,
    FileKind.REALTIME: BatchKind.DISPATCH,
    FileKind.PULL: BatchKind.PULL,
}
READ_BYTES = 4 << 20

Progress = Callable[[int, int], None]  # Files read, files in all.


@dataclass(frozen=True, slots=True)
class FileReport:
    """What one file holds; ``damage`` is empty when everything in it checks."""

    path: str
    kind: str
    size_bytes: int
    groups: int = 0
    batches: int = 0
    rows: int = 0
    torn: TornTail | None = None
    damage: str = ""
    position: int = 0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All files, by path."""

    files: tuple[FileReport, ...]

    @property
    def damaged(self) -> tuple[FileReport, ...]:
        """The files with damage."""
        return tuple(file for file in self.files if file.damage)

    @property
    def torn(self) -> tuple[TornTail, ...]:
        """Tails that an append left, which is under way or which a crash cut short: recovery cuts them."""
        return tuple(file.torn for file in self.files if file.torn is not None)

    @property
    def sound(self) -> bool:
        """Whether no file is damaged."""
        return not self.damaged


@dataclass(frozen=True, slots=True)
class _Place:
    """A file to be read: where, what it should be, and whether another file of its log follows."""

    directory: Directory
    path: str
    kind: FileKind
    last: bool
    durable: int = 0


class _Link(NamedTuple):
    """What the next file of a log must follow: its base offset, and the checksum that its header must name."""

    end: int
    crc32c: int


def verify_directory(data: str, *, progress: Progress | None = None, disk: Disk | None = None) -> VerifyReport:
    """Read every file of the servers in ``data``, live, stopped or copied; nothing is changed.

    Args:
        data: the directory that `delayd up --data` was given, or one server's.
        progress: called with the files read and all files.
        disk: where ``data`` is.

    Raises:
        BadArgument: there is nothing to verify.
        DamagedData, NewerFormat: not even whose directory it is can be read.
    """
    disk = disk or RealDisk()
    places = [place for directory in find_directories(disk, data) for place in _places(disk, directory)]
    reports: list[FileReport] = []
    before, link = "", None
    for done, place in enumerate(places, 1):
        folder = place.path.rpartition("/")[0]
        found = _verify(disk, place, link if folder == before else None)
        before, link = folder, found[1] if found else None
        if found is not None:
            reports.append(found[0])
        if progress is not None:
            progress(done, len(places))
    return VerifyReport(tuple(reports))


def _places(disk: Disk, directory: Directory) -> Iterator[_Place]:
    if disk.exists(f"{directory.path}/{CHECKPOINT}"):
        yield _Place(directory, f"{directory.path}/{CHECKPOINT}", FileKind.CHECKPOINT, True)
    lengths: dict[str, int] = {}
    if directory.role == Role.DELAY:
        lengths = _published_lengths(disk, directory)
    for name, kind in LOGS[directory.role]:
        folder = f"{directory.path}/{name}"
        folders = [folder] if kind in ONE_LOG else [f"{folder}/{inner}" for inner in disk.list_folder(folder)]
        for inner in folders:
            names = [name for name in disk.list_folder(inner) if name.endswith(".log")]
            for index, name in enumerate(names):
                path = f"{inner}/{name}"
                last = kind in HOURLY or index == len(names) - 1
                yield _Place(directory, path, kind, last, lengths.get(path, 0))


def _published_lengths(disk: Disk, directory: Directory) -> dict[str, int]:
    """How much of each schedule log the checkpoint calls durable; nothing when it can't be read, which is reported."""
    try:
        hours = take_snapshot(disk, directory).hours
    except DataError:
        return {}
    return {schedule_path(directory.path, hour): filed.length for hour, filed in hours.items()}


def _verify(disk: Disk, place: _Place, link: _Link | None) -> tuple[FileReport, _Link | None] | None:
    """Read one file: what is in it, and what the next file of its log must follow; None when it is gone."""
    counts = _Counts()
    torn: list[TornTail] = []
    size_bytes, damage, position = 0, "", 0
    found: _Link | None = None
    try:
        if place.kind == FileKind.CHECKPOINT:
            size_bytes = _size(disk, place.path)
            read_checkpoint(disk, place.directory.path, place.directory.log_id)
        else:
            segment = open_segment(disk, place.path, place.kind, place.directory.log_id, write=False)
            try:
                size_bytes = segment.file.size()
                found = _read(place, segment, link, counts, torn)
            finally:
                segment.close()
    except FileNotFoundError:
        return None  # Retention of a running server removed it in this moment.
    except UnfinishedFile:
        damage = "" if place.last else "the file header is missing, and later segments exist"
    except DamagedData as error:
        damage, position = error.what, error.position
    except DataError as error:
        damage = error.message
    kind = place.kind.name.lower()
    rest = (torn[0] if torn else None, damage, position)
    return FileReport(place.path, kind, size_bytes, counts.groups, counts.batches, counts.rows, *rest), found


def _read(place: _Place, segment: Segment, link: _Link | None, counts: "_Counts", torn: list[TornTail]) -> _Link | None:
    header = segment.header
    _check_name(place, header)
    if link is not None and (header.base_offset, header.previous_crc32c) != (link.end, link.crc32c):
        raise DamagedData(place.path, 0, f"it does not follow the file before it, which ends at {link.end}")
    if place.kind == FileKind.CONSUME:
        return _read_entries(place, segment, counts)
    begin = 0 if place.kind in HOURLY else header.base_offset
    end, crc = begin, header.previous_crc32c
    for group in read_groups(
        *(segment, begin, sys.maxsize, torn),
        previous_crc32c=crc,
        durable=place.durable,
        last=place.last,
    ):
        end, crc = group.end, group.header.header_crc32c
        _check_group(segment, group, counts)
    if end < place.durable:
        position = segment.position(end)
        raise DamagedData(place.path, position, f"the checkpoint says that {place.durable - end} more bytes are there")
    return None if place.kind in HOURLY else _Link(end, crc)


def _check_name(place: _Place, header: FileHeader) -> None:
    name = place.path.rpartition("/")[2]
    if place.kind in HOURLY:
        expected = f"{hour_name(header.number)}.log"
    else:
        expected = f"{header.base_offset:0{NAME_DIGITS}}.log"
    if name != expected:
        raise DamagedData(place.path, 0, f"its header says that it is {expected}")


def _check_group(segment: Segment, group: Group, counts: "_Counts") -> None:
    header = group.header
    # Replay, hours and leases rest on the instants of the message logs; those of others are only read by people.
    if header.appended_at_ms < counts.appended_at_ms and segment.header.kind in (FileKind.MESSAGE, FileKind.REALTIME):
        what = f"its instant {header.appended_at_ms} is before that of the group before it"
        raise DamagedData(segment.path, segment.position(header.offset), what)
    counts.appended_at_ms = header.appended_at_ms
    counts.groups += 1
    expected = BatchKind.CONTROL if header.kind == GroupKind.CONTROL else KINDS[FileKind(segment.header.kind)]
    position = segment.position(header.offset)
    try:
        for offset, batch in group.batches():
            position = segment.position(offset)
            # The group's checksum says that these bytes were written; the batch's own, that its maker made them.
            batch.verified = False
            batch.verify()
            if batch.kind != expected:
                raise BatchMalformed(f"a batch of kind {batch.kind.name} has no place there")
            if batch.kind == BatchKind.SCHEDULE:
                counts.check_rising(batch)
            counts.batches += 1
            counts.rows += 0 if batch.kind == BatchKind.CONTROL else batch.count
    except BatchMalformed as error:
        raise DamagedData(segment.path, position, error.message) from error


def _read_entries(place: _Place, segment: Segment, counts: "_Counts") -> _Link | None:
    """Entries of a consume log have no checksum of their own; a whole segment's is in the header of the next."""
    crc, position = 0, FILE_HEADER_BYTES
    while data := segment.file.pread(READ_BYTES, position):
        crc = crc32c(data, crc)
        position += len(data)
    counts.rows = (position - FILE_HEADER_BYTES) // ENTRY_BYTES
    if not place.last and counts.rows != SEGMENT_ENTRIES:
        raise DamagedData(place.path, position, f"it has {counts.rows} entries, and a later segment exists")
    return _Link(segment.header.base_offset + counts.rows, crc)


def _size(disk: Disk, path: str) -> int:
    file = disk.open(path)
    try:
        return file.size()
    finally:
        file.close()


@dataclass(slots=True)
class _Counts:
    """What was read of a file so far."""

    groups: int = 0
    batches: int = 0
    rows: int = 0
    appended_at_ms: int = 0
    sequence: int = -1

    def check_rising(self, batch: Batch) -> None:
        """A schedule log rises in sequence, across its batches too."""
        sequence = batch.uint64s(ColumnId.SEQUENCE)
        if int(sequence[0]) <= self.sequence or not (sequence[1:] > sequence[:-1]).all():
            raise BatchMalformed(f"sequences do not rise behind {self.sequence}")
        self.sequence = int(sequence[-1])
