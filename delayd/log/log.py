"""Log: ordered segments that are one sequence of groups, in one folder (docs/formats/segment.md).

One thread appends and flushes; any thread reads the durable part. A `LogWatch` notices files that someone removes,
replaces or cuts under a running server, and tries files again that a start left out (rule L10). An open descriptor
reads a removed file to its end, so nothing is lost until the process ends: a server keeps the file open that it appends
to, and the ones that it used last (`delayd.machine.open_files`). New groups go to another file, and the server is told,
so that it can write elsewhere what the file held.

An example, with segments of 1,000 bytes. Groups of 600 bytes are appended at the offsets 0 and 600: the segment had
room when the second one came, and ends at 1,200. The third one rolls to ``00000000000000001200.log``. Its byte at the
offset 1,300 is byte 164 of that file, behind a header of 64. The first segment is removed once nobody needs an offset
below 1,200.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import NamedTuple

from delayd.errors import DamagedData, DataError, ServerStopped, Shortage, read_error
from delayd.log.group import CommitGroup, GroupHeader, NewGroup
from delayd.log.segment import (
    Confirmed,
    FileHeader,
    FileKind,
    Prepared,
    Segment,
    UnfinishedFile,
    Visit,
    create_segment,
    lost_segment,
    open_segment,
)
from delayd.machine.alarms import LOOK_MS, Alarms
from delayd.machine.disk import Disk, RealFile, list_named
from delayd.machine.executor import DiskWork, Done, Executor, Priority
from delayd.machine.lane import Call

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20  # Small enough that retention frees space often, large enough that rolls are rare.
NAME_DIGITS = 20
# A larger group is no call of a lane: the loop would be held up by its checksum, which the thread computes otherwise.
CALL_BYTES_MAX = 256 << 10


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a log is, and which log it is."""

    folder: str
    kind: FileKind
    log_id: int
    segment_bytes: int = SEGMENT_BYTES


class FoundFile(NamedTuple):
    """A file of a log that was removed, replaced or damaged; ``whole`` is the file under its name now, if that is
    complete and right.
    """

    segment: Segment
    damage: DamagedData
    whole: Segment | None


