"""Segment: one file of groups behind a file header (docs/formats/segment.md, version 1).

It is written at its known end only. Bytes behind that end are never trusted, and nothing is written behind them (rule
L3).
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from crc32c import crc32c

from delayd.batch.columns import Buffer
from delayd.errors import DamagedData, DataError, NewerFormat, ServerStopped, Shortage, SyncFailed, read_error
from delayd.log.group import (
    BATCHES_MAX,
    HEADER,
    MAGIC_BYTES,
    VERSION,
    BadGroup,
    CommitGroup,
    GroupHeader,
    IncompleteGroup,
    NewerGroup,
    NewGroup,
    batch_sizes,
    encode_header,
    parse_header,
    verify_chain,
    verify_group,
)
from delayd.machine.disk import Disk, File, RealFile, open_named
from delayd.machine.open_files import REMOVED, REPLACED

FILE_MAGIC = b"delaydlg"
FILE_VERSION = 1
FILE_HEADER = struct.Struct("<8sHHIQQQqIIII")
FILE_HEADER_BYTES = FILE_HEADER.size
COPY_SUFFIX = ".new"  # A file that is being written again has this suffix until it is whole; no file of a log has it.
READ_BYTES = 4 << 20  # One read of a scan; large enough that its calls do not count.
FRONT_BYTES = 4 << 10  # Header and table of a group of a thousand batches.
GROUP_PLACE = struct.Struct("<QQ")  # log_id and offset in a group's header, which together name its place.
GROUP_PLACE_AT = 16


log = logging.getLogger(__name__)

Visit = Callable[[CommitGroup], object]
Confirmed = Callable[[int], str]
"""Says why a log was durable behind an offset, where its last good group ends; "" if nothing proves it."""


class FileKind(IntEnum):
    """The contents of a file."""

    MESSAGE = 1
    SCHEDULE = 2
    DISPATCH = 3
    REALTIME = 4
    CONSUME = 5
    PULL = 6
    CHECKPOINT = 7
    SEAL = 8
    KEYS = 11  # 9 and 10 are no longer used.


class FileHeader(NamedTuple):
    """The facts at the beginning of a file."""

    kind: int
    log_id: int
    base_offset: int = 0
    number: int = 0
    created_at_ms: int = 0
    previous_crc32c: int = 0

    def encode(self) -> bytes:
        """Make the 64 bytes."""
        fields = (self.log_id, self.base_offset, self.number, self.created_at_ms, self.previous_crc32c)
        checked = FILE_HEADER.pack(FILE_MAGIC, FILE_VERSION, self.kind, 0, *fields, 0, 0, 0)[:-4]
        return checked + crc32c(checked).to_bytes(4, "little")


class UnfinishedFile(Exception):
    """A file of at most a header, which does not check: its creation did not finish."""


class Prepared(NamedTuple):
    """Groups for the end of a segment: their bytes, where these go, and the offsets and the end that come of them."""

    buffers: list[Buffer]
    position: int
    offsets: list[int]
    end: int
    crc32c: int


class Segment:
    """An open file of groups. ``end`` and ``durable`` are offsets in the log; ``crc32c`` is of the last group.

    The header of a ``bare`` file is written with the first groups.
    """

    def __init__(self, disk: Disk, path: str, file: File, header: FileHeader, *, bare: bool = False) -> None:
        self.disk = disk
        self.path = path
        self.file = file
        self.header = header
        self.base_offset = header.base_offset
        self.end = self.durable = header.base_offset
        self.crc32c = header.previous_crc32c
        self.lost: DamagedData | None = None  # Why a start left the file out; each read then raises it.
        self._file_id: int | None = None
        self._bare = bare
        self._broken = False

    def remember_file(self) -> Segment:
        """Note which file was opened, so that `look` knows it again."""
        self._file_id = self.disk.file_id(self.path)
        return self

    def look(self) -> DamagedData | None:
        """Check whether somebody removed, replaced or cut the file; return the damage."""
        if self.lost is not None:
            return self.lost
        if (found := self.disk.file_id(self.path)) is None:
            return DamagedData(self.path, 0, REMOVED)
        if found != self._file_id:
            return DamagedData(self.path, 0, REPLACED)
        valid = self.position(self.durable)
        try:
            size = self.file.size()
        except DamagedData as error:
            return error
        if size < valid:
            return DamagedData(self.path, size, f"{valid - size} bytes were cut off the running server's")
        return None

    def append(self, groups: Sequence[NewGroup]) -> list[int]:
        """Write groups at the end, not durable yet; return their offsets.

        Raises:
            Shortage, DamagedData: the file can't be opened anew, or is gone; nothing was written.
            DiskFull, OSError: nothing was appended; bytes that were written are cut off again, durably.
            ServerStopped: they could not be cut off.
        """
        prepared = self.prepare(groups)
        try:
            self.file.pwritev(prepared.buffers, prepared.position)
        except (Shortage, DamagedData):
            raise  # There is nothing to cut back.
        except (OSError, DataError) as error:
            self._cut_back(error)
            raise
        self.grow(prepared)
        return prepared.offsets

    def prepare(self, groups: Sequence[NewGroup]) -> Prepared:
        """Make the bytes of groups at the end; ServerStopped after a failure. `grow` follows once they are written."""
        self._check_usable()
        end, crc, offsets = self.end, self.crc32c, []
        buffers: list[Buffer] = [self.header.encode()] if self._bare else []
        position = 0 if self._bare else self.position(end)
        for group in groups:
            sizes = group.sizes or [len(batch) for batch in group.batches]
            header, crc = encode_header(group, sizes, self.header.log_id, end, self.durable, crc)
            offsets.append(end)
            buffers.append(header)
            buffers.extend(group.batches)
            end += len(header) + sum(sizes)
        return Prepared(buffers, position, offsets, end, crc)

    def grow(self, written: Prepared) -> None:
        """Let the file end behind groups that are written."""
        self.end, self.crc32c, self._bare = written.end, written.crc32c, False

    def flush(self, judge: Callable[[], None] | None = None, end: int | None = None) -> None:
        """Fsync what was appended; SyncFailed when the disk refuses, and then the server must stop.

        A `Lane` may have done the fsync, of what was appended up to ``end``: then ``judge`` raises if that has failed.
        """
        self._check_usable()
        end = self.end if end is None else end
        try:
            (judge or self.file.sync)()
        except SyncFailed:
            # The kernel has dropped the dirty pages: a second sync would succeed and mean nothing.
            self._broken = True
            raise
        # A roll or a cut on another thread may have synced more meanwhile.
        self.durable = max(self.durable, end)

    def position(self, offset: int) -> int:
        """Turn an offset of the log into a position in this file."""
        return offset - self.base_offset + FILE_HEADER_BYTES

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes at ``offset``; DamagedData when the file is shorter."""
        data = self.file.pread(size, self.position(offset))
        if len(data) != size:
            raise DamagedData(self.path, self.position(offset), f"the file ends {size - len(data)} bytes early")
        return data

    def scan(self, offset: int, previous_crc32c: int | None = None, read_bytes: int = READ_BYTES) -> GroupScan:
        """Iterate over the verified groups from ``offset`` on; None: do not check the first one's chain.

        So many bytes are read at once, or a whole group if that is longer.
        """
        return GroupScan(self, offset, previous_crc32c, read_bytes)

    def read_front(self, offset: int, previous_crc32c: int | None) -> tuple[GroupHeader, tuple[int, ...]]:
        """Read the header of the group at ``offset`` and the lengths of its batches, but not the batches.

        Raises:
            DamagedData: header, table or chain do not check, or the file ends within the group.
        """
        position, needed = self.position(offset), FRONT_BYTES
        while True:
            data = self.file.pread(needed, position)
            try:
                header = parse_header(data, 0, self.header.log_id, offset)
                verify_chain(data, header, previous_crc32c)
                break
            except IncompleteGroup as error:
                if len(data) < needed:
                    raise DamagedData(self.path, position, str(error)) from None
                needed = error.size_bytes
            except NewerGroup as error:
                raise NewerFormat(self.path, error.version, VERSION) from None
            except BadGroup as error:
                raise DamagedData(self.path, position, str(error)) from None
        if self.file.size() < position + header.total_bytes:
            raise DamagedData(self.path, position, "the group is cut short")
        return header, batch_sizes(data, header)

    def write_again(self) -> None:
        """Write a removed file anew from what this descriptor still reads: durable bytes, durable on return.

        Raises:
            DiskFull, DataError: nothing stands under its name.
        """
        folder, copy = self.path.rpartition("/")[0], f"{self.path}{COPY_SUFFIX}"
        self.disk.make_folder(folder)
        if self.disk.exists(copy):
            self.disk.remove(copy)
        file = open_named(self.disk, copy, create=True)
        try:
            copy_bytes(self.file, file, self.position(self.durable))
        except OSError as error:
            raise read_error(copy, 0, error) from error
        finally:
            file.close()
        self.disk.rename(copy, self.path)
        self.disk.sync_folder(folder)

    def name_again(self) -> None:
        """Name a file anew that has no groups: a name whose sync failed once is never durable (rule L1).

        It takes no space. Whoever calls must be able to go on without the file, for a crash may come between the two.
        """
        folder, aside = self.path.rpartition("/")[0], f"{self.path}{COPY_SUFFIX}"
        self.disk.rename(self.path, aside)
        self.disk.rename(aside, self.path)
        self.disk.sync_folder(folder)

    def whole_until(self) -> int:
        """Offset of the first group that this file does not hold whole, by headers alone."""
        offset, previous_crc32c = self.base_offset, self.header.previous_crc32c
        while True:
            try:
                header, _ = self.read_front(offset, previous_crc32c)
            except DamagedData:
                return offset
            offset, previous_crc32c = offset + header.total_bytes, header.header_crc32c

    def close(self) -> None:
        """Close the file; appended groups must have been flushed before (rule L4)."""
        self.file.close()

    def recover(
        self,
        offset: int,
        previous_crc32c: int | None,
        known_durable: int,
        last: bool,
        visit: Visit | None = None,
        confirmed: Confirmed | None = None,
    ) -> None:
        """Find the end from ``offset`` on, cut a torn tail, make the rest durable (docs: segment.md, Recovery), and log
        what was done.

        The groups are read one after the other until one does not check. What that means depends on what is known to
        have been fsynced. An example: groups begin at the offsets 0, 400, 600, 800 and 900, and the last one ends at
        1,000; the caller knows that everything below 600 was durable.

        1. All groups check: the end is 1,000. The bytes from the highest durable offset that a group names up to there
           may be in the page cache only, so they are written again in place and synced.
        2. The group at 800 does not check, and no whole header behind it names a durable offset above 800: no fsync
           returned while it was there, so nothing in it was acknowledged. It is a torn tail; the file is cut to 800.
        3. The group at 800 does not check, and the header at 900 says that 900 bytes were durable: the group was
           fsynced, so it is damage. Nothing is cut.
        4. The group at 400 does not check, or the file ends there: that was durable, so it is damage.
        5. The group at 800 does not check, and a later segment exists: a segment is durable as a whole before the next
           one begins, so it is damage.

        Args:
            offset: where to begin; what lies before is known to be durable and intact.
            previous_crc32c: header_crc32c of the group before ``offset``; None when it is not known.
            known_durable: an offset below which the caller knows that everything was fsynced, at least ``offset``.
            last: whether no later segment exists; only the last one may have a torn tail.
            visit: gets each verified group in the same reading; what it builds counts only once this has returned.
            confirmed: asked before a tail is cut, with the offset where it begins: why it was durable, as a later fact
                proves; "" if none does.

        Raises:
            DamagedData: a group does not check and was durable.
        """
        scan = self.scan(offset, previous_crc32c)
        durable = max(known_durable, offset)
        size, again = self.base_offset + self.file.size() - FILE_HEADER_BYTES, -1
        while True:
            for group in scan:
                durable = max(durable, group.header.durable_offset)
                if visit is not None:
                    visit(group)
            end = scan.offset
            if end >= size or end == again:
                break
            # Bytes that are cut off are gone, so a group is read twice before it counts as torn: a read may fail once.
            again, scan = end, self.scan(end, scan.crc32c)
        self._check_torn(scan, size, known_durable, last)
        if size > end:
            if confirmed is not None and (why := confirmed(end)):
                raise DamagedData(self.path, self.position(end), f"{scan.reason}, and {why}")
            self.file.truncate(self.position(end))
        if last:
            self._write_back(durable, end)
            # The sync comes even if nothing was written here: a recovery that died may have cut without one.
            self.file.sync()
            self.disk.sync_folder(self.path.rpartition("/")[0])
        self.end = self.durable = end
        self.crc32c = self.header.previous_crc32c if scan.crc32c is None else scan.crc32c
        self._tell_recovered(size - end, scan.reason, max(0, end - durable))

    def _check_torn(self, scan: GroupScan, size: int, known_durable: int, last: bool) -> None:
        """Raise DamagedData if the groups end where a reading of all of them stopped, and something behind that was
        durable.
        """
        end = scan.offset
        if size < end:
            raise DamagedData(self.path, self.position(size), f"the file ends {end - size} bytes early")
        # The bytes that may name the group as durable are read twice, too: if that read failed once, damage would look
        # torn.
        if scan.reason and (not last or any(end < self.durable_named_behind(end) for _ in range(2))):
            raise DamagedData(self.path, self.position(end), scan.reason)
        if end < known_durable:
            what = scan.reason or f"the file ends {known_durable - end} bytes early"
            raise DamagedData(self.path, self.position(end), what)

    def _tell_recovered(self, cut_bytes: int, reason: str, rewritten_bytes: int) -> None:
        """Log it when bytes were cut off, or were written back and fsynced (rules L1, L5)."""
        # A start after a SIGKILL writes bytes back, and nothing is lost then. Nor is it when a dispatch log is cut,
        # because the target is asked for its rows again. All else that is cut may have been a damaged last group.
        lost = cut_bytes and self.header.kind != FileKind.DISPATCH
        if cut_bytes or rewritten_bytes:
            log.log(
                logging.WARNING if lost else logging.INFO,
                "tail_recovered path=%s cut_bytes=%d reason=%r rewritten_bytes=%d",
                *(self.path, cut_bytes, reason, rewritten_bytes),
            )

    def _write_back(self, start: int, end: int) -> None:
        """Write bytes in place that may be in the page cache only: if their sync had failed, a later sync would not
        write them.
        """
        if end == self.base_offset:
            # Only a group proves that the file's header and name were synced.
            self.file.pwritev([self.header.encode()], 0)
        # Each group is verified in this very read: a bit that flips on the way must not be made durable.
        scan = self.scan(start)
        while scan.offset < end and (group := next(scan, None)):
            self.file.pwritev([group.buffer], self.position(group.header.offset))
        if scan.offset < end:
            what = f"it was read well once, and not when it was to be written back: {scan.reason}"
            raise DamagedData(self.path, self.position(scan.offset), what)

    def durable_named_behind(self, offset: int) -> int:
        """The highest durable offset that a valid group header behind a bad group names."""
        highest, position = 0, self.position(offset) + 8
        while data := self.file.pread(READ_BYTES, position):
            found = data.find(MAGIC_BYTES)
            while found >= 0:
                at = position + found
                if at % 8 == 0:
                    highest = max(highest, self._durable_named_at(at))
                found = data.find(MAGIC_BYTES, found + 4)
            position += len(data)
        return highest

    def _durable_named_at(self, position: int) -> int:
        named = position - FILE_HEADER_BYTES + self.base_offset
        place = GROUP_PLACE.pack(self.header.log_id, named)
        # Bodies may contain many magic numbers, so a table is read only behind a header that names this place.
        if self.file.pread(GROUP_PLACE.size, position + GROUP_PLACE_AT) != place:
            return 0
        data = self.file.pread(HEADER.size + 4 * BATCHES_MAX, position)
        try:
            return parse_header(data, 0, self.header.log_id, named).durable_offset
        except BadGroup:
            return 0

    def _check_usable(self) -> None:
        """Raise ServerStopped after a failure behind which nothing may be written."""
        if self._broken:
            raise ServerStopped(f"an earlier write to {self.path} failed; check the disk, then start the server again")

    def _cut_back(self, cause: Exception) -> None:
        try:
            self.file.truncate(self.position(self.end))
            if self.file.size() != self.position(self.end):
                raise OSError(f"{self.path} has the wrong size after a cut")
            # After a crash no whole group of the failed write may come back: its senders were told "refused".
            self.file.sync()
            self.durable = self.end
        except (OSError, DataError, SyncFailed) as error:
            self._broken = True
            raise ServerStopped(
                f"a failed write to {self.path} ({cause}) could not be cut back ({error}); "
                "check the disk, then start the server again"
            ) from error


