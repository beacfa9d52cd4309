"""Directory: the servers' directories in a data directory, and what each server's checkpoint says: the bounds of all
reading, and facts that the files must confirm (docs/formats/checkpoint.md, rules P3, S5, L5, L6). Its *word* is such a
statement.

Invariant: nothing is locked, created or changed, and LMDB is never opened, so a live directory, a stopped one and a
copy are read in the same way. The checkpoint file may hold anything, so each field's type is checked before it is used.
A server publishes what retention will remove before it removes it. So if a file is missing without that, somebody else
has taken it: that is damage, and never a loss.
"""

import os
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar

import numpy as np

from delayd.errors import BadArgument, DamagedData, DataError
from delayd.hours import hour_start_ms
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import Payload, Value, read_checkpoint
from delayd.log.hour import DEAD, END_ROW, REMOVED, SEALED, Skipped, decode_hours, dispatch_path, schedule_path
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FILE_MAGIC, FileKind, Segment, UnfinishedFile, open_segment
from delayd.machine.disk import Disk, open_named
from delayd.machine.identity import LOCK, is_held
from delayd.reading.files.stored_groups import LogMoved, file_size, log_size, segment_bases

# The position of two bytes in a file header that name the kind of the file (docs/formats/segment.md).
KIND_POSITION = 10
LOG_NAME = re.compile(r"[0-9]{20}\.log|[0-9]{10}\.log")  # A segment by base offset, an hour by number.
OTHER_FILES = {
    CHECKPOINT: "a checkpoint",
    LOCK: "what a server holds while it runs",
    "place": "what tells a folder from its copies",
    "cluster.secret": "the secret that the servers of a cluster share",
    "data.mdb": "the state of a server",
    "lock.mdb": "LMDB's, for its server alone",
}
V = TypeVar("V", int, bytes, list[Value])


class Role(StrEnum):
    """The kind of server that a directory belongs to."""

    DELAY = "delay"
    REALTIME = "realtime"


MESSAGE_KINDS = {FileKind.MESSAGE: Role.DELAY, FileKind.REALTIME: Role.REALTIME}


@dataclass(frozen=True, slots=True)
class Directory:
    """One server's directory."""

    path: str
    role: Role
    log_id: int

    @property
    def message_folder(self) -> str:
        return f"{self.path}/message"


def find_directories(disk: Disk, data: str) -> list[Directory]:
    """Find the delay and realtime directories in ``data``, or ``data`` itself when it is one; by path.

    A directory whose server has not begun its message log is left out. Raises BadArgument when there is none,
    DamagedData or NewerFormat when a message log is not what it should be.
    """
    return _find(disk, data, None)


def find_undamaged(disk: Disk, data: str, damage: list[DamagedData]) -> list[Directory]:
    """As `find_directories`, and ``damage`` receives what is wrong with directories that are left out."""
    return _find(disk, data, damage)


def _find(disk: Disk, data: str, damage: list[DamagedData] | None) -> list[Directory]:
    data = data.rstrip("/") or "/"
    names = [name for name in disk.list_folder(data) if name.startswith(tuple(Role))]
    paths = [data] if disk.exists(f"{data}/message") else [f"{data}/{name}" for name in names]
    found: list[Directory] = []
    for path in paths:
        try:
            directory = _read_directory(disk, path)
        except DamagedData as error:
            if damage is None:
                raise
            damage.append(error)
        else:
            found += [directory] if directory is not None else []
    if not found and not damage:
        raise BadArgument(f"{data} holds no messages of delayd; give the directory that `delayd up --data` was given")
    return found


def open_any(disk: Disk, path: str) -> Segment:
    """Open a file of groups for reading, whatever kind its header names.

    Raises UnfinishedFile when its creation did not finish, DamagedData or NewerFormat when it can't be read.
    """
    with closing(open_named(disk, path)) as file:
        header = file.pread(FILE_HEADER_BYTES, 0)
    kind = int.from_bytes(header[KIND_POSITION : KIND_POSITION + 2], "little")
    # An unknown kind is left to the header's own checks, which report what is wrong with it.
    return open_segment(disk, path, FileKind(kind) if kind in set(FileKind) else FileKind.MESSAGE, None, write=False)


