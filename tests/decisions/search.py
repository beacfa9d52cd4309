"""Breadth-first search of all states of a configuration; the shortest way to a breach."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.decisions.checks import breach
from tests.decisions.state import Removed, State
from tests.decisions.steps import faults, steps


@dataclass(slots=True)
class Result:
    """How a search ended; ``trace`` is empty if nothing is wrong."""

    states: int
    finals: int
    complete: bool
    trace: list[str] = field(default_factory=list)


def search(start: State, removed: Removed, states_max: int) -> Result:
    """Search until all is seen, something is wrong, or so many states are known."""
    came: dict[State, tuple[State, str] | None] = {start: None}
    queue, finals = [start], 0
    for state in queue:
        calm = list(steps(state, removed))
        finals += not calm
        wrong = breach(state, not calm)
        if wrong:
            return Result(len(queue), finals, False, [*_way(came, state), f"=> {wrong}"])
        if len(queue) > states_max:
            return Result(len(queue), finals, False)
        for told, after in (*calm, *faults(state, removed)):
            if after not in came:
                came[after] = (state, told)
                queue.append(after)
    return Result(len(queue), finals, True)


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    lines: list[str] = []
    while (before := came[state]) is not None:
        state, told = before
        lines.append(told)
    return lines[::-1]
