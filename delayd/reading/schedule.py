"""The schedule side of an hour: its schedule log up to the published checkpoint, and the message log from there on.

Invariant (rule P3): one checkpoint is read first and bounds everything, so that a row is taken once: from a schedule
batch gathered below the replay offset P, or from the message log from P on.
"""

import sys
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from delayd.batch import Batch, BatchKind, ColumnId, Int64s, parse
from delayd.disk import Disk, open_named
from delayd.errors import BatchMalformed, DamagedData
from delayd.hours import hour_name, hour_of_ms, hour_start_ms, hours_of
from delayd.location import locate
from delayd.log.checkpoint import read_checkpoint
from delayd.log.dispatch import END_ROW
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, segment_name
from delayd.log.schedule import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.reading.columns import NO_INT64S, RowCollector, ScheduleRows, SequenceSampler, all_expiring, rows_of_part
from delayd.reading.decisions import NO_DECISIONS, DecisionCollector, Decisions
from delayd.reading.directory import Directory
from delayd.reading.dispatch import open_hour
from delayd.reading.follow import Follow
from delayd.reading.groups import (
    Group,
    LogMoved,
    StoredGroup,
    TornTail,
    log_size,
    read_groups,
    read_known,
    read_log,
    segment_bases,
    skim,
    whole_batch,
)
from delayd.reading.join import Sorter
from delayd.reading.word import FiledHour, Word, filed_hours, read_word

SAMPLE_ROWS = 64  # One sequence in this many is sampled, to find where to split an hour.
SEQUENCES_MAX = 1 << 64
BESIDE_SUFFIX = ".schedule.log"  # The ending of the file with rows of an hour whose schedule log is damaged.
FEW_HOURS = 100  # Up to this many hours are looked up one by one.
ROW_BYTES_MIN = 12  # A row of a batch has a due instant and an end.

Collector = RowCollector | SequenceSampler


@dataclass(frozen=True, slots=True)
class ScheduleSnapshot:
    """The bounds for reading the schedule side of all hours: offsets of the message log, and the table of hours."""

    directory: Directory
    replay_offset: int
    message_stop: int
    hours: dict[int, FiledHour]
    appended_at_ms: int  # The last stamp below the replay offset: hours that ended by then are closed (rule P5).
    outcome_ends: dict[int, int]  # Offset in each dispatch log below which everything was fsynced.
    word: Word = field(default_factory=Word)

    def is_closed(self, hour: int) -> bool:
        """Whether no message can be filed in an hour any more, so that its schedule log is complete (rule P5)."""
        filed = self.hours.get(hour)
        return (filed is not None and filed.sealed) or hour_start_ms(hour + 1) <= self.appended_at_ms

    def counted(self, hour: int) -> int:
        """How many rows of an hour the checkpoint counts."""
        filed, beside = self.hours.get(hour), self.word.beside.get(hour)
        return (filed.rows if filed else 0) + (beside.rows if beside else 0)

    @property
    def place(self) -> LogPlace:
        """Its message log."""
        return LogPlace(self.directory.message_folder, FileKind.MESSAGE, self.directory.log_id)


class HourRows(NamedTuple):
    """Rows by rising hour, and in each by sequence."""

    rows: ScheduleRows
    hours: Int64s

    def counts(self) -> dict[int, int]:
        """Rows by hour."""
        if not len(self.hours):
            return {}
        firsts = np.concatenate(([0], np.flatnonzero(self.hours[1:] != self.hours[:-1]) + 1))
        counts = np.diff(firsts, append=len(self.hours))
        return dict(zip(self.hours[firsts].tolist(), counts.tolist(), strict=True))

    def of_hour(self, hour: int, part: range | None = None) -> ScheduleRows:
        """The rows of one hour; with a ``part`` those of its sequences."""
        first, until = np.searchsorted(self.hours, [hour, hour + 1])
        rows = self.rows.take(slice(int(first), int(until)))
        return rows if part is None else rows.take(rows_of_part(rows.sequence, part))


NO_HOURS = HourRows(RowCollector().rows(), NO_INT64S)


