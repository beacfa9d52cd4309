"""Skim: reads the groups of a log without the bodies, for a reader that needs few of its rows.

Invariant: everything that is handed out is verified, from fewer bytes: each group's header and table by their checksum
and by the chain, each batch's header and columns by the batch's own checksums. A heap that nobody asks for is neither
read nor verified; `delayd log verify` and an audit of all hours read it.
"""

from collections.abc import Iterator

from crc32c import crc32c

from delayd.batch import HEADER_BYTES, Batch, BatchKind, parse
from delayd.disk import Disk
from delayd.errors import BatchMalformed, DamagedData
from delayd.log.group import (
    HEADER,
    BadGroup,
    CommitGroup,
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
from delayd.reading.groups import LogMoved, TornTail, open_base, read_log, segment_bases

# One read takes the header of a group, and the columns of its first batch unless they are large.
AHEAD_BYTES = 16 << 10
WINDOW_BYTES = 4 << 20  # Read at a time: its end cuts few groups, which are read twice.
WHOLE_BYTES = 2 * AHEAD_BYTES  # If batches are smaller than this on average, reading their group in one go costs less.
FEW_BATCHES = 64
HEAP_OFFSET = slice(16, 20)  # In a batch (docs/formats/batch.md).


class Skimmed:
    """A group whose columns are read: its header, and its batches without their heaps."""

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
        """Yield each batch with its offset in the log; its columns are verified, its heap is not there."""
        begin = content_position(len(self._sizes))
        for size in self._sizes:
            yield self.header.offset + begin, self._front(self._position + begin, size)
            begin += size

    def whole(self, offset: int) -> Batch:
        """Read the batch at an offset with its heap, verified."""
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


class Streamed:
    """A group that is read batch by batch into the same memory, for a reader that copies the parts that it needs.

    All its batches must be taken before the next group; then its content checksum has been verified, too.
    """

    __slots__ = ("_memory", "_position", "_segment", "_sizes", "header")

    def __init__(self, header: GroupHeader, sizes: tuple[int, ...], segment: Segment, memory: "Memory") -> None:
        self.header = header
        self._sizes = sizes
        self._segment = segment
        self._memory = memory
        self._position = segment.position(header.offset)

    @property
    def end(self) -> int:
        """Offset behind the group."""
        return self.header.offset + self.header.total_bytes

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield each batch with its offset; columns and subjects are verified; the heap is verified once all batches
        were taken.

        Raises:
            DamagedData: the group does not check.
            BatchMalformed: it does, and a batch of it does not.
        """
        begin, crc = content_position(len(self._sizes)), 0
        malformed: BatchMalformed | None = None
        for size in self._sizes:
            view = self._memory.view(size)
            if self._segment.file.pread_into(view, self._position + begin) < size:
                raise DamagedData(self._segment.path, self._position, "the batches are cut short")
            crc = crc32c(view, crc)
            if malformed is None:
                try:
                    batch = parse(view)
                    batch.verify_columns()
                    if batch.kind == BatchKind.SCHEDULE:
                        batch.verify_subjects()
                    yield self.header.offset + begin, batch
                except BatchMalformed as error:
                    malformed = error
            begin += size
        if crc != self.header.content_crc32c:
            raise DamagedData(self._segment.path, self._position, "the checksum of the batches differs")
        if malformed is not None:
            raise malformed


def stream_groups(segment: Segment, stop: int, previous_crc32c: int) -> Iterator[Streamed]:
    """Yield the groups of a file from its beginning to ``stop``, all of which are known to be durable.

    Raises:
        DamagedData: a group does not check.
    """
    memory, offset = Memory(), segment.base_offset
    window = _Window(segment, HEADER.size + 4 * FEW_BATCHES)
    while offset < stop:
        position = segment.position(offset)
        try:
            buffer, header = _head(window, position, offset)
            verify_chain(buffer, header, previous_crc32c)
        except BadGroup as error:
            raise DamagedData(segment.path, position, str(error)) from None
        if offset + header.total_bytes > stop:
            return
        yield (group := Streamed(header, batch_sizes(buffer, header), segment, memory))
        offset, previous_crc32c = group.end, header.header_crc32c


def skim_log(
    disk: Disk, place: LogPlace, start: int, stop: int, previous_crc32c: int | None = None, *, whole: bool = False
) -> Iterator[CommitGroup | Skimmed]:
    """Yield the groups of a log that lie in [start, stop), all of which are known to be durable.

    ``start`` is where a segment begins. Groups of small batches are read whole, with ``whole`` all groups: then a group
    is a `CommitGroup`. A group's bytes are in memory that the next group uses again.

    Raises:
        LogMoved: segments were removed while they were to be read.
        DamagedData: a group does not check, or is missing.
    """
    bases = segment_bases(disk, place)
    crc = previous_crc32c
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
            for group in _skim(segment, until, crc, whole=whole):
                crc, end = group.header.header_crc32c, group.end
                yield group
            if end != until and until < stop:
                what = f"it ends at offset {end}, the next segment begins at {until}"
                raise DamagedData(segment.path, segment.position(min(end, until)), what)
        finally:
            segment.close()


def read_known(
    disk: Disk,
    place: LogPlace,
    bounds: tuple[int, int, int],
    torn: list[TornTail],
    previous_crc32c: int | None = None,
    *,
    whole: bool = True,
) -> Iterator[CommitGroup | Skimmed]:
    """Yield the durable groups of a log between two offsets, the first and last of ``bounds``.

    All below the one between them are known to be durable. ``previous_crc32c`` is of the group before, None if unknown.

    Raises:
        LogMoved, DamagedData: as `skim_log` and `read_log`.
    """
    start, durable, stop = bounds
    end, crc = start, previous_crc32c
    if start in segment_bases(disk, place):
        for group in skim_log(disk, place, start, min(durable, stop), crc, whole=whole):
            end, crc = group.end, group.header.header_crc32c
            yield group
    yield from read_log(disk, place, end, stop, torn, crc)


def _skim(segment: Segment, stop: int, previous_crc32c: int, *, whole: bool) -> Iterator[CommitGroup | Skimmed]:
    window = _Window(segment, WINDOW_BYTES if whole else AHEAD_BYTES)
    offset = segment.base_offset
    while offset < stop:
        position = segment.position(offset)
        try:
            group = _group(window, position, offset, previous_crc32c, whole=whole)
        except BadGroup as error:
            raise DamagedData(segment.path, position, str(error)) from None
        yield group
        offset, previous_crc32c = group.end, group.header.header_crc32c


def _group(
    window: "_Window", position: int, offset: int, previous_crc32c: int, *, whole: bool
) -> CommitGroup | Skimmed:
    buffer, header = _head(window, position, offset)
    small = header.total_bytes <= WHOLE_BYTES * max(1, header.batch_count)
    if whole or header.kind != GroupKind.DATA or small:
        buffer = window.view(position, header.total_bytes)
        verify_group(buffer, header, previous_crc32c)
        return CommitGroup(header, buffer[: header.total_bytes])
    verify_chain(buffer, header, previous_crc32c)
    return Skimmed(header, batch_sizes(buffer, header), window, position)


def _head(window: "_Window", position: int, offset: int) -> tuple[memoryview, GroupHeader]:
    buffer = window.view(position, HEADER.size)
    try:
        return buffer, parse_header(buffer, 0, window.log_id, offset)
    except IncompleteGroup as error:
        buffer = window.view(position, error.size_bytes)
        return buffer, parse_header(buffer, 0, window.log_id, offset)


class Memory:
    """Bytes that are used again for each batch: new memory would cost more than reading does."""

    def __init__(self, size: int = 0) -> None:
        self._bytes = bytearray(size)

    def kept(self, used: int, size: int) -> memoryview:
        """Memory of a size whose first bytes are those of the last call."""
        if size > len(self._bytes):
            grown = bytearray(max(size, 2 * len(self._bytes)))
            grown[:used] = memoryview(self._bytes)[:used]
            self._bytes = grown
        return memoryview(self._bytes)[:size]

    def view(self, size: int) -> memoryview:
        """Memory of a size, which the next call uses again."""
        if size > len(self._bytes):
            self._bytes = bytearray(size)
        return memoryview(self._bytes)[:size]


class _Window:
    """The bytes of a file that were read last; each read uses the same memory."""

    def __init__(self, segment: Segment, ahead: int = AHEAD_BYTES) -> None:
        self._ahead = ahead
        self.path = segment.path
        self.log_id = segment.header.log_id
        self._file = segment.file
        self._data = memoryview(b"")
        self._begin = 0
        self._memory = Memory()

    def view(self, position: int, size: int) -> memoryview:
        """The bytes from a position on, and the bytes that were read behind them; fewer than ``size`` where the file
        ends.
        """
        low = position - self._begin
        if low < 0 or low + size > len(self._data):
            data = self._memory.view(max(size, self._ahead))
            self._data, self._begin, low = data[: self._file.pread_into(data, position)], position, 0
        return self._data[low:]
