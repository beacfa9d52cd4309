"""Runs pure work beside the loop: jobs run one after the other, their results come back to the loop in order.

Invariant: every submitted job's ``done`` is called exactly once, on the loop, in the order of submission.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Post = Callable[[Callable[[], object]], object]
"""Has a function called on the loop, from any thread: ``loop.call_soon_threadsafe``."""


class Done(Generic[R_co]):
    """What became of a job: the returned value in a tuple of one, or the error."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: tuple[R_co] | BaseException) -> None:
        self._outcome = outcome

    def result(self) -> R_co:
        """Return what the work returned, or raise what it raised."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome[0]


class Executor(Protocol):
    """Where long pure functions run: arrays in, arrays out, never a touch of the loop's state."""

    def submit(self, work: Callable[[], R], done: Callable[[Done[R]], None]) -> None:
        """Queue ``work``; ``done`` is called on the loop when it returned or raised. Never blocks."""


class ThreadExecutor:
    """One named thread; work must spend its time in calls that release the GIL, in bounded pieces."""

    def __init__(self, name: str, post: Post) -> None:
        self._post = post
        self._jobs: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], R], done: Callable[[Done[R]], None]) -> None:
        """Queue ``work`` for the thread."""
        if self._closed:
            raise RuntimeError(f"executor {self._thread.name} is closed")
        self._jobs.put(partial(_finish, work, done))

    def close(self) -> None:
        """Run what is queued, then end the thread; blocks until it has ended. Close it before its loop."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._post(job())
            # An idle thread would otherwise keep the last job's arrays alive.
            del job


def run(work: Callable[[], R], catch: type[BaseException] = Exception) -> Done[R]:
    """Call ``work`` here and now, and keep what became of it."""
    try:
        return Done((work(),))
    except catch as error:
        return Done(error)


def _finish(work: Callable[[], R], done: Callable[[Done[R]], None]) -> Callable[[], None]:
    # The thread must outlive any job, and whoever waits for the job must hear of its end.
    return partial(done, run(work, BaseException))
