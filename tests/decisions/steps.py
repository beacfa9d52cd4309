"""What may happen next, and which faults: each step is what one part of the server does between two of its waits."""

from collections.abc import Iterator

from tests.decisions.decide import Decider
from tests.decisions.state import (
    DURABLE,
    NONE,
    WRITTEN,
    Answer,
    Asked,
    Checkpoint,
    Commit,
    Ended,
    Group,
    Outcome,
    Reason,
    Removed,
    State,
    Told,
    ended_in,
    newest,
    outcome_of,
    rows_of,
    takers,
)

Step = tuple[str, State]


def steps(state: State, removed: Removed) -> Iterator[Step]:
    """What happens without faults."""
    for number, ask in enumerate(state.todo):
        if ask not in state.todo[:number]:
            todo = state.todo[:number] + state.todo[number + 1 :]
            asked = Asked(ask, newest(state, removed))
            yield f"a caller asks: {ask.value}", state._replace(todo=todo, queue=(*state.queue, asked))
    yield from _commits(state, removed)
    yield from _handoff(state, removed)
    yield from _outcomes(state)


def faults(state: State, removed: Removed) -> Iterator[Step]:
    """What the budget allows: it may happen, and need not."""
    budget = state.budget
    if budget.checkpoints and state.writing is None:
        yield _begin_checkpoint(state._replace(budget=budget._replace(checkpoints=budget.checkpoints - 1)), removed)
    if state.writing is not None:
        yield _end_checkpoint(state, state.writing, removed)
    if budget.merges and len(state.runs) > 1:
        merged = (max(row for run in state.runs for row in run),)
        if "merge_newest" in removed:
            merged = (min(row for run in state.runs for row in run),)
        yield "runs are merged", state._replace(runs=(merged,), budget=budget._replace(merges=budget.merges - 1))
    if budget.full_disks and state.commit is not None and not state.commit.appended:
        fewer = state._replace(budget=budget._replace(full_disks=budget.full_disks - 1))
        yield "the disk is full", _refuse(fewer, state.commit, removed)
    if budget.crashes:
        yield from _crash(state._replace(budget=budget._replace(crashes=budget.crashes - 1)), removed)


def _commits(state: State, removed: Removed) -> Iterator[Step]:
    if state.late is not None:
        yield "the commit takes effect", _take_effect(state, state.late)._replace(late=None)
        if "effects_first" not in removed:
            return
    commit = state.commit
    if commit is None:
        if state.queue:
            decided = Decider(state, removed).commit()
            claimed = NONE if "claim_first" in removed else decided.claimed
            told = state.told | frozenset(decided.told) if "answer_durable" in removed else state.told
            after = state._replace(queue=(), commit=decided, claimed=state.claimed | claimed, told=told)
            yield f"a commit is closed: {_text(decided)}", after
    elif commit.appended < len(commit.groups):
        log = (*state.log, commit.groups[commit.appended])
        yield "a group is written", state._replace(log=log, commit=commit._replace(appended=commit.appended + 1))
    elif state.late is None:
        yield "the commit is durable", state._replace(commit=None, durable=len(state.log), late=commit)


def _take_effect(state: State, commit: Commit) -> State:
    ended = frozenset(ended_in(commit.groups))
    rows = rows_of(commit.groups)
    return state._replace(
        told=state.told | frozenset(commit.told),
        claimed=state.claimed - ended,
        loaded=(state.loaded | rows) - ended,
        owed=state.owed | ended,
        entries=(*state.entries, *takers(commit.groups)),
    )


def _refuse(state: State, commit: Commit, removed: Removed) -> State:
    claimed = state.claimed if "undo" in removed else state.claimed - commit.claimed
    refused = frozenset(Told(told.ask, Answer.REFUSED) for told in commit.told)
    return state._replace(commit=None, claimed=claimed, told=state.told | refused)


def _handoff(state: State, removed: Removed) -> Iterator[Step]:
    # Nothing is sent to a target before it has answered its window (rule H4).
    for row in sorted(state.loaded - state.claimed) if not state.doubt else ():
        after = state._replace(loaded=state.loaded - {row}, sent=state.sent | {row}, wire=(*state.wire, row))
        yield f"row {row} is sent", after
    if state.wire:
        row = state.wire[0]
        yield f"the target takes row {row}", state._replace(wire=state.wire[1:], target=(*state.target, row))
    for row in sorted(state.sent & frozenset(state.target)):
        outcome = Outcome(row, True, WRITTEN)
        after = state._replace(sent=state.sent - {row}, outcomes=state.outcomes | {outcome})
        yield f"row {row} is acknowledged", after
    if state.doubt:
        # A greeting ends the old session: what is still under way of it is dropped, and the window is answered.
        there = state.doubt & frozenset(state.target)
        new = {Outcome(row, True, WRITTEN) for row in there if outcome_of(state, row) is None}
        after = state._replace(
            doubt=NONE,
            wire=(),
            loaded=state.loaded - there,
            outcomes=state.outcomes | new,
            claimed=state.claimed - there,
        )
        yield "the target answers its window", after


