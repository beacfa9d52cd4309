"""Fuzz cores in memory: ``python -m tests.fuzz.cores [--requests N] [--seed S]``.

Prints what was asked and answered. Exit 1 when an answer was untrue, when something is held after everybody has left,
or when a turn of the loop took longer than `TURN_MS_MAX` of processor time.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from .delay_core import TURN_MS_MAX, Run

REQUESTS_A_WORLD = 20_000  # A world keeps all that was ever written in memory.


def main() -> int:
    """Run and tell."""
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.cores", description="Fuzz server cores in memory.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    left, seed, longest, began = options.requests, options.seed, 0.0, time.monotonic()
    while left > 0:
        run = Run(seed)
        run.requests(min(left, REQUESTS_A_WORLD))
        counts = run.counts
        print(
            f"seed {seed}: {counts['requests']:,} requests, {counts['answered']:,} answered, "
            f"{counts['refused']:,} refused, {counts['compared']:,} compared; "
            f"longest turn {run.turn_ms:.1f} ms ({run.slowest}); "
            f"{time.monotonic() - began:.0f} s"
        )
        left, seed, longest = left - counts["requests"], seed + 1, max(longest, run.turn_ms)
    print(f"0 untrue, nothing held; longest turn {longest:.1f} ms of {TURN_MS_MAX:.0f} ms")
    return 1 if longest > TURN_MS_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
