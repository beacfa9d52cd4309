"""Manifest: the file ``backup.json`` of a backup, which lists what the backup holds (docs/backup.md, format 1).

Invariant: the manifest is written last and removed first, so a folder that has one is a whole backup.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from crc32c import crc32c

from delayd.disk import Disk, open_named
from delayd.errors import BadArgument, DamagedData, NewerFormat

NAME = "backup.json"
FORMAT = 1
_MARK = b"\ncrc32c "


@dataclass(frozen=True, slots=True)
class Entry:
    """One copied file: its path below the folder, its bytes, and CRC32C over them.

    ``source`` is device and inode of the file that it was copied from: a file that takes its place has others.
    """

    path: str
    size_bytes: int
    crc32c: int
    source: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the backup holds of one server. Offsets, sequences and hours are 0 or empty where a role has none."""

    role: str
    log_id: int  # 0 of a server that had no messages yet, and of meta.
    epoch: int  # As the last checkpoint says.
    running: bool  # Whether it was cut while it ran.
    cut_ms: int  # The moment that the files are of.
    offset: int  # Up to where the last checkpoint counts the message log: what a start need not replay.
    end: int  # Where the message log ends.
    next_sequence: int  # Behind the last message that the checkpoint counts.
    hours: int  # How many hours have a schedule log.
    first_hour: str
    last_hour: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole backup."""

    made_at_ms: int
    version: str  # Of delayd.
    at_one_instant: bool  # Whether the servers fit each other, so that nothing is lost or doubled between them.
    servers: tuple[Held, ...]
    damaged: tuple[str, ...]  # Sentences about files that did not check where they were copied from.
    entries: tuple[Entry, ...]
    moment_ms: int = 0  # When all servers of the cluster were cut together; 0 when these were cut alone.

    @property
    def size_bytes(self) -> int:
        """The bytes of all files."""
        return sum(entry.size_bytes for entry in self.entries)


def encode(manifest: Manifest) -> bytes:
    """The bytes of the file: JSON, one file a line, and a last line with CRC32C over all before it."""
    fields = asdict(manifest)
    entries = fields.pop("entries")
    head = json.dumps({"format": FORMAT, **fields, "files": len(entries)})
    text = "\n".join((head, *map(json.dumps, entries))).encode()
    return text + _MARK + f"{crc32c(text):08x}\n".encode()


def decode(path: str, data: bytes) -> Manifest:
    """Read the bytes of the file.

    Raises:
        DamagedData: they do not check.
        NewerFormat: a newer delayd wrote them.
    """
    text, mark, check = data.rpartition(_MARK)
    if not mark or check.strip() != f"{crc32c(text):08x}".encode():
        raise DamagedData(path, 0, "its checksum differs")
    head, *lines = map(json.loads, text.splitlines())
    if head.pop("format") > FORMAT:
        raise NewerFormat(path, FORMAT + 1, FORMAT)
    if head.pop("files") != len(lines):
        raise DamagedData(path, 0, "it lists another number of files than it counts")
    servers = tuple(Held(**each) for each in head.pop("servers"))
    entries = tuple(Entry(**line) for line in lines)
    return Manifest(servers=servers, damaged=tuple(head.pop("damaged")), entries=entries, **head)


def read_manifest(disk: Disk, folder: str) -> Manifest:
    """The manifest of a backup.

    Raises:
        BadArgument: the folder is no backup, or one that is not whole.
        DamagedData, NewerFormat: see `decode`.
    """
    path = f"{folder}/{NAME}"
    if not disk.exists(path):
        if disk.exists(f"{folder}/{UNFINISHED}"):
            raise BadArgument(f"the backup in {folder} was not finished; run `delayd backup {folder}` again")
        raise BadArgument(f"{folder} holds no backup: {NAME} is missing; give the folder that `delayd backup` wrote")
    file = open_named(disk, path)
    try:
        return decode(path, file.pread(file.size(), 0))
    finally:
        file.close()


def write_manifest(disk: Disk, folder: str, manifest: Manifest) -> None:
    """Write it under another name, make it durable, and give it its name; durable on return."""
    new = f"{folder}/{NAME}.new"
    if disk.exists(new):
        disk.remove(new)
    file = disk.open(new, create=True)
    try:
        file.pwritev([encode(manifest)], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(new, f"{folder}/{NAME}")
    disk.sync_folder(folder)


UNFINISHED = "backup.unfinished"  # The journal of a backup or a restore that is under way.
