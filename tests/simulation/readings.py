"""Readings of logs as an independent reader does them, again and again while they grow.

Invariant: what is told of a file is what its bytes say now. Only groups whose bytes are the same as at the last
reading are not decoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from delayd.errors import DamagedData
from delayd.log.group import CommitGroup
from delayd.log.segment import FileKind, UnfinishedFile, open_segment
from delayd.testing.disk import MemoryDisk

T = TypeVar("T")


class _Read(NamedTuple):
    """One file as it was read: its bytes, and where and why the reading ended."""

    data: bytes
    offset: int
    position: int
    crc32c: int | None
    reason: str


class Readings(Generic[T]):
    """Files of one kind by path, over all lives of their server; ``decode`` turns a group into items."""

    def __init__(self, kind: FileKind, log_id: int, decode: Callable[[CommitGroup], list[T]]) -> None:
        self._kind = kind
        self._log_id = log_id
        self._decode = decode
        self._known: dict[str, _Read] = {}
        self._items: dict[str, list[T]] = {}

    def of(self, disk: MemoryDisk, path: str, *, torn: bool = False) -> list[T]:
        """What a file says, which is not to be changed; ``torn``: its end may be, for its server is down or writes."""
        file = disk.open(path)
        data = file.pread(file.size(), 0)
        file.close()
        known = self._known.get(path)
        if known is None or known.data != data:
            known = self._read(disk, path, data, known)
            if known is None:
                self._known.pop(path, None)
                return []
            self._known[path] = known
        if known.reason and not torn:
            raise DamagedData(path, known.position, known.reason)
        return self._items[path]

    def _read(self, disk: MemoryDisk, path: str, data: bytes, known: _Read | None) -> _Read | None:
        try:
            segment = open_segment(disk, path, self._kind, self._log_id, write=False)
        except UnfinishedFile:
            return None
        offset, crc32c, items = segment.base_offset, segment.header.previous_crc32c, list[T]()
        if known is not None and data[: known.position] == known.data[: known.position]:
            offset, items = known.offset, self._items[path]
            crc32c = crc32c if known.crc32c is None else known.crc32c
        scan = segment.scan(offset, crc32c)
        for group in scan:
            items.extend(self._decode(group))
        self._items[path] = items
        segment.close()
        return _Read(data, scan.offset, segment.position(scan.offset), scan.crc32c, scan.reason)
