"""The data source ``delayd``: ``spark.read.format("delayd").option("kind", "lifecycle").load(DATA)``.

Invariant: what is read is fixed when Spark plans the query: a task that is repeated reads the same rows, and what a
server writes meanwhile is left out. Load again to see more.
"""

import os
import pickle
import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from delayd.disk import RealDisk
from delayd.errors import BadArgument
from delayd.hours import hour_from_name
from delayd.reading.arrow import to_arrow
from delayd.reading.plan import AuditPlan, plan_audit, plan_hours, until_still
from delayd.reading.sums import SUMS
from delayd.reading.tables import TABLES, HourTables

ROWS_MAX = 65_536  # About 10 MB of Arrow.
TASKS_A_CORE = 3  # A task costs 60 to 75 ms, and an hour may be much longer than another.
HOURS_MAX = 1 << 32  # An hour is a u32 in every file.


class DelaydDataSource(DataSource):
    """The logs of a data directory as tables.

    Options: ``kind`` (accepted, schedule, dispatch, message or lifecycle, which is the default: one row a message;
    consumption: one row a group of consumers; tally: one row for what a segment held of an hour),
    ``from`` and ``to`` (hours as YYYYMMDDHH, both included), ``tasks``.
    """

    @classmethod
    def name(cls) -> str:
        return "delayd"

    def schema(self) -> str:
        kind = self._kind()
        types = SUMS[kind][0] if kind in SUMS else {name: type_ for name, (type_, _) in TABLES[kind].columns.items()}
        return ", ".join(f"{name} {'string' if type_ == 'id' else type_}" for name, type_ in types.items())

    def reader(self, schema: StructType) -> DataSourceReader:
        options = dict(self.options)
        first = hour_from_name(options["from"]) if "from" in options else 0
        last = hour_from_name(options["to"]) if "to" in options else HOURS_MAX
        if "path" not in options:
            raise BadArgument("nothing says where the data is: end with .load(DATA)")
        tasks = int(options.get("tasks", TASKS_A_CORE * (os.cpu_count() or 1)))
        kind = self._kind()
        reader = SumsReader if kind in SUMS else DelaydReader
        return reader(kind, options["path"], range(first, last + 1), tasks, schema.names)

    def _kind(self) -> str:
        kind = self.options.get("kind", "lifecycle")
        if kind not in TABLES and kind not in SUMS:
            raise BadArgument(f"kind {kind!r} is not one of {', '.join((*TABLES, *SUMS))}")
        return kind


class HourPartition(InputPartition):
    """Some hours, for one task."""

    def __init__(self, plan: AuditPlan) -> None:
        super().__init__(pickle.dumps(plan))


class DelaydReader(DataSourceReader):
    """Plans the hours and reads them."""

    def __init__(self, kind: str, data: str, hours: range, tasks: int, names: list[str]) -> None:
        self._kind = kind
        self._data = data
        self._hours = hours
        self._tasks = tasks
        self._names = names

    def partitions(self) -> list[InputPartition]:
        return [HourPartition(part) for part in self._plan().split(self._tasks)]

    def _plan(self) -> AuditPlan:
        def plan() -> AuditPlan:
            now_ms = time.time_ns() // 1_000_000
            return plan_audit(RealDisk(), self._data, now_ms, self._hours)[0]

        return until_still(self._data, plan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark asks for one partition with nothing in it when there is none.
        if partition.value is None:
            return
        columns = TABLES[self._kind].columns
        for books in plan_hours(RealDisk(), pickle.loads(partition.value)):
            tables = HourTables(books)
            arrays = [to_arrow(columns[name][1](tables)) for name in self._names]
            batch = pa.RecordBatch.from_arrays(arrays, names=self._names)
            for first in range(0, batch.num_rows, ROWS_MAX):
                yield batch.slice(first, ROWS_MAX)


class SumsReader(DelaydReader):
    """Reads what realtime servers say in sums: the driver has all of it when it has planned, so one task shows it."""

    def partitions(self) -> list[InputPartition]:
        columns = SUMS[self._kind][1](self._plan(), None)
        return [InputPartition(pickle.dumps([to_arrow(columns[name]) for name in self._names]))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_arrays(pickle.loads(partition.value), names=self._names)
