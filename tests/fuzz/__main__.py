"""Fuzz real servers: ``python -m tests.fuzz [--requests N] [--seed S]``.

Prints what was done and seen. Exit 1 when a process ended, a message of the honest neighbour was lost, came twice or
could not be sent, or an answer was none; or when memory grew by more than `RSS_MIB_MAX`. How long others waited is
printed and not judged, for it depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from .run import Report, run

RSS_MIB_MAX = 128  # How far one process may grow over its start.


def main() -> int:
    """Run once and tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz real servers on loopback.")
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="delayd-fuzz-") as folder:
        report = run(Path(folder), options.requests, options.seed)
    tell(report)
    return 1 if report.faults or report.rss_over_start_mib > RSS_MIB_MAX else 0


def tell(report: Report) -> None:
    """Print a report."""
    done = report.counts["requests"]
    print(f"seed {report.seed}: {done:,} requests in {report.seconds:.0f} s, {done / max(report.seconds, 1):,.0f}/s")
    for name, count in sorted(report.counts.items()):
        print(f"  {name:32} {count:>10,}")
    print(f"processes ended: {sum(report.ended.values())}")
    print("memory, MiB: " + ", ".join(f"{role} {a} to {b}" for role, (a, b) in report.rss_mib.items()))
    print("longest wait of a loop, ms: " + ", ".join(f"{role} {ms}" for role, ms in report.loop_wait_ms.items()))
    print(f"honest neighbour: {json.dumps(report.honest)}")
    for fault in report.faults:
        print(f"FAULT {fault}")


if __name__ == "__main__":
    sys.exit(main())