@dataclass(frozen=True, slots=True)
class MessageTail:
    """Rows of the message log from the replay offset on, by rising hour and in each by sequence.

    ``accepted`` are the rows below it, as far as the log is kept: the schedule logs must hold the same. ``first`` is
    the lowest sequence that the log has, ``faults`` say where its groups do not follow each other.
    """

    rows: ScheduleRows
    hours: Int64s
    last_appended_at_ms: int
    accepted: HourRows
    first: int = 0
    faults: tuple[str, ...] = ()
    given_up: frozenset[str] = frozenset()  # The ids of everything that operators gave up, as far as the log is kept.
    decisions: Decisions = NO_DECISIONS  # As far as the log is kept.
    filed_hours: frozenset[int] = frozenset()  # The hours of the rows below the replay offset, also of those not kept.

    def counts(self) -> dict[int, int]:
        """Rows by hour."""
        return HourRows(self.rows, self.hours).counts()

    def of_hour(self, hour: int, part: range | None = None) -> ScheduleRows:
        """The rows of one hour; with a ``part`` those of its sequences."""
        return HourRows(self.rows, self.hours).of_hour(hour, part)


def take_snapshot(disk: Disk, directory: Directory, *, tail: bool = True) -> ScheduleSnapshot:
    """Read the published checkpoint, then the message log's size; without `tail` the log is not looked at.

    Raises:
        DamagedData, NewerFormat: the checkpoint can't be read, or the message log ends before it.
    """
    published = read_checkpoint(disk, directory.path, directory.log_id) or {}
    replay_offset, table = published.get("replay_offset", 0), published.get("hours", b"")
    if not isinstance(replay_offset, int) or not isinstance(table, bytes):
        raise DamagedData(f"{directory.path}/checkpoint", 0, "replay_offset or hours has another type")
    hours = filed_hours(table)
    place = LogPlace(directory.message_folder, FileKind.MESSAGE, directory.log_id)
    appended_at_ms = published.get("appended_at_ms", 0)
    if not isinstance(appended_at_ms, int):
        raise DamagedData(f"{directory.path}/checkpoint", 0, "appended_at_ms has another type")
    outcomes = published.get("outcomes", b"")
    if not isinstance(outcomes, bytes):
        raise DamagedData(f"{directory.path}/checkpoint", 0, "outcomes has another type")
    ends = {hour: end for hour, _, end in np.frombuffer(outcomes, END_ROW).tolist()}
    stop = log_size(disk, place) if tail else replay_offset
    bases = segment_bases(disk, place)
    if bases and stop < replay_offset:
        path = f"{place.folder}/{segment_name(bases[-1])}"
        what = f"the checkpoint says that {replay_offset - stop} more bytes are there"
        raise DamagedData(path, stop - bases[-1] + FILE_HEADER_BYTES, what)
    word = read_word(directory, published) if published else Word()
    return ScheduleSnapshot(directory, replay_offset, stop, hours, appended_at_ms, ends, word)


def was_removed(disk: Disk, snapshot: ScheduleSnapshot, hour: int) -> bool:
    """Whether retention removed an hour that the published checkpoint still names; retention publishes a removal
    first.
    """
    filed = snapshot.hours.get(hour)
    return filed is not None and filed.removed and not disk.exists(schedule_path(snapshot.directory.path, hour))


