"""Verify: checks every byte of a data directory's files, or of single files, against its checksums.

Invariant: damage in one file is reported with path and position, and does not keep the others from being read. Nothing
is changed or locked, and a file that a running server writes or removes meanwhile is no damage.
"""

import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from delayd.batch.batch import Batch
from delayd.batch.columns import MOVED_PRODUCER_ID, BatchKind, ColumnId
from delayd.batch.content import hash_rows
from delayd.errors import BadArgument, BatchMalformed, CallerError, DamagedData, DamagedValue, DataError
from delayd.hours import hour_name, hour_start_ms
from delayd.log.checkpoint import NAME as CHECKPOINT
from delayd.log.checkpoint import read_checkpoint
from delayd.log.consume import SEGMENT_ENTRIES, ConsumePlace, check_pages
from delayd.log.control import NO_LIMITS, Ended, LogTime, QuotaLimits, decode_limits, decode_sound, quota_key
from delayd.log.group import CommitGroup, GroupKind
from delayd.log.hour import decode_ended, decode_outcomes, dispatch_path, schedule_path
from delayd.log.key_run import FOLDER as KEYS_FOLDER
from delayd.log.key_run import STATE_KEY as KEYS_KEY
from delayd.log.key_run import KnownRuns, read_run_file, run_path
from delayd.log.log import segment_name
from delayd.log.segment import FILE_HEADER_BYTES, FileHeader, FileKind, Segment, UnfinishedFile, open_segment
from delayd.log.tail import decided_behind, named_behind
from delayd.machine.disk import Disk, NamedReads, RealDisk, open_named
from delayd.machine.identity import MARKER
from delayd.machine.state import LMDB_FILE, Pair, check_pairs, check_stored, read_pairs, read_state_file
from delayd.reading.consumption import wrong_entries
from delayd.reading.files.directory import (
    MESSAGE_KINDS,
    Directory,
    Role,
    log_names,
    missing_files,
    need_log_file,
    open_any,
    published_ends,
    server_runs,
    take_snapshot,
)
from delayd.reading.files.origins import BESIDE_SUFFIX, beside_path
from delayd.reading.files.stored_content import differing_rows
from delayd.reading.files.stored_groups import LogMoved, TornTail, file_size, read_groups
from delayd.reading.findings import read_acceptances
from delayd.reading.proofs import read_proof_files

HOURLY = (FileKind.SCHEDULE, FileKind.DISPATCH)  # Each file belongs to one hour.
ALONE = (*HOURLY, FileKind.KEYS)  # Each of these files is a log of its own.
KINDS = {
    FileKind.MESSAGE: BatchKind.PRODUCER,
    FileKind.SCHEDULE: BatchKind.SCHEDULE,
    FileKind.DISPATCH: BatchKind.OUTCOME,
    FileKind.REALTIME: BatchKind.DISPATCH,
    FileKind.PULL: BatchKind.PULL,
    FileKind.SEAL: BatchKind.SEAL,
}
DIFFERS = "row {} has another content hash than its content gives"
STATE_KIND = "state"
ACCEPTANCE_KIND, PROOF_KIND = "acceptance", "proof"
LOGS = {
    Role.DELAY: {
        "message": FileKind.MESSAGE,
        "schedule": FileKind.SCHEDULE,
        "dispatch": FileKind.DISPATCH,
        "quarantine": FileKind.DISPATCH,
        "seal": FileKind.SEAL,
        KEYS_FOLDER: FileKind.KEYS,
    },
    Role.REALTIME: {
        "message": FileKind.REALTIME,
        "consume": FileKind.CONSUME,
        "pull": FileKind.PULL,
    },
}
# The other folders hold a folder for each day or subject.
ONE_FOLDER = ("message", "pull", "seal", "quarantine", KEYS_FOLDER)
INNER_LOGS = ("schedule", "dispatch", "consume")
Progress = Callable[[int, int], None]  # Files read, files in all.