def _outcomes(state: State) -> Iterator[Step]:
    for row in sorted(state.owed):
        if not any(outcome.row == row and not outcome.dispatched for outcome in state.outcomes):
            after = state._replace(outcomes=state.outcomes | {Outcome(row, False, WRITTEN)})
            yield f"the outcome CANCELLED of row {row} is written", after
    if any(outcome.level == WRITTEN for outcome in state.outcomes):
        durable = frozenset(outcome._replace(level=DURABLE) for outcome in state.outcomes)
        ended = frozenset(outcome.row for outcome in durable if not outcome.dispatched)
        yield "outcomes are durable", state._replace(outcomes=durable, owed=state.owed - ended)


def _begin_checkpoint(state: State, removed: Removed) -> Step:
    # Rows that are durable and not in effect yet are not below the offset.
    groups = state.durable - (len(state.late.groups) if state.late is not None else 0)
    ended = NONE if "checkpoint_ended" in removed else state.owed
    writing = Checkpoint(groups, ended, (*state.runs, state.entries) if state.entries else state.runs)
    return "a checkpoint begins", state._replace(writing=writing, frozen=state.entries, entries=())


def _end_checkpoint(state: State, writing: Checkpoint, removed: Removed) -> Step:
    runs = (*state.runs, state.frozen) if state.frozen else state.runs
    # Runs may have been merged meanwhile: the state names the files as they were, which are there still.
    entries = () if "frozen_alone" in removed else state.entries
    after = state._replace(writing=None, frozen=(), runs=runs, counted=writing, entries=entries)
    return "the checkpoint is counted", after


def _crash(state: State, removed: Removed) -> Iterator[Step]:
    """Memory is gone; of what was not synced, any prefix of the log and any outcomes may be there."""
    unsynced = sorted(outcome for outcome in state.outcomes if outcome.level == WRITTEN)
    for kept in range(state.durable, len(state.log) + 1):
        for chosen in range(1 << len(unsynced)):
            lost = {outcome for place, outcome in enumerate(unsynced) if not chosen >> place & 1}
            found = frozenset(outcome._replace(level=DURABLE) for outcome in state.outcomes - lost)
            told = f"the server dies and starts again, {kept - state.durable} more groups, {len(lost)} outcomes lost"
            yield told, _start(state, state.log[:kept], found, removed)


def _start(state: State, groups: tuple[Group, ...], outcomes: frozenset[Outcome], removed: Removed) -> State:
    above = groups[state.counted.groups :]
    decided = ended_in(above)
    if "replay" in removed:
        decided = _decided_again(groups, state.counted.groups, outcomes)
    with_outcome = frozenset(outcome.row for outcome in outcomes)
    ended = state.counted.ended | frozenset(decided)
    pending = rows_of(groups) - with_outcome - ended
    refused = frozenset(row for row, each in decided.items() if each.reason in (Reason.REJECTED, Reason.IN_FLIGHT))
    entries = tuple(row for row in sorted(rows_of(above)) if row not in refused or "refused_rows" in removed)
    return state._replace(
        queue=(),
        log=groups,
        durable=len(groups),
        commit=None,
        late=None,
        claimed=NONE,
        loaded=pending,
        sent=NONE,
        doubt=NONE if "H4" in removed else pending,
        outcomes=outcomes,
        owed=ended - with_outcome,
        entries=() if "replay_entries" in removed else entries,
        runs=state.counted.runs,
        writing=None,
        frozen=(),
    )


def _decided_again(groups: tuple[Group, ...], start: int, outcomes: frozenset[Outcome]) -> dict[int, Ended]:
    """What a replay would decide by itself: that a row is rejected while an earlier one has no outcome."""
    logged = ended_in(groups[start:])
    decided = {row: each for row, each in logged.items() if each.reason in (Reason.CANCELLED, Reason.MOVED)}
    with_outcome = {outcome.row for outcome in outcomes}
    for row in sorted(rows_of(groups[start:])):
        open_rows = [other for other in range(1, row) if other not in with_outcome and other not in decided]
        if open_rows:
            decided[row] = Ended(row, Reason.REJECTED, open_rows[-1])
    return decided


def _text(commit: Commit) -> str:
    return "; ".join(f"{told.ask.value}: {told.answer.value} {told.row or ''}".strip() for told in commit.told)
