"""Restore: puts a whole backup into the place of servers, or goes on with that (docs/backup.md).

empty ──▶ unfinished (journal; the state has another name, so no server starts) ──▶ restored

Invariant: nothing is put over files that are not of this restore, and nothing into a directory that a server uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from crc32c import crc32c

from delayd.disk import Disk, Lock
from delayd.errors import BadArgument, DamagedData
from delayd.holder import LOCK

from .copying import Copier, Progress
from .journal import Journal
from .manifest import UNFINISHED, Entry, Manifest, encode
from .sources import STATE
from .take import STAGED

HEAD = "."  # Stands for the backup itself in the journal of a restore.


def restore(
    source: Disk,
    target: Disk,
    folder: str,
    manifest: Manifest,
    data: str,
    roles: Sequence[str],
    progress: Progress,
    *,
    damaged_too: bool = False,
) -> list[str]:
    """Copy the servers of ``roles`` from the backup in ``folder`` into the data directory ``data``.

    Returns sentences about files that do not check. When there are some, the servers are put into their place only if
    that is wanted ``damaged_too``.

    Raises:
        BadArgument: a server's folder is not empty, or has the beginning of another restore.
        DirectoryInUse: a server runs there.
        DiskFull, NotWritable: another call goes on where this one ended.
    """
    missing = [role for role in roles if role not in {each.role for each in manifest.servers}]
    if missing:
        raise BadArgument(f"the backup in {folder} holds no {' and no '.join(missing)} server")
    head = Entry(HEAD, manifest.size_bytes, crc32c(encode(manifest)), 0)
    homes: list[_Home] = []
    damaged: list[str] = []
    try:
        # All are locked and looked at before the first is written to.
        for role in roles:
            homes.append(_Home(target, data, role, head))
        for home in homes:
            damaged += home.fill(source, folder, manifest, progress)
        if not damaged or damaged_too:
            for home in homes:
                home.finish()
    finally:
        for home in homes:
            home.close()
    return damaged


class _Home:
    """One server's folder."""

    def __init__(self, disk: Disk, data: str, role: str, head: Entry) -> None:
        self._disk = disk
        self._data = data
        self._role = role
        self._path = f"{data}/{role}"
        disk.make_folder(self._path)
        self._lock: Lock = disk.lock(f"{self._path}/{LOCK}", "restore")
        try:
            begun = disk.exists(f"{self._path}/{UNFINISHED}")
            others = set(disk.list_folder(self._path)) - {LOCK, UNFINISHED}
            if others and not begun:
                raise BadArgument(
                    f"{self._path} is not empty; move its files to another place first, or restore into another --data"
                )
            self._journal = Journal(disk, self._path)
            known = self._journal.lines.get(HEAD)
            if known not in (None, head) or (known is None and others):
                self._journal.close()
                raise BadArgument(f"{self._path} has the beginning of another restore; empty it, and begin again")
        except BaseException:
            self._lock.release()
            raise
        self._done = False
        if known is None:
            self._journal.add([head])

    def fill(self, source: Disk, folder: str, manifest: Manifest, progress: Progress) -> list[str]:
        """Copy all files; sentences about those that differ from what the backup says of them."""
        copier = Copier(source, self._disk, self._path, self._journal, progress)
        damaged: list[str] = []
        for entry in manifest.entries:
            role, _, name = entry.path.partition("/")
            if role != self._role:
                continue
            path = f"{folder}/{entry.path}"
            to = name + STAGED if name == STATE else name
            try:
                copied, failed = copier.copy(path, to, entry.size_bytes)
            except FileNotFoundError:
                damaged.append(f"{path} is gone")
                continue
            if failed is not None:
                damaged.append(failed.message)
            elif copied.crc32c != entry.crc32c:
                damaged.append(DamagedData(path, 0, "its checksum is not that of the backup").message)
        copier.flush()
        return damaged

    def finish(self) -> None:
        """Let a server start here."""
        state = f"{self._path}/{STATE}"
        if self._disk.exists(state + STAGED):
            self._disk.rename(state + STAGED, state)
            self._disk.sync_folder(state.rpartition("/")[0])
        self._journal.remove()
        self._done = True

    def close(self) -> None:
        """Give the folder free; a restore that is not done can go on later."""
        if not self._done:
            self._journal.close()
        self._lock.release()
