"""The data source ``spark.read.format("delayd").option("view", "lifecycle").load(DATA)`` (docs/spark-tables.md),
which is a sink, too (docs/spark.md).

Invariant: the driver fixes what is read (rule P3) when it plans a query. A task of a query that Spark repeats reads the
same rows: load again to see what servers have written meanwhile. A stream reads sealed hours only, which never change.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceWriter,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from delayd.errors import BadArgument
from delayd.hours import hour_from_name, hour_name
from delayd.reading.archive.notes import ArchivedKey, Note
from delayd.reading.conditions import HOURS_MAX, Comparison, Condition
from delayd.reading.files.items import ITEMS
from delayd.reading.tables import TABLES, Types
from delayd.reading.views.parts import ViewPart
from delayd.reading.views.planning import SealedHour, plan_view, sealed_hours
from delayd.reading.views.query import AUDITED, VIEWS, WITH_ITEMS, ViewQuery, schema_of, types_of

from .audit import tasks_of
from .sink import DelaydWriter, SinkOptions, check_columns

OPTIONS = ("view", "from", "to", "subject", "with", "tasks", "pushdown")
PATHS = ("path", "paths")  # How Spark hands on what `load` got.
FLAGS = {"true": True, "false": False}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COMPARISONS: dict[type[Filter], Comparison] = {
    EqualTo: Comparison.IN,
    EqualNullSafe: Comparison.IN,
    In: Comparison.IN,
    LessThan: Comparison.BELOW,
    LessThanOrEqual: Comparison.UP_TO,
    GreaterThan: Comparison.ABOVE,
    GreaterThanOrEqual: Comparison.FROM,
    StringStartsWith: Comparison.PREFIX,
    StringEndsWith: Comparison.SUFFIX,
    StringContains: Comparison.CONTAINS,
    IsNull: Comparison.NULL,
}
Offsets = dict[str, dict[str, int]]


class DelaydDataSource(DataSource):
    """The books of data directories and archives, as tables in Spark (docs/spark-tables.md lists the columns).

    Example::

        frame = spark.read.format("delayd").option("view", "dispatch").load(["/var/lib/delayd", "s3://books/delayd"])
        frame.groupBy("hour", "outcome").count().show()
        frame.select(…).write.format("delayd").option("meta", "127.0.0.1:7400").mode("append").save()

    `load` takes one path or a list: data directories, folders and URIs of archives. An hour that several of them have
    is read once. `readStream` reads each hour once, after it was sealed.

    Options of a read:
        view: which table. ``lifecycle`` (the default), ``schedule``, ``dispatch``, ``message`` and ``accepted`` have
            one row for each message, and ``decision`` for each that a decision ended; ``hours`` has one for each hour
            with the figures of its audit, ``findings`` for each message that breaks the books; ``seals`` for each seal;
            ``consumption`` for each group of consumers.
        from: the first hour, as YYYYMMDDHH.
        to: the last hour, as YYYYMMDDHH.
        subject: only rows of this subject.
        with: more columns of ``schedule`` and ``lifecycle``, separated by commas: ``key``, ``tags``, ``headers``,
            ``body``. Archives do not have them.
        tasks: how many tasks read; the default is three for each core.
        pushdown: ``true`` lets Spark hand conditions of a query on to the tasks, so that they leave out files and rows.
            It needs ``spark.sql.python.filterPushdown.enabled``.

    Options of a write, each of whose rows becomes a message:
        meta: where meta listens, as ``host:port``; the default is that of `delayd.Producer`.
        origin: a name for what is written, when rows have an ``id`` and no ``key``: the key is ``ORIGIN:ID``.
        on_conflict: what happens when a pending message has the key: ``keep`` (the default) or ``replace``.
        receipts: a folder, or its URI, that receives the receipts as Parquet files.
        dry_run: ``true`` checks all rows and sends none.
    """

    @classmethod
    def name(cls) -> str:
        return "delayd"

    def schema(self) -> StructType:
        view = self._view()
        return from_arrow_schema(schema_of(types_of(view, self._items(view))))

    def reader(self, schema: StructType) -> DataSourceReader:
        asked = self._read_options(schema)
        return PushingReader(asked) if self._flag("pushdown") else DelaydReader(asked)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        asked = self._read_options(schema)
        if asked.query.view not in TABLES and asked.query.view not in AUDITED:
            raise BadArgument(f"view {asked.query.view!r} is no stream: it has no rows of single hours; use spark.read")
        return DelaydStreamReader(asked)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise BadArgument('messages can\'t be overwritten: write with .mode("append")')
        options = SinkOptions.of(self.options)
        check_columns(schema, options)
        return DelaydWriter(options)

    def _read_options(self, schema: StructType) -> "AskedTable":
        # Spark hands every option on, so a name that is mistyped would change nothing and say nothing.
        unknown = sorted(set(self.options) - {*OPTIONS, *PATHS})
        if unknown:
            raise BadArgument(f"option {unknown[0]!r} is not one of {', '.join(OPTIONS)}")
        view = self._view()
        first, last = self._hour("from", 0), self._hour("to", HOURS_MAX)
        if last < first:
            raise BadArgument(f"from {self.options['from']} is after to {self.options['to']}: no hour lies between")
        tasks = tasks_of(self.options.get("tasks"))
        self._items(view)
        self._flag("pushdown")
        types = types_of(view, tuple(ITEMS) if view in WITH_ITEMS else ())
        for name in schema.names:
            if name not in types:
                raise BadArgument(f"view {view!r} has no column {name!r}; it has {', '.join(types)}")
        query = ViewQuery(view, tuple(schema.names), range(first, last + 1), self._subject(view))
        return AskedTable(query, self._places(), tasks)

    def _places(self) -> tuple[str, ...]:
        places = json.loads(self.options["paths"]) if "paths" in self.options else []
        places += [self.options["path"]] if "path" in self.options else []
        if not places:
            raise BadArgument("nothing says where the data is: end with .load(DATA)")
        return tuple(dict.fromkeys(places))

    def _hour(self, name: str, default: int) -> int:
        return hour_from_name(self.options[name]) if name in self.options else default

    def _view(self) -> str:
        view = self.options.get("view", "lifecycle")
        if view not in VIEWS:
            raise BadArgument(f"view {view!r} is not one of {', '.join(VIEWS)}")
        return view

    def _subject(self, view: str) -> tuple[Condition, ...]:
        if "subject" not in self.options:
            return ()
        if "subject" not in types_of(view):
            raise BadArgument(f"view {view!r} has no subjects; leave the option out")
        return (Condition("subject", Comparison.IN, (self.options["subject"],)),)

    def _items(self, view: str) -> list[str]:
        names = [name.strip() for name in self.options.get("with", "").split(",") if name.strip()]
        for name in names:
            if name not in ITEMS:
                raise BadArgument(f"with {name!r} is not one of {', '.join(ITEMS)}")
        if names and view not in WITH_ITEMS:
            raise BadArgument(f"view {view!r} has no {names[0]}; {' and '.join(WITH_ITEMS)} have")
        return names

    def _flag(self, name: str) -> bool:
        said = self.options.get(name, "false")
        if said.lower() not in FLAGS:
            raise BadArgument(f"{name} {said!r} is neither true nor false")
        return FLAGS[said.lower()]


@dataclass(frozen=True, slots=True)
class AskedTable:
    """What the options of a query ask for."""

    query: ViewQuery
    places: tuple[str, ...]
    tasks: int

    def partitions(self, query: ViewQuery) -> list[InputPartition]:
        now_ms = time.time_ns() // 1_000_000
        return [InputPartition(part) for part in plan_view(query, self.places, self.tasks, now_ms)]


def read_partition(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """What one task does."""
    # When there are no partitions, Spark asks for one that holds None.
    if partition.value is not None:
        yield from cast(ViewPart, partition.value).read()


class DelaydReader(DataSourceReader):
    """Plans which task reads which hours, and reads them."""

    def __init__(self, asked: AskedTable) -> None:
        self._asked = asked
        self._conditions: tuple[Condition, ...] = ()

    def partitions(self) -> list[InputPartition]:
        query = self._asked.query
        return self._asked.partitions(replace(query, conditions=(*query.conditions, *self._conditions)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)


class PushingReader(DelaydReader):
    """Takes the conditions of a query, too. Spark refuses a reader that does while its setting forbids that."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        types = types_of(self._asked.query.view)
        found = [condition_of(each, types) for each in filters]
        self._conditions = tuple(each for each in found if each is not None)
        # Spark compares the rows that are left once more, so a condition need not be taken as a whole.
        return filters


