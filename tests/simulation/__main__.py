"""Simulate clusters: ``python -m tests.simulation [--seeds N] [--first S] [--steps K] [--jobs J] [--planted]``.

Prints the trace of each seed that goes wrong, with what the servers log and the command that repeats it, and a summary.
Exit 1 if one does, or if a planted bug is not caught.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import NamedTuple

from tests.simulation.planted import PLANTED, Catch, seeds_to_catch
from tests.simulation.run import STEPS, Run
from tests.worlds.delay import small_slots

CHUNK_SEEDS = 50  # One process runs this many before it tells how it went.
PROGRESS_EVERY = 500
PLANTED_SEEDS_MAX = 300
WHAT_SHOWN = 110  # So much is shown of what a planted bug broke.
HOUR_MS = 3_600_000


class Chunk(NamedTuple):
    """How some seeds went."""

    seeds: int
    counts: Counter[str]
    virtual_ms: int
    delivered_after_ms: int
    wrong: dict[int, str]


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
    parser.add_argument("--seeds", type=int, help=f"how many seeds (1,000; with --planted at most {PLANTED_SEEDS_MAX})")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run before it heals")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--favour", nargs="*", default=[], help="kinds of steps that happen more often")
    parser.add_argument("--planted", action="store_true", help="plant bugs, and tell how many seeds each takes")
    arguments = parser.parse_args()
    if arguments.planted:
        return _plant(arguments.first, arguments.seeds or PLANTED_SEEDS_MAX, arguments.steps, arguments.jobs)
    return _run(arguments.first, arguments.seeds or 1_000, arguments.steps, arguments.jobs, arguments.favour)


def _run(first: int, count: int, steps: int, jobs: int, favoured: list[str]) -> int:
    again = f"--steps {steps}" + (f" --favour {' '.join(favoured)}" if favoured else "")
    begun = time.monotonic()
    done, virtual_ms, delivered_after_ms = 0, 0, 0
    wrong: list[int] = []
    counts: Counter[str] = Counter()
    for chunk in _chunks(first, count, steps, jobs, favoured):
        for seed, trace in chunk.wrong.items():
            wrong.append(seed)
            print(f"{trace}\nrepeat it: python -m tests.simulation --first {seed} --seeds 1 {again}", flush=True)
        counts += chunk.counts
        virtual_ms += chunk.virtual_ms
        delivered_after_ms = max(delivered_after_ms, chunk.delivered_after_ms)
        before, done = done, done + chunk.seeds
        if before // PROGRESS_EVERY != done // PROGRESS_EVERY and done < count:
            print(f"{done:,} of {count:,} seeds, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    seconds = time.monotonic() - begun
    print(", ".join(f"{kind} {number:,}" for kind, number in counts.most_common()))
    print(
        f"{count:,} seeds from {first}, {len(wrong)} wrong {sorted(wrong) or ''}: {sum(counts.values()):,} steps, "
        f"{virtual_ms / HOUR_MS:,.0f} virtual hours, delivered at most {delivered_after_ms / 1_000:.0f} s after the "
        f"last fault; {seconds:.0f} s, {1_000 * seconds * jobs / count:.0f} ms a seed and process"
    )
    return int(bool(wrong))


def _chunks(first: int, count: int, steps: int, jobs: int, favoured: list[str]) -> Iterator[Chunk]:
    firsts = range(first, first + count, CHUNK_SEEDS)
    ranges = [range(start, min(start + CHUNK_SEEDS, first + count)) for start in firsts]
    if jobs == 1:
        yield from map(partial(_run_chunk, steps, favoured), ranges)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_run_chunk, steps, favoured, seeds) for seeds in ranges]):
            yield future.result()


def _run_chunk(steps: int, favoured: list[str], seeds: range) -> Chunk:
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    wrong: dict[int, str] = {}
    virtual_ms, delivered_after_ms = 0, 0
    # A run leaves its cluster as garbage at its end, and little before.
    gc.disable()
    with small_slots():
        for seed in seeds:
            run = Run(seed, steps, favoured)
            try:
                counts += run.run()
            except AssertionError:
                wrong[seed] = trace_of(seed, steps, favoured)
            virtual_ms += run.virtual_ms
            delivered_after_ms = max(delivered_after_ms, run.cluster.checks.delivered_after_ms)
    gc.enable()
    gc.collect()
    return Chunk(len(seeds), counts, virtual_ms, delivered_after_ms, wrong)


def _plant(first: int, seeds_max: int, steps: int, jobs: int) -> int:
    missed = 0
    print(f"{'bug':66}{'seeds':>6}{'s':>7}  what broke")
    with ProcessPoolExecutor(jobs) as pool:
        for name, (seconds, caught) in zip(
            PLANTED, pool.map(partial(_plant_one, first, seeds_max, steps), PLANTED), strict=True
        ):
            missed += caught is None
            seeds, what = caught or (seeds_max, "NOT CAUGHT")
            print(f"{name:66}{seeds:6}{seconds:7.1f}  {what[:WHAT_SHOWN]}", flush=True)
    print(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs caught")
    return int(bool(missed))


def _plant_one(first: int, seeds_max: int, steps: int, name: str) -> tuple[float, Catch | None]:
    logging.disable(logging.CRITICAL)
    begun = time.monotonic()
    with small_slots():
        caught = seeds_to_catch(name, seeds_max, first, steps)
    return time.monotonic() - begun, caught


def trace_of(seed: int, steps: int, favoured: Sequence[str] = ()) -> str:
    """Run a seed again, with what the servers log among its steps."""
    handler = _InTrace()
    root = logging.getLogger()
    level = root.level
    logging.disable(logging.NOTSET)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        run = Run(seed, steps, favoured)
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
