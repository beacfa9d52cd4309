"""Numpy and SQL on a lie: both must say the same, figure by figure and row by row.

Invariant: what is read is one plan, so they can only differ in what they make of it.
"""

from __future__ import annotations

from pathlib import Path

from delayd.errors import DamagedData
from delayd.reading.books import report_plan
from delayd.reading.export import export_plan
from delayd.reading.groups import LogMoved
from delayd.reading.plan import plan_audit
from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS
from tests.sql_audit import audit_by_sql, differences


def sql_differences(disk: MemoryDisk, now_ms: int, folder: Path) -> list[str]:
    """What numpy and SQL say differently of a directory; nothing where damage ends both."""
    try:
        plan, tails = plan_audit(disk, BOOKS, now_ms)
        report = report_plan(disk, BOOKS, now_ms, plan, tails, None)
    except (DamagedData, LogMoved):
        return []
    export_plan(disk, plan, str(folder), tails=tails)
    return differences(report, audit_by_sql(folder))
