"""Verify file: checks one file of a data directory against its checksums: what it holds, and where it does not check.

Invariant: nothing is changed or locked, and a file that a running server writes or removes meanwhile is no damage.
"""

import os
import re
import sys
from array import array
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import numpy as np

from delayd.batch import MOVED_PRODUCER_ID, Batch, BatchKind, ColumnId
from delayd.content import hash_rows
from delayd.disk import Disk, NamedReads, open_named
from delayd.errors import BatchMalformed, CallerError, DamagedData, DataError
from delayd.hours import hour_name, hour_start_ms
from delayd.log.checkpoint import read_checkpoint
from delayd.log.consume import SEGMENT_ENTRIES, ConsumePlace, check_pages
from delayd.log.control import Ended, LogTime, decode_sound
from delayd.log.dispatch import decode_outcomes
from delayd.log.ended import decode_ended
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.key_run import read_run_file
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, UnfinishedFile, open_segment
from delayd.log.segment_index import IndexMaker
from delayd.log.tally import Tallies
from delayd.log.tallying import Tallier
from delayd.reading.directory import open_any
from delayd.reading.groups import TornTail, read_groups
from delayd.reading.schedule import BESIDE_SUFFIX

HOURLY = (FileKind.SCHEDULE, FileKind.DISPATCH)  # Each file belongs to one hour.
ALONE = (*HOURLY, FileKind.INDEX, FileKind.KEYS)  # Each of these files is a log of its own.
KINDS = {
    FileKind.MESSAGE: BatchKind.PRODUCER,
    FileKind.SCHEDULE: BatchKind.SCHEDULE,
    FileKind.DISPATCH: BatchKind.OUTCOME,
    FileKind.REALTIME: BatchKind.DISPATCH,
    FileKind.PULL: BatchKind.PULL,
    FileKind.SEAL: BatchKind.SEAL,
    FileKind.TALLY: BatchKind.TALLY,
    FileKind.INDEX: BatchKind.INDEX,
}


class State(Enum):
    """The result of verifying a file."""

    OK = "ok"
    EMPTY = "empty"  # Nothing was published to it yet.
    TORN = "torn"  # Its end is unfinished, an append under way or cut short by a crash; its server takes it off.
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class FileReport:
    """The contents of one file; ``sentence`` says what is wrong with it, for people.

    ``damage`` and ``position`` say what is damaged and where; ``torn`` is the unfinished end of a file of groups.
    """

    path: str
    kind: str
    state: State
    size_bytes: int = 0
    groups: int = 0
    batches: int = 0
    rows: int = 0
    torn: TornTail | None = None
    damage: str = ""
    position: int = 0
    sentence: str = ""
    tallies: Tallies | None = None  # The tallies of the bytes of a segment of a realtime message log.


@dataclass(frozen=True, slots=True)
class Place:
    """A file to be read, with what its directory says of it; nothing for a file outside of a directory.

    With a ``kind`` of None the header's kind is accepted. ``named`` says whether its name must be the one that its
    header asks for, ``last`` whether no later segment of its log exists, ``durable`` up to which offset a checkpoint
    calls it durable.
    """

    path: str
    kind: FileKind | None = None
    log_id: int | None = None
    named: bool = False
    last: bool = True
    durable: int = 0


class LogSoFar(NamedTuple):
    """The end of a log so far: the base offset of its next file, and the checksum that this file's header must name.

    ``sent`` are the numbers of the batches that were accepted so far, in a message log of a delay server.
    """

    end: int
    crc32c: int
    sent: "Sent"


class Sent:
    """Producers and their numbers of the batches in a message log: none is accepted twice (rule I1)."""

    def __init__(self) -> None:
        self._producers, self._numbers = array("Q"), array("Q")

    def add(self, batch: Batch) -> None:
        """Take the next batch; a batch of moved rows was sent by nobody, and has no number of its own."""
        if batch.producer.producer_id == MOVED_PRODUCER_ID:
            return
        self._producers.append(batch.producer.producer_id)
        self._numbers.append(batch.producer.producer_batch)

    def twice(self) -> tuple[int, int] | None:
        """A producer and a number that occur twice, if any do."""
        pairs = np.zeros(len(self._numbers), [("producer", "<u8"), ("number", "<u8")])
        pairs["producer"], pairs["number"] = self._producers, self._numbers
        pairs.sort()
        again = np.flatnonzero(pairs[1:] == pairs[:-1])
        return tuple(pairs[again[0]].tolist()) if len(again) else None


def damage_report(path: str, kind: str, error: DataError, size_bytes: int = 0) -> FileReport:
    """The report on a file that can't be read at all."""
    return _Found(path, kind, size_bytes).damaged(error)


