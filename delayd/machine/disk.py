"""Disk: the disk as the logs use it: reads and writes at positions, and a sync for each kind of thing that must last.

Invariant: nothing counts as durable until a sync of it has returned, and a folder's entries need a sync of their own
(rule L4). A failed sync is never tried again: the kernel has dropped the dirty pages (SyncFailed, the server stops).
From then on no other sync of this disk counts either: if one thread's sync of a folder fails, the kernel may drop
another thread's new entry there, and that thread's own sync of the folder would report success.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from delayd.errors import (
    DirectoryInUse,
    DiskFull,
    NotWritable,
    SyncFailed,
    read_error,
)
from delayd.machine.lane import write_all
from delayd.machine.open_files import OpenFile, OpenFiles

Buffer = bytes | bytearray | memoryview

SYNCFS_REPORTS_SINCE = (5, 8)  # Before this kernel version syncfs returned success even if writes had failed.
FILE_MODE = 0o644
LOCK_BYTES_MAX = 200
NOTHING_TO_SYNC = (errno.EINVAL, errno.EROFS, errno.ENOTSUP)  # A file system that can't sync holds no unwritten bytes.

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)


class File(Protocol):
    """One open file. Not for two threads at a time, except that reads may overlap anything.

    The disk may have closed its descriptor for other files. Then each call opens it anew, and raises Shortage, or
    DamagedData when its name leads to no file or to another one; nothing was written then.
    """

    def pread(self, size: int, position: int) -> bytes:
        """Read ``size`` bytes at ``position``; short only at the end of the file."""

    def pread_into(self, buffer: memoryview, position: int) -> int:
        """Read into all of ``buffer``, without new memory; return the bytes read, fewer only at the end of the file."""

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write all buffers one after the other at ``position``; DiskFull or OSError may leave a part written."""

    def sync(self) -> None:
        """Make data and length durable; SyncFailed, after which the server must stop."""

    def truncate(self, size: int) -> None:
        """Cut or extend with zeros; not durable before `sync`."""

    def size(self) -> int:
        """Length now, in bytes."""

    def keep_open(self, kept: bool) -> None:
        """Keep the descriptor, so that a removed file can still be read, or let it go while other files are used."""

    def real(self) -> RealFile | None:
        """The operating system's file that this is, for a `Lane`; None for any other."""

    def close(self) -> None:
        """Give the descriptor back; a second close does nothing. Sync first (rule L4)."""


class Lock(Protocol):
    """A held directory lock; it also ends with the process."""

    def release(self) -> None:
        """Let another server have the directory; a second release does nothing."""


class Disk(Protocol):
    """Files and folders by path. A missing file raises FileNotFoundError, an existing one FileExistsError."""

    @property
    def reports_sync_errors(self) -> bool:
        """Whether `sync_filesystem` raises for lost writes; if not, sync each file and folder instead."""

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        """Open an existing file, or ``create`` one that must not exist yet, for reading and writing."""

    def make_folder(self, path: str, *, durable: bool = True) -> None:
        """Make a folder with its parents, each of them durable on return (rule L4); existing ones are fine.

        Who calls `sync_filesystem` afterwards need not have it ``durable`` now: that makes folders durable, too.
        """

    def sync_folder(self, path: str) -> None:
        """Make a folder's entries durable: files created, renamed and removed in it; SyncFailed."""

    def list_folder(self, path: str) -> list[str]:
        """Names in a folder, sorted; none when there is no such folder."""

    def exists(self, path: str) -> bool:
        """Whether a file or folder is there."""

    def file_id(self, path: str) -> int | None:
        """A number that tells the file under a name from one that replaces it later; None when there is no file."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing ``target`` at once; durable after `sync_folder`."""

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder; durable after `sync_folder` of its parent."""

    def free_bytes(self, path: str) -> int:
        """Bytes that this user may still write on the file system of an existing path."""

    def sync_filesystem(self, path: str) -> None:
        """Make everything durable on the file system of an existing path, folders too; SyncFailed."""

    def lock(self, path: str, role: str = "delayd") -> Lock:
        """Hold the lock file ``path`` for this process; DirectoryInUse names who has it."""


class NamedReads:
    """A file whose failed reads raise errors with file, position and the system's reason (rule L10)."""

    __slots__ = ("_file", "_path")

    def __init__(self, path: str, file: File) -> None:
        self._path = path
        self._file = file

    def pread(self, size: int, position: int) -> bytes:
        """See File; Unreadable or Shortage instead of an OSError."""
        try:
            return self._file.pread(size, position)
        except OSError as error:
            raise self._named(error, position) from error

    def pread_into(self, buffer: memoryview, position: int) -> int:
        """See File; errors as of `pread`."""
        try:
            return self._file.pread_into(buffer, position)
        except OSError as error:
            raise self._named(error, position) from error

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """See File."""
        self._file.pwritev(buffers, position)

    def sync(self) -> None:
        """See File."""
        self._file.sync()

    def truncate(self, size: int) -> None:
        """See File."""
        self._file.truncate(size)

    def size(self) -> int:
        """See File; errors as of `pread`."""
        try:
            return self._file.size()
        except OSError as error:
            raise self._named(error, 0) from error

    def keep_open(self, kept: bool) -> None:
        """See File."""
        self._file.keep_open(kept)

    def real(self) -> RealFile | None:
        """See File."""
        return self._file.real()

    def close(self) -> None:
        """See File."""
        self._file.close()

    def _named(self, error: OSError, position: int) -> Exception:
        # A closed descriptor is a bug of ours, and means nothing for the file.
        return error if error.errno == errno.EBADF else read_error(self._path, position, error)


