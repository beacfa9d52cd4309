"""Simulate clusters: ``python -m tests.simulation [--seeds N] [--first S] [--steps K] [--planted]``.

Prints the trace of each seed that goes wrong, with what the servers log, and a summary. Exit 1 if one does.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.delay_harness import small_slots
from tests.simulation.planted import PLANTED, seeds_to_catch
from tests.simulation.run import STEPS, Run

PROGRESS_EVERY = 500
WHAT_SHOWN = 140  # Of what went wrong, in one line.


class _InTrace(logging.Handler):
    """Puts what the servers log into the trace of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line, if a run is being told."""
        if self.lines is not None:
            self.lines.append(f"{'':16}{record.levelname.lower()} {record.getMessage()}")


def main() -> int:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate clusters from seeds.")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run before it heals")
    parser.add_argument("--planted", action="store_true", help="plant bugs, and tell how many seeds each takes")
    arguments = parser.parse_args()
    with small_slots():
        if arguments.planted:
            return _plant(arguments.first, arguments.seeds, arguments.steps)
        return _run(arguments.first, arguments.seeds, arguments.steps)


def _run(first: int, count: int, steps: int) -> int:
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    wrong: list[int] = []
    taken: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            taken += Run(seed, steps).run()
        except AssertionError:
            wrong.append(seed)
            print(trace_of(seed, steps), flush=True)
        if (seed - first + 1) % PROGRESS_EVERY == 0:
            print(f"{seed - first + 1:,} seeds, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    print(", ".join(f"{kind} {number:,}" for kind, number in taken.most_common()))
    print(f"{count:,} seeds from {first}, {len(wrong)} wrong {wrong or ''}, {time.monotonic() - begun:.0f} s")
    return int(bool(wrong))


def _plant(first: int, count: int, steps: int) -> int:
    logging.disable(logging.CRITICAL)
    missed = 0
    for name in PLANTED:
        begun = time.monotonic()
        caught = seeds_to_catch(name, count, first, steps)
        missed += caught is None
        took, what = caught or (count, "NOT CAUGHT")
        print(f"{name}: {took} seeds, {time.monotonic() - begun:.1f} s: {what[:WHAT_SHOWN]}", flush=True)
    print(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs caught")
    return int(bool(missed))


def trace_of(seed: int, steps: int) -> str:
    """Run a seed again, with what the servers log among its steps."""
    handler = _InTrace()
    root = logging.getLogger()
    level = root.level
    logging.disable(logging.NOTSET)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        run = Run(seed, steps)
        handler.lines = run.trace
        run.run()
    except AssertionError as error:
        return str(error)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        logging.disable(logging.CRITICAL)
    return f"seed {seed} went wrong, and did not when it was run again"


if __name__ == "__main__":
    sys.exit(main())
