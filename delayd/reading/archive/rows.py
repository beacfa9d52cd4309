"""Rows: what an archive's Parquet files hold, as the columns from which seals and audits are computed.

Invariant: a file gives back every value that a seal's digests cover, so that they are computed from it alone.

Importing it needs pyarrow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from delayd.batch.columns import Int64s
from delayd.batch.sequences import SCHEDULE_BIT
from delayd.errors import DamagedData, NewerFormat
from delayd.log.hour import PART, OutcomeRows
from delayd.outcome import Outcome
from delayd.reading.archive.carried import ReadItems, carried_columns, carried_types
from delayd.reading.archive.notes import VERSION, VERSION_FACT, ArchivedKey
from delayd.reading.arrow import TYPES, to_arrow
from delayd.reading.conditions import Condition
from delayd.reading.consumption import GroupBooks
from delayd.reading.files.row_arrays import BATCH, ScheduleRows, Sorter, Sparse, Target, TargetRows, UInt64s, rises
from delayd.reading.parquet import GROUP_BYTES, GROUP_ROWS, ParquetRows
from delayd.reading.tables import (
    ARCHIVED_MESSAGE,
    ARCHIVED_SCHEDULE,
    CONSUMPTION,
    REASONS,
    Cells,
    SealedRows,
    Types,
    columns_of,
    group_row,
)

SCHEDULE_TYPES: Types = {name: kind for name, (kind, _) in ARCHIVED_SCHEDULE.items()}
MESSAGE_TYPES: Types = {name: kind for name, (kind, _) in ARCHIVED_MESSAGE.items()}
PART_LONGS = ("claimed_at_ms", "target_appended_at_ms", "target_offset", "epoch", "batch_id", "attempt")
BATCH_LONGS = ("claimed_at_ms", "appended_at_ms", "offset", "epoch", "batch_id")
CONSUMPTION_TYPES: Types = {name: kind for name, kind in CONSUMPTION.items() if name != "log_id"}
START, ITEMS_FACT = "delayd.start_offset", "delayd.with"
ITEMS_ROWS = 8_192  # Rows whose items are Python objects at a time.
OUTCOME_CODES = {outcome.name: int(outcome) for outcome in Outcome}
REASON_CODES = {name: code for code, name in enumerate(REASONS)}


class FiledRows(SealedRows):
    """Rows of an archived file, with those of its other columns that were asked for."""

    def __init__(self, rows: SealedRows, carried: pa.Table) -> None:
        super().__init__(rows.schedule, rows.outcomes, rows.others)
        self.carried = carried


NO_ITEMS = pa.table({})


def write_schedule(
    path: Path, key: ArchivedKey, parts: Iterable[SealedRows], items: Sequence[str], read: ReadItems
) -> None:
    """Write an hour of a delay server; its parts rise by sequence, and ``read`` reads items of their rows."""
    facts = {**key.facts(items), **({ITEMS_FACT: ",".join(items)} if items else {})}
    with closing(ParquetRows(path, {**SCHEDULE_TYPES, **carried_types(items)}, facts)) as file:
        for part in parts:
            for piece in _bounded(part) if items else part.pieces(GROUP_ROWS):
                columns = {name: to_arrow(make(piece)) for name, (_, make) in ARCHIVED_SCHEDULE.items()}
                file.write_arrays({**columns, **carried_columns(piece.schedule, items, read)})


def _bounded(rows: SealedRows) -> Iterator[SealedRows]:
    """Pieces of rows whose bodies fit into memory together, but for a single one."""
    for piece in rows.pieces(ITEMS_ROWS):
        bytes_max = max(1, int(piece.schedule.body_bytes.max(initial=0)))
        yield from piece.pieces(max(1, GROUP_BYTES // bytes_max))


def write_message(path: Path, key: ArchivedKey, rows: TargetRows) -> None:
    """Write what a realtime server, the one target of these rows, holds of an hour, by rising sequence."""
    with closing(ParquetRows(path, MESSAGE_TYPES, {**key.facts(), START: str(rows.targets[0].start)})) as file:
        for first in range(0, len(rows.sequence), GROUP_ROWS):
            piece = rows.take(slice(first, first + GROUP_ROWS))
            file.write({name: make(piece) for name, (_, make) in ARCHIVED_MESSAGE.items()})


def write_consumption(path: Path, key: ArchivedKey, groups: Sequence[GroupBooks]) -> None:
    """Write what groups of a realtime server have done with the messages of an hour."""
    rows = [group_row(books)[1:] for books in groups]
    with closing(ParquetRows(path, CONSUMPTION_TYPES, key.facts())) as file:
        file.write(columns_of(CONSUMPTION_TYPES, rows))


def read_schedule(
    name: str,
    key: ArchivedKey,
    path: Path,
    conditions: Sequence[Condition] = (),
    carried: Sequence[str] = (),
) -> Iterator[FiledRows]:
    """Read a file of the table ``schedule`` piece by piece, by rising sequence; ``name`` is what errors call it.

    Rows that do not meet all ``conditions`` on columns of the file are left out, and a piece without any other.
    ``carried`` are columns of `carried_types` to read, as far as the file has them.

    Raises:
        DamagedData: it is no such file, or another hour's or server's.
        NewerFormat: a newer delayd wrote it.
    """
    last = -1
    for piece in _pieces(name, key, path, SCHEDULE_TYPES, carried):
        wanted = piece.meeting(conditions)
        if not len(wanted) and conditions:
            continue
        rows = _scheduled(wanted)
        sequence = rows.schedule.sequence
        if len(sequence):
            if int(sequence[0]) <= last or not (sequence[1:] > sequence[:-1]).all():
                raise DamagedData(name, 0, "its sequences do not rise")
            last = int(sequence[-1])
        yield FiledRows(rows, wanted.carried(carried))


class FileFacts(NamedTuple):
    """The facts that a file itself states."""

    rows: int
    start_offset: int  # Of the table ``message``: where its server's log began when it was read.
    items: tuple[str, ...]


def file_facts(name: str, path: Path) -> FileFacts:
    """Read the facts of a file.

    Raises:
        DamagedData: it is no such file; ``name`` is what the error calls it.
    """
    with _named_damage(name):
        said = pq.read_metadata(path)
    start = (said.metadata or {}).get(START.encode(), b"0")
    return FileFacts(int(said.num_rows), int(start), _items_of(said.metadata))


def read_message(name: str, key: ArchivedKey, path: Path) -> Iterator[TargetRows]:
    """Read a file of the table ``message``, see `read_schedule`. The one target of its rows is the archived server."""
    target = Target(name, key.log_id, file_facts(name, path).start_offset)
    last = np.uint64(0)
    for piece in _pieces(name, key, path, MESSAGE_TYPES):
        subject, subjects = piece.names("subject")
        batches, batch_of = _runs(BATCH, {"subject": subject, **{each: piece.longs(each) for each in BATCH_LONGS}})
        batches["hour"], batches["origin_log_id"], batches["decided"] = key.hour, key.origin, 1
        batches["count"] = np.bincount(batch_of, minlength=len(batches))
        sequence, hashes = (piece.longs(each).view(np.uint64) for each in ("sequence", "content_hash"))
        if len(sequence) and (sequence[0] < last or not rises(sequence)):
            raise DamagedData(name, 0, "its sequences do not rise")
        last = sequence[-1] if len(sequence) else last
        due = piece.longs("deliver_at_ms")
        yield TargetRows(sequence, due, batch_of, batches, (target,), tuple(subjects), hashes)


def read_groups(name: str, key: ArchivedKey, path: Path) -> list[GroupBooks]:
    """Read a file of the table ``consumption``, see `read_schedule`."""
    return [
        GroupBooks(
            key.log_id, int(row.pop("group_id"), 16), row.pop("subject") or "", row.pop("consumers") or "", **row
        )
        for piece in _pieces(name, key, path, CONSUMPTION_TYPES)
        for row in piece.rows()
    ]


def join_targets(parts: Sequence[TargetRows]) -> TargetRows:
    """The rows of several realtime servers as those of one audit, by rising sequence."""
    numbered = []
    for number, part in enumerate(parts):
        batches = part.batches.copy()
        batches["target"] = number
        numbered.append(replace(part, batches=batches))
    targets = tuple(target for part in parts for target in part.targets)
    return Sorter().stored(replace(join_pieces(numbered), targets=targets))


def join_pieces(parts: Sequence[TargetRows]) -> TargetRows:
    """Rows of the same realtime servers, one behind the other."""
    names: dict[str, int] = {}
    batches, batch_of, first = [np.empty(0, BATCH)], [np.empty(0, np.int64)], 0
    for part in parts:
        own = part.batches.copy()
        numbers = np.array([names.setdefault(each, len(names)) for each in part.subjects] or [0], np.uint32)
        own["subject"] = numbers[own["subject"]]
        batches.append(own)
        batch_of.append(part.batch_of + first)
        first += len(own)
    sequence = np.concatenate([np.empty(0, np.uint64), *(part.sequence for part in parts)])
    due = np.concatenate([np.empty(0, np.int64), *(part.deliver_at_ms for part in parts)])
    hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes() for part in parts)])
    rows = sequence, due, np.concatenate(batch_of), np.concatenate(batches)
    return TargetRows(*rows, parts[0].targets if parts else (), tuple(names), hashes)


class _Piece:
    """Some rows of a file, a column at a time."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def rows(self) -> list[dict[str, Any]]:
        """For a few rows."""
        found: list[dict[str, Any]] = self._table.to_pylist()
        return found

    def longs(self, name: str) -> Int64s:
        """A column of whole numbers, with 0 in place of a null."""
        values: Int64s = self._column(name).fill_null(0).to_numpy(zero_copy_only=False)
        return values

    def known(self, name: str) -> NDArray[np.bool_]:
        values: NDArray[np.bool_] = self._column(name).is_valid().to_numpy(zero_copy_only=False)
        return values

    def flags(self, name: str) -> NDArray[np.bool_]:
        values: NDArray[np.bool_] = self._column(name).fill_null(False).to_numpy(zero_copy_only=False)
        return values

    def names(self, name: str) -> tuple[Int64s, list[str]]:
        """A column of text as an index into names; "" in place of a null."""
        column = self._column(name).dictionary_encode()
        names = [*column.dictionary.to_pylist(), ""]
        index = column.indices.fill_null(len(names) - 1).to_numpy(zero_copy_only=False).astype(np.int64)
        return index, names

    def carried(self, names: Sequence[str]) -> pa.Table:
        """Some columns, as far as they are here."""
        return self._table.select([name for name in names if name in self._table.column_names])

    def meeting(self, conditions: Sequence[Condition]) -> "_Piece":
        """The rows that meet all conditions on columns that are here."""
        table = self._table
        for each in conditions:
            if each.column in table.column_names:
                table = table.filter(pa.array(each.rows(_Piece(table).cells(each.column))))
        return _Piece(table)

    def cells(self, name: str) -> Cells:
        """A column as tables have it."""
        if pa.types.is_string(self._table.schema.field(name).type):
            index, names = self.names(name)
            return Cells(index, self.known(name), names)
        values = self.flags(name) if pa.types.is_boolean(self._table.schema.field(name).type) else self.longs(name)
        return Cells(values, self.known(name))

    def _column(self, name: str) -> pa.Array:
        column = self._table.column(name).combine_chunks()
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _pieces(name: str, key: ArchivedKey, path: Path, types: Types, carried: Sequence[str] = ()) -> Iterator[_Piece]:
    with _named_damage(name), closing(pq.ParquetFile(path)) as file:
        _check_facts(name, key, file.schema_arrow)
        columns = [*types, *carried]
        types = {**types, **carried_types(_items_of(file.schema_arrow.metadata))}
        expected = [(each, TYPES[kind]) for each, kind in types.items()]
        found = [(field.name, field.type) for field in file.schema_arrow]
        if found != expected:
            raise DamagedData(name, 0, "it has other columns than this table")
        for group in range(file.num_row_groups):
            yield _Piece(file.read_row_group(group, [each for each in types if each in columns]))