class Log:
    """An open log; made by `open_log`. ``end`` and ``durable`` are offsets."""

    def __init__(self, disk: Disk, place: LogPlace, segments: list[Segment]) -> None:
        self.disk = disk
        self.place = place
        self._segments = segments  # Replaced and never changed, because other threads read it.
        self._replaced: list[Segment] = []  # Closed with the log, because other threads may still be reading them.
        self._detached: list[Segment] = []  # To be removed; used by the thread that removes.
        self._short = False  # Whether the last roll found no descriptor.
        # Somebody may remove the file that is appended to. Its descriptor then has what no checkpoint has yet.
        for segment in segments[-1:]:
            segment.file.keep_open(True)

    @property
    def start(self) -> int:
        """Offset of the first group that is kept."""
        return self._segments[0].base_offset

    @property
    def lost(self) -> list[DamagedData]:
        """The damage of files that this log has left out; each read of one of them raises it."""
        return [segment.lost for segment in self._segments if segment.lost is not None]

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
        """Write groups at the end, in one segment, not durable yet; return their offsets. Rolls first when the segment
        is full and the process can open another file.

        Raises:
            DiskFull, OSError: nothing was appended.
            ServerStopped: the disk is in a state that only a restart resolves.
        """
        last = self._segments[-1]
        if last.end - last.base_offset >= self.place.segment_bytes:
            try:
                self._roll(last, now_ms)
            except Shortage as error:
                # The open file takes more all the same; the next append tries to roll again.
                if not self._short:
                    log.warning("roll_put_off path=%s reason=%r", last.path, error.message)
                self._short = True
            else:
                self._short = False
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

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read up to ``len(buffer)`` bytes at ``offset`` into it; return how many, fewer where the segment ends."""
        segment = self._segment_of(offset)
        return segment.file.pread_into(buffer, segment.position(offset))

    def read_front(self, offset: int) -> tuple[GroupHeader, tuple[int, ...]]:
        """Read header and batch lengths of the group at ``offset``, and nothing of its batches; raises as `read` does.

        An OSError becomes an error that names the file, because the caller does not know which file it is.
        """
        segment = self._segment_of(offset)
        try:
            return segment.read_front(offset, None)
        except OSError as error:
            raise read_error(segment.path, segment.position(offset), error) from error

    def file_position(self, offset: int) -> tuple[str, int]:
        """The file that holds an offset, and the byte in it: this is how damage is reported to an operator."""
        segment = self._segment_of(offset)
        return segment.path, segment.position(offset)

    def scan(self, start: int, stop: int, previous_crc32c: int | None = None) -> Iterator[CommitGroup]:
        """Yield the verified groups from ``start`` up to ``stop``, which must be durable.

        Raises:
            DamagedData: a group between them does not check.
        """
        while start < stop:
            segment = self._segment_of(start)
            scan = segment.scan(start, previous_crc32c)
            # A group behind ``stop`` may be under way to the file, so nothing there is looked at.
            while scan.offset < stop and (group := next(scan, None)):
                yield group
            if scan.offset < stop and (scan.reason or scan.offset == start):
                raise DamagedData(segment.path, segment.position(scan.offset), scan.reason or "the log ends early")
            start, previous_crc32c = scan.offset, scan.crc32c

    def base_below(self, offset: int) -> int:
        """Where the log begins once the segments are removed that `detach_below` takes out for ``offset``."""
        segments = self._segments
        return segments[max(0, bisect_right(segments, offset, key=_base_offset) - 1)].base_offset

    def detach_below(self, offset: int) -> list[Segment]:
        """Take whole segments that end at or below ``offset`` out of the log, never the last one, for `remove`.

        On the thread that appends; `remove` may run on another.
        """
        segments = self._segments
        count = bisect_right(segments, offset, 1, key=_base_offset) - 1
        self._segments = segments[count:]
        return segments[:count]

    def remove(self, detached: Sequence[Segment], give_way: Callable[[], None] = lambda: None) -> int:
        """Close and remove detached segments, durably; return the bytes freed. ``give_way`` is called behind each of
        them.

        Raises:
            Shortage: the next call removes what is left.
        """
        freed = 0
        self._detached += detached
        while self._detached:
            segment = self._detached[0]
            segment.close()
            try:
                self.disk.remove(segment.path)
                freed += segment.position(segment.end)
            except FileNotFoundError:
                pass  # It was removed before.
            # The segments are removed one by one: two removals that become durable in the other order would leave a
            # gap.
            self.disk.sync_folder(self.place.folder)
            del self._detached[0]
            give_way()
        return freed

    def older_than(self, appended_ms: int) -> int:
        """The highest offset at the end of a segment all of whose groups were appended before ``appended_ms``."""
        end = self.start
        for following in self._segments[1:]:
            # A segment is created after the last append to the one before it.
            if following.header.created_at_ms >= appended_ms:
                break
            end = following.base_offset
        return end

    def look(self, give_way: Callable[[], None] = lambda: None, *, write_again: bool = False) -> list[FoundFile]:
        """List files that somebody removed, replaced or cut, and files that this log has left out.

        The file that stands in such a place now is read whole; ``give_way`` is called between its groups. With
        ``write_again`` a removed file is written anew from its open descriptor. Runs on the thread that removes
        segments.
        """
        found: list[FoundFile] = []
        segments = self._segments
        for segment, following in zip_longest(segments, segments[1:]):
            damage = segment.look()
            if damage is not None:
                if write_again and following and segment.lost is None and not self.disk.exists(segment.path):
                    segment.write_again()
                found.append(FoundFile(segment, damage, following and self._whole(segment, following, give_way)))
        # Retention may have removed segments between two groups.
        return [each for each in found if each.segment in self._segments]

    def adopt(self, found: FoundFile) -> bool:
        """Read a file from now on that has come back whole, on the thread that appends; False when it is not needed."""
        whole, segments = found.whole, self._segments
        assert whole is not None, "only a whole file is taken back"
        if found.segment not in segments:
            whole.close()
            return False
        self._segments = [whole if segment is found.segment else segment for segment in segments]
        self._replaced.append(found.segment)
        return True

    def is_last(self, segment: Segment) -> bool:
        """Whether groups are appended to this file."""
        return segment is self._segments[-1]

    @property
    def segments(self) -> Sequence[Segment]:
        """The open files, in order."""
        return self._segments

    def roll(self, now_ms: int) -> None:
        """Let the next groups go to a new file; runs on the thread that appends."""
        last = self._segments[-1]
        if last.end > last.base_offset:
            self.disk.make_folder(self.place.folder)
            self._roll(last, now_ms)

    def close(self) -> None:
        """Close every file; appended groups must have been flushed before."""
        for segment in (*self._segments, *self._replaced):
            segment.close()

    def _whole(self, segment: Segment, following: Segment, give_way: Callable[[], None]) -> Segment | None:
        """Open the file under a segment's name, with its end and durable, if it is complete and reaches up to the next
        segment.
        """
        end, crc32c = following.base_offset, None if following.lost else following.header.previous_crc32c
        try:
            found = open_segment(self.disk, segment.path, self.place.kind, self.place.log_id, write=True)
        except (DataError, UnfinishedFile, FileNotFoundError):
            return None
        try:
            scan = found.scan(found.base_offset, found.header.previous_crc32c)
            while scan.offset < end and next(scan, None):
                give_way()
            ends_well = found.file.size() == found.position(end) and scan.offset == end
            if found.base_offset == segment.base_offset and ends_well and crc32c in (None, scan.crc32c):
                # The person who put the file there may not have synced it.
                found.file.sync()
                self.disk.sync_folder(self.place.folder)
                found.end = found.durable = end
                found.crc32c = scan.crc32c or 0
                return found.remember_file()
        except DataError:
            pass  # The file is no better than before; its damage stays noted.
        found.close()
        return None

    def _segment_of(self, offset: int) -> Segment:
        segments = self._segments
        index = bisect_right(segments, offset, key=_base_offset) - 1
        if index < 0:
            path = f"{self.place.folder}/{segment_name(offset)}"
            raise DamagedData(path, 0, f"the log begins at offset {self.start}, {offset} is not kept any more")
        return segments[index]

    def _roll(self, last: Segment, now_ms: int) -> None:
        last.flush()
        header = FileHeader(self.place.kind, self.place.log_id, last.end, 0, now_ms, last.crc32c)
        new = _create(self.disk, self.place, header)
        new.file.keep_open(True)
        self._segments = [*self._segments, new]
        last.file.keep_open(False)


class Written(NamedTuple):
    """What a `LogWrite` has done: the offsets of its groups, and the end of the log behind them with its checksum."""

    offsets: Sequence[int]
    end: int
    crc32c: int


class LogWrite(DiskWork[Written]):
    """An append of groups to a log, an fsync of it, or both, for the thread that appends (rules L1, L3).

    Called, it does what `Log.append` and `Log.flush` do, and raises what they raise. As calls of a lane it writes the
    same bytes at the same place. When these find no space, or another error, the append is called after all: it writes
    the bytes once more, or cuts them back. An fsync that failed is never done again.
    """

    def __init__(
        self, to: Log, groups: Sequence[NewGroup], now_ms: int, *, sync: bool, behind: LogWrite | None = None
    ) -> None:
        self._log, self._groups, self._now_ms, self._sync = to, groups, now_ms, sync
        self._behind = behind  # The append that an fsync makes durable, if that has not ended when this one begins.
        self._segment: Segment
        self._file: RealFile
        self._prepared: Prepared

    def __call__(self) -> Written:
        """Append, fsync, or both; raises as `Log.append` and `Log.flush` do."""
        offsets = self._log.append(self._groups, self._now_ms) if self._groups else []
        if self._sync:
            self._log.flush()
        return Written(offsets, self._log.end, self._log.crc32c)

    def begin(self) -> Call | None:
        """Make the bytes; None for large groups, a full segment, a file in memory, or a log that can't be written."""
        segment = self._log.segments[-1]
        file = segment.file.real()
        size = sum([sum(map(len, group.batches)) for group in self._groups])
        rolls = self._groups and segment.end - segment.base_offset >= self._log.place.segment_bytes
        if file is None or rolls or size > CALL_BYTES_MAX:
            return None
        try:
            prepared = segment.prepare(self._groups)
            descriptor = file.lend(change=bool(self._groups))
        except (ServerStopped, DataError):
            return None  # The call raises it, too, and its caller hears of it.
        if self._behind is not None:
            prepared = self._behind._prepared
        self._segment, self._file, self._prepared = segment, file, prepared
        buffers = prepared.buffers if self._groups else []
        return Call(descriptor, buffers, prepared.position, file.sync_failed if self._sync else None)

    def end(self, outcome: int) -> Done[Written] | None:
        """Note the end of the log; None: nothing of the groups counts."""
        if outcome > 0:
            self._file.take_back(synced=False)
            return None
        prepared = self._prepared
        if self._groups:
            self._segment.grow(prepared)
        take_back = partial(self._file.take_back, synced=self._sync, number=-outcome)
        try:
            if self._sync:
                self._segment.flush(take_back, prepared.end)
            else:
                take_back()
        except ServerStopped as error:
            return Done(error)
        return Done((Written(prepared.offsets, prepared.end, prepared.crc32c),))


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


