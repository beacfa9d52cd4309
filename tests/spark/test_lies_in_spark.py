"""Of lies and of honest directories Spark says what numpy says: the findings, and for each row what became of it.

Invariant: one session and one job for all directories, or the start of each would take longer than the audits.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayd.disk import RealDisk
from delayd.errors import BadArgument, DamagedData, DelaydError
from delayd.reading.books import report_plan
from delayd.reading.plan import AuditPlan, plan_audit, plan_hours
from delayd.reading.tables import TABLES, HourTables
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import Folder
from spark.audit import audit_frame, report_of
from tests.simulation.audit import BOOKS
from tests.tamper.honest import honest
from tests.tamper.liar import Liar
from tests.tamper.lies import all_lies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]

LIES = all_lies()
EVERY = 5  # One in so many lies of each kind: a task takes 60 to 75 ms.
FINDINGS_LIMIT = 1_000


def test_spark_says_of_a_lie_what_numpy_says(session: SparkSession, tmp_path: Path) -> None:
    disk, now_ms = honest()
    plans: dict[str, AuditPlan] = {}
    for number, name in enumerate(_chosen()):
        liar = Liar(disk)
        LIES[name].tell(liar)
        data = _written(liar.disk, tmp_path / f"{number:03}")
        try:
            plan, _ = plan_audit(RealDisk(), data, now_ms)
        except (BadArgument, DamagedData):
            continue  # The plan is made by the driver: it ends Spark's audit with the same words.
        if plan.hour_count:
            plans[data] = plan
    assert len(plans) > 20
    frames = [
        audit_frame(session, plan, FINDINGS_LIMIT, 1).selectExpr(f"'{data}' as data", "*")
        for data, plan in plans.items()
    ]
    rows: Mapping[str, list[dict[str, Any]]] = defaultdict(list)
    for row in reduce(lambda one, other: one.union(other), frames).toArrow().to_pylist():
        rows[row["data"]].append(row)
    found = 0
    for data, plan in plans.items():
        try:
            expected = report_plan(
                RealDisk(), data, now_ms, plan, plan_audit(RealDisk(), data, now_ms)[1], FINDINGS_LIMIT
            )
        except DamagedData as damage:
            with pytest.raises(DelaydError) as told:
                report_of(rows[data], data, now_ms, plan, FINDINGS_LIMIT)
            assert told.value.message == damage.message
            continue
        assert report_of(rows[data], data, now_ms, plan, FINDINGS_LIMIT) == expected
        found += not expected.balanced
    assert found > 10


def test_lifecycle_in_spark_says_of_each_row_what_the_books_say(session: SparkSession, tmp_path: Path) -> None:
    disk, _ = honest()
    liar = Liar(disk)
    named = {lie.name: lie for lie in LIES}
    named["a delivered batch is gone, and the checkpoint counts less"].tell(liar)
    words = set[str]()
    for number, each in enumerate((disk, liar.disk, _without_target(disk))):
        data = _written(each, tmp_path / str(number))
        frame = session.read.format("delayd").load(data)
        found = {(row["hour"], row["sequence"]): row["state"] for row in frame.collect()}
        plan, tails = plan_audit(RealDisk(), data, time.time_ns() // 1_000_000)
        expected: dict[tuple[object, object], object] = {}
        for books in plan_hours(RealDisk(), plan, tails):
            tables = HourTables(books)
            columns = {name: make(tables).to_list() for name, (_, make) in TABLES["lifecycle"].columns.items()}
            expected |= {
                key[:2]: key[2] for key in zip(columns["hour"], columns["sequence"], columns["state"], strict=True)
            }
        assert found == expected
        words |= set(found.values())
    assert {"DELIVERED", "LOST", "UNPROVEN", "PENDING"} <= words


def _chosen() -> list[int]:
    """Some lies of each kind."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for number, lie in enumerate(LIES):
        kinds[lie.kind].append(number)
    return [number for numbers in kinds.values() for number in numbers[::EVERY]]


def _without_target(disk: MemoryDisk) -> MemoryDisk:
    """The directory of one realtime server is not there."""
    liar = Liar(disk)
    folder = f"{BOOKS}/realtime-0"
    liar.disk.remove(f"{folder}/checkpoint")
    for log in ("message", "pull"):
        for name in liar.disk.list_folder(f"{folder}/{log}"):
            liar.disk.remove(f"{folder}/{log}/{name}")
    return liar.disk


def _written(disk: MemoryDisk, path: Path, folder: str = BOOKS) -> str:
    """Write a folder of a fake disk to the real one; its path."""
    path.mkdir(parents=True)
    for name in disk.list_folder(folder):
        if isinstance(disk._find(f"{folder}/{name}"), Folder):
            _written(disk, path / name, f"{folder}/{name}")
            continue
        file = disk.open(f"{folder}/{name}")
        (path / name).write_bytes(file.pread(file.size(), 0))
        file.close()
    return str(path)
