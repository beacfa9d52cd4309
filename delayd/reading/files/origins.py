"""Origins: an hour at its delay server. The schedule side: its schedule log up to the published checkpoint, and the
message log from there on. What became of it: its dispatch log, and decisions of the message log.

Invariant (rule P3): one checkpoint is read first and bounds everything, so that a row is taken once: from a schedule
batch gathered below the replay offset P, or from the message log from P on. Outcomes are decoded from whole groups that
check, up to a size that was taken before the schedule side was read.

A decision ends a row (cancelled, moved, replaced, never taken) and counts from the moment at which it is durable. Its
outcome may reach the dispatch log much later: 32 hours are written at a time, and a full disk or a stopped server
delays the rest. A server keeps its message log as long as an outcome of a decision in it is missing. So whoever tells
what is pending asks `LoggedDecisions` too.
"""

from collections.abc import Container, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import BatchKind, ColumnId, Int64s
from delayd.batch.sequences import find, locate
from delayd.errors import BatchMalformed, DamagedData
from delayd.hours import hour_from_name, hour_name, hour_of_ms, hours_of
from delayd.log.control import Ended, LogTime, OperatorWord, SkippedSequences, decode_sound
from delayd.log.group import GroupKind
from delayd.log.hour import (
    NO_ENDED,
    NO_OUTCOMES,
    PART,
    EndedRows,
    OutcomeRows,
    decode_ended,
    decode_outcomes,
    dispatch_path,
    name_others,
    schedule_path,
)
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, Segment, UnfinishedFile, open_segment
from delayd.machine.disk import Disk, open_named
from delayd.outcome import Outcome, Reason, reason_name
from delayd.reading.files.directory import Directory, ScheduleSnapshot
from delayd.reading.files.row_arrays import (
    NO_INT64S,
    Growing,
    RowCollector,
    ScheduleRows,
    SequenceSampler,
    Sorter,
    named_of,
    rises,
    rows_of_part,
)
from delayd.reading.files.stored_groups import (
    Checked,
    Follow,
    Group,
    LogMoved,
    StoredGroup,
    TornTail,
    file_size,
    followed,
    read_groups,
    read_known,
    segment_bases,
    skim,
    whole_batch,
)

ROW_BYTES = 24  # A row of a batch has three columns of 8 bytes.
DECODE_ROWS = 16_384  # Outcomes decoded at a time: their arrays stay in the processor's cache.
SAMPLE_ROWS = 64  # One sequence in this many is sampled, to find where to split an hour.
SEQUENCES_MAX = 1 << 64
BESIDE_SUFFIX = ".schedule.log"  # The ending of the file with rows of an hour whose schedule log is damaged.
FEW_HOURS = 100  # Up to this many hours are looked up one by one.
ROW_BYTES_MIN = 12  # A row of a batch has a due instant and an end.
Collector = RowCollector | SequenceSampler
HAVE_LABELS = frozenset({ColumnId.KEY_END, ColumnId.TAGS_END})


def outcome_word(part: np.void) -> str:
    """What a part says of its rows, in a word: ``dispatched``, ``dead``, ``cancelled``, ``moved``, …"""
    reason = int(part["reason"])
    return reason_name(reason) if reason > Reason.CANCELLED else Outcome(int(part["outcome"])).word


def hours_on_disk(disk: Disk, directory: Directory) -> list[int]:
    """Hours that have a dispatch log; rising."""
    folder = f"{directory.path}/dispatch"
    names = [name for day in disk.list_folder(folder) for name in disk.list_folder(f"{folder}/{day}")]
    return sorted(hour_from_name(name[:-4]) for name in names if name.endswith(".log"))


