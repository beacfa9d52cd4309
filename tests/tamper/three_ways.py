"""Numpy, SQL and Spark on lies: all must say the same, figure by figure and row by row.

Invariant: what is read is one plan, so they can only differ in what they make of it.

``python -m tests.tamper.three_ways`` compares them on every lie.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from delayd.errors import BadArgument, DamagedData
from delayd.reading.export import export_plan
from delayd.reading.files.stored_groups import LogMoved
from delayd.reading.fleet import plan_fleet
from delayd.testing.disk import MemoryDisk
from spark.session import open_session
from tests.simulation.audit import BOOKS
from tests.sql_audit import audit_by_sql, differences
from tests.tamper.honest import honest
from tests.tamper.in_spark import compare_in_spark, write_tree
from tests.tamper.liar import Liar
from tests.tamper.lies import all_lies


def sql_differences(disk: MemoryDisk, now_ms: int, folder: Path) -> list[str]:
    """What numpy and SQL say differently of a directory; nothing where both end with the same words."""
    try:
        fleet = plan_fleet(disk, (BOOKS,), now_ms=now_ms)
        report = fleet.audit()
    except (BadArgument, DamagedData, LogMoved):
        return []
    export_plan(disk, fleet.plan, str(folder), tails=fleet.tails)
    return differences(report, audit_by_sql(folder))


def main() -> int:
    """Compare numpy, SQL and Spark on every lie; 1 when they differ."""
    disk, now_ms = honest()
    lies = all_lies()
    folders: dict[str, str] = {}
    by_sql: dict[str, list[str]] = {}
    with TemporaryDirectory() as folder:
        for number, lie in enumerate(lies):
            liar = Liar(disk)
            lie.tell(liar)
            by_sql[lie.name] = sql_differences(liar.disk, now_ms, Path(folder) / f"export-{number}")
            folders[lie.name] = write_tree(liar.disk, Path(folder) / f"data-{number}")
        by_spark = compare_in_spark(open_session("local[2]"), folders, now_ms)
    for way, found in (("SQL", by_sql), ("Spark", by_spark.differences)):
        differ = {name: told for name, told in found.items() if told}
        for name, told in differ.items():
            print(f"{way}, {name}:", *told[:3], sep="\n  ")
        print(f"{len(lies)} lies, {way} says otherwise than numpy of {len(differ)}")
    print(*(f"{verdict}: {count}" for verdict, count in sorted(by_spark.verdicts.items())), sep=", ")
    return int(any(by_sql.values()) or bool(by_spark.differences))


if __name__ == "__main__":
    sys.exit(main())
