"""Tables: the logs of an hour, and what realtime servers sum up, as columns for numpy, Arrow, Spark and CSV.

Invariant: a table's columns are made one by one, so only columns that are asked for are decoded. Unknown values are
null, text is an index into names, and each instant is there twice, as int64 milliseconds and as a timestamp in UTC. Ids
of directories are sixteen hexadecimal digits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from delayd.batch.content import NOT_STATED
from delayd.batch.sequences import are_filed
from delayd.errors import BadSetting
from delayd.hours import hour_name
from delayd.log.hour import OutcomeRows
from delayd.outcome import Outcome, Proof, Reason, reason_name
from delayd.reading.audit import STATES, AuditTerms, Classes, FiledByLog
from delayd.reading.consumption import GroupBooks
from delayd.reading.files.origins import take_outcomes
from delayd.reading.files.row_arrays import Fields, Join, JoinedFields, ScheduleRows, Sparse, TargetRows, UInt64s
from delayd.reading.plan import AuditPlan

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

NO_TEXT = np.empty(0, np.str_)

Mask = NDArray[np.bool_]
Value = str | int | None
Types = Mapping[str, str]
"""The types of columns: "string", "long", "boolean" and "timestamp", as Spark calls them, and "id", a string."""
INSTANT_SUFFIX = "_at_ms"
OUTCOMES = ("", *(outcome.name for outcome in Outcome))
CLAIMED = tuple(outcome for outcome in Outcome if outcome.proof is Proof.CLAIM)
REASONS = tuple(reason_name(reason).upper() if reason else "" for reason in range(256))
GROUP_FIGURES = (
    *("pulled", "redelivered", "acknowledged", "given_back", "sent_back", "lapsed", "outstanding", "gaps"),
    *("ack_ms_total", "ack_ms_max"),
)
CONSUMPTION: Types = {
    "log_id": "id",
    "subject": "string",
    "consumers": "string",
    "group_id": "id",
    **dict.fromkeys(GROUP_FIGURES, "long"),
}
Parts = NDArray[np.void] | JoinedFields


@dataclass(frozen=True, slots=True)
class Cells:
    """A column: int64 or bool values, or indexes into ``names`` of a column of text; ``known`` None: none is null.

    The values of an ``instant`` are milliseconds, shown as an instant in UTC.
    """

    values: NDArray[np.generic]
    known: Mask | None = None
    names: Sequence[str] | None = None
    instant: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows: NDArray[np.generic] | slice) -> "Cells":
        return Cells(self.values[rows], None if self.known is None else self.known[rows], self.names, self.instant)

    def to_numpy(self) -> NDArray[Any]:
        """Its values as an array; masked where values are unknown."""
        values: NDArray[Any] = self.values
        if self.names is not None:
            values = np.array(self.names, np.str_)[self.values.astype(np.int64)] if len(self.values) else NO_TEXT
        elif self.instant:
            values = self.values.astype("datetime64[ms]")
        return values if self.known is None else np.ma.MaskedArray(values, ~self.known)

    def to_list(self) -> list[str | int | bool | None]:
        """Its values as Python has them."""
        listed: list[str | int | bool | None] = self.values.tolist()
        if self.names is not None:
            listed = [self.names[int(index)] for index in self.values]
        elif self.instant:
            listed = np.datetime_as_string(self.values.astype("datetime64[ms]"), timezone="UTC").tolist()
        if self.known is not None:
            listed = [value if known else None for value, known in zip(listed, self.known.tolist(), strict=True)]
        return listed


Columns = Mapping[str, Cells]


def join(parts: Sequence[Cells]) -> Cells:
    """The cells of several tables' column, one table behind the other; at least one."""
    if len(parts) == 1:
        return parts[0]
    values, names = [part.values for part in parts], [*(name for part in parts for name in part.names or ())]
    if parts[0].names is not None:
        firsts = np.cumsum([0, *(len(part.names or ()) for part in parts)]).tolist()
        values = [part.values.astype(np.int64) + first for part, first in zip(parts, firsts, strict=False)]
    known = [np.ones(len(part), np.bool_) if part.known is None else part.known for part in parts]
    is_known = None if all(part.known is None for part in parts) else np.concatenate(known)
    return Cells(np.concatenate(values), is_known, names if parts[0].names is not None else None, parts[0].instant)


