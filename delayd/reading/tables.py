"""Tables: the logs of an hour as columns, for other engines: Spark, Parquet, CSV.

Invariant: a table's columns are made one by one, so only columns that are asked for are decoded. Instants are int64
milliseconds, and timestamps in UTC beside them; ids of directories are sixteen hexadecimal digits; unknown values are
null.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from delayd.content import NOT_STATED
from delayd.hours import hour_name
from delayd.location import are_filed
from delayd.log.dispatch import Outcome, OutcomeRows, Reason, reason_name
from delayd.reading.classes import STATES, Classes
from delayd.reading.columns import ScheduleRows, UInt64s
from delayd.reading.filed import FiledByLog
from delayd.reading.join import Fields, Join, JoinedFields
from delayd.reading.plan import HourBooks
from delayd.reading.realtime import TargetRows

INSTANT_SUFFIX = "_at_ms"
OUTCOMES = ("", *(outcome.name for outcome in Outcome))
REASONS = tuple(reason_name(reason).upper() if reason else "" for reason in range(256))

NO_TEXT = np.empty(0, np.str_)

Mask = NDArray[np.bool_]


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
        """Some of its rows."""
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
        """For each outcome its part."""
        return self.outcomes.parts[self.outcomes.part_of]

    @cached_property
    def others(self) -> UInt64s:
        """For each outcome the sequence of the row that took the message's place, or that it met; 0 for none."""
        return self.outcomes.others(np.arange(len(self.outcomes.sequences)))

    @cached_property
    def _first_outcome(self) -> NDArray[np.int64]:
        """For each scheduled row its first outcome; -1 for none."""
        return Join(self.schedule.sequence, self.outcomes.sequences).first

    @cached_property
    def decided(self) -> JoinedFields:
        """For each scheduled row the part of its first outcome."""
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


class HourTables(LogTables):
    """The books of one hour, each log read at most once."""

    def __init__(self, books: HourBooks) -> None:
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
        """For each row of the targets its batch."""
        return self.realtime.batches[self.realtime.batch_of]

    @cached_property
    def states(self) -> NDArray[np.int64]:
        """For each scheduled row its class, as the audit counts it."""
        return Classes(self.schedule, self.outcomes, self.realtime, self.books.terms).states()

    def of_subject(self, kind: str, subject: str) -> Mask:
        """Which rows of a table are of a subject; the subject of an outcome is that of its scheduled row."""
        number = [index for index, name in enumerate(self.schedule.subjects) if name == subject]
        scheduled = np.isin(self.schedule.subject, number)
        if kind == "dispatch":
            return np.isin(self.outcomes.sequences, self.schedule.sequence[scheduled])
        if kind == "decision":
            return np.isin(self.accepted.ended["sequence"], self.schedule.sequence[scheduled])
        if kind == "accepted":
            rows = self.accepted.rows
            return np.isin(rows.subject, [index for index, name in enumerate(rows.subjects) if name == subject])
        if kind == "message":
            number = [index for index, name in enumerate(self.realtime.subjects) if name == subject]
            return np.isin(self.stored["subject"], number)
        return scheduled


Tables = TypeVar("Tables", bound=LogTables)
Column = Callable[[HourTables], Cells]
LogColumn = Callable[[LogTables], Cells]


@dataclass(frozen=True, slots=True)
class TableKind(Generic[Tables]):
    """One kind of table: how many rows an hour has, and for each column its type and how it is made.

    Types are "string", "long", "boolean" and "timestamp", as Spark calls them, and "id", a string. Each instant is
    there twice: as a number of milliseconds, ``…_at_ms``, and as a timestamp in UTC, ``…_at``.
    """

    count: Callable[[Tables], int]
    own: Mapping[str, tuple[str, Callable[[Tables], Cells]]]

    @property
    def columns(self) -> dict[str, tuple[str, Callable[[Tables], Cells]]]:
        """All columns, in order."""
        columns: dict[str, tuple[str, Callable[[Tables], Cells]]] = {
            "hour": ("string", lambda tables: _same(hour_name(tables.hour), self.count(tables)))
        }
        for name, (kind, make) in self.own.items():
            columns[name] = kind, make
            if name.endswith(INSTANT_SUFFIX):
                columns[name.removesuffix("_ms")] = "timestamp", _as_instant(make)
        return columns


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


