"""Runs: they alternate, disturbed ones are repeated, failures are told, and nothing that a run started outlives it."""

import os
import sys
from pathlib import Path

import pytest

from bench.cases import Case
from bench.runs import REPEATS_MAX, Line, RunFailed, Runner, last_line

FACTS = {"commit": "abc"}


def side() -> dict[str, float | list[float]]:
    raise AssertionError("a side runs in a process of its own")


def case(*sides: str, runs: int = 3, more_is_better: bool = True) -> Case:
    return Case("case", "a case", dict.fromkeys(sides, side), "messages_s", more_is_better, runs)


class Script:
    """Plays runs: for each side the lines that its runs give, one after the other."""

    def __init__(self, **lines: list[Line | RunFailed]) -> None:
        self.left = lines
        self.asked: list[str] = []
        self.emitted: list[Line] = []

    def attempt(self, size: str, case: Case, side: str) -> Line:
        self.asked.append(side)
        line = self.left[side].pop(0)
        if isinstance(line, RunFailed):
            raise line
        return line

    def runner(self, runs_max: int | None = None, end: float = float("inf")) -> Runner:
        return Runner("tiny", self.emitted.append, FACTS, runs_max, end, self.attempt)

    @property
    def summary(self) -> dict[str, dict[str, object]]:
        of = self.emitted[-1]["of"]
        assert isinstance(of, dict)
        return of


def run(rate: float, steal_s: float = 0.0) -> Line:
    return {"messages_s": rate, "steal_s": steal_s}


def test_sides_take_turns() -> None:
    script = Script(delayd=[run(1), run(2), run(3)], redis=[run(1), run(2), run(3)])
    script.runner().run(case("delayd", "redis"))
    assert script.asked == ["delayd", "redis"] * 3


def test_each_run_gives_a_line_and_the_case_one_with_medians_and_quotients() -> None:
    script = Script(delayd=[run(10), run(40), run(20)], redis=[run(5), run(5), run(10)])
    script.runner().run(case("delayd", "redis"))
    assert len(script.emitted) == 7
    assert script.emitted[2] == {
        "case": "case",
        "title": "a case",
        "side": "delayd",
        "run": 2,
        "messages_s": 40,
        "steal_s": 0.0,
        "repeated": 0,
        "commit": "abc",
    }
    assert script.summary["delayd"]["messages_s"] == {"median": 20, "min": 10, "max": 40}
    assert script.summary["ratio"] == {"redis": {"median": 4, "min": 2, "max": 8}}


def test_a_run_with_steal_is_repeated_and_the_calm_one_counts() -> None:
    script = Script(delayd=[run(10, 0.9), run(30, 0.1)])
    script.runner().run(case("delayd", runs=1))
    assert script.emitted[0]["messages_s"] == 30
    assert script.emitted[0]["repeated"] == 1


def test_repeats_are_bounded_and_the_calmest_run_counts() -> None:
    script = Script(delayd=[run(10, 0.9), run(30, 0.4), run(50, 0.6), run(70, 0.0)])
    script.runner().run(case("delayd", runs=1))
    assert len(script.asked) == 1 + REPEATS_MAX
    assert script.emitted[0]["messages_s"] == 30
    assert script.emitted[0]["steal_s"] == 0.4, "what disturbed it is told"


def test_a_side_that_fails_is_told_and_the_other_one_goes_on() -> None:
    script = Script(delayd=[RunFailed("broken")], redis=[run(1), run(2), run(3)])
    runner = script.runner()
    runner.run(case("delayd", "redis"))
    assert script.emitted[0]["error"] == "broken"
    assert script.asked.count("delayd") == 1
    assert runner.failed == 1
    assert script.summary["redis"]["runs"] == 3
    assert script.summary["ratio"] == {}


def test_a_process_that_fails_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match="ValueError: of the run"):
        last_line([sys.executable, "-c", "raise ValueError('of the run')"], os.environ, 30)
    assert "Traceback" in capsys.readouterr().err


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie that its new parent has not looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