def segment_name(base_offset: int) -> str:
    """Name the file of the segment that begins at ``base_offset``."""
    return f"{base_offset:0{NAME_DIGITS}}.log"


def open_needed_log(
    disk: Disk,
    place: LogPlace,
    now_ms: int,
    start: int,
    crc32c: int,
    visit: Visit | None = None,
    *,
    kept_from: int | None = None,
    confirmed: Confirmed | None = None,
) -> Log:
    """Open a log without which a server can't start; an error names the command that helps.

    Whole files below ``start``, the checkpoint's offset, may be missing or damaged: they are left out. ``crc32c`` is
    the header_crc32c of the group that ends at ``start``. `open_log` explains the other arguments.
    """
    try:
        return open_log(
            disk, place, now_ms, start, crc32c, visit, leave_out=True, kept_from=kept_from, confirmed=confirmed
        )
    except DamagedData as error:
        if type(error) is not DamagedData:
            raise  # The system can't read it now, which does not mean that it is damaged.
        what = f"{error.what}; this server can't start without it, and where no copy is left `delayd mend give-up"
        what += f" {place.folder}` says what that costs"
        raise DamagedData(error.path, error.position, what, end_of=place.folder) from error


def open_log(
    disk: Disk,
    place: LogPlace,
    now_ms: int,
    start: int = 0,
    previous_crc32c: int | None = 0,
    visit: Visit | None = None,
    *,
    leave_out: bool = False,
    kept_from: int | None = None,
    confirmed: Confirmed | None = None,
) -> Log:
    """Open or create a log and recover its tail: from ``start`` on every group is verified (rules L1, L5).

    Args:
        disk: where the folder is.
        place: what to open.
        now_ms: stamped into a file that is created.
        start: an offset below which everything is known to be durable, of a checkpoint.
        previous_crc32c: header_crc32c of the group that ends there; None when it is not known.
        visit: gets each group from ``start`` on while it is verified, so that replay does not read the log again; what
            it builds counts only when this returns, as the tail is durable then and not before.
        leave_out: files that end at or below ``start`` and are damaged or gone are left out, in `Log.lost`; without it
            they are an error too.
        kept_from: where the log began at least; without the files from there on it begins later for good.
        confirmed: says before a tail is cut, with the offset where it begins, why it is damage; "" if nothing proves it
            (`Segment.recover`).

    Raises:
        DamagedData, NewerFormat: with the path and what to do.
    """
    disk.make_folder(place.folder)
    segments = list_segments(disk, place, write=True, lost_below=start if leave_out else None)
    try:
        if not segments:
            if start:
                path = f"{place.folder}/{segment_name(0)}"
                raise DamagedData(path, 0, f"the log is gone, its checkpoint is at offset {start}")
            return Log(disk, place, [_create(disk, place, FileHeader(place.kind, place.log_id, 0, 0, now_ms, 0))])
        if segments[0].base_offset > start:
            raise DamagedData(segments[0].path, 0, f"the segments before offset {segments[0].base_offset} are gone")
        if leave_out:
            segments = _with_gaps(disk, place, segments, start, kept_from)
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            _recover(segment, following, start, previous_crc32c, visit, confirmed)
        _name_last_again(segments, start)
    except BaseException:
        _close_all(segments)
        raise
    return Log(disk, place, segments)


