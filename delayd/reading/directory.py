"""Directory: finds the servers' directories in a data directory, from names and file headers.

Invariant: nothing is locked, created or changed, and LMDB is never opened, so a live directory, a stopped one and a
copy are read in the same way (rule L6).
"""

import os
import re
from dataclasses import dataclass
from enum import StrEnum

from delayd.disk import Disk, open_named
from delayd.errors import BadArgument, DamagedData
from delayd.holder import LOCK, is_held
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_checkpoint
from delayd.log.segment import FILE_HEADER_BYTES, FILE_MAGIC, FileKind, Segment, UnfinishedFile, open_segment

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
        """Where the segments of its message log are."""
        return f"{self.path}/message"


def find_directories(disk: Disk, data: str) -> list[Directory]:
    """Find the delay and realtime directories in ``data``, or ``data`` itself when it is one; by path.

    A directory whose server has not begun its message log is left out.

    Raises:
        BadArgument: there is none.
        DamagedData, NewerFormat: a message log is not what it should be.
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

    Raises:
        UnfinishedFile: its creation did not finish.
        DamagedData, NewerFormat: it can't be read.
    """
    file = open_named(disk, path)
    try:
        header = file.pread(FILE_HEADER_BYTES, 0)
    finally:
        file.close()
    kind = int.from_bytes(header[KIND_POSITION : KIND_POSITION + 2], "little")
    # An unknown kind is left to the header's own checks, which report what is wrong with it.
    return open_segment(disk, path, FileKind(kind) if kind in set(FileKind) else FileKind.MESSAGE, None, write=False)


def need_log_file(disk: Disk, path: str) -> None:
    """Refuse a file that never was a log file, so that it is not reported as damaged.

    Raises:
        BadArgument: neither its name nor its first bytes are those of a log file.
    """
    name = path.rpartition("/")[2]
    if LOG_NAME.fullmatch(name):
        return
    what = OTHER_FILES.get(name)
    if what is None:
        file = open_named(disk, path)
        try:
            if file.pread(len(FILE_MAGIC), 0) == FILE_MAGIC:
                return
        finally:
            file.close()
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
    """Whether a checkpoint counts anything in the message log of a directory."""
    published = read_checkpoint(disk, path) or {}
    return any(published.get(name) for name in ("replay_offset", "indexed_offset"))


def server_runs(path: str) -> bool:
    """Whether a server has a directory open at this moment."""
    try:
        return is_held(os.stat(f"{path}/{LOCK}"))
    except (FileNotFoundError, NotADirectoryError):
        return False
