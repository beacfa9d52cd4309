"""Executor: runs pure work beside the loop: the most urgent job first, and jobs of one priority in the order of
submission.

Invariant: until the executor is closed, every submitted job's ``done`` is called exactly once, on the loop, in the
order in which the jobs ended. A long job calls `Executor.give_way` between two pieces, and more urgent jobs run inside
this call (rule B2). A close drops what has not begun and ends a long job between two pieces, so it takes no longer than
a piece, however much there is to do: a job leaves the disk between two pieces as a crash there would.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Generic, Protocol, TypeVar

from delayd.errors import Shortage
from delayd.machine.lane import Call, lane

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Tell = Callable[[Callable[[], object]], object]
"""Called on the loop with each function that is to be called there."""


class Readers(Protocol):
    """What a thread needs of its loop."""

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> object:
        """Call back on the loop while a descriptor is readable."""

    def remove_reader(self, fd: int, /) -> object:
        """Call back no more."""


class Priority(IntEnum):
    """The priority of a job: the waiting job with the lowest number runs first."""

    DUE = 0  # Jobs for which messages wait that are due soon.
    SPACE = 1  # Jobs that free space on the disk.
    NORMAL = 2
    SPARE = 3  # Jobs for which nothing waits.


class Abandoned(BaseException):
    """The executor of this job is being closed, so the job ends between two of its pieces."""


class Done(Generic[R_co]):
    """The result of a job: the returned value in a tuple of one, or the error."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: tuple[R_co] | BaseException) -> None:
        self._outcome = outcome

    def result(self) -> R_co:
        """Return what the work returned, or raise what it raised."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome[0]


class Executor(Protocol):
    """Runs long pure functions: arrays in, arrays out; they never touch the loop's state."""

    def submit(
        self, work: Callable[[], R], done: Callable[[Done[R]], None], priority: Priority = Priority.NORMAL
    ) -> None:
        """Queue ``work``; ``done`` is called on the loop when it returned or raised. Never blocks."""

    def give_way(self) -> None:
        """Run waiting jobs that are more urgent than the calling one, between two of its pieces.

        Raises Abandoned when the executor is being closed.
        """


class DiskWork(ABC, Generic[R_co]):
    """A job that may be nothing but system calls: then the loop prepares and judges them, and a `Lane` does them."""

    @abstractmethod
    def __call__(self) -> R_co:
        """Do all of it, on the thread."""

    @abstractmethod
    def begin(self) -> Call | None:
        """Prepare the calls, on the loop, while no job of the executor is under way; None: it is to be called."""

    @abstractmethod
    def end(self, outcome: int) -> Done[R_co] | None:
        """Judge the outcome of the calls (`delayd.machine.lane`), on the loop; None: it is to be called after all."""


Job = Callable[[], Callable[[], None]]
"""Does the work, and returns the function to call on the loop."""
Judge = Callable[[int], Callable[[], None] | None]
"""Takes the outcome of calls, and returns the function to call on the loop; None: the job is to be done after all."""


class JobQueue:
    """The jobs of one executor that have not begun; any thread adds jobs, the executor's own thread takes them."""

    def __init__(self) -> None:
        self.jobs: tuple[deque[Job], ...] = tuple(deque() for _ in Priority)  # By priority, in the order of submission.
        self._running = len(Priority)  # Priority of the job that is under way; without one, lower than every priority.

    def __len__(self) -> int:
        return sum(map(len, self.jobs))

    def drop(self) -> None:
        """Forget all of them: they never run."""
        for jobs in self.jobs:
            jobs.clear()

    def run_one(self, ended: Callable[[Callable[[], None]], object]) -> bool:
        """Run the most urgent job if it is more urgent than the one under way; ``ended`` is called with the function
        that it returned.
        """
        for priority in range(self._running):
            if self.jobs[priority]:
                before, self._running = self._running, priority
                try:
                    ended(self.jobs[priority].popleft()())
                finally:
                    self._running = before
                return True
        return False


