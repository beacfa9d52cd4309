"""The data source ``spark.read.format("delayd").option("view", "lifecycle").load(DATA)`` (docs/audit.md), which is a
sink, too (docs/spark.md).

Invariant: the driver fixes what is read (rule P3) when it plans a query. A task of a query that Spark repeats reads the
same rows: load again to see what servers have written meanwhile.
"""

import pickle
import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter, InputPartition
from pyspark.sql.types import StructType

from delayd.errors import BadArgument
from delayd.hours import hour_from_name
from delayd.machine.disk import RealDisk
from delayd.reading.arrow import to_arrow
from delayd.reading.files.stored_groups import until_still
from delayd.reading.files.target_index import scan_nothing
from delayd.reading.plan import AuditPlan, plan_audit, plan_hours
from delayd.reading.tables import SUMS, TABLES, HourTables, table_of

from .audit import tasks_of
from .sink import DelaydWriter, SinkOptions, check_columns

ARROW_ROWS_MAX = 65_536  # About 10 MB of Arrow.
OPTIONS = ("view", "from", "to", "tasks")
AT_TARGETS = ("message", "lifecycle")  # Tables with rows of realtime message logs: only they need a scan of these.
HOURS_MAX = 1 << 32  # An hour is a u32 in every file.


class DelaydDataSource(DataSource):
    """The logs of a data directory, as tables in Spark (docs/audit.md lists the columns).

    Example::

        frame = spark.read.format("delayd").option("view", "dispatch").load("/var/lib/delayd")
        frame.groupBy("hour", "outcome").count().show()
        frame.select(…).write.format("delayd").option("meta", "127.0.0.1:7400").mode("append").save()

    Options of a read:
        view: which table. ``lifecycle`` (the default), ``schedule``, ``dispatch``, ``message`` and ``accepted`` have
            one row for each message, and ``decision`` for each that a decision ended; ``consumption`` has one for each
            group of consumers; ``tally`` has one for what a segment of a realtime message log held of one hour.
        from: the first hour, as YYYYMMDDHH.
        to: the last hour, as YYYYMMDDHH.
        tasks: how many tasks read; the default is three for each core.

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

    def schema(self) -> str:
        view = self._view()
        types = SUMS[view][0] if view in SUMS else TABLES[view].types
        return ", ".join(f"{name} {'string' if type_ == 'id' else type_}" for name, type_ in types.items())

    def reader(self, schema: StructType) -> DataSourceReader:
        self._check_names()
        first, last = self._hour("from", 0), self._hour("to", HOURS_MAX)
        if last < first:
            raise BadArgument(f"from {self.options['from']} is after to {self.options['to']}: no hour lies between")
        if "path" not in self.options:
            raise BadArgument("nothing says where the data is: end with .load(DATA)")
        tasks = tasks_of(self.options.get("tasks"))
        view = self._view()
        reader = SumsReader if view in SUMS else DelaydReader
        return reader(view, self.options["path"], range(first, last + 1), tasks, schema.names)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise BadArgument('messages can\'t be overwritten: write with .mode("append")')
        options = SinkOptions.of(self.options)
        check_columns(schema, options)
        return DelaydWriter(options)

    def _check_names(self) -> None:
        # Spark hands every option on, so a name that is mistyped would change nothing and say nothing.
        unknown = sorted(set(self.options) - {*OPTIONS, "path"})
        if unknown:
            raise BadArgument(f"option {unknown[0]!r} is not one of {', '.join(OPTIONS)}")

    def _hour(self, name: str, default: int) -> int:
        return hour_from_name(self.options[name]) if name in self.options else default

    def _view(self) -> str:
        view = self.options.get("view", "lifecycle")
        if view not in TABLES and view not in SUMS:
            raise BadArgument(f"view {view!r} is not one of {', '.join((*TABLES, *SUMS))}")
        return view


class DelaydReader(DataSourceReader):
    """Plans which task reads which hours, and reads them."""

    def __init__(self, view: str, data: str, hours: range, tasks: int, names: list[str]) -> None:
        self._view = view
        self._data = data
        self._hours = hours
        self._tasks = tasks
        self._names = names

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(pickle.dumps(part)) for part in self._plan().split(self._tasks)]

    def _plan(self) -> AuditPlan:
        def plan() -> AuditPlan:
            now_ms = time.time_ns() // 1_000_000
            scan = None if self._view in AT_TARGETS else scan_nothing
            groups = self._view == "consumption"
            return plan_audit(RealDisk(), self._data, now_ms, self._hours, consumption=groups, scan=scan)[0]

        return until_still(self._data, plan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # When there are no partitions, Spark asks for one that holds None.
        if partition.value is None:
            return
        for books in plan_hours(RealDisk(), pickle.loads(partition.value)):
            table = table_of(TABLES[self._view], [HourTables(books)], self._names)
            yield from table.to_arrow().to_batches(ARROW_ROWS_MAX)


class SumsReader(DelaydReader):
    """Reads the tables that hold sums of realtime servers.

    The driver has computed these tables when it has planned the query, so one task is enough.
    """

    def partitions(self) -> list[InputPartition]:
        columns = SUMS[self._view][1](self._plan(), None)
        return [InputPartition(pickle.dumps([to_arrow(columns[name]) for name in self._names]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays(pickle.loads(partition.value), names=self._names)
