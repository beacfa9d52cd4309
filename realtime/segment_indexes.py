"""Indexes of the message log's closed segments: files for audits, beside the log (docs/formats/index.md).

Invariant: nothing depends on an index. One that is missing, torn or of another segment is written anew when its segment
is read; one that can't be written is left out. Only the worker thread uses this.
"""

import logging

from delayd.errors import DataError
from delayd.log.log import LogPlace
from delayd.log.segment_index import FOLDER, IndexMaker, index_groups, index_header, index_path, write_index
from delayd.machine.disk import Disk

log = logging.getLogger(__name__)


class SegmentIndexes:
    """The index files of one server."""

    def __init__(self, disk: Disk, place: LogPlace, epoch: int) -> None:
        self._disk = disk
        self._log_id = place.log_id
        self._folder = place.folder.rpartition("/")[0]
        self._epoch = epoch

    def has(self, begin: int, end: int, last_crc32c: int) -> bool:
        """Whether a segment has a whole index; ``last_crc32c`` is of its last group."""
        return index_groups(self._disk, self._folder, self._log_id, begin, end, last_crc32c) is not None

    def write(self, begin: int, end: int, last_crc32c: int, maker: IndexMaker, now_ms: int) -> None:
        """Write the index of a segment, durable on return.

        Raises:
            ServerStopped: the disk is in a state that only a restart resolves.
        """
        header = index_header(self._log_id, begin, end, last_crc32c, now_ms)
        try:
            write_index(self._disk, self._folder, header, maker, self._epoch)
        except (DataError, OSError) as error:
            # An audit then reads the segment itself.
            log.warning("segment_not_indexed begin=%d end=%d reason=%r", begin, end, str(error))

    def any_below(self, start: int) -> bool:
        """Whether there may be indexes of removed segments; also True when that can't be read."""
        try:
            return bool(self._below(start))
        except (DataError, OSError):
            return True

    def remove_below(self, start: int) -> None:
        """Remove the indexes of segments that retention has removed: those that began below an offset."""
        for base in self._below(start):
            self._disk.remove(index_path(self._folder, base))

    def _below(self, start: int) -> list[int]:
        names = self._disk.list_folder(f"{self._folder}/{FOLDER}")
        bases = [name.removesuffix(".log") for name in names]
        return [int(base) for base in bases if base.isdecimal() and int(base) < start]
