"""What is wrong with the files of one simulated server, and how it is put right again.

Invariant: readers outside see the files as they were written, whatever the server itself sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from delayd.hours import NAME_DIGITS, hour_from_name
from delayd.testing.disk import MemoryDisk, Misread
from delayd.testing.tree import Inode

LOGS_OF_HOURS = ("/schedule/", "/dispatch/")


class Damage(Protocol):
    """Something that is wrong with a file."""

    path: str

    def mend(self, disk: MemoryDisk) -> bool:
        """Put it back as it was; False when there is nothing to put back any more."""

    def again(self, disk: MemoryDisk) -> None:
        """Damage what has just been mended."""


class Damages:
    """All damage of one server, over its lives."""

    def __init__(self) -> None:
        self._found: list[Damage] = []
        self._hidden: set[int] = set()  # Hours whose logs could not be read as they were written.

    def add(self, damage: Damage) -> None:
        """Note damage that has been done."""
        self._found.append(damage)
        self._hidden |= _hours_of([damage.path])

    def fail_reads(self, disk: MemoryDisk, part: str, reads: int) -> None:
        """Have so many reads fail of files that have a part in their paths."""
        disk.faults.fail_reads[part] = reads
        self._note_failing(disk)

    def misread(self, disk: MemoryDisk, part: str, which: Misread) -> None:
        """Have one read go wrong of files that have a part in their paths."""
        disk.faults.misreads[part] = which
        self._note_failing(disk)

    def hidden_hours(self, disk: MemoryDisk) -> frozenset[int]:
        """All hours so far whose logs could not be read as they were written; a server may learn late that they can."""
        self._note_failing(disk)
        return frozenset(self._hidden)

    def any(self, disk: MemoryDisk) -> bool:
        """Whether anything is damaged now."""
        return bool(self._found or disk.faults.fail_reads or disk.faults.misreads)

    def mend(self, disk: MemoryDisk) -> None:
        """Put all files back as they were; no read fails any more."""
        self._note_failing(disk)
        disk.faults.fail_reads.clear()
        disk.faults.misreads.clear()
        while self._found:
            self._found.pop().mend(disk)

    @contextmanager
    def as_written(self, disk: MemoryDisk) -> Iterator[None]:
        """Have the files as they were written, for a reader outside."""
        failing, disk.faults.fail_reads = disk.faults.fail_reads, {}
        misread, disk.faults.misreads = disk.faults.misreads, {}
        mended = [damage for damage in reversed(self._found) if damage.mend(disk)]
        try:
            yield
        finally:
            for damage in reversed(mended):
                damage.again(disk)
            disk.faults.fail_reads, disk.faults.misreads = failing, misread

    def _note_failing(self, disk: MemoryDisk) -> None:
        parts = [part for part in (*disk.faults.fail_reads, *disk.faults.misreads) if part in LOGS_OF_HOURS]
        if parts:
            self._hidden |= _hours_of(path for path in files_of(disk) if any(part in path for part in parts))


def _hours_of(paths: Iterable[str]) -> set[int]:
    """The hours of those paths that are logs of hours."""
    own = [path for path in paths if any(part in path for part in LOGS_OF_HOURS)]
    return {hour_from_name(path.rpartition("/")[2][:NAME_DIGITS]) for path in own}


def _always() -> bool:
    return True


class Flipped:
    """A bit of a file that reads as the other one."""

    def __init__(self, disk: MemoryDisk, path: str, position: int, mask: int) -> None:
        self.path = path
        self._position = position
        self._mask = mask
        self._written = bytes(_found(disk, path).cached)
        self.again(disk)

    def mend(self, disk: MemoryDisk) -> bool:
        """Not in a file that was written anew."""
        node = file_of(disk, self.path)
        if node is None or self._position >= len(node.cached):
            return False
        node.cached[self._position] ^= self._mask
        # It may have been cut behind this place since, and grown again.
        if node.cached[: self._position + 1] != self._written[: self._position + 1]:
            node.cached[self._position] ^= self._mask
            return False
        if self._position < len(node.durable):
            node.durable[self._position] ^= self._mask
        return True

    def again(self, disk: MemoryDisk) -> None:
        """See `Damage`."""
        node = _found(disk, self.path)
        node.cached[self._position] ^= self._mask
        if self._position < len(node.durable):
            node.durable[self._position] ^= self._mask


class Gone:
    """A file without its name."""

    def __init__(self, disk: MemoryDisk, path: str, *, wanted: Callable[[], bool] = _always) -> None:
        self.path = path
        self._wanted = wanted  # Whether the server still needs it: nobody restores what retention removed meanwhile.
        self._node = self._open = _found(disk, path)  # Whoever has it open goes on writing to it.
        self.again(disk)

    def mend(self, disk: MemoryDisk) -> bool:
        """Not where another file has taken its place, and not what nobody needs any more."""
        if file_of(disk, self.path) is not None or not self._wanted():
            return False
        folder, name = disk._parent(self.path)
        # A copy, as an operator restores one: what was not durable at a crash is in it.
        written = max(self._node.cached, self._open.cached, key=len)
        self._node = Inode(cached=bytearray(written), durable=bytearray(written))
        folder.cached[name] = folder.durable[name] = self._node
        disk.used_bytes += len(self._node.cached)
        return True

    def again(self, disk: MemoryDisk) -> None:
        """Files that are open stay open."""
        folder, name = disk._parent(self.path)
        del folder.cached[name]
        folder.durable.pop(name, None)
        disk.used_bytes -= len(self._node.cached)


def files_of(disk: MemoryDisk, folder: str = "/data") -> list[str]:
    """Paths of all files below a folder."""
    found: list[str] = []
    for name in disk.list_folder(folder):
        path = f"{folder}/{name}"
        found.extend([path] if file_of(disk, path) is not None else files_of(disk, path))
    return found


def file_of(disk: MemoryDisk, path: str) -> Inode | None:
    """A file by its path; None when there is none."""
    node = disk._find(path) if disk.exists(path) else None
    return node if isinstance(node, Inode) else None


def _found(disk: MemoryDisk, path: str) -> Inode:
    node = file_of(disk, path)
    assert node is not None, f"{path} is there"
    return node
