"""Compares the processor time of some work in two states of the code: one JSON line for each case.

Run ``python -m bench.cpu --against WORKTREE [--turns 24] [CASE ...]``. Each state of the code has real servers and a
client process of its own. All of them live at once, and the two states take turns of well under a second. A figure is
the processor time of one process, user and kernel, as the kernel counts it. Time in which another process runs does not
count, so a busy neighbour spoils a figure only by what it does to the caches; the least of all turns is told.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.cpu_side import CASES

HERE = Path(__file__).resolve().parent.parent
NOW, BEFORE = "now", "before"
TURNS = 24
LONG_TURNS = 5  # A restart lasts some seconds.
IDLE_MS = 0.02  # A process that uses less in a round has no work in the case; it only wakes up now and then.

Spent = dict[str, float]


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description="Compare processor time of two states.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--against", type=Path, required=True, metavar="WORKTREE", help="the other state of the code")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each state and case, and at most five restarts")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.cases) - set(CASES))
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; choose of {', '.join(CASES)}")
    with _side(HERE) as now, _side(arguments.against.resolve()) as before:
        sides = {NOW: now, BEFORE: before}
        for case in arguments.cases or CASES:
            turns = min(arguments.turns, LONG_TURNS) if case == "restart" else arguments.turns
            line = {"bench": "cpu", "case": case, "turns": turns, **_compared(sides, case, turns)}
            print(json.dumps(line), flush=True)


def _compared(sides: "dict[str, subprocess.Popen[str]]", case: str, turns: int) -> dict[str, dict[str, float]]:
    spent: dict[str, list[Spent]] = {NOW: [], BEFORE: []}
    for turn in range(turns + 1):
        # Each goes first in half of the turns. The first turn opens connections and files, and does not count.
        for name in (NOW, BEFORE) if turn & 1 else (BEFORE, NOW):
            took = _turn(sides[name], case)
            if turn:
                spent[name].append(took)
    figures: dict[str, dict[str, float]] = {}
    for process in took:
        now, before = ([one[process] for one in spent[name]] for name in (NOW, BEFORE))
        if min(*now, *before) > IDLE_MS:
            figures[process] = _figures(now, before)
    return figures


def _figures(now: list[float], before: list[float]) -> dict[str, float]:
    """Milliseconds of a round, with the quotient of the least ones and the quotient of the medians."""
    return {
        "now_ms": round(min(now), 3),
        "before_ms": round(min(before), 3),
        "least": round(min(now) / min(before), 3),
        "median": round(statistics.median(now) / statistics.median(before), 3),
    }


def _turn(side: "subprocess.Popen[str]", case: str) -> Spent:
    assert side.stdin is not None and side.stdout is not None
    side.stdin.write(case + "\n")
    side.stdin.flush()
    line = side.stdout.readline()
    if not line:
        raise RuntimeError("a side ended; its messages are above")
    took: Spent = json.loads(line)
    return took


@contextlib.contextmanager
def _side(worktree: Path) -> "Iterator[subprocess.Popen[str]]":
    """The client process of a state of the code, which starts its servers."""
    # This interpreter and its packages serve both, so that only delayd differs; -P keeps this folder's modules out.
    command = [sys.executable, "-P", str(HERE / "bench" / "cpu_side.py")]
    environment = os.environ | {"PYTHONPATH": str(worktree)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=worktree
    ) as child:
        try:
            yield child
        finally:
            # It stops its servers when it reads the end.
            assert child.stdin is not None
            child.stdin.close()
            child.wait()


if __name__ == "__main__":
    main()
