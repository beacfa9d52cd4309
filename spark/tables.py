"""Tables: the logs of an hour as columns of Arrow, for the data source.

Invariant: a table's columns are made one by one, so that only what a query names is decoded. Instants are int64
milliseconds, ids of directories sixteen hexadecimal digits; what is not known is null.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from delayd.hours import hour_name
from delayd.log.dispatch import Outcome, OutcomeRows
from delayd.reading.columns import ScheduleRows
from delayd.reading.join import Facts, Join
from delayd.reading.plan import HourBooks
from delayd.reading.realtime import TargetRows

OUTCOMES = ["", *(outcome.name for outcome in Outcome)]


class HourTables:
    """The books of one hour, each log read at most once."""

    def __init__(self, books: HourBooks) -> None:
        self.books = books

    @cached_property
    def schedule(self) -> ScheduleRows:
        return self.books.schedule()

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
        return Facts(self.outcomes.parts, self.outcomes.part_of, join.first)


Column = Callable[[HourTables], pa.Array]
Columns = dict[str, tuple[str, Column]]  # Name to Spark's type and how it is made.


def columns_of(kind: str) -> Columns:
    """The columns of a table."""
    return {"hour": ("string", lambda tables: _hour(tables, kind)), **TABLES[kind][1]}


def count_rows(kind: str, tables: HourTables) -> int:
    """Rows of a table in this hour."""
    return TABLES[kind][0](tables)


def _hour(tables: HourTables, kind: str) -> pa.Array:
    return _same(hour_name(tables.books.hour), count_rows(kind, tables))


def _same(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text), count)


def _longs(values: NDArray[np.generic], known: NDArray[np.bool_] | None = None) -> pa.Array:
    return pa.array(values.astype(np.int64), mask=None if known is None else ~known)


def _names(names: Sequence[str], index: NDArray[np.generic]) -> pa.Array:
    return pa.array([*names, ""], pa.string()).take(pa.array(index.astype(np.int64)))


def _ids(values: NDArray[np.generic], known: NDArray[np.bool_]) -> pa.Array:
    distinct, index = np.unique(values, return_inverse=True)
    texts = pa.array([f"{value:016x}" for value in distinct.tolist()], pa.string())
    return texts.take(pa.array(index.astype(np.int64), mask=~known))


def _outcomes(parts: NDArray[np.void] | Facts) -> pa.Array:
    outcome = parts["outcome"]
    return pa.array(OUTCOMES, pa.string()).take(pa.array(outcome.astype(np.int64), mask=outcome == 0))


def _own_id(tables: HourTables, count: int) -> pa.Array:
    return _same(f"{tables.books.log_id:016x}", count)


def _late_ms(tables: HourTables) -> pa.Array:
    parts = tables.decided
    late_ms = parts["target_appended_at_ms"] - tables.schedule.due_from_ms()
    return _longs(late_ms, parts["outcome"] == Outcome.DISPATCHED)


def _told(name: str) -> Column:
    return lambda tables: _longs(tables.told[name], _handed_over(tables.told))


def _stored(name: str) -> Column:
    return lambda tables: _longs(tables.stored[name])


def _decided(name: str) -> Column:
    return lambda tables: _longs(tables.decided[name], _handed_over(tables.decided))


def _handed_over(parts: NDArray[np.void] | Facts) -> NDArray[np.bool_]:
    handed_over: NDArray[np.bool_] = parts["target_log_id"] != 0
    return handed_over


def _target_ids(tables: HourTables) -> pa.Array:
    ids = np.array([target.log_id for target in tables.realtime.targets] or [0], np.uint64)
    return _ids(ids[tables.stored["target"]], np.ones(len(tables.stored), np.bool_))


SCHEDULE: Columns = {
    "log_id": ("string", lambda tables: _own_id(tables, len(tables.schedule))),
    "sequence": ("long", lambda tables: _longs(tables.schedule.sequence)),
    "subject": ("string", lambda tables: _names(tables.schedule.subjects, tables.schedule.subject)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.schedule.deliver_at_ms)),
    "appended_at_ms": (
        "long",
        lambda tables: _longs(tables.schedule.appended_at_ms, tables.schedule.appended_at_ms > 0),
    ),
    "body_bytes": ("long", lambda tables: _longs(tables.schedule.body_bytes)),
}
DISPATCH: Columns = {
    "log_id": ("string", lambda tables: _own_id(tables, len(tables.told))),
    "sequence": ("long", lambda tables: _longs(tables.outcomes.sequences)),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.outcomes.deliver_at_ms)),
    "outcome": ("string", lambda tables: _outcomes(tables.told)),
    "target": ("string", lambda tables: _ids(tables.told["target_log_id"], _handed_over(tables.told))),
    "claimed_at_ms": ("long", _told("claimed_at_ms")),
    "target_appended_at_ms": ("long", _told("target_appended_at_ms")),
    "target_offset": ("long", _told("target_offset")),
    "epoch": ("long", _told("epoch")),
    "batch_id": ("long", _told("batch_id")),
    "attempt": ("long", lambda tables: _longs(tables.told["attempt"])),
}
MESSAGE: Columns = {
    "log_id": ("string", _target_ids),
    "origin": ("string", lambda tables: _own_id(tables, len(tables.stored))),
    "sequence": ("long", lambda tables: _longs(tables.realtime.sequence)),
    "subject": ("string", lambda tables: _names(tables.realtime.subjects, tables.stored["subject"])),
    "deliver_at_ms": ("long", lambda tables: _longs(tables.realtime.deliver_at_ms)),
    "claimed_at_ms": ("long", _stored("claimed_at_ms")),
    "appended_at_ms": ("long", _stored("appended_at_ms")),
    "offset": ("long", _stored("offset")),
    "epoch": ("long", _stored("epoch")),
    "batch_id": ("long", _stored("batch_id")),
}
LIFECYCLE: Columns = {
    **SCHEDULE,
    "outcome": ("string", lambda tables: _outcomes(tables.decided)),
    "target": ("string", lambda tables: _ids(tables.decided["target_log_id"], _handed_over(tables.decided))),
    "claimed_at_ms": ("long", _decided("claimed_at_ms")),
    "target_appended_at_ms": ("long", _decided("target_appended_at_ms")),
    "late_ms": ("long", _late_ms),
}
TABLES: dict[str, tuple[Callable[[HourTables], int], Columns]] = {
    "schedule": (lambda tables: len(tables.schedule), SCHEDULE),
    "dispatch": (lambda tables: len(tables.told), DISPATCH),
    "message": (lambda tables: len(tables.stored), MESSAGE),
    "lifecycle": (lambda tables: len(tables.schedule), LIFECYCLE),
}