def read_tail(
    disk: Disk,
    snapshot: ScheduleSnapshot,
    torn: list[TornTail] | None = None,
    hours: Container[int] | None = None,
    *,
    filed: bool = True,
) -> MessageTail:
    """Read the message log, columns only: rows that are not filed, and filed rows as far as the log is kept.

    Args:
        disk: where the log is.
        snapshot: the bounds of the reading.
        torn: receives the bytes behind the last group that checks.
        hours: which hours' filed rows are wanted, None for all; batches without a row of these hours are skipped.
        filed: whether filed rows are wanted at all, or only their hours: then the bodies of filed rows are not read.

    Raises:
        LogMoved: its segments are gone: take a new snapshot.
        DamagedData: a durable group does not check.
    """
    start = min([snapshot.replay_offset, *segment_bases(disk, snapshot.place)[:1]])
    tail, accepted = RowCollector(), RowCollector(rows_expected=_kept_rows(snapshot, start))
    check = Follow(snapshot.word, snapshot.replay_offset, snapshot.appended_at_ms)
    decisions = DecisionCollector()
    # Where only some rows are wanted, the bodies of the others are not read.
    bounds = start, snapshot.replay_offset, snapshot.message_stop
    whole = filed and hours is None
    filed_hours: set[int] = set()
    for group in read_known(disk, snapshot.place, bounds, [] if torn is None else torn, whole=whole):
        header = group.header
        sequence = header.base_sequence
        if header.kind == GroupKind.DATA:
            below = header.offset < snapshot.replay_offset
            collector = accepted if below else tail
            for offset, batch in group.batches():
                if batch.kind == BatchKind.PRODUCER:
                    if below and not filed:
                        filed_hours |= _hours_of(batch, header.appended_at_ms)
                    elif not below or hours is None or _is_of(batch, header.appended_at_ms, hours):
                        batch = whole_batch(group, offset, batch)
                        collector.add_message_batch(batch, offset, sequence, header.appended_at_ms)
                    sequence += batch.count
        check.take(group, sequence)
        decisions.take(group)
    check.end()
    rows, hours = _by_hour(tail.rows())
    below_rows = _by_hour(accepted.rows())
    return MessageTail(
        rows=rows,
        hours=hours,
        last_appended_at_ms=check.last_appended_at_ms,
        accepted=below_rows,
        first=check.first,
        faults=tuple(check.faults),
        given_up=frozenset(check.given_up),
        decisions=decisions.decisions(),
        filed_hours=frozenset(filed_hours or below_rows.counts()),
    )


def read_unfiled(disk: Disk, snapshot: ScheduleSnapshot, damage: list[DamagedData]) -> HourRows:
    """Read the rows of the message log that no checkpoint has filed.

    ``damage`` receives what is wrong with the log; the rows before it are returned.

    Raises:
        LogMoved: its segments are gone: take a new snapshot.
    """
    collector = RowCollector()
    start, stop = snapshot.replay_offset, snapshot.message_stop
    try:
        for group in read_log(disk, snapshot.place, start, stop, []) if start < stop else ():
            sequence = group.header.base_sequence
            if group.header.kind == GroupKind.DATA:
                for offset, batch in group.batches():
                    if batch.kind == BatchKind.PRODUCER:
                        collector.add_message_batch(batch, offset, sequence, group.header.appended_at_ms)
                        sequence += batch.count
    except DamagedData as error:
        damage.append(error)
    return _by_hour(collector.rows())


def read_decisions(disk: Disk, snapshot: ScheduleSnapshot, damage: list[DamagedData]) -> Decisions:
    """Read the decisions of the message log, as far back as it is kept.

    ``damage`` receives what is wrong with the log; the decisions before it are returned.

    Raises:
        LogMoved: its segments are gone: take a new snapshot.
    """
    start = min([snapshot.replay_offset, *segment_bases(disk, snapshot.place)[:1]])
    bounds, collector = (start, snapshot.replay_offset, snapshot.message_stop), DecisionCollector()
    try:
        for group in read_known(disk, snapshot.place, bounds, [], whole=False):
            collector.take(group)
    except DamagedData as error:
        damage.append(error)
    except BatchMalformed as error:
        damage.append(DamagedData(snapshot.place.folder, 0, error.message))
    return collector.decisions()


