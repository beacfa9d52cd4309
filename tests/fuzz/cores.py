"""Fuzz cores in memory: ``python -m tests.fuzz.cores [--requests N] [--seed S] [--role delay|realtime]``.

Prints what was asked and answered. Ends with a traceback when an answer was untrue or something is held after everybody
has left, and with exit 1 when a turn of the loop took longer than `TURN_MS_MAX` of processor time.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable

from .delay_core import TURN_MS_MAX, Run
from .realtime_core import RealtimeRun

REQUESTS_A_WORLD = 20_000  # A world keeps all that was ever written in memory.
RUNS: dict[str, Callable[[int], Run | RealtimeRun]] = {"delay": Run, "realtime": RealtimeRun}


def main() -> int:
    """Run and tell."""
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.cores", description="Fuzz server cores in memory.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--role", choices=sorted(RUNS), action="append")
    options = parser.parse_args()
    longest = max(fuzz(role, options.requests, options.seed) for role in options.role or sorted(RUNS))
    print(f"0 untrue, nothing held; longest turn {longest:.1f} ms of {TURN_MS_MAX:.0f} ms")
    return 1 if longest > TURN_MS_MAX else 0


def fuzz(role: str, requests: int, seed: int) -> float:
    """Make so many requests, world after world; the longest turn in milliseconds."""
    left, longest, began = requests, 0.0, time.monotonic()
    while left > 0:
        run = RUNS[role](seed)
        run.requests(min(left, REQUESTS_A_WORLD))
        counts = run.counts
        print(
            f"{role}, seed {seed}: {counts['requests']:,} requests, {counts['answered']:,} answered, "
            f"{counts['refused']:,} refused; longest turn {run.turn_ms:.1f} ms ({run.slowest}); "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        left, seed, longest = left - counts["requests"], seed + 1, max(longest, run.turn_ms)
    return longest


if __name__ == "__main__":
    sys.exit(main())
