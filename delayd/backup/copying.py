"""Copying: one file after the other into a backup or out of it, with CRC32C over the bytes that were read.

Logs only grow. So a file that an earlier call copied goes on where its copy ends, and a copy that is as long as it is
to be is not read again.

Invariant: a file counts as copied when it is durable. Files are made durable many at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from crc32c import crc32c

from delayd.disk import Disk, open_named
from delayd.errors import DamagedData, DataError, Unreadable

from .journal import Journal
from .manifest import Entry

PIECE_BYTES = 1 << 20
UNSYNCED_BYTES_MAX = 256 << 20  # What a power cut may take back of a backup; more would make one sync last for seconds.
UNSYNCED_FILES_MAX = 512

Progress = Callable[[int], None]
"""Called with the bytes of each piece."""


class Copier:
    """Copies files of one disk into one folder of another; `flush` at the end."""

    def __init__(self, source: Disk, target: Disk, folder: str, journal: Journal, progress: Progress) -> None:
        self.copied_bytes = 0
        self._source = source
        self._target = target
        self._folder = folder
        self._journal = journal
        self._progress = progress
        self._unsynced: list[Entry] = []
        self._unsynced_bytes = 0

    def copy(self, path: str, name: str, size: int | None = None) -> tuple[Entry, DataError | None]:
        """Copy the file ``path`` as ``name``, its first ``size`` bytes or all of it.

        Returns what was copied, and why that is not all: the file can't be read behind it, or is shorter.

        Raises:
            FileNotFoundError: it is gone.
            DiskFull, NotWritable: the copy can't be written.
        """
        source = self._source.file_id(path)
        if source is None:
            raise FileNotFoundError(path)
        failed: DataError | None = None
        try:
            file = open_named(self._source, path)
        except Unreadable as error:
            return Entry(name, 0, 0, source), error
        try:
            wanted = file.size() if size is None else size
            known = self._journal.lines.get(name)
            copy = f"{self._folder}/{name}"
            if known is not None and (known.source != source or not self._has(copy, known, wanted)):
                known = None
            if known is not None and known.size_bytes == wanted:
                self._progress(wanted)
                return known, None
            begin, checksum = (known.size_bytes, known.crc32c) if known is not None else (0, 0)
            self._progress(begin)
            if known is None and self._target.exists(copy):
                self._target.remove(copy)
            self._target.make_folder(copy.rpartition("/")[0])
            to = self._target.open(copy, write=True, create=known is None)
            try:
                to.truncate(begin)
                position = begin
                while position < wanted:
                    try:
                        piece = file.pread(min(PIECE_BYTES, wanted - position), position)
                        if not piece:
                            raise DamagedData(path, position, f"the file ends {wanted - position} bytes early")
                    except DamagedData as error:
                        failed = error
                        break
                    to.pwritev([piece], position)
                    checksum = crc32c(piece, checksum)
                    position += len(piece)
                    self.copied_bytes += len(piece)
                    self._progress(len(piece))
                if not self._target.reports_sync_errors:
                    to.sync()
            finally:
                to.close()
        finally:
            file.close()
        entry = Entry(name, position, checksum, source)
        if failed is None:
            self._unsynced.append(entry)
        self._unsynced_bytes += position - begin
        if self._unsynced_bytes >= UNSYNCED_BYTES_MAX or len(self._unsynced) >= UNSYNCED_FILES_MAX:
            self.flush()
        return entry, failed

    def fresh(self, path: str, name: str) -> tuple[Entry, DataError | None]:
        """Copy a file that does not only grow, whatever an earlier call has copied of it."""
        self._journal.lines.pop(name, None)
        return self.copy(path, name)

    def flush(self) -> None:
        """Make all copies durable, and note them in the journal."""
        if self._target.reports_sync_errors:
            self._target.sync_filesystem(self._folder)
        else:
            for folder in sorted({entry.path.rpartition("/")[0] for entry in self._unsynced}):
                self._target.sync_folder(f"{self._folder}/{folder}" if folder else self._folder)
        if self._unsynced:
            self._journal.add(self._unsynced)
            self._journal.lines |= {entry.path: entry for entry in self._unsynced}
        self._unsynced, self._unsynced_bytes = [], 0

    def _has(self, copy: str, entry: Entry, wanted: int) -> bool:
        """Whether an earlier call's copy is a beginning of what is wanted now."""
        if entry.size_bytes > wanted or not self._target.exists(copy):
            return False
        file = open_named(self._target, copy)
        try:
            return file.size() >= entry.size_bytes
        finally:
            file.close()
