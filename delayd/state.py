"""State: small durable key-value state of one server: registry, routes, checkpoint rows, group progress.

Invariant: a commit is one transaction: either it is durable when it returns (LMDB's default sync), or nothing of it is
stored. Each value is stored with a checksum over its key and itself, and a value that does not check is never returned
(rule L9).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Protocol

import lmdb
from crc32c import crc32c

from delayd.disk import RealDisk
from delayd.errors import (
    DamagedData,
    DamagedValue,
    DataError,
    DirectoryInUse,
    DiskFull,
    NotWritable,
    Shortage,
    SyncFailed,
    read_error,
)
from delayd.state_file import Pair, read_pairs
from delayd.waits import Wait, WaitKind

MAP_BYTES = 1 << 40  # Address space only: the file is only as long as its contents.
KEY_BYTES_MAX = 511  # LMDB's own limit.
LMDB_FILE = "data.mdb"
CHECKSUM_BYTES = 4
READERS_MAX = 16  # The loop and its worker; each thread that reads takes one slot for good.

log = logging.getLogger(__name__)


class State(Protocol):
    """Keys of 1 to 511 bytes, any values. Reads see every commit that has returned."""

    def get(self, key: bytes) -> bytes | None:
        """Value of a key, or None; DamagedValue when it does not check."""

    def scan(self, prefix: bytes, damaged: list[DamagedValue] | None = None) -> list[tuple[bytes, bytes]]:
        """Pairs whose key begins with ``prefix``, in key order; an empty prefix means all.

        Values that do not check are left out and named in ``damaged``; without it the first one is raised.
        """

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        """Remove, then put, in one durable transaction; a missing key may be removed. Blocks for an fsync.

        ``puts`` is taken once, a pair at a time.
        """

    def waits(self) -> list[Wait]:
        """What waits for an operator because of the state's file: for STATUS."""

    def close(self) -> None:
        """End the use of the files; a second close does nothing."""


class LmdbState:
    """One LMDB environment in a folder of its own, for one process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = os.path.join(path, LMDB_FILE)
        disk = RealDisk()
        disk.make_folder(path)
        self._environment = _open(path)
        # The environment's own files are new entries of this folder (rule L4).
        disk.sync_folder(path)
        disk.close()
        self._inode = _inode_of(self._file)
        self._copied: int | None = None  # The copy that was put in place of a file that was removed.
        self._closed = False
        self.replaced = False  # Whether somebody removed or replaced the file that this process has open.

    def look(self) -> None:
        """Check whether the file is still the one that is open: one system call."""
        self.replaced = self.replaced or _inode_of(self._file) != self._inode

    def waits(self) -> list[Wait]:
        """See the port."""
        if not self.replaced:
            return []
        why = f"{self._file} was removed or replaced under the running server: each commit puts a copy there"
        return [WaitKind.STATE_REPLACED.wait(why)]

    def begin_copy(self) -> StateCopy:
        """Fix what the state holds at this moment, for a copy of it that any thread makes; some microseconds."""
        try:
            return StateCopy(self._file, self._environment, self._environment.begin())
        except lmdb.Error as error:
            raise _damaged(self._file, error) from error

    def get(self, key: bytes) -> bytes | None:
        """About 1 us."""
        check_key(key)
        try:
            with self._environment.begin() as transaction:
                stored = transaction.get(key)
        except lmdb.Error as error:
            raise _damaged(self._file, error) from error
        return None if stored is None else check_stored(self._file, key, stored)

    def scan(self, prefix: bytes, damaged: list[DamagedValue] | None = None) -> list[tuple[bytes, bytes]]:
        """One cursor over the range."""
        found: list[tuple[bytes, bytes]] = []
        try:
            with self._environment.begin() as transaction, transaction.cursor() as cursor:
                if not (cursor.set_range(prefix) if prefix else cursor.first()):
                    return found
                for key, stored in cursor:
                    if not key.startswith(prefix):
                        break
                    found.append((key, stored))
        except lmdb.Error as error:
            raise _damaged(self._file, error) from error
        return check_pairs(self._file, found, damaged)

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        """About 5 us a put; past 1,000 puts, off the loop."""
        try:
            with self._environment.begin(write=True) as transaction:
                for key in removes:
                    check_key(key)
                    transaction.delete(key)
                for key, value in puts:
                    check_key(key)
                    transaction.put(key, with_checksum(key, value))
        except lmdb.DiskError as error:
            raise DiskFull(self._path) from error
        except lmdb.Error as error:
            raise SyncFailed(self._path, str(error)) from error
        self._write_again()

    def close(self) -> None:
        """See the port."""
        if not self._closed:
            self._closed = True
            self._write_again()
            self._environment.close()

    def _write_again(self) -> None:
        """Put a copy in place of a file that was removed or replaced: LMDB goes on with the file that it has open.

        Each commit does this again, because a commit changes only the open file.
        """
        found = _inode_of(self._file)
        if found == self._inode:
            return
        self.replaced = True
        disk, copy = RealDisk(), f"{self._file}.new"
        try:
            if found is not None and found != self._copied:
                disk.rename(self._file, f"{self._file}.replaced")
            with open(copy, "wb") as file:
                self._environment.copyfd(file.fileno())
                os.fsync(file.fileno())
            disk.rename(copy, self._file)
            disk.sync_folder(self._path)
            if self._copied is None:
                log.critical("state_written_again path=%s", self._file)
            self._copied = _inode_of(self._file)
        except (OSError, DataError, lmdb.Error) as error:
            log.critical("state_not_written_again path=%s reason=%r", self._file, str(error))
        finally:
            disk.close()


class StateCopy:
    """What a state held at one moment; it must be closed before the state is."""

    def __init__(self, file: str, environment: lmdb.Environment, transaction: lmdb.Transaction) -> None:
        self._file = file
        self._environment = environment
        self._transaction = transaction

    def write(self, path: str) -> None:
        """Write it as a new LMDB file without free pages; not durable. Blocks as long as the copy takes.

        Raises:
            OSError: the new file can't be written.
            DamagedData: the state can't be read.
        """
        with open(path, "xb") as file:
            try:
                self._environment.copyfd(file.fileno(), compact=True, txn=self._transaction)
            except lmdb.DiskError as error:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            except lmdb.Error as error:
                raise _damaged(self._file, error) from error

    def close(self) -> None:
        """Give the moment up; a second close does nothing."""
        self._transaction.abort()


def check_key(key: bytes) -> None:
    """Refuse a key that LMDB can't hold; nothing of its commit is done then."""
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")


