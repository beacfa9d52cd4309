"""Find: messages of a delay server's files by their columns and the bytes of their bodies and headers.

Invariant: files are read in pieces of bounded size, one checkpoint bounds what is read (rule P3), and each message is
found once, from the message log or from its schedule log. Damage hides nothing but what it damages.

A batch is matched by columns first, then by the bytes of its items. The result is that of a search in each row's item
alone; a pattern is searched in the whole region of a batch where that gives the same rows, because a call for each row
costs more than the bytes do.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import Batch
from delayd.batch.columns import BatchKind, ColumnId, Int64s
from delayd.batch.labels import KEY, decode_headers, decode_tags, rows_with_tags
from delayd.batch.sequences import find
from delayd.errors import BadArgument, BadHeaders, DamagedData
from delayd.hours import hour_of_ms, hours_of
from delayd.log.group import GroupKind
from delayd.log.log import LogPlace, segment_name
from delayd.log.segment import FileKind, Segment
from delayd.machine.disk import Disk
from delayd.reading.files.directory import (
    Directory,
    Role,
    ScheduleSnapshot,
    find_undamaged,
    take_snapshot,
    take_what_is_there,
    was_removed,
)
from delayd.reading.files.items import bodies_of, bytes_of, keys_of, packed_headers_of
from delayd.reading.files.origins import (
    NO_DECISIONS,
    LoggedDecisions,
    as_outcomes,
    hour_parts,
    open_hour,
    outcome_word,
    read_outcomes,
    read_tail,
)
from delayd.reading.files.stored_groups import (
    LogMoved,
    ReadMemory,
    Salvaged,
    group_ends,
    open_base,
    salvage,
    segment_bases,
    settle,
)

Mask = NDArray[np.bool_]

# A pattern that may match any number of bytes, or that looks at what is around a match, must see one item only.
_ITEM_ONLY = re.compile(rb"[*+$^]|\{\d*,\}|\\[bBAZ]|\(\?[=!<(>]")
_FLAGS = re.compile(rb"\(\?[a-zA-Z]*[ix]")
_REPEAT = re.compile(rb"\{(\d*)(,\d*)?\}")
_ESCAPED_NUMBER = re.compile(rb"\\(?:x[0-9a-fA-F]{2}|[0-9]+)")
_CLASS = re.compile(rb"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
FEW = 64  # When only one row in this many is left, the rows are looked at one by one.
PIECE_BYTES = 8 << 20  # What is read and searched at a time; what it finds is in memory then, too.
TASK_PIECES_MAX = 256  # Small files: some milliseconds of work.
TRIES_MAX = 5  # Files move on once a checkpoint, so a second try nearly always does.
UNKNOWN, PENDING = "unknown", "pending"
UInt64s = NDArray[np.uint64]


class BytesPattern:
    """A regular expression on bytes, and the bytes that each match must have."""

    def __init__(self, pattern: bytes) -> None:
        """Raises BadArgument when it is no regular expression."""
        try:
            self.compiled = re.compile(pattern)
        except re.error as error:
            shown = pattern.decode("utf-8", "backslashreplace")
            raise BadArgument(
                f"{shown!r} is no regular expression: {error}; write \\ before a special character"
            ) from None
        self.literal, self.is_literal = required_literal(pattern)
        self._by_item = _ITEM_ONLY.search(pattern) is not None
        # It then matches at any place, as it looks at nothing around.
        self._matches_nothing = not self._by_item and self.compiled.search(b"") is not None

    def holds(self, item: bytes) -> bool:
        return self.compiled.search(item) is not None

    def rows(self, data: bytes | bytearray, starts: Int64s, ends: Int64s, wanted: Mask) -> Mask:
        """In which items it matches; ``starts`` and ``ends`` are places in ``data``.

        Only rows that are ``wanted`` are looked at, one by one when they are few.
        """
        if self._matches_nothing:
            return wanted
        found = np.zeros(len(starts), np.bool_)
        rows = np.flatnonzero(wanted)
        if len(rows) * FEW > len(starts):
            if self.literal:
                rows = rows[holding(data, starts, ends, self.literal)[rows]]
                if self.is_literal:
                    found[rows] = True
                    return found
            elif not self._by_item:
                return self._in_region(data, starts, ends) & wanted
        search = self.compiled.search
        for row, start, end in zip(rows.tolist(), starts[rows].tolist(), ends[rows].tolist(), strict=True):
            found[row] = search(data[start:end]) is not None
        return found

    def _in_region(self, data: bytes | bytearray, starts: Int64s, ends: Int64s) -> Mask:
        found = np.zeros(len(starts), np.bool_)
        search, position, until = self.compiled.search, int(starts[0]), int(ends[-1])
        firsts, lasts = starts.tolist(), ends.tolist()
        while match := search(data, position, until):
            row = bisect_right(firsts, match.start()) - 1
            # A match may reach into the next item; then the item alone decides.
            if match.end() <= lasts[row] or search(data[firsts[row] : lasts[row]]):
                found[row] = True
            if row + 1 == len(firsts):
                break
            position = firsts[row + 1]
        return found


def holding(data: bytes | bytearray, starts: Int64s, ends: Int64s, literal: bytes) -> Mask:
    """Which items have some bytes in them."""
    found = np.zeros(len(starts), np.bool_)
    places: list[int] = []
    find, place, until = data.find, int(starts[0]) - 1, int(ends[-1])
    while (place := find(literal, place + 1, until)) >= 0:
        places.append(place)
    if places:
        at = np.array(places, np.int64)
        rows = np.searchsorted(starts, at, side="right") - 1
        found[rows[at + len(literal) <= ends[rows]]] = True
    return found


def required_literal(pattern: bytes) -> tuple[bytes, bool]:
    """The longest bytes that each match must have, as far as they are plain to see, and whether they are all of it.

    1. `order-42` is `order-42`, and this is all of it.
    2. `customer [0-9]+ paid` needs ` paid` and `customer `: the longer one is taken.
    3. `a|b`, `[ab]`, `(?i)a` need nothing that is plain to see.
    """
    if _FLAGS.search(pattern):
        return b"", False
    longest, run, whole, depth, position = b"", b"", True, 0, 0
    while position < len(pattern):
        char = pattern[position : position + 1]
        literal, size = char, 1
        if char == b"\\":
            number = _ESCAPED_NUMBER.match(pattern, position)
            size = len(number[0]) if number else 2
            literal = pattern[position + 1 : position + 2]
            if number or literal.isalnum():
                literal = b""
        elif char == b"[":
            known = _CLASS.match(pattern, position)
            literal, size = b"", len(known[0]) if known else len(pattern)
        elif char in b"()":
            depth += 1 if char == b"(" else -1
            literal = b""
        elif char in b".^$":
            literal = b""
        elif char == b"|" and not depth:
            return b"", False
        elif char in b"*?+" or (char == b"{" and _REPEAT.match(pattern, position)):
            repeat = _REPEAT.match(pattern, position)
            size = len(repeat[0]) if repeat else 1
            # What may be missing does not count; what is there once or more often ends the run.
            run = run if char == b"+" else run[:-1]
            literal = b""
        if literal and not depth:
            run += literal
        else:
            longest, run, whole = max(longest, run, key=len), b"", False
        position += size
    return max(longest, run, key=len), whole and bool(pattern)


class HeldBatch(NamedTuple):
    """A verified batch, and the bytes that it stands in: they are searched where they are, without a copy."""

    batch: Batch
    data: bytes | bytearray
    position: int  # Of the batch in ``data``.

    def items(self, column: ColumnId) -> tuple[Int64s, Int64s]:
        starts, ends = self.batch.region(column)
        heap = self.position + self.batch.heap_offset
        return starts + heap, ends + heap


@dataclass(frozen=True, slots=True)
class WantedMessages:
    """Which messages a search wants; None sets no bound.

    A message that was accepted after its time counts as due when it was accepted, as it is filed (rule P5). A ``key``
    also wants the later lives of messages that had it, which are of the retry subjects of their groups.
    """

    from_ms: int | None = None
    to_ms: int | None = None
    subject: bytes | None = None
    sequence: int | None = None
    key: bytes | None = None
    tags: tuple[str, ...] = ()
    grep: BytesPattern | None = None
    headers: tuple[tuple[str, BytesPattern], ...] = ()

    def rows(self, held: HeldBatch, sequences: NDArray[np.uint64], accepted_at_ms: Int64s | int) -> Int64s:
        """The wanted rows of a verified batch, rising; ``accepted_at_ms`` is 0 where it is not known."""
        batch = held.batch
        wanted = np.ones(batch.count, np.bool_)
        if self.from_ms is not None or self.to_ms is not None:
            due_ms = np.maximum(batch.int64s(ColumnId.DELIVER_AT_MS), accepted_at_ms)
            if self.from_ms is not None:
                wanted &= due_ms >= self.from_ms
            if self.to_ms is not None:
                wanted &= due_ms < self.to_ms
        if self.sequence is not None:
            wanted &= sequences == np.uint64(self.sequence)
        if self.subject is not None and wanted.any():
            wanted &= _of_subject(batch, self.subject)
        if self.key is not None and wanted.any():
            # In its later lives a message does not hold its key any more: it is a header of theirs.
            label = BytesPattern(rb"\A" + re.escape(self.key) + rb"\Z")
            wanted &= _of_key(batch, self.key) | _with_header(held, KEY, label, wanted)
        if self.tags and wanted.any():
            wanted &= rows_with_tags(batch, self.tags, wanted)
        for name, pattern in self.headers:
            if wanted.any():
                wanted &= _with_header(held, name, pattern, wanted)
        if self.grep is not None and wanted.any():
            wanted &= _grepped(held, self.grep, wanted)
        return np.flatnonzero(wanted)


def _of_subject(batch: Batch, subject: bytes) -> Mask:
    numbers = [number for number, name in enumerate(batch.subjects()) if name == subject]
    if ColumnId.SUBJECT in batch:
        return np.isin(batch.uint32s(ColumnId.SUBJECT), np.array(numbers, np.uint32))
    return np.full(batch.count, bool(numbers))


def _of_key(batch: Batch, key: bytes) -> Mask:
    if ColumnId.KEY_END not in batch:
        return np.zeros(batch.count, np.bool_)
    starts, ends = batch.region(ColumnId.KEY_END)
    same: Mask = ends - starts == len(key)
    heap = batch.heap
    for row in np.flatnonzero(same).tolist():
        same[row] = heap[int(starts[row]) : int(ends[row])] == key
    return same


def _with_header(held: HeldBatch, name: str, pattern: BytesPattern, wanted: Mask) -> Mask:
    found = np.zeros(held.batch.count, np.bool_)
    if ColumnId.HEADERS_END in held.batch:
        starts, ends = held.items(ColumnId.HEADERS_END)
        likely = wanted & holding(held.data, starts, ends, name.encode("utf-8", "surrogateescape"))
        for row in np.flatnonzero(likely).tolist():
            try:
                value = decode_headers(bytes(held.data[int(starts[row]) : int(ends[row])])).get(name)
            except BadHeaders:
                continue  # Intake refuses such headers, and there is no value to compare.
            if value is not None:
                found[row] = pattern.holds(value.encode() if isinstance(value, str) else value)
    return found


def _grepped(held: HeldBatch, pattern: BytesPattern, wanted: Mask) -> Mask:
    batch = held.batch
    found = pattern.rows(held.data, *held.items(ColumnId.BODY_END), wanted)
    if ColumnId.BODY_LEFT_OUT in batch:
        found &= batch.uint32s(ColumnId.BODY_LEFT_OUT) == 0
    if ColumnId.HEADERS_END in batch:
        starts, ends = held.items(ColumnId.HEADERS_END)
        found |= pattern.rows(held.data, starts, ends, wanted & ~found & (ends > starts))
    return found


class FilePiece(NamedTuple):
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


class FoundRows(NamedTuple):
    """What was found in some pieces; ``row_count`` counts rows that are not listed, too."""

    row_count: int
    rows: list[FoundRow]
    damage: list[DamagedData]
    size_bytes: int  # How much was looked at.
    read: tuple[int, int] | None = None  # The sequences of the message log that were looked at.
    moved: tuple[FilePiece, ...] = ()  # Pieces whose files were gone.


@dataclass(frozen=True, slots=True)
class Search:
    """What is wanted, and how much of it."""

    wanted: WantedMessages
    ended: bool = False  # Messages that have an outcome, too.
    with_rows: bool = True  # False: only counted.
    with_bodies: bool = True
    known: tuple[tuple[int, int], ...] = ()  # Ranges of sequences that were looked at before.
    decided: LoggedDecisions = NO_DECISIONS  # Of the delay server that is searched.


Run = Callable[[Iterator[list[FilePiece]], Search], Iterator[FoundRows]]
"""Does `find_pieces` for each list of pieces, here or in other processes, and yields the results in order."""


def in_turn(disk: Disk) -> Run:
    """Search one list of pieces after the other in this process."""
    memory = ReadMemory()
    return lambda tasks, search: (find_pieces(disk, task, search, memory) for task in tasks)


class FileFinder:
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

    def found(self) -> Iterator[FoundRows]:
        """What is found: of each server first messages that no checkpoint has filed, then the others hour by hour."""
        yield FoundRows(0, [], self._damage, 0)
        for directory in self._directories:
            yield from self._in_directory(directory)

    def _in_directory(self, directory: Directory) -> Iterator[FoundRows]:
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
        yield FoundRows(0, [], damage, 0)

    def _filed(self, snapshot: ScheduleSnapshot, search: Search) -> Iterator[FoundRows]:
        filed = (*snapshot.hours.values(), *snapshot.word.beside.values())
        self.total_bytes += sum(each.length for each in filed)
        for found in self._run(_tasks(filed_pieces(self._disk, snapshot, search)), search):
            yield found._replace(damage=[*found.damage, *self._gone(snapshot, found.moved)])

    def _gone(self, snapshot: ScheduleSnapshot, moved: tuple[FilePiece, ...]) -> Iterator[DamagedData]:
        if moved:
            snapshot = take_snapshot(self._disk, snapshot.directory, tail=False)
        for piece in moved:
            hour = piece.hour
            if hour is not None and hour in snapshot.hours and not was_removed(self._disk, snapshot, hour):
                yield DamagedData(piece.path, 0, "the file is gone")


def _tasks(pieces: Iterable[FilePiece]) -> Iterator[list[FilePiece]]:
    """Pieces in lists that are worth a hand-over to another process."""
    task: list[FilePiece] = []
    size_bytes = 0
    for piece in pieces:
        task.append(piece)
        size_bytes += piece.end - piece.begin
        if size_bytes >= PIECE_BYTES or len(task) == TASK_PIECES_MAX:
            yield task
            task, size_bytes = [], 0
    if task:
        yield task


def unfiled_pieces(disk: Disk, snapshot: ScheduleSnapshot, damage: list[DamagedData]) -> Iterator[FilePiece]:
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
            piece = FilePiece(snapshot.directory, path, None, max(base, start), end, None, None, 0, torn=last)
            yield from _split(segment, piece)
        finally:
            segment.close()


def filed_pieces(disk: Disk, snapshot: ScheduleSnapshot, search: Search) -> Iterator[FilePiece]:
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
            piece = FilePiece(directory, part.path, hour, *bounds, snapshot.replay_offset)
            yield from [piece] if part.end - part.begin <= PIECE_BYTES else _split_file(disk, piece)


def find_pieces(disk: Disk, pieces: Iterable[FilePiece], search: Search, memory: ReadMemory) -> FoundRows:
    """Search pieces of files, one after the other; this is what one process does at a time, in the same memory."""
    return _PieceFinder(disk, search, memory).find(pieces)


class _PieceFinder:
    def __init__(self, disk: Disk, search: Search, memory: ReadMemory) -> None:
        self._disk = disk
        self._search = search
        self._memory = memory
        self._damage: list[DamagedData] = []
        self._rows: list[FoundRow] = []
        self._count = 0
        self._read: list[int] = []
        self._ended: dict[tuple[str, int], tuple[UInt64s, list[str]] | None] = {}

    def find(self, pieces: Iterable[FilePiece]) -> FoundRows:
        moved: list[FilePiece] = []
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
        return FoundRows(self._count, self._rows, self._damage, size_bytes, read, tuple(moved))

    def _find(self, piece: FilePiece) -> None:
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

    def _take_filed(self, piece: FilePiece, hour: int, group: Salvaged) -> None:
        for position, batch in group.batches:
            if batch.kind != BatchKind.SCHEDULE or batch.schedule.source_end > piece.replay_offset:
                continue
            if batch.schedule.hour != hour:
                self._damage.append(DamagedData(piece.path, 0, "it holds messages of another hour"))
                continue
            accepted: Int64s | int = 0
            if ColumnId.ACCEPTED_AT_MS in batch:
                accepted = batch.int64s(ColumnId.ACCEPTED_AT_MS)
            held = HeldBatch(batch, group.data, position)
            self._take(piece, held, batch.uint64s(ColumnId.SEQUENCE), accepted, np.full(batch.count, hour))

    def _take_unfiled(self, piece: FilePiece, group: Salvaged) -> None:
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
                self._take(piece, HeldBatch(batch, group.data, position), sequences, header.appended_at_ms, hours)
                sequence += batch.count

    def _take(
        self, piece: FilePiece, held: HeldBatch, sequences: UInt64s, accepted: Int64s | int, hours: Int64s
    ) -> None:
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
            self._rows += _rows_of(held.batch, rows, sequences, accepted, states, piece.directory.log_id, self._search)

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
    batch: Batch,
    rows: Int64s,
    sequences: UInt64s,
    accepted: Int64s | int,
    states: list[str],
    log_id: int,
    search: Search,
) -> list[FoundRow]:
    names = [name.decode("ascii") for name in batch.subjects()] or [""]
    numbers = batch.uint32s(ColumnId.SUBJECT)[rows].tolist() if ColumnId.SUBJECT in batch else [0] * len(rows)
    taken = accepted[rows].tolist() if isinstance(accepted, np.ndarray) else [accepted] * len(rows)
    has_origins = ColumnId.ORIGIN_SEQUENCE in batch
    origins = batch.uint64s(ColumnId.ORIGIN_SEQUENCE)[rows].tolist() if has_origins else [0] * len(rows)
    columns = (
        sequences[rows].tolist(),
        [names[number] for number in numbers],
        batch.int64s(ColumnId.DELIVER_AT_MS)[rows].tolist(),
        taken,
        keys_of(batch, rows),
        map(decode_tags, bytes_of(batch, ColumnId.TAGS_END, rows)),
        batch.body_bytes()[rows].tolist(),
        states,
        bodies_of(batch, rows) if search.with_bodies else [None] * len(rows),
        packed_headers_of(batch, rows),
        origins,
    )
    return [FoundRow(log_id, *fields) for fields in zip(*columns, strict=True)]


def _open(disk: Disk, piece: FilePiece) -> Segment:
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


def _split_file(disk: Disk, piece: FilePiece) -> Iterator[FilePiece]:
    try:
        segment = _open(disk, piece)
    except (LogMoved, DamagedData):
        yield piece  # Whoever reads it says so.
        return
    try:
        yield from _split(segment, piece)
    finally:
        segment.close()


def _split(segment: Segment, piece: FilePiece) -> Iterator[FilePiece]:
    begin, crc = piece.begin, piece.previous_crc32c
    for end, own_crc in group_ends(segment, piece.begin, piece.end):
        if end - begin >= PIECE_BYTES and end < piece.end:
            yield piece._replace(begin=begin, end=end, previous_crc32c=crc, last_crc32c=None, torn=False)
            begin, crc = end, own_crc
    yield piece._replace(begin=begin, previous_crc32c=crc)
