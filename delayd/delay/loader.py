"""Loader: the index of an hour, from its schedule log into rows for the wheel (rules P4, P7).

It reads what the checkpoint counts, minus what the dispatch log already holds. What is in the message log only is
added by whoever loads, when this part is done: no checkpoint publishes in between.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import ColumnId
from delayd.delay.hour_table import HourFile
from delayd.delay.hour_wheel import PreparedRows, prepare
from delayd.delay.rows import ROW, Rows
from delayd.delay.subjects import Subjects
from delayd.delay.table import Stored, rows_of, subjects_of, tabulate
from delayd.disk import Disk
from delayd.errors import DamagedData
from delayd.log.schedule import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, UnfinishedFile, open_segment

NO_SEQUENCES = np.empty(0, np.uint64)


class LoadedHour(NamedTuple):
    """An hour as its schedule log has it; ``prepared`` has subjects by their place in ``names``."""

    hour: int
    prepared: PreparedRows
    names: list[bytes]
    damage: DamagedData | None


def load_hour(
    disk: Disk, folder: str, log_id: int, hour: int, file: HourFile, decided: NDArray[np.uint64] = NO_SEQUENCES
) -> LoadedHour:
    """Read an hour, without the rows whose sequences are ``decided`` (sorted). Runs on the worker thread.

    A group that does not check is quarantined with all that follows it in the file: ``damage`` says where.
    """
    subjects = Subjects()
    rows, damage = np.empty(0, ROW), None
    if file.length:
        stored, damage = read_schedule_log(disk, folder, log_id, hour, file)
        if stored:
            table = tabulate(stored)
            hours = np.full(len(table.sequences), hour, np.uint32)
            rows = rows_of(stored, table, subjects_of(stored, table, subjects), hours, in_schedule_log=True)
            rows = without(_with_bodies(rows, stored), decided)
    return LoadedHour(hour, prepare(rows), subjects.names, damage)


def read_schedule_log(
    disk: Disk, folder: str, log_id: int, hour: int, file: HourFile
) -> tuple[list[Stored], DamagedData | None]:
    """Read the batches that the checkpoint counts, and what stopped the reading early, if anything did."""
    stored: list[Stored] = []
    try:
        for entry in scan_schedule_log(disk, folder, log_id, hour, file):
            stored.append(entry)
    except DamagedData as damage:
        # What is wrong with the file as a whole is said at its first group: then no batch of it counts.
        return [] if damage.position <= FILE_HEADER_BYTES else stored, damage
    return stored, None


def scan_schedule_log(disk: Disk, folder: str, log_id: int, hour: int, file: HourFile) -> Iterator[Stored]:
    """Yield the batches that the checkpoint counts.

    Raises:
        DamagedData: a group does not check, or the file is not the one that the checkpoint counts.
    """
    path = schedule_path(folder, hour)
    try:
        segment = open_segment(disk, path, FileKind.SCHEDULE, log_id, write=False)
    except FileNotFoundError:
        raise DamagedData(path, 0, "the file is gone; restore it from a copy") from None
    except UnfinishedFile:
        raise DamagedData(path, 0, "its file header is cut short") from None
    try:
        scan = segment.scan(0, 0)
        while scan.offset < file.length:
            group = next(scan, None)
            if group is None:
                reason = scan.reason or f"the file ends {file.length - scan.offset} bytes early"
                raise DamagedData(path, scan.offset + FILE_HEADER_BYTES, reason)
            for offset, batch in group.batches():
                yield Stored(offset, 0, batch)
        if (scan.offset, scan.crc32c) != (file.length, file.last_crc32c):
            reason = f"these are other groups than the {file.length} bytes that the checkpoint counts"
            raise DamagedData(path, FILE_HEADER_BYTES, reason)
    finally:
        segment.close()


def _with_bodies(rows: Rows, stored: Sequence[Stored]) -> Rows:
    """Rows whose bodies are there: the others were handed over before they were filed, and never are again."""
    if not any(ColumnId.BODY_LEFT_OUT in entry.batch for entry in stored):
        return rows
    left_out = [
        entry.batch.uint32s(ColumnId.BODY_LEFT_OUT)
        if ColumnId.BODY_LEFT_OUT in entry.batch
        else np.zeros(entry.batch.count, np.uint32)
        for entry in stored
    ]
    return rows.take(np.flatnonzero(np.concatenate(left_out) == 0))


def without(rows: Rows, decided: NDArray[np.uint64]) -> Rows:
    """Rows whose sequence is not among ``decided``, which is sorted."""
    if not len(decided) or not len(rows):
        return rows
    return rows.take(np.flatnonzero(~among(rows["sequence"], decided)))


def among(sequences: NDArray[np.uint64], decided: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which sequences are among ``decided``, which is sorted; a search for each, however many are decided."""
    if not len(decided):
        return np.zeros(len(sequences), np.bool_)
    found = np.searchsorted(decided, sequences)
    found[found == len(decided)] = 0
    held: NDArray[np.bool_] = decided.take(found) == sequences
    return held