class LostFile:
    """Stands for a file that a start left out: each read raises why (rules L5, L10)."""

    __slots__ = ("_damage",)

    def __init__(self, damage: DamagedData) -> None:
        self._damage = damage

    def pread(self, size: int, position: int) -> bytes:
        """Raise DamagedData: there is nothing to read."""
        raise self._error()

    def pread_into(self, buffer: memoryview, position: int) -> int:
        """Raise DamagedData: there is nothing to read."""
        raise self._error()

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """Raise DamagedData: nothing is written to it."""
        raise self._error()

    def sync(self) -> None:
        """Do nothing: nothing was written."""

    def truncate(self, size: int) -> None:
        """Raise DamagedData: nothing is cut."""
        raise self._error()

    def size(self) -> int:
        """Return 0: no byte of the file counts."""
        return 0

    def keep_open(self, kept: bool) -> None:
        """Do nothing: no file is open."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def real(self) -> RealFile | None:
        """There is none."""

    def _error(self) -> DamagedData:
        # The traceback is cleared, because it would grow with each raise of the same error.
        return self._damage.with_traceback(None)


def lost_segment(disk: Disk, path: str, header: FileHeader, end: int, damage: DamagedData) -> Segment:
    """A stand-in for a file that a start left out, up to the offset ``end``; its header says where it begins."""
    segment = Segment(disk, path, LostFile(damage), header)
    segment.end = segment.durable = end
    segment.lost = damage
    return segment


class GroupScan(Iterator[CommitGroup]):
    """Verified groups of one segment in order; it stops at the end or at the first group that does not check.

    Then ``offset`` is where it stopped, ``reason`` says why ("" at the clean end), and ``crc32c`` is the last good
    group's.
    """

    def __init__(self, segment: Segment, offset: int, previous_crc32c: int | None, read_bytes: int) -> None:
        self._read_bytes = read_bytes
        self.offset = offset
        self.reason = ""
        self.crc32c = previous_crc32c
        self._segment = segment
        self._data = memoryview(b"")  # Bytes of the file from ``offset`` on.

    def __next__(self) -> CommitGroup:
        needed = HEADER.size
        while True:
            if len(self._data) < needed and not self._read(needed):
                if len(self._data):
                    self.reason = self.reason or "the group is cut short"
                raise StopIteration
            try:
                header = parse_header(self._data, 0, self._segment.header.log_id, self.offset)
                verify_group(self._data, header, self.crc32c)
                break
            except IncompleteGroup as error:
                needed, self.reason = error.size_bytes, str(error)
            except NewerGroup as error:
                raise NewerFormat(self._segment.path, error.version, VERSION) from None
            except BadGroup as error:
                self.reason = str(error)
                raise StopIteration from None
        group = CommitGroup(header, self._data[: header.total_bytes])
        self._data = self._data[header.total_bytes :]
        self.offset += header.total_bytes
        self.crc32c, self.reason = header.header_crc32c, ""
        return group

    def _read(self, needed: int) -> bool:
        """Read anew from ``offset``, so that a group is one view; False when the file has no ``needed`` bytes there."""
        data = self._segment.file.pread(max(self._read_bytes, needed), self._segment.position(self.offset))
        self._data = memoryview(data)
        return len(data) >= needed


def copy_bytes(source: File, target: File, size: int) -> None:
    """Copy the first bytes of a file; they are durable on return, the folder's entry may not be."""
    for position in range(0, size, READ_BYTES):
        target.pwritev([source.pread(min(READ_BYTES, size - position), position)], position)
    target.sync()


