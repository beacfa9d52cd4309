"""What must hold in every state, and what must be done when only faults could still happen."""

from tests.model.state import DURABLE, MEMORY, Removed, State


def breach(state: State, final: bool, removed: Removed) -> str:
    """Name what is wrong; empty if nothing is.

    With all rules in force, *kept* means durable. Without one, only damage counts: what a crash has taken back.
    """
    if state.wrong:
        return state.wrong
    entries = [
        (batch.sequence, number, batch.key)
        for number, target in enumerate(state.targets)
        for batch in target.log[: len(target.log) if removed else len(target.log) - target.unsynced]
    ]
    under_way = [
        (batch.sequence, number, batch.key)
        for number, target in enumerate(state.targets)
        for item in target.under_way
        for batch in item.batches
    ]
    both = [row for row, _, _ in entries + under_way]
    for row, outcome in enumerate(state.outcomes):
        if both.count(row) > 1:
            return f"row {row} is twice in the realtime logs"
        if outcome is not None and outcome.level > MEMORY:
            kept = entries + under_way if removed else entries
            if (row, outcome.target, outcome.key) not in kept:
                return f"row {row} is DISPATCHED in D_h, and the realtime log that it names does not have it"
        if final:
            if outcome is None or outcome.level < DURABLE:
                return f"row {row} has no outcome, and nothing more happens"
            if row not in [found for found, _, _ in entries]:
                return f"row {row} is in no realtime log, and nothing more happens"
    return ""