def dispatch_sizes(disk: Disk, directory: Directory, hours: Iterable[int]) -> dict[int, int]:
    """Bytes of groups in the dispatch logs of some hours at this moment, by hour."""
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
    """Read the outcomes of an hour, or those of a ``part`` of its sequences, in the order in which they came to be
    known.

    Groups that end behind the offset ``stop`` are left out, None reads all that is there now; below ``durable`` the
    checkpoint calls everything fsynced. ``torn`` receives the bytes behind the last group that checks.

    Raises:
        LogMoved: the file went away after ``stop`` was taken from it.
        DamagedData: a durable group does not check, or belongs to another hour.
    """
    segment = open_hour(disk, dispatch_path(directory.path, hour), FileKind.DISPATCH, directory.log_id, hour)
    if segment is None:
        if stop:
            raise LogMoved(f"the dispatch log of hour {hour} is gone")
        return NO_OUTCOMES
    try:
        until = segment.file.size() if stop is None else stop
        found = _Gathered(until)
        batches: list[Batch] = []
        rows = ends = 0
        for group in read_groups(segment, 0, until, [] if torn is None else torn, previous_crc32c=0, durable=durable):
            batches += [batch for _, batch in group.batches() if batch.kind == BatchKind.OUTCOME]
            rows += group.header.row_count
            ends = group.end if group.end <= durable else ends
            if rows >= DECODE_ROWS:
                # Batches are decoded now and then, because a batch keeps the bytes of its group in memory.
                found.add(_decode(segment, hour, batches, part))
                batches, rows = [], 0
        if ends < durable <= until:
            what = f"no group of it ends at {durable}, which was durable"
            raise DamagedData(segment.path, segment.position(ends), what)
        found.add(_decode(segment, hour, batches, part))
        return found.rows()
    finally:
        segment.close()


def take_outcomes(outcomes: OutcomeRows, rows: slice | Int64s) -> OutcomeRows:
    """Some of the outcomes; of many parts only those that they name.

    Where rows of a part name rows that follow one another, each gets a part of its own, which knows the row's place.
    """
    part_of = outcomes.part_of[rows]
    several = name_others(outcomes.parts) & (outcomes.parts["count"] > 1)
    if several.any() and several[part_of].any():
        places = np.arange(len(outcomes.part_of))[rows] - np.searchsorted(outcomes.part_of, part_of)
        parts = outcomes.parts.take(part_of)
        parts["reserved"] += np.where(several[part_of], places, 0).astype(np.uint64)
        part_of = np.arange(len(part_of))
    else:
        parts, part_of = named_of(outcomes.parts, part_of)
    columns = outcomes.sequences[rows], outcomes.deliver_at_ms[rows]
    return OutcomeRows(*columns, parts, part_of, outcomes.content_hash[rows])


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


