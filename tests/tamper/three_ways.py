"""Numpy, SQL and Spark on lies: all must say the same, figure by figure and row by row.

Invariant: what is read is one plan, so they can only differ in what they make of it.

``python -m tests.tamper.three_ways`` compares them on every lie.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from delayd.errors import BadArgument, DamagedData
from delayd.hours import hour_name
from delayd.machine.disk import RealDisk
from delayd.reading.export import export_plan
from delayd.reading.files.stored_groups import LogMoved
from delayd.reading.fleet import plan_fleet
from delayd.testing.disk import MemoryDisk
from spark.session import open_session
from tests.simulation.audit import BOOKS
from tests.sql_audit import audit_archive_by_sql, audit_by_sql, differences
from tests.tamper.archived import Forger, honest_archive
from tests.tamper.honest import honest
from tests.tamper.in_spark import Compared, compare_in_spark, write_tree
from tests.tamper.liar import Liar
from tests.tamper.lies import all_lies
from tests.tamper.lies.archive import archive_lies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def sql_differences(disk: MemoryDisk, now_ms: int, folder: Path) -> list[str]:
    """What numpy and SQL say differently of a directory; nothing where both end with the same words."""
    try:
        fleet = plan_fleet(disk, (BOOKS,), now_ms=now_ms)
        report = fleet.audit()
    except (BadArgument, DamagedData, LogMoved):
        return []
    export_plan(disk, fleet.plan, str(folder), tails=fleet.tails)
    return differences(report, audit_by_sql(folder))


def archive_sql_differences(archive: Path, folder: Path) -> list[str]:
    """What numpy and SQL say differently of an archive, and of its seals."""
    report = plan_fleet(RealDisk(), (str(archive),), now_ms=time.time_ns() // 1_000_000).audit()
    found, seals = audit_archive_by_sql(archive, folder)
    ours = {(f"{seal.log_id:016x}", hour_name(seal.hour)): seal.state.value for seal in report.seals}
    told = [
        f"the seal of {key} is {ours.get(key)} by delayd, {seals.get(key)} by SQL"
        for key in sorted(ours.keys() | seals.keys())
        if ours.get(key) != seals.get(key)
    ]
    return differences(report, found) + told


def main() -> int:
    """Compare numpy, SQL and Spark on every lie about directories and archives; 1 when they differ."""
    with TemporaryDirectory() as folder:
        session = open_session("local[2]")
        found = [
            _on_directories(session, Path(folder) / "directories"),
            _on_archives(session, Path(folder) / "archives"),
        ]
    for by_sql, by_spark in found:
        for way, by_name in (("SQL", by_sql), ("Spark", by_spark.differences)):
            differ = {name: told for name, told in by_name.items() if told}
            for name, told in differ.items():
                print(f"{way}, {name}:", *told[:3], sep="\n  ")
            print(f"{len(by_sql)} lies, {way} says otherwise than numpy of {len(differ)}")
        print(*(f"{verdict}: {count}" for verdict, count in sorted(by_spark.verdicts.items())), sep=", ")
    return int(any(any(by_sql.values()) or by_spark.differences for by_sql, by_spark in found))


def _on_directories(session: SparkSession, folder: Path) -> tuple[dict[str, list[str]], Compared]:
    disk, now_ms = honest()
    folders: dict[str, str] = {}
    by_sql: dict[str, list[str]] = {}
    for number, lie in enumerate(all_lies()):
        liar = Liar(disk)
        lie.tell(liar)
        by_sql[lie.name] = sql_differences(liar.disk, now_ms, folder / f"export-{number}")
        folders[lie.name] = write_tree(liar.disk, folder / f"data-{number}")
    return by_sql, compare_in_spark(session, folders, now_ms)


def _on_archives(session: SparkSession, folder: Path) -> tuple[dict[str, list[str]], Compared]:
    folders: dict[str, str] = {}
    by_sql: dict[str, list[str]] = {}
    for number, lie in enumerate(archive_lies()):
        forger = Forger(honest_archive(), folder / f"archive-{number}")
        lie.tell(forger)
        by_sql[lie.name] = archive_sql_differences(forger.folder, folder / f"books-{number}")
        folders[lie.name] = str(forger.folder)
    return by_sql, compare_in_spark(session, folders, time.time_ns() // 1_000_000)


if __name__ == "__main__":
    sys.exit(main())
