"""The model of the handoff (docs/handoff.md): its steps, its faults and what must hold, for a search."""

from collections.abc import Iterator

from tests.model.checks import breach
from tests.model.delay_side import delay_steps
from tests.model.faults import faults
from tests.model.realtime_side import realtime_steps
from tests.model.search import Step
from tests.model.state import Configuration, Removed, State, Target, hears, initial


class Handoff:
    """One configuration, without some rules."""

    def __init__(self, configuration: Configuration, removed: Removed = frozenset()) -> None:
        self._configuration = configuration
        self._removed = removed

    def initial(self) -> State:
        """All messages are accepted and due, and nothing was sent."""
        return initial(self._configuration)

    def steps(self, state: State) -> Iterator[Step[State]]:
        """All that the servers may do next."""
        yield from delay_steps(state, self._configuration.subjects, self._removed)
        for number in range(len(state.targets)):
            yield from realtime_steps(state, number, self._removed)

    def faults(self, state: State) -> Iterator[Step[State]]:
        """Every fault that the budget allows now."""
        return faults(state, self._configuration, self._removed)

    def breach(self, state: State, final: bool) -> str:
        """Name what is wrong."""
        return breach(state, final, self._removed)

    def canonical(self, state: State) -> State:
        """The same situation without what can make no difference any more."""
        targets = tuple(_canonical_target(state, target, self._removed) for target in state.targets)
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
