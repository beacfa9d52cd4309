"""An executor that runs each job at once, for tests without threads, and a loop for tests of one thread."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TypeVar

from delayd.machine.executor import Done, Priority, run

R = TypeVar("R")


class InlineExecutor:
    """Runs and completes each job inside `submit`."""

    def submit(
        self, work: Callable[[], R], done: Callable[[Done[R]], None], priority: Priority = Priority.NORMAL
    ) -> None:
        """``done`` has been called on return."""
        done(run(work))

    def give_way(self) -> None:
        """Nothing ever waits."""

    def close(self) -> None:
        """Nothing is ever left to do."""


class ReaderLoop:
    """The loop of one thread: it calls back when the test says so."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], object]] = {}

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> None:
        """See Readers."""
        self._callbacks[fd] = callback

    def remove_reader(self, fd: int, /) -> None:
        """See Readers."""
        del self._callbacks[fd]

    def run_once(self, within_s: float) -> bool:
        """Wait until something is to be heard and hear it; False: there was nothing."""
        readable, _, _ = select.select([*self._callbacks], [], [], within_s)
        for fd in readable:
            self._callbacks[fd]()
        return bool(readable)