def columns_of(types: Types, rows: Sequence[tuple[Value, ...]]) -> Columns:
    """Rows as columns of their types; for a few rows. None is an unknown value, and a timestamp is milliseconds."""
    columns: dict[str, Cells] = {}
    for index, (name, kind) in enumerate(types.items()):
        values = [row[index] for row in rows]
        known = None if None not in values else np.array([value is not None for value in values], np.bool_)
        if kind in ("string", "id"):
            names = [str(value or "") for value in values]
            columns[name] = Cells(np.arange(len(names)), known, names)
        else:
            numbers = np.array([value or 0 for value in values], np.bool_ if kind == "boolean" else np.int64)
            columns[name] = Cells(numbers, known, instant=kind == "timestamp")
    return columns


def count_rows(columns: Columns) -> int:
    """How many rows columns have."""
    return len(next(iter(columns.values())))


class Table:
    """A table: named numpy columns of one length. ``len()`` counts its rows, ``dict()`` makes a dict of its columns.

    Numbers are int64, flags bool, names text, and instants there twice: as milliseconds since the epoch (``…_at_ms``,
    int64) and as datetime64 in UTC (``…_at``). A column that can have unknown values is a masked array.

    Example::

        table = data.schedule("2026112216")
        print(len(table), table.names)
        late = table["late_ms"].max()
        frame = table.to_pandas()
    """

    def __init__(self, types: Types, cells: Columns) -> None:
        self._types = types
        self._cells = cells
        self._made: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._made:
            self._made[name] = self._cells[name].to_numpy()
        return self._made[name]

    def __len__(self) -> int:
        return count_rows(self._cells)

    def __repr__(self) -> str:
        return f"<Table of {len(self):,} rows: {', '.join(self.names)}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its columns, in order."""
        return tuple(self._types)

    def keys(self) -> tuple[str, ...]:
        """The same, for ``dict()``."""
        return self.names

    def to_arrow(self) -> "pa.Table":
        """The table as Arrow has it: text and unknown values become Arrow's own, instants are timestamps in UTC.

        Raises:
            BadSetting: pyarrow is missing.
        """
        need("pyarrow", "an Arrow table (the numpy columns are there without it)")
        from delayd.reading.arrow import arrow_table

        return arrow_table(self._types, self._cells)

    def to_pandas(self) -> "pd.DataFrame":
        """The table as a pandas frame, made from the Arrow table.

        Raises:
            BadSetting: pandas or pyarrow is missing.
        """
        need("pandas", "a pandas frame (the numpy columns are there without it)")
        return self.to_arrow().to_pandas()


def need(package: str, what: str, extra: str = "spark") -> None:
    """Raise BadSetting unless an optional package is there, which an ``extra`` of delayd brings."""
    if find_spec(package) is None:
        raise BadSetting(f"{what} needs {package}: pip install 'delayd[{extra}]'")