def need_log_file(disk: Disk, path: str) -> None:
    """Raise BadArgument for a file that neither by name nor first bytes is a log file: it is not damaged."""
    name = path.rpartition("/")[2]
    if LOG_NAME.fullmatch(name):
        return
    what = OTHER_FILES.get(name)
    if what is None:
        with closing(open_named(disk, path)) as file:
            if file.pread(len(FILE_MAGIC), 0) == FILE_MAGIC:
                return
        what = "an operator's word on findings" if name.endswith(".note") else "a file that delayd did not write"
    raise BadArgument(
        f"{path} is not a log file; it is {what}; give one of the .log files below message, schedule, dispatch, pull, "
        "consume or seal in a server's directory"
    )


def _read_directory(disk: Disk, path: str) -> Directory | None:
    names = [name for name in disk.list_folder(f"{path}/message") if name.endswith(".log")]
    if not names:
        if disk.list_folder(f"{path}/schedule"):
            raise DamagedData(f"{path}/message", 0, "the message log is gone, schedule logs are there")
        if _has_served(disk, path):
            raise DamagedData(f"{path}/message", 0, "the message log is gone, and the checkpoint counts what was in it")
        return None
    try:
        segment = open_any(disk, f"{path}/message/{names[0]}")
    except UnfinishedFile:
        if _has_served(disk, path):
            what = "the file header is missing, and a checkpoint counts what is in it"
            raise DamagedData(f"{path}/message/{names[0]}", 0, what) from None
        return None
    segment.close()
    role = MESSAGE_KINDS.get(FileKind(segment.header.kind))
    if role is None:
        raise DamagedData(segment.path, 0, f"it is of kind {segment.header.kind}, which is no message log")
    return Directory(path, role, segment.header.log_id)


def _has_served(disk: Disk, path: str) -> bool:
    published = read_checkpoint(disk, path) or {}
    return any(published.get(name) for name in ("replay_offset", "indexed_offset"))


def server_runs(path: str) -> bool:
    """Whether a server has a directory open at this moment."""
    try:
        return is_held(os.stat(f"{path}/{LOCK}"))
    except (FileNotFoundError, NotADirectoryError):
        return False


PUBLISHED_OFFSETS = {
    Role.DELAY: {"message": "replay_offset"},
    Role.REALTIME: {"message": "indexed_offset", "pull": "pull_offset"},
}


@dataclass(frozen=True, slots=True)
class TableHour:
    """An hour in the checkpoint's table: how much of its schedule log is valid."""

    length: int
    rows: int
    sealed: bool
    removed: bool = False  # Retention removes its files, or has removed them.
    dead: bool = False  # Some of its rows are DEAD.
    last_crc32c: int = 0  # The checksum of its last group.


class LinkWord(NamedTuple):
    """What a delay server says of one target: up to when all its due rows have an outcome, and why not later."""

    log_id: int
    settled_ms: int
    waits: str