def _name_last_again(segments: Sequence[Segment], start: int) -> None:
    """A last file without groups is what a roll leaves that died of its folder's sync.

    Without that file the log would end where it ends now. Only a log that begins there, and not at 0, needs it; and
    it was named anew when there were others before it.
    """
    last = segments[-1]
    if last.end == last.base_offset and (len(segments) > 1 or not start):
        last.name_again()


def list_segments(
    disk: Disk, place: LogPlace, *, write: bool, log_id: int | None = None, lost_below: int | None = None
) -> list[Segment]:
    """Open all segments of a folder in order; with ``write`` a last one whose creation did not finish is removed.

    What can't be opened and ends at or below ``lost_below`` is left out: a segment that says why stands in its place.
    """
    names = [name for name in list_named(disk, place.folder) if name.endswith(".log")]
    segments: list[Segment] = []
    try:
        for name, following in zip_longest(names, names[1:]):
            path = f"{place.folder}/{name}"
            end = None if following is None else _base_in(following)
            may_be_lost = lost_below is not None and end is not None and end <= lost_below
            try:
                segment = _open_named_so(disk, path, place, log_id, write=write, twice=may_be_lost)
            except UnfinishedFile:
                if write:
                    disk.remove(path)
                    disk.sync_folder(place.folder)
                break
            except DamagedData as error:
                base = _base_in(name)
                if not may_be_lost or base is None or end is None:
                    raise
                segment = lost_segment(disk, path, FileHeader(place.kind, place.log_id, base), end, error)
            segments.append(segment)
    except BaseException:
        _close_all(segments)
        raise
    return segments