def text(values: Sequence[str | None], *, known: bool = False) -> Cells:
    """A column of text from a few values; with ``known`` none of them is None."""
    names = [value or "" for value in values]
    mask = None if known else np.array([value is not None for value in values], np.bool_)
    return Cells(np.arange(len(names)), mask, names)


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
    """Content hashes as signed numbers of 64 bits, because engines have no unsigned ones; a hash that is not stated is
    null.
    """
    return Cells(values.view(np.int64), values != NOT_STATED)


def _names(names: Sequence[str], index: NDArray[np.generic]) -> Cells:
    return Cells(index.astype(np.int64), None, [*names, ""])


def _ids(values: NDArray[np.generic], known: Mask | None = None) -> Cells:
    distinct, index = np.unique(values, return_inverse=True)
    return Cells(index.astype(np.int64), known, [f"{value:016x}" for value in distinct.tolist()])


def _outcomes(parts: NDArray[np.void] | JoinedFields) -> Cells:
    outcome = parts["outcome"]
    return Cells(outcome.astype(np.int64), outcome != 0, OUTCOMES)


def _reasons(parts: NDArray[np.void] | JoinedFields) -> Cells:
    """Why a message was cancelled; null for all others."""
    reason = parts["reason"]
    return Cells(reason.astype(np.int64), reason != 0, REASONS)


def _own_id(tables: LogTables, count: int) -> Cells:
    return _same(f"{tables.log_id:016x}", count)


def _place(count: int) -> Cells:
    return Cells(np.arange(count))


def _late_ms(tables: LogTables) -> Cells:
    parts = tables.decided
    late_ms = parts["target_appended_at_ms"] - tables.schedule.due_from_ms()
    return _longs(late_ms, parts["outcome"] == Outcome.DISPATCHED)


def _claims(parts: NDArray[np.void] | JoinedFields) -> Cells:
    """When rows were taken to be handed over, also those that had expired by then; null for all others."""
    return _longs(parts["claimed_at_ms"], _handed_over(parts) | (parts["outcome"] == Outcome.EXPIRED))


def _appends(parts: NDArray[np.void] | JoinedFields) -> Cells:
    """When the target appended rows, or the delay server that drained rows went to accepted them."""
    return _longs(parts["target_appended_at_ms"], _handed_over(parts) | (_drained(parts) & (parts["batch_id"] != 0)))


def _target_of(parts: NDArray[np.void] | JoinedFields) -> Cells:
    """The server that got rows: a realtime server, or, of drained rows, a delay server."""
    return _ids(parts["target_log_id"], _handed_over(parts) | _drained(parts))


def _told(name: str) -> LogColumn:
    return lambda tables: _longs(tables.told[name], _handed_over(tables.told))


def _stored(name: str) -> Column:
    return lambda tables: _longs(tables.stored[name])


def _stored_flag(name: str) -> Column:
    return lambda tables: Cells(tables.stored[name].astype(np.bool_))


def _handed_over(parts: NDArray[np.void] | JoinedFields) -> Mask:
    """Rows that were handed over to a realtime server; drained rows went to a delay server."""
    handed_over: Mask = (parts["target_log_id"] != 0) | (parts["outcome"] == Outcome.DISPATCHED)
    return handed_over & ~_drained(parts)


def _drained(parts: NDArray[np.void] | JoinedFields) -> Mask:
    drained: Mask = (parts["outcome"] == Outcome.CANCELLED) & (parts["reason"] == Reason.DRAINED)
    return drained


def _target_ids(tables: HourTables) -> Cells:
    ids = np.array([target.log_id for target in tables.realtime.targets] or [0], np.uint64)
    return _ids(ids[tables.stored["target"]])


