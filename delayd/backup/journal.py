"""Journal: the file ``backup.unfinished``, a line for each file that is copied whole and durably.

Invariant: a line is written after its file is durable. A line that does not check says nothing, and its file is copied
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from crc32c import crc32c

from delayd.disk import Disk, open_named

from .manifest import UNFINISHED, Entry


class Journal:
    """The journal of one folder; it is made if it is not there."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._path = f"{folder}/{UNFINISHED}"
        self.lines: dict[str, Entry] = {}
        self.begun = disk.exists(self._path)  # Whether an earlier call began it.
        self._file = disk.open(self._path, write=True, create=not self.begun)
        if self.begun:
            data = self._file.pread(self._file.size(), 0)
            self.lines = {line.path: line for line in map(_decode, data.splitlines()) if line is not None}
        else:
            disk.sync_folder(folder)
        self._end = self._file.size()

    def add(self, lines: Iterable[Entry]) -> None:
        """Note files that are durable; the notes themselves are durable on return."""
        data = b"\n" + b"".join(_encode(line) for line in lines)
        self._file.pwritev([data], self._end)
        self._file.sync()
        self._end += len(data)

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def remove(self) -> None:
        """The work is done."""
        self._file.close()
        self._disk.remove(self._path)
        self._disk.sync_folder(self._folder)


def read_journal(disk: Disk, folder: str) -> int | None:
    """How many files an unfinished backup has; None when none is under way."""
    path = f"{folder}/{UNFINISHED}"
    if not disk.exists(path):
        return None
    file = open_named(disk, path)
    try:
        return sum(_decode(line) is not None for line in file.pread(file.size(), 0).splitlines())
    finally:
        file.close()


def _encode(entry: Entry) -> bytes:
    text = json.dumps([entry.path, entry.size_bytes, entry.crc32c, entry.source]).encode()
    return text + f" {crc32c(text):08x}\n".encode()


def _decode(data: bytes) -> Entry | None:
    text, _, check = data.rpartition(b" ")
    if not text or check != f"{crc32c(text):08x}".encode():
        return None
    return Entry(*json.loads(text))