@dataclass(frozen=True, slots=True)
class CheckpointWord:
    """The part of a checkpoint that only the audit reads (rules S5, S7); zeros while nothing was published."""

    next_sequence: int = 1
    replay_crc32c: int = 0
    skipped: tuple[Skipped, ...] = ()
    dropped: Mapping[int, int] = field(default_factory=dict)  # By hour: filed rows that operators gave up.
    keep_from: int = 0  # Where the message log may begin.
    # How much of the files beside damaged schedule logs is valid, by hour.
    beside: Mapping[int, TableHour] = field(default_factory=dict)
    seals: int = 0  # How many seals were durable; ``seals_sha256`` is the digest of the last one.
    seals_sha256: bytes = b""
    settled_ms: int = 0  # All rows that fell due before this have an outcome, except rows that a target holds up.
    waits: str = ""
    links: tuple[LinkWord, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleSnapshot:
    """The bounds for reading the logs of a delay server: offsets of the message log, and the table of hours."""

    directory: Directory
    replay_offset: int
    message_stop: int
    hours: dict[int, TableHour]
    appended_at_ms: int  # The last stamp below the replay offset: hours that ended by then are closed (rule P5).
    outcome_ends: dict[int, int]  # Offset in each dispatch log below which everything was fsynced.
    word: CheckpointWord = field(default_factory=CheckpointWord)

    def is_closed(self, hour: int) -> bool:
        """Whether no message can be filed in an hour any more, so that its schedule log is complete (rule P5)."""
        return self.is_sealed(hour) or hour_start_ms(hour + 1) <= self.appended_at_ms

    def is_sealed(self, hour: int) -> bool:
        filed = self.hours.get(hour)
        return filed is not None and filed.sealed

    def counted(self, hour: int) -> int:
        filed, beside = self.hours.get(hour), self.word.beside.get(hour)
        return (filed.rows if filed else 0) + (beside.rows if beside else 0)

    @property
    def place(self) -> LogPlace:
        return LogPlace(self.directory.message_folder, FileKind.MESSAGE, self.directory.log_id)


def take_snapshot(disk: Disk, directory: Directory, *, tail: bool = True) -> ScheduleSnapshot:
    """Read the published checkpoint, then the message log's size; without `tail` the log is not looked at.

    Raises DamagedData or NewerFormat when the checkpoint can't be read, or the message log ends before it.
    """
    published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    try:
        replay_offset = _as(int, published.get("replay_offset", 0))
        hours = filed_hours(_as(bytes, published.get("hours", b"")))
        appended_at_ms = _as(int, published.get("appended_at_ms", 0))
        outcomes = _as(bytes, published.get("outcomes", b""))
        word = _read_word(published) if published else CheckpointWord()
    except (KeyError, TypeError, ValueError) as error:
        what = f"it lacks a field, or one has another type: {error!r}"
        raise DamagedData(f"{directory.path}/checkpoint", 0, what) from error
    ends = {hour: end for hour, _, end in np.frombuffer(outcomes, END_ROW).tolist()}
    place = LogPlace(directory.message_folder, FileKind.MESSAGE, directory.log_id)
    stop = log_size(disk, place) if tail else replay_offset
    bases = segment_bases(disk, place)
    if bases and stop < replay_offset:
        path = f"{place.folder}/{segment_name(bases[-1])}"
        what = f"the checkpoint says that {replay_offset - stop} more bytes are there"
        raise DamagedData(path, stop - bases[-1] + FILE_HEADER_BYTES, what)
    return ScheduleSnapshot(directory, replay_offset, stop, hours, appended_at_ms, ends, word)


def take_what_is_there(disk: Disk, directory: Directory, damage: list[DamagedData]) -> ScheduleSnapshot:
    """`take_snapshot` of a directory that may be a copy and lack the end of the message log, which is told."""
    try:
        return take_snapshot(disk, directory)
    except DamagedData as error:
        # When the checkpoint is damaged, this fails again.
        snapshot = take_snapshot(disk, directory, tail=False)
        damage.append(error)
        return snapshot


def was_removed(disk: Disk, snapshot: ScheduleSnapshot, hour: int) -> bool:
    """Whether retention removed an hour that the published checkpoint names; it publishes a removal first."""
    filed = snapshot.hours.get(hour)
    return filed is not None and filed.removed and not disk.exists(schedule_path(snapshot.directory.path, hour))


def filed_hours(table: bytes) -> dict[int, TableHour]:
    """Read an hour table, by hour."""
    return {
        hour: TableHour(length, rows, bool(flags & SEALED), bool(flags & REMOVED), bool(flags & DEAD), last_crc32c)
        for hour, last_crc32c, length, rows, flags in decode_hours(table).tolist()
    }


def missing_files(disk: Disk, directory: Directory) -> Iterator[DamagedData]:
    """Name each file that is gone; nothing when the checkpoint can't be read, which is reported by itself."""
    yield from _missing_segments(disk, directory)
    if directory.role is not Role.DELAY:
        return
    lost = [path for path in _counted(disk, directory) if not disk.exists(path)]
    # Retention of a running server publishes a removal first, so the checkpoint is read once more.
    counted = _counted(disk, directory) if lost else {}
    for path in lost:
        if path in counted:
            yield DamagedData(path, 0, f"the file is gone, and the checkpoint counts {counted[path]}")


def not_counted(disk: Disk, directory: Directory, hours: Container[int] | None = None) -> Iterator[DamagedData]:
    """Name each file that is gone, and each message log, or dispatch log of some ``hours``, that is shorter than its
    checkpoint says; None: of all hours.
    """
    yield from missing_files(disk, directory)
    for path, missing in _short(disk, directory, hours).items():
        # A cut file stays cut; one that retention removed at this moment is not counted any more.
        if _short(disk, directory, hours).get(path) == missing:
            size, length = missing
            what = f"the checkpoint says that {length - size} more bytes are there"
            yield DamagedData(path, size + FILE_HEADER_BYTES, what)


def published_ends(disk: Disk, directory: Directory) -> dict[str, int]:
    """How many bytes of groups the checkpoint counts in the last segment of each log that it names, by path."""
    published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    ends: dict[str, int] = {}
    for log, name in PUBLISHED_OFFSETS[directory.role].items():
        offset, names = published.get(name, 0), log_names(disk, f"{directory.path}/{log}")
        if names and isinstance(offset, int):
            ends[f"{directory.path}/{log}/{names[-1]}"] = offset - int(names[-1].removesuffix(".log"))
    return ends


def log_names(disk: Disk, folder: str) -> list[str]:
    """The names of the log files in a folder, rising."""
    return [name for name in disk.list_folder(folder) if name.endswith(".log")]


def _short(disk: Disk, directory: Directory, hours: Container[int] | None) -> dict[str, tuple[int, int]]:
    """Files that are shorter than the checkpoint counts, by path: their bytes of groups, and the counted ones."""
    if directory.role is Role.DELAY:
        known = _ends(take_snapshot(disk, directory, tail=False))
        ends = {dispatch_path(directory.path, hour): known[hour] for hour in known if hours is None or hour in hours}
    else:
        ends = published_ends(disk, directory)
    found: dict[str, tuple[int, int]] = {}
    for path, end in ends.items():
        try:
            size = file_size(disk, path)
        except LogMoved:
            continue
        if size < end:
            found[path] = size, end
    return found


def _ends(snapshot: ScheduleSnapshot) -> dict[int, int]:
    hours = snapshot.hours
    return {hour: end for hour, end in snapshot.outcome_ends.items() if not (hour in hours and hours[hour].removed)}


def _missing_segments(disk: Disk, directory: Directory) -> Iterator[DamagedData]:
    """Logs that lack the segment with what the checkpoint counts, or an earlier segment that should be kept."""
    logs = PUBLISHED_OFFSETS[directory.role]
    before = {log: log_names(disk, f"{directory.path}/{log}") for log in logs}
    try:
        published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    except DataError:
        return
    keep_from = published.get("keep_from")
    for log, name in logs.items():
        # The names were listed before the checkpoint was read, so the checkpoint knows of each segment that was removed
        # by then.
        offset, folder, names = published.get(name, 0), f"{directory.path}/{log}", before[log]
        if not isinstance(offset, int) or not offset:
            continue
        first = int(names[0].removesuffix(".log")) if names else None
        if first is None or first > offset:
            what = f"the segment with offset {offset} is gone, up to which its checkpoint counts"
            yield DamagedData(folder, 0, what)
        elif log == "message" and isinstance(keep_from, int) and first > keep_from:
            what = f"the log begins at offset {first}, and its server has removed nothing from {keep_from} on"
            yield DamagedData(f"{folder}/{segment_name(first)}", 0, what)


def _counted(disk: Disk, directory: Directory) -> dict[str, str]:
    try:
        snapshot = take_snapshot(disk, directory)
    except DataError:
        return {}
    counted: dict[str, str] = {}
    for hour, each in snapshot.hours.items():
        if each.length and not each.removed:
            counted[schedule_path(directory.path, hour)] = f"{each.rows:,} messages in it"
        if each.sealed and not each.removed:
            counted[dispatch_path(directory.path, hour)] = f"the outcomes of {each.rows:,} messages in it"
    for hour, length in _ends(snapshot).items():
        if length:
            counted.setdefault(dispatch_path(directory.path, hour), f"{length:,} bytes in it")
    if snapshot.word.seals or any(each.sealed for each in snapshot.hours.values()):
        counted[f"{directory.path}/seal/{segment_name(0)}"] = "sealed hours"
    return counted


def _read_word(published: Payload) -> CheckpointWord:
    count, digest = (0, b"") if published["seals"] is None else _as(list, published["seals"])
    links = [_as(list, link) for link in _as(list, published["links"])]
    return CheckpointWord(
        next_sequence=_as(int, published["next_sequence"]),
        replay_crc32c=_as(int, published["replay_crc32c"]),
        skipped=_pairs(published["skipped"]),
        dropped=dict(_pairs(published["dropped"])),
        keep_from=_as(int, published["keep_from"]),
        beside=filed_hours(_as(bytes, published["beside"])),
        seals=_as(int, count),
        seals_sha256=_as(bytes, digest),
        settled_ms=_as(int, published["settled_ms"]),
        waits=str(published["waits"]),
        links=tuple(
            LinkWord(_as(int, log_id), _as(int, settled_ms), str(waits)) for log_id, settled_ms, waits in links
        ),
        epoch=_as(int, published["epoch"]),
    )


def _pairs(value: Value) -> tuple[tuple[int, int], ...]:
    pairs = [_as(list, pair) for pair in _as(list, value)]
    return tuple((_as(int, first), _as(int, second)) for first, second in pairs)


def _as(kind: type[V], value: Value) -> V:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
