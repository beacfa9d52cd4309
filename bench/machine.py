"""What the machine is, and what it did beside a run: a figure means little without the steal and disk of its minute."""

import os
import platform
import statistics
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

SYNCS = 200
SYNC_BYTES = 4096


def facts() -> dict[str, str | int]:
    """Processor, cores, kernel, Python, commit (with a + when files differ from it) and the time, in UTC."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def steal_s() -> float:
    """Seconds that other guests took from this one's processors since it started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def fsync_ms() -> dict[str, float]:
    """The p50 and p99 of an fdatasync of 4 KiB behind a file, in the folder for temporary files."""
    took: list[float] = []
    with tempfile.TemporaryFile(prefix="delayd-bench-") as file:
        for index in range(SYNCS):
            os.pwrite(file.fileno(), bytes(SYNC_BYTES), index * SYNC_BYTES)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - began) * 1e3)
    return {
        "fsync_ms_p50": round(statistics.median(took), 3),
        "fsync_ms_p99": round(statistics.quantiles(took, n=100)[98], 3),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    """The commit of the repository that this file is in."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
