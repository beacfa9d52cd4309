"""Groups: reads the groups of files that another process may extend, cut or remove meanwhile (rules L2, L6, P3).

Invariant: a group is handed out only when it checks and is durable: a later group says so, or it stood in the file
before this reader synced that file itself. So the last commit of an idle log is read too, and no group is read that
could vanish.

`read_groups` reads up to the end of a file that may grow: what does not check there is a torn tail, or damage that ends
the reading. `skim` reads what is known to be durable, without the heaps of large batches, and any damage ends the
reading. `read_known` and `read_log` read a log by both. `salvage` reads a part of a file whole, tells what does not
check, and goes on behind it. `Follow` checks that the groups of a message log follow
each other, and stand where the checkpoint says (rule S5).

A heap that nobody asks for is neither read nor verified: `delayd log verify` and an audit of all hours read it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from crc32c import crc32c

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import HEADER_BYTES, BatchKind
from delayd.errors import BatchMalformed, DamagedData, SyncFailed
from delayd.log.group import (
    HEADER,
    MAGIC_BYTES,
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
from delayd.log.hour import RESTORED_STEP
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, Segment, UnfinishedFile, open_segment
from delayd.machine.disk import NOTHING_TO_SYNC, Disk, open_named

# One read takes the header of a group, and the columns of its first batch unless they are large.
AHEAD_BYTES = 16 << 10
WINDOW_BYTES = 4 << 20  # Read at a time: its end cuts few groups, which are read twice.
WHOLE_BYTES = 2 * AHEAD_BYTES  # If batches are smaller than this on average, reading their group in one go costs less.
SUBJECTS_BYTES = 4 << 10  # Some hundred subjects.
HEAP_OFFSET = slice(16, 20)  # In a batch (docs/formats/batch.md).
RESYNC_BYTES = 4 << 20
ATTEMPTS_MAX = 5  # Files move on once a checkpoint, so a second attempt nearly always succeeds.

Result = TypeVar("Result")


class LogMoved(Exception):
    """A file that a reader wanted is gone because its server moved on: start again with a new checkpoint (P3)."""


@dataclass(frozen=True, slots=True)
class TornTail:
    """Bytes behind the last group that checks: an append that is under way, or that a crash cut short."""

    path: str
    position: int
    size_bytes: int
    reason: str

    @property
    def sentence(self) -> str:
        return (
            f"{self.path} ends with {self.size_bytes:,} bytes that are no whole group, from byte {self.position} "
            f"({self.reason}): an append under way, one that a crash cut short, or a damaged last group, which the "
            "file alone does not tell apart; the server takes them off at its next start, unless it knows that they "
            "were durable"
        )


def until_still(data: str, read: Callable[[], Result], moved: Callable[[], None] | None = None) -> Result:
    """Call ``read`` until the files stay unchanged during the call (rule P3); DamagedData when they never do.

    ``moved`` is called before each further attempt; None when ``read`` looks at the files anew by itself.
    """
    for _ in range(ATTEMPTS_MAX):
        try:
            return read()
        except LogMoved as error:
            last = error
            if moved is not None:
                moved()
    raise DamagedData(data, 0, f"{last}, and no newer checkpoint says why") from last


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
    """Yield the durable groups of one open file that lie in [start, stop), offsets of its log.

    ``torn`` receives the bytes behind the last group that checks; only the ``last`` segment of a log may have such.
    ``previous_crc32c`` is of the header of the group before ``start``, None when it is not known; all below ``durable``
    was fsynced, as the caller knows. Raises DamagedData when a durable group does not check.
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


class ReadMemory:
    """Bytes that are used again for each group or batch: new memory would cost more than reading does."""

    def __init__(self, size: int = 0) -> None:
        self.data = bytearray(size)

    def view(self, size: int, kept: int = 0) -> memoryview:
        """Memory of a size, which the next call uses again; its first bytes stay what they are."""
        if size > len(self.data):
            grown = bytearray(max(size, 2 * len(self.data)) if kept else size)
            grown[:kept] = memoryview(self.data)[:kept]
            self.data = grown
        return memoryview(self.data)[:size]


