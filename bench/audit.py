"""``python -m bench.audit [CASE ...]``: CPU seconds and peak memory of an audit, with DuckDB's plain join beside it.

Each case writes a directory with the formats' own encoders, audits it in a process of its own, and prints one JSON
line. The join reads an export of the same directory: schedule, dispatch and message, joined by hour and sequence, and
counted; it is what a query without a rule of the audit costs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import machine
from bench.directory import FIRST_HOUR, DirectoryWriter, Shape
from bench.process import memory_bytes_max
from delayd.reading.books import audit_directory
from delayd.reading.export import export_directory

NOW_MS = 2_000_000_000_000
JOIN = """
select
    s.hour,
    count(*) as scheduled,
    count(d.outcome) filter (where d.outcome = 'DISPATCHED') as dispatched,
    count(m.sequence) as stored,
    count(*) filter (where d.sequence is null) as undecided,
    count(*) filter (where d.target_offset <> m."offset" or d.claimed_at_ms <> m.claimed_at_ms) as differ,
    max(m.appended_at_ms - s.deliver_at_ms) as late_ms_max
from 'schedule/*.parquet' s
left join 'dispatch/*.parquet' d on (d.log_id, d.hour, d.sequence) = (s.log_id, s.hour, s.sequence)
left join 'message/*.parquet' m on (m.origin, m.hour, m.sequence) = (s.log_id, s.hour, s.sequence)
group by s.hour
"""
CASES: dict[str, tuple[Shape, bool]] = {
    # Whether to audit only one hour: the one in the middle.
    "million": (Shape(1_000_000), False),
    "one-row": (Shape(1_000_000, batch_rows=1, subjects=1_000), False),
    "one-hour": (Shape(1_000_000, hours=100, batch_rows=200, subjects=10), True),
    "large-hour": (Shape(5_000_000, batch_rows=200), False),
}


def main() -> int:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.audit", description="Time audits of written directories.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--divide", type=int, default=1, help="write so many times fewer messages")
    parser.add_argument("--keep", metavar="FOLDER", help="write below this folder, and use what is there already")
    parser.add_argument("--runs", type=int, default=3, help="of each case; the fastest is told (default: 3)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.cases) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; choose of {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.cases or CASES:
            line = _run(name, Path(arguments.keep or folder), arguments.divide, arguments.runs)
            print(json.dumps({"bench": "audit", "case": name, **line, **machine.facts()}), flush=True)
    return 0


def _run(name: str, folder: Path, divide: int, runs: int) -> dict[str, float]:
    shape, one_hour = CASES[name]
    messages = shape.messages // divide
    data = folder / f"{name}-{messages}"
    if not data.exists():
        DirectoryWriter(str(data), Shape(messages, shape.hours, shape.batch_rows, shape.subjects)).write()
    hour = FIRST_HOUR + shape.hours // 2 if one_hour else None
    audits = [_in_process("audit", data, hour) for _ in range(runs)]
    line = {"messages": messages, **min(audits, key=lambda each: each["cpu_s"])}
    if name == "million":
        joins = [_in_process("join", data, hour) for _ in range(runs)]
        line["join_cpu_s"] = min(each["cpu_s"] for each in joins)
        line["of_join"] = round(line["cpu_s"] / line["join_cpu_s"], 2)
    return line


def _in_process(what: str, data: Path, hour: int | None) -> dict[str, float]:
    """Measure in a process of its own, because peak memory never falls. A first reading only warms the page cache."""
    words = [sys.executable, "-c", f"from bench.audit import measure; measure({what!r}, {str(data)!r}, {hour})"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
    line: dict[str, float] = json.loads(done.stdout)
    return line


def measure(what: str, data: str, hour: int | None) -> None:
    """Do one thing and print how long it took; imports do not count."""
    call = _join if what == "join" else _audit
    work = call(data, hour)
    start_cpu, start = time.process_time(), time.perf_counter()
    work()
    line = {"cpu_s": round(time.process_time() - start_cpu, 3), "wall_s": round(time.perf_counter() - start, 3)}
    line["peak_mb"] = memory_bytes_max() >> 20
    print(json.dumps(line))


def _audit(data: str, hour: int | None) -> Callable[[], None]:
    def audit() -> None:
        report = audit_directory(data, now_ms=NOW_MS, hours=None if hour is None else [hour])
        if not report.balanced or report.findings_count:
            raise AssertionError(f"an honest directory has findings: {report.findings[:3]}")

    return audit


def _join(data: str, hour: int | None) -> Callable[[], None]:
    import duckdb

    folder = f"{data}.export"
    if not Path(folder).exists():
        export_directory(data, folder, now_ms=NOW_MS)
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("set enable_progress_bar = false")
    connection.execute(f"set file_search_path = '{folder}'")

    def join() -> None:
        rows = connection.execute(JOIN).fetchall()
        if any(row[1] != row[2] for row in rows):
            raise AssertionError(f"the join misses rows: {rows[:3]}")

    return join


if __name__ == "__main__":
    sys.exit(main())
