"""Give up the damaged end of a log that a start needs: the server then starts without the groups behind the damage.

Invariant: no bytes are lost. The damaged files are put aside under names of their own, and the log goes on from its
last good group, or from where the last checkpoint counts it, so that no offset names two different groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from delayd.errors import DamagedData, DataError
from delayd.log.group import NewGroup
from delayd.log.log import NAME_DIGITS, LogPlace, open_log, segment_name
from delayd.log.segment import COPY_SUFFIX, READ_BYTES, Confirmed, FileHeader, FileKind, Segment
from delayd.machine.disk import Disk, list_named, open_named

ASIDE_SUFFIX = ".given-up"


class End(NamedTuple):
    """The end of a log that a start needs, and what it costs to give that up."""

    kind: FileKind
    offset: str  # The checkpoint's values.
    crc32c: str
    cost: str


_ENDS = {
    "delay/message": End(
        FileKind.MESSAGE,
        "replay_offset",
        "replay_crc32c",
        "messages that were accepted there and are not delivered are lost for good",
    ),
    "realtime/message": End(
        FileKind.REALTIME,
        "indexed_offset",
        "indexed_crc32c",
        "messages that were delivered there are lost for good, and what was acknowledged since the last checkpoint "
        "comes again; delay servers that delivered them wait for `delayd target accept`, and for `delayd mend give-up "
        "window` where it is listed",
    ),
    "realtime/pull": End(
        FileKind.PULL,
        "pull_offset",
        "pull_crc32c",
        "what was acknowledged there comes again, and groups that were made there begin anew",
    ),
}


def end_of(folder: str) -> End | None:
    """The end of the log in a folder such as ``data/realtime/pull``; None for a folder of no such log."""
    return _ENDS.get("/".join(folder.rstrip("/").split("/")[-2:]))


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage that keeps a start from a log, and the offset up to which its groups are good; ``start`` is the
    checkpoint's.
    """

    error: DamagedData
    start: int
    crc32c: int  # The checksum of the group that ends at ``start``.
    good_until: int
    next_sequence: int  # Behind the last good group, if a group says it; 0 otherwise.
    appended_at_ms: int
    lost_bytes: int  # How many bytes the files hold behind the last good group.


def find_damage(
    disk: Disk, place: LogPlace, start: int, crc32c: int, now_ms: int, confirmed: Confirmed | None = None
) -> Damage | None:
    """Find the damage that keeps a start from a log whose server is stopped; None when there is none. Recovers the log
    as a start does; ``confirmed`` says why its tail is not to be cut (`open_log`).

    Raises:
        DataError: this process can't read it now.
    """
    try:
        open_log(disk, place, now_ms, start, crc32c, leave_out=True, confirmed=confirmed).close()
        return None
    except DamagedData as damage:
        error = damage
    good_until, next_sequence, appended_at_ms, lost = start, 0, 0, 0
    for path, base in _files(disk, place):
        following = [other for _, other in _files(disk, place) if other > base]
        if following and following[0] <= start:
            continue
        file = open_named(disk, path)
        try:
            size = file.size()
            segment = Segment(disk, path, file, FileHeader(place.kind, place.log_id, base))
            scan = segment.scan(good_until, crc32c if good_until == start else None)
            if base <= good_until:
                try:
                    for group in scan:
                        next_sequence = max(next_sequence, group.header.base_sequence + group.header.row_count)
                        appended_at_ms = max(appended_at_ms, group.header.appended_at_ms)
                except DataError:
                    pass  # The good groups end where the file can't be read.
                good_until = scan.offset
            lost += max(0, size - segment.position(max(base, good_until)))
        finally:
            file.close()
    return Damage(error, start, crc32c, good_until, next_sequence, appended_at_ms, lost)


