"""Reads the lines that ``python -m bench`` printed: of each case the summary, the curves of its runs and what failed.

Invariant: of a case that is there twice the later one counts, so a case that was measured again is just appended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bench.figures import Spread

Facts = Mapping[str, object]


@dataclass(slots=True)
class Result:
    """One case: figures by side and name, quotients by side."""

    case: str
    title: str
    sides: dict[str, dict[str, Spread]] = field(default_factory=dict)
    ratio: dict[str, Spread] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # Why a side has no figures.
    facts: Facts = field(default_factory=dict)

    def median(self, side: str, name: str) -> float | None:
        """One figure of a side, if it has it."""
        spread = self.sides.get(side, {}).get(name)
        return None if spread is None else spread["median"]


def read_results(lines: Iterable[str]) -> dict[str, Result]:
    """Results by case, in the order in which the cases ended."""
    results: dict[str, Result] = {}
    open_cases: dict[str, Result] = {}
    for text in lines:
        line = json.loads(text)
        name = line["case"]
        result = open_cases.setdefault(name, Result(name, line["title"]))
        if "of" in line:
            _summary(result, line["of"])
            result.facts = {key: line[key] for key in FACTS if key in line}
            results.pop(name, None)
            results[name] = open_cases.pop(name)
        elif "error" in line or "skipped" in line:
            result.problems[line["side"]] = line.get("error") or line["skipped"]
        elif "late_ms_curve" in line:
            result.curves.setdefault(line["side"], []).append(line["late_ms_curve"])
    return results


def _summary(result: Result, of: dict[str, dict[str, Spread]]) -> None:
    for side, figures in of.items():
        if side == "ratio":
            result.ratio = figures
        else:
            result.runs[side] = int(str(figures["runs"]))
            result.sides[side] = {name: value for name, value in figures.items() if name != "runs"}


FACTS = ("size", "cpu", "cores", "kernel", "python", "commit", "date")