def damaged_end(report: FileReport, error: DamagedData) -> FileReport:
    """The report on a file whose unfinished end is damage, as the files around it say."""
    found = replace(report, state=State.DAMAGED, damage=error.what, position=error.position, sentence=error.message)
    return replace(found, torn=None, tallies=None)


def verify_file(disk: Disk, place: Place, link: LogSoFar | None = None) -> tuple[FileReport, LogSoFar | None] | None:
    """Read one file; return the report, and the end of its log so far; None when the file is gone."""
    found = _Found(place.path, place.kind.name.lower() if place.kind else "unknown")
    following: LogSoFar | None = None
    try:
        found.size_bytes = _size(disk, place.path)
        if place.kind == FileKind.CHECKPOINT:
            _read_checkpoint(disk, place, found)
        elif place.kind == FileKind.KEYS:
            # A run gets its headers when everything else is written.
            file = open_named(disk, place.path)
            try:
                _read_run(place, file, found)
            finally:
                file.close()
        else:
            segment = _open(disk, place)
            try:
                following = _read(place, segment, link, found)
            finally:
                segment.close()
    except FileNotFoundError:
        return None  # Retention of a running server removed it just now.
    except UnfinishedFile:
        if not place.last or place.durable:
            reason = "a checkpoint counts what is in it" if place.last else "later segments exist"
            error = DamagedData(place.path, 0, f"the file header is missing, and {reason}")
            return found.damaged(error), None
        found.ends(State.TORN, f"the creation of {place.path} did not finish; the server removes it at its next start")
    except DataError as error:
        return found.damaged(error), None
    return found.report(), following


@dataclass(slots=True)
class _Filed:
    """The order of rows in a schedule log: docs/formats/schedule.md defines it."""

    source: tuple[int, int] = (0, 0)  # The range of the message log from which the rows before were gathered.
    above: int = -1  # The highest sequence of the earlier ranges; ``highest`` includes this range.
    highest: int = -1
    last: tuple[int, int] = (0, -1)  # Due instant and sequence of the row before.

    def check_order(self, batch: Batch) -> None:
        """Check that rows of one range rise by due instant and sequence, and that rows of the next range have higher
        sequences.
        """
        part = batch.schedule
        if (part.source_start, part.source_end) != self.source:
            if not self.source[1] <= part.source_start <= part.source_end:
                raise BatchMalformed(
                    f"it is of a range from {part.source_start} on, others were up to {self.source[1]}"
                )
            self.source, self.above, self.last = (part.source_start, part.source_end), self.highest, (0, -1)
        due_ms = np.concatenate(([self.last[0]], batch.int64s(ColumnId.DELIVER_AT_MS)))
        np.maximum(due_ms, hour_start_ms(part.hour), out=due_ms)
        sequences = np.concatenate(([self.last[1]], batch.uint64s(ColumnId.SEQUENCE).astype(np.int64)))
        rises = (due_ms[1:] > due_ms[:-1]) | ((due_ms[1:] == due_ms[:-1]) & (sequences[1:] > sequences[:-1]))
        if not rises.all() or int(sequences[1:].min()) <= self.above:
            raise BatchMalformed(f"its rows are not in filing order behind sequence {self.last[1]}")
        self.last = int(due_ms[-1]), int(sequences[-1])
        self.highest = max(self.highest, int(sequences.max()))


@dataclass(slots=True)
class _Found:
    """The findings in a file so far."""

    path: str
    kind: str
    size_bytes: int = 0
    groups: int = 0
    batches: int = 0
    rows: int = 0
    torn: list[TornTail] = field(default_factory=list)
    appended_at_ms: int = 0
    epoch: int = 0
    filed: _Filed = field(default_factory=_Filed)
    sent: Sent = field(default_factory=Sent)
    state: State = State.OK
    sentence: str = ""
    tallier: Tallier | None = None  # Counts the rows of a realtime message log.

    def ends(self, state: State, sentence: str) -> None:
        """Note that reading ends here, and why."""
        self.state, self.sentence = state, sentence

    def report(self, damage: str = "", position: int = 0) -> FileReport:
        """Make the report."""
        counts = (self.size_bytes, self.groups, self.batches, self.rows)
        torn = self.torn[0] if self.torn else None
        tallies = self.tallier.entries() if self.tallier is not None and not damage else None
        return FileReport(self.path, self.kind, self.state, *counts, torn, damage, position, self.sentence, tallies)

    def damaged(self, error: DataError) -> FileReport:
        """Make the report of what was read before the damage, with the damage."""
        self.ends(State.DAMAGED, error.message)
        if isinstance(error, DamagedData):
            return self.report(error.what, error.position)
        return self.report(error.message)


def _size(disk: Disk, path: str) -> int:
    file = open_named(disk, path)
    try:
        return file.size()
    finally:
        file.close()


