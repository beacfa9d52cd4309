"""``python -m bench.archive [CASE ...]``: CPU seconds, peak memory and size of an archive, and of its audit.

Each case writes a directory with the formats' own encoders, archives it, runs the archiver again, and audits the
archive, each in a process of its own; it prints one JSON line. ``of_logs`` is the archive's size against all logs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import machine
from bench.directory import DirectoryWriter, Shape
from bench.process import memory_bytes_max
from delayd.reading.archive.archive_audit import audit_archive
from delayd.reading.archive.archiver import archive_directory
from delayd.reading.archive.store import open_store

NOW_MS = 2_000_000_000_000
CASES = {
    "million": Shape(1_000_000, batch_rows=20, subjects=100),
    "two-million": Shape(2_000_000, batch_rows=200, subjects=100),
    "year": Shape(87_600, hours=8_760, batch_rows=10, subjects=10),
}
STEPS = ("archive", "again", "audit")


def main() -> int:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.archive", description="Time archives of written directories."
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--in", dest="folder", metavar="FOLDER", help="where to write: a disk, or memory")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.cases) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; choose of {', '.join(CASES)}")
    for name in arguments.cases or CASES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            data, archive = f"{folder}/data", f"{folder}/archive"
            DirectoryWriter(data, CASES[name]).write()
            line: dict[str, float] = {"messages": CASES[name].messages}
            for step in STEPS:
                line |= _in_process(step, data, archive)
            line["of_logs"] = round(_size_bytes(archive) / _size_bytes(data), 3)
            print(json.dumps({"bench": "archive", "case": name, **line, **machine.facts()}), flush=True)
    return 0


def measure(step: str, data: str, archive: str) -> None:
    """Do one step and print how long it took; imports do not count."""
    store = open_store(archive)
    start_cpu, start = time.process_time(), time.perf_counter()
    if step == "audit":
        report = audit_archive(store, now_ms=NOW_MS)
        if not report.balanced:
            raise AssertionError(f"an honest archive has findings: {report.faults[:3]}")
    else:
        done = archive_directory(data, store)
        if done.faults or bool(done.written) != (step == "archive"):
            raise AssertionError(f"{len(done.written)} files were written: {done.faults[:3]}")
    line = {"cpu_s": round(time.process_time() - start_cpu, 3), "wall_s": round(time.perf_counter() - start, 3)}
    line["peak_mb"] = memory_bytes_max() >> 20
    print(json.dumps({f"{step}_{name}": value for name, value in line.items()}))


def _in_process(step: str, data: str, archive: str) -> dict[str, float]:
    words = [sys.executable, "-c", f"from bench.archive import measure; measure({step!r}, {data!r}, {archive!r})"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=1_200)
    line: dict[str, float] = json.loads(done.stdout)
    return line


def _size_bytes(folder: str) -> int:
    return sum((Path(path) / name).stat().st_size for path, _, names in os.walk(folder) for name in names)


if __name__ == "__main__":
    sys.exit(main())
