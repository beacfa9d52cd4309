"""The schedule side of an hour: its schedule log up to the published checkpoint, and the message log from there on.

Invariant (rule P3): one checkpoint is read first and bounds everything, so that a row is taken once: from a schedule
batch gathered below the replay offset P, or from the message log from P on.
"""

from dataclasses import dataclass

import numpy as np

from delayd.batch import BatchKind, ColumnId, Int64s, parse
from delayd.disk import Disk
from delayd.errors import DamagedData
from delayd.hours import hour_start_ms
from delayd.log.checkpoint import read_checkpoint
from delayd.log.dispatch import END_ROW
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, segment_name
from delayd.log.schedule import REMOVED, SEALED, decode_hours, schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.reading.columns import RowCollector, ScheduleRows, locate
from delayd.reading.directory import Directory
from delayd.reading.dispatch import open_hour
from delayd.reading.groups import LogMoved, TornTail, log_size, read_groups, read_log, segment_bases
from delayd.reading.join import rising


@dataclass(frozen=True, slots=True)
class FiledHour:
    """An hour in the checkpoint's table: how much of its schedule log is valid."""

    length: int
    rows: int
    sealed: bool
    removed: bool = False  # Retention takes its files, or has.


@dataclass(frozen=True, slots=True)
class ScheduleSnapshot:
    """What bounds the schedule side of all hours: offsets of the message log, and the table of hours."""

    directory: Directory
    replay_offset: int
    message_stop: int
    hours: dict[int, FiledHour]
    appended_at_ms: int  # Of the last group below the replay offset: hours that ended by then are closed (rule P5).
    outcome_ends: dict[int, int]  # Offset in each dispatch log below which all was fsynced.

    def is_closed(self, hour: int) -> bool:
        """Whether no message can be filed in an hour any more, so that its schedule log is all there (rule P5)."""
        filed = self.hours.get(hour)
        return (filed is not None and filed.sealed) or hour_start_ms(hour + 1) <= self.appended_at_ms

    @property
    def place(self) -> LogPlace:
        """Its message log."""
        return LogPlace(self.directory.message_folder, FileKind.MESSAGE, self.directory.log_id)


@dataclass(frozen=True, slots=True)
class MessageTail:
    """Rows of the message log from the replay offset on, by rising hour and in each by sequence."""

    rows: ScheduleRows
    hours: Int64s
    last_appended_at_ms: int

    def counts(self) -> dict[int, int]:
        """Rows by hour."""
        hours, counts = np.unique(self.hours, return_counts=True)
        return dict(zip(hours.tolist(), counts.tolist(), strict=True))

    def of_hour(self, hour: int) -> ScheduleRows:
        """The rows of one hour."""
        first, until = np.searchsorted(self.hours, [hour, hour + 1])
        return self.rows.take(np.arange(first, until))


def take_snapshot(disk: Disk, directory: Directory) -> ScheduleSnapshot:
    """Read the published checkpoint, then the message log's size.

    Raises:
        DamagedData, NewerFormat: the checkpoint can't be read.
    """
    published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    replay_offset, table = published.get("replay_offset", 0), published.get("hours", b"")
    if not isinstance(replay_offset, int) or not isinstance(table, bytes):
        raise DamagedData(f"{directory.path}/checkpoint", 0, "replay_offset or hours has another type")
    hours = {
        int(row["hour"]): FiledHour(
            int(row["length"]), int(row["rows"]), bool(row["flags"] & SEALED), bool(row["flags"] & REMOVED)
        )
        for row in decode_hours(table)
    }
    place = LogPlace(directory.message_folder, FileKind.MESSAGE, directory.log_id)
    appended_at_ms = published.get("appended_at_ms", 0)
    if not isinstance(appended_at_ms, int):
        raise DamagedData(f"{directory.path}/checkpoint", 0, "appended_at_ms has another type")
    outcomes = published.get("outcomes", b"")
    if not isinstance(outcomes, bytes):
        raise DamagedData(f"{directory.path}/checkpoint", 0, "outcomes has another type")
    ends = {hour: end for hour, _, end in np.frombuffer(outcomes, END_ROW).tolist()}
    return ScheduleSnapshot(directory, replay_offset, log_size(disk, place), hours, appended_at_ms, ends)


def was_removed(disk: Disk, snapshot: ScheduleSnapshot, hour: int) -> bool:
    """Whether retention removed an hour that the published checkpoint still names; it is told there before."""
    filed = snapshot.hours.get(hour)
    return filed is not None and filed.removed and not disk.exists(schedule_path(snapshot.directory.path, hour))


