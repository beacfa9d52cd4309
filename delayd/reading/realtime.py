"""The realtime message log as an audit reads it: an index of handed-over batches, and their rows hour by hour.

Invariant: the log is scanned once, whole and verified, up to its size before the other logs' sizes were taken; then
what came since, so that an outcome recorded meanwhile finds its row. What is kept is one index row a batch; an hour's
rows are read again from there, columns only, each checked by its own checksum.
"""

import bisect
from collections.abc import Mapping, Sequence
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
        ("newer", "u1"),  # Whether it came after the other logs' sizes were taken, and can only prove an outcome.
    ]
)
Batches = NDArray[np.void]


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
    last_appended_ms: tuple[int, ...]  # For each target, of its last group; 0 for an empty log.
    hellos: Mapping[tuple[int, int], int]  # When a target, by number, last heard a delay server's greeting.


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows of one hour and origin as the targets hold them; ``batch_of`` is for each row an index into ``batches``."""

    sequence: UInt64s
    deliver_at_ms: Int64s
    batch_of: Int64s
    batches: Batches
    targets: tuple[Target, ...]
    subjects: tuple[str, ...]


class TargetIndexer:
    """Scans the message logs of realtime directories, twice: before and after the other logs' sizes are taken."""

    def __init__(self, disk: Disk, directories: Sequence[Directory], torn: list[TornTail]) -> None:
        self._disk = disk
        self._torn = torn
        self._places = [LogPlace(one.message_folder, FileKind.REALTIME, one.log_id) for one in directories]
        self._starts = [(segment_bases(disk, place) or [0])[0] for place in self._places]
        self._read = list(self._starts)  # Offset up to which each log was scanned.
        self._subjects = SubjectTable()
        self._rows: list[tuple[int, ...]] = []
        self._watermarks: dict[tuple[int, int], tuple[int, int]] = {}
        self._last_appended_ms = [0] * len(self._places)
        self._hellos: dict[tuple[int, int], int] = {}

    def scan(self, *, newer: bool) -> None:
        """Index what was appended since the last scan.

        Raises:
            LogMoved: segments went away meanwhile.
            DamagedData: a durable group or batch does not check.
        """
        for number, place in enumerate(self._places):
            stop = log_size(self._disk, place)
            if stop <= self._read[number]:
                continue
            bases = segment_bases(self._disk, place)
            for group in read_log(self._disk, place, self._read[number], stop, self._torn):
                self._last_appended_ms[number] = max(self._last_appended_ms[number], group.header.appended_at_ms)
                self._read[number] = group.end
                if group.header.kind == GroupKind.DATA:
                    base = bases[bisect.bisect_right(bases, group.header.offset) - 1]
                    self._rows += self._index_group(group, number, base, newer)
                else:
                    self._note_hellos(group, number, newer)

    def index(self) -> TargetIndex:
        """What was found so far."""
        targets = [
            Target(place.folder, place.log_id, start) for place, start in zip(self._places, self._starts, strict=True)
        ]
        batches = np.array(self._rows, BATCH)
        for (number, origin), watermark in self._watermarks.items():
            covered = (batches["epoch"] < watermark[0]) | (
                (batches["epoch"] == watermark[0]) & (batches["batch_id"] <= watermark[1])
            )
            covered &= (batches["target"] == number) & (batches["origin_log_id"] == origin) & (batches["newer"] == 0)
            batches["decided"][covered] = 1
        subjects, last_appended_ms = tuple(self._subjects.names), tuple(self._last_appended_ms)
        return TargetIndex(tuple(targets), batches, subjects, last_appended_ms, dict(self._hellos))

    def _index_group(self, group: Group, target: int, segment_base: int, newer: bool) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        for offset, batch in group.batches():
            if batch.kind != BatchKind.DISPATCH:
                continue
            part = batch.dispatch
            # A later watermark may cover outcomes that were recorded after the dispatch logs' sizes were taken.
            if not newer:
                self._note_watermark(target, part.origin_log_id, (part.w_epoch, part.w_id))
            rows.append(
                (
                    *(target, int(self._subjects.ids(batch)[0]), part.hour, batch.count, segment_base, offset),
                    *(part.origin_log_id, part.epoch, part.batch_id, part.claimed_at_ms, group.header.appended_at_ms),
                    *(HEADER.size + batch.kind_bytes, batch.heap_offset),
                    *(batch.offsets[ColumnId.SEQUENCE], batch.offsets[ColumnId.DELIVER_AT_MS], batch.columns_crc32c),
                    *(0, newer),
                )
            )
        return rows

    def _note_hellos(self, group: Group, target: int, newer: bool) -> None:
        for _, batch in group.batches():
            for record in decode_records(batch):
                origin, watermark = record.get("log_id"), record.get("w")
                if record.get("type") == "hello" and isinstance(origin, int) and isinstance(watermark, list):
                    self._hellos[target, origin] = group.header.appended_at_ms
                    if not newer:
                        self._note_watermark(target, origin, (watermark[0], watermark[1]))

    def _note_watermark(self, target: int, origin: int, watermark: tuple[int, int]) -> None:
        known = self._watermarks.get((target, origin), (0, 0))
        self._watermarks[target, origin] = max(known, watermark)


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
