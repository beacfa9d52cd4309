"""Tables: the logs of an hour as columns, for other engines: Spark, Parquet, CSV.

Invariant: a table's columns are made one by one, so only columns that are asked for are decoded. Instants are int64
milliseconds, and timestamps in UTC beside them; ids of directories are sixteen hexadecimal digits; unknown values are
null.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from delayd.content import NOT_STATED
from delayd.hours import hour_name
from delayd.location import are_filed
from delayd.log.dispatch import Outcome, OutcomeRows
from delayd.reading.classes import STATES, Classes
from delayd.reading.columns import ScheduleRows, UInt64s
from delayd.reading.filed import FiledByLog
from delayd.reading.join import Facts, Fields, Join
from delayd.reading.plan import HourBooks
from delayd.reading.realtime import TargetRows

INSTANT_SUFFIX = "_at_ms"
OUTCOMES = ("", *(outcome.name for outcome in Outcome))

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


class HourTables:
    """The books of one hour, each log read at most once."""

    def __init__(self, books: HourBooks) -> None:
        self.books = books

    @cached_property
    def schedule(self) -> ScheduleRows:
        return self.books.schedule()

    @cached_property
    def accepted(self) -> FiledByLog:
        return self.books.accepted()

    @cached_property
    def outcomes(self) -> OutcomeRows:
        return self.books.outcomes()

    @cached_property
    def realtime(self) -> TargetRows:
        return self.books.realtime()

    @cached_property
    def told(self) -> NDArray[np.void]:
        """For each outcome its part."""
        return self.outcomes.parts[self.outcomes.part_of]

    @cached_property
    def stored(self) -> NDArray[np.void]:
        """For each row of the targets its batch."""
        return self.realtime.batches[self.realtime.batch_of]

    @cached_property
    def decided(self) -> Facts:
        """For each scheduled row the part of its first outcome."""
        join = Join(self.schedule.sequence, self.outcomes.sequences)
        return Facts(Fields(self.outcomes.parts), self.outcomes.part_of, join.first)

    @cached_property
    def states(self) -> NDArray[np.int64]:
        """For each scheduled row its class, as the audit counts it."""
        return Classes(self.schedule, self.outcomes, self.realtime, self.books.terms).states()

    def subjects_of(self, sequences: UInt64s) -> Cells:
        """The subjects under which sequences were scheduled; null for a sequence that was not scheduled."""
        join = Join(self.schedule.sequence, sequences)
        subjects = np.zeros(len(sequences), np.int64)
        subjects[join.rows] = self.schedule.subject[join.scheduled]
        return Cells(subjects, join.known, [*self.schedule.subjects, ""])

    def of_subject(self, kind: str, subject: str) -> Mask:
        """Which rows of a table are of a subject; the subject of an outcome is that of its scheduled row."""
        number = [index for index, name in enumerate(self.schedule.subjects) if name == subject]
        scheduled = np.isin(self.schedule.subject, number)
        if kind == "dispatch":
            return np.isin(self.outcomes.sequences, self.schedule.sequence[scheduled])
        if kind == "accepted":
            rows = self.accepted.rows
            return np.isin(rows.subject, [index for index, name in enumerate(rows.subjects) if name == subject])
        if kind == "message":
            number = [index for index, name in enumerate(self.realtime.subjects) if name == subject]
            return np.isin(self.stored["subject"], number)
        return scheduled


Column = Callable[[HourTables], Cells]


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of table: how many rows an hour has, and for each column its type and how it is made.

    Types are "string", "long", "boolean" and "timestamp", as Spark calls them, and "id", a string. Each instant is
    there twice: as a number of milliseconds, ``…_at_ms``, and as a timestamp in UTC, ``…_at``.
    """

    count: Callable[[HourTables], int]
    own: Mapping[str, tuple[str, Column]]

    @property
    def columns(self) -> dict[str, tuple[str, Column]]:
        """All columns, in order."""
        columns: dict[str, tuple[str, Column]] = {
            "hour": ("string", lambda tables: _same(hour_name(tables.books.hour), self.count(tables)))
        }
        for name, (kind, make) in self.own.items():
            columns[name] = kind, make
            if name.endswith(INSTANT_SUFFIX):
                columns[name.removesuffix("_ms")] = "timestamp", _as_instant(make)
        return columns


def text(values: Sequence[str | None]) -> Cells:
    """A column of text from a few values."""
    names = [value or "" for value in values]
    return Cells(np.arange(len(names)), np.array([value is not None for value in values], np.bool_), names)


