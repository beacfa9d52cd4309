"""Schedule log: it reads the batches of an hour's file that a checkpoint counts, whole or without their bodies (rule
P4).
"""

from collections.abc import Iterator

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import HEADER, BatchKind, padded
from delayd.batch.validate import check_subjects
from delayd.delay.filing.hour_table import HourFile, HourFiles
from delayd.delay.quarantine import schedule_beside_path
from delayd.delay.rows import BESIDE
from delayd.delay.stored import Stored
from delayd.errors import BadSubject, BatchMalformed, DamagedData
from delayd.log.group import CommitGroup, content_position
from delayd.log.schedule import open_schedule_log, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, Segment
from delayd.machine.disk import Disk

FRONT_BYTES = 4 << 10  # Room for a batch of 100 rows; from the second batch on, the one before says how much to read.

TABLE_BYTES = 1 << 10  # The subject table of most batches, which stands behind the columns.


def scan_schedule_log(disk: Disk, folder: str, log_id: int, hour: int, file: HourFile) -> Iterator[Stored]:
    """Yield the batches that the checkpoint counts, bodies and all, verified.

    Raises:
        DamagedData: a group does not check, or the file is not the one that the checkpoint counts.
    """
    for group in scan_groups(disk, schedule_path(folder, hour), log_id, hour, file):
        for offset, batch in group.batches():
            yield Stored(offset, 0, batch)


def scan_groups(disk: Disk, path: str, log_id: int, hour: int, file: HourFile) -> Iterator[CommitGroup]:
    """Yield the verified groups that the checkpoint counts of an hour's schedule log, or of the file beside it.

    Raises:
        DamagedData: a group does not check, or the file is not the one that the checkpoint counts.
    """
    segment = open_schedule_log(disk, path, log_id, hour)
    try:
        scan = segment.scan(0, 0)
        while scan.offset < file.length:
            group = next(scan, None)
            if group is None:
                reason = scan.reason or f"the file ends {file.length - scan.offset} bytes early"
                raise DamagedData(segment.path, scan.offset + FILE_HEADER_BYTES, reason)
            yield group
        _check_end(segment, file, scan.offset, scan.crc32c)
    finally:
        segment.close()


def scan_fronts(disk: Disk, folder: str, log_id: int, hour: int, file: HourFile, beside: str = "") -> Iterator[Stored]:
    """Yield the batches that the checkpoint counts, verified up to the end of their subject tables, without bodies.

    ``beside`` is the path of the file beside the hour's own log, if that file is to be read; offsets in it have
    `BESIDE` added.

    Raises:
        DamagedData: something of that does not check, or the file is not the one that the checkpoint counts.
    """
    if not file.length:
        return
    segment = open_schedule_log(disk, beside or schedule_path(folder, hour), log_id, hour)
    base = BESIDE if beside else 0
    try:
        end, crc32c, ahead = 0, 0, FRONT_BYTES
        while end < file.length:
            header, sizes = segment.read_front(end, crc32c)
            at = end + content_position(len(sizes))
            for size in sizes:
                batch = _read_front(segment, at, size, ahead)
                yield Stored(base + at, 0, batch)
                ahead = max(FRONT_BYTES, batch.heap_offset + TABLE_BYTES)
                at += size
            end, crc32c = at, header.header_crc32c
        _check_end(segment, file, end, crc32c)
    finally:
        segment.close()


def scan_hour(disk: Disk, folder: str, log_id: int, hour: int, files: HourFiles) -> Iterator[Stored]:
    """Yield the batches of an hour's schedule log and of the file beside it, as `scan_fronts` does."""
    yield from scan_fronts(disk, folder, log_id, hour, files.own)
    yield from scan_fronts(disk, folder, log_id, hour, files.beside, schedule_beside_path(folder, hour))


def _check_end(segment: Segment, file: HourFile, end: int, crc32c: int | None) -> None:
    if (end, crc32c) != (file.length, file.last_crc32c):
        reason = f"these are other groups than the {file.length} bytes that the checkpoint counts"
        raise DamagedData(segment.path, FILE_HEADER_BYTES, reason)


def _read_front(segment: Segment, offset: int, size: int, ahead: int) -> Batch:
    """Read a batch up to the end of its subject table, most often in one read of ``ahead`` bytes."""
    position = segment.position(offset)
    data = segment.file.pread(min(size, ahead), position)
    try:
        needed = _front_bytes(data)
        while len(data) < needed <= size:
            data = segment.file.pread(min(size, needed + TABLE_BYTES), position)
            needed = _front_bytes(data)
        batch = parse(data, front=True)
        if batch.total_bytes != size or batch.kind is not BatchKind.SCHEDULE:
            raise BatchMalformed(f"a batch of {batch.total_bytes} bytes, the group's table says {size}")
        batch.verify_columns()
        check_subjects(batch)
        batch.verify_subjects()
    except (BatchMalformed, BadSubject) as error:
        raise DamagedData(segment.path, position, f"the batch at offset {offset}: {error}") from None
    return batch


def _front_bytes(data: bytes) -> int:
    """How many bytes of a batch lie before its headers and bodies, as far as ``data`` tells; this verifies nothing."""
    if len(data) < HEADER.size:
        return HEADER.size
    fields = HEADER.unpack_from(data)
    heap_offset: int = fields[6]
    subject_count: int = fields[9]
    ends = heap_offset + 4 * subject_count
    if not subject_count or len(data) < ends:
        return ends
    return heap_offset + padded(4 * subject_count) + padded(int.from_bytes(data[ends - 4 : ends], "little"))