def create_segment(disk: Disk, path: str, header: FileHeader) -> Segment:
    """Create a file with its header, both durable (rule L4); nothing is left of it after DiskFull or Shortage."""
    folder = path.rpartition("/")[0]
    file = open_named(disk, path, write=True, create=True)
    try:
        file.pwritev([header.encode()], 0)
        file.sync()
        disk.sync_folder(folder)
    except (OSError, DataError):
        file.close()
        disk.remove(path)
        disk.sync_folder(folder)
        raise
    return Segment(disk, path, file, header)


def open_segment(disk: Disk, path: str, kind: FileKind, log_id: int | None, *, write: bool) -> Segment:
    """Open a file and check its header; with a ``log_id`` of None the file's own is accepted.

    Raises:
        UnfinishedFile: its creation did not finish.
        FileNotFoundError: there is no such file.
        NewerFormat, DamagedData, Shortage: it can't be read, or belongs elsewhere.
    """
    file = open_named(disk, path, write=write)
    try:
        data = file.pread(FILE_HEADER_BYTES, 0)
        if file.size() <= FILE_HEADER_BYTES and not _header_checks(data):
            # Callers remove what is unfinished, so one wrong read is not enough.
            data = file.pread(FILE_HEADER_BYTES, 0)
            if not _header_checks(data):
                raise UnfinishedFile(path)
        return Segment(disk, path, file, read_file_header(path, data, kind, log_id))
    except BaseException:
        file.close()
        raise


