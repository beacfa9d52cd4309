"""The tail of a log: it does not check. Was it durable, and what is left if an operator gives it up (rule L5)?

**Proof.** Only durable messages get an outcome or are filed in schedule logs, and each group of a pull log names how
far the message log beside it was durable. So when another file of the server's directory names a message or an offset
behind the last group that checks, no crash has torn that off. A start and `delayd log verify` ask the same functions
here. They read files only, and only when an end does not check.

Example: a realtime server's message log has good groups up to offset 7,000, and bytes behind them that do not check.
A group of its pull log says that 7,400 bytes were durable, so the bytes are damage. Had the pull log named no offset
above 7,000, they would be a torn tail, also if consumers were given messages of it (rule L2).

**Giving up.** A server starts without the groups behind the damage, and no bytes are lost: the damaged files are put
aside under names of their own, and the log goes on from its last good group, or from where the last checkpoint counts
it, so that no offset names two different groups.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, count, zip_longest
from typing import NamedTuple, cast

import msgpack
import numpy as np

from delayd.batch.columns import BatchKind, ColumnId
from delayd.errors import BatchMalformed, DamagedData, DamagedValue, DataError, Unreadable
from delayd.log.checkpoint import Payload, read_checkpoint
from delayd.log.control import encode_known
from delayd.log.group import CommitGroup, GroupKind, NewGroup
from delayd.log.hour import SEALED, decode_hours, decode_outcomes
from delayd.log.log import NAME_DIGITS, LogPlace, list_segments, open_log, segment_name
from delayd.log.pull import skip_group_ids
from delayd.log.segment import (
    COPY_SUFFIX,
    Confirmed,
    FileHeader,
    FileKind,
    Segment,
    UnfinishedFile,
    copy_bytes,
    open_segment,
)
from delayd.machine.disk import Disk, list_named, open_named

# {indexed_offset, indexed_crc32c, next_sequence, window_offset, pull_offset, pull_crc32c, next_pull, next_group,
# kept_from, incarnation}; next_group: no group has had this id or a higher one, in earlier versions not there;
# kept_from: retention has removed nothing of the message log from there on.
CHECKPOINT_KEY = b"checkpoint"
# `<name>` {id, end, segment_base, segment_count, segment_crc32c, first, valid} (docs/formats/consume.md).
SUBJECT_PREFIX = b"subject/"
# `<u32 id>` {subject, group, next, pulls, redeliver, known_from, given_back, lapsed, decided, leaving, held_back,
# ephemeral, filter, ordered}, and in_flight_max, begins_at_ms where they are not 0 (docs/formats/pull.md).
GROUP_PREFIX = b"group/"
# `<key>` The same as under `checkpoint`, `lives`, `offers`, `origin/…`, `subject/…`, `unread_from`.
COPY_PREFIX = b"copy/"
QUARANTINE = "quarantine"  # The folder with the files beside damaged logs of hours.

Scan = Callable[[bytes, list[DamagedValue]], list[tuple[bytes, bytes]]]
"""`State.scan`, or the same from the file of a state that no server has open."""


def decided_behind(disk: Disk, folder: str, log_id: int, end: int) -> str:
    """Why the message log of a delay server was durable behind the offset ``end``, where its last good group ends: an
    outcome or a filed row names a message there, or the checkpoint file counts it. "" if nothing does.

    Raises:
        DamagedData, Shortage: a file can't be read now, or the good groups do not check any more.
    """
    published = _read_published(disk, folder, log_id)
    counted, next_sequence = published.number("replay_offset"), max(1, published.number("next_sequence"))
    if counted > end:
        return f"the checkpoint file counts the log up to offset {counted}"
    for group in _good_groups(disk, LogPlace(f"{folder}/message", FileKind.MESSAGE, log_id), counted, end):
        next_sequence = max(next_sequence, group.header.base_sequence + group.header.row_count)
    where = disk, folder, log_id, published
    for sequence, fact in chain(_decided(*where), _filed(*where)):
        if sequence >= next_sequence:
            return f"message {sequence} from there on was durable: {fact}"
    return ""


def named_behind(disk: Disk, scan: Scan, folder: str, log_id: int, end: int) -> str:
    """Why the message log of a realtime server was durable behind the offset ``end``, where its last good group ends:
    its pull log says so. "" if it does not.

    Raises:
        DamagedData, Shortage: a file can't be read now.
    """
    start = _row(_values(scan, CHECKPOINT_KEY, []).get(CHECKPOINT_KEY)).get("pull_offset", 0)
    with _past_damage():
        for group in _good_groups(disk, LogPlace(f"{folder}/pull", FileKind.PULL, log_id), start, sys.maxsize):
            if group.header.base_sequence > end:
                return f"the pull log says that it was durable up to offset {group.header.base_sequence}"
    return ""


class _Published(NamedTuple):
    """What a delay server's checkpoint file says; nothing when it can't be read."""

    payload: Payload

    def number(self, name: str) -> int:
        """One of its numbers; 0 where it is not there."""
        found = self.payload.get(name)
        return found if isinstance(found, int) else 0

    def hours(self, name: str) -> dict[int, np.void]:
        """One of its tables of hours, by hour."""
        found = self.payload.get(name)
        return {int(row["hour"]): row for row in decode_hours(found if isinstance(found, bytes) else b"")}


def _read_published(disk: Disk, folder: str, log_id: int) -> _Published:
    payload: Payload | None = None
    with _past_damage():
        payload = read_checkpoint(disk, folder, log_id)
    return _Published(payload or {})


def _decided(disk: Disk, folder: str, log_id: int, published: _Published) -> Iterator[tuple[int, str]]:
    """The highest sequence in each dispatch log, and in each file beside one, with what that says."""
    hours = published.hours("hours")
    sealed = {hour for hour, row in hours.items() if row["flags"] & SEALED}
    for segment in _hour_logs(disk, folder, log_id, FileKind.DISPATCH):
        # A sealed hour is below the checkpoint, so it names nothing above it.
        if segment.header.number not in sealed:
            yield _highest_sequence(segment, 0, 0), f"an outcome in {segment.path} names it"


def _filed(disk: Disk, folder: str, log_id: int, published: _Published) -> Iterator[tuple[int, str]]:
    """The highest sequence of rows in each schedule log that its checkpoint died too early to count."""
    hours, beside = published.hours("hours"), published.hours("beside")
    for segment in _hour_logs(disk, folder, log_id, FileKind.SCHEDULE):
        table = beside if segment.path.startswith(f"{folder}/{QUARANTINE}/") else hours
        row = table.get(segment.header.number)
        begin, crc32c = (0, 0) if row is None else (int(row["length"]), int(row["last_crc32c"]))
        yield _highest_sequence(segment, begin, crc32c), f"it is filed in {segment.path}"


def _hour_logs(disk: Disk, folder: str, log_id: int, kind: FileKind) -> Iterator[Segment]:
    """The logs of hours of one kind, and the files beside them; one that can't be read is left out."""
    inner = f"{folder}/{kind.name.lower()}"
    paths = [f"{inner}/{day}/{name}" for day in disk.list_folder(inner) for name in disk.list_folder(f"{inner}/{day}")]
    paths += [f"{folder}/{QUARANTINE}/{name}" for name in disk.list_folder(f"{folder}/{QUARANTINE}")]
    for path in paths:
        if path.endswith(".log"):
            with _past_damage(), closing(open_segment(disk, path, kind, log_id, write=False)) as segment:
                yield segment