def _open(disk: Disk, place: Place) -> Segment:
    if place.kind is None:
        return open_any(disk, place.path)
    return open_segment(disk, place.path, place.kind, place.log_id, write=False)


def _read_checkpoint(disk: Disk, place: Place, found: _Found) -> None:
    if read_checkpoint(disk, os.path.dirname(place.path) or ".", place.log_id) is None:
        found.ends(State.EMPTY, "no checkpoint was published yet")


def _read_run(place: Place, file: NamedReads, found: _Found) -> None:
    """Check the tables and blocks of a run of keys."""
    run = read_run_file(place.path, file, place.log_id)
    if place.named and place.path.rpartition("/")[2] != (name := segment_name(run.number)):
        raise DamagedData(place.path, 0, f"its header says that it is {name}")
    for number in range(run.header.blocks):
        run.block(number)
        found.rows += run.entries_in(number)


def _read(place: Place, segment: Segment, link: LogSoFar | None, found: _Found) -> LogSoFar | None:
    header = segment.header
    kind = FileKind(header.kind)
    found.kind = kind.name.lower()
    if place.named:
        _check_name(place.path, header)
    if link is not None and (header.base_offset, header.previous_crc32c) != (link.end, link.crc32c):
        raise DamagedData(place.path, 0, f"it does not follow the file before it, which ends at {link.end}")
    if link is not None:
        found.sent = link.sent
    if kind == FileKind.KEYS:
        _read_run(place, NamedReads(place.path, segment.file), found)
        return None
    if kind == FileKind.CONSUME:
        return _read_entries(place, segment, found)
    return _read_groups(place, segment, found)


def _check_name(path: str, header: FileHeader) -> None:
    hourly = header.kind in HOURLY
    name = path.rpartition("/")[2]
    suffix = BESIDE_SUFFIX if name.endswith(BESIDE_SUFFIX) else ".log"
    expected = f"{hour_name(header.number)}{suffix}" if hourly else segment_name(header.base_offset)
    if name != expected and not (header.kind == FileKind.DISPATCH and _is_beside(path, header.number)):
        raise DamagedData(path, 0, f"its header says that it is {expected}")


def _is_beside(path: str, hour: int) -> bool:
    """Whether a file is the second or a later one beside a damaged dispatch log of this hour."""
    return re.search(rf"/quarantine/{hour_name(hour)}\.[0-9]+\.log$", path) is not None


def _read_groups(place: Place, segment: Segment, found: _Found) -> LogSoFar | None:
    kind = segment.header.kind
    hourly = kind in HOURLY
    end = begin = 0 if hourly else segment.header.base_offset
    crc = segment.header.previous_crc32c
    found.tallier = Tallier(begin) if segment.header.kind == FileKind.REALTIME else None
    for group in read_groups(
        segment=segment,
        start=begin,
        stop=sys.maxsize,
        torn=found.torn,
        previous_crc32c=crc,
        durable=place.durable,
        last=place.last,
    ):
        end, crc = group.end, group.header.header_crc32c
        _check_group(segment, group, found)
    if kind == FileKind.INDEX and place.named:
        _check_index(segment, found)
    if end < place.durable:
        position = segment.position(end)
        raise DamagedData(place.path, position, f"the checkpoint says that {place.durable - end} more bytes are there")
    if (twice := found.sent.twice()) is not None:
        what = f"batch {twice[1]} of producer {twice[0]:016x} was accepted twice"
        raise DamagedData(place.path, segment.position(begin), what)
    for tail in found.torn:
        found.ends(State.TORN, tail.sentence)
    return None if kind in ALONE else LogSoFar(end, crc, found.sent)


def _check_index(file: Segment, found: _Found) -> None:
    """Check that an index says the same as its segment: the segment is read, and indexed once more."""
    header = file.header
    folder = file.path.rpartition("/")[0].rpartition("/")[0]
    place = LogPlace(f"{folder}/message", FileKind.REALTIME, header.log_id)
    path = f"{place.folder}/{segment_name(header.base_offset)}"
    try:
        segment = open_segment(file.disk, path, place.kind, place.log_id, write=False)
    except FileNotFoundError:
        found.ends(State.OK, f"retention has removed the segment of {file.path}; its server removes it, too")
        return
    except (UnfinishedFile, DataError):
        return  # The segment has a report of its own.
    try:
        maker = IndexMaker()
        scan = segment.scan(header.base_offset, segment.header.previous_crc32c)
        for group in scan:
            maker.take(group)
    except DataError:
        return
    finally:
        segment.close()
    if scan.reason or found.torn:
        return
    expected = [bytes(batch) for group in maker.groups(0, 0) for batch in group.batches]
    stands = [bytes(batch.buffer) for group in file.scan(header.base_offset, None) for _, batch in group.batches()]
    if (header.number, header.previous_crc32c) != (scan.offset, scan.crc32c) or expected != stands:
        raise DamagedData(
            file.path, FILE_HEADER_BYTES, "it is not the index of its segment; remove it, it is made anew"
        )


