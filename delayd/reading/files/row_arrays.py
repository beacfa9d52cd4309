"""Rows: rows of many batches as flat arrays, and the rows of another log that belong to each of them.

Invariants. A row is 52 bytes of arrays and never a Python object; its location says where its body is. For a join, the
schedule side rises in sequence, so each sequence has one place there; the other side may be in any order and may repeat
a sequence. Where the sequences of an hour lie close together, as they do on all but the quietest servers, places are
read from a table with an entry for each number; otherwise a binary search finds them.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delayd.batch.batch import PADS, Batch
from delayd.batch.columns import KEPT, ColumnId, Int64s, padded
from delayd.batch.content import PIECE_WORDS, Region, Regions, hash_items, mixed, region_of, subject_states
from delayd.batch.sequences import ROW_BITS, SCHEDULE_BIT, are_filed, find
from delayd.errors import BatchMalformed
from delayd.hours import hours_of
from delayd.log.hour import OutcomeRows

UInt64s = NDArray[np.uint64]
UInt32s = NDArray[np.uint32]

SINGLES_MAX = 8_192  # Bodies that are kept until they are hashed together.
U32 = struct.Struct("<I")
I64 = struct.Struct("<q")
NO_UINT64S = np.empty(0, np.uint64)  # The columns of an array without rows.
NO_INT64S = np.empty(0, np.int64)
NO_UINT32S = np.empty(0, np.uint32)
# In the order of the columns of `ScheduleRows`.
NO_ROWS: tuple[NDArray[Any], ...] = (NO_UINT64S, NO_INT64S, NO_INT64S, NO_UINT32S, NO_UINT32S, NO_UINT64S, NO_UINT64S)
SUBJECT_COLUMN, BODY_BYTES_COLUMN, HASH_COLUMN = 3, 4, 6
HASH_WORDS = PIECE_WORDS // 2  # Batches of this many words are hashed together: half a MiB.
# What is said of a message beside its content; its expiry is compared by itself.
LABEL_COLUMNS = tuple(column for column in KEPT if column != ColumnId.EXPIRES_AT_MS)
_LABELS = frozenset({ColumnId.KEY_END, ColumnId.TAGS_END, *LABEL_COLUMNS})
NO_LABEL = 1  # The hash of empty items.
ROWS_EXPECTED_MAX = 1 << 24  # A guess must not reserve more than 900 MB before any row is there.

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
        ("columns_end", "<u4"),  # Where the checksummed columns end, from the start of the batch.
        ("deliver_at", "<u4"),  # Where the column deliver_at_ms begins; sequence is the next one.
        ("columns_crc32c", "<u4"),
        ("decided", "u1"),  # Whether its origin's last watermark covers it (rule H1).
        ("newer", "u1"),  # Whether it came after the other logs' sizes were taken; then it can only prove an outcome.
    ]
)
Batches = NDArray[np.void]
Mask = NDArray[np.bool_]
Places = NDArray[np.int64]
TABLE_ENTRIES_PER_ROW_MAX = 8  # A table may be this sparse; then it has 64 bytes a row, and is freed at once.


class Sparse(NamedTuple):
    """Values that few rows have, so they are no column of all rows; may name other rows, too."""

    sequence: UInt64s = NO_UINT64S
    value: NDArray[Any] = NO_INT64S

    def __bool__(self) -> bool:
        return len(self.sequence) > 0

    def of(self, sequences: UInt64s) -> NDArray[Any]:
        found = np.zeros(len(sequences), self.value.dtype)
        order = np.argsort(self.sequence, kind="stable")
        known, places = find(self.sequence[order], sequences)
        found[known] = self.value[order[places]]
        return found


NONE_EXPIRE, NONE_LABELLED = Sparse(), Sparse(NO_UINT64S, NO_UINT64S)


@dataclass(frozen=True, slots=True)
class ScheduleRows:
    """Rows that wait or waited to be dispatched; all arrays are of one length.

    ``appended_at_ms`` is when the delay server took the message, 0 where a schedule log does not say it; such a row was
    not yet due when it was taken. ``subject`` is an index into ``subjects``; ``location`` is that of
    delayd/batch/sequences.py; ``content_hash`` is 0 for a row without a stated hash, and None if no row has one.
    """

    sequence: UInt64s
    deliver_at_ms: Int64s
    appended_at_ms: Int64s
    subject: UInt32s
    body_bytes: UInt32s
    location: UInt64s
    subjects: list[str]
    content_hash: UInt64s | None = None
    left_out: UInt64s = field(default_factory=lambda: NO_UINT64S)  # Sequences of rows whose bodies are not in the file.
    expiring: Sparse = NONE_EXPIRE  # When rows expire.
    labelled: Sparse = NONE_LABELLED  # What `label_hashes` says of rows that have any label.

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, rows: NDArray[np.generic] | slice) -> "ScheduleRows":
        """The rows that an index array or a mask picks, as copies, or views of a slice of them."""
        return ScheduleRows(
            self.sequence[rows],
            self.deliver_at_ms[rows],
            self.appended_at_ms[rows],
            self.subject[rows],
            self.body_bytes[rows],
            self.location[rows],
            self.subjects,
            self.hashes()[rows],
            self.left_out,
            self.expiring,
            self.labelled,
        )

    def expires_at_ms(self) -> Int64s:
        """When each row expires; 0 for never."""
        return self.expiring.of(self.sequence)

    def label_hashes(self) -> UInt64s:
        """A hash over the labels of each row: key, tags, ordering key, origin and flags; 0 where a row has none."""
        return self.labelled.of(self.sequence)

    def filed_count(self) -> int:
        """How many of them are in a schedule log; the others are only in the message log."""
        return int(are_filed(self.location).sum())

    def hashes(self) -> UInt64s:
        return np.zeros(len(self.sequence), np.uint64) if self.content_hash is None else self.content_hash

    def due_from_ms(self) -> Int64s:
        """When each row was to be handed over: when due, or when appended if that was later (rule P5)."""
        return np.maximum(self.deliver_at_ms, self.appended_at_ms)

    def hours(self) -> Int64s:
        return hours_of(self.due_from_ms())


@dataclass(frozen=True, slots=True)
class Target:
    """A realtime server's message log; retention has removed what lies below ``start``."""

    folder: str
    log_id: int
    start: int


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows of one hour and origin as the targets hold them; ``batch_of`` is for each row an index into ``batches``."""

    sequence: UInt64s
    deliver_at_ms: Int64s
    batch_of: Int64s
    batches: Batches
    targets: tuple[Target, ...]
    subjects: tuple[str, ...]
    content_hash: UInt64s | None = None  # 0 for a row without a stated hash, and None if no row has one.

    def hashes(self) -> UInt64s:
        return np.zeros(len(self.sequence), np.uint64) if self.content_hash is None else self.content_hash

    def take(self, rows: slice) -> "TargetRows":
        batches, batch_of = named_of(self.batches, self.batch_of[rows])
        columns = self.sequence[rows], self.deliver_at_ms[rows], batch_of
        return TargetRows(*columns, batches, self.targets, self.subjects, self.hashes()[rows])


class SubjectTable:
    """Subjects of many batches, numbered once; batches repeat their tables, so equal ones are decoded once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._ids: dict[str, int] = {}
        self._tables: dict[bytes, UInt32s] = {}
        self._states = NO_UINT64S

    def states(self) -> UInt64s:
        """The state of the content hash after it has taken each subject, by number."""
        if len(self._states) < len(self.names):
            new = [name.encode("ascii") for name in self.names[len(self._states) :]]
            self._states = np.concatenate((self._states, subject_states(new)))
        return self._states

    def ids(self, batch: Batch) -> UInt32s:
        table = batch.subject_table
        ids = self._tables.get(table)
        if ids is None:
            names = [name.decode("ascii") for name in batch.subjects()] or [""]
            ids = self._tables[table] = np.array([self.number(name) for name in names], np.uint32)
        return ids

    def number(self, name: str) -> int:
        number = self._ids.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


