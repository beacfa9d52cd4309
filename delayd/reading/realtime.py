"""The realtime message log as an audit reads it: an index of handed-over batches, and their rows hour by hour.

Invariant: the log is scanned once, whole and verified; what is kept is one index row a batch, and an hour's rows are
read again from there, columns only, each checked by its own checksum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delayd.batch import HEADER, BatchKind, ColumnId, Int64s
from delayd.disk import Disk, File
from delayd.errors import DamagedData
from delayd.log.control import decode_records
from delayd.log.group import Group, GroupKind
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.reading.columns import SubjectTable, UInt64s
from delayd.reading.directory import Directory
from delayd.reading.groups import LogMoved, TornTail, log_size, read_log, segment_bases

BATCH = np.dtype(
    [
        ("target", "<u4"),  # Index into the targets of a `TargetIndex`.
        ("subject", "<u4"),
        ("hour", "<u4"),
        ("count", "<u4"),
        ("segment_base", "<u8"),
        ("offset", "<u8"),
        ("origin_log_id", "<u8"),
        ("epoch", "<u8"),
        ("batch_id", "<u8"),
        ("claimed_at_ms", "<i8"),
        ("appended_at_ms", "<i8"),
        ("columns_at", "<u4"),  # Where the checksummed columns begin, from the start of the batch, and end.
        ("columns_end", "<u4"),
        ("sequence_at", "<u4"),
        ("deliver_at", "<u4"),
        ("columns_crc32c", "<u4"),
        ("decided", "u1"),  # Whether its origin's last watermark covers it (rule H1).
    ]
)
Batches = NDArray[np.void]
GAP_BYTES_MAX = 1 << 16  # Batches of one hour that lie closer than this are read in one call.
READ_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A realtime server's message log; what lies below ``start`` its retention has removed."""

    folder: str
    log_id: int
    start: int


@dataclass(frozen=True, slots=True)
class TargetIndex:
    """All handed-over batches of some realtime logs, in order of target and offset."""

    targets: tuple[Target, ...]
    batches: Batches  # BATCH[n]
    subjects: tuple[str, ...]
    last_appended_at_ms: int


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows of one hour and origin as the targets hold them; ``batch_of`` is for each row an index into ``batches``."""

    sequence: UInt64s
    deliver_at_ms: Int64s
    batch_of: Int64s
    batches: Batches
    targets: tuple[Target, ...]
    subjects: tuple[str, ...]


def index_targets(disk: Disk, directories: Sequence[Directory], torn: list[TornTail]) -> TargetIndex:
    """Scan the message log of each realtime directory.

    Raises:
        LogMoved: segments went away meanwhile.
        DamagedData: a durable group or batch does not check.
    """
    subjects = SubjectTable()
    rows: list[tuple[int, ...]] = []
    watermarks: dict[tuple[int, int], tuple[int, int]] = {}
    targets: list[Target] = []
    last_appended_at_ms = 0
    for number, directory in enumerate(directories):
        place = LogPlace(directory.message_folder, FileKind.REALTIME, directory.log_id)
        bases = segment_bases(disk, place)
        if not bases:
            continue
        targets.append(Target(place.folder, directory.log_id, bases[0]))
        for group in read_log(disk, place, bases[0], log_size(disk, place), torn):
            last_appended_at_ms = max(last_appended_at_ms, group.header.appended_at_ms)
            if group.header.kind == GroupKind.CONTROL:
                _note_hellos(group, number, watermarks)
            else:
                base = bases[int(np.searchsorted(bases, group.header.offset, side="right")) - 1]
                rows += _index_group(group, number, base, subjects, watermarks)
    batches = np.array(rows, BATCH)
    for (number, origin), watermark in watermarks.items():
        covered = (batches["epoch"] < watermark[0]) | (
            (batches["epoch"] == watermark[0]) & (batches["batch_id"] <= watermark[1])
        )
        batches["decided"][covered & (batches["target"] == number) & (batches["origin_log_id"] == origin)] = 1
    return TargetIndex(tuple(targets), batches, tuple(subjects.names), last_appended_at_ms)


def read_target_rows(disk: Disk, index: TargetIndex, batches: Batches) -> TargetRows:
    """Read the rows of some batches of an index.

    Raises:
        LogMoved: a segment went away meanwhile.
        DamagedData: a batch's columns do not check.
    """
    sequence = np.empty(int(batches["count"].sum()), np.uint64)
    deliver_at_ms = np.empty(len(sequence), np.int64)
    files: dict[str, File] = {}
    first = 0
    try:
        for row in batches:
            path = f"{index.targets[row['target']].folder}/{segment_name(int(row['segment_base']))}"
            if path not in files:
                files[path] = _open(disk, path)
            count = int(row["count"])
            data = _read_columns(path, files[path], row)
            begin = int(row["columns_at"])
            until = first + count
            sequence[first:until] = np.frombuffer(data, np.uint64, count, int(row["sequence_at"]) - begin)
            deliver_at_ms[first:until] = np.frombuffer(data, np.int64, count, int(row["deliver_at"]) - begin)
            first = until
    finally:
        for file in files.values():
            file.close()
    batch_of = np.repeat(np.arange(len(batches)), batches["count"])
    return TargetRows(sequence, deliver_at_ms, batch_of, batches, index.targets, index.subjects)


def _index_group(
    group: Group,
    target: int,
    segment_base: int,
    subjects: SubjectTable,
    watermarks: dict[tuple[int, int], tuple[int, int]],
) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for offset, batch in group.batches():
        if batch.kind != BatchKind.DISPATCH:
            continue
        part = batch.dispatch
        key, watermark = (target, part.origin_log_id), (part.w_epoch, part.w_id)
        watermarks[key] = max(watermarks.get(key, (0, 0)), watermark)
        rows.append(
            (
                *(target, int(subjects.ids(batch)[0]), part.hour, batch.count, segment_base, offset),
                *(part.origin_log_id, part.epoch, part.batch_id, part.claimed_at_ms, group.header.appended_at_ms),
                *(HEADER.size + batch.kind_bytes, batch.heap_offset),
                *(batch.offsets[ColumnId.SEQUENCE], batch.offsets[ColumnId.DELIVER_AT_MS], batch.columns_crc32c, 0),
            )
        )
    return rows


def _note_hellos(group: Group, target: int, watermarks: dict[tuple[int, int], tuple[int, int]]) -> None:
    for _, batch in group.batches():
        for record in decode_records(batch):
            origin, watermark = record.get("log_id"), record.get("w")
            if record.get("type") == "hello" and isinstance(origin, int) and isinstance(watermark, list):
                key = (target, origin)
                watermarks[key] = max(watermarks.get(key, (0, 0)), (watermark[0], watermark[1]))


def _read_columns(path: str, file: File, row: np.void) -> bytes:
    position = int(row["offset"]) - int(row["segment_base"]) + FILE_HEADER_BYTES + int(row["columns_at"])
    data = file.pread(int(row["columns_end"]) - int(row["columns_at"]), position)
    if crc32c(data) != row["columns_crc32c"]:
        raise DamagedData(path, position, "the checksum of a batch's columns differs")
    return data


def _open(disk: Disk, path: str) -> File:
    try:
        return disk.open(path)
    except FileNotFoundError:
        raise LogMoved(f"{path} is gone") from None
