"""Faults that the budget of a configuration allows: connections break, servers die and recover, addresses are old."""

import itertools
from collections.abc import Iterator

from tests.model.delay_side import connect, flush_some
from tests.model.realtime_side import restarts
from tests.model.state import (
    CLOSED,
    DURABLE,
    MEMORY,
    Configuration,
    Item,
    Line,
    Link,
    Note,
    Outcome,
    Removed,
    State,
    hang_up,
    with_target,
)

Step = tuple[tuple[object, ...], State]


def faults(state: State, configuration: Configuration, removed: Removed) -> Iterator[Step]:
    """Every fault that may happen now."""
    budget = state.budget
    if budget.cuts:
        yield from _cuts(state._replace(budget=budget._replace(cuts=budget.cuts - 1)), removed)
    if budget.full_disks:
        yield from flush_some(state._replace(budget=budget._replace(full_disks=budget.full_disks - 1)))
    if budget.misdials:
        fewer = state._replace(budget=budget._replace(misdials=budget.misdials - 1))
        for number, link in enumerate(state.links):
            for at in range(len(state.targets)):
                if link.phase == CLOSED and at != number:
                    yield connect(fewer, number, at, removed)
    if budget.target_crashes:
        fewer = state._replace(budget=budget._replace(target_crashes=budget.target_crashes - 1))
        for number in range(len(state.targets)):
            yield from _crash_target(fewer, number, configuration.relay, removed)
    if budget.delay_crashes:
        yield from _crash_delay(state._replace(budget=budget._replace(delay_crashes=budget.delay_crashes - 1)), removed)


def _cuts(state: State, removed: Removed) -> Iterator[Step]:
    for number, link in enumerate(state.links):
        if link.phase != CLOSED:
            line = Line(state.epoch, number, link.session)
            for kept, wires in _prefixes(state, link.at, line):
                target = state.targets[link.at]._replace(wires=wires)
                after = hang_up(with_target(state, link.at, target), line, removed)
                yield (f"the connection to T{link.at} breaks; requests still under way:", kept), after


def _prefixes(state: State, at: int, line: Line) -> list[tuple[int, tuple[Item, ...]]]:
    """What may stay under way of a connection that D lost: a prefix, which may arrive at any time."""
    wires = state.targets[at].wires
    others = tuple(item for item in wires if item.line != line)
    ours = tuple(item for item in wires if item.line == line)
    return [(count, tuple(sorted(others + ours[:count], key=lambda item: item.line))) for count in range(len(ours) + 1)]


def _crash_target(state: State, number: int, relay: bool, removed: Removed) -> Iterator[Step]:
    target = state.targets[number]
    for link_number, link in enumerate(state.links):
        if link.phase != CLOSED and link.at == number:
            state = hang_up(state, Line(state.epoch, link_number, link.session), removed)
    for kept, after in restarts(target, removed):
        after = after._replace(wires=target.wires if relay else ())
        yield (f"T{number} dies and restarts; batches in its log:", kept), with_target(state, number, after)


def _crash_delay(state: State, removed: Removed) -> Iterator[Step]:
    """D loses its memory and any of what was not fsynced: outcomes hour by hour, notes."""
    live = [
        (link.at, Line(state.epoch, number, link.session))
        for number, link in enumerate(state.links)
        if link.phase != CLOSED
    ]
    outcomes_found = itertools.product(
        *(_outcome_found(outcome, row in state.unsynced) for row, outcome in enumerate(state.outcomes))
    )
    notes_found = itertools.product(*(_note_found(note) for note in state.notes))
    cuts = itertools.product(*(range(_count(state, at, line) + 1) for at, line in live))
    for outcomes, notes, kept in itertools.product(outcomes_found, notes_found, cuts):
        after = state
        for (at, line), count in zip(live, kept, strict=True):
            after = with_target(after, at, after.targets[at]._replace(wires=_prefixes(after, at, line)[count][1]))
        unsynced = tuple(
            row
            for row, outcome in enumerate(state.outcomes)
            if outcomes[row] is not None and outcome is not None and (outcome.level < DURABLE or row in state.unsynced)
        )
        after = after._replace(
            epoch=state.epoch + ("H3_epoch" not in removed),
            outcomes=outcomes if "P4_outcomes" not in removed else (None,) * len(outcomes),
            notes=notes,
            links=(Link(),) * len(state.links),
            unsynced=unsynced if "L1_outcomes" in removed else (),
        )
        rows = [row for row, outcome in enumerate(outcomes) if outcome is not None]
        yield ("D dies and restarts; rows in D_h:", rows, "; requests under way:", sum(kept)), after


def _count(state: State, at: int, line: Line) -> int:
    return sum(item.line == line for item in state.targets[at].wires)


def _outcome_found(outcome: Outcome | None, unsynced: bool) -> list[Outcome | None]:
    if outcome is None or outcome.level == MEMORY:
        return [None]
    found = outcome._replace(level=DURABLE)
    return [found] if outcome.level == DURABLE and not unsynced else [found, None]


def _note_found(note: Note | None) -> list[Note | None]:
    if note is None:
        return [None]
    found = note._replace(level=DURABLE)
    return [found] if note.level == DURABLE else [found, None]
