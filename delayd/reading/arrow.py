"""Columns of a table as Arrow arrays, made without a Python object for each row, and an audit's report as tables.

Importing it needs pyarrow.
"""

import numpy as np
import pyarrow as pa

from delayd.hours import HOUR_MS, hour_name
from delayd.reading.books import AuditReport
from delayd.reading.findings import COUNTS, QUANTILES
from delayd.reading.tables import CONSUMPTION, Cells, Columns, Types, columns_of, group_row

# Spark has microseconds only.
TIMESTAMP = pa.timestamp("us", "UTC")
TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "id": pa.string(),
    "long": pa.int64(),
    "boolean": pa.bool_(),
    "timestamp": TIMESTAMP,
    "key": pa.string(),
    "tags": pa.list_(pa.string()),
    "headers": pa.map_(pa.string(), pa.binary()),
    "body": pa.binary(),
}
INSTANT = pa.timestamp("ms", "UTC")
QUANTILE_NAMES = ("late_p50_ms", "late_p99_ms", "late_p999_ms")
FINDINGS = pa.schema(
    [
        *((name, pa.string()) for name in ("log_id", "hour", "kind", "subject")),
        ("sequence", pa.uint64()),
        ("deliver_at", INSTANT),
        ("detail", pa.string()),
    ]
)
HOURS = pa.schema(
    [
        *((name, pa.string()) for name in ("log_id", "hour")),
        ("begins_at", INSTANT),
        *((name, pa.int64()) for name in (*COUNTS, *QUANTILE_NAMES)),
        ("balanced", pa.bool_()),
    ]
)


def to_arrow(cells: Cells) -> pa.Array:
    """Make an Arrow array of a column."""
    mask = None if cells.known is None else ~cells.known
    if cells.instant:
        return pa.array(cells.values.astype(np.int64) * 1_000, TIMESTAMP, mask=mask)
    if cells.names is None:
        return pa.array(cells.values, mask=mask)
    return pa.array(cells.names, pa.string()).take(pa.array(cells.values.astype(np.int64), mask=mask))


def arrow_table(types: Types, cells: Columns) -> pa.Table:
    """Make an Arrow table of columns; ``types`` names the type of each."""
    schema = pa.schema([(name, TYPES[kind]) for name, kind in types.items()])
    return pa.table([to_arrow(cells[name]).cast(TYPES[kind]) for name, kind in types.items()], schema=schema)


def hours_table(report: AuditReport) -> pa.Table:
    """The figures of an audit as a table, with one row for each hour.

    Example::

        hours_table(report).to_pandas().set_index("begins_at")["dispatched"].plot()

    Args:
        report: what `audit_directory` returned.
    """
    rows = [
        {
            "log_id": f"{hour.log_id:016x}",
            "hour": hour_name(hour.hour),
            "begins_at": hour.hour * HOUR_MS,
            **{name: getattr(hour, name) for name in COUNTS},
            **{name: hour.late_ms(quantile) for name, quantile in zip(QUANTILE_NAMES, QUANTILES, strict=True)},
            "balanced": hour.balanced,
        }
        for hour in report.hours
    ]
    return pa.Table.from_pylist(rows, HOURS)


def findings_table(report: AuditReport) -> pa.Table:
    """The findings of a report as a table, one row each. A finding about totals has no message.

    Example::

        print(findings_table(report).to_pandas()[["kind", "subject", "sequence", "detail"]])

    Args:
        report: what `audit_directory` returned.
    """
    rows = [
        {
            "log_id": f"{finding.log_id:016x}",
            "hour": hour_name(finding.hour) if finding.hour else None,
            "kind": finding.kind.name,
            "subject": finding.subject or None,
            "sequence": finding.sequence or None,
            "deliver_at": finding.deliver_at_ms if finding.sequence else None,
            "detail": finding.detail,
        }
        for finding in report.findings
    ]
    return pa.Table.from_pylist(rows, FINDINGS)


def groups_table(report: AuditReport) -> pa.Table:
    """What became of messages in groups of consumers, as a table with one row for each group.

    Example::

        print(groups_table(report).to_pandas()[["subject", "consumers", "acknowledged", "outstanding"]])

    Args:
        report: what `audit_directory` returned. The table is empty when it was called with ``consumption=False``.
    """
    columns = columns_of(CONSUMPTION, [group_row(books) for books in report.groups])
    return arrow_table(CONSUMPTION, columns)
