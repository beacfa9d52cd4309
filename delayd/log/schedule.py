"""Schedule log of an hour: where its file is, and the table of hours in a checkpoint (docs/formats/schedule.md)."""

import numpy as np
from numpy.typing import NDArray

from delayd.errors import DamagedData
from delayd.hours import hour_name
from delayd.log.segment import FileKind, Segment, UnfinishedFile, open_segment
from delayd.machine.disk import Disk

SEALED = 1  # Flags of an hour: each of its rows has exactly one outcome (rule S1).
DEAD = 2  # Some of them are DEAD, so the hour is not to be deleted (rule S2).
# Retention removes its files, or has removed them: with this a reader knows why a file is missing (rule P3).
REMOVED = 4
HOUR_ROW = np.dtype(
    [("hour", "<u4"), ("last_crc32c", "<u4"), ("length", "<u8"), ("rows", "<u8"), ("flags", "<u8")]
)  # 32 bytes an hour; ``length`` counts groups, without the file header.
HourRows = NDArray[np.void]
Skipped = tuple[int, int]
"""A first sequence, and how many sequences from it on an operator's decision left unused (rule S5)."""
RESTORED_STEP = 1 << 40  # Sequences that a restored server leaves unused: more than it took since its backup.


def schedule_path(folder: str, hour: int) -> str:
    """Name the schedule log of ``hour`` (hours since the epoch) in a delay server's directory."""
    name = hour_name(hour)
    return f"{folder}/schedule/{name[:8]}/{name}.log"


def dispatch_path(folder: str, hour: int) -> str:
    """Name the dispatch log of ``hour``."""
    name = hour_name(hour)
    return f"{folder}/dispatch/{name[:8]}/{name}.log"


def decode_hours(table: bytes) -> HourRows:
    """View the hour table of a checkpoint: HOUR_ROW[n], by rising hour."""
    return np.frombuffer(table, HOUR_ROW)


def open_schedule_log(disk: Disk, path: str, log_id: int, hour: int, *, write: bool = False) -> Segment:
    """Open an hour's schedule log, or the file beside it, for reading.

    Raises:
        DamagedData, Shortage: it is gone, another hour's, or can't be read.
    """
    try:
        segment = open_segment(disk, path, FileKind.SCHEDULE, log_id, write=write)
    except FileNotFoundError:
        raise DamagedData(path, 0, "the file is gone") from None
    except UnfinishedFile:
        raise DamagedData(path, 0, "its file header is cut short") from None
    if segment.header.number != hour:
        segment.close()
        raise DamagedData(path, 0, f"its header says that it is of hour {hour_name(segment.header.number)}")
    return segment