def _as_instant(make: Column) -> Column:
    return lambda tables: replace(make(tables), instant=True)


def _same(name: str, count: int) -> Cells:
    return Cells(np.zeros(count, np.int64), None, [name])


def _longs(values: NDArray[np.generic], known: Mask | None = None) -> Cells:
    return Cells(values.astype(np.int64), known)


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


def _outcomes(parts: NDArray[np.void] | Facts) -> Cells:
    outcome = parts["outcome"]
    return Cells(outcome.astype(np.int64), outcome != 0, OUTCOMES)


def _own_id(tables: HourTables, count: int) -> Cells:
    return _same(f"{tables.books.log_id:016x}", count)


def _place(count: int) -> Cells:
    return Cells(np.arange(count))


def _late_ms(tables: HourTables) -> Cells:
    parts = tables.decided
    late_ms = parts["target_appended_at_ms"] - tables.schedule.due_from_ms()
    return _longs(late_ms, parts["outcome"] == Outcome.DISPATCHED)


def _told(name: str) -> Column:
    return lambda tables: _longs(tables.told[name], _handed_over(tables.told))


def _stored(name: str) -> Column:
    return lambda tables: _longs(tables.stored[name])


def _stored_flag(name: str) -> Column:
    return lambda tables: Cells(tables.stored[name].astype(np.bool_))


def _decided(name: str) -> Column:
    return lambda tables: _longs(tables.decided[name], _handed_over(tables.decided))


def _handed_over(parts: NDArray[np.void] | Facts) -> Mask:
    handed_over: Mask = (parts["target_log_id"] != 0) | (parts["outcome"] == Outcome.DISPATCHED)
    return handed_over


def _target_ids(tables: HourTables) -> Cells:
    ids = np.array([target.log_id for target in tables.realtime.targets] or [0], np.uint64)
    return _ids(ids[tables.stored["target"]])


SCHEDULE: dict[str, tuple[str, Column]] = {
    "log_id": ("id", lambda tables: _own_id(tables, len(tables.schedule))),
    "sequence": ("long", lambda tables: _longs(tables.schedule.sequence)),
    "subject": ("string", lambda tables: _names(tables.schedule.subjects, tables.schedule.subject)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.schedule.deliver_at_ms)),
    "appended_at_ms": (
        "long",
        lambda tables: _longs(tables.schedule.appended_at_ms, tables.schedule.appended_at_ms > 0),
    ),
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
    "body_bytes": ("long", lambda tables: _longs(tables.accepted.rows.body_bytes)),
    "content_hash": ("long", lambda tables: _hashes(tables.accepted.rows.hashes())),
}
DISPATCH: dict[str, tuple[str, Column]] = {
    "log_id": ("id", lambda tables: _own_id(tables, len(tables.told))),
    "place": ("long", lambda tables: _place(len(tables.told))),
    "sequence": ("long", lambda tables: _longs(tables.outcomes.sequences)),
    "subject": ("string", lambda tables: tables.subjects_of(tables.outcomes.sequences)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.outcomes.deliver_at_ms)),
    "outcome": ("string", lambda tables: _outcomes(tables.told)),
    "target": ("id", lambda tables: _ids(tables.told["target_log_id"], _handed_over(tables.told))),
    "claimed_at_ms": ("long", _told("claimed_at_ms")),
    "target_appended_at_ms": ("long", _told("target_appended_at_ms")),
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
LIFECYCLE: dict[str, tuple[str, Column]] = {
    **SCHEDULE,
    "state": ("string", lambda tables: Cells(tables.states, None, STATES)),
    "outcome": ("string", lambda tables: _outcomes(tables.decided)),
    "target": ("id", lambda tables: _ids(tables.decided["target_log_id"], _handed_over(tables.decided))),
    "claimed_at_ms": ("long", _decided("claimed_at_ms")),
    "target_appended_at_ms": ("long", _decided("target_appended_at_ms")),
    "late_ms": ("long", _late_ms),
}
TABLES = {
    "accepted": Table(lambda tables: len(tables.accepted.rows), ACCEPTED),
    "schedule": Table(lambda tables: len(tables.schedule), SCHEDULE),
    "dispatch": Table(lambda tables: len(tables.told), DISPATCH),
    "message": Table(lambda tables: len(tables.stored), MESSAGE),
    "lifecycle": Table(lambda tables: len(tables.schedule), LIFECYCLE),
}
