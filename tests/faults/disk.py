"""A disk in memory one of whose reads goes wrong, once: refused by the system, short, or with a flipped bit.

Invariant: reads are counted by themselves, so the same workload meets the same numbers, and the bytes on the disk stay
as they are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import Enum

from delayd.machine.disk import Buffer, File
from delayd.testing.disk import MemoryDisk


class How(Enum):
    """The way in which a read fails."""

    EIO = "EIO"
    EACCES = "EACCES"
    ENOMEM = "ENOMEM"
    EMFILE = "EMFILE"
    SHORT = "short"
    FLIP = "flip"


class ReadFaultDisk(MemoryDisk):
    """Counts reads, and opens for reading, by path; the one with the number ``fail_at``, from 1, goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.fail_at: int | None = None
        self.how = How.EIO
        self.failed = ""  # The path of the read that went wrong.

    @classmethod
    def of(cls, disk: MemoryDisk) -> ReadFaultDisk:
        """The same files on a disk of this kind; the other one is not to be used any more."""
        made = cls()
        made._root = disk._root
        made.used_bytes = disk.used_bytes
        return made

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:  # type: ignore[override]
        """As a memory disk; an open for reading is one of the reads, which can't be short or flipped."""
        file = super().open(path, write=write, create=create)
        if not create:
            self.count_read(path)
        return _ReadFaultFile(self, path, file)

    def count_read(self, path: str, data: bytes = b"") -> bytes:
        """Count one read; what it returns, or its error, if it is the one that goes wrong."""
        self.reads.append(path)
        if len(self.reads) != self.fail_at:
            return data
        self.failed = path
        if self.how is How.SHORT:
            return data[: len(data) // 2]
        if self.how is How.FLIP:
            at = len(data) // 2
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] if data else data
        number = int(getattr(errno, self.how.name))
        raise OSError(number, os.strerror(number), path)


class _ReadFaultFile:
    """One open file of such a disk."""

    def __init__(self, disk: ReadFaultDisk, path: str, file: File) -> None:
        self._disk = disk
        self._path = path
        self._file = file

    def pread(self, size: int, position: int) -> bytes:
        return self._disk.count_read(self._path, self._file.pread(size, position))

    def pread_into(self, buffer: memoryview, position: int) -> int:
        data = self._disk.count_read(self._path, self._file.pread(len(buffer), position))
        buffer[: len(data)] = data
        return len(data)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        self._file.pwritev(buffers, position)

    def sync(self) -> None:
        self._file.sync()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)

    def size(self) -> int:
        return self._file.size()

    def keep_open(self, kept: bool) -> None:
        self._file.keep_open(kept)

    def real(self) -> None:
        """Its reads go through this object, and so do its writes."""

    def close(self) -> None:
        self._file.close()
