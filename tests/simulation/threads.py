"""Threads of a simulated server: jobs that stand still before any of their disk operations while others go on.

Invariant: one thing runs at a time, and which one the seed decides. A job is a coroutine of control (greenlet): it
hands control back before a read, write, sync, folder operation or commit, and goes on there when it is told to.
"""

from __future__ import annotations

from random import Random
from typing import TypeVar

from greenlet import greenlet

from delayd.testing.disk import Crash, MemoryDisk
from delayd.testing.executor import StepExecutor

R = TypeVar("R")

WHOLE = (1 << 40,)
ONE = (1,)
SOME = (*WHOLE, *WHOLE, *WHOLE, 1, 1, 2, 4)  # Most turns end with their job: runs are faster, and go further.


class Turns:
    """Whose turn it is among the threads of one life of a server, all of which use ``disk``."""

    def __init__(self, disk: MemoryDisk, random: Random) -> None:
        self.operations: tuple[int, ...] = SOME  # How many a turn may have, one of which is drawn.
        self._disk = disk
        self._random = random
        self._left = 0
        self._running: greenlet | None = None
        disk.before_each = self._before_each

    def give(self, job: greenlet) -> bool:
        """Let a job run for some operations; whether it has ended. What it does not catch is raised here."""
        self._left = self._random.choice(self.operations)
        self._running = job
        try:
            job.switch()
        finally:
            self._running = None
        return bool(job.dead)

    def end(self, job: greenlet) -> None:
        """Have a job of a server that died end where it stands: nothing of it happens any more."""
        self._disk.crashed = True
        try:
            job.throw(Crash)
        except Crash:
            return
        raise AssertionError("a job survives the death of its server")

    def _before_each(self) -> None:
        job = self._running
        # The loop and the readers outside use the disk between turns.
        if job is None:
            return
        if self._left == 0:
            assert job.parent is not None, "only what was given a turn runs"
            job.parent.switch()
        self._left -= 1


class SteppedExecutor(StepExecutor):
    """A thread whose jobs run for some operations at a time."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._begun: greenlet | None = None

    @property
    def begun(self) -> bool:
        """Whether a job stands still between two of its operations."""
        return self._begun is not None

    def run_some(self) -> None:
        """Let the job that has begun, or the oldest one that waits, have a turn."""
        job = self._begun or greenlet(self._run_oldest)
        self._begun = job
        try:
            ended = self._turns.give(job)
        except BaseException:
            self._begun = None
            raise
        if ended:
            self._begun = None

    def run_one(self) -> None:
        """Let the job that has begun, or the oldest one that waits, run to its end."""
        operations, self._turns.operations = self._turns.operations, WHOLE
        try:
            self.run_some()
        finally:
            self._turns.operations = operations

    def step(self) -> bool:
        """See `StepExecutor`: a job that has begun goes on."""
        if self._begun is not None and not self._ran:
            self.run_one()
        return super().step()

    def die(self) -> None:
        """The server has died, and its disk was copied for the next life."""
        job, self._begun = self._begun, None
        if job is not None:
            self._turns.end(job)

    def _run_oldest(self) -> None:
        super().run_one()
