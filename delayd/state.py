"""Small durable key-value state of one server: registry, routes, checkpoint rows, group progress.

Invariant: a commit is one transaction that is durable when it returns (LMDB's default sync), or nothing of it is there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

import lmdb

from delayd.disk import RealDisk
from delayd.errors import DamagedData, DirectoryInUse, DiskFull, NewerFormat, NotWritable, SyncFailed

MAP_BYTES = 1 << 40  # Address space only: the file is as long as what it holds.
KEY_BYTES_MAX = 511  # LMDB's own limit.
LMDB_FILE = "data.mdb"
LMDB_META = struct.Struct("<16xII")  # Magic and version, after the header of the first page.
LMDB_MAGIC = 0xBEEFC0DE
LMDB_VERSION_MAX = 1
READERS_MAX = 16  # The loop and its worker; each thread that reads takes one for good.


class State(Protocol):
    """Keys of 1 to 511 bytes, any values. Reads see every commit that has returned."""

    def get(self, key: bytes) -> bytes | None:
        """Value of a key, or None."""

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Pairs whose key begins with ``prefix``, in key order; an empty prefix means all."""

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        """Remove, then put, in one durable transaction; a missing key may be removed. Blocks for an fsync.

        ``puts`` is taken once, a pair at a time.
        """

    def close(self) -> None:
        """End the use of the files; a second close does nothing."""


class LmdbState:
    """One LMDB environment in a folder of its own, for one process."""

    def __init__(self, path: str) -> None:
        self._path = path
        disk = RealDisk()
        disk.make_folder(path)
        self._environment = _open(path)
        # The environment's own files are new entries of this folder (rule L4).
        disk.sync_folder(path)
        disk.close()

    def get(self, key: bytes) -> bytes | None:
        """About 1 us."""
        check_key(key)
        try:
            with self._environment.begin() as transaction:
                return transaction.get(key)
        except lmdb.Error as error:
            raise _damaged(self._path, error) from error

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """One cursor over the range."""
        found: list[tuple[bytes, bytes]] = []
        try:
            with self._environment.begin() as transaction, transaction.cursor() as cursor:
                if not (cursor.set_range(prefix) if prefix else cursor.first()):
                    return found
                for key, value in cursor:
                    if not key.startswith(prefix):
                        break
                    found.append((key, value))
        except lmdb.Error as error:
            raise _damaged(self._path, error) from error
        return found

    def commit(self, puts: Iterable[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        """About 5 us a put; past 1,000 puts, off the loop."""
        try:
            with self._environment.begin(write=True) as transaction:
                for key in removes:
                    check_key(key)
                    transaction.delete(key)
                for key, value in puts:
                    check_key(key)
                    transaction.put(key, value)
        except lmdb.DiskError as error:
            raise DiskFull(self._path) from error
        except lmdb.Error as error:
            raise SyncFailed(self._path, str(error)) from error

    def close(self) -> None:
        """See the port."""
        self._environment.close()


def check_key(key: bytes) -> None:
    """Refuse a key that LMDB can't hold; nothing of its commit is done then."""
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")


def _open(path: str) -> lmdb.Environment:
    try:
        return lmdb.open(path, map_size=MAP_BYTES, max_readers=READERS_MAX)
    except PermissionError as error:
        raise NotWritable(path, os.strerror(error.errno or 0)) from error
    except lmdb.Error as error:
        if "already open in this process" in str(error):
            raise DirectoryInUse(path, f"pid {os.getpid()} (this process)") from error
        version = _version_of(path)
        if version is not None and version > LMDB_VERSION_MAX:
            raise NewerFormat(os.path.join(path, LMDB_FILE), version, LMDB_VERSION_MAX) from error
        raise _damaged(path, error) from error


def _damaged(path: str, error: lmdb.Error) -> DamagedData:
    return DamagedData(os.path.join(path, LMDB_FILE), 0, str(error))


def _version_of(path: str) -> int | None:
    with open(os.path.join(path, LMDB_FILE), "rb") as file:
        first_page = file.read(LMDB_META.size)
    if len(first_page) < LMDB_META.size:
        return None
    magic, version = LMDB_META.unpack(first_page)
    return int(version) if magic == LMDB_MAGIC else None
