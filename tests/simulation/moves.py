"""Moves: what may happen next in a simulated cluster, with words for the trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from delayd.testing.executor import StepExecutor


class Move(NamedTuple):
    """One thing that may happen, and how a trace tells it."""

    what: str
    do: Callable[[], None]


def executor_moves(owner: str, threads: Iterable[tuple[str, StepExecutor]]) -> list[Move]:
    """Running the oldest job of each thread, and handing back its oldest result."""
    found: list[Move] = []
    for name, thread in threads:
        if thread.waiting:
            found.append(Move(f"{owner} runs a {name} job", thread.run_one))
        if thread.ran:
            found.append(Move(f"{owner} hears of a {name} job", thread.complete_one))
    return found
