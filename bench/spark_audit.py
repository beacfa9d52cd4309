"""``python -m bench.spark_audit --rows 5000000``: an audit in Spark of two delay and two realtime servers, and a join.

Two directories are written with the formats' own encoders, in hours of 250,000 rows with bodies of 40 bytes, and the
audit reads them as one fleet. Beside it stands the plain join that `bench.audit` has DuckDB do, by Spark itself over
Parquet of the same tables: it counts, and judges by no rule. The best of some turns counts. One JSON line for each
number of rows has both times by the clock and by the CPU time of all processes together, how many times as long the
join takes, the driver's share of the audit (its own CPU time of the time by the clock), and the most memory that a
process of tasks had.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench import machine
from bench.audit import JOIN, NOW_MS
from bench.directory import FIRST_HOUR, DirectoryWriter, Shape
from bench.process import family_cpu_s, workers_memory_bytes_max
from spark.audit import audit_data
from spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_ROWS = 250_000
BODY_BYTES = 40
LIMITS = (1_000, 10_000, 1_000)  # Of lateness and of grace in ms, and how many findings to keep.
VIEWS = ("schedule", "dispatch", "message")
# As Spark writes it.
SPARK_JOIN = re.sub(r"'(\w+)\.parquet'", r"\1", JOIN.replace('"', "`"))


def main() -> int:
    """Write directories and time audits and joins."""
    parser = argparse.ArgumentParser(prog="python -m bench.spark_audit", description="Time audits in Spark.")
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 5_000_000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--in", dest="folder", metavar="FOLDER", help="where to write")
    parser.add_argument("--no-join", action="store_true", help="leave the join out, and the Parquet that it needs")
    arguments = parser.parse_args()
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            figures = _run(folder, rows, arguments.turns, join=not arguments.no_join)
            print(json.dumps({"bench": "spark_audit", "rows": rows, **figures, **machine.facts()}), flush=True)
    return 0


def _run(folder: str, rows: int, turns: int, *, join: bool) -> dict[str, float]:
    places = [f"{folder}/a", f"{folder}/b"]
    hours = max(rows // len(places) // HOUR_ROWS, 1)
    for number, place in enumerate(places):
        shape = Shape(rows // len(places), hours, batch_rows=200, subjects=20, body_bytes=BODY_BYTES, number=number)
        DirectoryWriter(place, shape).write()
    session = open_session(f"local[{os.cpu_count()}]")

    def audit() -> None:
        report = audit_data(session, places, NOW_MS, None, *LIMITS)
        if not report.balanced or report.total.dispatched != rows:
            raise AssertionError(f"an honest fleet has findings: {report.findings[:3]}")

    audit_data(session, places, NOW_MS, [FIRST_HOUR], *LIMITS)  # The workers start.
    taken = _best(audit, turns)
    figures = {f"audit_{name}": value for name, value in taken.items()}
    figures["driver_share"] = round(taken["driver_cpu_s"] / taken["s"], 3)
    figures["task_peak_mb"] = workers_memory_bytes_max() >> 20
    if join:
        joined = _best(_join(session, places, rows, f"{folder}/parquet"), turns)
        figures |= {f"join_{name}": value for name, value in joined.items() if name != "driver_cpu_s"}
        figures["x"] = round(joined["s"] / taken["s"], 2)
        figures["cpu_x"] = round(joined["cpu_s"] / taken["cpu_s"], 2)
    session.stop()
    return figures


def _best(work: Callable[[], None], turns: int) -> dict[str, float]:
    """The fastest turn."""
    found: list[dict[str, float]] = []
    for _ in range(turns):
        start, start_cpu, start_own = time.perf_counter(), family_cpu_s(), time.process_time()
        work()
        spent = time.perf_counter() - start, family_cpu_s() - start_cpu, time.process_time() - start_own
        found.append({name: round(each, 2) for name, each in zip(("s", "cpu_s", "driver_cpu_s"), spent, strict=True)})
    return min(found, key=lambda each: each["s"])


def _join(session: "SparkSession", places: list[str], rows: int, folder: str) -> Callable[[], None]:
    for view in VIEWS:
        table = f"{folder}/{view}"
        session.read.format("delayd").option("view", view).load(places).write.parquet(table)
        session.read.parquet(table).createOrReplaceTempView(view)

    def join() -> None:
        found = session.sql(SPARK_JOIN).collect()
        if sum(row["dispatched"] for row in found) != rows or any(row["undecided"] for row in found):
            raise AssertionError(f"the join misses rows: {found[:3]}")

    return join


if __name__ == "__main__":
    raise SystemExit(main())
