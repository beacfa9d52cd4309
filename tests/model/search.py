"""Breadth-first search of all states of a model, with equal situations counted once; the shortest way to a breach.

Every state must also lead, without any fault, to one in which all is done: so nothing waits for ever.
"""

import gc
import time
from array import array
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

S = TypeVar("S", bound=Hashable)
Step = tuple[tuple[object, ...], S]
"""What happened, in words to be joined, and the state behind it."""

STUCK = "from here no order of steps ends with everything done"


@dataclass(slots=True)
class Result:
    """How a search ended; ``trace`` is empty if nothing is wrong."""

    states: int
    finals: int
    seconds: float
    complete: bool
    trace: list[str] = field(default_factory=list)


class Model(Protocol[S]):
    """What is searched: one configuration of a model, perhaps without some rules."""

    def initial(self) -> S:
        """Where the search begins."""

    def steps(self, state: S) -> Iterator[Step[S]]:
        """All that may happen next without a fault."""

    def faults(self, state: S) -> Iterator[Step[S]]:
        """Every fault that may happen now."""

    def breach(self, state: S, final: bool) -> str:
        """What is wrong with a state; empty if nothing is. Behind a final one only faults could happen."""

    def canonical(self, state: S) -> S:
        """The same situation without what can make no difference any more."""


class Search(Generic[S]):
    """A search of one model."""

    def __init__(self, model: Model[S]) -> None:
        self._model = model
        self._states: list[S] = []
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
        model, began = self._model, time.monotonic()
        self._states = [model.initial()]
        self._parents = array("q", [-1])
        known = {self._states[0]: 0}
        sources, ends = array("q"), array("q")
        finals: list[int] = []

        def result(complete: bool, trace: list[str]) -> Result:
            return Result(len(self._states), len(finals), time.monotonic() - began, complete, trace)

        for index, state in enumerate(self._states):
            calm = [after for _, after in model.steps(state)]
            if not calm:
                finals.append(index)
            if wrong := model.breach(state, not calm):
                return result(False, self._trace(index, wrong))
            if len(self._states) > states_max:
                return result(False, [])
            count = len(calm)
            calm.extend(after for _, after in model.faults(state))
            for number, after in enumerate(calm):
                after = model.canonical(after)
                place = known.setdefault(after, len(self._states))
                if place == len(self._states):
                    self._states.append(after)
                    self._parents.append(index)
                if number < count:
                    sources.append(index)
                    ends.append(place)
        stuck = _cannot_reach(finals, sources, ends, len(self._states))
        return result(True, [] if stuck is None else self._trace(stuck, STUCK))

    def _trace(self, index: int, wrong: str) -> list[str]:
        lines = [f"=> {wrong}"]
        while (before := self._parents[index]) >= 0:
            state, after = self._states[before], self._states[index]
            for told, found in (*self._model.steps(state), *self._model.faults(state)):
                if self._model.canonical(found) == after:
                    lines.append(" ".join(map(str, told)).replace(" ;", ";"))
                    break
            index = before
        return lines[::-1]


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
