"""The thread, and the fake that a test steps."""

from __future__ import annotations

import operator
import threading
from functools import partial

import pytest

from delayd.machine.executor import Abandoned, Done, Priority, ThreadExecutor
from delayd.testing.disk import Crash
from delayd.testing.executor import StepExecutor
from tests.waiting import DEADLINE_S
from tests.worlds.executor import InlineExecutor, ReaderLoop


def crash() -> None:
    raise Crash("in a job")


def test_close_ends_the_job_that_runs_at_its_next_piece_drops_the_others_and_ends_the_thread() -> None:
    loop = ReaderLoop()
    finished: list[Done[int]] = []
    executor = ThreadExecutor("closing", loop, operator.call)
    began, others, abandoned = threading.Event(), list[int](), list[bool]()

    def endless() -> int:
        while True:
            began.set()
            try:
                executor.give_way()
            except Abandoned:
                abandoned.append(True)
                raise

    executor.submit(endless, finished.append)
    assert began.wait(DEADLINE_S)
    for number in range(10):
        executor.submit(partial(others.append, number), lambda done: None, Priority.SPARE)
    executor.close()
    executor.close()
    assert "closing" not in [thread.name for thread in threading.enumerate()]
    assert abandoned == [True] and not (others or finished)
    with pytest.raises(RuntimeError, match="closing is closed"):
        executor.submit(int, finished.append)


def test_nothing_that_a_job_raises_ends_the_thread() -> None:
    loop = ReaderLoop()
    finished: list[Done[object]] = []
    executor = ThreadExecutor("worker", loop, operator.call)
    executor.submit(crash, finished.append)
    executor.submit(lambda: "next", finished.append)
    while len(finished) < 2:
        assert loop.run_once(DEADLINE_S)
    executor.close()
    with pytest.raises(Crash):
        finished[0].result()
    assert finished[1].result() == "next"


def test_a_simulated_crash_in_a_job_ends_the_process_not_the_job() -> None:
    finished: list[Done[None]] = []
    with pytest.raises(Crash):
        InlineExecutor().submit(crash, finished.append)
    executor = StepExecutor()
    executor.submit(crash, finished.append)
    with pytest.raises(Crash):
        executor.run_one()
    assert finished == []