class ThreadExecutor:
    """One named thread; work must spend its time in calls that release the GIL, in bounded pieces.

    System calls of `DiskWork` and all other jobs are never under way at the same time, since each of them may change
    what the other has read:

        idle ── a job ──▶ jobs only ── the last one has ended ──▶ idle
          └── DiskWork ─▶ calls only ── the last one has ended ──▶ the held jobs, or idle

    While there are calls, any other job is held. While there are jobs, `DiskWork` is a job like any other. One whose
    calls failed is called as a job, too, with all that were behind it: the errors are then those of the call.
    """

    def __init__(self, name: str, loop: Readers, tell: Tell) -> None:
        """Begin the thread; Shortage without a descriptor for its events."""
        self._loop, self._tell = loop, tell
        self._waiting = JobQueue()
        self._jobs = 0  # Jobs whose end the loop has not heard.
        self._calls: deque[tuple[Judge, Job, Priority]] = deque()
        self._failed: deque[tuple[Job, Priority]] = deque()  # Jobs whose calls failed; they are called before others.
        self._held: deque[tuple[Job, Priority]] = deque()
        self._ready: deque[Callable[[], object]] = deque()  # What is to be told.
        self._closed = False
        try:
            self._lane = lane()
        except OSError as error:
            raise Shortage(f"the eventfd of {name}", error.errno or 0) from error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        loop.add_reader(self._lane.fileno(), self._take_ended)

    def submit(
        self, work: Callable[[], R], done: Callable[[Done[R]], None], priority: Priority = Priority.NORMAL
    ) -> None:
        """Queue ``work`` for the thread."""
        if self._closed:
            raise RuntimeError(f"executor {self._thread.name} is closed")
        if not (self._jobs or self._held) and isinstance(work, DiskWork) and (call := work.begin()) is not None:
            self._calls.append((partial(_judge, work, done), partial(_finish, work, done), priority))
            self._lane.add(*call)
        elif self._calls:
            self._held.append((partial(_finish, work, done), priority))
        else:
            self._add(partial(_finish, work, done), priority)

    def give_way(self) -> None:
        """Run more urgent jobs; called on this executor's thread."""
        while not self._closed and self._waiting.run_one(self._lane.end):
            pass
        if self._closed:
            raise Abandoned(f"{self._thread.name} is being closed")

    def close(self) -> None:
        """Drop the queued jobs, end the one that runs at its next `give_way`, and then the thread; blocks until it has
        ended. Close it before its loop. Nothing is told any more, but the calls that have ended take effect.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._lane.fileno())
        self._lane.stop()
        self._thread.join()
        self._waiting.drop()
        self._settle()
        self._lane.close()

    def _add(self, job: Job, priority: Priority) -> None:
        self._jobs += 1
        self._waiting.jobs[priority].append(job)
        self._lane.signal()

    def _take_ended(self) -> None:
        self._settle()
        if not self._calls:
            for jobs in (self._failed, self._held):
                while jobs:
                    self._add(*jobs.popleft())
        try:
            while self._ready and not self._closed:
                self._tell(self._ready.popleft())
        finally:
            # If one of them has raised, the rest is told by another call.
            if self._ready and not self._closed:
                os.eventfd_write(self._lane.fileno(), 1)

    def _settle(self) -> None:
        """Let what has ended take effect."""
        for ended in self._lane.ended():
            if not isinstance(ended, int):
                self._jobs -= 1
                self._ready.append(ended)
                continue
            judge, job, priority = self._calls.popleft()
            if (ready := judge(ended)) is None:
                self._failed.append((job, priority))
            else:
                self._ready.append(ready)

    def _run(self) -> None:
        # The job of a signal may have run inside another job; then there is one signal too many.
        while self._lane.wait():
            self._waiting.run_one(self._lane.end)


def run(work: Callable[[], R], catch: type[BaseException] = Exception) -> Done[R]:
    """Call ``work`` here and now, and keep its result."""
    try:
        return Done((work(),))
    except catch as error:
        return Done(error)


def _finish(work: Callable[[], R], done: Callable[[Done[R]], None]) -> Callable[[], None]:
    # The thread must outlive any job, and the caller must be told of the job's end.
    return partial(done, run(work, BaseException))


def _judge(work: DiskWork[R], done: Callable[[Done[R]], None], outcome: int) -> Callable[[], None] | None:
    judged = work.end(outcome)
    return None if judged is None else partial(done, judged)