class FileState(Enum):
    """The result of verifying a file."""

    OK = "ok"
    EMPTY = "empty"  # Nothing was published to it yet.
    TORN = "torn"  # Its end is unfinished, an append under way or cut short by a crash; its server takes it off.
    DAMAGED = "damaged"


@dataclass(slots=True)
class FileReport:
    """The contents of one file; ``sentence`` says what is wrong with it, for people.

    ``damage`` and ``position`` say what is damaged and where; ``torn`` is the unfinished end of a file of groups.
    """

    path: str
    kind: str
    state: FileState = FileState.OK
    size_bytes: int = 0
    groups: int = 0
    batches: int = 0
    rows: int = 0
    torn: TornTail | None = None
    damage: str = ""
    position: int = 0
    sentence: str = ""

    def ends(self, state: FileState, sentence: str) -> None:
        """Note how the file ends."""
        self.state, self.sentence = state, sentence

    def damaged(self, error: DataError) -> "FileReport":
        """The same report, with damage behind what was read."""
        self.ends(FileState.DAMAGED, error.message)
        self.damage = error.message
        if isinstance(error, DamagedData):
            self.damage, self.position = error.what, error.position
        return self


@dataclass(frozen=True, slots=True)
class FileToVerify:
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
    """The end of a log so far: the base offset of its next file, the checksum that this file's header must name, and in
    a delay server's message log the numbers of the batches that were accepted.
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
    return FileReport(path, kind, size_bytes=size_bytes).damaged(error)


def verify_file(
    disk: Disk, place: FileToVerify, link: LogSoFar | None = None
) -> tuple[FileReport, LogSoFar | None] | None:
    """Read one file; return the report, and the end of its log so far; None when the file is gone."""
    found = _Found(place.path, place.kind.name.lower() if place.kind else "unknown")
    following: LogSoFar | None = None
    try:
        found.size_bytes = _size(disk, place.path)
        if place.kind == FileKind.CHECKPOINT:
            _read_checkpoint(disk, place, found)
        elif place.kind == FileKind.KEYS:
            # A run gets its headers when everything else is written.
            with closing(open_named(disk, place.path)) as file:
                _read_run(place, file, found)
        else:
            with closing(_open(disk, place)) as segment:
                following = _read(place, segment, link, found)
    except FileNotFoundError:
        return None  # Retention of a running server removed it just now.
    except UnfinishedFile:
        if not place.last or place.durable:
            reason = "a checkpoint counts what is in it" if place.last else "later segments exist"
            error = DamagedData(place.path, 0, f"the file header is missing, and {reason}")
            return found.damaged(error), None
        found.ends(
            FileState.TORN, f"the creation of {place.path} did not finish; the server removes it at its next start"
        )
    except DataError as error:
        return found.damaged(error), None
    return found, following


@dataclass(slots=True)
class _PlacesInFile:
    """The order of rows in a schedule log: docs/formats/schedule.md defines it."""

    source: tuple[int, int] = (0, 0)  # The range of the message log from which the rows before were gathered.
    above: int = -1  # The highest sequence of the earlier ranges; ``highest`` includes this range.
    highest: int = -1
    last: tuple[int, int] = (0, -1)  # Due instant and sequence of the row before.

    def check_order(self, batch: Batch) -> None:
        """Rows of one range rise by due instant and sequence; rows of the next range have higher sequences."""
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
class _Found(FileReport):
    """The report on a file that is being read, and what its next group is compared with."""

    appended_at_ms: int = 0
    epoch: int = 0
    filed: _PlacesInFile = field(default_factory=_PlacesInFile)
    sent: Sent = field(default_factory=Sent)


def _size(disk: Disk, path: str) -> int:
    with closing(open_named(disk, path)) as file:
        return file.size()


def _open(disk: Disk, place: FileToVerify) -> Segment:
    if place.kind is None:
        return open_any(disk, place.path)
    return open_segment(disk, place.path, place.kind, place.log_id, write=False)


def _read_checkpoint(disk: Disk, place: FileToVerify, found: _Found) -> None:
    if read_checkpoint(disk, os.path.dirname(place.path) or ".", place.log_id) is None:
        found.ends(FileState.EMPTY, "no checkpoint was published yet")


def _read_run(place: FileToVerify, file: NamedReads, found: _Found) -> None:
    run = read_run_file(place.path, file, place.log_id)
    if place.named and place.path.rpartition("/")[2] != (name := segment_name(run.number)):
        raise DamagedData(place.path, 0, f"its header says that it is {name}")
    for number in range(run.header.blocks):
        run.block(number)
        found.rows += run.entries_in(number)


def _read(place: FileToVerify, segment: Segment, link: LogSoFar | None, found: _Found) -> LogSoFar | None:
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


def _read_groups(place: FileToVerify, segment: Segment, found: _Found) -> LogSoFar | None:
    kind = segment.header.kind
    hourly = kind in HOURLY
    end = begin = 0 if hourly else segment.header.base_offset
    crc = segment.header.previous_crc32c
    torn: list[TornTail] = []
    for group in read_groups(
        segment=segment,
        start=begin,
        stop=sys.maxsize,
        torn=torn,
        previous_crc32c=crc,
        durable=place.durable,
        last=place.last,
    ):
        end, crc = group.end, group.header.header_crc32c
        _check_group(segment, group, found)
    if end < place.durable:
        position = segment.position(end)
        raise DamagedData(place.path, position, f"the checkpoint says that {place.durable - end} more bytes are there")
    if (twice := found.sent.twice()) is not None:
        what = f"batch {twice[1]} of producer {twice[0]:016x} was accepted twice"
        raise DamagedData(place.path, segment.position(begin), what)
    if torn:
        found.torn = torn[0]
        found.ends(FileState.TORN, found.torn.sentence)
    return None if kind in ALONE else LogSoFar(end, crc, found.sent)


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
    position, rows, stored = segment.position(header.offset), 0, list[tuple[int, Batch]]()
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
                _check_content(batch)
            if batch.kind == BatchKind.OUTCOME:
                decode_outcomes([batch])
            if batch.kind == BatchKind.DISPATCH:
                stored.append((offset - header.offset, batch))
            found.batches += 1
            found.rows += 0 if batch.kind == BatchKind.CONTROL else batch.count
        for begin, row in sorted(differing_rows(group.buffer, stored))[:1]:
            position = segment.position(header.offset) + begin
            raise BatchMalformed(DIFFERS.format(row))
    except CallerError as error:
        raise DamagedData(segment.path, position, error.message) from error


def _check_ended(batch: Batch) -> None:
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
        raise BatchMalformed(DIFFERS.format(differs[0]))


def _read_entries(place: FileToVerify, segment: Segment, found: _Found) -> LogSoFar:
    """Check the full pages of a consume log; the checksum of its last page is in its server's state."""
    header = segment.header
    consume = ConsumePlace(os.path.dirname(place.path), header.log_id, header.number)
    found.rows, rest = check_pages(consume, segment, header.base_offset)
    if not place.last and (found.rows, rest) != (SEGMENT_ENTRIES, 0):
        what = f"it has {found.rows} entries, and a later segment exists"
        raise DamagedData(place.path, segment.file.size(), what)
    if rest:
        found.ends(FileState.TORN, f"{place.path} ends within an entry; the server cuts it at its next checkpoint")
    return LogSoFar(header.base_offset + found.rows, 0, found.sent)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All files, by path or in the order in which they were named."""

    files: tuple[FileReport, ...]

    @property
    def damaged(self) -> tuple[FileReport, ...]:
        return tuple(file for file in self.files if file.state is FileState.DAMAGED)

    @property
    def torn(self) -> tuple[TornTail, ...]:
        """Tails of appends that are under way or that a crash cut short: recovery cuts them off."""
        return tuple(file.torn for file in self.files if file.torn is not None)

    @property
    def sound(self) -> bool:
        return not self.damaged


class _ServerFolder(NamedTuple):
    """A server's directory; ``log_id`` is None when no file in it tells.

    ``durable`` holds, by path, the offsets up to which the checkpoint file says that a log was fsynced (rule L5).
    """

    path: str
    role: Role
    log_id: int | None
    durable: dict[str, int]

    @property
    def logs(self) -> dict[str, FileKind]:
        return LOGS[self.role]


def verify_directory(data: str, *, progress: Progress | None = None, disk: Disk | None = None) -> VerifyReport:
    """Read every file of the servers in ``data``, or of one server, live, stopped or copied; nothing is changed.

    ``progress`` is called with the files read and all files. Raises BadArgument when there is nothing to verify.
    """
    disk = disk or RealDisk()
    places: list[FileToVerify] = []
    gone: list[FileReport] = []
    states: list[FileReport] = []
    besides: list[FileReport] = []
    homes: list[_ServerFolder] = []
    for path in _home_paths(disk, data):
        home = _read_home(disk, path)
        homes.append(home)
        own = list(_places(disk, home))
        places += own
        kinds = {place.kind for place in own}
        later = {kind for log, kind in home.logs.items() if log in INNER_LOGS}
        if home.logs["message"] not in kinds and kinds & later:
            error = DamagedData(f"{path}/message", 0, "the message log is gone, other logs are there")
            gone.append(damage_report(error.path, home.logs["message"].name.lower(), error))
        besides += (*_missing(disk, home), *_acceptances(disk, home), *_proofs(disk, home))
        states += _state(disk, path)
    if not places:
        raise BadArgument(f"{data} holds no messages of delayd; give the directory that `delayd up --data` was given")
    states += _state(disk, f"{data.rstrip('/')}/meta")
    files = list(_verify(disk, places, progress, chained=True))
    _with_wrong_entries(disk, homes, files)
    _with_proofs(disk, homes, files)
    return VerifyReport((*gone, *files, *besides, *states))


def _with_wrong_entries(disk: Disk, homes: Sequence[_ServerFolder], files: Sequence[FileReport]) -> None:
    """Note the entries of consume logs that differ from the message logs that they are derived from."""
    reports = {file.path: file for file in files if file.state is not FileState.DAMAGED}
    for home in homes:
        if home.role is Role.REALTIME and home.log_id is not None:
            for error in wrong_entries(disk, Directory(home.path, home.role, home.log_id)):
                if error.path in reports:
                    reports[error.path].damaged(error)


def _with_proofs(disk: Disk, homes: Iterable[_ServerFolder], files: Sequence[FileReport]) -> None:
    """Note the end of a message log as damage where a later fact names a message behind it (rule L5)."""
    by_folder = {f"{os.path.abspath(home.path)}/message": home for home in homes}
    for file in files:
        home = by_folder.get(os.path.dirname(os.path.abspath(file.path)))
        if home is not None and (error := _missing_behind(disk, home, file)) is not None:
            file.damaged(error).torn = None


def _missing_behind(disk: Disk, home: _ServerFolder, file: FileReport) -> DamagedData | None:
    """The damage at a message log's end, which looks like a torn tail or like all of it; None if nothing proves it."""
    folder, _, name = file.path.rpartition("/")
    if home.log_id is None or file.state not in (FileState.OK, FileState.TORN) or name != log_names(disk, folder)[-1]:
        return None
    torn = file.torn or TornTail(file.path, file.size_bytes, 0, "the log ends there")
    try:
        with closing(open_segment(disk, file.path, home.logs["message"], home.log_id, write=False)) as segment:
            end = segment.base_offset + torn.position - FILE_HEADER_BYTES
            why = _why_durable(disk, home, home.log_id, end)
            # A running server may have finished this append, or begun a new file, before it wrote the fact: so the end
            # is read once more, after the fact.
            if why and next(segment.scan(end), None) is None and name == log_names(disk, folder)[-1]:
                return DamagedData(file.path, torn.position, f"{torn.reason}, and {why}")
    except (DataError, UnfinishedFile, FileNotFoundError):
        pass  # A file that does not check or can't be read has a report of its own.
    return None