class LogTables:
    """The two logs that a delay server has of one hour, each read at most once."""

    def __init__(
        self, hour: int, log_id: int, schedule: Callable[[], ScheduleRows], outcomes: Callable[[], OutcomeRows]
    ) -> None:
        """``schedule`` reads the rows, by rising sequence; ``outcomes`` reads what is known to have become of them."""
        self.hour = hour
        self.log_id = log_id
        self._schedule, self._outcomes = schedule, outcomes

    @cached_property
    def schedule(self) -> ScheduleRows:
        return self._schedule()

    @cached_property
    def outcomes(self) -> OutcomeRows:
        return self._outcomes()

    @cached_property
    def told(self) -> NDArray[np.void]:
        return self.outcomes.parts[self.outcomes.part_of]

    @cached_property
    def others(self) -> UInt64s:
        """For each outcome the sequence of the row that took the message's place, or that it met; 0 for none."""
        return self.outcomes.others(np.arange(len(self.outcomes.sequences)))

    @cached_property
    def _first_outcome(self) -> NDArray[np.int64]:
        return Join(self.schedule.sequence, self.outcomes.sequences).first

    @cached_property
    def decided(self) -> JoinedFields:
        return JoinedFields(Fields(self.outcomes.parts), self.outcomes.part_of, self._first_outcome)

    @cached_property
    def decided_others(self) -> UInt64s:
        """For each scheduled row what `others` says of its first outcome."""
        return np.append(self.others, np.uint64(0)).take(self._first_outcome)

    def subjects_of(self, sequences: UInt64s) -> Cells:
        """The subjects under which sequences were scheduled; null for a sequence that was not scheduled."""
        join = Join(self.schedule.sequence, sequences)
        subjects = np.zeros(len(sequences), np.int64)
        subjects[join.rows] = self.schedule.subject[join.scheduled]
        return Cells(subjects, join.known, [*self.schedule.subjects, ""])


class KnownHour(Protocol):
    """One hour of a delay server: in a data directory a `HourBooks`, or some rows of it in an archive."""

    @property
    def hour(self) -> int: ...
    @property
    def log_id(self) -> int: ...
    @property
    def terms(self) -> AuditTerms: ...
    def schedule(self) -> ScheduleRows: ...
    def outcomes(self) -> OutcomeRows: ...
    def realtime(self) -> TargetRows: ...
    def accepted(self) -> FiledByLog: ...


class HourTables(LogTables):
    """The books of one hour, each log read at most once."""

    def __init__(self, books: KnownHour) -> None:
        super().__init__(books.hour, books.log_id, books.schedule, books.outcomes)
        self.books = books

    @cached_property
    def accepted(self) -> FiledByLog:
        return self.books.accepted()

    @cached_property
    def realtime(self) -> TargetRows:
        return self.books.realtime()

    @cached_property
    def stored(self) -> NDArray[np.void]:
        return self.realtime.batches[self.realtime.batch_of]

    @cached_property
    def target_ids(self) -> UInt64s:
        return np.array([target.log_id for target in self.realtime.targets] or [0], np.uint64)

    @cached_property
    def states(self) -> NDArray[np.int64]:
        """For each scheduled row its class, as the audit counts it."""
        return Classes(self.schedule, self.outcomes, self.realtime, self.books.terms).states()

    def of_subject(self, kind: str, subject: str) -> Mask:
        """Which rows of a table are of a subject; the subject of an outcome is that of its scheduled row."""

        def numbers(names: Sequence[str]) -> list[int]:
            return [number for number, name in enumerate(names) if name == subject]

        if kind == "accepted":
            return np.isin(self.accepted.rows.subject, numbers(self.accepted.rows.subjects))
        if kind == "message":
            return np.isin(self.stored["subject"], numbers(self.realtime.subjects))
        scheduled: Mask = np.isin(self.schedule.subject, numbers(self.schedule.subjects))
        if kind in ("dispatch", "decision"):
            ended = self.outcomes.sequences if kind == "dispatch" else self.accepted.ended["sequence"]
            return np.isin(ended, self.schedule.sequence[scheduled])
        return scheduled


class SealedRows:
    """Rows of a sealed hour by rising sequence, each with its one outcome."""

    def __init__(self, schedule: ScheduleRows, outcomes: OutcomeRows, others: Sparse) -> None:
        """``outcomes`` stand in the order of the rows; ``others`` are the sequences that outcomes name."""
        self.schedule, self.outcomes, self.others = schedule, outcomes, others
        self.part = JoinedFields(Fields(outcomes.parts), outcomes.part_of, None)

    def pieces(self, rows_max: int) -> "Iterator[SealedRows]":
        """The same rows, at most so many at a time."""
        for first in range(0, len(self.schedule), rows_max):
            rows = slice(first, first + rows_max)
            yield SealedRows(self.schedule.take(rows), take_outcomes(self.outcomes, rows), self.others)