class StoredGroup:
    """A group of which the header and table are read and verified; its batches are read when they are asked for."""

    __slots__ = ("_position", "_sizes", "_window", "header")

    def __init__(self, header: GroupHeader, sizes: tuple[int, ...], window: "_GroupWindow", position: int) -> None:
        self.header = header
        self._sizes = sizes
        self._window = window
        self._position = position

    @property
    def end(self) -> int:
        return self.header.offset + self.header.total_bytes

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield each batch with its offset in the log; its columns are verified, and of a SCHEDULE batch the subjects.

        Behind the subjects its heap is not there.
        """
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

    def whole_batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield each batch with its heap, read into the same memory, for a reader that takes all of them.

        Columns and subjects are verified before a batch is yielded, the heaps when all were taken. Raises DamagedData
        when the group does not check, BatchMalformed when it does and a batch of it does not.
        """
        begin, crc = content_position(len(self._sizes)), 0
        malformed: BatchMalformed | None = None
        for size in self._sizes:
            view = self._window.read(self._position + begin, size)
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
            raise DamagedData(self._window.path, self._position, "the checksum of the batches differs")
        if malformed is not None:
            raise malformed

    def _front(self, position: int, size: int) -> Batch:
        view = self._window.view(position, min(size, HEADER_BYTES))
        # Most tables are shorter than what is read here behind the columns.
        until = int.from_bytes(view[HEAP_OFFSET], "little") + SUBJECTS_BYTES
        try:
            for _ in range(3):  # The columns say how many subjects there are, and their ends how long they are.
                view = self._window.view(position, min(size, until))
                batch = parse(view, front=True)
                ends = batch.heap_offset + 4 * batch.subject_count
                until = ends if len(view) < ends else batch.heap_offset + batch.subject_bytes
                if until <= len(view) or len(view) >= size:
                    break
            batch.verify_columns()
            if ends > size or batch.total_bytes != size:
                raise BatchMalformed(f"it says {batch.total_bytes} bytes, its group {size}")
            if batch.kind == BatchKind.SCHEDULE:
                batch.verify_subjects()
        except BatchMalformed as error:
            raise DamagedData(self._window.path, position, str(error)) from None
        return batch


Group = CommitGroup | StoredGroup


def whole_batch(group: Group, offset: int, batch: Batch) -> Batch:
    """A batch that ``group.batches()`` has given, with its heap."""
    return group.whole(offset) if isinstance(group, StoredGroup) else batch


def skim(segment: Segment, stop: int, previous_crc32c: int, *, whole: bool = False) -> Iterator[Group]:
    """Yield the groups of a file from its beginning up to ``stop``, all of which are known to be durable.

    Groups of small batches are read whole, with ``whole`` all groups: then a group is a `CommitGroup`. A group's bytes
    are in memory that the next group uses again. Raises DamagedData when a group does not check.
    """
    window = _GroupWindow(segment, WINDOW_BYTES if whole else AHEAD_BYTES)
    offset = segment.base_offset
    while offset < stop:
        position = segment.position(offset)
        try:
            group = _group(window, position, offset, previous_crc32c, whole=whole)
        except BadGroup as error:
            raise DamagedData(segment.path, position, str(error)) from None
        if group.end > stop:
            return
        yield group
        offset, previous_crc32c = group.end, group.header.header_crc32c


def read_log(
    disk: Disk, place: LogPlace, start: int, stop: int, torn: list[TornTail], previous_crc32c: int | None = None
) -> Iterator[CommitGroup]:
    """`read_known` where nothing is known to be durable."""
    for group in read_known(disk, place, (start, 0, stop), torn, previous_crc32c):
        assert isinstance(group, CommitGroup), "groups that may be torn are read whole"
        yield group