def _why_durable(disk: Disk, home: _ServerFolder, log_id: int, end: int) -> str:
    if home.role is Role.DELAY:
        return decided_behind(disk, home.path, log_id, end)
    stored = _stored(disk, home.path)
    if stored is None:
        return ""
    file, pairs, _ = stored

    def scan(prefix: bytes, damaged: list[DamagedValue]) -> list[tuple[bytes, bytes]]:
        return check_pairs(file, [pair[:2] for pair in pairs if pair.key.startswith(prefix)], damaged)

    return named_behind(disk, scan, home.path, log_id, end)


def verify_files(paths: Sequence[str], *, progress: Progress | None = None, disk: Disk | None = None) -> VerifyReport:
    """Read single files, logs and checkpoints; what the directory around a file says about it is taken into account.

    ``progress`` is called with the files read and all files. Raises BadArgument when one of them is neither.
    """
    disk = disk or RealDisk()
    for path in paths:
        if os.path.basename(path) != CHECKPOINT:
            need_log_file(disk, path)
    homes: dict[str, _ServerFolder] = {}
    places = [_place_of(disk, path, homes) for path in paths]
    files = list(_verify(disk, places, progress, chained=False))
    _with_proofs(disk, homes.values(), files)
    return VerifyReport(tuple(files))


