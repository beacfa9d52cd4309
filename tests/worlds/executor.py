"""An executor that runs each job at once, for tests of what does not depend on threads."""

from __future__ import annotations

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