Tables = TypeVar("Tables", bound=LogTables)
Column = tuple[str, Callable[[Tables], Cells]]  # Its type, and how it is made.


@dataclass(frozen=True, slots=True)
class TableKind(Generic[Tables]):
    """One kind of table: how many rows an hour has, and its own columns; each has the hour, too."""

    count: Callable[[Tables], int]
    own: Mapping[str, Column[Tables]]

    @property
    def columns(self) -> dict[str, Column[Tables]]:
        columns: dict[str, Column[Tables]] = {
            "hour": ("string", lambda tables: _same(hour_name(tables.hour), self.count(tables)))
        }
        for name, (kind, make) in self.own.items():
            columns[name] = kind, make
            if name.endswith(INSTANT_SUFFIX):
                columns[name.removesuffix("_ms")] = "timestamp", _as_instant(make)
        return columns

    @property
    def types(self) -> dict[str, str]:
        return {name: kind for name, (kind, _) in self.columns.items()}


def table_of(kind: TableKind[Tables], parts: Sequence[Tables], names: Sequence[str] | None = None) -> Table:
    """Make a table from the logs of hours, one behind the other; ``names`` are the columns, None for all."""
    columns = kind.columns
    chosen = {name: columns[name] for name in names or columns}
    types = {name: type_ for name, (type_, _) in chosen.items()}
    return Table(types, {name: join([make(part) for part in parts]) for name, (_, make) in chosen.items()})


def group_row(books: GroupBooks) -> tuple[Value, ...]:
    """A group as a row of CONSUMPTION; names that its log does not keep any more are null."""
    names = f"{books.log_id:016x}", books.subject or None, books.group or None, f"{books.group_id:08x}"
    return (*names, *(int(getattr(books, name)) for name in GROUP_FIGURES))


def consumption(plan: AuditPlan, subject: str | None = None) -> Columns:
    """The groups of all realtime servers of a plan, or those of one subject."""
    groups = (books for each in plan.consumption for books in each.groups)
    return columns_of(CONSUMPTION, [group_row(books) for books in groups if subject in (None, books.subject)])


def _as_instant(make: Callable[[Tables], Cells]) -> Callable[[Tables], Cells]:
    return lambda tables: replace(make(tables), instant=True)


def _same(name: str, count: int) -> Cells:
    return Cells(np.zeros(count, np.int64), None, [name])


def _longs(values: NDArray[np.generic], known: Mask | None = None) -> Cells:
    return Cells(values.astype(np.int64), known)


def _or_null(values: NDArray[np.int64]) -> Cells:
    """Instants; 0 is shown as null."""
    return Cells(values, values != 0)


def _hashes(values: NDArray[np.uint64]) -> Cells:
    """Content hashes as signed numbers, because engines have no unsigned ones; null where none is stated."""
    return Cells(values.view(np.int64), values != NOT_STATED)


def _names(names: Sequence[str], index: NDArray[np.generic]) -> Cells:
    return Cells(index.astype(np.int64), None, [*names, ""])


def _ids(values: NDArray[np.generic], known: Mask | None = None) -> Cells:
    distinct, index = np.unique(values, return_inverse=True)
    return Cells(index.astype(np.int64), known, [f"{value:016x}" for value in distinct.tolist()])


def _outcomes(parts: Parts) -> Cells:
    outcome = parts["outcome"]
    return Cells(outcome.astype(np.int64), outcome != 0, OUTCOMES)


def _reasons(parts: Parts) -> Cells:
    """Why a message was cancelled; null for all others."""
    reason = parts["reason"]
    return Cells(reason.astype(np.int64), reason != 0, REASONS)


