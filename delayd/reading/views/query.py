"""Query: which rows and columns of which view are asked for.

Invariant: a column is made only when it is asked for or has a condition, and only rows that meet all conditions become
Arrow.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from delayd.batch.columns import Int64s
from delayd.reading.arrow import QUANTILE_NAMES, TYPES, to_arrow
from delayd.reading.conditions import EVERY_HOUR, Condition
from delayd.reading.files.items import ITEMS
from delayd.reading.findings import COUNTS
from delayd.reading.tables import CONSUMPTION, TABLES, Cells, Types

BATCH_ROWS = 65_536  # About 10 MB of Arrow.
BODIES_ROWS = 4_096  # With bodies, of which each may have 4 MiB; most have less than 1 KiB.
HOURS, FINDINGS, SEALS, GROUPS = "hours", "findings", "seals", "consumption"
AUDITED: dict[str, Types] = {
    HOURS: {
        "hour": "string",
        "log_id": "id",
        "begins_at_ms": "long",
        "begins_at": "timestamp",
        "state": "string",
        "detail": "string",
        **dict.fromkeys((*COUNTS, *QUANTILE_NAMES), "long"),
        "balanced": "boolean",
    },
    FINDINGS: {
        "hour": "string",
        "log_id": "id",
        "kind": "string",
        "subject": "string",
        "sequence": "long",
        "deliver_at_ms": "long",
        "deliver_at": "timestamp",
        "detail": "string",
    },
}
SEAL_LONGS = ("number", "rows", "body_bytes", "dispatched", "cancelled", "dead", "expired", "in_doubt")
SEAL_TYPES: Types = {
    "hour": "string",
    "log_id": "id",
    **dict.fromkeys((*SEAL_LONGS, "due_min_ms", "due_max_ms", "tally_first", "tally_second"), "long"),
    **dict.fromkeys(("schedule_sha256", "outcomes_sha256", "previous_sha256", "sha256"), "string"),
}
# Views whose rows a plan has already.
PLANNED: dict[str, Types] = {SEALS: SEAL_TYPES, GROUPS: CONSUMPTION}
VIEWS = (*TABLES, *AUDITED, *PLANNED)
WITH_ITEMS = ("schedule", "lifecycle")  # Views whose rows can have the columns of ITEMS.
AT_TARGETS = ("message", "lifecycle", HOURS, FINDINGS)  # Views that need rows of realtime message logs.
BY_LOG = ("accepted", "decision")  # Views of message logs, which are not archived.


def types_of(view: str, items: Sequence[str] = ()) -> Types:
    """The columns of a view with their types, and behind them the items that are asked for."""
    types = TABLES[view].types if view in TABLES else (AUDITED | PLANNED)[view]
    return {**types, **{name: name for name in ITEMS if name in items}}


def schema_of(types: Types) -> pa.Schema:
    """The same columns as Arrow has them."""
    return pa.schema([(name, TYPES[kind]) for name, kind in types.items()])


@dataclass(frozen=True, slots=True)
class ViewQuery:
    """What is asked of a view; ``names`` are the columns, in order.

    ``only`` are the delay servers' log_ids and hours to read, None for all within ``hours``.
    """

    view: str
    names: tuple[str, ...]
    hours: range = EVERY_HOUR
    conditions: tuple[Condition, ...] = ()
    only: frozenset[tuple[int, int]] | None = None

    @property
    def items(self) -> list[str]:
        return [name for name in ITEMS if name in self.names]

    @property
    def schema(self) -> pa.Schema:
        types = types_of(self.view, self.items)
        return schema_of({name: types[name] for name in self.names})

    def wants(self, log_id: int, hour: int) -> bool:
        """Whether rows of this delay server and hour are asked for."""
        if hour not in self.hours or (self.only is not None and (log_id, hour) not in self.only):
            return False
        server = Cells(np.zeros(1, np.int64), None, [f"{log_id:016x}"])
        column = "origin" if self.view == "message" else "log_id"
        return all(bool(each.rows(server)[0]) for each in self.conditions if each.column == column)

    def batches(
        self,
        count: int,
        make: Callable[[str], Cells],
        read_items: Callable[[Int64s], dict[str, pa.Array]] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows that meet the conditions, among ``count`` rows.

        Args:
            count: how many rows there are.
            make: makes a column of all of them.
            read_items: reads the items of some of them; those that nobody has kept are null.
        """
        rows = np.arange(count)
        for each in self.conditions:
            rows = rows[each.rows(make(each.column).take(rows))]
            if not len(rows):
                return
        schema, items = self.schema, self.items
        cells = {name: make(name).take(rows) for name in self.names if name not in items}
        at_once = BODIES_ROWS if items else BATCH_ROWS
        for first in range(0, len(rows), at_once):
            some = slice(first, first + at_once)
            columns = {name: to_arrow(each.take(some)) for name, each in cells.items()}
            if items and read_items is not None:
                columns |= read_items(rows[some])
            length = len(rows[some])
            arrays = [columns.get(field.name, pa.nulls(length, field.type)).cast(field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
