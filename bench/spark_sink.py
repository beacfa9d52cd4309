"""``python -m bench.spark_sink``: how many rows a second a frame of Spark becomes messages of a running delay server.

The servers and Spark's tasks share the cores of this machine; ``cpu_us`` is what a row costs of their time, all
processes together, which says more on a machine that has other work. Rows have bodies of 100 bytes and are due
tomorrow; the best of some turns counts, each with an origin of its own. The last turn is then written once more, as by
tasks that Spark repeats. One JSON line for each number of subjects has both rates, and how many messages more than rows
are pending at the end, which must be none.
"""

import argparse
import json
import os
import time
from typing import TYPE_CHECKING

from bench import machine
from bench.process import family_cpu_s
from bench.servers import servers
from delayd.reading.books import audit_directory
from spark.session import open_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TURNS = 3
DAY_MS = 86_400_000


def main() -> int:
    """Write frames and time them."""
    parser = argparse.ArgumentParser(prog="python -m bench.spark_sink", description="Time the Spark sink.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--subjects", type=int, nargs="*", default=[1, 20, 1_000])
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    session = open_session(f"local[{cores}]")
    with servers("delay") as running:

        def seconds(frame: "DataFrame", origin: str) -> float:
            start = time.perf_counter()
            frame.write.format("delayd").options(meta=running.meta, origin=origin).mode("append").save()
            return time.perf_counter() - start

        written = 0
        for subjects in arguments.subjects:
            frame = session.range(0, arguments.rows, 1, cores).selectExpr(
                "id",
                f"concat('subject-', id % {subjects}) as subject",
                "repeat('x', 100) as body",
                f"{time.time_ns() // 1_000_000 + DAY_MS} + id as deliver_at_ms",
            )
            seconds(frame.where("id < 1000"), f"warm-{subjects}")  # The workers start.
            cpu_s = family_cpu_s()
            taken = [seconds(frame, f"{subjects}-{turn}") for turn in range(TURNS)]
            cpu_s = family_cpu_s() - cpu_s
            again = seconds(frame, f"{subjects}-{TURNS - 1}")
            written += TURNS * arguments.rows + 1_000
            total = audit_directory(str(running.data), now_ms=time.time_ns() // 1_000_000, consumption=False).total
            figures = {
                "subjects": subjects,
                "rows_per_s": int(arguments.rows / min(taken)),
                "cpu_us": round(cpu_s / TURNS / arguments.rows * 1e6, 1),
                "again_rows_per_s": int(arguments.rows / again),
                "doubled": total.pending - written,
            }
            print(json.dumps({"bench": "spark_sink", **figures, **machine.facts()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
