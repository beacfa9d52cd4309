"""Breadth-first search of all states, with equal situations counted once; the shortest way to a breach.

Every state must also lead, without any fault, to one in which all is done: so nothing waits for ever.
"""

import gc
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.model.checks import breach
from tests.model.delay_side import delay_steps
from tests.model.faults import faults
from tests.model.realtime_side import realtime_steps
from tests.model.state import Configuration, Removed, State, Target, hears, initial

Step = tuple[tuple[object, ...], State]

STUCK = "from here no order of steps ends with everything done"


@dataclass(slots=True)
class Result:
    """How a search ended; ``trace`` is empty if nothing is wrong."""

    states: int
    finals: int
    seconds: float
    complete: bool
    trace: list[str] = field(default_factory=list)


class Search:
    """One configuration, without some rules."""

    def __init__(self, configuration: Configuration, removed: Removed = frozenset()) -> None:
        self._configuration = configuration
        self._removed = removed
        self._states: list[State] = []
        self._parents = array("q")

    def run(self, states_max: int) -> Result:
        """Search until all is seen, something is wrong, or so many states are known."""
        # States hold no cycles, and a collector that walks all of them again and again takes a third of the time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._run(states_max)
        finally:
            if collecting:
                gc.enable()

    def _run(self, states_max: int) -> Result:
        began = time.monotonic()
        self._states = [initial(self._configuration)]
        self._parents = array("q", [-1])
        known = {self._states[0]: 0}
        sources, ends = array("q"), array("q")
        finals: list[int] = []

        def result(complete: bool, trace: list[str]) -> Result:
            return Result(len(self._states), len(finals), time.monotonic() - began, complete, trace)

        for index, state in enumerate(self._states):
            calm = [after for _, after in self._steps(state)]
            if not calm:
                finals.append(index)
            if wrong := breach(state, not calm, self._removed):
                return result(False, self._trace(index, wrong))
            if len(self._states) > states_max:
                return result(False, [])
            count = len(calm)
            calm.extend(after for _, after in faults(state, self._configuration, self._removed))
            for number, after in enumerate(calm):
                after = canonical(after, self._removed)
                place = known.setdefault(after, len(self._states))
                if place == len(self._states):
                    self._states.append(after)
                    self._parents.append(index)
                if number < count:
                    sources.append(index)
                    ends.append(place)
        stuck = _cannot_reach(finals, sources, ends, len(self._states))
        return result(True, [] if stuck is None else self._trace(stuck, STUCK))

    def _steps(self, state: State) -> Iterator[Step]:
        yield from delay_steps(state, self._configuration.subjects, self._removed)
        for number in range(len(state.targets)):
            yield from realtime_steps(state, number, self._removed)

    def _trace(self, index: int, wrong: str) -> list[str]:
        lines = [f"=> {wrong}"]
        while (before := self._parents[index]) >= 0:
            state, after = self._states[before], self._states[index]
            for told, found in (*self._steps(state), *faults(state, self._configuration, self._removed)):
                if canonical(found, self._removed) == after:
                    lines.append(" ".join(map(str, told)).replace(" ;", ";"))
                    break
            index = before
        return lines[::-1]


def canonical(state: State, removed: Removed) -> State:
    """The same situation without what can make no difference any more."""
    targets = tuple(_canonical_target(state, target, removed) for target in state.targets)
    return state if targets == state.targets else state._replace(targets=targets)


def _canonical_target(state: State, target: Target, removed: Removed) -> Target:
    wires = target.wires
    if wires and "H3_fence" not in removed:
        # Late requests that T will refuse, with nobody there to hear it, change nothing.
        greeting = {item.line for item in wires if not item.batches and item.line[::2] > target.heard}
        wires = tuple(
            item for item in wires if item.line in greeting or item.line == target.current or hears(state, item.line)
        )
    current = target.current
    if current is not None and not hears(state, current) and all(item.line != current for item in wires):
        current = None
    if wires is target.wires and current is target.current:
        return target
    return target._replace(wires=wires, current=current)


def _cannot_reach(finals: list[int], sources: "array[int]", ends: "array[int]", count: int) -> int | None:
    """The first state from which no way without faults leads to a final one."""
    source, end = np.frombuffer(sources, np.int64), np.frombuffer(ends, np.int64)
    reaches = np.zeros(count, np.bool_)
    reaches[finals] = True
    while True:
        more = source[reaches[end] & ~reaches[source]]
        if not len(more):
            break
        reaches[more] = True
    missing = np.flatnonzero(~reaches)
    return int(missing[0]) if len(missing) else None