def _open_named_so(
    disk: Disk, path: str, place: LogPlace, log_id: int | None, *, write: bool, twice: bool = False
) -> Segment:
    """Open a segment whose header says what its name says; UnfinishedFile is raised for the last one of its folder
    only.

    ``twice``: a read may fail once, so a file that does not check is read again.
    """
    if twice:
        try:
            return _open_named_so(disk, path, place, log_id, write=write)
        except DamagedData:
            pass
    folder, _, name = path.rpartition("/")
    try:
        segment = open_segment(disk, path, place.kind, place.log_id if log_id is None else log_id, write=write)
    except UnfinishedFile:
        if any(other > name for other in disk.list_folder(folder) if other.endswith(".log")):
            raise DamagedData(path, 0, "the file header is missing, and later segments exist") from None
        raise
    if name != segment_name(segment.base_offset):
        segment.close()
        raise DamagedData(path, 0, f"its header says that it begins at offset {segment.base_offset}")
    return segment.remember_file() if write else segment


def _with_gaps(
    disk: Disk, place: LogPlace, segments: list[Segment], start: int, kept_from: int | None
) -> list[Segment]:
    """Put stand-ins for the files that are gone and end at or below ``start``, and mark those that were cut."""
    filled = list(segments)
    if kept_from is not None and kept_from < segments[0].base_offset:
        filled.insert(0, _gone(disk, place, kept_from, segments[0]))
    for segment, following in pairwise(segments):
        size, end = segment.file.size(), following.base_offset
        if segment.lost is not None or end > start or size == segment.position(end):
            continue
        whole_until = segment.whole_until()
        if whole_until < end and segment.position(whole_until) == size:
            filled.insert(filled.index(following), _gone(disk, place, whole_until, following))
        else:
            segment.lost = DamagedData(segment.path, size, f"it ends there, but the next segment begins at {end}")
    for segment, following in reversed(list(pairwise(filled))):
        if segment.lost is not None:
            # Nobody knows when the file was created. It was not later than the one behind it, so retention rather keeps
            # more.
            created_at_ms = max(segment.header.created_at_ms, following.header.created_at_ms)
            segment.header = segment.header._replace(created_at_ms=created_at_ms)
    return filled


