"""Spark says of each lie what numpy says: the report of its audit, and for each row what became of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delayd.machine.disk import RealDisk
from delayd.reading.plan import plan_audit, plan_hours
from delayd.reading.tables import TABLES, HourTables
from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS
from tests.tamper.drained import drained
from tests.tamper.honest import honest
from tests.tamper.in_spark import compare_in_spark, write_tree
from tests.tamper.liar import Liar
from tests.tamper.lies import all_lies
from tests.tamper.lies.drained import drained_lies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]


LIES_EVERY = 3  # SQL and numpy are compared on all lies about drained rows.


def test_spark_says_of_each_lie_what_numpy_says(session: SparkSession, tmp_path: Path) -> None:
    disk, now_ms = honest()
    folders: dict[str, str] = {}
    for number, lie in enumerate(all_lies()):
        liar = Liar(disk)
        lie.tell(liar)
        folders[lie.name] = write_tree(liar.disk, tmp_path / f"{number:03}")
    compared = compare_in_spark(session, folders, now_ms)
    assert compared.differences == {}
    assert compared.verdicts["unsound"] > 100


def test_spark_says_of_drained_rows_and_of_lies_about_them_what_numpy_says(
    session: SparkSession, tmp_path: Path
) -> None:
    pair = drained()
    folders = {"honest": write_tree(pair.disk, tmp_path / "honest")}
    for number, lie in enumerate(drained_lies()[::LIES_EVERY]):
        liar = Liar(pair.disk)
        lie.tell(liar)
        folders[lie.name] = write_tree(liar.disk, tmp_path / f"{number:03}")
    compared = compare_in_spark(session, folders, pair.now_ms)
    assert compared.differences == {}
    assert compared.verdicts == {"sound": 1, "unsound": len(folders) - 1}


def test_dispatch_in_spark_says_where_a_drained_row_went(session: SparkSession, tmp_path: Path) -> None:
    pair = drained()
    frame = session.read.format("delayd").option("view", "dispatch").load(write_tree(pair.disk, tmp_path / "data"))
    rows = [row for row in frame.collect() if row["reason"] == "DRAINED"]
    assert {row["target"] for row in rows} == {f"{pair.taker:016x}"}
    named = {row["sequence"]: row["other_sequence"] for row in rows}
    # Nobody knows the sequences at the taker of what is on its way.
    assert named == {sequence: sequence - 4 for sequence in range(7, 14)} | {14: None, 15: None}


def test_lifecycle_in_spark_says_of_each_row_what_the_books_say(session: SparkSession, tmp_path: Path) -> None:
    disk, _ = honest()
    liar = Liar(disk)
    named = {lie.name: lie for lie in all_lies()}
    named["a delivered batch is gone, and the checkpoint counts less"].tell(liar)
    words = set[str]()
    for number, each in enumerate((disk, liar.disk, _without_target(disk))):
        data = write_tree(each, tmp_path / str(number))
        frame = session.read.format("delayd").load(data)
        found = {(row["hour"], row["sequence"]): row["state"] for row in frame.collect()}
        plan, tails = plan_audit(RealDisk(), (data,), time.time_ns() // 1_000_000)
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


def _without_target(disk: MemoryDisk) -> MemoryDisk:
    """The directory of one realtime server is not there."""
    liar = Liar(disk)
    folder = f"{BOOKS}/realtime-0"
    liar.disk.remove(f"{folder}/checkpoint")
    for log in ("message", "pull"):
        for name in liar.disk.list_folder(f"{folder}/{log}"):
            liar.disk.remove(f"{folder}/{log}/{name}")
    return liar.disk
