"""Executor: runs pure work beside the loop: the most urgent job first, and jobs of one priority in the order of
submission.

Invariant: until the executor is closed, every submitted job's ``done`` is called exactly once, on the loop, in the
order in which the jobs ended. A long job calls `Executor.give_way` between two pieces, and more urgent jobs run inside
this call (rule B2). A close drops what has not begun and ends a long job between two pieces, so it takes no longer than
a piece, however much there is to do: a job leaves the disk between two pieces as a crash there would.
"""

from __future__ import annotations

import threading
from _queue import SimpleQueue  # The one of `queue`, also where gevent has put its own in that place.
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Generic, Protocol, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Post = Callable[[Callable[[], object]], object]
"""Runs a function on the loop, from any thread: ``loop.call_soon_threadsafe``."""


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


Job = Callable[[], Callable[[], None]]
"""Does the work, and returns the function to call on the loop."""


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
    """One named thread; work must spend its time in calls that release the GIL, in bounded pieces."""

    def __init__(self, name: str, post: Post) -> None:
        self._post = post
        self._waiting = JobQueue()
        self._signals: SimpleQueue[None] = SimpleQueue()  # One for each job, and one for the end.
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], R], done: Callable[[Done[R]], None], priority: Priority = Priority.NORMAL
    ) -> None:
        """Queue ``work`` for the thread."""
        if self._closed:
            raise RuntimeError(f"executor {self._thread.name} is closed")
        self._waiting.jobs[priority].append(partial(_finish, work, done))
        self._signals.put(None)

    def give_way(self) -> None:
        """Run more urgent jobs; called on this executor's thread."""
        while not self._closed and self._waiting.run_one(self._post):
            pass
        if self._closed:
            raise Abandoned(f"{self._thread.name} is being closed")

    def close(self) -> None:
        """Drop the queued jobs, end the one that runs at its next `give_way`, and then the thread; blocks until it has
        ended. Close it before its loop.
        """
        if not self._closed:
            self._closed = True
            self._signals.put(None)
        self._thread.join()
        self._waiting.drop()

    def _run(self) -> None:
        while True:
            self._signals.get()
            if self._closed:
                return
            # The job of this signal may have run inside another job; then there is one signal too many.
            self._waiting.run_one(self._post)


def run(work: Callable[[], R], catch: type[BaseException] = Exception) -> Done[R]:
    """Call ``work`` here and now, and keep its result."""
    try:
        return Done((work(),))
    except catch as error:
        return Done(error)


def _finish(work: Callable[[], R], done: Callable[[Done[R]], None]) -> Callable[[], None]:
    # The thread must outlive any job, and the caller must be told of the job's end.
    return partial(done, run(work, BaseException))