def _items_of(facts: Mapping[bytes, bytes] | None) -> tuple[str, ...]:
    return tuple(filter(None, (facts or {}).get(ITEMS_FACT.encode(), b"").decode().split(",")))


def _check_facts(name: str, key: ArchivedKey, schema: pa.Schema) -> None:
    said = {fact.decode(): value.decode() for fact, value in (schema.metadata or {}).items()}
    version = said.get(VERSION_FACT, "")
    if version.isdecimal() and int(version) > VERSION:
        raise NewerFormat(name, int(version), VERSION)
    for fact, value in key.facts().items():
        if fact == VERSION_FACT:
            continue
        if said.get(fact) != value:
            raise DamagedData(name, 0, f"its {fact} is {said.get(fact)}, and its name says {value}")


@contextmanager
def _named_damage(name: str) -> Iterator[None]:
    """Give errors of pyarrow, which reads bytes that anybody may have changed, the name of the file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, UnicodeDecodeError) as error:
        first_line = str(error).partition("\n")[0]
        raise DamagedData(name, 0, f"it can't be read as Parquet: {first_line}") from error


def _scheduled(piece: _Piece) -> SealedRows:
    sequence = piece.longs("sequence").view(np.uint64)
    due, hashes = piece.longs("deliver_at_ms"), piece.longs("content_hash").view(np.uint64)
    subject, subjects = piece.names("subject")
    schedule = ScheduleRows(
        sequence,
        due,
        piece.longs("appended_at_ms"),
        subject.astype(np.uint32),
        piece.longs("body_bytes").astype(np.uint32),
        np.full(len(sequence), SCHEDULE_BIT, np.uint64),
        subjects,
        hashes,
        sequence[piece.flags("left_out")],
        _sparse(piece, "expires_at_ms", sequence),
        _sparse(piece, "labels_hash", sequence, np.uint64),
    )
    told = {name: piece.longs(name) for name in PART_LONGS}
    told |= {"outcome": _codes(piece, "outcome", OUTCOME_CODES), "reason": _codes(piece, "reason", REASON_CODES)}
    told["target_log_id"] = _ids(piece, "target")
    parts, part_of = _runs(PART, told)
    parts["count"] = np.bincount(part_of, minlength=len(parts))
    other = piece.longs("outcome_content_hash").view(np.uint64)
    stated = np.where(piece.known("outcome_content_hash"), other, hashes)
    others = _sparse(piece, "other_sequence", sequence)
    return SealedRows(schedule, OutcomeRows(sequence, due, parts, part_of, stated), others)


def _sparse(piece: _Piece, name: str, sequence: UInt64s, dtype: type = np.int64) -> Sparse:
    values = piece.longs(name)
    rows = np.flatnonzero(values)
    return Sparse(sequence[rows], values[rows].view(dtype))


def _codes(piece: _Piece, name: str, codes: Mapping[str, int]) -> Int64s:
    index, names = piece.names(name)
    known = {"": 0, **codes}
    return np.array([known[each] for each in names], np.int64)[index]


def _ids(piece: _Piece, name: str) -> Int64s:
    index, names = piece.names(name)
    return np.array([int(each or "0", 16) for each in names], np.uint64)[index].view(np.int64)


def _runs(dtype: np.dtype[Any], columns: Mapping[str, Int64s]) -> tuple[NDArray[np.void], Int64s]:
    """Rows as a table with one entry for each run of equal ones, and for each row its entry."""
    count = len(next(iter(columns.values())))
    begins = np.zeros(count, np.bool_)
    begins[:1] = True
    for values in columns.values():
        begins[1:] |= values[1:] != values[:-1]
    table = np.zeros(int(begins.sum()), dtype)
    for name, values in columns.items():
        table[name] = values[begins].astype(dtype[name])
    return table, np.cumsum(begins) - 1
