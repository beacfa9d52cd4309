"""Dispatch: the dispatch log of an hour, as another process reads it: what became of each message filed there.

Invariant: outcomes are decoded from whole groups that check, up to a size that was taken before the schedule side was
read.
"""

from collections.abc import Iterable

import numpy as np

from delayd.batch import Batch, BatchKind
from delayd.disk import Disk
from delayd.errors import DamagedData
from delayd.hours import hour_from_name
from delayd.log.dispatch import NO_OUTCOMES, OutcomeRows, decode_outcomes
from delayd.log.schedule import dispatch_path
from delayd.log.segment import FileKind, Segment, UnfinishedFile, open_segment
from delayd.reading.columns import Growing, rows_of_part
from delayd.reading.directory import Directory
from delayd.reading.groups import LogMoved, TornTail, file_size, read_groups

DECODE_ROWS = 16_384  # Outcomes decoded at a time: their arrays stay in the processor's cache.
ROW_BYTES = 24  # A row of a batch has three columns of 8 bytes.
PART_OF = 2  # The column that names each row's part.


def hours_on_disk(disk: Disk, directory: Directory, log: str) -> list[int]:
    """Hours that have a file in ``log``, which is ``schedule`` or ``dispatch``; rising."""
    days = disk.list_folder(f"{directory.path}/{log}")
    names = [name for day in days for name in disk.list_folder(f"{directory.path}/{log}/{day}")]
    return sorted(hour_from_name(name[:-4]) for name in names if name.endswith(".log"))


def dispatch_sizes(disk: Disk, directory: Directory, hours: Iterable[int] | None = None) -> dict[int, int]:
    """Bytes of groups in dispatch logs at this moment, by hour; ``hours`` None: in all that are there."""
    hours = hours_on_disk(disk, directory, "dispatch") if hours is None else hours
    return {hour: file_size(disk, dispatch_path(directory.path, hour)) for hour in hours}


def read_outcomes(
    disk: Disk,
    directory: Directory,
    hour: int,
    stop: int | None = None,
    torn: list[TornTail] | None = None,
    durable: int = 0,
    part: range | None = None,
) -> OutcomeRows:
    """Read the outcomes of an hour, in the order in which they came to be known; none when there is no file.

    Args:
        disk: where the directory is.
        directory: of a delay server.
        hour: hours since the epoch.
        stop: groups that end behind this offset are left out; None reads everything that is there now.
        torn: receives the bytes behind the last group that checks.
        durable: an offset below which the checkpoint calls everything fsynced.
        part: read the outcomes of these sequences only; None for all.

    Raises:
        LogMoved: the file went away after ``stop`` was taken from it.
        DamagedData: a durable group does not check, or belongs to another hour.
    """
    segment = open_hour(disk, dispatch_path(directory.path, hour), FileKind.DISPATCH, directory.log_id, hour)
    if segment is None:
        if stop:
            raise LogMoved(f"the dispatch log of hour {hour} is gone")
        return decode_outcomes([])
    try:
        until = segment.file.size() if stop is None else stop
        collector = _Collector(until, part)
        batches: list[Batch] = []
        rows = ends = 0
        for group in read_groups(segment, 0, until, [] if torn is None else torn, previous_crc32c=0, durable=durable):
            batches += [batch for _, batch in group.batches() if batch.kind == BatchKind.OUTCOME]
            rows += group.header.row_count
            ends = group.end if group.end <= durable else ends
            if rows >= DECODE_ROWS:
                # Batches are decoded now and then, because a batch keeps the bytes of its group in memory.
                collector.add(_decode(segment, hour, batches))
                batches, rows = [], 0
        if ends < durable <= until:
            raise DamagedData(
                segment.path, segment.position(ends), f"no group of it ends at {durable}, which was durable"
            )
        collector.add(_decode(segment, hour, batches))
        return collector.rows()
    finally:
        segment.close()


def _decode(segment: Segment, hour: int, batches: list[Batch]) -> OutcomeRows:
    if any(batch.outcome.hour != hour for batch in batches):
        raise DamagedData(segment.path, 0, "it holds outcomes of another hour")
    return decode_outcomes(batches)


class _Collector:
    """Gathers decoded outcomes; with a ``part`` those of its sequences."""

    def __init__(self, size_bytes: int, part: range | None) -> None:
        """``size_bytes`` is the size of the file that they come from."""
        none = NO_OUTCOMES
        columns = none.sequences, none.deliver_at_ms, none.part_of, none.content_hash
        self._rows = Growing(columns, size_bytes // ROW_BYTES)
        self._parts = [none.parts]
        self._parts_count = 0
        self._part = part

    def add(self, found: OutcomeRows) -> None:
        """Take the next outcomes."""
        columns = [found.sequences, found.deliver_at_ms, found.part_of, found.content_hash]
        parts = found.parts
        if self._part is not None:
            rows = rows_of_part(found.sequences, self._part)
            columns = [column[rows] for column in columns]
            used, columns[PART_OF] = np.unique(columns[PART_OF], return_inverse=True)
            parts = parts[used]
        columns[PART_OF] += self._parts_count
        for room, column in zip(self._rows.more(len(columns[0])), columns, strict=True):
            room[:] = column
        self._parts.append(parts)
        self._parts_count += len(parts)

    def rows(self) -> OutcomeRows:
        """All of them."""
        sequences, due, part_of, hashes = self._rows.columns()
        return OutcomeRows(sequences, due, np.concatenate(self._parts), part_of, hashes)


def open_hour(disk: Disk, path: str, kind: FileKind, log_id: int, hour: int) -> Segment | None:
    """Open an hour's file for reading; None when there is none or its creation did not finish."""
    try:
        segment = open_segment(disk, path, kind, log_id, write=False)
    except (FileNotFoundError, UnfinishedFile):
        return None
    if segment.header.number != hour:
        segment.close()
        raise DamagedData(path, 0, f"its header says that it belongs to hour {segment.header.number}")
    return segment