def stored_quota(directory: Directory, subject: bytes) -> QuotaLimits:
    """The quota of a subject, from the state of a server that does not run; all None when it has none.

    The state of a running server changes under its reader (rule L6).

    Raises:
        DamagedData: the state, or this value, does not check.
        FileNotFoundError: there is no state, for example in a copy that left it out.
    """
    path, wanted = f"{directory.path}/state.lmdb/{LMDB_FILE}", quota_key(subject)
    for pair in read_state_file(path):
        if pair.key == wanted:
            return decode_limits(check_stored(path, *pair))
    return NO_LIMITS


def _verify(
    disk: Disk, places: Sequence[FileToVerify], progress: Progress | None, *, chained: bool
) -> Iterator[FileReport]:
    before, link = "", None
    for done, place in enumerate(places, 1):
        folder = place.path.rpartition("/")[0]
        found = verify_file(disk, place, link if chained and folder == before else None)
        before, link = folder, found[1] if found else None
        if found is not None:
            yield found[0]
        if progress is not None:
            progress(done, len(places))


def _home_paths(disk: Disk, data: str) -> list[str]:
    data = data.rstrip("/") or "/"
    names = disk.list_folder(data)
    if any(log in names for log in (*ONE_FOLDER, *INNER_LOGS)):
        return [data]
    paths = [f"{data}/{name}" for name in names if name.startswith(tuple(Role))]
    # A file of such a name, as an operator's own log may have, is not a server's directory.
    kept = (*ONE_FOLDER, *INNER_LOGS, CHECKPOINT)
    return [path for path in paths if any(disk.exists(f"{path}/{name}") for name in kept)]


