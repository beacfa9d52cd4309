"""An executor without a thread: it runs a job when the test says so.

Invariant: as with `ThreadExecutor`, jobs run by priority and complete in the order in which they ran, each exactly
once. A simulated crash (`BaseException`) is not handed to ``done``: the process that would hear of it is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from delayd.machine.executor import Done, JobQueue, Priority, run

R = TypeVar("R")


class StepExecutor:
    """Keeps jobs until the test runs them, and results until the test hands them back."""

    def __init__(self) -> None:
        self._waiting = JobQueue()
        self._ran: deque[Callable[[], None]] = deque()

    def submit(
        self, work: Callable[[], R], done: Callable[[Done[R]], None], priority: Priority = Priority.NORMAL
    ) -> None:
        """Only queue."""
        self._waiting.jobs[priority].append(partial(_finish, work, done))

    def give_way(self) -> None:
        """Run the waiting jobs that are more urgent than the one under way."""
        while self._waiting.run_one(self._ran.append):
            pass

    @property
    def waiting(self) -> int:
        """Jobs that have not run."""
        return len(self._waiting)

    @property
    def ran(self) -> int:
        """Jobs that ran and whose ``done`` was not called yet."""
        return len(self._ran)

    def run_one(self) -> None:
        """Run the most urgent waiting job; its ``done`` waits for `complete_one`."""
        if not self._waiting.run_one(self._ran.append):
            raise LookupError("no job waits")

    def complete_one(self) -> None:
        """Call the oldest ``done`` that waits."""
        self._ran.popleft()()

    def step(self) -> bool:
        """Complete a job, running it first if none has run; False when there was nothing to do."""
        if not self._ran and not self._waiting.run_one(self._ran.append):
            return False
        self.complete_one()
        return True

    def run_all(self) -> int:
        """Step until nothing is left, jobs that complete by submitting more included; returns the steps."""
        steps = 0
        while self.step():
            steps += 1
        return steps

    def close(self) -> None:
        """Drop the jobs that have not run, as closing a thread does."""
        self._waiting.drop()


def _finish(work: Callable[[], R], done: Callable[[Done[R]], None]) -> Callable[[], None]:
    return partial(done, run(work))