SCHEDULE: dict[str, tuple[str, LogColumn]] = {
    "log_id": ("id", lambda tables: _own_id(tables, len(tables.schedule))),
    "sequence": ("long", lambda tables: _longs(tables.schedule.sequence)),
    "subject": ("string", lambda tables: _names(tables.schedule.subjects, tables.schedule.subject)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.schedule.deliver_at_ms)),
    "appended_at_ms": (
        "long",
        lambda tables: _longs(tables.schedule.appended_at_ms, tables.schedule.appended_at_ms > 0),
    ),
    "expires_at_ms": ("long", lambda tables: _or_null(tables.schedule.expires_at_ms())),
    "body_bytes": ("long", lambda tables: _longs(tables.schedule.body_bytes)),
    "content_hash": ("long", lambda tables: _hashes(tables.schedule.hashes())),
    "left_out": ("boolean", lambda tables: Cells(np.isin(tables.schedule.sequence, tables.schedule.left_out))),
    "filed": ("boolean", lambda tables: Cells(are_filed(tables.schedule.location))),
}
ACCEPTED: dict[str, tuple[str, Column]] = {
    "log_id": ("id", lambda tables: _own_id(tables, len(tables.accepted.rows))),
    "sequence": ("long", lambda tables: _longs(tables.accepted.rows.sequence)),
    "subject": ("string", lambda tables: _names(tables.accepted.rows.subjects, tables.accepted.rows.subject)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.accepted.rows.deliver_at_ms)),
    "appended_at_ms": ("long", lambda tables: _longs(tables.accepted.rows.appended_at_ms)),
    "expires_at_ms": ("long", lambda tables: _or_null(tables.accepted.rows.expires_at_ms())),
    "body_bytes": ("long", lambda tables: _longs(tables.accepted.rows.body_bytes)),
    "content_hash": ("long", lambda tables: _hashes(tables.accepted.rows.hashes())),
}
DECISION: dict[str, tuple[str, Column]] = {
    "log_id": ("id", lambda tables: _own_id(tables, len(tables.accepted.ended))),
    "sequence": ("long", lambda tables: _longs(tables.accepted.ended["sequence"])),
    "reason": ("string", lambda tables: _reasons(tables.accepted.ended)),
    "decided_at_ms": ("long", lambda tables: _longs(tables.accepted.ended["decided_at_ms"])),
}
DISPATCH: dict[str, tuple[str, LogColumn]] = {
    "log_id": ("id", lambda tables: _own_id(tables, len(tables.told))),
    "place": ("long", lambda tables: _place(len(tables.told))),
    "sequence": ("long", lambda tables: _longs(tables.outcomes.sequences)),
    "subject": ("string", lambda tables: tables.subjects_of(tables.outcomes.sequences)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.outcomes.deliver_at_ms)),
    "outcome": ("string", lambda tables: _outcomes(tables.told)),
    "reason": ("string", lambda tables: _reasons(tables.told)),
    "other_sequence": ("long", lambda tables: _longs(tables.others, tables.others != 0)),
    "target": ("id", lambda tables: _target_of(tables.told)),
    "claimed_at_ms": ("long", lambda tables: _claims(tables.told)),
    "target_appended_at_ms": ("long", lambda tables: _appends(tables.told)),
    "target_offset": ("long", _told("target_offset")),
    "epoch": ("long", _told("epoch")),
    "batch_id": ("long", _told("batch_id")),
    "attempt": ("long", lambda tables: _longs(tables.told["attempt"])),
    "content_hash": ("long", lambda tables: _hashes(tables.outcomes.content_hash)),
}
MESSAGE: dict[str, tuple[str, Column]] = {
    "log_id": ("id", _target_ids),
    "origin": ("id", lambda tables: _own_id(tables, len(tables.stored))),
    "place": ("long", lambda tables: _place(len(tables.stored))),
    "sequence": ("long", lambda tables: _longs(tables.realtime.sequence)),
    "subject": ("string", lambda tables: _names(tables.realtime.subjects, tables.stored["subject"])),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.realtime.deliver_at_ms)),
    "claimed_at_ms": ("long", _stored("claimed_at_ms")),
    "appended_at_ms": ("long", _stored("appended_at_ms")),
    "offset": ("long", _stored("offset")),
    "epoch": ("long", _stored("epoch")),
    "batch_id": ("long", _stored("batch_id")),
    "decided": ("boolean", _stored_flag("decided")),
    "newer": ("boolean", _stored_flag("newer")),
    "content_hash": ("long", lambda tables: _hashes(tables.realtime.hashes())),
}
# What became of scheduled messages.
BECAME: dict[str, tuple[str, LogColumn]] = {
    "outcome": ("string", lambda tables: _outcomes(tables.decided)),
    "reason": ("string", lambda tables: _reasons(tables.decided)),
    "other_sequence": ("long", lambda tables: _longs(tables.decided_others, tables.decided_others != 0)),
    "target": ("id", lambda tables: _target_of(tables.decided)),
    "claimed_at_ms": ("long", lambda tables: _claims(tables.decided)),
    "target_appended_at_ms": ("long", lambda tables: _appends(tables.decided)),
    "late_ms": ("long", _late_ms),
}
LIFECYCLE: dict[str, tuple[str, Column]] = {
    **SCHEDULE,
    "state": ("string", lambda tables: Cells(tables.states, None, STATES)),
    **BECAME,
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
