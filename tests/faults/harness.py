"""Fault harness: count the reads of a run, then fail each of them once in each way; and damage each file in each way.

Invariant: what it tries is exhaustive over the reads of a run, which are the same each time: the fakes draw from seeds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from unittest.mock import patch

from delayd.testing.disk import MemoryDisk, MemoryFile
from delayd.testing.state import MemoryState
from tests.memory_files import content, put


class ReadFault(Enum):
    """How a read fails."""

    EIO = errno.EIO
    EACCES = errno.EACCES
    ENOMEM = errno.ENOMEM
    SHORT = -1  # Half of the bytes.
    FLIP = -2  # One bit is turned over.


class FileFault(Enum):
    """A fault of a file."""

    MISSING = "missing"
    EMPTY = "empty"
    HALF = "cut in half"
    SHORT = "8 bytes short"
    FLIP = "a bit turned over"
    OTHER = "of another log"
    SWAPPED = "swapped with its neighbour"


@dataclass(slots=True)
class Reads:
    """The reads of a run: their paths, in order; the one of number ``at`` fails as ``fault`` says."""

    paths: list[str]
    at: int = -1
    fault: ReadFault = ReadFault.EIO
    active: bool = True

    def path(self) -> str:
        """The path of the read that failed; empty when the run did not come to it."""
        return self.paths[self.at] if 0 <= self.at < len(self.paths) else ""


@contextmanager
def watched(reads: Reads) -> Iterator[None]:
    """Count every read of a memory disk, and fail one."""
    whole = MemoryFile.pread

    def pread(self: MemoryFile, size: int, position: int) -> bytes:
        data = whole(self, size, position)
        if not reads.active or not data:
            return data
        reads.paths.append(self._path)
        if len(reads.paths) - 1 != reads.at:
            return data
        return _failed(self._path, data, reads.fault)

    with patch.object(MemoryFile, "pread", pread):
        yield


def _failed(path: str, data: bytes, fault: ReadFault) -> bytes:
    if fault is ReadFault.SHORT:
        return data[: len(data) // 2]
    if fault is ReadFault.FLIP:
        at = 2 * len(data) // 3
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
    raise OSError(fault.value, os.strerror(fault.value), path)


def files_of(disk: MemoryDisk, folder: str) -> list[str]:
    """All files below a folder, sorted."""
    found: list[str] = []
    for name in disk.list_folder(folder):
        path = f"{folder}/{name}"
        try:
            found += files_of(disk, path)
        except NotADirectoryError:
            found.append(path)
    return sorted(found)


def damage(disk: MemoryDisk, path: str, fault: FileFault) -> Callable[[], None] | None:
    """Damage a file durably, without its server's knowledge: what restores it; None when that can't be done to it."""
    whole = content(disk, path)
    neighbour = ""
    if fault is FileFault.MISSING:
        disk.remove(path)
    elif fault is FileFault.SWAPPED:
        folder, name = path.rsplit("/", 1)
        others = [other for other in disk.list_folder(folder) if other > name and other.endswith(".log")]
        if not others or not name.endswith(".log"):
            return None
        neighbour = f"{folder}/{others[0]}"
        other = content(disk, neighbour)
        put(disk, path, other)
        put(disk, neighbour, whole)
    else:
        put(disk, path, _damaged(whole, fault))
    disk.sync_filesystem("/")

    def restore() -> None:
        if fault is FileFault.FLIP:
            # Bytes that a server appended behind the flipped bit stay.
            put(disk, path, _damaged(content(disk, path), fault, len(whole)))
            return
        if neighbour:
            put(disk, neighbour, other)
        put(disk, path, whole)
        disk.sync_filesystem("/")

    return restore


def _damaged(whole: bytes, fault: FileFault, size: int = 0) -> bytes:
    if fault is FileFault.EMPTY:
        return b""
    if fault is FileFault.HALF:
        return whole[: len(whole) // 2]
    if fault is FileFault.SHORT:
        return whole[:-8]
    if fault is FileFault.FLIP:
        at = (size or len(whole)) // 3
        return whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
    # The log_id of the header is another one; its checksum does not know.
    return whole[:16] + bytes([whole[16] ^ 1]) + whole[17:]


def flip_value(state: MemoryState, key: bytes) -> Callable[[], None]:
    """Turn a bit of a stored value over: what turns it back."""
    stored = state._pairs[key]
    state.flip(key, 8 * (len(stored) // 2) + 1)

    def restore() -> None:
        state._pairs[key] = stored

    return restore
