"""What the machine did beside a run: a figure means little without the steal and the disk of its own minute."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SYNCS = 200
SYNC_BYTES = 4096


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
    return {"p50": round(statistics.median(took), 3), "p99": round(statistics.quantiles(took, n=100)[98], 3)}


def measured(run: Callable[[], dict[str, float]]) -> dict[str, object]:
    """Run once; its figures with steal and fsync times around it."""
    before = steal_s()
    figures = run()
    return {**figures, "steal_s": round(steal_s() - before, 2), "fsync_ms": fsync_ms()}
