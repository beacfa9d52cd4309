"""Open files: a bounded number of descriptors serves any number of files.

The file that was not used for the longest time is closed, and opened anew when it is used again. A server may so have a
dispatch log for each hour of two years in use, with some hundred descriptors. Invariant: a descriptor is closed only
while nobody uses it, and never while writes through it are not synced (rule L4).

An example, with two descriptors at most. The files A, B and C are used one after the other:

1. A and B are open. C is opened, so A, which was used longest ago, is closed.
2. B is written to. It stays open until it is synced, whatever else is used.
3. A is used again: it is opened anew, and C is closed. The name of A must still lead to the same file, with the length
   and the time of change that it had: nobody else writes to it.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from delayd.errors import SHORTAGES, DamagedData, Shortage, read_error

OPEN_FILES_MAX = 96  # With those that a checkpoint holds open until its sync, and connections, far below any limit.
OPEN_FILES_MIN = 16
REMOVED = "the file was removed under the running server"
REPLACED = "another file was put in its place under the running server"
UNSYNCED_FILES_MAX = 512  # A syncfs with more unsynced files would hold up group commits.
UNSYNCED_FILES_MIN = 16

R = TypeVar("R")
Seen = tuple[int, int, int, int]
"""Device, inode, length and time of change. A new file may get the inode of a removed one, but no such time."""


class OpenFile:
    """One file in use. `OpenFiles` changes it; its owner sets ``unsynced`` and ``kept``, between `take` and `give`."""

    __slots__ = ("descriptor", "flags", "in_use", "kept", "path", "seen", "unsynced")

    def __init__(self, path: str, flags: int, descriptor: int) -> None:
        self.path = path
        self.flags = flags & ~(os.O_CREAT | os.O_EXCL)  # It exists when it is opened anew.
        self.descriptor = descriptor  # -1 while it is closed.
        self.seen: Seen | None = None  # What the file was when its descriptor was closed for another one.
        self.in_use = 0  # Calls that use the descriptor now.
        self.unsynced = False  # Whether it has writes that are not synced.
        self.kept = False  # Whether its owner wants it open all the time.


class OpenFiles:
    """The descriptors of one disk. Any thread may use it."""

    def __init__(self, most: int | None = None) -> None:
        self._most = open_files_max() if most is None else most
        self._lock = threading.Lock()
        # Files that may be closed; the one that was used longest ago comes first.
        self._idle: OrderedDict[OpenFile, None] = OrderedDict()

    def open(self, path: str, flags: int, mode: int) -> OpenFile:
        """Open a file; an OSError as of the system, Shortage when no descriptor can be had."""
        file = OpenFile(path, flags, self.descriptor(path, flags, mode))
        file.in_use = 1
        self.give(file)
        return file

    def descriptor(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a descriptor that the caller closes; errors as of `open`."""
        return self.with_room(path, partial(os.open, path, flags, mode))

    def with_room(self, path: str, work: Callable[[], R]) -> R:
        """Do what needs a descriptor; where none is left, files that nobody uses now give theirs.

        Raises:
            Shortage: none can be had; nothing was done.
        """
        while True:
            try:
                return work()
            except OSError as error:
                if error.errno not in SHORTAGES:
                    raise
                if error.errno == errno.ENOMEM or not self._close_idle(0):
                    raise Shortage(path, error.errno) from error

    def take(self, file: OpenFile) -> int:
        """The descriptor of a file, which stays open until `give`.

        Raises:
            DamagedData: the file was closed meanwhile, and its name leads to no file or to another one.
            Shortage: no descriptor can be had.
        """
        with self._lock:
            file.in_use += 1
            self._idle.pop(file, None)
            if file.descriptor >= 0 or file.seen is None:
                return file.descriptor  # One that its owner has closed is -1, which the system refuses by name.
        try:
            self._open_anew(file)
        except BaseException:
            self.give(file)
            raise
        return file.descriptor

    def give(self, file: OpenFile) -> None:
        """End one use of a file."""
        with self._lock:
            file.in_use -= 1
            if not (file.in_use or file.unsynced or file.kept) and file.descriptor >= 0:
                self._idle[file] = None
        if len(self._idle) > self._most:
            self._close_idle(self._most)

    def size(self, file: OpenFile) -> int:
        """The length of a file now; a closed one need not be opened for that. Errors as of `take`."""
        with self._lock:
            if file.descriptor >= 0 or file.seen is None:
                return os.fstat(file.descriptor).st_size
            with _named_read_errors(file.path):
                state = os.stat(file.path)
            if _seen(state) != file.seen:
                raise DamagedData(file.path, 0, REPLACED)
            return state.st_size

    def close(self, file: OpenFile) -> None:
        """Close a file for good; a second close does nothing."""
        with self._lock:
            self._idle.pop(file, None)
            file.seen = None
            descriptor, file.descriptor = file.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _close_idle(self, most: int) -> bool:
        """Close the file that was used longest ago, if more than ``most`` may be closed; whether it did."""
        if len(self._idle) <= most:
            return False
        with self._lock:
            if len(self._idle) <= most:
                return False
            file, _ = self._idle.popitem(last=False)
            file.seen = _seen(os.fstat(file.descriptor))
            descriptor, file.descriptor = file.descriptor, -1
        os.close(descriptor)
        return True

    def _open_anew(self, file: OpenFile) -> None:
        # Without the lock: a slow disk holds up only those who use this file.
        with _named_read_errors(file.path):
            descriptor = self.descriptor(file.path, file.flags)
        try:
            with self._lock:
                # Another thread may have been faster, or the owner has closed the file.
                if file.descriptor < 0 and file.seen is not None:
                    if _seen(os.fstat(descriptor)) != file.seen:
                        raise DamagedData(file.path, 0, REPLACED)
                    file.descriptor, descriptor = descriptor, -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)


@contextmanager
def _named_read_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DamagedData(path, 0, REMOVED) from None
    except OSError as error:
        raise read_error(path, 0, error) from error


def _seen(state: os.stat_result) -> Seen:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def open_files_max() -> int:
    """How many idle files stay open: an eighth of this process's limit, at most 96."""
    return min(OPEN_FILES_MAX, max(OPEN_FILES_MIN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))


def unsynced_files_max() -> int:
    """How many files may be held open until one sync: a quarter of this process's limit, at most 512."""
    return min(UNSYNCED_FILES_MAX, max(UNSYNCED_FILES_MIN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