def _read_home(disk: Disk, path: str) -> _ServerFolder:
    directory = _identify(disk, path)
    if directory is None:
        return _ServerFolder(path, _role_by_folders(disk, path), None, {})
    return _ServerFolder(path, directory.role, directory.log_id, _published_ends(disk, directory))


def _identify(disk: Disk, path: str) -> Directory | None:
    """Whose directory it is, by the first file that tells: damage must not keep the others from being read."""
    for name in log_names(disk, f"{path}/message"):
        try:
            segment = open_any(disk, f"{path}/message/{name}")
        except (UnfinishedFile, FileNotFoundError, DataError):
            continue
        segment.close()
        role = MESSAGE_KINDS.get(FileKind(segment.header.kind))
        if role is not None:
            return Directory(path, role, segment.header.log_id)
    try:
        log_id = (read_checkpoint(disk, path) or {}).get("log_id")
    except DataError:
        return None
    return Directory(path, _role_by_folders(disk, path), log_id) if isinstance(log_id, int) else None


def _role_by_folders(disk: Disk, path: str) -> Role:
    names = disk.list_folder(path)
    return Role.REALTIME if "consume" in names or "pull" in names else Role.DELAY


def _missing(disk: Disk, home: _ServerFolder) -> Iterator[FileReport]:
    if home.log_id is None:
        return
    directory = Directory(home.path, home.role, home.log_id)
    for error in missing_files(disk, directory):
        yield damage_report(error.path, error.path[len(home.path) + 1 :].partition("/")[0], error)


