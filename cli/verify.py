"""Checks one file of a data directory: its header, every group, every batch, and the chain between them.

Invariant: nothing is changed or locked, and a file that a running server writes or removes meanwhile is no damage.
"""

import sys
from dataclasses import dataclass
from enum import Enum

from delayd.batch import BatchKind
from delayd.disk import Disk
from delayd.errors import BadArgument, BatchMalformed, DamagedData, NewerFormat
from delayd.hours import hour_from_name
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_checkpoint
from delayd.log.consume import ENTRY_BYTES
from delayd.log.dispatch import decode_outcomes
from delayd.log.group import Group
from delayd.log.schedule import decode_hours
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, Segment, UnfinishedFile
from delayd.reading.directory import open_any
from delayd.reading.groups import TornTail, read_groups

_ROLES = ("delay", "realtime")
_SEGMENTED = (FileKind.MESSAGE, FileKind.REALTIME, FileKind.PULL)  # Only the last file of such a log may be torn.
_LOGS = ("message", "schedule", "dispatch", "consume", "pull")


class State(Enum):
    """What a check found."""

    OK = "ok"
    EMPTY = "empty"  # Nothing was written to it yet.
    TORN = "torn"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Checked:
    """One file; ``counts`` are its groups, batches, rows and bytes."""

    path: str
    kind: str
    state: State
    counts: tuple[int, int, int, int]
    detail: str = ""


def files_below(disk: Disk, data: str) -> list[str]:
    """Every log file and checkpoint of a data directory, or of one server's directory.

    Raises:
        BadArgument: there is none.
    """
    data = data.rstrip("/") or "/"
    names = disk.list_folder(data)
    own = any(log in names for log in _LOGS)
    folders = [data] if own else [f"{data}/{name}" for name in names if name.startswith(_ROLES)]
    files: list[str] = []
    for folder in folders:
        if disk.exists(f"{folder}/{CHECKPOINT}"):
            files.append(f"{folder}/{CHECKPOINT}")
        for log in _LOGS:
            for name in disk.list_folder(f"{folder}/{log}"):
                path = f"{folder}/{log}/{name}"
                inner = [path] if name.endswith(".log") else [f"{path}/{each}" for each in disk.list_folder(path)]
                files += [each for each in inner if each.endswith(".log")]
    if not files:
        raise BadArgument(f"{data} holds no log of delayd; give the directory that `delayd up --data` was given")
    return files


def verify(disk: Disk, path: str) -> Checked | None:
    """Check one file; None when its server has removed it meanwhile."""
    if path.rpartition("/")[2] == CHECKPOINT:
        return _verify_checkpoint(disk, path)
    try:
        segment = open_any(disk, path)
    except FileNotFoundError:
        return None
    except UnfinishedFile:
        return Checked(path, "unknown", State.TORN, (0, 0, 0, 0), "its creation did not finish")
    except (DamagedData, NewerFormat) as error:
        return Checked(path, "unknown", State.DAMAGED, (0, 0, 0, 0), error.message)
    kind = FileKind(segment.header.kind)
    try:
        return _verify_entries(segment) if kind is FileKind.CONSUME else _verify_groups(disk, segment, kind)
    finally:
        segment.close()


def _verify_groups(disk: Disk, segment: Segment, kind: FileKind) -> Checked:
    groups = batches = rows = 0
    torn: list[TornTail] = []
    path, header = segment.path, segment.header
    filed = _filed_bytes(disk, path) if kind is FileKind.SCHEDULE else 0
    last = kind not in _SEGMENTED or _is_last(disk, path)
    scan = read_groups(
        *(segment, header.base_offset, sys.maxsize, torn),
        previous_crc32c=header.previous_crc32c,
        durable=filed,
        last=last,
    )
    size = segment.file.size()
    end = header.base_offset
    try:
        for group in scan:
            groups += 1
            batches += group.header.batch_count
            rows += _verify_batches(segment, group)
            end = group.end
        if end < filed:
            raise DamagedData(
                path, segment.position(end), f"the checkpoint says that {filed - end} more bytes are there"
            )
    except DamagedData as error:
        return Checked(path, kind.name.lower(), State.DAMAGED, (groups, batches, rows, size), error.message)
    counts = (groups, batches, rows, size)
    if torn:
        return Checked(path, kind.name.lower(), State.TORN, counts, torn_text(torn[0]))
    return Checked(path, kind.name.lower(), State.OK, counts)


def torn_text(torn: TornTail) -> str:
    """What an unfinished end is, in a sentence."""
    return (
        f"{torn.path} ends with {torn.size_bytes:,} bytes that are no whole group, from byte {torn.position} "
        f"({torn.reason}); the server takes them off at its next start"
    )


def _verify_batches(segment: Segment, group: Group) -> int:
    rows = 0
    try:
        for _, batch in group.batches():
            # The group's checksum covers it; its own, made by the producer, covers the way there.
            batch.verified = False
            batch.verify()
            if batch.kind is BatchKind.OUTCOME:
                decode_outcomes([batch])
            rows += batch.count
    except BatchMalformed as error:
        raise DamagedData(segment.path, segment.position(group.header.offset), error.message) from error
    return rows


def _verify_entries(segment: Segment) -> Checked:
    size = segment.file.size()
    entries, rest = divmod(size - FILE_HEADER_BYTES, ENTRY_BYTES)
    if rest:
        detail = f"{segment.path} ends within an entry; the server cuts it at its next checkpoint"
        return Checked(segment.path, "consume", State.TORN, (0, 0, entries, size), detail)
    return Checked(segment.path, "consume", State.OK, (0, 0, entries, size))


def _verify_checkpoint(disk: Disk, path: str) -> Checked:
    try:
        found = read_checkpoint(disk, path.rpartition("/")[0])
    except (DamagedData, NewerFormat) as error:
        return Checked(path, "checkpoint", State.DAMAGED, (0, 0, 0, 0), error.message)
    if found is None:
        return Checked(path, "checkpoint", State.EMPTY, (0, 0, 0, 0), "no checkpoint was published yet")
    file = disk.open(path)
    try:
        return Checked(path, "checkpoint", State.OK, (0, 0, 0, file.size()))
    finally:
        file.close()


def _filed_bytes(disk: Disk, path: str) -> int:
    """How much of a schedule log its server's checkpoint counts; 0 for a file outside of a directory."""
    folder, _, name = path.rpartition("/")
    home = folder.rpartition("/")[0].rpartition("/")[0]
    if not disk.exists(f"{home}/{CHECKPOINT}"):
        return 0
    table = (read_checkpoint(disk, home) or {}).get("hours", b"")
    rows = decode_hours(table if isinstance(table, bytes) else b"")
    found = rows["length"][rows["hour"] == hour_from_name(name.removesuffix(".log"))]
    return int(found[0]) if len(found) else 0


def _is_last(disk: Disk, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return not any(other > name for other in disk.list_folder(folder or ".") if other.endswith(".log"))