def _late_ms(tables: LogTables) -> Cells:
    parts = tables.decided
    late_ms = parts["target_appended_at_ms"] - tables.schedule.due_from_ms()
    return _longs(late_ms, parts["outcome"] == Outcome.DISPATCHED)


def _claims(parts: Parts) -> Cells:
    """When rows were taken to be handed over, also those that had expired by then; null for all others."""
    return _longs(parts["claimed_at_ms"], _handed_over(parts) | np.isin(parts["outcome"], CLAIMED))


def _appends(parts: Parts) -> Cells:
    """When the target appended rows, or the delay server that drained rows went to accepted them."""
    return _longs(parts["target_appended_at_ms"], _handed_over(parts) | (_drained(parts) & (parts["batch_id"] != 0)))


def _other_due(parts: Parts) -> Cells:
    """When the row is due that took the place of a cancelled one, or that it met; null where there is none here."""
    due = parts["target_appended_at_ms"]
    return _longs(due, (parts["outcome"] == Outcome.CANCELLED) & ~_drained(parts) & (due != 0))


def _beside(ended: NDArray[np.void], name: str) -> Cells:
    """What decisions say of the row that took a message's place, or that it met; null of a drained one."""
    values = ended[name]
    return _longs(values, (values != 0) & (ended["reason"] != Reason.DRAINED))


def _target_of(parts: Parts) -> Cells:
    """The server that got rows: a realtime server, or, of drained rows, a delay server."""
    return _ids(parts["target_log_id"], _handed_over(parts) | _drained(parts))


def _handed_over(parts: Parts) -> Mask:
    """Rows that were handed over to a realtime server; drained rows went to a delay server."""
    handed_over: Mask = (parts["target_log_id"] != 0) | (parts["outcome"] == Outcome.DISPATCHED)
    return handed_over & ~_drained(parts)


def _other_hashes(rows: SealedRows) -> Cells:
    """The content hashes that outcomes state, where the schedule side states another one; 0 where they state none."""
    stated = rows.outcomes.content_hash
    return Cells(stated.view(np.int64), stated != rows.schedule.hashes())


def _drained(parts: Parts) -> Mask:
    drained: Mask = (parts["outcome"] == Outcome.CANCELLED) & (parts["reason"] == Reason.DRAINED)
    return drained


def _own_id(count: Callable[[Tables], int]) -> Column[Tables]:
    return "id", lambda tables: _same(f"{tables.log_id:016x}", count(tables))


def _rows(rows: Callable[[Tables], ScheduleRows]) -> dict[str, Column[Tables]]:

    def column(make: Callable[[ScheduleRows], Cells]) -> Callable[[Tables], Cells]:
        return lambda tables: make(rows(tables))

    return {
        "log_id": _own_id(lambda tables: len(rows(tables))),
        "sequence": ("long", column(lambda rows: _longs(rows.sequence))),
        "subject": ("string", column(lambda rows: _names(rows.subjects, rows.subject))),
        "deliver_at_ms": ("long", column(lambda rows: _longs(rows.deliver_at_ms))),
        "appended_at_ms": ("long", column(lambda rows: _longs(rows.appended_at_ms, rows.appended_at_ms > 0))),
        "expires_at_ms": ("long", column(lambda rows: _or_null(rows.expires_at_ms()))),
        "body_bytes": ("long", column(lambda rows: _longs(rows.body_bytes))),
        "content_hash": ("long", column(lambda rows: _hashes(rows.hashes()))),
        "labels_hash": ("long", column(lambda rows: _hashes(rows.label_hashes()))),
    }


