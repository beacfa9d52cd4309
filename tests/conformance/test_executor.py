"""What every executor does: the thread's and the fakes'."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from delayd.machine import executor
from delayd.machine.executor import Done, Executor, Priority, ThreadExecutor
from delayd.testing.executor import StepExecutor
from tests.compiled import build_kernel, load_kernel
from tests.waiting import DEADLINE_S
from tests.worlds.executor import InlineExecutor, ReaderLoop


class Rig:
    """An executor with what stands for its loop: `settle` runs what was handed back until ``count`` jobs are done."""

    def __init__(self, kind: str) -> None:
        self.loop = ReaderLoop()
        self.finished: list[Done[object]] = []
        self._thread = ThreadExecutor("worker", self.loop, operator.call) if kind in LANES else None
        self._step = StepExecutor() if kind == "step" else None
        self.executor: Executor = self._thread or self._step or InlineExecutor()

    def submit(self, work: Callable[[], object], priority: Priority = Priority.NORMAL) -> None:
        self.executor.submit(work, self.finished.append, priority)

    def settle(self, count: int) -> None:
        if self._step is not None:
            self._step.run_all()
        while self._thread is not None and len(self.finished) < count:
            assert self.loop.run_once(DEADLINE_S)
        assert len(self.finished) == count

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


LANES = ("thread", "compiled thread")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernel(tmp_path_factory.mktemp("kernel"))


@pytest.fixture(params=[*LANES, "inline", "step"])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if request.param == "compiled thread":
        monkeypatch.setattr(executor, "lane", load_kernel(request.getfixturevalue("kernel")).lane)
    made = Rig(request.param)
    yield made
    made.close()


def test_a_result_comes_back(rig: Rig) -> None:
    rig.submit(lambda: 41 + 1)
    rig.settle(1)
    assert rig.finished[0].result() == 42


def test_a_result_of_none_is_a_result(rig: Rig) -> None:
    rig.submit(lambda: None)
    rig.settle(1)
    assert rig.finished[0].result() is None


def test_an_error_is_raised_where_the_result_is_asked_for_and_the_next_job_runs(rig: Rig) -> None:
    rig.submit(lambda: 1 // 0)
    rig.submit(lambda: "fine")
    rig.settle(2)
    with pytest.raises(ZeroDivisionError):
        rig.finished[0].result()
    assert rig.finished[1].result() == "fine"


def test_an_error_that_is_a_result_is_returned(rig: Rig) -> None:
    error = ValueError("a value like any other")
    rig.submit(lambda: error)
    rig.settle(1)
    assert rig.finished[0].result() is error


def test_jobs_of_one_priority_run_and_complete_in_the_order_of_submission(rig: Rig) -> None:
    ran: list[int] = []
    for number in range(200):
        rig.submit(partial(ran.append, number))
    rig.settle(200)
    assert ran == list(range(200))


def test_a_job_that_completes_may_submit_the_next(rig: Rig) -> None:
    results: list[int] = []

    def next_one(done: Done[int]) -> None:
        results.append(done.result())
        if len(results) < 5:
            rig.executor.submit(lambda: len(results), next_one)
        else:
            rig.submit(lambda: "last")

    rig.executor.submit(lambda: 0, next_one)
    rig.settle(1)
    assert results == [0, 1, 2, 3, 4]


def test_rule_B2_a_long_job_gives_way_to_more_urgent_ones_only(rig: Rig) -> None:
    if isinstance(rig.executor, InlineExecutor):
        pytest.skip("there, no job ever waits")
    ran: list[str] = []

    def long() -> str:
        for piece in range(2):
            ran.append(f"piece {piece}")
            if not piece:
                for name, priority in (
                    ("seal", Priority.SPARE),
                    ("checkpoint", Priority.NORMAL),
                    ("space", Priority.SPACE),
                    ("load", Priority.DUE),
                ):
                    rig.submit(partial(note, name), priority)
            rig.executor.give_way()
        return "long"

    def note(name: str) -> str:
        ran.append(name)
        rig.executor.give_way()
        return name

    rig.submit(long)
    rig.settle(5)
    assert ran == ["piece 0", "load", "space", "piece 1", "checkpoint", "seal"]
    assert [done.result() for done in rig.finished] == ["load", "space", "long", "checkpoint", "seal"]


def test_rule_B2_of_waiting_jobs_the_most_urgent_runs_first(rig: Rig) -> None:
    if isinstance(rig.executor, InlineExecutor):
        pytest.skip("there, no job ever waits")
    gate: SimpleQueue[None] = SimpleQueue()
    if rig._thread is not None:
        rig.submit(gate.get)
    for priority in reversed(Priority):
        rig.submit(partial(str, priority.name), priority)
    gate.put(None)
    rig.settle(4 + (rig._thread is not None))
    assert [done.result() for done in rig.finished if done.result()] == [priority.name for priority in Priority]