def _sets_back(group: CommitGroup) -> bool:
    """Whether a group has the record that an operator has set the log's time back (rule T4)."""
    if group.header.kind != GroupKind.CONTROL:
        return False
    try:
        return any(isinstance(record, LogTime) for _, batch in group.batches() for record in decode_sound(batch))
    except BatchMalformed:
        return False


def _check_group(segment: Segment, group: CommitGroup, found: _Found) -> None:
    header = group.header
    # Replay and hours depend on the instants of a delay server's message log. A realtime server whose clock was set
    # back may stamp earlier after a start, if that start reads no message again; nothing depends on it.
    falls = header.appended_at_ms < found.appended_at_ms and not _sets_back(group)
    if falls and segment.header.kind is FileKind.MESSAGE:
        what = f"its instant {header.appended_at_ms} is before that of the group before it"
        raise DamagedData(segment.path, segment.position(header.offset), what)
    if header.epoch < found.epoch:
        what = f"it is of epoch {header.epoch}, the group before it of {found.epoch}"
        raise DamagedData(segment.path, segment.position(header.offset), what)
    found.appended_at_ms, found.epoch = header.appended_at_ms, header.epoch
    found.groups += 1
    expected = BatchKind.CONTROL if header.kind == GroupKind.CONTROL else KINDS[FileKind(segment.header.kind)]
    position, rows = segment.position(header.offset), 0
    try:
        for offset, batch in group.batches():
            position = segment.position(offset)
            # The group's checksum proves that these bytes were written; the batch's own proves that its maker made
            # them.
            batch.verified = False
            batch.verify()
            # Decisions about rows may stand before the rows of their group.
            decides = batch.kind is BatchKind.CONTROL and expected is BatchKind.PRODUCER and not rows
            if batch.kind != expected and not decides:
                raise BatchMalformed(f"a batch of kind {batch.kind.name} has no place there")
            if batch.kind is BatchKind.CONTROL:
                _check_ended(batch)
            rows += batch.count
            if batch.kind == BatchKind.PRODUCER:
                found.sent.add(batch)
            if batch.kind == BatchKind.SCHEDULE:
                found.filed.check_order(batch)
            if batch.kind == BatchKind.SCHEDULE:
                _check_content(batch)
            if batch.kind == BatchKind.OUTCOME:
                decode_outcomes([batch])
            found.batches += 1
            found.rows += 0 if batch.kind == BatchKind.CONTROL else batch.count
        if found.tallier is not None:
            # All batches of a group at once, because many of them have one row.
            found.tallier.take(group)
            for first in found.tallier.differing[:1]:
                position = segment.position(first.offset)
                raise BatchMalformed(f"row {first.row} has another content hash than its content gives")
    except CallerError as error:
        raise DamagedData(segment.path, position, error.message) from error


def _check_ended(batch: Batch) -> None:
    """Check the decisions about rows in a CONTROL batch."""
    for record in decode_sound(batch):
        if isinstance(record, Ended):
            decode_ended(record.rows)


def _check_content(batch: Batch) -> None:
    """Check that headers and bodies that are there have the hash that is stored beside them (rule S6)."""
    if ColumnId.CONTENT_HASH not in batch:
        return
    starts, ends = batch.region(ColumnId.BODY_END)
    there = ends > starts
    if ColumnId.HEADERS_END in batch:
        starts, ends = batch.region(ColumnId.HEADERS_END)
        there |= ends > starts
    # A row that was handed over before it was filed has neither; an empty body can't be told from one that is left out.
    differs = np.flatnonzero(there & (hash_rows(batch) != batch.content_hashes()))
    if len(differs):
        raise BatchMalformed(f"row {differs[0]} has another content hash than its content gives")


def _read_entries(place: Place, segment: Segment, found: _Found) -> LogSoFar:
    """Check the full pages of a consume log by their checksums; the checksum of the last page is in its server's
    state.
    """
    header = segment.header
    consume = ConsumePlace(os.path.dirname(place.path), header.log_id, header.number)
    found.rows, rest = check_pages(consume, segment, header.base_offset)
    if not place.last and (found.rows, rest) != (SEGMENT_ENTRIES, 0):
        what = f"it has {found.rows} entries, and a later segment exists"
        raise DamagedData(place.path, segment.file.size(), what)
    if rest:
        found.ends(State.TORN, f"{place.path} ends within an entry; the server cuts it at its next checkpoint")
    return LogSoFar(header.base_offset + found.rows, 0, found.sent)
