"""State: small durable key-value state of one server: registry, routes, checkpoint rows, group progress.

Invariant: a commit is one transaction: either it is durable when it returns (LMDB's default sync), or nothing of it is
stored. Each value is stored with a checksum over its key and itself, and a value that does not check is never returned
(rule L9).

LMDB has no checksums: a wrong page number leads it to a SIGBUS, and an impossible page to an abort. So its file is
walked, page by page, before LMDB opens it (docs/formats/checkpoint.md, LMDB). `delayd log verify` reads a file this way
that it must not open (rule L6). Nothing is changed by that.

`OperatorLog` has the decisions of operators at a server. An entry is in the same transaction as its effect, so neither
exists without the other. The oldest entries are removed when there are more than ENTRIES_MAX.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import lmdb
import msgpack
from crc32c import crc32c

from delayd.errors import (
    DamagedData,
    DamagedValue,
    DataError,
    DirectoryInUse,
    DiskFull,
    NewerFormat,
    NotWritable,
    Shortage,
    SyncFailed,
    read_error,
)
from delayd.machine.disk import RealDisk
from delayd.machine.operating import Wait, WaitKind

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


LMDB_MAGIC = 0xBEEFC0DE
LMDB_VERSION_MAX = 1
PAGE_HEADER = struct.Struct("<QHHHH")  # Page number, zero, flags, and where the free room of the page begins and ends.
META = struct.Struct("<IIQQ48s48sQQ")  # Magic, version, address, map size, two trees, last page, transaction.
TREE = struct.Struct("<IHHQQQQQ")  # Page size or zero, flags, depth, pages of three kinds, entries, root.
NODE = struct.Struct("<HHHH")  # Data bytes or page number in two halves, flags or the number's top, key bytes.
NUMBER = struct.Struct("<Q")
FIRST_BYTES = PAGE_HEADER.size + META.size
NO_PAGE = (1 << 64) - 1
BRANCH, LEAF, OVERFLOW, PAGE_KIND = 1, 2, 4, 0x0F
BIG_DATA = 1  # Flag of a node whose data lie in pages of their own.
PAGE_BYTES = range(512, 65_537)
DEPTH_MAX = 32  # LMDB's own limit of a cursor's stack.

Read = Callable[[int, int], bytes]
"""``read(size, position)``: bytes of the file, fewer at its end."""


class Pair(NamedTuple):
    """A key and its stored bytes, and the byte of the file where the entry begins."""

    key: bytes
    stored: bytes
    position: int


class _Meta(NamedTuple):
    page_bytes: int
    free_depth: int
    free_root: int
    depth: int
    root: int
    entries: int
    last_page: int
    transaction: int


def read_pairs(path: str, read: Read, size_bytes: int) -> list[Pair]:
    """Read all pairs of the last transaction, by rising key; every page that LMDB could reach is checked.

    Raises:
        DamagedData: a page is missing or wrong; ``path`` is named with the byte.
        NewerFormat: it was written by a newer LMDB.
    """
    meta = _newest_meta(path, read, size_bytes)
    walk = _Walk(path, read, size_bytes, meta.page_bytes, meta.last_page)
    pairs = list(walk.pairs(meta.root, meta.depth))
    if len(pairs) != meta.entries:
        raise DamagedData(path, 0, f"it has {len(pairs)} entries, and {meta.entries} are counted")
    for (key, _, _), (following, _, position) in pairwise(pairs):
        if key >= following:
            raise DamagedData(path, position, "its key does not rise")
    live = set(walk.seen)
    for _, stored, position in list(walk.pairs(meta.free_root, meta.free_depth)):
        free = [number for (number,) in NUMBER.iter_unpack(stored[: len(stored) & ~7])]
        # The next transaction overwrites free pages.
        if not free or free[0] != len(free) - 1 or not live.isdisjoint(free[1:]) or max(free) > meta.last_page:
            raise DamagedData(path, position, "a page that is in use is called free")
    return pairs


class _Walk:
    """One reading of the trees of a file; each page may be reached once only."""

    def __init__(self, path: str, read: Read, size_bytes: int, page_bytes: int, last_page: int) -> None:
        self.seen: set[int] = set()
        self._path = path
        self._read = read
        self._size_bytes = size_bytes
        self._page_bytes = page_bytes
        self._last_page = last_page

    def pairs(self, root: int, depth: int) -> Iterator[Pair]:
        """Yield the entries of a tree in its order."""
        if root == NO_PAGE:
            return
        if not 0 < depth <= DEPTH_MAX:
            raise DamagedData(self._path, 0, f"a tree {depth} pages deep")
        yield from self._below(root, depth)

    def _below(self, number: int, depth: int) -> Iterator[Pair]:
        page = self._page(number)
        position = number * self._page_bytes
        _, _, flags, lower, upper = PAGE_HEADER.unpack_from(page)
        wanted = LEAF if depth == 1 else BRANCH
        if flags & PAGE_KIND != wanted or not PAGE_HEADER.size <= lower <= upper <= len(page) or lower & 1:
            raise DamagedData(self._path, position, "the page is not of the kind that belongs there")
        count = (lower - PAGE_HEADER.size) // 2
        if not count or (wanted == BRANCH and count == 1):
            raise DamagedData(self._path, position, f"a page of {count} entries")
        for at in struct.unpack_from(f"<{count}H", page, PAGE_HEADER.size):
            if not upper <= at <= len(page) - NODE.size:
                raise DamagedData(self._path, position, f"an entry at byte {at} of the page")
            low, high, node_flags, key_bytes = NODE.unpack_from(page, at)
            key_at, data_at = at + NODE.size, at + NODE.size + key_bytes
            if data_at > len(page):
                raise DamagedData(self._path, position + at, f"a key of {key_bytes} bytes")
            if wanted == BRANCH:
                yield from self._below(low | high << 16 | node_flags << 32, depth - 1)
                continue
            size = low | high << 16
            key = page[key_at:data_at]
            if node_flags == BIG_DATA and data_at + NUMBER.size <= len(page):
                yield Pair(key, self._big(NUMBER.unpack_from(page, data_at)[0], size), position + at)
            elif node_flags == 0 and data_at + size <= len(page):
                yield Pair(key, page[data_at : data_at + size], position + at)
            else:
                raise DamagedData(self._path, position + at, f"a value of {size} bytes")

    def _big(self, number: int, size: int) -> bytes:
        first = self._page(number)
        pages = (PAGE_HEADER.size + size + self._page_bytes - 1) // self._page_bytes
        _, _, flags, low, high = PAGE_HEADER.unpack_from(first)
        position = number * self._page_bytes
        if flags & PAGE_KIND != OVERFLOW or low | high << 16 < pages or number + pages - 1 > self._last_page:
            raise DamagedData(self._path, position, f"no {pages} pages of one value")
        self._meet(range(number + 1, number + pages))
        data = self._read(size, position + PAGE_HEADER.size)
        if len(data) != size:
            raise DamagedData(self._path, position, f"the file ends {size - len(data)} bytes early")
        return data

    def _page(self, number: int) -> bytes:
        position = number * self._page_bytes
        # The first two pages are not tree pages: they say where the trees begin.
        if not 1 < number <= self._last_page or position + self._page_bytes > self._size_bytes:
            raise DamagedData(self._path, min(position, self._size_bytes), f"page {number} is not there")
        self._meet((number,))
        page = self._read(self._page_bytes, position)
        if len(page) != self._page_bytes or PAGE_HEADER.unpack_from(page)[0] != number:
            raise DamagedData(self._path, position, f"page {number} is not there")
        return page

    def _meet(self, numbers: range | tuple[int, ...]) -> None:
        for number in numbers:
            if number in self.seen:
                raise DamagedData(self._path, number * self._page_bytes, f"page {number} is named twice")
            self.seen.add(number)


def _newest_meta(path: str, read: Read, size_bytes: int) -> _Meta:
    first = read(FIRST_BYTES, 0)
    meta = _read_meta(path, first, 0)
    other = _read_meta(path, read(FIRST_BYTES, meta.page_bytes), meta.page_bytes)
    if other.page_bytes != meta.page_bytes or abs(other.transaction - meta.transaction) > 1:
        raise DamagedData(path, 0, "its first two pages do not follow each other")
    return max(meta, other, key=lambda each: each.transaction)


def _read_meta(path: str, data: bytes, position: int) -> _Meta:
    if len(data) < FIRST_BYTES:
        raise DamagedData(path, position, f"the file ends {FIRST_BYTES - len(data)} bytes early")
    magic, version, _, _, free, main, last_page, transaction = META.unpack_from(data, PAGE_HEADER.size)
    if magic != LMDB_MAGIC:
        raise DamagedData(path, position, "it is no file of LMDB")
    if version > LMDB_VERSION_MAX:
        raise NewerFormat(path, version, LMDB_VERSION_MAX)
    page_bytes, _, free_depth, _, _, _, _, free_root = TREE.unpack(free)
    _, _, depth, _, _, _, entries, root = TREE.unpack(main)
    if page_bytes not in PAGE_BYTES or page_bytes & (page_bytes - 1):
        raise DamagedData(path, position, f"pages of {page_bytes} bytes")
    return _Meta(page_bytes, free_depth, free_root, depth, root, entries, last_page, transaction)


PREFIX = b"operator/"  # `<u64 number>` {at_ms, what}: what operators have decided, the last 1,000.
ENTRIES_MAX = 1_000


class Pairs(NamedTuple):
    """The puts and removes of a transaction."""

    puts: list[tuple[bytes, bytes]]
    removes: list[bytes]


class OperatorLog:
    """Numbers the entries of one server."""

    def __init__(self, state: State) -> None:
        self._last = max((int.from_bytes(key[len(PREFIX) :], "big") for key, _ in state.scan(PREFIX, [])), default=0)

    def entry(self, at_ms: int, what: str) -> Pairs:
        """Note a decision; it counts when the transaction that has these pairs is durable."""
        self._last += 1
        log.warning("operator what=%r", what)
        oldest = self._last - ENTRIES_MAX
        return Pairs(
            [(_key(self._last), msgpack.packb({"at_ms": at_ms, "what": what}))], [_key(oldest)] if oldest > 0 else []
        )


def _key(number: int) -> bytes:
    return PREFIX + number.to_bytes(8, "big")