def _kept_rows(snapshot: ScheduleSnapshot, start: int) -> int:
    """An upper bound of the rows that the message log keeps below the replay offset, by its bytes and by the given
    sequences.
    """
    return min(snapshot.word.next_sequence, (snapshot.replay_offset - start) // ROW_BYTES_MIN)


def _is_of(batch: Batch, appended_at_ms: int, hours: Container[int]) -> bool:
    """Whether a row of a PRODUCER batch is filed in one of some hours."""
    first, last = _hour_range(batch, appended_at_ms)
    if last - first <= FEW_HOURS and not any(hour in hours for hour in range(first, last + 1)):
        return False
    return first == last or any(hour in hours for hour in _hours_of(batch, appended_at_ms))


def _hours_of(batch: Batch, appended_at_ms: int) -> set[int]:
    """The hours in which the rows of a PRODUCER batch are filed."""
    first, last = _hour_range(batch, appended_at_ms)
    if first == last:
        return {first}
    due_from_ms = np.maximum(batch.int64s(ColumnId.DELIVER_AT_MS), appended_at_ms)
    return set(np.unique(hours_of(due_from_ms)).tolist())


def _hour_range(batch: Batch, appended_at_ms: int) -> tuple[int, int]:
    first, last = (hour_of_ms(max(due_ms, appended_at_ms)) for due_ms in batch.range_of(ColumnId.DELIVER_AT_MS))
    return first, last


def _by_hour(rows: ScheduleRows) -> HourRows:
    due_from_ms = rows.due_from_ms()
    if len(rows):
        first, last = (hour_of_ms(int(instant_ms)) for instant_ms in (due_from_ms.min(), due_from_ms.max()))
        if first == last:
            return HourRows(rows, np.full(len(rows), first))
    hours = hours_of(due_from_ms)
    if (hours[1:] >= hours[:-1]).all():
        return HourRows(rows, hours)
    order = np.argsort(hours, kind="stable")
    return HourRows(rows.take(order), hours[order])


def read_hour(
    disk: Disk,
    snapshot: ScheduleSnapshot,
    tail: MessageTail | HourRows,
    hour: int,
    part: range | None = None,
    sorter: Sorter | None = None,
) -> ScheduleRows:
    """Read the schedule side of an hour, by rising sequence; with a ``part`` only rows with its sequences.

    ``sorter`` sorts the other logs of the hour, too.

    Raises:
        LogMoved: the schedule log is gone: take a new snapshot.
        DamagedData: it does not check, or is shorter than the checkpoint says.
    """
    collector = RowCollector(part, _expected(snapshot.counted(hour), part))
    _collect(disk, snapshot, hour, collector)
    late = tail.of_hour(hour, part)
    early = collector.rows()
    if not len(late):
        return _rising(early, sorter or Sorter())
    # The two tables of subjects differ, so the numbers of the second are moved up behind those of the first.
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
        np.concatenate((early.hashes(), late.hashes())),
        early.left_out,
        all_expiring([early.expiring, late.expiring]),
    )
    return _rising(rows, sorter or Sorter())


def _expected(rows: int, part: range | None) -> int:
    """About how many of an hour's rows a part of it has."""
    return rows if part is None else min(rows, len(range(part.start, min(part.stop, part.start + rows))))


def _rising(rows: ScheduleRows, sorter: Sorter) -> ScheduleRows:
    """The rows by rising sequence; ``rows`` are used up."""
    if (rows.sequence[1:] >= rows.sequence[:-1]).all():
        return rows
    shared = {"deliver_at_ms": rows.deliver_at_ms, "content_hash": rows.hashes()}
    own = rows.appended_at_ms, rows.location, rows.subject, rows.body_bytes
    sequence, (due, hashes), columns = sorter.sort(rows.sequence, shared, own)
    appended, location, subject, body_bytes = columns
    sorted_ = sequence, due, appended, subject, body_bytes, location
    return ScheduleRows(*sorted_, rows.subjects, hashes, rows.left_out, rows.expiring)


