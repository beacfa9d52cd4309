"""Find: messages of a delay server's files by their columns and the bytes of their bodies and headers.

Invariant: files are read in pieces of bounded size, one checkpoint bounds what is read (rule P3), and each message is
found once, from the message log or from its schedule log. Damage hides nothing but what it damages.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch import BatchKind, ColumnId, Int64s
from delayd.disk import Disk
from delayd.errors import BadArgument, BadHeaders, DamagedData
from delayd.headers import decode_headers
from delayd.hours import hour_of_ms, hours_of
from delayd.life import KEY
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FileKind, Segment
from delayd.reading.directory import Directory, Role, find_undamaged
from delayd.reading.dispatch import (
    NO_DECISIONS,
    Decisions,
    as_outcomes,
    open_hour,
    outcome_word,
    read_outcomes,
)
from delayd.reading.groups import (
    LogMoved,
    Memory,
    Salvaged,
    group_ends,
    open_base,
    salvage,
    segment_bases,
    settle,
)
from delayd.reading.matching import Held, Wanted
from delayd.reading.schedule import hour_parts, read_tail
from delayd.reading.word import ScheduleSnapshot, take_snapshot, take_what_is_there, was_removed
from delayd.sequences import find
from delayd.tags import decode_tags

PIECE_BYTES = 8 << 20  # What is read and searched at a time; what it finds is in memory then, too.
TASK_PIECES_MAX = 256  # Small files: some milliseconds of work.
TRIES_MAX = 5  # Files move on once a checkpoint, so a second try nearly always does.
UNKNOWN, PENDING = "unknown", "pending"

UInt64s = NDArray[np.uint64]


class Piece(NamedTuple):
    """A part of a file: the groups between two offsets of its log."""

    directory: Directory
    path: str
    hour: int | None  # None: a part of the message log.
    begin: int
    end: int
    previous_crc32c: int | None
    last_crc32c: int | None  # Of the last group, where the checkpoint says it.
    replay_offset: int
    torn: bool = False  # Whether an append may be under way at its end.


class FoundRow(NamedTuple):
    """One message that was found."""

    log_id: int
    sequence: int
    subject: str
    deliver_at_ms: int
    accepted_at_ms: int  # 0: the schedule log does not say it.
    key: str | None  # Of a later life: the one that its first life had.
    tags: tuple[str, ...]
    body_bytes: int
    state: str  # pending, the name of its outcome or reason, or unknown: the outcomes of its hour can't be read.
    body: bytes | None  # None: not asked for, or an operator gave it up.
    headers: bytes  # As they were sent; empty where a message has none.
    origin_sequence: int  # Of the message that it was at first; 0: it was that itself.


class Found(NamedTuple):
    """What was found in some pieces; ``row_count`` counts rows that are not listed, too."""

    row_count: int
    rows: list[FoundRow]
    damage: list[DamagedData]
    size_bytes: int  # How much was looked at.
    read: tuple[int, int] | None = None  # The sequences of the message log that were looked at.
    moved: tuple[Piece, ...] = ()  # Pieces whose files were gone.


@dataclass(frozen=True, slots=True)
class Search:
    """What is wanted, and how much of it."""

    wanted: Wanted
    ended: bool = False  # Messages that have an outcome, too.
    with_rows: bool = True  # False: only counted.
    with_bodies: bool = True
    known: tuple[tuple[int, int], ...] = ()  # Ranges of sequences that were looked at before.
    decided: Decisions = NO_DECISIONS  # Of the delay server that is searched.


Run = Callable[[Iterator[list[Piece]], Search], Iterator[Found]]
"""Does `find_pieces` for each list of pieces, here or in other processes, and yields the results in order."""


def in_turn(disk: Disk) -> Run:
    """Search one list of pieces after the other in this process."""
    memory = Memory()
    return lambda tasks, search: (find_pieces(disk, task, search, memory) for task in tasks)


class Finder:
    """Searches a data directory; ``total_bytes`` grows with each server that is looked at."""

    def __init__(self, disk: Disk, data: str, search: Search, run: Run | None = None) -> None:
        """Raises BadArgument when there is no delay server's directory."""
        self.total_bytes = 0
        self._disk = disk
        self._search = search
        self._run = run or in_turn(disk)
        self._damage: list[DamagedData] = []
        found = find_undamaged(disk, data, self._damage)
        self._directories = [directory for directory in found if directory.role == Role.DELAY]
        if not self._directories and not self._damage:
            raise BadArgument(
                f"{data} holds no delay server's directory; give the one that `delayd up --data` was given"
            )

    def found(self) -> Iterator[Found]:
        """What is found: of each server first messages that no checkpoint has filed, then the others hour by hour."""
        yield Found(0, [], self._damage, 0)
        for directory in self._directories:
            yield from self._in_directory(directory)

    def _in_directory(self, directory: Directory) -> Iterator[Found]:
        damage: list[DamagedData] = []
        search, moved = self._search, False
        for _ in range(TRIES_MAX):
            try:
                snapshot = take_what_is_there(self._disk, directory, damage)
                pieces = list(unfiled_pieces(self._disk, snapshot, damage))
                tail = read_tail(self._disk, snapshot, filed=False, unfiled=False, damage=damage)
                search = replace(search, decided=tail.decisions)
            except LogMoved:
                moved = True
                continue
            except DamagedData as error:
                damage.append(error)
                break
            self.total_bytes += sum(piece.end - piece.begin for piece in pieces)
            read: list[tuple[int, int]] = []
            moved = False
            for found in self._run(_tasks(pieces), search):
                read += [found.read] if found.read is not None else []
                moved |= bool(found.moved)
                yield found
            if not moved:
                yield from self._filed(snapshot, search)
                break
            # A checkpoint has filed rows meanwhile: those that were looked at must not be found again.
            search = replace(search, known=(*search.known, *read))
        if moved:
            damage.append(DamagedData(directory.path, 0, "its files moved faster than they could be read"))
        yield Found(0, [], damage, 0)

    def _filed(self, snapshot: ScheduleSnapshot, search: Search) -> Iterator[Found]:
        filed = (*snapshot.hours.values(), *snapshot.word.beside.values())
        self.total_bytes += sum(each.length for each in filed)
        for found in self._run(_tasks(filed_pieces(self._disk, snapshot, search)), search):
            yield found._replace(damage=[*found.damage, *self._gone(snapshot, found.moved)])

    def _gone(self, snapshot: ScheduleSnapshot, moved: tuple[Piece, ...]) -> Iterator[DamagedData]:
        """Which files should be there; retention may have removed the others."""
        if moved:
            snapshot = take_snapshot(self._disk, snapshot.directory, tail=False)
        for piece in moved:
            hour = piece.hour
            if hour is not None and hour in snapshot.hours and not was_removed(self._disk, snapshot, hour):
                yield DamagedData(piece.path, 0, "the file is gone")