def read_known(
    disk: Disk,
    place: LogPlace,
    bounds: tuple[int, int, int],
    torn: list[TornTail],
    previous_crc32c: int | None = None,
    *,
    whole: bool = True,
) -> Iterator[Group]:
    """Yield the durable groups of a log that lie between two offsets, the first and last of ``bounds``.

    All below the offset between them are known to be durable, and are read by `skim` from where a segment begins; with
    ``whole`` with all their heaps. ``torn`` receives the bytes behind the last group that checks.

    Raises:
        LogMoved: segments were removed while they were to be read.
        DamagedData: a group does not check and was durable, or a segment is missing in between.
    """
    start, durable, stop = bounds
    bases = segment_bases(disk, place)
    if not bases or bases[0] > start:
        raise LogMoved(f"{place.folder} begins behind offset {start}")
    offset, crc = start, previous_crc32c
    for index, base in enumerate(bases):
        last = index == len(bases) - 1
        until = stop if last else min(stop, bases[index + 1])
        if until <= start or base >= stop:
            continue
        segment = open_base(disk, place, base, last=last)
        if segment is None:
            if base < durable:
                raise LogMoved(f"segment {base} of {place.folder} is gone")
            return
        try:
            if offset <= base and crc not in (None, segment.header.previous_crc32c):
                raise DamagedData(segment.path, 0, "it does not follow the segment before it")
            if offset <= base:
                offset, crc = base, segment.header.previous_crc32c
                for known in skim(segment, min(durable, until), crc, whole=whole):
                    offset, crc = known.end, known.header.header_crc32c
                    yield known
            if offset < until:
                for group in read_groups(segment, offset, until, torn, previous_crc32c=crc, last=last):
                    offset, crc = group.end, group.header.header_crc32c
                    yield group
            if not last and offset < until and bases[index + 1] <= stop:
                what = f"it ends at offset {offset}, the next segment begins at {until}"
                raise DamagedData(segment.path, segment.position(offset), what)
        finally:
            segment.close()


class Salvaged(NamedTuple):
    """A group's bytes, in memory that the next group uses again, and where its sound batches stand in them."""

    header: GroupHeader
    data: bytearray
    batches: list[tuple[int, Batch]]

    @property
    def end(self) -> int:
        return self.header.offset + self.header.total_bytes


def salvage(
    segment: Segment,
    bounds: tuple[int, int],
    previous_crc32c: int | None,
    damage: list[DamagedData],
    memory: ReadMemory,
    *,
    torn: bool = False,
) -> Iterator[Salvaged]:
    """Yield the groups of a file that lie within ``bounds``, offsets of its log, also those behind damage.

    What is handed out is verified as a whole; ``damage`` receives everything else. ``bounds`` end where a group ends,
    or ``torn``: then bytes at the end may be an append that is under way, which is no damage.
    """
    (offset, stop), crc = bounds, previous_crc32c
    window = _GroupWindow(segment)
    while offset < stop:
        try:
            front, header = _head(window, segment.position(offset), offset)
            verify_chain(front, header, crc)
            if header.offset + header.total_bytes > stop:
                raise IncompleteGroup(header.total_bytes, "the batches are cut short")
        except BadGroup as error:
            found = _next_group(segment, offset, stop)
            if found is None and torn:
                return
            damage.append(DamagedData(segment.path, segment.position(offset), str(error)))
            if found is None:
                return
            offset, crc = found, None
            continue
        yield _salvaged(segment, header, damage, memory)
        offset, crc = header.offset + header.total_bytes, header.header_crc32c