class LoggedDecisions(NamedTuple):
    """Ended rows by rising sequence, and for each the offset of the batch that says so."""

    rows: EndedRows
    offsets: NDArray[np.uint64]

    def find(self, sequences: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The place of each of these rows here; -1 for rows of which nothing is decided."""
        found = np.full(len(sequences), -1)
        which, at = find(self.rows["sequence"], sequences)
        found[which] = at
        return found

    def hours(self) -> set[int]:
        return set(np.unique(self.rows["hour"]).tolist())

    def of_hour(self, hour: int, part: range | None = None) -> EndedRows:
        own = self.rows.compress(self.rows["hour"] == hour)
        return own if part is None else own.take(rows_of_part(own["sequence"], part))

    def behind(self, hour: int, outcomes: OutcomeRows, part: range | None = None) -> OutcomeRows:
        """The outcomes of an hour, or of a ``part`` of it, and behind them those that its dispatch log does not have
        yet.
        """
        own = self.of_hour(hour, part)
        own = own.compress(~np.isin(own["sequence"], outcomes.sequences))
        if not len(own):
            return outcomes
        found = _Gathered()
        found.add(outcomes)
        found.add(as_outcomes(own))
        return found.rows()


NO_DECISIONS = LoggedDecisions(NO_ENDED, np.empty(0, np.uint64))


class DecisionCollector:
    """Gathers the decisions of a message log, group by group."""

    def __init__(self) -> None:
        self._found: list[tuple[int, EndedRows]] = []

    def take(self, group: Group) -> None:
        """Look at the next group. Raises BatchMalformed when a record of it is none."""
        for offset, batch in group.batches():
            if batch.kind != BatchKind.CONTROL:
                break  # Records stand before the rows of their commit.
            for record in decode_sound(whole_batch(group, offset, batch)):
                if isinstance(record, Ended):
                    self._found.append((offset, decode_ended(record.rows)))

    def decisions(self) -> LoggedDecisions:
        if not self._found:
            return NO_DECISIONS
        rows = np.concatenate([rows for _, rows in self._found])
        counts = [len(rows) for _, rows in self._found]
        offsets = np.repeat(np.array([offset for offset, _ in self._found], np.uint64), counts)
        order = np.argsort(rows["sequence"], kind="stable")
        return LoggedDecisions(rows.take(order), offsets.take(order))


def as_outcomes(rows: EndedRows) -> OutcomeRows:
    """The outcomes that these rows get, each with a part of its own.

    Nobody knows yet which row a drained one is at its taker: its decision names the taker alone.
    """
    parts = np.zeros(len(rows), PART)
    leaves = rows["reason"] == Reason.DRAINED
    parts["target_log_id"] = np.where(leaves, rows["other"], 0)
    parts["batch_id"] = np.where(leaves, 0, rows["other"])
    parts["target_appended_at_ms"] = np.where(leaves, 0, rows["other_at_ms"])
    parts["claimed_at_ms"], parts["reason"] = rows["decided_at_ms"], rows["reason"]
    parts["outcome"], parts["count"], parts["attempt"] = Outcome.CANCELLED, 1, 1
    hashes = np.zeros(len(rows), np.uint64)
    return OutcomeRows(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), parts, np.arange(len(rows)), hashes)


class _Gathered:
    """Outcomes one behind the other, in memory that is reserved for a file of some bytes."""

    def __init__(self, size_bytes: int = 0) -> None:
        self._parts = [NO_OUTCOMES.parts]
        self._parts_count = 0
        columns = NO_OUTCOMES.sequences, NO_OUTCOMES.deliver_at_ms, NO_OUTCOMES.part_of, NO_OUTCOMES.content_hash
        self._columns = Growing(columns, size_bytes // ROW_BYTES)

    def add(self, found: OutcomeRows) -> None:
        part_of = found.part_of + self._parts_count
        columns = found.sequences, found.deliver_at_ms, part_of, found.content_hash
        for room, column in zip(self._columns.more(len(part_of)), columns, strict=True):
            room[:] = column
        self._parts.append(found.parts)
        self._parts_count += len(found.parts)

    def rows(self) -> OutcomeRows:
        sequences, due, part_of, hashes = self._columns.columns()
        return OutcomeRows(sequences, due, np.concatenate(self._parts), part_of, hashes)


def _decode(segment: Segment, hour: int, batches: list[Batch], part: range | None) -> OutcomeRows:
    if any(batch.outcome.hour != hour for batch in batches):
        raise DamagedData(segment.path, 0, "it holds outcomes of another hour")
    found = decode_outcomes(batches)
    return found if part is None else take_outcomes(found, rows_of_part(found.sequences, part))


class HourRows(NamedTuple):
    """Rows by rising hour, and in each by sequence."""

    rows: ScheduleRows
    hours: Int64s

    def counts(self) -> dict[int, int]:
        if not len(self.hours):
            return {}
        firsts = np.concatenate(([0], np.flatnonzero(self.hours[1:] != self.hours[:-1]) + 1))
        counts = np.diff(firsts, append=len(self.hours))
        return dict(zip(self.hours[firsts].tolist(), counts.tolist(), strict=True))

    def of_hour(self, hour: int, part: range | None = None) -> ScheduleRows:
        first, until = np.searchsorted(self.hours, [hour, hour + 1])
        rows = self.rows.take(slice(int(first), int(until)))
        return rows if part is None else rows.take(rows_of_part(rows.sequence, part))


NO_HOURS = HourRows(RowCollector().rows(), NO_INT64S)


@dataclass(frozen=True, slots=True)
class MessageTail:
    """The message log, as far as it is kept.

    ``unfiled`` are its rows from the replay offset on, ``accepted`` those below it: the schedule logs must hold the
    same. ``first`` is the lowest sequence that the log has, ``faults`` say where its groups do not follow each other.
    """

    unfiled: HourRows = NO_HOURS
    accepted: HourRows = NO_HOURS
    last_appended_at_ms: int = 0
    first: int = 0
    faults: tuple[str, ...] = ()
    given_up: frozenset[str] = frozenset()  # The ids of everything that operators gave up.
    decisions: LoggedDecisions = NO_DECISIONS
    filed_hours: frozenset[int] = frozenset()  # The hours of the rows below the replay offset, also of those not kept.


def read_tail(
    disk: Disk,
    snapshot: ScheduleSnapshot,
    torn: list[TornTail] | None = None,
    hours: Container[int] | None = None,
    *,
    filed: bool = True,
    unfiled: bool = True,
    damage: list[DamagedData] | None = None,
) -> MessageTail:
    """Read the message log, columns only: rows that are not filed, decisions, and filed rows as far as the log is kept.

    Filed rows are read of some ``hours``, None for all; unless they are ``filed``, only their hours are told and their
    bodies are not read. Rows that are not filed are left out unless ``unfiled``. ``damage`` receives what does not
    check on either side of the replay offset; what stands before it is returned.

    Raises:
        LogMoved: its segments are gone: take a new snapshot.
        DamagedData: a durable group does not check, and nobody gave ``damage``.
    """
    reader = _TailReader(disk, snapshot, hours, filed=filed, unfiled=unfiled)
    for end in (snapshot.replay_offset, snapshot.message_stop):
        try:
            reader.read_to(end, [] if torn is None else torn)
        except DamagedData as error:
            if damage is None:
                raise
            damage.append(error)
    return reader.tail()


class _TailReader:
    def __init__(
        self, disk: Disk, snapshot: ScheduleSnapshot, hours: Container[int] | None, *, filed: bool, unfiled: bool
    ) -> None:
        self._disk, self._snapshot, self._hours, self._filed, self._unfiled = disk, snapshot, hours, filed, unfiled
        # Where the next group begins, and the checksum of the one before it.
        self._end = min([snapshot.replay_offset, *segment_bases(disk, snapshot.place)[:1]])
        self._crc32c: int | None = None
        # An upper bound of the rows, by the log's bytes and by the sequences that were given.
        rows = min(snapshot.word.next_sequence, (snapshot.replay_offset - self._end) // ROW_BYTES_MIN)
        self._tail, self._accepted = RowCollector(), RowCollector(rows_expected=rows)
        word = snapshot.word
        said = word.next_sequence, word.epoch, snapshot.appended_at_ms, word.replay_crc32c
        self._check = Follow(Checked(snapshot.replay_offset, *said))
        self._given_up: set[str] = set()
        self._decisions = DecisionCollector()
        self._filed_hours: set[int] = set()

    def read_to(self, stop: int, torn: list[TornTail]) -> None:
        """Read the groups up to an offset; behind damage the next call goes on there."""
        snapshot = self._snapshot
        if self._end >= stop:
            return
        # Where only some rows are wanted, the bodies of the others are not read.
        whole = self._filed and self._hours is None
        bounds = self._end, snapshot.replay_offset, stop
        try:
            for group in read_known(self._disk, snapshot.place, bounds, torn, self._crc32c, whole=whole):
                rows = self._take(group) if group.header.kind == GroupKind.DATA else None
                self._follow(group, rows)
                self._decisions.take(group)
                self._end, self._crc32c = group.end, group.header.header_crc32c
        except (DamagedData, BatchMalformed) as error:
            self._end, self._crc32c = stop, None
            if isinstance(error, BatchMalformed):
                raise DamagedData(snapshot.place.folder, 0, error.message) from error
            raise

    def tail(self) -> MessageTail:
        self._check.end()
        accepted = _by_hour(self._accepted.rows())
        return MessageTail(
            unfiled=_by_hour(self._tail.rows()),
            accepted=accepted,
            last_appended_at_ms=self._check.last_appended_at_ms,
            first=self._check.first,
            faults=tuple(self._check.faults),
            given_up=frozenset(self._given_up),
            decisions=self._decisions.decisions(),
            filed_hours=frozenset(self._filed_hours or accepted.counts()),
        )

    def _take(self, group: Group) -> int:
        sequence, appended_at_ms = group.header.base_sequence, group.header.appended_at_ms
        below = group.header.offset < self._snapshot.replay_offset
        collector = self._accepted if below else self._tail
        for offset, batch in group.batches():
            if batch.kind == BatchKind.PRODUCER:
                if below and not self._filed:
                    self._filed_hours |= _hours_of(batch, appended_at_ms)
                elif self._unfiled if not below else self._hours is None or _is_of(batch, appended_at_ms, self._hours):
                    batch = whole_batch(group, offset, batch)
                    collector.add_message_batch(batch, offset, sequence, appended_at_ms)
                sequence += batch.count
        return sequence - group.header.base_sequence

    def _follow(self, group: Group, rows: int | None) -> None:
        header, records = group.header, list[object]()
        if header.kind == GroupKind.CONTROL:
            records = [record for _, batch in group.batches() for record in decode_sound(batch)]
        self._given_up |= {each.id for each in records if isinstance(each, OperatorWord) and each.action == "drop"}
        self._check.take(
            followed(group),
            rows,
            may_fall=any(isinstance(each, LogTime) for each in records),
            unused=[each.sequences for each in records if isinstance(each, SkippedSequences)],
        )


def _is_of(batch: Batch, appended_at_ms: int, hours: Container[int]) -> bool:
    first, last = _hour_range(batch, appended_at_ms)
    if last - first <= FEW_HOURS and not any(hour in hours for hour in range(first, last + 1)):
        return False
    return first == last or any(hour in hours for hour in _hours_of(batch, appended_at_ms))


def _hours_of(batch: Batch, appended_at_ms: int) -> set[int]:
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
    unfiled: HourRows,
    hour: int,
    collector: RowCollector | None = None,
    sorter: Sorter | None = None,
) -> ScheduleRows:
    """Read the schedule side of an hour, by rising sequence; only the rows that an empty ``collector`` takes.

    ``unfiled`` are the rows of the message log that are not filed; ``sorter`` sorts the other logs of the hour, too.
    Raises LogMoved when the schedule log is gone, DamagedData when it does not check or is shorter than the checkpoint
    says.
    """
    rows = snapshot.counted(hour)
    collector = collector or RowCollector()
    part = collector.part
    if part is not None:
        rows = min(rows, len(range(part.start, min(part.stop, part.start + rows))))
    collector.expect(rows)
    collect_hour(disk, snapshot, hour, collector)
    collector.add_unfiled(unfiled.of_hour(hour, part))
    return in_order(collector.rows(), sorter or Sorter())


def part_hour(disk: Disk, snapshot: ScheduleSnapshot, unfiled: HourRows, hour: int, rows_max: int) -> list[range]:
    """Split all sequences into parts, rising, with about ``rows_max`` rows of an hour each, found from a sample of
    rows.
    """
    sampler = SequenceSampler(SAMPLE_ROWS)
    collect_hour(disk, snapshot, hour, sampler)
    late = unfiled.of_hour(hour).sequence[::SAMPLE_ROWS]
    sample = np.sort(np.concatenate((*sampler.sequences, late)))
    bounds = np.unique(sample[rows_max // SAMPLE_ROWS :: rows_max // SAMPLE_ROWS]).tolist()
    return [range(first, until) for first, until in pairwise((0, *bounds, SEQUENCES_MAX))]


def read_body(disk: Disk, snapshot: ScheduleSnapshot, hour: int, location: int) -> bytes:
    """Read the body of one row that `read_hour` returned; LogMoved when its file is gone, BatchMalformed if damaged."""
    in_schedule_log, offset, row = locate(location)
    path, position = schedule_path(snapshot.directory.path, hour), offset + FILE_HEADER_BYTES
    if not in_schedule_log:
        path, position = place_of(disk, snapshot.place, offset)
    if not disk.exists(path):
        raise LogMoved(f"{path} is gone")
    batch = read_batch(disk, path, position)
    starts, ends = batch.region(ColumnId.BODY_END)
    return bytes(batch.heap[int(starts[row]) : int(ends[row])])


def read_batch(disk: Disk, path: str, position: int) -> Batch:
    """Read the batch that begins at a byte of a file, checked. Raises BatchMalformed when none does."""
    with closing(open_named(disk, path)) as file:
        head = file.pread(12, position)
        batch = parse(file.pread(int.from_bytes(head[8:], "little"), position))
    batch.verify()
    return batch


def place_of(disk: Disk, place: LogPlace, offset: int) -> tuple[str, int]:
    """The file of a log that holds an offset, and the byte in it; LogMoved when the log begins behind it."""
    base = max((base for base in segment_bases(disk, place) if base <= offset), default=None)
    if base is None:
        raise LogMoved(f"{place.folder} begins behind offset {offset}")
    return f"{place.folder}/{segment_name(base)}", offset - base + FILE_HEADER_BYTES


class PartOfHour(NamedTuple):
    """A part of a file in which rows of an hour are filed; ``last_crc32c`` is of its last group, where it is known."""

    path: str
    begin: int
    end: int
    last_crc32c: int | None = None


def hour_parts(disk: Disk, snapshot: ScheduleSnapshot, hour: int) -> Iterator[PartOfHour]:
    """Where rows of an hour are filed by the checkpoint: its schedule log, and beside it while that was damaged."""
    filed, beside = snapshot.hours.get(hour), snapshot.word.beside.get(hour)
    path, length = schedule_path(snapshot.directory.path, hour), 0 if filed is None else filed.length
    if filed is not None and length:
        yield PartOfHour(path, 0, length, filed.last_crc32c)
    if beside is not None and beside.length:
        other = beside_path(snapshot.directory.path, hour)
        if disk.exists(other):
            yield PartOfHour(other, 0, beside.length, beside.last_crc32c)
        else:
            # Its rows were appended to the schedule log since, group by group, behind what the table counts.
            yield PartOfHour(path, length, length + beside.length)


def beside_path(folder: str, hour: int) -> str:
    """Path of the file that takes rows of an hour while its schedule log is damaged."""
    return f"{folder}/quarantine/{hour_name(hour)}{BESIDE_SUFFIX}"


def in_order(rows: ScheduleRows, sorter: Sorter) -> ScheduleRows:
    """The same rows by rising sequence."""
    if rises(rows.sequence):
        return rows
    own = rows.deliver_at_ms, rows.location, rows.hashes(), rows.appended_at_ms, rows.subject, rows.body_bytes
    sequence, (due, location, hashes, appended, subject, body_bytes) = sorter.sort(rows.sequence, own)
    columns = sequence, due, appended, subject, body_bytes, location
    return ScheduleRows(*columns, rows.subjects, hashes, rows.left_out, rows.expiring, rows.labelled)


def collect_hour(disk: Disk, snapshot: ScheduleSnapshot, hour: int, collector: Collector) -> None:
    """Give a collector the rows of an hour that are filed. Raises as `read_hour` does."""
    for part in hour_parts(disk, snapshot, hour):
        segment = open_hour(disk, part.path, FileKind.SCHEDULE, snapshot.directory.log_id, hour)
        if segment is None:
            raise LogMoved(f"{part.path} is gone")
        try:
            for batch, offset in _filed_batches(segment, part, collector):
                if batch.schedule.hour != hour:
                    raise DamagedData(part.path, 0, "it holds messages of another hour")
                if batch.schedule.source_end <= snapshot.replay_offset:
                    collector.add_schedule_batch(batch, offset)
        finally:
            segment.close()


def _filed_batches(segment: Segment, part: PartOfHour, collector: Collector) -> Iterator[tuple[Batch, int]]:
    groups = skim(segment, part.end, 0) if not part.begin else read_groups(segment, part.begin, part.end, [])
    end, crc = part.begin, 0
    for group in groups:
        end, crc = group.end, group.header.header_crc32c
        for offset, batch in _wanted_batches(group, collector):
            if batch.kind == BatchKind.SCHEDULE:
                yield batch, offset
    if part.last_crc32c is None:
        return  # The table counts these rows, and an hour that lacks some of them is found by that.
    position = segment.position(end)
    if end < part.end:
        raise DamagedData(part.path, position, f"the checkpoint says that {part.end - end} more bytes are there")
    if crc != part.last_crc32c:
        raise DamagedData(part.path, position, "its last group is another one than the checkpoint counts")


def _wanted_batches(group: Group, collector: Collector) -> Iterator[tuple[int, Batch]]:
    """The batches of a group; those of a large one without items, when the collector does without."""
    if isinstance(group, StoredGroup) and collector.whole:
        yield from group.whole_batches()
        return
    for offset, batch in group.batches():
        # The labels of rows are hashed, and nothing says what they are but the batch as a whole.
        labelled = HAVE_LABELS.intersection(batch.offsets)
        yield offset, whole_batch(group, offset, batch) if labelled else batch