def _gone(disk: Disk, place: LogPlace, base: int, following: Segment) -> Segment:
    path = f"{place.folder}/{segment_name(base)}"
    header = FileHeader(place.kind, place.log_id, base)
    return lost_segment(disk, path, header, following.base_offset, DamagedData(path, 0, "the file is gone"))


def _base_in(name: str) -> int | None:
    """The offset in the name of a segment; None when the name has none."""
    base = name.removesuffix(".log")
    return int(base) if base.isdecimal() and len(base) == NAME_DIGITS else None


def _recover(
    segment: Segment,
    following: Segment | None,
    start: int,
    previous_crc32c: int | None,
    visit: Visit | None,
    confirmed: Confirmed | None,
) -> None:
    """Recover one segment; bytes before ``start`` are durable, and groups that the checkpoint covers are not read
    again.
    """
    base, known_crc32c = segment.base_offset, segment.header.previous_crc32c
    if following is not None and following.base_offset <= start:
        segment.end = segment.durable = following.base_offset
        segment.crc32c = following.header.previous_crc32c
        size = segment.file.size()
        if segment.lost is None and size != segment.position(segment.end):
            raise DamagedData(segment.path, size, f"it ends there, but the next segment begins at {segment.end}")
        return
    begin = base
    if start > base and previous_crc32c is not None:
        begin, known_crc32c = start, previous_crc32c
    assert visit is None or begin >= start, "what is visited begins at a group whose predecessor is known"
    if following is None:
        segment.recover(begin, known_crc32c, max(start, base), True, visit, confirmed)
        return
    # A roll flushes a segment before it creates the next one.
    segment.recover(begin, known_crc32c, following.base_offset, False, visit)
    if (segment.end, segment.crc32c) != (following.base_offset, following.header.previous_crc32c):
        raise DamagedData(following.path, 0, f"it does not follow {segment.path}, which ends at {segment.end}")