def _tasks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists that are worth a hand-over to another process."""
    task: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        task.append(piece)
        size_bytes += piece.end - piece.begin
        if size_bytes >= PIECE_BYTES or len(task) == TASK_PIECES_MAX:
            yield task
            task, size_bytes = [], 0
    if task:
        yield task


def unfiled_pieces(disk: Disk, snapshot: ScheduleSnapshot, damage: list[DamagedData]) -> Iterator[Piece]:
    """The part of the message log that no checkpoint has filed. Raises LogMoved when it is gone."""
    place, start, stop = snapshot.place, snapshot.replay_offset, snapshot.message_stop
    bases = segment_bases(disk, place)
    if bases and bases[0] > start:
        raise LogMoved(f"{place.folder} begins behind offset {start}")
    for number, base in enumerate(bases):
        last = number == len(bases) - 1
        end = stop if last else bases[number + 1]
        if end <= start or base >= stop:
            continue
        path = f"{place.folder}/{segment_name(base)}"
        try:
            segment = open_base(disk, place, base, last=last)
        except DamagedData as error:
            damage.append(error)
            continue
        if segment is None:
            continue
        try:
            # What stands in the file now is durable before any of it is shown.
            settle(segment)
            piece = Piece(snapshot.directory, path, None, max(base, start), end, None, None, 0, torn=last)
            yield from _split(segment, piece)
        finally:
            segment.close()


def filed_pieces(disk: Disk, snapshot: ScheduleSnapshot, search: Search) -> Iterator[Piece]:
    """The parts of schedule logs that may have wanted messages, hour by hour."""
    wanted, directory = search.wanted, snapshot.directory
    first = 0 if wanted.from_ms is None else hour_of_ms(wanted.from_ms)
    last = (1 << 32) if wanted.to_ms is None else hour_of_ms(wanted.to_ms - 1)
    for hour in sorted(snapshot.hours.keys() | snapshot.word.beside.keys()):
        if not first <= hour <= last or (snapshot.is_sealed(hour) and not search.ended):
            continue
        for part in hour_parts(disk, snapshot, hour):
            before = None if part.begin else 0
            bounds = part.begin, part.end, before, part.last_crc32c
            piece = Piece(directory, part.path, hour, *bounds, snapshot.replay_offset)
            yield from [piece] if part.end - part.begin <= PIECE_BYTES else _split_file(disk, piece)


def find_pieces(disk: Disk, pieces: Iterable[Piece], search: Search, memory: Memory) -> Found:
    """Search pieces of files, one after the other; this is what one process does at a time, in the same memory."""
    return _PieceFinder(disk, search, memory).find(pieces)


class _PieceFinder:
    def __init__(self, disk: Disk, search: Search, memory: Memory) -> None:
        self._disk = disk
        self._search = search
        self._memory = memory
        self._damage: list[DamagedData] = []
        self._rows: list[FoundRow] = []
        self._count = 0
        self._read: list[int] = []
        self._ended: dict[tuple[str, int], tuple[UInt64s, list[str]] | None] = {}

    def find(self, pieces: Iterable[Piece]) -> Found:
        moved: list[Piece] = []
        size_bytes = 0
        for piece in pieces:
            size_bytes += piece.end - piece.begin
            try:
                self._find(piece)
            except LogMoved:
                moved.append(piece)
            except DamagedData as error:
                self._damage.append(error)
        read = (min(self._read), max(self._read)) if self._read else None
        return Found(self._count, self._rows, self._damage, size_bytes, read, tuple(moved))

    def _find(self, piece: Piece) -> None:
        segment = _open(self._disk, piece)
        end, crc = piece.begin, piece.previous_crc32c
        bounds = piece.begin, piece.end
        try:
            for group in salvage(segment, bounds, crc, self._damage, self._memory, torn=piece.torn):
                end, crc = group.end, group.header.header_crc32c
                if piece.hour is None:
                    self._take_unfiled(piece, group)
                else:
                    self._take_filed(piece, piece.hour, group)
            if piece.last_crc32c is not None and end == piece.end and crc != piece.last_crc32c:
                what = "its last group is another one than the checkpoint counts"
                self._damage.append(DamagedData(piece.path, segment.position(end), what))
        finally:
            segment.close()

    def _take_filed(self, piece: Piece, hour: int, group: Salvaged) -> None:
        for position, batch in group.batches:
            if batch.kind != BatchKind.SCHEDULE or batch.schedule.source_end > piece.replay_offset:
                continue
            if batch.schedule.hour != hour:
                self._damage.append(DamagedData(piece.path, 0, "it holds messages of another hour"))
                continue
            accepted: Int64s | int = 0
            if ColumnId.ACCEPTED_AT_MS in batch:
                accepted = batch.int64s(ColumnId.ACCEPTED_AT_MS)
            held = Held(batch, group.data, position)
            self._take(piece, held, batch.uint64s(ColumnId.SEQUENCE), accepted, np.full(batch.count, hour))

    def _take_unfiled(self, piece: Piece, group: Salvaged) -> None:
        header = group.header
        if header.kind != GroupKind.DATA:
            return
        self._read += [header.base_sequence, header.base_sequence + header.row_count - 1] if header.row_count else []
        if len(group.batches) < header.batch_count:
            # The sequences of rows behind a batch that does not check are not known.
            self._damage.append(DamagedData(piece.path, 0, "messages behind it in its commit are left out"))
            return
        sequence = header.base_sequence
        for position, batch in group.batches:
            if batch.kind == BatchKind.PRODUCER:
                sequences = np.arange(sequence, sequence + batch.count, dtype=np.uint64)
                hours = hours_of(np.maximum(batch.int64s(ColumnId.DELIVER_AT_MS), header.appended_at_ms))
                self._take(piece, Held(batch, group.data, position), sequences, header.appended_at_ms, hours)
                sequence += batch.count

    def _take(self, piece: Piece, held: Held, sequences: UInt64s, accepted: Int64s | int, hours: Int64s) -> None:
        rows = self._search.wanted.rows(held, sequences, accepted)
        for first, last in self._search.known:
            own = sequences[rows]
            rows = rows[(own < np.uint64(first)) | (own > np.uint64(last))]
        if not len(rows):
            return
        states = self._states(piece.directory, sequences[rows], hours[rows])
        if not self._search.ended:
            kept = [at for at, state in enumerate(states) if state in (PENDING, UNKNOWN)]
            if len(kept) < len(states):
                rows, states = rows[kept], [states[at] for at in kept]
        self._count += len(rows)
        if self._search.with_rows and len(rows):
            self._rows += _rows_of(held, rows, sequences, accepted, states, piece.directory.log_id, self._search)

    def _states(self, directory: Directory, sequences: UInt64s, hours: Int64s) -> list[str]:
        states = [PENDING] * len(sequences)
        for hour in np.unique(hours).tolist():
            known = self._outcomes(directory, hour)
            rows = np.flatnonzero(hours == hour)
            if known is None:
                for row in rows.tolist():
                    states[row] = UNKNOWN
            else:
                which, at = find(known[0], sequences[rows])
                for row, place in zip(rows[which].tolist(), at.tolist(), strict=True):
                    states[row] = known[1][place]
        # A decision counts as soon as it is durable, and its outcome may be written much later.
        found = self._search.decided.find(sequences)
        for row in np.flatnonzero(found >= 0).tolist():
            if states[row] == PENDING:
                states[row] = outcome_word(as_outcomes(self._search.decided.rows[[found[row]]]).parts[0])
        return states

    def _outcomes(self, directory: Directory, hour: int) -> tuple[UInt64s, list[str]] | None:
        """Sequences that have an outcome in an hour, rising, and its name; None when they can't be read."""
        key = directory.path, hour
        if key not in self._ended:
            self._ended.clear()  # Pieces come hour by hour.
            try:
                found = read_outcomes(self._disk, directory, hour)
            except DamagedData as error:
                self._damage.append(error)
                self._ended[key] = None
            else:
                order = np.argsort(found.sequences, kind="stable")
                names = [outcome_word(part) for part in found.parts]
                parts = found.part_of[order].tolist()
                self._ended[key] = found.sequences[order], [names[part] for part in parts]
        return self._ended[key]