def _highest_sequence(segment: Segment, begin: int, crc32c: int) -> int:
    highest = 0
    with _past_damage():
        for group in segment.scan(begin, crc32c):
            for _, batch in group.batches():
                if batch.kind is BatchKind.OUTCOME:
                    highest = max(highest, decode_outcomes([batch]).highest_sequence())
                elif batch.kind is BatchKind.SCHEDULE:
                    highest = max(highest, int(batch.uint64s(ColumnId.SEQUENCE).max()))
    return highest


def _good_groups(disk: Disk, place: LogPlace, start: int, end: int) -> Iterator[CommitGroup]:
    """The groups of a log in [start, end), up to the first one that does not check."""
    segments = list_segments(disk, place, write=False, lost_below=start)
    try:
        for segment, following in zip_longest(segments, segments[1:]):
            until = end if following is None else following.base_offset
            if until <= start:
                continue
            scan = segment.scan(max(start, segment.base_offset))
            while scan.offset < until and (group := next(scan, None)):
                yield group
    finally:
        for segment in segments:
            segment.close()


@contextmanager
def _past_damage() -> Iterator[None]:
    """A file that is damaged proves only what stands before the damage. One that can't be read now raises, because it
    may prove something when it can be read.
    """
    try:
        yield
    except Unreadable:
        raise
    except (DamagedData, BatchMalformed, FileNotFoundError, UnfinishedFile):
        pass


def _values(scan: Scan, prefix: bytes, lost: list[DamagedValue]) -> dict[bytes, bytes]:
    """The values below a prefix that check, or their copies; ``lost`` receives those that do not check."""
    copies = {key[len(COPY_PREFIX) :]: value for key, value in scan(COPY_PREFIX + prefix, [])}
    return copies | dict(scan(prefix, lost))


def _row(value: bytes | None) -> dict[str, int]:
    row: object = None if value is None else msgpack.unpackb(value)
    return cast("dict[str, int]", row) if isinstance(row, dict) else {}


ASIDE_SUFFIX = ".given-up"


class LogEnd(NamedTuple):
    """The end of a log that a start needs, and what it costs to give that up."""

    kind: FileKind
    offset: str  # The checkpoint's values.
    crc32c: str
    cost: str


