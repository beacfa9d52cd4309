"""State file: reads the file of an LMDB environment page by page, without LMDB (docs/formats/checkpoint.md, LMDB).

LMDB has no checksums: a wrong page number leads it to a SIGBUS, and an impossible page to an abort. So its file is
walked before LMDB opens it. `delayd log verify` reads a file this way that it must not open (rule L6). Nothing is
changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from delayd.errors import DamagedData, NewerFormat

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
