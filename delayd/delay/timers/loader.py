"""Loader: the index of an hour, from its schedule log into rows for the wheel (rules P4, P7).

It reads what the checkpoint counts, minus what the dispatch log already holds. What is in the message log only is
added by whoever loads, when this part is done: no checkpoint publishes in between.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import HEADER, Batch, BatchKind, ColumnId, padded, parse
from delayd.delay.filing.hour_table import NOTHING, HourFile
from delayd.delay.filing.pending import rows_of_hour
from delayd.delay.quarantine import schedule_beside_path
from delayd.delay.rows import BESIDE, ROW, Rows, join_rows
from delayd.delay.subjects import Subjects
from delayd.delay.table import Stored, rows_of, subjects_of, tabulate
from delayd.delay.timers.hour_wheel import PreparedRows, prepare
from delayd.disk import Disk
from delayd.errors import BadSubject, BatchMalformed, DamagedData
from delayd.hours import hour_name
from delayd.log.group import CommitGroup, content_position
from delayd.log.schedule import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, Segment, UnfinishedFile, open_segment
from delayd.validate import check_subjects

NO_SEQUENCES = np.empty(0, np.uint64)
PIECE_ROWS = 250_000  # Made into pending rows at a time: the columns of a large hour are not all in memory.
FRONT_BYTES = 4 << 10  # A batch of 100 rows; from the second one on the first one says how much to read.
TABLE_ROWS = 8  # A look-up table may be this sparse; then it is as large as one u64 column.
TABLE_BYTES = 1 << 10  # The subject table of most batches, which stands behind the columns.


class LoadedHour(NamedTuple):
    """An hour as its schedule log has it; ``prepared`` has subjects by their place in ``names``."""

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
    file: HourFile,
    decided: NDArray[np.uint64] = NO_SEQUENCES,
    beside: HourFile = NOTHING,
) -> LoadedHour:
    """Read an hour, without the rows whose sequences are ``decided`` (sorted). Runs on the worker thread.

    Bodies are not read: they are verified when a row's batch is, before it is handed over. What does not check is
    quarantined with all that follows it in the file: ``damage`` says where. ``beside`` is what the file beside a
    damaged schedule log holds.
    """
    subjects = Subjects()
    parts, damage = _load(scan_fronts(disk, folder, log_id, hour, file), hour, decided, subjects)
    if beside.length:
        path = schedule_beside_path(folder, hour)
        fronts = scan_fronts(disk, folder, log_id, hour, beside, path)
        more, damage_beside = _load(fronts, hour, decided, subjects)
        parts, damage = parts + more, damage or damage_beside
    return LoadedHour(hour, prepare(join_rows(parts)), subjects.names, damage)


def _load(
    fronts: Iterator[Stored], hour: int, decided: NDArray[np.uint64], subjects: Subjects
) -> tuple[list[Rows], DamagedData | None]:
    """The rows of a file as far as it checks, and what stopped the reading early."""
    parts, damage, stored, count = [np.empty(0, ROW)], None, list[Stored](), 0
    while True:
        try:
            entry = next(fronts, None)
        except DamagedData as error:
            entry, damage = None, error
            # What is wrong with the file as a whole counts for all of it.
            if error.position <= FILE_HEADER_BYTES:
                return [np.empty(0, ROW)], damage
        if stored and (entry is None or count >= PIECE_ROWS):
            parts.append(without(_rows_of(stored, hour, subjects), decided))
            stored, count = [], 0
        if entry is None:
            return parts, damage
        stored.append(entry)
        count += entry.batch.count


def order_hour(
    loaded: LoadedHour, numbers: NDArray[np.uint32], kept: Sequence[Rows], decided: NDArray[np.uint64]
) -> list[PreparedRows]:
    """Order all rows of an hour for the wheel: those that were loaded, and its rows among the ``kept`` ones.

    ``numbers`` are the server's numbers of the loaded subjects; rows whose sequences are ``decided`` are left out of
    the kept ones. Runs on the worker thread, and takes the loaded rows over.
    """
    rows = loaded.prepared.rows
    if len(rows):
        rows["subject"] = numbers.take(rows["subject"])
    return [loaded.prepared, prepare(without(rows_of_hour(kept, loaded.hour), decided))]


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
    """Yield the batches that the checkpoint counts, bodies and all, verified.

    Raises:
        DamagedData: a group does not check, or the file is not the one that the checkpoint counts.
    """
    for group in scan_groups(disk, schedule_path(folder, hour), log_id, hour, file):
        for offset, batch in group.batches():
            yield Stored(offset, 0, batch)


def scan_groups(disk: Disk, path: str, log_id: int, hour: int, file: HourFile) -> Iterator[CommitGroup]:
    """Yield the verified groups that the checkpoint counts of an hour's schedule log, or of the file beside it.

    Raises:
        DamagedData: a group does not check, or the file is not the one that the checkpoint counts.
    """
    segment = open_schedule_log(disk, path, log_id, hour)
    try:
        scan = segment.scan(0, 0)
        while scan.offset < file.length:
            group = next(scan, None)
            if group is None:
                reason = scan.reason or f"the file ends {file.length - scan.offset} bytes early"
                raise DamagedData(segment.path, scan.offset + FILE_HEADER_BYTES, reason)
            yield group
        _check_end(segment, file, scan.offset, scan.crc32c)
    finally:
        segment.close()


def scan_fronts(disk: Disk, folder: str, log_id: int, hour: int, file: HourFile, beside: str = "") -> Iterator[Stored]:
    """Yield the batches that the checkpoint counts, as far as their subject tables, verified; without bodies.

    ``beside`` is the path of the file beside the hour's own, when that is meant; offsets in it have `BESIDE` added.

    Raises:
        DamagedData: something of that does not check, or the file is not the one that the checkpoint counts.
    """
    if not file.length:
        return
    segment = open_schedule_log(disk, beside or schedule_path(folder, hour), log_id, hour)
    base = BESIDE if beside else 0
    try:
        end, crc32c, ahead = 0, 0, FRONT_BYTES
        while end < file.length:
            header, sizes = segment.read_front(end, crc32c)
            at = end + content_position(len(sizes))
            for size in sizes:
                batch = _read_front(segment, at, size, ahead)
                yield Stored(base + at, 0, batch)
                ahead = max(FRONT_BYTES, batch.heap_offset + TABLE_BYTES)
                at += size
            end, crc32c = at, header.header_crc32c
        _check_end(segment, file, end, crc32c)
    finally:
        segment.close()


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


def _check_end(segment: Segment, file: HourFile, end: int, crc32c: int | None) -> None:
    if (end, crc32c) != (file.length, file.last_crc32c):
        reason = f"these are other groups than the {file.length} bytes that the checkpoint counts"
        raise DamagedData(segment.path, FILE_HEADER_BYTES, reason)


def _read_front(segment: Segment, offset: int, size: int, ahead: int) -> Batch:
    """Read a batch up to the end of its subject table, most often in one read of ``ahead`` bytes."""
    position = segment.position(offset)
    data = segment.file.pread(min(size, ahead), position)
    try:
        needed = _front_bytes(data)
        while len(data) < needed <= size:
            data = segment.file.pread(min(size, needed + TABLE_BYTES), position)
            needed = _front_bytes(data)
        batch = parse(data, front=True)
        if batch.total_bytes != size or batch.kind is not BatchKind.SCHEDULE:
            raise BatchMalformed(f"a batch of {batch.total_bytes} bytes, the group's table says {size}")
        batch.verify_columns()
        check_subjects(batch)
        batch.verify_subjects()
    except (BatchMalformed, BadSubject) as error:
        raise DamagedData(segment.path, position, f"the batch at offset {offset}: {error}") from None
    return batch


def _front_bytes(data: bytes) -> int:
    """How many bytes hold all of a batch but headers and bodies, as far as ``data`` tells; nothing is proved."""
    if len(data) < HEADER.size:
        return HEADER.size
    fields = HEADER.unpack_from(data)
    heap_offset: int = fields[6]
    subject_count: int = fields[9]
    ends = heap_offset + 4 * subject_count
    if not subject_count or len(data) < ends:
        return ends
    return heap_offset + padded(4 * subject_count) + padded(int.from_bytes(data[ends - 4 : ends], "little"))


def _rows_of(stored: list[Stored], hour: int, subjects: Subjects) -> Rows:
    table = tabulate(stored)
    hours = np.full(len(table.sequences), hour, np.uint32)
    rows = rows_of(stored, table, subjects_of(stored, table, subjects), hours, in_schedule_log=True)
    return _with_bodies(rows, stored)


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
    """Which sequences are among ``decided``, which is sorted."""
    if not len(decided):
        return np.zeros(len(sequences), np.bool_)
    low, span = decided[0], int(decided[-1] - decided[0]) + 1
    if span <= TABLE_ROWS * len(sequences):
        # Mostly an hour's sequences lie close together: a look into a table takes a tenth of a search.
        is_decided = np.zeros(span + 1, np.bool_)
        is_decided[decided - low] = True
        found: NDArray[np.bool_] = is_decided.take(np.minimum(sequences - low, np.uint64(span)).astype(np.int64))
        return found
    places = np.searchsorted(decided, sequences)
    places[places == len(decided)] = 0
    found = decided.take(places) == sequences
    return found
