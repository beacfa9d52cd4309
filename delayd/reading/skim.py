"""Skim: the groups of a log without the bodies, for a reader that wants few of its rows.

Invariant: whatever is handed out is proved, by fewer bytes: each group's header and table by their checksum and by the
chain, each batch's header and columns by the batch's own checksums. A heap that nobody asked for is neither read nor
proved; `delayd log verify` and an audit of all hours read it.
"""

from collections.abc import Iterator

from delayd.batch import HEADER_BYTES, Batch, parse
from delayd.disk import Disk
from delayd.errors import BatchMalformed, DamagedData
from delayd.log.group import (
    HEADER,
    BadGroup,
    Group,
    GroupHeader,
    GroupKind,
    IncompleteGroup,
    batch_sizes,
    content_position,
    parse_header,
    verify_chain,
    verify_group,
)
from delayd.log.log import LogPlace
from delayd.log.segment import Segment
from delayd.reading.groups import LogMoved, open_base, segment_bases

AHEAD_BYTES = 16 << 10  # One read takes the header of a group, and the columns of a first batch that is not large.
WHOLE_BYTES = 2 * AHEAD_BYTES  # Batches that are smaller on average cost less when their group is read in one go.
HEAP_OFFSET = slice(16, 20)  # In a batch (docs/formats/batch.md).


class Skimmed:
    """A group of which the columns are read: its header, and its batches without their heaps."""

    __slots__ = ("_position", "_sizes", "_window", "header")

    def __init__(self, header: GroupHeader, sizes: tuple[int, ...], window: "_Window", position: int) -> None:
        self.header = header
        self._sizes = sizes
        self._window = window
        self._position = position

    @property
    def end(self) -> int:
        """Offset behind the group."""
        return self.header.offset + self.header.total_bytes

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield each batch with its offset in the log; its columns are proved, its heap is not there."""
        begin = content_position(len(self._sizes))
        for size in self._sizes:
            yield self.header.offset + begin, self._front(self._position + begin, size)
            begin += size

    def whole(self, offset: int) -> Batch:
        """Read the batch at an offset with its heap, proved."""
        position = self._position + offset - self.header.offset
        try:
            front = self._window.view(position, HEADER_BYTES)
            batch = parse(self._window.view(position, int.from_bytes(front[8:12], "little")))
            batch.verify()
        except BatchMalformed as error:
            raise DamagedData(self._window.path, position, str(error)) from None
        return batch

    def _front(self, position: int, size: int) -> Batch:
        front = self._window.view(position, min(size, HEADER_BYTES))
        columns = int.from_bytes(front[HEAP_OFFSET], "little")
        try:
            batch = parse(self._window.view(position, min(size, max(columns, HEADER_BYTES))), front=True)
            batch.verify_columns()
            if batch.total_bytes != size:
                raise BatchMalformed(f"it says {batch.total_bytes} bytes, its group {size}")
        except BatchMalformed as error:
            raise DamagedData(self._window.path, position, str(error)) from None
        return batch


def skim_log(disk: Disk, place: LogPlace, start: int, stop: int) -> Iterator[Group | Skimmed]:
    """Yield the groups of a log that lie in [start, stop), all of which are known to be durable.

    ``start`` is where a segment begins. What lies close together is read whole: then a group is a `Group`.

    Raises:
        LogMoved: segments were removed while they were to be read.
        DamagedData: a group does not check, or is missing.
    """
    bases = segment_bases(disk, place)
    crc: int | None = None
    for index, base in enumerate(bases):
        if base < start or base >= stop:
            continue
        segment = open_base(disk, place, base, last=index == len(bases) - 1)
        if segment is None:
            raise LogMoved(f"segment {base} of {place.folder} is gone")
        try:
            if crc is not None and segment.header.previous_crc32c != crc:
                raise DamagedData(segment.path, 0, "it does not follow the segment before it")
            until = min(stop, bases[index + 1]) if index + 1 < len(bases) else stop
            crc, end = segment.header.previous_crc32c, base
            for group in _skim(segment, until, crc):
                crc, end = group.header.header_crc32c, group.end
                yield group
            if end != until and until < stop:
                what = f"it ends at offset {end}, the next segment begins at {until}"
                raise DamagedData(segment.path, segment.position(min(end, until)), what)
        finally:
            segment.close()


def _skim(segment: Segment, stop: int, previous_crc32c: int) -> Iterator[Group | Skimmed]:
    window = _Window(segment)
    offset = segment.base_offset
    while offset < stop:
        position = segment.position(offset)
        try:
            group = _group(window, position, offset, previous_crc32c)
        except BadGroup as error:
            raise DamagedData(segment.path, position, str(error)) from None
        yield group
        offset, previous_crc32c = group.end, group.header.header_crc32c


def _group(window: "_Window", position: int, offset: int, previous_crc32c: int) -> Group | Skimmed:
    buffer = window.view(position, HEADER.size)
    try:
        header = parse_header(buffer, 0, window.log_id, offset)
    except IncompleteGroup as error:
        buffer = window.view(position, error.size_bytes)
        header = parse_header(buffer, 0, window.log_id, offset)
    small = header.total_bytes <= WHOLE_BYTES * max(1, header.batch_count)
    if header.kind != GroupKind.DATA or small:
        buffer = window.view(position, header.total_bytes)
        verify_group(buffer, header, previous_crc32c)
        return Group(header, buffer[: header.total_bytes])
    verify_chain(buffer, header, previous_crc32c)
    return Skimmed(header, batch_sizes(buffer, header), window, position)


class _Window:
    """The bytes of a file that were read last."""

    def __init__(self, segment: Segment) -> None:
        self.path = segment.path
        self.log_id = segment.header.log_id
        self._file = segment.file
        self._data = memoryview(b"")
        self._begin = 0

    def view(self, position: int, size: int) -> memoryview:
        """The bytes from a position on, and what was read behind them; fewer than ``size`` where the file ends."""
        low = position - self._begin
        if low < 0 or low + size > len(self._data):
            self._data, self._begin = memoryview(self._file.pread(max(size, AHEAD_BYTES), position)), position
            low = 0
        return self._data[low:]