def condition_of(wanted: Filter, types: Types) -> Condition | None:
    """A filter of Spark as a condition; None when it is none on a column with values that tables know."""
    negated = isinstance(wanted, Not)
    inner = wanted.child if isinstance(wanted, Not) else wanted
    if isinstance(inner, IsNotNull):
        negated, inner = not negated, IsNull(inner.attribute)
    comparison = COMPARISONS.get(type(inner))
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    if comparison is None or len(path) != 1 or path[0] not in types:
        return None
    if comparison is Comparison.NULL:
        return Condition(path[0], comparison, (), negated)
    said: object = getattr(inner, "value", None)
    values = [_value(each) for each in (said if isinstance(said, tuple | list) else (said,))]
    # A comparison with null is never true, and its negation is neither.
    if None in values or (negated and isinstance(inner, EqualNullSafe)):
        return None
    return Condition(path[0], comparison, tuple(each for each in values if each is not None), negated)


def _value(said: object) -> str | int | None:
    if isinstance(said, datetime):
        moment = said if said.tzinfo else said.replace(tzinfo=UTC)
        since = moment - EPOCH
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return said if isinstance(said, str | int) else None


class DelaydStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of sealed hours: each delay server's in the order of its seals.

    An offset has for each delay server the number of the next seal, and how many there were when the stream first saw
    the server: retention may have removed hours of these, but none that was sealed later.
    """

    def __init__(self, asked: AskedTable) -> None:
        self._asked = asked
        self._notes: dict[tuple[str, ArchivedKey], Note] = {}
        self._last: Offsets | None = None

    def initialOffset(self) -> Offsets:
        return {}

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._look({})

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        del limit  # Spark gives none but "all".
        if self._last is None:
            return self._look(start)
        return {name: start.get(name, each) | {"next": each["next"]} for name, each in self._last.items()} | {
            name: each for name, each in start.items() if name not in self._last
        }

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        known = self._sealed()
        wanted: set[tuple[int, int]] = set()
        for name, until in end.items():
            log_id = int(name, 16)
            for number in range(start.get(name, {"next": 0})["next"], until["next"]):
                sealed = known.get(log_id, {}).get(number)
                if sealed is not None and sealed.is_there:
                    wanted.add((log_id, sealed.hour))
                elif number >= until["begun"]:
                    which = "of seal" if sealed is None else hour_name(sealed.hour) + ", seal"
                    what = f"hour {which} {number} of delay server {name} was removed before this stream has read it"
                    raise BadArgument(f"{what}; load an archive, too, or begin with a new checkpoint")
        if not wanted:
            return []
        hours = [hour for _, hour in wanted]
        query = self._asked.query
        within = range(max(query.hours.start, min(hours)), min(query.hours.stop, max(hours) + 1))
        return self._asked.partitions(replace(query, hours=within, only=frozenset(wanted)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)

    def _look(self, start: Offsets) -> Offsets:
        found = dict(start)
        for log_id, sealed in self._sealed().items():
            name = f"{log_id:016x}"
            before = start.get(name, {"next": min(sealed), "begun": max(sealed) + 1})
            following = before["next"]
            while following in sealed:
                following += 1
            found[name] = before | {"next": following}
        return found

    def _sealed(self) -> dict[int, dict[int, SealedHour]]:
        return sealed_hours(self._asked.places, self._notes)