def _rows_of(
    held: Held,
    rows: Int64s,
    sequences: UInt64s,
    accepted: Int64s | int,
    states: list[str],
    log_id: int,
    search: Search,
) -> list[FoundRow]:
    batch = held.batch
    names = [name.decode("ascii") for name in batch.subjects()] or [""]
    numbers = batch.uint32s(ColumnId.SUBJECT)[rows].tolist() if ColumnId.SUBJECT in batch else [0] * len(rows)
    taken = accepted[rows].tolist() if isinstance(accepted, np.ndarray) else [accepted] * len(rows)
    bodies: list[bytes | None] = [None] * len(rows)
    if search.with_bodies:
        gone = batch.uint32s(ColumnId.BODY_LEFT_OUT)[rows] > 0 if ColumnId.BODY_LEFT_OUT in batch else None
        bodies = list(_items(held, ColumnId.BODY_END, rows))
        if gone is not None:
            bodies = [None if left_out else body for body, left_out in zip(bodies, gone.tolist(), strict=True)]
    packed = list(_items(held, ColumnId.HEADERS_END, rows))
    own = (item.decode("utf-8", "backslashreplace") for item in _items(held, ColumnId.KEY_END, rows))
    keys = [key or _label(headers) for key, headers in zip(own, packed, strict=True)]
    tags = [decode_tags(item) for item in _items(held, ColumnId.TAGS_END, rows)]
    has_origins = ColumnId.ORIGIN_SEQUENCE in batch
    origins = batch.uint64s(ColumnId.ORIGIN_SEQUENCE)[rows].tolist() if has_origins else [0] * len(rows)
    columns = (
        sequences[rows].tolist(),
        [names[number] for number in numbers],
        batch.int64s(ColumnId.DELIVER_AT_MS)[rows].tolist(),
        taken,
        keys,
        tags,
        batch.body_bytes()[rows].tolist(),
        states,
        bodies,
        packed,
        origins,
    )
    return [FoundRow(log_id, *fields) for fields in zip(*columns, strict=True)]