_ENDS = {
    "delay/message": LogEnd(
        FileKind.MESSAGE,
        "replay_offset",
        "replay_crc32c",
        "messages that were accepted there and are not delivered are lost for good",
    ),
    "realtime/message": LogEnd(
        FileKind.REALTIME,
        "indexed_offset",
        "indexed_crc32c",
        "messages that were delivered there are lost for good, and what was acknowledged since the last checkpoint "
        "comes again; delay servers that delivered them wait for `delayd target accept`, and for `delayd mend give-up "
        "window` where it is listed",
    ),
    "realtime/pull": LogEnd(
        FileKind.PULL,
        "pull_offset",
        "pull_crc32c",
        "what was acknowledged there comes again, and groups that were made there begin anew",
    ),
}


def end_of(folder: str) -> LogEnd | None:
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
    for path, base in _needed(disk, place, start):
        with closing(_by_name(disk, place, path, base)) as segment:
            size = segment.file.size()
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
    damaged: list[tuple[str, int]] = []
    for path, base in _needed(disk, place, damage.start):
        target = _free_name(disk, f"{aside}/{place.folder.rpartition('/')[2]}-{path.rpartition('/')[2]}")
        with closing(_by_name(disk, place, path, base)) as segment:
            if base < damage.start and segment.file.size() <= segment.position(damage.start):
                continue
            # The file is copied, because its good groups must stay where a start finds them until the new file has
            # them.
            with closing(open_named(disk, target, create=True)) as copy:
                copy_bytes(segment.file, copy, segment.file.size())
        put_aside.append(target)
        damaged.append((path, base))
    disk.sync_folder(aside)
    # The new file, with the good groups and the operator's decision, replaces the damaged file in one step. A crash
    # before or after it leaves a log that can be given up once more, and loses no good group.
    disk.rename(f"{new}{COPY_SUFFIX}", new)
    disk.sync_folder(place.folder)
    for path, base in damaged:
        if base > damage.start:
            disk.remove(path)
        elif base < damage.start:
            # The new file begins within this one.
            with closing(_by_name(disk, place, path, base, write=True)) as segment:
                segment.file.truncate(segment.position(damage.start))
                segment.file.sync()
    disk.sync_folder(place.folder)
    open_log(disk, place, now_ms, damage.start, damage.crc32c, leave_out=True).close()
    return put_aside


def ids_skipped(damage: Damage, epoch: int, now_ms: int) -> NewGroup:
    """A record for a pull log whose end is given up: groups that were made there keep their ids for themselves."""
    stamps = epoch, max(damage.appended_at_ms, now_ms), 0
    return NewGroup(GroupKind.CONTROL, [encode_known([skip_group_ids(now_ms)])], *stamps)


def _files(disk: Disk, place: LogPlace) -> list[tuple[str, int]]:
    names = [name.removesuffix(".log") for name in list_named(disk, place.folder) if name.endswith(".log")]
    return [
        (f"{place.folder}/{name}.log", int(name)) for name in names if name.isdecimal() and len(name) == NAME_DIGITS
    ]


def _needed(disk: Disk, place: LogPlace, start: int) -> list[tuple[str, int]]:
    """Those files that may have groups at the offset ``start`` or behind it."""
    files = _files(disk, place)
    return files[max(0, bisect_right(files, start, key=lambda file: file[1]) - 1) :]


def _by_name(disk: Disk, place: LogPlace, path: str, base: int, *, write: bool = False) -> Segment:
    """Open a file whose own header may be damaged."""
    return Segment(disk, path, open_named(disk, path, write=write), FileHeader(place.kind, place.log_id, base))


def _write_good(
    disk: Disk, place: LogPlace, damage: Damage, path: str, now_ms: int, groups: Sequence[NewGroup]
) -> None:
    """Write a file that begins at the checkpoint and holds the good groups behind it, then ``groups``; durable."""
    if disk.exists(path):
        disk.remove(path)
    with closing(open_named(disk, path, create=True)) as file:
        header = FileHeader(place.kind, place.log_id, damage.start, 0, now_ms, damage.crc32c)
        file.pwritev([header.encode()], 0)
        made = Segment(disk, path, file, header)
        for source, base in _files(disk, place):
            if not base <= made.end < damage.good_until:
                continue
            with closing(_by_name(disk, place, source, base)) as read:
                scan = read.scan(made.end, None)
                while scan.offset < damage.good_until and (group := next(scan, None)):
                    file.pwritev([group.buffer], made.position(group.header.offset))
                    made.end, made.crc32c = group.end, group.header.header_crc32c
        file.sync()
        made.durable = made.end
        if groups:
            made.append(groups)
            made.flush()


def _free_name(disk: Disk, path: str) -> str:
    """A name that no file has that was put aside before."""
    name = f"{path}{ASIDE_SUFFIX}"
    for number in count(2):
        if not disk.exists(name):
            break
        name = f"{path}.{number}{ASIDE_SUFFIX}"
    return name
