"""Numpy and SQL on a lie: both must say the same, figure by figure and row by row.

Invariant: what is read is one plan, so they can only differ in what they make of it.

``python -m tests.tamper.three_ways`` compares them on every lie.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from delayd.errors import BadArgument, DamagedData
from delayd.reading.books import report_plan
from delayd.reading.export import export_plan
from delayd.reading.groups import LogMoved
from delayd.reading.plan import plan_audit
from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS
from tests.sql_audit import audit_by_sql, differences
from tests.tamper.honest import honest
from tests.tamper.liar import Liar
from tests.tamper.lies import all_lies


def sql_differences(disk: MemoryDisk, now_ms: int, folder: Path) -> list[str]:
    """What numpy and SQL say differently of a directory; nothing where both end with the same words."""
    try:
        plan, tails = plan_audit(disk, BOOKS, now_ms)
        report = report_plan(disk, BOOKS, now_ms, plan, tails, None)
    except (BadArgument, DamagedData, LogMoved):
        return []
    export_plan(disk, plan, str(folder), tails=tails)
    return differences(report, audit_by_sql(folder))


def main() -> int:
    """Compare numpy and SQL on every lie; 1 when they differ."""
    disk, now_ms = honest()
    differ = 0
    for lie in all_lies():
        liar = Liar(disk)
        lie.tell(liar)
        with TemporaryDirectory() as folder:
            told = sql_differences(liar.disk, now_ms, Path(folder) / "export")
        differ += bool(told)
        if told:
            print(f"{lie.name}:", *told[:3], sep="\n  ")
    print(f"{len(all_lies())} lies, SQL says otherwise than numpy of {differ}")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
