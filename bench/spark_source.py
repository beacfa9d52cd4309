"""``python -m bench.spark_source``: seconds of queries of the Spark data source, and what asking for less saves.

A directory of a hundred hours and a hundred subjects is written with the formats' own encoders, and archived. A query
hands all its columns to Spark, which drops them; the best of some turns counts. One JSON line for each view and place
has the seconds for all rows, and how many times as fast one hour of the hundred is, and one subject: by the clock, and
(``cpu``) by the CPU time of all processes together. A query costs Spark some CPU time in any case, so the second figure
grows with ``--messages``. Bodies have 8 bytes, because no query reads them.
"""

import argparse
import json
import os
import tempfile
import time

from bench import machine
from bench.directory import FIRST_HOUR, DirectoryWriter, Shape
from bench.process import family_cpu_s
from delayd.hours import hour_name
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.store import open_store
from spark.session import open_session

HOURS, SUBJECTS = 100, 100
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
TURNS = 3


def main() -> int:
    """Write the directory and time the queries."""
    parser = argparse.ArgumentParser(prog="python -m bench.spark_source", description="Time the Spark data source.")
    parser.add_argument("--messages", type=int, default=5_000_000)
    parser.add_argument("--views", default="schedule,lifecycle", help="with commas between")
    parser.add_argument("--in", dest="folder", metavar="FOLDER", help="where to write: a disk, or memory")
    parser.add_argument("--data", metavar="DIR", help="a directory that was written so already")
    parser.add_argument("--turns", type=int, default=TURNS, help="of the queries for all rows")
    parser.add_argument("--no-archive", action="store_true", help="leave the archive out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        data = arguments.data or f"{folder}/data"
        if arguments.data is None:
            DirectoryWriter(
                data, Shape(arguments.messages, hours=HOURS, subjects=SUBJECTS, all_kept=False, body_bytes=8)
            ).write()
        places = {"directory": data}
        if not arguments.no_archive:
            archive_directory(data, open_store(f"{folder}/archive"))
            places["archive"] = f"{folder}/archive"
        _time_all(places, arguments.views.split(","), arguments.turns)
    return 0


def _time_all(places: dict[str, str], views: list[str], turns: int) -> None:
    session = open_session(f"local[{os.cpu_count()}]")
    hour = hour_name(FIRST_HOUR + HOURS // 2)
    condition = f"hour = '{hour}'"
    session.conf.set(PUSHDOWN, "true")

    def seconds(of: int, view: str, place: str, where: str = "true", **options: str) -> tuple[float, float]:
        taken: list[float] = []
        spent: list[float] = []
        for _ in range(of):
            start, start_cpu = time.perf_counter(), family_cpu_s()
            frame = session.read.format("delayd").option("view", view).options(**options).load(place)
            frame.where(where).write.format("noop").mode("overwrite").save()
            taken.append(time.perf_counter() - start)
            spent.append(family_cpu_s() - start_cpu)
        return min(taken), min(spent)

    for name, place in places.items():
        for view in views:
            seconds(TURNS, view, place, to=hour, **{"from": hour})  # The workers start.
            every = seconds(turns, view, place)
            few = {
                "hour": seconds(TURNS, view, place, to=hour, **{"from": hour}),
                "hour_pushed": seconds(TURNS, view, place, condition, pushdown="true"),
                "subject": seconds(TURNS, view, place, subject="subject-7"),
                "subject_pushed": seconds(TURNS, view, place, "subject = 'subject-7'", pushdown="true"),
            }
            figures = {"all_s": round(every[0], 2), "all_cpu_s": round(every[1], 2)}
            for query, (taken, spent) in few.items():
                figures |= {f"{query}_s": round(taken, 3), f"{query}_x": round(every[0] / taken, 1)}
                figures |= {f"{query}_cpu_s": round(spent, 3), f"{query}_cpu_x": round(every[1] / spent, 1)}
            print(json.dumps({"bench": "spark_source", "place": name, "view": view, **figures, **machine.facts()}))


if __name__ == "__main__":
    raise SystemExit(main())