def _header_checks(data: bytes) -> bool:
    return len(data) == FILE_HEADER_BYTES and crc32c(data[:-4]) == int.from_bytes(data[-4:], "little")


def kind_of_file(data: bytes) -> int:
    """The `FileKind` that the first bytes of a file name; 0 when they are no header."""
    if len(data) < FILE_HEADER.size:
        return 0
    magic, _, kind = FILE_HEADER.unpack_from(data)[:3]
    return int(kind) if magic == FILE_MAGIC else 0


def read_file_header(path: str, data: bytes, kind: FileKind, log_id: int | None) -> FileHeader:
    """Check the bytes of a file header and read it; errors as of `open_segment`."""
    if len(data) < FILE_HEADER_BYTES:
        raise DamagedData(path, len(data), "the file header was read short")
    magic, version, found, _, *facts = FILE_HEADER.unpack(data)
    if magic != FILE_MAGIC:
        raise DamagedData(path, 0, "this is not a file of delayd")
    # The checksum is checked first, because all versions have it in the same place: a flipped bit in the version is
    # damage, and a newer delayd would not help.
    if not _header_checks(data):
        raise DamagedData(path, 0, "the checksum of the file header differs")
    if version > FILE_VERSION:
        raise NewerFormat(path, version, FILE_VERSION)
    if found != kind:
        raise DamagedData(path, 0, f"it is of kind {found}, and {kind.name.lower()} belongs here")
    if log_id is not None and facts[0] != log_id:
        raise DamagedData(path, 0, f"it belongs to the directory with log_id {facts[0]:016x}, not {log_id:016x}")
    return FileHeader(found, *facts[:5])