def _label(headers: bytes) -> str | None:
    """The key of the first life of a row, which the headers of its later lives name."""
    if KEY.encode() not in headers:
        return None
    try:
        return str(decode_headers(headers).get(KEY) or "") or None
    except BadHeaders:
        return None  # Intake refuses such headers, so a file was changed, and nothing is known.


def _items(held: Held, column: ColumnId, rows: Int64s) -> list[bytes]:
    """The items of some rows in a region; empty ones where the batch has no such region."""
    if column not in held.batch:
        return [b""] * len(rows)
    starts, ends = held.items(column)
    pairs = zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)
    return [bytes(held.data[start:end]) for start, end in pairs]


def _open(disk: Disk, piece: Piece) -> Segment:
    directory = piece.directory
    if piece.hour is not None:
        segment = open_hour(disk, piece.path, FileKind.SCHEDULE, directory.log_id, piece.hour)
    else:
        name = piece.path.rpartition("/")[2]
        place = LogPlace(directory.message_folder, FileKind.MESSAGE, directory.log_id)
        segment = open_base(disk, place, int(name[:-4]), last=piece.torn)
    if segment is None:
        raise LogMoved(f"{piece.path} is gone")
    return segment


def _split_file(disk: Disk, piece: Piece) -> Iterator[Piece]:
    try:
        segment = _open(disk, piece)
    except (LogMoved, DamagedData):
        yield piece  # Whoever reads it says so.
        return
    try:
        yield from _split(segment, piece)
    finally:
        segment.close()


def _split(segment: Segment, piece: Piece) -> Iterator[Piece]:
    """Cut a piece where groups end."""
    begin, crc = piece.begin, piece.previous_crc32c
    for end, own_crc in group_ends(segment, piece.begin, piece.end):
        if end - begin >= PIECE_BYTES and end < piece.end:
            yield piece._replace(begin=begin, end=end, previous_crc32c=crc, last_crc32c=None, torn=False)
            begin, crc = end, own_crc
    yield piece._replace(begin=begin, previous_crc32c=crc)