def read_tail(disk: Disk, snapshot: ScheduleSnapshot, torn: list[TornTail] | None = None) -> MessageTail:
    """Read the message log from the replay offset on, columns only.

    Raises:
        LogMoved: its segments are gone: take a new snapshot.
        DamagedData: a durable group does not check.
    """
    collector = RowCollector()
    last_appended_at_ms = 0
    start, stop = snapshot.replay_offset, snapshot.message_stop
    for group in read_log(disk, snapshot.place, start, stop, [] if torn is None else torn):
        header = group.header
        last_appended_at_ms = max(last_appended_at_ms, header.appended_at_ms)
        if header.kind != GroupKind.DATA:
            continue
        sequence = header.base_sequence
        for offset, batch in group.batches():
            if batch.kind == BatchKind.PRODUCER:
                collector.add_message_batch(batch, offset, sequence, header.appended_at_ms)
                sequence += batch.count
    rows = collector.rows()
    hours = rows.hours()
    order = np.argsort(hours, kind="stable")
    return MessageTail(rows.take(order), hours[order], last_appended_at_ms)


def read_hour(disk: Disk, snapshot: ScheduleSnapshot, tail: MessageTail, hour: int) -> ScheduleRows:
    """Read the schedule side of an hour, by rising sequence.

    Raises:
        LogMoved: the schedule log is gone: take a new snapshot.
        DamagedData: it does not check, or is shorter than the checkpoint says.
    """
    collector = RowCollector()
    filed = snapshot.hours.get(hour)
    if filed is not None and filed.length:
        _read_filed(disk, snapshot, hour, filed.length, collector)
    late = tail.of_hour(hour)
    early = collector.rows()
    # Tables of subjects differ, so the numbers of the second part move up behind those of the first.
    subjects = early.subjects + late.subjects
    moved = (late.subject + np.uint32(len(early.subjects))).astype(np.uint32)
    rows = ScheduleRows(
        np.concatenate((early.sequence, late.sequence)),
        np.concatenate((early.deliver_at_ms, late.deliver_at_ms)),
        np.concatenate((early.appended_at_ms, late.appended_at_ms)),
        np.concatenate((early.subject, moved)),
        np.concatenate((early.body_bytes, late.body_bytes)),
        np.concatenate((early.location, late.location)),
        subjects,
    )
    if len(rows) and not (rows.sequence[1:] >= rows.sequence[:-1]).all():
        rows = rows.take(rising(rows.sequence))
    return rows


def read_body(disk: Disk, snapshot: ScheduleSnapshot, hour: int, location: int) -> bytes:
    """Read the body of one row that `read_hour` returned, checked.

    Raises:
        LogMoved: its file is gone.
        BatchMalformed: its batch does not check.
    """
    in_message_log, offset, row = locate(location)
    if in_message_log:
        base = max((base for base in segment_bases(disk, snapshot.place) if base <= offset), default=None)
        path = f"{snapshot.place.folder}/{segment_name(base or 0)}"
    else:
        base, path = 0, schedule_path(snapshot.directory.path, hour)
    if base is None or not disk.exists(path):
        raise LogMoved(f"{path} is gone")
    file = disk.open(path)
    try:
        head = file.pread(12, offset - base + FILE_HEADER_BYTES)
        batch = parse(file.pread(int.from_bytes(head[8:], "little"), offset - base + FILE_HEADER_BYTES))
    finally:
        file.close()
    batch.verify()
    starts, ends = batch.region(ColumnId.BODY_END)
    return bytes(batch.heap[int(starts[row]) : int(ends[row])])


def _read_filed(disk: Disk, snapshot: ScheduleSnapshot, hour: int, length: int, collector: RowCollector) -> None:
    directory = snapshot.directory
    path = schedule_path(directory.path, hour)
    segment = open_hour(disk, path, FileKind.SCHEDULE, directory.log_id, hour)
    if segment is None:
        raise LogMoved(f"{path} is gone")
    end = 0
    try:
        for group in read_groups(segment, 0, length, [], previous_crc32c=0, durable=length):
            end = group.end
            for offset, batch in group.batches():
                if batch.kind == BatchKind.SCHEDULE and batch.schedule.source_end <= snapshot.replay_offset:
                    collector.add_schedule_batch(batch, offset)
        if end < length:
            position = segment.position(end)
            raise DamagedData(path, position, f"the checkpoint says that {length - end} more bytes are there")
    finally:
        segment.close()