def with_checksum(key: bytes, value: bytes) -> bytes:
    """The stored form of a value: the value, then CRC32C over key and value."""
    return value + crc32c(value, crc32c(key)).to_bytes(CHECKSUM_BYTES, "little")


def check_stored(path: str, key: bytes, stored: bytes, position: int = 0) -> bytes:
    """The value in stored bytes; DamagedValue when it does not check."""
    value = stored[:-CHECKSUM_BYTES]
    if len(stored) < CHECKSUM_BYTES or with_checksum(key, value) != stored:
        raise DamagedValue(path, key, position)
    return value


def check_pairs(
    path: str, pairs: Iterable[tuple[bytes, bytes]], damaged: list[DamagedValue] | None
) -> list[tuple[bytes, bytes]]:
    """Keys and values from stored pairs; see `State.scan` for ``damaged``."""
    found: list[tuple[bytes, bytes]] = []
    for key, stored in pairs:
        try:
            found.append((key, check_stored(path, key, stored)))
        except DamagedValue as damage:
            if damaged is None:
                raise
            damaged.append(damage)
    return found


def read_state_file(path: str) -> list[Pair]:
    """Read the file of a state that no server has open, without LMDB: the stored bytes of each key.

    Raises:
        DamagedData, NewerFormat: LMDB could not read it, or would fault on it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            return read_pairs(path, lambda size, position: os.pread(descriptor, size, position), size)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise read_error(path, 0, error) from error


def _open(path: str) -> lmdb.Environment:
    file = os.path.join(path, LMDB_FILE)
    # LMDB creates an environment if the file is empty or missing.
    if os.path.exists(file) and os.path.getsize(file):
        read_state_file(file)
    try:
        return lmdb.open(path, map_size=MAP_BYTES, max_readers=READERS_MAX)
    except PermissionError as error:
        raise NotWritable(path, os.strerror(error.errno or 0)) from error
    except lmdb.Error as error:
        if "already open in this process" in str(error):
            raise DirectoryInUse(path, f"pid {os.getpid()} (this process)") from error
        raise _damaged(file, error) from error


def _inode_of(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _damaged(file: str, error: lmdb.Error) -> DataError:
    # A limit of this process says nothing about the file.
    if os.strerror(errno.ENOMEM) in str(error):
        return Shortage(file, errno.ENOMEM)
    return DamagedData(file, 0, str(error))
