"""What must hold in each state, and at the end."""

from tests.decisions.state import (
    DURABLE,
    Answer,
    Ask,
    Reason,
    State,
    ended_in,
    outcome_of,
    rows_of,
)


def breach(state: State, final: bool) -> str:
    """What is wrong, or "" for nothing."""
    groups = state.log[: state.durable]
    rows, ended = rows_of(groups), ended_in(groups)
    if len(set(state.target)) < len(state.target):
        return "the target has a row twice"
    for told in state.told:
        if told.answer in (Answer.CANCELLED, Answer.MOVED) and told.row in state.target:
            return f"row {told.row} was answered as {told.answer.value}, and the target has it"
        if told.answer is Answer.ACCEPTED and told.row not in rows:
            return f"row {told.row} was accepted, and the log does not have it"
        if told.answer is Answer.MOVED and told.other not in rows:
            return f"row {told.row} was moved, and the log does not have row {told.other}"
        if told.answer is Answer.ALREADY_DISPATCHED and told.row not in state.target:
            return f"row {told.row} was called dispatched, and the target does not have it"
    for outcome in state.outcomes:
        if outcome.dispatched and outcome.row not in state.target:
            return f"row {outcome.row} is DISPATCHED, and the target does not have it"
        if not outcome.dispatched and outcome.row in state.target:
            return f"row {outcome.row} is CANCELLED, and the target has it"
        if not outcome.dispatched and outcome.row not in ended:
            return f"row {outcome.row} is CANCELLED, and no decision in the log says so"
    for each in ended.values():
        if each.reason in (Reason.MOVED, Reason.REPLACED) and each.other not in rows:
            return f"row {each.row} is {each.reason.value}, and no row took its place"
    live = sorted(rows - ended.keys() - set(state.target))
    if len(live) > 1:
        return f"the rows {live} of one key are pending"
    return _at_the_end(state) if final else _untrue(state, live)


def _untrue(state: State, live: list[int]) -> str:
    """Answers that are about to be given, and are not true now."""
    if state.commit is None:
        return ""
    for told in state.commit.told:
        if told.answer is Answer.UNKNOWN and live and not state.commit.appended:
            return f"a caller is told that the key is unknown, and row {live[0]} is pending"
    return ""


def _at_the_end(state: State) -> str:
    ended = ended_in(state.log)
    for row in sorted(rows_of(state.log)):
        outcome = outcome_of(state, row)
        if outcome is None or outcome.level != DURABLE:
            return f"row {row} never gets an outcome"
        if outcome.dispatched == (row in ended):
            return f"row {row} has another outcome than the log says"
    lost = {told.row for told in state.told if told.ask in (Ask.SEND, Ask.REPLACE) and told.answer is Answer.ACCEPTED}
    missing = sorted(lost - ended.keys() - set(state.target))
    return f"the rows {missing} were accepted, and never arrived" if missing else ""