def _close_all(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.close()


def _create(disk: Disk, place: LogPlace, header: FileHeader) -> Segment:
    return create_segment(disk, f"{place.folder}/{segment_name(header.base_offset)}", header).remember_file()


Told = Callable[[bool, str], None]
"""Called with whether all files are there, and what is wrong with those that are not."""
Append = Callable[[Callable[[], None], Callable[[Done[None]], None]], object]
"""Runs a job on the thread that appends to the log, and calls back on the loop."""


@dataclass(frozen=True, slots=True)
class OnFiles:
    """What a server does about the files of a log.

    ``put`` is called with the name of a file that is gone or changed, ``lift`` when it is whole again or not needed any
    more, and ``rolled`` when such files are new and groups go to another file.
    """

    put: Callable[[str, DamagedData], object]
    lift: Callable[[str], object]
    rolled: Callable[[], None]


class LogWatch:
    """Looks for the files of one log now and then; for the loop alone."""

    def __init__(self, message_log: Log, append: Append, worker: Executor, alarms: Alarms, on_files: OnFiles) -> None:
        self._log = message_log
        self._append = append
        self._worker = worker
        self._clock = alarms.clock
        self._on_files = on_files
        self._known: dict[str, DamagedData] = {}
        self._settled: set[str] = set()  # Files that are not appended to any more, and of which the server was told.
        self._next_look = alarms.look(self.look)
        for damage in message_log.lost:
            self._set_aside(_name(damage), damage)
            self._settled.add(_name(damage))

    def __iter__(self) -> Iterator[DamagedData]:
        return iter(self._known.values())

    def look(self, told: Told | None = None) -> None:
        """Look now; with ``told`` removed files are written again, and it is called with whether all files are
        there.
        """
        self._next_look.after(LOOK_MS)
        # Retention removes files on the same thread, so a file that it has taken out of the log is not looked for. A
        # removed file is written again only if an operator asks for it: it may have been removed on purpose.
        work = partial(self._log.look, self._worker.give_way, write_again=told is not None)
        self._worker.submit(work, partial(self._looked, told), Priority.SPARE)

    def _looked(self, told: Told | None, done: Done[list[FoundFile]]) -> None:
        try:
            found = done.result()
        except DataError as error:
            # The process can't tell now; the next look may.
            if told is not None:
                told(False, str(error))
            return
        damaged = {_name(each.damage): each for each in found if each.whole is None}
        for name in self._known.keys() - {_name(each.damage) for each in found}:
            self._take_back(name)
        for name, each in damaged.items():
            self._set_aside(name, each.damage)
        if damaged.keys() - self._settled:
            roll = any(self._log.is_last(each.segment) for each in damaged.values())
            work = partial(self._log.roll, self._clock.now_ms()) if roll else _nothing
            self._append(work, partial(self._settle, set(damaged)))
        whole = [each for each in found if each.whole is not None]
        if whole:
            self._append(partial(self._adopt, whole), partial(self._adopted, whole, told, damaged))
        elif told is not None:
            _tell(told, damaged)

    def _adopt(self, whole: list[FoundFile]) -> None:
        for each in whole:
            self._log.adopt(each)

    def _adopted(
        self, whole: list[FoundFile], told: Told | None, damaged: dict[str, FoundFile], done: Done[None]
    ) -> None:
        done.result()
        for each in whole:
            self._take_back(_name(each.damage))
        if told is not None:
            _tell(told, damaged)

    def _settle(self, names: set[str], done: Done[None]) -> None:
        try:
            done.result()
        except DataError:
            return  # The disk is full, which the appending thread logs: the next look tries again.
        self._settled |= names
        self._on_files.rolled()

    def _set_aside(self, name: str, damage: DamagedData) -> None:
        self._known[name] = damage
        self._on_files.put(name, damage)

    def _take_back(self, name: str) -> None:
        self._settled.discard(name)
        if self._known.pop(name, None) is not None:
            self._on_files.lift(name)


def write_again(segments: Iterable[Segment]) -> bool:
    """Write removed files again from their open descriptors while these exist: nothing else holds their contents.

    Returns False when a later try may do what could not be done now.
    """
    done = True
    for segment in segments:
        if segment.lost is not None or segment.disk.exists(segment.path):
            continue
        try:
            segment.write_again()
            log.critical("file_written_again path=%s", segment.path)
        except DataError as error:
            log.critical("file_not_written_again path=%s reason=%r", segment.path, str(error))
            # Without a descriptor nothing has the bytes any more.
            done &= isinstance(error, DamagedData)
    return done


def _tell(told: Told, damaged: dict[str, FoundFile]) -> None:
    told(not damaged, "; ".join(str(each.damage) for each in damaged.values()) or "all files of this log are there")


def _nothing() -> None:
    """Nothing is appended to a damaged file, so no roll is needed."""


def _name(error: DamagedData) -> str:
    return error.path.rpartition("/")[2].removesuffix(".log")
