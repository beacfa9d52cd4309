"""Loader: it reads the schedule log of an hour and makes rows for the wheel (rules P4, P7).

It reads the rows that the checkpoint counts, without those that have an outcome in the dispatch log. The caller adds
the rows that are only in the message log, when this part is done; no checkpoint is published in between.

Hours that have passed are loaded many at a time, because after a long silence there may be thousands of them, and most
have few rows or none. No new row is filed in such an hour.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.columns import ColumnId
from delayd.batch.sequences import NO_SEQUENCES, SequenceSet, among
from delayd.delay.filing.hour_table import HourPart
from delayd.delay.filing.pending import counts_of_hours, rows_of_hour, rows_of_hours
from delayd.delay.filing.schedule_log import scan_fronts
from delayd.delay.rows import ROW, Rows, copy_rows, join_rows, without
from delayd.delay.stored import Stored
from delayd.delay.subjects import Subjects
from delayd.delay.table import rows_of, subjects_of, tabulate
from delayd.delay.timers.hour_wheel import PreparedRows, prepare
from delayd.errors import DamagedData
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.machine.disk import Disk
from delayd.machine.identity import Site

PIECE_ROWS = 32_768  # Made into pending rows at a time: their columns stay in the processor's cache meanwhile.
# A run of hours that have passed has so many rows at most, and so many hours with rows: the loop takes some 10 ms to
# attach it, and for each hour that is filed a file is read.
RUN_ROWS = 16_384
RUN_FILLED = 256


class LoadedHour(NamedTuple):
    """An hour as its schedule log has it; ``prepared`` names each subject by its place in ``names``."""

    hour: int
    prepared: PreparedRows
    names: list[bytes]
    damage: DamagedData | None

    @property
    def sequences(self) -> NDArray[np.uint64]:
        """The sequences of its rows, sorted: a copy."""
        return np.sort(self.prepared.rows["sequence"])


def load_hour(
    disk: Disk,
    folder: str,
    log_id: int,
    hour: int,
    parts: Sequence[HourPart],
    decided: NDArray[np.uint64] = NO_SEQUENCES,
) -> LoadedHour:
    """Read an hour, without the rows whose sequences are ``decided`` (sorted). Runs on the worker thread.

    Bodies are not read here: a row's whole batch is verified before the row is handed over. Bytes that do not check are
    quarantined together with all that follows them in the file: ``damage`` says where first.
    """
    subjects, has_outcome = Subjects(), SequenceSet(decided, sum([part.counted.rows for part in parts]))
    rows, damage = list[Rows](), None
    for part in parts:
        of_part, found = _load(scan_fronts(disk, folder, log_id, part), hour, has_outcome, subjects)
        rows, damage = rows + of_part, damage or found
    return LoadedHour(hour, prepare(_joined(rows)), subjects.names, damage)


class FilesOfHour(NamedTuple):
    """What is filed of an hour, and which of its rows have an outcome: sequences that rise."""

    parts: tuple[HourPart, ...]
    decided: NDArray[np.uint64]

    @property
    def rows(self) -> int:
        """How many rows its files have."""
        return sum([part.counted.rows for part in self.parts])


NO_FILES = FilesOfHour((), NO_SEQUENCES)


class LoadedRun(NamedTuple):
    """Neighbouring hours that were loaded together; ``loaded`` are those of them that are filed, and a single one."""

    hours: range
    loaded: list[LoadedHour]


def load_run(site: Site, hours: range, files: Mapping[int, FilesOfHour], kept: Sequence[Rows]) -> LoadedRun:
    """Read a single hour, or of hours that have passed the first ones, as many as a run may have.

    ``files`` has the hours that are filed, rising, and ``kept`` the rows that no checkpoint counts. Runs on the worker
    thread.
    """
    if len(hours) > 1:
        hours = _run_of(hours, files, kept)
    filed = hours if len(hours) == 1 else [hour for hour in files if hour in hours]
    load = partial(load_hour, site.disk, site.folder, site.log_id)
    return LoadedRun(hours, [load(hour, *files.get(hour, NO_FILES)) for hour in filed])


def _run_of(hours: range, files: Mapping[int, FilesOfHour], kept: Sequence[Rows]) -> range:
    counts = counts_of_hours(kept, hours)
    for hour, of_hour in files.items():
        counts[hour - hours.start] += of_hour.rows
    whole = (np.cumsum(counts) <= RUN_ROWS) & (np.cumsum(counts > 0) <= RUN_FILLED)
    return hours[: max(1, int(np.count_nonzero(whole)))]


def order_run(
    run: LoadedRun,
    numbers: Sequence[NDArray[np.uint32]],
    kept: Sequence[Rows],
    decided: Mapping[int, NDArray[np.uint64]],
) -> Rows:
    """Put all rows of a run of hours that have passed into the order of their hours.

    ``numbers`` are the server's numbers of the subjects of each loaded hour. Kept rows whose sequences are ``decided``
    are left out. Runs on the worker thread, and takes the loaded rows over.
    """
    parts: list[Rows] = []
    for loaded, of_loaded in zip(run.loaded, numbers, strict=True):
        rows = loaded.prepared.rows
        rows["subject"] = of_loaded.take(rows["subject"])
        parts.append(rows)
    rows = rows_of_hours(kept, run.hours)
    for hour, sequences in decided.items():
        ended = np.flatnonzero(rows["hour"] == np.uint32(hour))
        ended = ended.compress(among(rows["sequence"].take(ended), sequences))
        rows = np.delete(rows, ended)
    joined = join_rows([*parts, rows])
    return joined.take(np.argsort(joined["hour"], kind="stable"))


def _load(
    fronts: Iterator[Stored], hour: int, has_outcome: SequenceSet, subjects: Subjects
) -> tuple[list[Rows], DamagedData | None]:
    """Read the rows of a file as far as it checks, with the damage that stopped the reading early."""
    parts, damage, stored, count = [np.empty(0, ROW)], None, list[Stored](), 0
    while True:
        try:
            entry = next(fronts, None)
        except DamagedData as error:
            entry, damage = None, error
            # Damage to the file's header makes all of the file unusable.
            if error.position <= FILE_HEADER_BYTES:
                return [np.empty(0, ROW)], damage
        if stored and (entry is None or count >= PIECE_ROWS):
            parts.append(has_outcome.without(_rows_of(stored, hour, subjects)))
            stored, count = [], 0
        if entry is None:
            return parts, damage
        stored.append(entry)
        count += entry.batch.count


def _joined(parts: list[Rows]) -> Rows:
    """Join parts and empty the list: each is given back as soon as it is copied, so a large hour is there once."""
    joined = np.empty(sum(map(len, parts)), ROW)
    end = len(joined)
    while parts:
        part = parts.pop()
        end -= len(part)
        copy_rows(joined, end, part)
    return joined


def order_hour(
    loaded: LoadedHour, numbers: NDArray[np.uint32], kept: Sequence[Rows], decided: NDArray[np.uint64]
) -> list[PreparedRows]:
    """Order all rows of an hour for the wheel: those that were loaded, and the hour's rows among the ``kept`` ones.

    ``numbers`` are the server's numbers of the loaded subjects. Kept rows whose sequences are ``decided`` are left out.
    Runs on the worker thread, and takes the loaded rows over.
    """
    rows = loaded.prepared.rows
    # A server's first subjects mostly have the same numbers here and there, and a large hour is written for nothing.
    if len(rows) and not np.array_equal(numbers, np.arange(len(numbers))):
        rows["subject"] = numbers.take(rows["subject"])
    return [loaded.prepared, prepare(without(rows_of_hour(kept, loaded.hour), decided))]


def _rows_of(stored: list[Stored], hour: int, subjects: Subjects) -> Rows:
    table = tabulate(stored)
    hours = np.full(len(table.sequences), hour, np.uint32)
    rows = rows_of(stored, table, subjects_of(stored, table, subjects), hours, in_schedule_log=True)
    return _with_bodies(rows, stored)


def _with_bodies(rows: Rows, stored: Sequence[Stored]) -> Rows:
    """Rows whose bodies are in the file: the others were handed over before they were filed, and are never sent
    again.
    """
    if not any(ColumnId.BODY_LEFT_OUT in entry.batch for entry in stored):
        return rows
    left_out = [
        entry.batch.uint32s(ColumnId.BODY_LEFT_OUT)
        if ColumnId.BODY_LEFT_OUT in entry.batch
        else np.zeros(entry.batch.count, np.uint32)
        for entry in stored
    ]
    return rows.take(np.flatnonzero(np.concatenate(left_out) == 0))
