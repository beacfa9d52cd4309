"""Runs the sides of a case in turn, repeats runs that other guests of the host disturbed, and prints each result.

Invariant: everything that a run started has ended, and its files are gone, before the next one begins, also when it
failed or took too long: each runs in a process group and a temporary folder of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench import machine
from bench.cases import DELAYD, Case
from bench.figures import Spread, ratio, spreads

STEAL_S_MAX = 0.2  # With more steal, a p99 of 2.5 ms became 25 ms.
REPEATS_MAX = 2

Line = dict[str, object]
Emit = Callable[[Line], None]
Attempt = Callable[[str, Case, str], Line]


class RunFailed(Exception):
    """A run ended with an error, or not in time."""


@dataclass(slots=True)
class Runner:
    """Runs cases of one size and emits a line for each run and one for each case."""

    size: str
    emit: Emit
    facts: Mapping[str, object]
    runs_max: int | None = None  # None: what each case says.
    end: float = float("inf")  # On time.monotonic(); past it nothing is repeated, and a case runs once.
    attempt: Attempt = field(default_factory=lambda: attempt)
    failed: int = 0

    def run(self, case: Case) -> None:
        """Run a case. A side that fails is named, and does not run again."""
        done: dict[str, list[Line]] = {side: [] for side in case.sides}
        over: set[str] = set()
        for number in range(self.runs_max or case.runs):
            if number and time.monotonic() > self.end:
                break
            for side in case.sides:
                if side in over:
                    continue
                line = self._run_side(case, side)
                if "error" not in line and "skipped" not in line:
                    done[side].append(line)
                else:
                    over.add(side)
                    self.failed += "error" in line
                self.emit(
                    {"case": case.name, "title": case.title, "side": side, "run": number + 1, **line, **self.facts}
                )
        self.emit({"case": case.name, "title": case.title, "of": self._summary(case, done), **self.facts})

    def _run_side(self, case: Case, side: str) -> Line:
        """Run one side, again when it was disturbed; the least disturbed run counts."""
        tried: list[Line] = []
        while True:
            try:
                tried.append(self.attempt(self.size, case, side))
            except RunFailed as error:
                return {"error": str(error)}
            calmest = min(tried, key=_steal)
            if _steal(calmest) <= STEAL_S_MAX or len(tried) > REPEATS_MAX or time.monotonic() > self.end:
                return {**calmest, "repeated": len(tried) - 1}

    def _summary(self, case: Case, done: Mapping[str, list[Line]]) -> Line:
        summary: Line = {side: {"runs": len(lines), **spreads(lines)} for side, lines in done.items() if lines}
        ours = _values(done.get(DELAYD, []), case.quotient)
        ratios: dict[str, Spread] = {}
        for side, lines in done.items():
            theirs = _values(lines, case.quotient)
            if ours and theirs and side != DELAYD:
                ratios[side] = ratio(ours, theirs) if case.more_is_better else ratio(theirs, ours)
        return {**summary, "ratio": ratios}


def attempt(size: str, case: Case, side: str) -> Line:
    """Run a side once; its figures with the steal meanwhile and the fsync times right after."""
    with tempfile.TemporaryDirectory(prefix="delayd-bench-", ignore_cleanup_errors=True) as folder:
        before, began = machine.steal_s(), time.monotonic()
        command = [sys.executable, "-m", "bench.child", size, case.name, side]
        figures = last_line(command, {**os.environ, "TMPDIR": folder}, case.limit_s)
        steal = machine.steal_s() - before
    return {**figures, "run_s": round(time.monotonic() - began, 1), "steal_s": round(steal, 2), **machine.fsync_ms()}


def last_line(command: list[str], environment: Mapping[str, str], limit_s: float) -> Line:
    """Run a program; what it printed last, as JSON.

    Raises:
        RunFailed: it ended with an error or took too long; nothing that it started is left.
    """
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"not done within {limit_s:g} s") from error
    finally:
        _end_group(child)
    if child.returncode:
        sys.stderr.write(errors)
        raise RunFailed((errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1])
    line = json.loads(output.splitlines()[-1])
    assert isinstance(line, dict)
    return line


def _end_group(child: subprocess.Popen[str]) -> None:
    """Servers of a run that failed are of its process group; of one that went well none is left."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    # The pipes close when the last process of the group has ended.
    child.communicate()


def _values(lines: list[Line], name: str) -> list[float]:
    return [float(value) for line in lines if isinstance(value := line.get(name), int | float)]


def _steal(line: Line) -> float:
    value = line.get("steal_s", 0.0)
    assert isinstance(value, int | float)
    return value