class Growing:
    """Columns of equal length that grow; memory for ``rows_expected`` rows is reserved, and used as they come."""

    def __init__(self, none: Sequence[NDArray[Any]], rows_expected: int = 0) -> None:
        self.count = 0
        self._columns = [np.empty(min(rows_expected, ROWS_EXPECTED_MAX), column.dtype) for column in none]

    def more(self, count: int) -> list[NDArray[Any]]:
        first = self.count
        self.reserve(first + count)
        self.count += count
        return [column[first : self.count] for column in self._columns]

    def reserve(self, count: int) -> None:
        if count > len(self._columns[0]):
            room = max(count, 2 * self.count)
            for number, column in enumerate(self._columns):
                self._columns[number] = np.empty(room, column.dtype)
                self._columns[number][: self.count] = column[: self.count]

    def columns(self) -> list[NDArray[Any]]:
        return [column[: self.count] for column in self._columns]


class RowCollector:
    """Gathers the rows of batches, in the order in which they are added; of schedule batches those with sequences of a
    ``part`` and ``wanted`` subjects, None: all.

    Memory for ``rows_expected`` rows is reserved, and used as they come. Unless ``whole`` the bodies of schedule logs
    are neither read nor verified.
    """

    def __init__(
        self,
        part: range | None = None,
        rows_expected: int = 0,
        *,
        whole: bool = True,
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        self.subjects = SubjectTable()
        self.part, self.whole = part, whole
        self._wanted = wanted
        self._wanted_of: dict[bytes, Mask] = {}  # By subject table: which of its subjects are wanted.
        self._rows = Growing(NO_ROWS, rows_expected)
        self._hashed = 0
        # Rows of batches of one row, for which an array each would cost too much.
        self._singles: list[tuple[int, ...]] = []
        self._left_out: list[UInt64s] = [NO_UINT64S]
        self._expiring, self._labelled = [NONE_EXPIRE], [NONE_LABELLED]
        self._items: list[tuple[bytes, bytes]] = []  # Their headers, and their bodies in whole words.
        # Of those with labels: sequence, tags, key, and the values of LABEL_COLUMNS.
        self._labels: list[tuple[int, bytes, bytes, tuple[int, ...]]] = []
        # Copies for the rows from `_hashed` on: many batches are hashed together. Most rows have no headers.
        self._headers, self._bodies = Regions(), Regions()
        self._any_headers = False

    def expect(self, rows: int) -> None:
        """Reserve memory for so many rows."""
        self._rows.reserve(min(rows, ROWS_EXPECTED_MAX))

    def add_message_batch(self, batch: Batch, offset: int, first_sequence: int, appended_at_ms: int) -> None:
        """Add a PRODUCER batch of a verified group; its rows count up from ``first_sequence``."""
        location = offset << ROW_BITS
        ids = self.subjects.ids(batch)
        count = batch.count
        if ColumnId.EXPIRES_AT_MS in batch.offsets:
            self._add_expiring(batch, np.arange(first_sequence, first_sequence + count, dtype=np.uint64))
        if count == 1:
            if not _LABELS.isdisjoint(batch.layout.columns):
                kept = tuple(int(batch.column(each)[0]) if each in batch else 0 for each in LABEL_COLUMNS)
                items = _item_of_one(batch, ColumnId.TAGS_END), _item_of_one(batch, ColumnId.KEY_END)
                self._labels.append((first_sequence, *items, kept))
            body_begin = batch.region_start(ColumnId.BODY_END)
            (due,) = I64.unpack_from(batch.buffer, batch.offsets[ColumnId.DELIVER_AT_MS])
            (body_end,) = U32.unpack_from(batch.buffer, batch.offsets[ColumnId.BODY_END])
            number = 0
            if ColumnId.SUBJECT in batch:
                (number,) = U32.unpack_from(batch.buffer, batch.offsets[ColumnId.SUBJECT])
            self._singles.append(
                (first_sequence, due, appended_at_ms, ids.item(number), body_end - body_begin, location)
            )
            self._items.append(
                (_item_of_one(batch, ColumnId.HEADERS_END), bytes(batch.heap[body_begin : padded(body_end)]))
            )
            if len(self._singles) == SINGLES_MAX:
                self._close_singles()
            return
        self._close_singles()
        self._add_labels(batch, np.arange(first_sequence, first_sequence + count, dtype=np.uint64))
        headers = region_of(batch, ColumnId.HEADERS_END) if ColumnId.HEADERS_END in batch else None
        bodies = region_of(batch, ColumnId.BODY_END)
        sequence, due, appended, subject, body_bytes, locations, _ = self._rows.more(count)
        sequence[:] = np.arange(first_sequence, first_sequence + count, dtype=np.uint64)
        due[:] = batch.int64s(ColumnId.DELIVER_AT_MS)
        appended.fill(appended_at_ms)
        subject[:] = ids[batch.uint32s(ColumnId.SUBJECT)] if ColumnId.SUBJECT in batch else ids[0]
        body_bytes[:] = bodies.lengths
        locations[:] = np.arange(location, location + count, dtype=np.uint64)
        self._add_regions(headers, bodies)
        if self._headers.word_count + self._bodies.word_count >= HASH_WORDS:
            self._hash()

    def add_schedule_batch(self, batch: Batch, offset: int) -> None:
        own: UInt64s = batch.uint64s(ColumnId.SEQUENCE)
        rows = self._rows_of(batch, own)
        if not isinstance(rows, slice) and not len(rows):
            return
        if ColumnId.BODY_LEFT_OUT in batch:
            self._left_out.append(own[batch.uint32s(ColumnId.BODY_LEFT_OUT) > 0])
        if ColumnId.EXPIRES_AT_MS in batch.offsets:
            self._add_expiring(batch, own)
        self._add_labels(batch, own)
        own = own[rows]
        sequence, due, appended, subject, body_bytes, locations, hashes = self._rows.more(len(own))
        ids = self.subjects.ids(batch)
        sequence[:] = own
        due[:] = batch.int64s(ColumnId.DELIVER_AT_MS)[rows]
        appended[:] = batch.int64s(ColumnId.ACCEPTED_AT_MS)[rows] if ColumnId.ACCEPTED_AT_MS in batch else 0
        subject[:] = ids[batch.uint32s(ColumnId.SUBJECT)[rows]] if ColumnId.SUBJECT in batch else ids[0]
        body_bytes[:] = batch.body_bytes()[rows]
        location = SCHEDULE_BIT | offset << ROW_BITS
        locations[:] = np.arange(location, location + batch.count, dtype=np.uint64)[rows]
        hashes[:] = batch.content_hashes()[rows]
        self._hashed = self._rows.count

    def add_rows(self, rows: ScheduleRows) -> None:
        if not len(rows):
            return
        self._close_singles()
        self._hash()
        ids = np.array([self.subjects.number(name) for name in rows.subjects], np.uint32)
        columns = rows.sequence, rows.deliver_at_ms, rows.appended_at_ms, ids[rows.subject], rows.body_bytes
        for room, column in zip(self._rows.more(len(rows)), (*columns, rows.location, rows.hashes()), strict=True):
            room[:] = column
        self._left_out.append(rows.left_out)
        self._expiring.append(rows.expiring)
        self._labelled.append(rows.labelled)
        self._hashed = self._rows.count

    def add_unfiled(self, rows: ScheduleRows) -> None:
        """Add rows that stand in no schedule log, as far as their subjects are wanted."""
        if self._wanted is not None:
            wanted = np.array([self._wanted(name) for name in rows.subjects] or [False], np.bool_)
            rows = rows.take(wanted[rows.subject])
        self.add_rows(rows)

    def rows(self) -> ScheduleRows:
        """Return all rows; nothing may be added after that."""
        self._close_singles()
        self._hash()
        sequence, due, appended, subject, body_bytes, location, hashes = self._rows.columns()
        names, left_out = self.subjects.names, np.concatenate(self._left_out)
        sparse = (Sparse(*map(np.concatenate, zip(*each, strict=True))) for each in (self._expiring, self._labelled))
        return ScheduleRows(sequence, due, appended, subject, body_bytes, location, names, hashes, left_out, *sparse)

    def _rows_of(self, batch: Batch, sequence: UInt64s) -> slice | Int64s:
        """The rows of a schedule batch to take."""
        if self._wanted is None:
            return slice(None) if self.part is None else rows_of_part(sequence, self.part)
        table = batch.subject_table
        wanted = self._wanted_of.get(table)
        if wanted is None:
            names = [name.decode("ascii") for name in batch.subjects()] or [""]
            wanted = self._wanted_of[table] = np.array([self._wanted(name) for name in names], np.bool_)
        subject = batch.uint32s(ColumnId.SUBJECT) if ColumnId.SUBJECT in batch else np.zeros(batch.count, np.uint32)
        rows = np.flatnonzero(wanted[subject])
        return rows if self.part is None else rows[rows_of_part(sequence[rows], self.part)]

    def _add_expiring(self, batch: Batch, sequence: UInt64s) -> None:
        instants = batch.int64s(ColumnId.EXPIRES_AT_MS)
        rows = np.flatnonzero(instants)
        self._expiring.append(Sparse(sequence[rows], instants[rows]))

    def _add_labels(self, batch: Batch, sequence: UInt64s) -> None:
        if _LABELS.isdisjoint(batch.layout.columns):
            return
        none = Region(NO_UINT64S, np.zeros(batch.count, np.int64))
        try:
            tags, keys = (
                region_of(batch, column) if column in batch else none
                for column in (ColumnId.TAGS_END, ColumnId.KEY_END)
            )
            self._hash_labels(
                sequence, tags, keys, [(each, batch.column(each)) for each in LABEL_COLUMNS if each in batch]
            )
        except ValueError:
            raise BatchMalformed("its keys or tags do not lie in its heap") from None

    def _hash_labels(
        self, sequence: UInt64s, tags: Region, keys: Region, kept: Sequence[tuple[ColumnId, NDArray[Any]]]
    ) -> None:
        hashes = hash_items(0, tags, keys)
        for column, values in kept:
            rows = np.flatnonzero(values)
            hashes[rows] = mixed(hashes[rows] + np.uint64(column)) + values[rows].astype(np.uint64)
        rows = np.flatnonzero(hashes != NO_LABEL)
        self._labelled.append(Sparse(sequence[rows], hashes[rows]))

    def _add_regions(self, headers: Region | None, bodies: Region) -> None:
        """Copy the parts of the next rows that are to be hashed, because the batch's memory is used again."""
        if headers is None:
            self._headers.add_empty(len(bodies))
        else:
            self._headers.add(headers)
            self._any_headers = True
        self._bodies.add(bodies)

    def _hash(self) -> None:
        if self._hashed == self._rows.count:
            return
        columns = self._rows.columns()
        headers, bodies = self._headers.take(), self._bodies.take()
        states = self.subjects.states().take(columns[SUBJECT_COLUMN][self._hashed :])
        columns[HASH_COLUMN][self._hashed :] = hash_items(states, headers if self._any_headers else None, bodies)
        self._hashed, self._any_headers = self._rows.count, False

    def _close_singles(self) -> None:
        if not self._singles:
            return
        self._hash()
        for room, column in zip(self._rows.more(len(self._singles)), zip(*self._singles, strict=True), strict=False):
            room[:] = np.array(column, room.dtype)
        headers = _region([item for item, _ in self._items]) if any(item for item, _ in self._items) else None
        words = np.frombuffer(b"".join([body for _, body in self._items]), np.uint64)
        lengths = self._rows.columns()[BODY_BYTES_COLUMN][self._hashed :].astype(np.int64)
        self._add_regions(headers, Region(words, lengths))
        self._singles, self._items = [], []
        self._hash()
        if self._labels:
            sequences, tags, keys, kept = zip(*self._labels, strict=True)
            columns = np.array(kept, np.uint64).T
            labels = list(zip(LABEL_COLUMNS, columns, strict=True))
            self._hash_labels(np.array(sequences, np.uint64), _region(tags), _region(keys), labels)
            self._labels = []


def _item_of_one(batch: Batch, column: ColumnId) -> bytes:
    if column not in batch:
        return b""
    begin = batch.region_start(column)
    (end,) = U32.unpack_from(batch.buffer, batch.offsets[column])
    return bytes(batch.heap[begin:end])


def _region(items: Sequence[bytes]) -> Region:
    words = np.frombuffer(b"".join([item + PADS[-len(item) & 7] for item in items]), np.uint64)
    return Region(words, np.fromiter(map(len, items), np.int64, len(items)))


class SequenceSampler:
    """Gathers one sequence in every ``step`` of the batches that are added."""

    part = None
    whole = False

    def __init__(self, step: int) -> None:
        self.step = step
        self.sequences: list[UInt64s] = [NO_UINT64S]

    def add_schedule_batch(self, batch: Batch, offset: int) -> None:
        self.sequences.append(batch.uint64s(ColumnId.SEQUENCE)[:: self.step].copy())


def rows_of_part(sequence: UInt64s, part: range) -> Int64s:
    """The indices of rows whose sequence is in a part of an hour."""
    return np.flatnonzero((sequence >= np.uint64(part.start)) & (sequence <= np.uint64(part.stop - 1)))


def named_of(table: NDArray[np.void], index: Int64s) -> tuple[NDArray[np.void], Int64s]:
    """A table and an index into it; of a table with more rows than the index, only a copy of the rows that it names."""
    if len(table) <= len(index):
        return table, index
    return table.take(index), np.arange(len(index))


class Join:
    """Rows of another log by the schedule row that they belong to.

    ``same``: each scheduled row is there once, in the same order, so columns can be compared directly.

    Example: rows 3, 5 and 9 are scheduled, and the other log has 9, 5, 7, 5. Then ``known`` is true, true, false, true;
    its ``rows`` 0, 1 and 3 belong to the ``scheduled`` rows 2, 1 and 1; ``times`` are 0, 2, 1; ``first`` is -1, 1, 0.
    """

    def __init__(self, scheduled: UInt64s, sequence: UInt64s) -> None:
        count = len(scheduled)
        self.same = _are_the_same(scheduled, sequence)
        if self.same:
            self.known: Mask = np.ones(count, np.bool_)
            self.rows = self.scheduled = self.first = np.arange(count)
            self.times = np.ones(count, np.int64)
            return
        place = _places(scheduled, sequence)
        self.known = place >= 0
        # Rows of the other log that have a schedule row; ``scheduled`` has that row for each.
        self.rows = np.flatnonzero(self.known)
        self.scheduled = place if len(self.rows) == len(place) else place[self.rows]
        self.times = np.bincount(self.scheduled, minlength=count)
        # Filled from behind, so that the first row of each sequence is written last and stays.
        self.first = np.full(count, -1, np.int64)
        self.first[self.scheduled[::-1]] = self.rows[::-1]

    @property
    def first_rows(self) -> Places | None:
        return None if self.same else self.first

    def of_first(self, values: NDArray[Any]) -> NDArray[Any]:
        """The value in the first row that belongs to each scheduled row, anything where none does; not to be written
        to.

        ``values`` is a column of the other log, which has rows.
        """
        return values if self.same else values[np.maximum(self.first, 0)]

    def lowest(self, values: Int64s, lowest: Int64s, which: Mask | None = None) -> None:
        """Lower an entry of ``lowest`` for each scheduled row; ``values`` has one for each of `rows`, or of some."""
        if self.same and (which is None or which.all()):
            np.minimum(lowest, values, out=lowest)
            return
        scheduled = self.scheduled
        if which is not None and not which.all():
            scheduled, values = scheduled[which], values[which]
        if self.times.max(initial=0) > 1:
            # Nearly all rows are there once, and need no slow loop.
            again = self.times[scheduled] > 1
            np.minimum.at(lowest, scheduled[again], values[again])
            scheduled, values = scheduled[~again], values[~again]
        lowest[scheduled] = np.minimum(lowest[scheduled], values)


class Fields:
    """The fields of a table as contiguous columns, each with a zero behind the last row; made when asked for."""

    def __init__(self, table: NDArray[np.void]) -> None:
        self.table = table
        self._fields: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        field = self._fields.get(name)
        if field is None:
            field = self._fields[name] = np.append(self.table[name], np.zeros(1, self.table.dtype[name]))
        return field


class JoinedFields:
    """A table's fields, one value for each scheduled row, zeros where it has no row; each made when asked for."""

    def __init__(self, table: Fields, row_of: Int64s, first: Int64s | None) -> None:
        """``row_of`` is an index into ``table``, ``first`` one into that, -1 for none; None: each row, in its order."""
        self._table = table
        # A zero stands behind the last row, and an index of -1 names it.
        self._index = row_of if first is None else np.append(row_of, len(table.table)).take(first)
        self._fields: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        field = self._fields.get(name)
        if field is None:
            field = self._fields[name] = self._table[name].take(self._index)
        return field


def reordered(columns: Sequence[NDArray[Any]], order: NDArray[np.intp]) -> list[NDArray[Any]]:
    """Copy columns into another order; they are used up: one column's memory takes the next one of its width."""
    spare: dict[int, NDArray[Any]] = {}
    moved: list[NDArray[Any]] = []
    for column in columns:
        # Columns with the same value in each row are not rare: one subject, nothing past due, bodies of one size.
        if len(column) == len(order) and len(column) and (column == column[0]).all():
            moved.append(column)
            continue
        room = spare.pop(column.itemsize, None)
        # With any other mode numpy would fill a buffer of its own first.
        moved.append(np.take(column, order, out=None if room is None else room.view(column.dtype), mode="clip"))
        if column.flags.writeable and len(column) == len(order):
            spare[column.itemsize] = column
    return moved


def rising(sequences: UInt64s) -> NDArray[np.intp]:
    """The order in which sequences rise; of equal ones the first stays first."""
    table = _table(sequences)
    if table is not None:
        order = table if len(table) == len(sequences) else table[table >= 0]
        if len(order) == len(sequences) and (order is not table or int(table.min()) >= 0):
            return order
    return np.argsort(sequences, kind="stable")


class Sorter:
    """Puts the rows of several logs in the order of their sequences.

    Messages are filed, handed over and recorded in the order in which they are due, so the logs of an hour mostly hold
    the same sequences. To compare two of them costs a tenth of sorting one.
    """

    def __init__(self) -> None:
        # Sequences as a log has them, their order, and the sequences in it.
        self._known: list[tuple[UInt64s, NDArray[np.intp], UInt64s]] = []

    def sort(self, sequence: UInt64s, columns: Sequence[NDArray[Any]]) -> tuple[UInt64s, list[NDArray[Any]]]:
        """Sort the rows of a log by rising sequence; of one sequence the first stays first. ``columns`` are used up.

        The sequences that are returned are not to be written to.
        """
        for known, order, ordered in self._known:
            if np.array_equal(known, sequence):
                return ordered, reordered(columns, order)
        order = rising(sequence)
        ordered = sequence.take(order)
        ordered.flags.writeable = False
        self._known.append((sequence, order, ordered))
        return ordered, reordered(columns, order)

    def outcomes(self, found: OutcomeRows) -> OutcomeRows:
        if rises(found.sequences):
            return found
        columns = found.deliver_at_ms, found.content_hash, found.part_of
        sequences, (due, hashes, part_of) = self.sort(found.sequences, columns)
        return OutcomeRows(sequences, due, found.parts, part_of, hashes)

    def stored(self, rows: TargetRows) -> TargetRows:
        if rises(rows.sequence):
            return rows
        columns = rows.deliver_at_ms, rows.hashes(), rows.batch_of
        sequence, (due, hashes, batch_of) = self.sort(rows.sequence, columns)
        return TargetRows(sequence, due, batch_of, rows.batches, rows.targets, rows.subjects, hashes)


def rises(sequences: UInt64s) -> bool:
    """Whether the rows stand by rising sequence already."""
    return bool((sequences[1:] >= sequences[:-1]).all())


def _are_the_same(scheduled: UInt64s, sequence: UInt64s) -> bool:
    return np.array_equal(scheduled, sequence) and bool((scheduled[1:] > scheduled[:-1]).all())


def _places(scheduled: UInt64s, sequence: UInt64s) -> Places:
    """For each sequence its first place in ``scheduled``, which rises; -1 where it is not there."""
    if not len(scheduled) or not len(sequence):
        return np.full(len(sequence), -1, np.int64)
    table = _table(scheduled)
    if table is not None:
        numbers = sequence - scheduled[0]  # A number below the first one wraps around and becomes very large.
        outside = numbers >= len(table)
        if outside.any():
            numbers[outside] = 0
        places: Places = table.take(numbers.view(np.int64))
        places[outside] = -1
        return places
    found: Places = np.searchsorted(scheduled, sequence).astype(np.int64)
    inside = np.minimum(found, len(scheduled) - 1)
    found[(found >= len(scheduled)) | (scheduled[inside] != sequence)] = -1
    return found


def _table(sequences: UInt64s) -> Places | None:
    """The first index of each number from the lowest sequence on, -1 for none; None if it would be too sparse."""
    if not len(sequences):
        return None
    lowest = int(sequences.min())
    span = int(sequences.max()) - lowest + 1
    if span > TABLE_ENTRIES_PER_ROW_MAX * len(sequences):
        return None
    table = np.full(span, -1, np.int64)
    table[(sequences - np.uint64(lowest)).view(np.int64)[::-1]] = np.arange(len(sequences))[::-1]
    return table