def give_up(
    disk: Disk, place: LogPlace, damage: Damage, aside: str, now_ms: int, groups: Sequence[NewGroup] = ()
) -> list[str]:
    """Make a log end at its last good group, and append ``groups``; return the paths of the files that were put
    aside.
    """
    disk.make_folder(place.folder)
    disk.make_folder(aside)
    new = f"{place.folder}/{segment_name(damage.start)}"
    _write_good(disk, place, damage, f"{new}{COPY_SUFFIX}", now_ms, groups)
    put_aside: list[str] = []
    to_cut: list[tuple[str, FileHeader]] = []
    to_remove: list[str] = []
    for path, base in _files(disk, place):
        following = [other for _, other in _files(disk, place) if other > base]
        if following and following[0] <= damage.start:
            continue
        header = FileHeader(place.kind, place.log_id, base)
        target = _free_name(disk, f"{aside}/{place.folder.rpartition('/')[2]}-{path.rpartition('/')[2]}")
        if base < damage.start and not _reaches(disk, path, header, damage.start):
            continue
        # The file is copied, because its good groups must stay where a start finds them until the new file has them.
        _copy(disk, path, target)
        put_aside.append(target)
        if base > damage.start:
            to_remove.append(path)
        elif base < damage.start:
            to_cut.append((path, header))
    disk.sync_folder(aside)
    # The new file, with the good groups and the operator's decision, replaces the damaged file in one step. A crash
    # before or after it leaves a log that can be given up once more, and loses no good group.
    disk.rename(f"{new}{COPY_SUFFIX}", new)
    disk.sync_folder(place.folder)
    for path, header in to_cut:
        _cut(disk, path, header, damage.start)
    for path in to_remove:
        disk.remove(path)
    disk.sync_folder(place.folder)
    open_log(disk, place, now_ms, damage.start, damage.crc32c, leave_out=True).close()
    return put_aside


def _files(disk: Disk, place: LogPlace) -> list[tuple[str, int]]:
    names = [name.removesuffix(".log") for name in list_named(disk, place.folder) if name.endswith(".log")]
    return [
        (f"{place.folder}/{name}.log", int(name)) for name in names if name.isdecimal() and len(name) == NAME_DIGITS
    ]


def _write_good(
    disk: Disk, place: LogPlace, damage: Damage, path: str, now_ms: int, groups: Sequence[NewGroup]
) -> None:
    """Write a file that begins at the checkpoint and holds the good groups behind it, then ``groups``; durable."""
    if disk.exists(path):
        disk.remove(path)
    file = open_named(disk, path, create=True)
    try:
        header = FileHeader(place.kind, place.log_id, damage.start, 0, now_ms, damage.crc32c)
        file.pwritev([header.encode()], 0)
        made = Segment(disk, path, file, header)
        for source, base in _files(disk, place):
            if not base <= made.end < damage.good_until:
                continue
            read = open_named(disk, source)
            try:
                scan = Segment(disk, source, read, FileHeader(place.kind, place.log_id, base)).scan(made.end, None)
                while scan.offset < damage.good_until and (group := next(scan, None)):
                    file.pwritev([group.buffer], made.position(group.header.offset))
                    made.end, made.crc32c = group.end, group.header.header_crc32c
            finally:
                read.close()
        file.sync()
        made.durable = made.end
        if groups:
            made.append(groups)
            made.flush()
    finally:
        file.close()


def _free_name(disk: Disk, path: str) -> str:
    """A name that no file has that was put aside before."""
    name = f"{path}{ASIDE_SUFFIX}"
    for number in count(2):
        if not disk.exists(name):
            break
        name = f"{path}.{number}{ASIDE_SUFFIX}"
    return name


def _reaches(disk: Disk, path: str, header: FileHeader, offset: int) -> bool:
    """Whether a file has bytes behind an offset."""
    file = open_named(disk, path)
    try:
        return file.size() > Segment(disk, path, file, header).position(offset)
    finally:
        file.close()


def _copy(disk: Disk, path: str, target: str) -> None:
    """Copy a file; its data is durable on return, the folder's entry is not."""
    file, copy = open_named(disk, path), open_named(disk, target, create=True)
    try:
        size = file.size()
        for position in range(0, size, READ_BYTES):
            copy.pwritev([file.pread(min(READ_BYTES, size - position), position)], position)
        copy.sync()
    finally:
        copy.close()
        file.close()


def _cut(disk: Disk, path: str, header: FileHeader, offset: int) -> None:
    """Cut a file where the new one begins; durable on return."""
    file = open_named(disk, path, write=True)
    try:
        file.truncate(Segment(disk, path, file, header).position(offset))
        file.sync()
    finally:
        file.close()
