"""Walk at random: ``python -m tests.groups [--walks N] [--first S] [--steps K] [--jobs J] [--kind KIND]
[--planted]``.

Prints the trace of each walk that goes wrong, with the command that repeats it, and a summary. Exit 1 if one does, or
if a planted bug is not found.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.groups.planted import PLANTED, walks_to_find
from tests.groups.run import Report, walks
from tests.groups.walk import STEPS, Kind

CHUNK_WALKS = 200  # One process does this many before it tells how they went.
PROGRESS_EVERY = 1_000
PLANTED_WALKS_MAX = 2_000


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.groups", description="Random walks of a server's groups.")
    parser.add_argument("--walks", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each walk")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--kind", choices=[kind.value for kind in Kind], default=Kind.PLAIN.value)
    parser.add_argument("--planted", action="store_true", help="plant bugs, and tell how many walks each takes")
    options = parser.parse_args()
    if options.planted:
        return _plant(options.first)
    begun = time.monotonic()
    report = Report()
    starts = range(options.first, options.first + options.walks, CHUNK_WALKS)
    sizes = [min(CHUNK_WALKS, options.first + options.walks - start) for start in starts]
    with ProcessPoolExecutor(options.jobs, initializer=gc.disable) as pool:
        for part in pool.map(partial(_chunk, steps=options.steps, kind=Kind(options.kind)), starts, sizes):
            report.add(part)
            for seed, told in part.wrong.items():
                again = f"python -m tests.groups --first {seed} --walks 1 --steps {options.steps}"
                again += f" --kind {options.kind}"
                print(f"{told}\nrepeat it: {again}", flush=True)
            if report.walks % PROGRESS_EVERY == 0:
                print(f"{report.walks:,} walks, {len(report.wrong)} wrong", flush=True)
    steps = sum(report.counts.values())
    print(", ".join(f"{kind} {count:,}" for kind, count in report.counts.most_common()))
    seconds = time.monotonic() - begun
    print(f"{report.walks:,} walks from {options.first}, {len(report.wrong)} wrong: {steps:,} steps, {seconds:.0f} s")
    return 1 if report.wrong else 0


def _chunk(first: int, count: int, steps: int, kind: Kind) -> Report:
    """Some walks, between two collections of garbage: worlds are knots of references."""
    gc.collect()
    return walks(first, count, steps, kind=kind)


def _plant(first: int) -> int:
    missed = 0
    for name in PLANTED:
        taken, what = walks_to_find(name, first, PLANTED_WALKS_MAX)
        missed += taken is None
        print(f"{name}: " + (f"{taken} walks, {what}" if taken else "NOT FOUND"), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