def group_ends(segment: Segment, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where groups from ``begin`` on end, and their header's checksum, up to ``stop`` or the first damaged header."""
    offset, window = begin, _GroupWindow(segment)
    while offset < stop:
        try:
            _, header = _head(window, segment.position(offset), offset)
        except BadGroup:
            return  # Whoever reads this part reports it.
        offset += header.total_bytes
        yield offset, header.header_crc32c


def _group(window: "_GroupWindow", position: int, offset: int, previous_crc32c: int, *, whole: bool) -> Group:
    buffer, header = _head(window, position, offset)
    small = header.total_bytes <= WHOLE_BYTES * max(1, header.batch_count)
    if whole or header.kind != GroupKind.DATA or small:
        buffer = window.view(position, header.total_bytes)
        verify_group(buffer, header, previous_crc32c)
        return CommitGroup(header, buffer[: header.total_bytes])
    verify_chain(buffer, header, previous_crc32c)
    return StoredGroup(header, batch_sizes(buffer, header), window, position)


def _head(window: "_GroupWindow", position: int, offset: int) -> tuple[memoryview, GroupHeader]:
    buffer = window.view(position, HEADER.size)
    try:
        return buffer, parse_header(buffer, 0, window.log_id, offset)
    except IncompleteGroup as error:
        buffer = window.view(position, error.size_bytes)
        return buffer, parse_header(buffer, 0, window.log_id, offset)


def _salvaged(segment: Segment, header: GroupHeader, damage: list[DamagedData], memory: ReadMemory) -> Salvaged:
    position, begin = segment.position(header.offset), content_position(header.batch_count)
    view = memory.view(header.total_bytes)
    # Behind what was read stands another group, which would check.
    view = view[: segment.file.pread_into(view, position)]
    whole = len(view) == header.total_bytes and crc32c(view[begin:]) == header.content_crc32c
    batches: list[tuple[int, Batch]] = []
    for size in batch_sizes(view, header) if len(view) >= begin else ():
        try:
            batch = parse(view[begin : begin + size])
            if not whole:
                batch.verify()
            batches.append((begin, batch))
        except BatchMalformed as error:
            damage.append(DamagedData(segment.path, position + begin, str(error)))
        begin += size
    if not whole and not any(error.position >= position for error in damage):
        damage.append(DamagedData(segment.path, position, "the checksum of the batches differs"))
    return Salvaged(header, memory.data, batches)


def _next_group(segment: Segment, offset: int, stop: int) -> int | None:
    position, until = segment.position(offset) + 8, segment.position(stop)
    while position < until:
        data = segment.file.pread(min(RESYNC_BYTES, until - position), position)
        if not data:
            return None
        at = data.find(MAGIC_BYTES)
        while at >= 0:
            found = offset + position + at - segment.position(offset)
            if (position + at) % 8 == 0 and next(group_ends(segment, found, found + 1), None) is not None:
                return found
            at = data.find(MAGIC_BYTES, at + 4)
        # The magic itself may lie across two reads; groups begin at multiples of 8, so the last 8 bytes are enough.
        position += max(8, len(data) - 8) if len(data) == RESYNC_BYTES else len(data)
    return None


class _GroupWindow:
    """The bytes of a file that were read last; each read uses the same memory."""

    def __init__(self, segment: Segment, ahead: int = AHEAD_BYTES) -> None:
        self._ahead = ahead
        self.path = segment.path
        self.log_id = segment.header.log_id
        self._file = segment.file
        self._data = memoryview(b"")
        self._begin = 0
        self._memory, self._apart = ReadMemory(), ReadMemory()

    def view(self, position: int, size: int) -> memoryview:
        """The bytes from a position on, and those that were read behind them; fewer than ``size`` at the end."""
        low = position - self._begin
        if low < 0 or low + size > len(self._data):
            data = self._memory.view(max(size, self._ahead))
            self._data, self._begin, low = data[: self._file.pread_into(data, position)], position, 0
        return self._data[low:]

    def read(self, position: int, size: int) -> memoryview:
        """The bytes of one batch, in memory that the next batch uses again."""
        view = self._apart.view(size)
        if self._file.pread_into(view, position) < size:
            raise DamagedData(self.path, position, "the batches are cut short")
        return view


class Followed(NamedTuple):
    """The fields of a group's header that are compared, and where the group ends."""

    offset: int
    end: int
    epoch: int
    base_sequence: int
    row_count: int
    appended_at_ms: int
    previous_crc32c: int
    header_crc32c: int
    kind: int


def followed(group: Group) -> Followed:
    """What is compared of a group."""
    header = group.header
    names = header.epoch, header.base_sequence, header.row_count, header.appended_at_ms
    return Followed(header.offset, group.end, *names, header.previous_crc32c, header.header_crc32c, header.kind)


class Checked(NamedTuple):
    """What a checkpoint says of a message log at an offset; None: it says nothing of this."""

    offset: int
    next_sequence: int | None
    epoch: int | None
    appended_at_ms: int | None = None  # Of the last group below the offset, and the checksum of its header.
    crc32c: int | None = None


class Follow:
    """The groups of one log, in their order."""

    def __init__(self, checked: Checked | None) -> None:
        """``checked`` is None while no checkpoint was published."""
        self.faults: list[str] = []
        self.first = 0
        self.last_appended_at_ms = 0
        self._checked = checked  # Until the log has reached it.
        self._next: int | None = None  # The sequence that the next row must have.
        self._appended_at_ms = 0
        self._crc32c: int | None = None
        self._epoch = 0
        self._end: int | None = None  # Where the group before ends.

    def take(
        self, group: Followed, rows: int | None = None, *, may_fall: bool = True, unused: Sequence[int] = ()
    ) -> None:
        """Look at the header of the next group, whose batches have ``rows`` rows; None: nobody has counted them.

        It ``may_fall`` before the instant of the group before it, as after an operator's word. ``unused`` says how many
        sequences each of its records leaves unused.
        """
        at = f"the group at offset {group.offset}"
        if self._checked is not None and group.offset >= self._checked.offset:
            self._reach(self._checked, group.previous_crc32c, group.offset)
        for count in unused:
            if count != RESTORED_STEP:
                self.faults.append(f"{at} leaves {count} sequences unused, an accepted server leaves {RESTORED_STEP}")
            elif self._next is not None:
                self._next += RESTORED_STEP
        if group.appended_at_ms < self._appended_at_ms and not may_fall:
            self.faults.append(f"{at} was appended at {group.appended_at_ms}, before the one before it")
        if group.epoch < self._epoch:
            self.faults.append(f"{at} is of epoch {group.epoch}, the one before it of {self._epoch}")
        if group.kind == GroupKind.DATA:
            if self._next is not None and group.base_sequence != self._next:
                self.faults.append(f"{at} begins at message {group.base_sequence}, and {self._next} is the next one")
            count = group.row_count if rows is None else rows
            if count != group.row_count:
                self.faults.append(f"{at} counts {group.row_count} rows, and has {count}")
            self.first = self.first or group.base_sequence
            self._next = group.base_sequence + count
        self._appended_at_ms, self._crc32c = group.appended_at_ms, group.header_crc32c
        self._epoch, self._end = max(self._epoch, group.epoch), group.end
        self.last_appended_at_ms = max(self.last_appended_at_ms, group.appended_at_ms)

    def end(self) -> list[str]:
        if self._checked is not None and self._end is not None:
            self._reach(self._checked, None, self._end)
        return self.faults

    def _reach(self, checked: Checked, previous_crc32c: int | None, offset: int) -> None:
        """Compare the log with what the checkpoint says at an offset, which this group is the first to reach."""
        self._checked = None
        at = checked.offset
        if self._end is not None and at not in (offset, self._end):
            self.faults.append(f"no group of the message log begins at offset {at}, which the checkpoint names")
        if None not in (self._next, checked.next_sequence) and self._next != checked.next_sequence:
            what = f"the message log goes on with message {self._next} at offset {at}"
            self.faults.append(f"{what}, the checkpoint with {checked.next_sequence}")
        if self._crc32c is not None and checked.appended_at_ms not in (None, self._appended_at_ms):
            what = f"the last group below offset {at} was appended at {self._appended_at_ms}"
            self.faults.append(f"{what}, the checkpoint says {checked.appended_at_ms}")
        if checked.epoch is not None and self._epoch > checked.epoch:
            what = f"the message log has a group of epoch {self._epoch}"
            self.faults.append(f"{what}, the checkpoint is of {checked.epoch}")
        before = self._crc32c if self._crc32c is not None else previous_crc32c
        if None not in (before, checked.crc32c) and before != checked.crc32c:
            self.faults.append(f"the checkpoint names another group below offset {at} than the message log has")
        self._next = self._next if checked.next_sequence is None else checked.next_sequence