def part_hour(disk: Disk, snapshot: ScheduleSnapshot, tail: MessageTail, hour: int, rows_max: int) -> list[range]:
    """Split all sequences into parts, rising, with about ``rows_max`` rows of an hour each; found from a sample of
    rows.

    Raises:
        LogMoved, DamagedData: as `read_hour`.
    """
    sampler = SequenceSampler(SAMPLE_ROWS)
    _collect(disk, snapshot, hour, sampler)
    late = tail.of_hour(hour).sequence[::SAMPLE_ROWS]
    sample = np.sort(np.concatenate((*sampler.sequences, late)))
    bounds = np.unique(sample[rows_max // SAMPLE_ROWS :: rows_max // SAMPLE_ROWS]).tolist()
    return [range(first, until) for first, until in pairwise((0, *bounds, SEQUENCES_MAX))]


def read_body(disk: Disk, snapshot: ScheduleSnapshot, hour: int, location: int) -> bytes:
    """Read the body of one row that `read_hour` returned, checked.

    Raises:
        LogMoved: its file is gone.
        BatchMalformed: its batch does not check.
    """
    in_schedule_log, offset, row = locate(location)
    base: int | None = 0
    path = schedule_path(snapshot.directory.path, hour)
    if not in_schedule_log:
        base = max((base for base in segment_bases(disk, snapshot.place) if base <= offset), default=None)
        path = f"{snapshot.place.folder}/{segment_name(base or 0)}"
    if base is None or not disk.exists(path):
        raise LogMoved(f"{path} is gone")
    file = open_named(disk, path)
    try:
        head = file.pread(12, offset - base + FILE_HEADER_BYTES)
        batch = parse(file.pread(int.from_bytes(head[8:], "little"), offset - base + FILE_HEADER_BYTES))
    finally:
        file.close()
    batch.verify()
    starts, ends = batch.region(ColumnId.BODY_END)
    return bytes(batch.heap[int(starts[row]) : int(ends[row])])


def beside_path(folder: str, hour: int) -> str:
    """Path of the file that takes rows of an hour while its schedule log is damaged."""
    return f"{folder}/quarantine/{hour_name(hour)}{BESIDE_SUFFIX}"


def _collect(disk: Disk, snapshot: ScheduleSnapshot, hour: int, collector: Collector) -> None:
    """Add the filed batches of an hour."""
    filed, beside = snapshot.hours.get(hour), snapshot.word.beside.get(hour)
    if filed is not None and filed.length:
        _read_filed(disk, snapshot, hour, filed, collector)
    if beside is not None and beside.length:
        _read_beside(disk, snapshot, hour, beside, collector)


def _read_filed(disk: Disk, snapshot: ScheduleSnapshot, hour: int, filed: FiledHour, collector: Collector) -> None:
    _read_part(disk, snapshot, hour, schedule_path(snapshot.directory.path, hour), filed, collector)


def _read_beside(disk: Disk, snapshot: ScheduleSnapshot, hour: int, beside: FiledHour, collector: Collector) -> None:
    path = beside_path(snapshot.directory.path, hour)
    if disk.exists(path):
        _read_part(disk, snapshot, hour, path, beside, collector)
        return
    # Its rows were appended to the schedule log since, group by group, behind what the published table counts.
    filed = snapshot.hours.get(hour)
    path = schedule_path(snapshot.directory.path, hour)
    segment = open_hour(disk, path, FileKind.SCHEDULE, snapshot.directory.log_id, hour)
    if segment is None:
        raise LogMoved(f"{path} is gone")
    rows, begin = 0, filed.length if filed else 0
    try:
        for group in read_groups(segment, begin, sys.maxsize, []):
            if rows == beside.rows:
                break
            rows += _add_rows(snapshot, hour, path, group, collector)
    finally:
        segment.close()


def _read_part(
    disk: Disk,
    snapshot: ScheduleSnapshot,
    hour: int,
    path: str,
    filed: FiledHour,
    collector: Collector,
) -> None:
    """Read the part of a file of SCHEDULE batches that a checkpoint counts."""
    segment = open_hour(disk, path, FileKind.SCHEDULE, snapshot.directory.log_id, hour)
    if segment is None:
        raise LogMoved(f"{path} is gone")
    length, end, crc = filed.length, 0, 0
    try:
        for group in skim(segment, length, 0):
            end, crc = group.end, group.header.header_crc32c
            _add_rows(snapshot, hour, path, group, collector)
        if end < length:
            position = segment.position(end)
            raise DamagedData(path, position, f"the checkpoint says that {length - end} more bytes are there")
        if crc != filed.last_crc32c:
            raise DamagedData(path, segment.position(end), "its last group is another one than the checkpoint counts")
    finally:
        segment.close()


def _add_rows(snapshot: ScheduleSnapshot, hour: int, path: str, group: Group, collector: Collector) -> int:
    rows = 0
    for offset, batch in group.whole_batches() if isinstance(group, StoredGroup) else group.batches():
        if batch.kind != BatchKind.SCHEDULE:
            continue
        if batch.schedule.hour != hour:
            raise DamagedData(path, 0, "it holds messages of another hour")
        if batch.schedule.source_end <= snapshot.replay_offset:
            collector.add_schedule_batch(batch, offset)
            rows += batch.count
    return rows
