"""Moves: what may happen next in a simulated cluster, with words for the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from tests.simulation.threads import SteppedExecutor


class Move(NamedTuple):
    """One thing that may happen, and how a trace tells it."""

    what: str
    do: Callable[[], None]


class Threads:
    """The threads of one life of a server, each with its name: they run a part of a job, or hear of one, at a time."""

    def __init__(self, owner: str, named: Sequence[tuple[str, SteppedExecutor]]) -> None:
        self._threads = [
            (
                thread,
                Move(f"{owner} runs a {name} job", thread.run_some),
                Move(f"{owner} hears of a {name} job", thread.complete_one),
            )
            for name, thread in named
        ]

    def moves(self) -> Iterator[Move]:
        """Going on with the oldest job of each thread, and handing back its oldest result."""
        for thread, run, hear in self._threads:
            # Past the properties: this is asked more often than anything else.
            if thread._begun is not None or any(thread._waiting.jobs):
                yield run
            if thread._ran:
                yield hear

    @property
    def begun(self) -> bool:
        """Whether a job stands still between two of its operations."""
        return any(thread.begun for thread, _, _ in self._threads)

    def begun_in(self, what: str) -> bool:
        """Whether a job of the thread whose work is called so stands still between two of its operations."""
        return any(thread.begun for thread, run, _ in self._threads if run.what.startswith(what))

    def die(self) -> None:
        """The server has died: jobs that have begun end where they stand."""
        for thread, _, _ in self._threads:
            thread.die()

    def wrap(self, around: Callable[[str, Callable[[], None]], None]) -> None:
        """Have each move made by ``around``, which gets its words and what it does."""

        def wrapped(move: Move) -> Move:
            return Move(move.what, partial(around, move.what, move.do))

        self._threads = [(thread, wrapped(run), wrapped(hear)) for thread, run, hear in self._threads]