def open_named(disk: Disk, path: str, *, write: bool = False, create: bool = False) -> NamedReads:
    """Open a file whose reads raise named errors; Unreadable or Shortage when it exists and can't be opened."""
    try:
        return NamedReads(path, disk.open(path, write=write, create=create))
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise read_error(path, 0, error) from error


def list_named(disk: Disk, path: str) -> list[str]:
    """Names in a folder, sorted; Unreadable or Shortage when it exists and can't be listed."""
    try:
        return disk.list_folder(path)
    except OSError as error:
        raise read_error(path, 0, error) from error


def create_whole(path: str, data: bytes, mode: int) -> None:
    """Make a file of the operating system with all of its content; both are durable on return.

    At no moment has ``path`` a part of it, and no other process that makes this file loses what it wrote: the second
    one gets FileExistsError. A crash may leave a file with ``path`` and more characters as its name.

    Raises:
        FileExistsError: ``path`` is there already.
        DiskFull, NotWritable: nothing was made.
    """
    with _named_errors(path):
        _create_whole(path, data, mode)


def replace_whole(path: str, data: bytes, mode: int) -> None:
    """Put a file of the operating system in the place of another one, or where none is; durable on return.

    At each moment ``path`` is the former file or this one. Raises DiskFull or NotWritable when it is the former.
    """
    with _named_errors(path):
        temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
        _create_whole(temporary, data, mode)
        os.rename(temporary, path)
        _sync_folder_of(path)


def _create_whole(path: str, data: bytes, mode: int) -> None:
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(descriptor, mode)  # Set explicitly, because the umask may differ.
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(temporary, path)  # A rename would replace the file of a process that was faster.
    finally:
        os.unlink(temporary)
    _sync_folder_of(path)


def _sync_folder_of(path: str) -> None:
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class SyncLatch:
    """Remembers the first sync that failed: no later sync counts (rule L1)."""

    __slots__ = ("_failed", "folders")

    def __init__(self) -> None:
        self.folders = (
            threading.Lock()
        )  # Held while a folder is synced: if two syncs overlap, one may take the error of both.
        self._failed = ""

    def check(self, path: str) -> None:
        """Raise SyncFailed once a sync has failed."""
        if self._failed:
            raise SyncFailed(path, f"a sync of {self._failed} failed before")

    def failed(self, path: str, error: OSError) -> SyncFailed:
        """The error to raise for a sync that failed just now."""
        if error.errno not in NOTHING_TO_SYNC:
            self._failed = self._failed or path
        return SyncFailed(path, os.strerror(error.errno or 0))


