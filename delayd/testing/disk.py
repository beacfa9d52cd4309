"""A disk in memory that loses power, fails syncs and fills up where a test says so.

Invariant: every operation that changes the disk is counted, and the same calls give the same counts, so a workload of n
operations can be replayed n times, dying at each. Reads are not counted: dying at a read leaves the same disk as dying
at the next change. Not for two threads at a time. ``before_each`` is called before each operation and each read, so
that a test can do something else there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from delayd.errors import DirectoryInUse, DiskFull, SyncFailed
from delayd.machine.disk import Buffer, SyncLatch
from delayd.testing.tree import DataChange, Folder, Inode, PendingCut, PowerLoss, Write

CAPACITY_BYTES = 1 << 40
READ_FAILED = "this read failed"
PATHS_KEPT = 1_024  # Paths are looked up more often than anything else; a run has some hundreds of them.


class Crash(BaseException):
    """The simulated machine lost power. Not an `Exception`, so that no code under test survives it."""


@dataclass(slots=True)
class Misread:
    """One read whose data has a flipped bit, though the disk's own data is right, and all other reads are."""

    reads: int  # Which of the next reads it is, counted from 1.
    bit: int  # Modulo the bits that are read.


@dataclass(slots=True)
class Faults:
    """The faults, by count from 1; None: never. May be changed at any time."""

    crash_at: int | None = None  # The number of an operation: its effect is in the page cache only, then `Crash`.
    crash_on: str | None = None  # The same at the first operation whose description contains this.
    fail_sync_at: int | None = None  # The number of a sync: SyncFailed, and the dirty data never becomes durable.
    # The number of a sync that is reported as done and not done, so that a test must notice.
    skip_sync_at: int | None = None
    fail_write_at: int | None = None  # The number of a write: half is written, then OSError (EIO).
    fail_reads: dict[str, int] = field(default_factory=dict)  # By part of a path: how many reads of it raise OSError.
    misreads: dict[str, Misread] = field(default_factory=dict)  # By part of a path: one read of it that is wrong.