def _acceptances(disk: Disk, home: _ServerFolder) -> Iterator[FileReport]:
    if home.role is not Role.DELAY or home.log_id is None:
        return
    for each in read_acceptances(disk, Directory(home.path, home.role, home.log_id)):
        if each.error is not None:
            yield damage_report(each.path, ACCEPTANCE_KIND, each.error)
        else:
            yield FileReport(each.path, ACCEPTANCE_KIND, FileState.OK, each.size_bytes, rows=1)


def _proofs(disk: Disk, home: _ServerFolder) -> Iterator[FileReport]:
    if home.role is not Role.DELAY or home.log_id is None:
        return
    for path, size, error in read_proof_files(disk, Directory(home.path, home.role, home.log_id)):
        if error is not None:
            yield damage_report(path, PROOF_KIND, error)
        else:
            yield FileReport(path, PROOF_KIND, FileState.OK, size, rows=1)


def _stored(disk: Disk, path: str) -> tuple[str, list[Pair], int] | None:
    """The file of a stopped server's state, its pairs and its size; None without a state, or while the server runs
    (rule L6).

    Raises DamagedData or NewerFormat when the file is gone or does not check.
    """
    folder = f"{path}/state.lmdb"
    file = f"{folder}/{LMDB_FILE}"
    if not disk.exists(folder) or server_runs(path):
        return None
    if not disk.exists(file):
        raise DamagedData(file, 0, "the file is gone; nothing else says who this server is")
    with closing(open_named(disk, file)) as opened:
        size = opened.size()
        return file, read_pairs(file, opened.pread, size) if size else [], size


def _state(disk: Disk, path: str) -> Iterator[FileReport]:
    try:
        stored = _stored(disk, path)
        if stored is None:
            return
        file, pairs, size = stored
        damaged = False
        for pair in pairs:
            try:
                check_stored(file, *pair)
            except DamagedValue as error:
                damaged = True
                yield damage_report(file, STATE_KIND, error, size)
        if (
            not damaged
            and not pairs
            and any(disk.exists(f"{path}/{name}") for name in (*ONE_FOLDER, CHECKPOINT, MARKER))
        ):
            # A start leaves it so when it found no state and refused to go on.
            yield damage_report(file, STATE_KIND, DamagedData(file, 0, "it holds nothing, and this server has lived"))
        elif not damaged:
            yield FileReport(file, STATE_KIND, FileState.OK, size, rows=len(pairs))
        for pair in pairs:
            # A copy leaves the whole folder out, because a start makes the index again.
            if pair.key == KEYS_KEY and not damaged and disk.exists(f"{path}/{KEYS_FOLDER}"):
                yield from _named_runs(disk, path, KnownRuns.decode(check_stored(file, *pair)))
    except DataError as error:
        yield damage_report(f"{path}/state.lmdb/{LMDB_FILE}", STATE_KIND, error)