def _became(
    parts: Callable[[LogTables], Parts], others: Callable[[LogTables], UInt64s]
) -> dict[str, Column[LogTables]]:
    return {
        "outcome": ("string", lambda tables: _outcomes(parts(tables))),
        "reason": ("string", lambda tables: _reasons(parts(tables))),
        "other_sequence": ("long", lambda tables: _longs(others(tables), others(tables) != 0)),
        "other_deliver_at_ms": ("long", lambda tables: _other_due(parts(tables))),
        "target": ("id", lambda tables: _target_of(parts(tables))),
        "claimed_at_ms": ("long", lambda tables: _claims(parts(tables))),
        "target_appended_at_ms": ("long", lambda tables: _appends(parts(tables))),
    }


def _told(name: str) -> Column[LogTables]:
    return "long", lambda tables: _longs(tables.told[name], _handed_over(tables.told))


def _stored(name: str) -> Column[HourTables]:
    return "long", lambda tables: _longs(tables.stored[name])


def _stored_flag(name: str) -> Column[HourTables]:
    return "boolean", lambda tables: Cells(tables.stored[name].astype(np.bool_))


def _archived_part(name: str) -> tuple[str, Callable[[SealedRows], Cells]]:
    def make(rows: SealedRows) -> Cells:
        values = rows.part[name]
        return _longs(values, (values != 0) | (rows.part["outcome"] == Outcome.DISPATCHED))

    return "long", make


def _archived_batch(name: str) -> tuple[str, Callable[[TargetRows], Cells]]:
    return "long", lambda rows: _longs(rows.batches[name][rows.batch_of])