class MemoryDisk:
    """A whole disk, which has only a root at first; paths are absolute."""

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        reports_sync_errors: bool = True,
    ) -> None:
        self.faults = faults or Faults()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.operations: list[str] = []  # The counted operations, to be read when a replay fails.
        self.syncs = 0
        self.writes = 0
        self.closed_unsynced: list[str] = []  # Files closed while dirty, against rule L4.
        self.crashed = False
        self.before_each: Callable[[], None] = _nothing  # Fakes that use this disk call it, too.
        self._reports_sync_errors = reports_sync_errors
        self.latch = SyncLatch()  # As the real disk has one.
        self._root = Folder()
        self._locks: dict[str, str] = {}
        self._durable_folders: set[str] = set()

    def after_crash(self, way: PowerLoss = PowerLoss.ALL_LOST, seed: int = 0) -> MemoryDisk:
        """The disk that the next start finds, without faults; this one stays as it is, for other ways."""
        disk = MemoryDisk(capacity_bytes=self.capacity_bytes, reports_sync_errors=self._reports_sync_errors)
        disk._root = self._root.after_power_loss(way, Random(seed))
        disk.used_bytes = _size_of(disk._root)
        return disk

    def after_kill(self) -> MemoryDisk:
        """The disk that the next process finds after a SIGKILL: all is there, and no more of it is durable."""
        disk = MemoryDisk(capacity_bytes=self.capacity_bytes, reports_sync_errors=self._reports_sync_errors)
        disk._root = deepcopy(self._root)
        disk.used_bytes = self.used_bytes
        return disk

    def copied(self) -> MemoryDisk:
        """A new disk with a copy of everything that programs see, durable there: a backup, or a restored disk."""
        disk = MemoryDisk(capacity_bytes=self.capacity_bytes, reports_sync_errors=self._reports_sync_errors)
        disk._root = self._root.copied()
        disk.used_bytes = self.used_bytes
        return disk

    @property
    def last_operation(self) -> str:
        """The operation that was counted last; "" at first."""
        return self.operations[-1] if self.operations else ""

    @property
    def reports_sync_errors(self) -> bool:
        """As it was made."""
        return self._reports_sync_errors

    def open(self, path: str, *, write: bool = False, create: bool = False) -> MemoryFile:
        """Creating counts as one operation."""
        self.before_each()
        self.check_alive()
        folder, name = self._parent(path)
        node = folder.cached.get(name)
        if create:
            if node is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            node = Inode()
            folder.change((name, node))
            self.count(f"create {path}")
        if node is None:
            raise _missing(path)
        if isinstance(node, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return MemoryFile(self, path, node, write or create)

    def make_folder(self, path: str, *, durable: bool = True) -> None:
        """As the real one: each new folder, then its parent's sync if it is to be durable."""
        path = _normal(path)
        if path in self._durable_folders and self.exists(path):
            return
        if path != "/":
            parent = os.path.dirname(path)
            if not self.exists(path):
                self.make_folder(parent, durable=durable)
                folder, name = self._parent(path)
                folder.change((name, Folder()))
                self.count(f"make_folder {path}")
            elif isinstance(self._find(path), Inode):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if durable:
                self.sync_folder(parent)
        if durable:
            self._durable_folders.add(path)

    def sync_folder(self, path: str) -> None:
        """One sync."""
        self.before_each()
        self.check_alive()
        folder = self._folder(path)
        self.latch.check(path)
        if self.count_sync(f"sync_folder {path}", path, folder):
            folder.sync()

    def list_folder(self, path: str) -> list[str]:
        """Sorted names."""
        self.before_each()
        self.check_alive()
        return sorted(self._folder(path).cached) if self.exists(path) else []

    def exists(self, path: str) -> bool:
        """As running programs see it."""
        self.before_each()
        self.check_alive()
        try:
            return self._find(path) is not None
        except (FileNotFoundError, NotADirectoryError):
            return False

    def file_id(self, path: str) -> int | None:
        """The number of the inode under a name."""
        self.before_each()
        self.check_alive()
        try:
            node = self._find(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return node.number if isinstance(node, Inode) else None

    def rename(self, source: str, target: str) -> None:
        """One step within a folder; from one to another each folder needs its own sync."""
        self.before_each()
        self.check_alive()
        source_folder, source_name = self._parent(source)
        target_folder, target_name = self._parent(target)
        node = source_folder.cached.get(source_name)
        if node is None:
            raise _missing(source)
        replaced = target_folder.cached.get(target_name)
        if isinstance(replaced, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        if node is replaced:
            return
        if source_folder is target_folder:
            source_folder.change((source_name, None), (target_name, node))
        else:
            source_folder.change((source_name, None))
            target_folder.change((target_name, node))
        self.used_bytes -= len(replaced.cached) if replaced else 0
        self.count(f"rename {source} {target}")

    def remove(self, path: str) -> None:
        """A file or an empty folder."""
        self.before_each()
        self.check_alive()
        folder, name = self._parent(path)
        node = folder.cached.get(name)
        if node is None:
            raise _missing(path)
        if isinstance(node, Folder):
            if node.cached:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        else:
            self.used_bytes -= len(node.cached)
        folder.change((name, None))
        self.count(f"remove {path}")

    def free_bytes(self, path: str) -> int:
        """The rest of the capacity."""
        self.before_each()
        self.check_alive()
        if not self.exists(path):
            raise _missing(path)
        return max(0, self.capacity_bytes - self.used_bytes)

    def sync_filesystem(self, path: str) -> None:
        """One sync of everything."""
        self.before_each()
        self.check_alive()
        if not self.exists(path):
            raise _missing(path)
        self.latch.check(path)
        try:
            if self.count_sync(f"sync_filesystem {path}", path, None):
                self._root.sync_all()
        except SyncFailed:
            self._root.fail_sync_all()
            raise

    def lock(self, path: str, role: str = "delayd") -> MemoryLock:
        """Held until released or until the crash; nothing is written into the file."""
        self.check_alive()
        path = _normal(path)
        if path in self._locks:
            raise DirectoryInUse(os.path.dirname(path), self._locks[path])
        if not self.exists(path):
            self.open(path, create=True).close()
        self._locks[path] = f"pid {os.getpid()} {role}"
        return MemoryLock(self._locks, path)

    def close(self) -> None:
        """Nothing is held."""

    # For the files of this disk and for other fakes that take part in its crashes.

    def check_alive(self) -> None:
        """Raise `Crash` in whatever goes on after it, such as a ``finally``."""
        if self.crashed:
            raise Crash(self.last_operation)

    def count(self, operation: str) -> None:
        """Count one operation whose effect is in the page cache, and crash if this is the one."""
        self.operations.append(operation)
        named = self.faults.crash_on is not None and self.faults.crash_on in operation
        if named or len(self.operations) == self.faults.crash_at:
            self.crashed = True
            raise Crash(f"operation {len(self.operations)}: {operation}")

    def count_sync(self, operation: str, path: str, node: Inode | Folder | None) -> bool:
        """Count one sync of ``node`` before it takes effect; whether it shall take effect."""
        self.count(operation)
        self.syncs += 1
        if self.syncs == self.faults.fail_sync_at:
            if node is not None:
                node.fail_sync()
            raise self.latch.failed(path, OSError(errno.EIO, os.strerror(errno.EIO), path))
        return self.syncs != self.faults.skip_sync_at

    def change(self, path: str, inode: Inode, change: DataChange) -> None:
        """Change a file as far as there is space."""
        self.check_alive()
        size = len(inode.cached)
        error: Exception | None = None
        if isinstance(change, Write):
            self.writes += 1
            end = max(size, change.position) + max(0, self.capacity_bytes - self.used_bytes)
            if change.position + len(change.data) > end:
                change = Write(change.position, change.data[: max(0, end - change.position)])
                error = DiskFull(path)
            if self.writes == self.faults.fail_write_at:
                change = Write(change.position, change.data[: len(change.data) // 2])
                error = OSError(errno.EIO, os.strerror(errno.EIO), path)
        if isinstance(change, PendingCut) or change.data:
            inode.change(change)
        self.used_bytes += len(inode.cached) - size
        self.count(_describe(path, change))
        if error is not None:
            raise error

    def check_read(self, path: str) -> None:
        """Raise OSError (EIO) if this read is one of those that fail."""
        reads = self.faults.fail_reads
        for part in [part for part in reads if part in path]:
            reads[part] -= 1
            if not reads[part]:
                del reads[part]
            raise OSError(errno.EIO, READ_FAILED, path)

    def misread(self, path: str, data: bytes) -> bytes:
        """The data that a read returns, with a flipped bit if a fault asks for it."""
        for part, which in list(self.faults.misreads.items()):
            if data and part in path:
                which.reads -= 1
                if not which.reads:
                    del self.faults.misreads[part]
                    changed = bytearray(data)
                    changed[which.bit // 8 % len(data)] ^= 1 << which.bit % 8
                    return bytes(changed)
        return data

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, name = _split(path)
        return self._folder(folder), name

    def _folder(self, path: str) -> Folder:
        node = self._find(path)
        if node is None:
            raise _missing(path)
        if isinstance(node, Inode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def _find(self, path: str) -> Inode | Folder | None:
        node: Inode | Folder | None = self._root
        for name in _names(path):
            if isinstance(node, Inode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if node is None:
                raise _missing(path)
            node = node.cached.get(name)
        return node


class MemoryFile:
    """An open file of a `MemoryDisk`; it outlives its name."""

    def __init__(self, disk: MemoryDisk, path: str, inode: Inode, writable: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._writable = writable
        self._closed = False

    def pread(self, size: int, position: int) -> bytes:
        """Short only at the end of the file."""
        self._check(writing=False)
        self._disk.check_read(self._path)
        data = bytes(self._inode.cached[position : position + size])
        return self._disk.misread(self._path, data) if self._disk.faults.misreads else data

    def pread_into(self, buffer: memoryview, position: int) -> int:
        """Short only at the end of the file."""
        data = self.pread(len(buffer), position)
        buffer[: len(data)] = data
        return len(data)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """One operation, whatever the number of buffers."""
        self._check(writing=True)
        data = b"".join(memoryview(buffer).tobytes() for buffer in buffers)
        if data:
            self._disk.change(self._path, self._inode, Write(position, data))

    def sync(self) -> None:
        """One sync; the file's name is not part of it."""
        self._check(writing=False)
        self._disk.latch.check(self._path)
        takes_effect = self._disk.count_sync(f"sync {self._path}", self._path, self._inode)
        if self._inode.loss_untold:
            self._inode.loss_untold = False
            raise self._disk.latch.failed(self._path, OSError(errno.EIO, os.strerror(errno.EIO), self._path))
        if takes_effect:
            self._inode.sync()

    def truncate(self, size: int) -> None:
        """One operation."""
        self._check(writing=True)
        self._disk.change(self._path, self._inode, PendingCut(size))

    def size(self) -> int:
        """As running programs see it."""
        self._check(writing=False)
        return len(self._inode.cached)

    def keep_open(self, kept: bool) -> None:
        """A file in memory takes no descriptor."""

    def real(self) -> None:
        """It is none of the operating system's."""

    def close(self) -> None:
        """Noted when it could write and the file is dirty."""
        if not self._closed and self._writable and self._inode.pending:
            self._disk.closed_unsynced.append(self._path)
        self._closed = True

    def _check(self, *, writing: bool) -> None:
        self._disk.before_each()
        self._disk.check_alive()
        if self._closed or (writing and not self._writable):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._path)


class MemoryLock:
    """A lock of a `MemoryDisk`."""

    def __init__(self, locks: dict[str, str], path: str) -> None:
        self._locks = locks
        self._path = path
        self._held = True

    def release(self) -> None:
        """Only the first call counts: the next holder's lock is not this one's."""
        if self._held:
            self._held = False
            del self._locks[self._path]


def _nothing() -> None:
    """Nothing else happens."""


@lru_cache(PATHS_KEPT)
def _normal(path: str) -> str:
    return os.path.normpath(os.path.join("/", path))


@lru_cache(PATHS_KEPT)
def _split(path: str) -> tuple[str, str]:
    return os.path.split(_normal(path))


@lru_cache(PATHS_KEPT)
def _names(path: str) -> tuple[str, ...]:
    return tuple(name for name in _normal(path).split("/") if name)


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _size_of(node: Inode | Folder) -> int:
    if isinstance(node, Inode):
        return len(node.cached)
    return sum(_size_of(child) for child in node.cached.values())


def _describe(path: str, change: DataChange) -> str:
    if isinstance(change, PendingCut):
        return f"truncate {path} to {change.size}"
    return f"write {path} at {change.position}, {len(change.data)} bytes"