def _named_runs(disk: Disk, path: str, known: KnownRuns) -> Iterator[FileReport]:
    for name in known.runs:
        place = run_path(path, name.number)
        what = ""
        try:
            with closing(open_named(disk, place)) as file:
                if read_run_file(place, file, None).name != name:
                    what = "the state names another run"
        except FileNotFoundError:
            what = "the state names this file, and it is gone"
        except UnfinishedFile:
            what = "the state names this file, and its writing did not finish"
        except DataError:
            continue  # The file has a report of its own.
        if what:
            yield damage_report(place, FileKind.KEYS.name.lower(), DamagedData(place, 0, what))


def _published_ends(disk: Disk, directory: Directory) -> dict[str, int]:
    """Up to which offsets the checkpoint calls files durable, by path; nothing when it can't be read."""
    try:
        logs = published_ends(disk, directory)
        # The message log may be damaged, so what the checkpoint says of other files must not depend on it.
        snapshot = take_snapshot(disk, directory, tail=False) if directory.role == Role.DELAY else None
    except DataError:
        return {}
    filed = snapshot.hours if snapshot else {}
    ends = {schedule_path(directory.path, hour): each.length for hour, each in filed.items()}
    if snapshot:
        ends |= {beside_path(directory.path, hour): each.length for hour, each in snapshot.word.beside.items()}
        ends |= {dispatch_path(directory.path, hour): end for hour, end in snapshot.outcome_ends.items()}
    # An hour is sealed when all of its outcomes are durable, and gets none after that.
    sealed = [dispatch_path(directory.path, hour) for hour, each in filed.items() if each.sealed]
    for path in sealed:
        with suppress(LogMoved):  # Retention removed it.
            ends[path] = file_size(disk, path)
    for path, end in logs.items():
        # Segments before the last one are whole in any case.
        if end > 0:
            ends[path] = end + int(path.rpartition("/")[2].removesuffix(".log"))
    return ends


def _places(disk: Disk, home: _ServerFolder) -> Iterator[FileToVerify]:
    if disk.exists(f"{home.path}/{CHECKPOINT}"):
        yield FileToVerify(f"{home.path}/{CHECKPOINT}", FileKind.CHECKPOINT, home.log_id)
    for log, kind in home.logs.items():
        folder = f"{home.path}/{log}"
        folders = [folder] if log in ONE_FOLDER else [f"{folder}/{inner}" for inner in disk.list_folder(folder)]
        for inner in folders:
            names = log_names(disk, inner)
            for name in names:
                path = f"{inner}/{name}"
                own = _kind_of(kind, name)
                last = own in ALONE or name == names[-1]
                yield FileToVerify(path, own, home.log_id, True, last, home.durable.get(path, 0))


def _place_of(disk: Disk, path: str, homes: dict[str, _ServerFolder]) -> FileToVerify:
    """A single file with what the directory around it says, if it lies where a server keeps such a file."""
    full = os.path.abspath(path)
    folder, _, name = full.rpartition("/")
    above, _, log = folder.rpartition("/")
    if name == CHECKPOINT:
        above, log = folder, CHECKPOINT
    elif log not in ONE_FOLDER:
        above, _, log = above.rpartition("/")
    if log not in (*ONE_FOLDER, *INNER_LOGS, CHECKPOINT):
        return FileToVerify(path)
    home = homes.get(above) or _read_home(disk, above)
    homes[above] = home
    if log == CHECKPOINT:
        return FileToVerify(path, FileKind.CHECKPOINT, home.log_id)
    if home.log_id is None or log not in home.logs:
        return FileToVerify(path)
    kind = _kind_of(home.logs[log], name)
    last = kind in ALONE or not any(other > name for other in log_names(disk, folder))
    return FileToVerify(path, kind, home.log_id, True, last, home.durable.get(full, 0))


def _kind_of(kind: FileKind, name: str) -> FileKind:
    """The kind of a file in a folder: files beside damaged ones hold outcomes, or filed rows if the name says so."""
    return FileKind.SCHEDULE if name.endswith(BESIDE_SUFFIX) else kind
