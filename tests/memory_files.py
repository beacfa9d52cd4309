"""Files of a `MemoryDisk`, read and replaced as an operator does it."""

from __future__ import annotations

from delayd.testing.disk import MemoryDisk


def files(disk: MemoryDisk, folder: str) -> list[str]:
    """Paths of what is in a folder."""
    return [f"{folder}/{name}" for name in disk.list_folder(folder)]


def content(disk: MemoryDisk, path: str) -> bytes:
    """All bytes of a file."""
    file = disk.open(path)
    return file.pread(file.size(), 0)


def put(disk: MemoryDisk, path: str, data: bytes) -> None:
    """Put a file in the place of another one, as an operator does who restores a copy."""
    if disk.exists(path):
        disk.remove(path)
    file = disk.open(path, create=True)
    file.pwritev([data], 0)
    file.sync()
    file.close()
    disk.sync_folder(path.rpartition("/")[0])