class RealDisk:
    """The operating system's files.

    The first `make_folder`, `lock` or writing `open` on a file system opens the descriptor that `sync_filesystem`
    needs: syncfs reports only errors of writes made after its descriptor was opened.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._reports = _kernel_version() >= SYNCFS_REPORTS_SINCE and hasattr(self._libc, "syncfs")
        self._watches: dict[int, int] = {}  # Device number to a descriptor on that file system.
        self._durable_folders: set[str] = set()
        self._latch = SyncLatch()
        self._files = OpenFiles()
        # Folders with a watch; a checkpoint opens thousands of files in few folders.
        self._watched_folders: set[str] = set()
        self._finalizer = weakref.finalize(self, _close_all, self._watches)

    @property
    def reports_sync_errors(self) -> bool:
        """False before Linux 5.8."""
        return self._reports

    def open(self, path: str, *, write: bool = False, create: bool = False) -> File:
        """Open close-on-exec; Shortage without a descriptor, NotWritable when this user may not write."""
        flags = os.O_CLOEXEC | (os.O_RDWR if write or create else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        if write or create:
            with _named_errors(path):
                folder = path.rpartition("/")[0] or "."
                if folder not in self._watched_folders:
                    self._watch(folder)
                    self._watched_folders.add(folder)
                return RealFile(self._files, self._files.open(path, flags, FILE_MODE), self._latch)
        return RealFile(self._files, self._files.open(path, flags, FILE_MODE), self._latch)

    def make_folder(self, path: str, *, durable: bool = True) -> None:
        """Cost: nothing for a folder that this object has made durable before, otherwise one sync for each new
        level.
        """
        path = os.path.abspath(path)
        if path in self._durable_folders and os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        with _named_errors(path):
            if not os.path.isdir(path):
                self.make_folder(parent, durable=durable)
                _make_one_folder(path)
                if durable:
                    self.sync_folder(parent)
            elif durable and os.access(parent, os.W_OK):
                # A process that died between its mkdir and its sync may have left a folder whose entry does not last.
                self.sync_folder(parent)
            self._watch(path)
        if durable:
            self._durable_folders.add(path)

    def sync_folder(self, path: str) -> None:
        """Sync the folder's own descriptor; Shortage when none can be had, and then nothing was synced."""
        descriptor = self._files.descriptor(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with self._latch.folders:
                self._latch.check(path)
                try:
                    os.fsync(descriptor)
                except OSError as error:
                    raise self._latch.failed(path, error) from error
        finally:
            os.close(descriptor)

    def list_folder(self, path: str) -> list[str]:
        """Sorted, because the system's order is arbitrary."""
        try:
            return sorted(self._files.with_room(path, partial(os.listdir, path)))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            # Below a file there is no folder either; but a file in the place of a folder is an error.
            if self.exists(path):
                raise
            return []

    def exists(self, path: str) -> bool:
        """True also for files that this user may not read."""
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def file_id(self, path: str) -> int | None:
        """Device and inode: no other file gets this inode while a descriptor of the file is open."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev << 64 | found.st_ino

    def rename(self, source: str, target: str) -> None:
        """One atomic step, within a file system."""
        with _named_errors(target):
            os.replace(source, target)

    def remove(self, path: str) -> None:
        """Unlink, or rmdir."""
        with _named_errors(path):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.rmdir(path)
            else:
                os.unlink(path)

    def free_bytes(self, path: str) -> int:
        """The space that is left for users other than root."""
        state = os.statvfs(path)
        return state.f_bavail * state.f_frsize

    def sync_filesystem(self, path: str) -> None:
        """One syncfs, whatever the number of files."""
        self._latch.check(path)
        if self._libc.syncfs(self._watch(path)) != 0:
            number = ctypes.get_errno()
            raise self._latch.failed(path, OSError(number, os.strerror(number), path))

    def lock(self, path: str, role: str = "delayd") -> Lock:
        """Flock on a close-on-exec descriptor, so that no child process keeps the lock."""
        with _named_errors(path):
            descriptor = self._files.descriptor(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise NotWritable(path, "it is no file")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lines = os.pread(descriptor, LOCK_BYTES_MAX, 0).decode("utf-8", "replace").splitlines()
                raise DirectoryInUse(os.path.dirname(path), lines[0] if lines else "another process") from error
            line = f"pid {os.getpid()} {role}\n".encode()
            with _named_errors(path):
                # In this order, because on a full disk somebody else would take the space that a cut gives free.
                os.pwrite(descriptor, line, 0)
                os.ftruncate(descriptor, len(line))
            self._watch(os.path.dirname(path) or ".")
        except BaseException:
            os.close(descriptor)
            raise
        return RealLock(descriptor)

    def close(self) -> None:
        """Close the descriptors kept for `sync_filesystem`."""
        self._finalizer()

    def _watch(self, folder: str) -> int:
        device = os.stat(folder).st_dev
        if device not in self._watches:
            self._watches[device] = self._files.descriptor(folder, os.O_RDONLY | os.O_CLOEXEC)
        return self._watches[device]


class RealFile:
    """A file whose descriptor `OpenFiles` may close and open anew between two calls."""

    __slots__ = ("_file", "_files", "_latch", "_path")

    def __init__(self, files: OpenFiles, file: OpenFile, latch: SyncLatch) -> None:
        self._files = files
        self._file = file
        self._path = file.path
        self._latch = latch

    def pread(self, size: int, position: int) -> bytes:
        """Read again after a short read, because the kernel reads at most 2 GB a call."""
        descriptor = self._files.take(self._file)
        try:
            data = os.pread(descriptor, size, position)
            while 0 < len(data) < size and (more := os.pread(descriptor, size - len(data), position + len(data))):
                data += more
            return data
        finally:
            self._files.give(self._file)

    def pread_into(self, buffer: memoryview, position: int) -> int:
        """Read again after a short read, as `pread` does."""
        descriptor = self._files.take(self._file)
        try:
            count = 0
            while count < len(buffer) and (more := os.preadv(descriptor, [buffer[count:]], position + count)):
                count += more
            return count
        finally:
            self._files.give(self._file)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write in calls of at most 1,024 buffers; the GIL is released in each."""
        with _named_errors(self._path):
            descriptor = self._take_for_change()
            try:
                write_all(descriptor, buffers, position)
            finally:
                self._files.give(self._file)

    def sync(self) -> None:
        """Fdatasync; it also makes the length durable."""
        self._latch.check(self._path)
        descriptor = self._files.take(self._file)
        try:
            os.fdatasync(descriptor)
            self._file.unsynced = False
        except OSError as error:
            raise self._latch.failed(self._path, error) from error
        finally:
            self._files.give(self._file)

    def lend(self, *, change: bool) -> int:
        """Lend the descriptor to a `Lane`, until `take_back`, for a ``change``, a sync or both.

        Raises:
            SyncFailed: a sync has failed before.
            DamagedData, Shortage: see `File`.
        """
        self._latch.check(self._path)
        return self._take_for_change() if change else self._files.take(self._file)

    def sync_failed(self, number: int) -> SyncFailed:
        """Let no other sync of this disk count, after one of a loan has failed; any thread. Returns the error of it."""
        return self._latch.failed(self._path, OSError(number, os.strerror(number), self._path))

    def take_back(self, *, synced: bool, number: int = 0) -> None:
        """End a loan: the descriptor was ``synced``, which failed if there is a ``number`` of an error.

        Raises:
            SyncFailed: the sync failed, or another one meanwhile.
        """
        self._files.give(self._file)
        if not synced:
            return
        if number:
            raise self.sync_failed(number)
        self._latch.check(self._path)
        self._file.unsynced = False

    def real(self) -> RealFile | None:
        """See the port."""
        return self

    def truncate(self, size: int) -> None:
        """See the port."""
        with _named_errors(self._path):
            descriptor = self._take_for_change()
            try:
                os.ftruncate(descriptor, size)
            finally:
                self._files.give(self._file)

    def size(self) -> int:
        """See the port."""
        return self._files.size(self._file)

    def keep_open(self, kept: bool) -> None:
        """See the port."""
        self._files.take(self._file)
        self._file.kept = kept
        self._files.give(self._file)

    def close(self) -> None:
        """See the port."""
        self._files.close(self._file)

    def _take_for_change(self) -> int:
        """The descriptor for a change, to be given back; it stays open from now on until a sync (rule L4)."""
        descriptor = self._files.take(self._file)
        self._file.unsynced = True
        return descriptor


class RealLock:
    """The descriptor that holds the flock."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Closing the only descriptor ends the flock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskFull(path, error.errno) from error
        if error.errno in _NO_RIGHT:
            raise NotWritable(path, os.strerror(error.errno)) from error
        raise


def _make_one_folder(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        # Another process made it at the same moment; a file of that name is an error.
        if not os.path.isdir(path):
            raise


def _kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(character for character in minor if character.isdigit()) or 0)


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
