"""The thread, and the fake that a test steps."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import pytest

from delayd.machine.executor import Abandoned, Done, Priority, ThreadExecutor
from delayd.testing.disk import Crash
from delayd.testing.executor import InlineExecutor, StepExecutor
from tests.waiting import DEADLINE_S, wait_until


def crash() -> None:
    raise Crash("in a job")


def test_work_runs_on_the_named_thread_and_completes_on_the_loop() -> None:
    async def main() -> tuple[str, str]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[str, str]] = loop.create_future()
        executor = ThreadExecutor("sorter", loop.call_soon_threadsafe)

        def done(job: Done[str]) -> None:
            future.set_result((job.result(), threading.current_thread().name))

        executor.submit(lambda: threading.current_thread().name, done)
        try:
            return await asyncio.wait_for(future, DEADLINE_S)
        finally:
            executor.close()

    assert asyncio.run(main()) == ("sorter", threading.current_thread().name)


def test_submit_does_not_wait_for_the_work() -> None:
    loop: SimpleQueue[Callable[[], object]] = SimpleQueue()
    gate = threading.Event()
    finished: list[Done[bool]] = []
    executor = ThreadExecutor("worker", loop.put)
    executor.submit(lambda: gate.wait(DEADLINE_S), finished.append)
    gate.set()
    loop.get(timeout=DEADLINE_S)()
    assert finished[0].result() is True
    executor.close()


def test_close_ends_the_job_that_runs_at_its_next_piece_drops_the_others_and_ends_the_thread() -> None:
    loop: SimpleQueue[Callable[[], object]] = SimpleQueue()
    finished: list[Done[int]] = []
    executor = ThreadExecutor("closing", loop.put)
    began, others = threading.Event(), list[int]()

    def endless() -> int:
        while True:
            began.set()
            executor.give_way()

    executor.submit(endless, finished.append)
    assert began.wait(DEADLINE_S)
    for number in range(10):
        executor.submit(partial(others.append, number), lambda done: None, Priority.SPARE)
    executor.close()
    executor.close()
    assert "closing" not in [thread.name for thread in threading.enumerate()]
    assert loop.qsize() == 1 and not others
    loop.get()()
    with pytest.raises(Abandoned):
        finished[0].result()
    with pytest.raises(RuntimeError, match="closing is closed"):
        executor.submit(int, finished.append)


def test_nothing_that_a_job_raises_ends_the_thread() -> None:
    loop: SimpleQueue[Callable[[], object]] = SimpleQueue()
    finished: list[Done[object]] = []
    executor = ThreadExecutor("worker", loop.put)
    executor.submit(crash, finished.append)
    executor.submit(lambda: "next", finished.append)
    for _ in range(2):
        loop.get(timeout=DEADLINE_S)()
    executor.close()
    with pytest.raises(Crash):
        finished[0].result()
    assert finished[1].result() == "next"


def test_an_idle_thread_keeps_nothing_of_the_last_job() -> None:
    class Arrays:
        pass

    loop: SimpleQueue[Callable[[], object]] = SimpleQueue()
    executor = ThreadExecutor("worker", loop.put)
    result = Arrays()
    kept = weakref.ref(result)
    executor.submit(partial(id, result), lambda job: None)
    del result
    loop.get(timeout=DEADLINE_S)()
    wait_until(lambda: kept() is None, "the idle thread lets go of its last job")
    executor.close()


def test_a_test_decides_when_each_job_runs_and_when_it_completes() -> None:
    ran: list[int] = []
    finished: list[Done[None]] = []
    executor = StepExecutor()
    for number in range(2):
        executor.submit(partial(ran.append, number), finished.append)
    assert (executor.waiting, executor.ran, ran) == (2, 0, [])
    executor.run_one()
    executor.run_one()
    assert (executor.waiting, executor.ran, len(finished)) == (0, 2, 0)
    assert ran == [0, 1]
    executor.complete_one()
    assert len(finished) == 1
    assert executor.step()
    assert not executor.step()
    assert len(finished) == 2


def test_a_simulated_crash_in_a_job_ends_the_process_not_the_job() -> None:
    finished: list[Done[None]] = []
    with pytest.raises(Crash):
        InlineExecutor().submit(crash, finished.append)
    executor = StepExecutor()
    executor.submit(crash, finished.append)
    with pytest.raises(Crash):
        executor.run_one()
    assert finished == []