SCHEDULE: dict[str, Column[LogTables]] = {
    **_rows(lambda tables: tables.schedule),
    "left_out": ("boolean", lambda tables: Cells(np.isin(tables.schedule.sequence, tables.schedule.left_out))),
    "filed": ("boolean", lambda tables: Cells(are_filed(tables.schedule.location))),
}
ACCEPTED: dict[str, Column[HourTables]] = _rows(lambda tables: tables.accepted.rows)
DECISION: dict[str, Column[HourTables]] = {
    "log_id": _own_id(lambda tables: len(tables.accepted.ended)),
    "sequence": ("long", lambda tables: _longs(tables.accepted.ended["sequence"])),
    "reason": ("string", lambda tables: _reasons(tables.accepted.ended)),
    "other_sequence": ("long", lambda tables: _beside(tables.accepted.ended, "other")),
    "other_deliver_at_ms": ("long", lambda tables: _beside(tables.accepted.ended, "other_at_ms")),
    "decided_at_ms": ("long", lambda tables: _longs(tables.accepted.ended["decided_at_ms"])),
}
DISPATCH: dict[str, Column[LogTables]] = {
    "log_id": _own_id(lambda tables: len(tables.told)),
    "place": ("long", lambda tables: Cells(np.arange(len(tables.told)))),
    "sequence": ("long", lambda tables: _longs(tables.outcomes.sequences)),
    "subject": ("string", lambda tables: tables.subjects_of(tables.outcomes.sequences)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.outcomes.deliver_at_ms)),
    **_became(lambda tables: tables.told, lambda tables: tables.others),
    "target_offset": _told("target_offset"),
    "epoch": _told("epoch"),
    "batch_id": _told("batch_id"),
    "attempt": ("long", lambda tables: _longs(tables.told["attempt"])),
    "content_hash": ("long", lambda tables: _hashes(tables.outcomes.content_hash)),
}
MESSAGE: dict[str, Column[HourTables]] = {
    "log_id": ("id", lambda tables: _ids(tables.target_ids[tables.stored["target"]])),
    "origin": _own_id(lambda tables: len(tables.stored)),
    "place": ("long", lambda tables: Cells(np.arange(len(tables.stored)))),
    "sequence": ("long", lambda tables: _longs(tables.realtime.sequence)),
    "subject": ("string", lambda tables: _names(tables.realtime.subjects, tables.stored["subject"])),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.realtime.deliver_at_ms)),
    **{name: _stored(name) for name in ("claimed_at_ms", "appended_at_ms", "offset", "epoch", "batch_id")},
    "decided": _stored_flag("decided"),
    "newer": _stored_flag("newer"),
    "content_hash": ("long", lambda tables: _hashes(tables.realtime.hashes())),
}
# What became of scheduled messages.
BECAME: dict[str, Column[LogTables]] = {
    **_became(lambda tables: tables.decided, lambda tables: tables.decided_others),
    "late_ms": ("long", _late_ms),
}
LIFECYCLE: dict[str, Column[HourTables]] = {
    **SCHEDULE,
    "state": ("string", lambda tables: Cells(tables.states, None, STATES)),
    **BECAME,
}
# The tables of an archive (docs/archive.md). Unlike DISPATCH they say of each outcome all that its log says, so that a
# seal can be computed from them: a null stands for 0, and for nothing else.
ARCHIVED_SCHEDULE: dict[str, tuple[str, Callable[[SealedRows], Cells]]] = {
    "sequence": ("long", lambda rows: _longs(rows.schedule.sequence)),
    "subject": ("string", lambda rows: _names(rows.schedule.subjects, rows.schedule.subject)),
    "deliver_at_ms": ("long", lambda rows: _longs(rows.schedule.deliver_at_ms)),
    "appended_at_ms": ("long", lambda rows: _or_null(rows.schedule.appended_at_ms)),
    "expires_at_ms": ("long", lambda rows: _or_null(rows.schedule.expires_at_ms())),
    "body_bytes": ("long", lambda rows: _longs(rows.schedule.body_bytes)),
    "content_hash": ("long", lambda rows: _hashes(rows.schedule.hashes())),
    "labels_hash": ("long", lambda rows: _hashes(rows.schedule.label_hashes())),
    "left_out": ("boolean", lambda rows: Cells(np.isin(rows.schedule.sequence, rows.schedule.left_out))),
    "outcome": ("string", lambda rows: _outcomes(rows.part)),
    "reason": ("string", lambda rows: _reasons(rows.part)),
    "other_sequence": ("long", lambda rows: _or_null(rows.others.of(rows.schedule.sequence))),
    "target": ("id", lambda rows: _ids(rows.part["target_log_id"], rows.part["target_log_id"] != 0)),
    **{
        name: _archived_part(name)
        for name in ("claimed_at_ms", "target_appended_at_ms", "target_offset", "epoch", "batch_id", "attempt")
    },
    "outcome_content_hash": ("long", lambda rows: _other_hashes(rows)),
}
ARCHIVED_MESSAGE: dict[str, tuple[str, Callable[[TargetRows], Cells]]] = {
    "sequence": ("long", lambda rows: _longs(rows.sequence)),
    "subject": ("string", lambda rows: _names(rows.subjects, rows.batches["subject"][rows.batch_of])),
    "deliver_at_ms": ("long", lambda rows: _longs(rows.deliver_at_ms)),
    **{name: _archived_batch(name) for name in ("claimed_at_ms", "appended_at_ms", "offset", "epoch", "batch_id")},
    "content_hash": ("long", lambda rows: _hashes(rows.hashes())),
}
TABLES: dict[str, TableKind[HourTables]] = {
    "accepted": TableKind(lambda tables: len(tables.accepted.rows), ACCEPTED),
    "decision": TableKind(lambda tables: len(tables.accepted.ended), DECISION),
    "schedule": TableKind(lambda tables: len(tables.schedule), SCHEDULE),
    "dispatch": TableKind(lambda tables: len(tables.told), DISPATCH),
    "message": TableKind(lambda tables: len(tables.stored), MESSAGE),
    "lifecycle": TableKind(lambda tables: len(tables.schedule), LIFECYCLE),
}
# The tables that the logs of a delay server give without those of its targets.
SCHEDULED: TableKind[LogTables] = TableKind(lambda tables: len(tables.schedule), {**SCHEDULE, **BECAME})
DISPATCHED: TableKind[LogTables] = TableKind(lambda tables: len(tables.told), DISPATCH)
