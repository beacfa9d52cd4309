"""Groups: reads the groups of files that another process may extend, cut or remove meanwhile (rules L2, L6, P3).

Invariant: a group is handed out only when it checks and is durable: a later group says so, or it stood in the file
before this reader synced that file itself. So the last commit of an idle log is read too, and no group is read that
could vanish.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from delayd.disk import NOTHING_TO_SYNC, Disk, open_named
from delayd.errors import DamagedData, SyncFailed
from delayd.log.group import CommitGroup
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, Segment, UnfinishedFile, open_segment


class LogMoved(Exception):
    """A file that a reader wanted is gone because its server moved on: the reader must start again with a new
    checkpoint (rule P3).
    """


@dataclass(frozen=True, slots=True)
class TornTail:
    """Bytes behind the last group that checks: an append that is under way, or that a crash cut short."""

    path: str
    position: int
    size_bytes: int
    reason: str

    @property
    def sentence(self) -> str:
        """What these bytes are and what becomes of them, for people."""
        return (
            f"{self.path} ends with {self.size_bytes:,} bytes that are no whole group, from byte {self.position} "
            f"({self.reason}): an append under way, one that a crash cut short, or a damaged last group, which the "
            "file alone does not tell apart; the server takes them off at its next start, unless it knows that they "
            "were durable"
        )


def read_groups(
    segment: Segment,
    start: int,
    stop: int,
    torn: list[TornTail],
    *,
    previous_crc32c: int | None = None,
    durable: int = 0,
    last: bool = True,
) -> Iterator[CommitGroup]:
    """Yield the durable groups of one file that lie in [start, stop), offsets of its log.

    Args:
        segment: the file, open.
        start: offset of a group.
        stop: groups that end behind it are left out.
        torn: receives the bytes behind the last group that checks.
        previous_crc32c: header_crc32c of the group before ``start``; None when it is not known.
        durable: an offset below which the caller knows that everything was fsynced.
        last: whether no later segment exists; only the last one may have a torn tail.

    Raises:
        DamagedData: a group does not check and was durable.
    """
    held: deque[CommitGroup] = deque()  # Groups that check and that nothing has called durable yet.
    doubted = -1
    while True:
        scan = segment.scan(start, previous_crc32c)
        for group in scan:
            durable = max(durable, group.header.durable_offset)
            if group.end <= stop:
                held.append(group)
            while held and held[0].end <= durable:
                yield held.popleft()
            if group.end >= stop:
                break
        if not scan.reason:
            break
        if last and scan.offset >= max(durable, segment.durable_named_behind(scan.offset)):
            size_bytes = segment.file.size() - segment.position(scan.offset)
            torn.append(TornTail(segment.path, segment.position(scan.offset), size_bytes, scan.reason))
            break
        if scan.offset == doubted:
            # Damage is only possible below a durable offset or a later segment, so all groups before it are durable.
            yield from held
            raise DamagedData(segment.path, segment.position(scan.offset), scan.reason)
        # A running server may have finished this group and written the next meanwhile, so the reader looks once more.
        doubted = start = scan.offset
        previous_crc32c = scan.crc32c
    if held:
        settle(segment)
        yield from held


def read_log(
    disk: Disk, place: LogPlace, start: int, stop: int, torn: list[TornTail], previous_crc32c: int | None = None
) -> Iterator[CommitGroup]:
    """Yield the durable groups of a log that lie in [start, stop), across its segments.

    ``previous_crc32c`` is the header_crc32c of the group before ``start``; None when it is not known.

    Raises:
        LogMoved: segments were removed while they were to be read.
        DamagedData: a group does not check and was durable, or a segment is missing in between.
    """
    bases = segment_bases(disk, place)
    if not bases or bases[0] > start:
        raise LogMoved(f"{place.folder} begins behind offset {start}")
    offset, crc = start, previous_crc32c
    for index, base in enumerate(bases):
        last = index == len(bases) - 1
        until = stop if last else bases[index + 1]
        if until <= start or base >= stop:
            continue
        segment = open_base(disk, place, base, last=last)
        if segment is None:
            return
        try:
            begin = max(offset, base)
            if begin == base and crc is not None and segment.header.previous_crc32c != crc:
                raise DamagedData(segment.path, 0, "it does not follow the segment before it")
            chain = segment.header.previous_crc32c if begin == base else crc
            offset = begin
            for group in read_groups(segment, begin, min(stop, until), torn, previous_crc32c=chain, last=last):
                offset, crc = group.end, group.header.header_crc32c
                yield group
            if not last and offset < min(stop, until) and until <= stop:
                what = f"it ends at offset {offset}, the next segment begins at {until}"
                raise DamagedData(segment.path, segment.position(offset), what)
        finally:
            segment.close()


def segment_bases(disk: Disk, place: LogPlace) -> list[int]:
    """Base offsets of the segments of a log, by their names."""
    return [int(name[:-4]) for name in disk.list_folder(place.folder) if name.endswith(".log")]


def log_size(disk: Disk, place: LogPlace) -> int:
    """Offset of the end of a log by the size of its last file: all later appends lie above it."""
    bases = segment_bases(disk, place)
    return bases[-1] + file_size(disk, f"{place.folder}/{segment_name(bases[-1])}") if bases else 0


def file_size(disk: Disk, path: str) -> int:
    """Bytes of groups in a file, by its size; LogMoved when it is gone."""
    try:
        file = open_named(disk, path)
    except FileNotFoundError:
        raise LogMoved(f"{path} is gone") from None
    try:
        return max(0, file.size() - FILE_HEADER_BYTES)
    finally:
        file.close()


def open_base(disk: Disk, place: LogPlace, base: int, *, last: bool) -> Segment | None:
    """Open the segment that begins at an offset; None for the last one when its creation did not finish."""
    path = f"{place.folder}/{segment_name(base)}"
    try:
        segment = open_segment(disk, path, place.kind, place.log_id, write=False)
    except FileNotFoundError:
        raise LogMoved(f"{path} is gone") from None
    except UnfinishedFile:
        if last:
            return None
        raise DamagedData(path, 0, "the file header is missing, and later segments exist") from None
    if segment.base_offset != base:
        segment.close()
        raise DamagedData(path, 0, f"its header says that it begins at offset {segment.base_offset}")
    return segment


def settle(segment: Segment) -> None:
    """Make what stands in a file durable, if a reader may."""
    try:
        segment.file.sync()
    except SyncFailed as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in NOTHING_TO_SYNC):
            raise
