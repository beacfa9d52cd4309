"""Schedule log: it reads the batches of an hour's file that a checkpoint counts, whole or without their bodies (rule
P4).

`Sources` find the batch that holds a pending row, from the row's location, in the message log or in a schedule log.
Recent batches of the message log stay in memory as they arrived. Older ones, and those of schedule logs, are read and
verified once, and stay in a cache for as long as it has room.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BYTES_MAX, HEADER, BatchKind, padded
from delayd.batch.content import differing_row
from delayd.batch.sequences import OFFSET_MAX, ROW_BITS, SCHEDULE_BIT
from delayd.batch.validate import check_subjects
from delayd.delay.filing.hour_table import HourFile, HourPart
from delayd.delay.rows import BESIDE, Stored
from delayd.errors import BadSubject, BatchMalformed, DamagedData
from delayd.log.group import CommitGroup, content_position
from delayd.log.hour import open_schedule_log, schedule_beside_path, schedule_path
from delayd.log.log import Log
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
    with closing(open_schedule_log(disk, path, log_id, hour)) as segment:
        scan = segment.scan(0, 0)
        while scan.offset < file.length:
            group = next(scan, None)
            if group is None:
                reason = scan.reason or f"the file ends {file.length - scan.offset} bytes early"
                raise DamagedData(segment.path, scan.offset + FILE_HEADER_BYTES, reason)
            yield group
        _check_end(segment, file, scan.offset, scan.crc32c)


def scan_fronts(disk: Disk, folder: str, log_id: int, part: HourPart) -> Iterator[Stored]:
    """Yield the batches that the checkpoint counts, verified up to the end of their subject tables, without bodies;
    offsets in a file beside a damaged log have `BESIDE` added.

    Raises:
        DamagedData: something of that does not check, or the file is not the one that the checkpoint counts.
    """
    file = part.counted
    segment = open_schedule_log(disk, part.path(folder), log_id, part.hour)
    base = BESIDE if part.is_beside else 0
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


READ_AHEAD_BYTES = 64 << 10  # Holds most batches, so that one read is enough where the length is not known.
READER_CACHE_BYTES = 16 << 20  # One batch at its limit.
FILES_MAX = 64  # Schedule logs kept open; the loaded hours are a handful.


class Sources:
    """Batches by location; for the loop alone."""

    def __init__(self, disk: Disk, folder: str, log: Log, tail_bytes: int, cache_bytes: int) -> None:
        self._disk = disk
        self._folder = folder
        self._log = log
        self._tail: dict[int, Batch] = {}  # In the order of the log.
        self._tail_bytes = 0
        self._tail_bytes_max = tail_bytes
        self._cache: OrderedDict[tuple[int, int], Batch] = OrderedDict()
        self._cache_bytes = 0
        self._cache_bytes_max = cache_bytes
        # By hour, and whether it is the file beside a damaged log.
        self._files: OrderedDict[tuple[int, bool], Segment] = OrderedDict()

    def remember(self, stored: list[Stored]) -> None:
        """Keep batches that have just been appended to the message log."""
        for entry in stored:
            self._tail[entry.offset] = entry.batch
            self._tail_bytes += entry.batch.total_bytes
        while self._tail_bytes > self._tail_bytes_max and len(self._tail) > 1:
            oldest = next(iter(self._tail))
            self._tail_bytes -= self._tail.pop(oldest).total_bytes

    def batch(self, hour: int, location: int) -> Batch:
        """The verified batch of a row filed in ``hour``.

        Raises:
            DamagedData: its bytes do not check or can't be read, with path and position.
            Shortage: this process can't read now.
        """
        # All locations in schedule logs are higher than those of the message log, so they can't be found in the tail.
        batch = self._tail.get(location >> ROW_BITS)
        if batch is not None:
            return batch
        offset = location >> ROW_BITS & OFFSET_MAX
        key = (0 if location < SCHEDULE_BIT else hour, offset)
        batch = self._cache.get(key)
        if batch is None:
            batch = self._read(key[0], offset)
            self._cache[key] = batch
            self._cache_bytes += batch.total_bytes
            while self._cache_bytes > self._cache_bytes_max and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._cache_bytes -= oldest.total_bytes
        else:
            self._cache.move_to_end(key)
        return batch

    def reader(self, cache_bytes: int = READER_CACHE_BYTES) -> "Sources":
        """A reader of the same files for one job on another thread, which closes it."""
        return Sources(self._disk, self._folder, self._log, 0, cache_bytes)

    def forget_hour(self, hour: int) -> None:
        """Close the schedule log of an hour and drop its batches: its file is deleted or replaced."""
        for beside in (False, True):
            segment = self._files.pop((hour, beside), None)
            if segment is not None:
                segment.close()
        for key in [key for key in self._cache if key[0] == hour]:
            self._cache_bytes -= self._cache.pop(key).total_bytes

    def close(self) -> None:
        """Close the files."""
        for segment in self._files.values():
            segment.close()
        self._files.clear()

    def _read(self, hour: int, offset: int) -> Batch:
        if not hour:
            return read_batch(self._log.file_position, self._log.read_some, offset)
        beside = offset >= BESIDE
        segment = self._segment(hour, beside)
        offset -= BESIDE if beside else 0
        batch = read_batch(
            lambda at: (segment.path, segment.position(at)),
            lambda at, size: segment.file.pread(size, segment.position(at)),
            offset,
        )
        # The hashes were made when the rows were filed; from here on they go with the rows (rule S6).
        row = differing_row(batch)
        if row is not None:
            what = f"the batch at offset {offset}: row {row} has other content than the hash says that was filed"
            raise DamagedData(segment.path, segment.position(offset), what)
        return batch

    def _segment(self, hour: int, beside: bool) -> Segment:
        segment = self._files.get((hour, beside))
        if segment is None:
            path = (schedule_beside_path if beside else schedule_path)(self._folder, hour)
            segment = open_schedule_log(self._disk, path, self._log.place.log_id, hour)
            self._files[(hour, beside)] = segment
            if len(self._files) > FILES_MAX:
                self._files.popitem(last=False)[1].close()
        return segment


def read_batch(place: Callable[[int], tuple[str, int]], read: Callable[[int, int], bytes], offset: int) -> Batch:
    """Read and verify the batch at ``offset`` of its log.

    ``place`` says of an offset the file and the byte in it; ``read(offset, size)`` may return fewer bytes at the end of
    a file.

    Raises:
        DamagedData: the bytes do not check or can't be read.
        Shortage: this process can't read now.
    """
    data = read(offset, READ_AHEAD_BYTES)
    try:
        if len(data) >= HEADER.size:
            total_bytes = HEADER.unpack_from(data)[4]
            # Bytes that are not a batch can say any size.
            if len(data) < total_bytes <= BYTES_MAX:
                data = read(offset, total_bytes)
        batch = parse(data)
        batch.verify()
    except BatchMalformed as error:
        raise DamagedData(*place(offset), f"the batch at offset {offset}: {error}") from error
    return batch
