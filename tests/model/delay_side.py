"""What the delay server does: routes, links, sending, and outcomes (delayd/delay/{dispatcher,link,sender,outcomes}.py).

Every function yields steps: what happened, in words to be joined, and the state behind it.
"""

from collections.abc import Iterator
from itertools import combinations

from tests.model.state import (
    ASKED,
    CLOSED,
    DURABLE,
    FLUSHING,
    MEMORY,
    READY,
    RECORDING,
    WRITTEN,
    Batch,
    Item,
    Line,
    Link,
    Note,
    Outcome,
    Removed,
    Reply,
    State,
    W,
    hang_up,
    with_link,
    with_target,
)

Step = tuple[tuple[object, ...], State]


def delay_steps(state: State, subjects: tuple[int, ...], removed: Removed) -> Iterator[Step]:
    """All that D may do next."""
    yield from _route(state)
    yield from _flush(state)
    for number, link in enumerate(state.links):
        if link.phase == CLOSED:
            if any(_lacks(state, row) for row in _routed(state, number, subjects, removed)):
                yield connect(state, number, number, removed)
        elif link.replies:
            yield _hear(state, number, link, removed)
        if link.phase == READY:
            yield from _send(state, number, link, subjects, removed)


def connect(state: State, number: int, at: int, removed: Removed) -> Step:
    """Open a session with whoever listens at a target's address: ``at``."""
    link = state.links[number]
    link = link._replace(phase=ASKED, session=link.session + 1, at=at)
    if "H4_ask" in removed:
        link = link._replace(phase=READY, settled=True)
    if "H1_epochs" in removed:
        link = link._replace(settled=True)
    hello = Item(Line(state.epoch, number, link.session), _watermark(state, link, removed), ())
    told: tuple[object, ...] = ("D connects to", f"T{at}", "as session", link.session, "of epoch", state.epoch)
    if at != number:
        told += ("and takes it for", f"T{number}")
    return (*told, "; W", hello.w), _post(with_link(state, number, link), at, hello)


def flush_some(state: State) -> Iterator[Step]:
    """The disk is full for some of the hours in a flush: their outcomes wait again, and who waits for them does."""
    written = [row for row, outcome in enumerate(state.outcomes) if outcome is not None and outcome.level == WRITTEN]
    for count in range(1, len(written) + 1):
        for full in combinations(written, count):
            outcomes = tuple(
                outcome._replace(level=MEMORY) if outcome is not None and row in full else outcome
                for row, outcome in enumerate(state.outcomes)
            )
            outcomes = _raised(outcomes, WRITTEN, DURABLE)
            links = (link._replace(phase=RECORDING) if link.phase == FLUSHING else link for link in state.links)
            after = state._replace(outcomes=outcomes, links=tuple(_after_flush(link, outcomes) for link in links))
            yield ("the disk is full for the outcomes of rows", list(full)), after


def _route(state: State) -> Iterator[Step]:
    """Meta names a target for a subject that has none; the note becomes durable."""
    for subject, note in enumerate(state.notes):
        if note is None:
            for target in range(len(state.targets)):
                yield ("meta names", f"T{target}", "; D appends the note to M"), _noted(state, subject, WRITTEN, target)
        elif note.level == WRITTEN:
            yield ("D fsyncs the note",), _noted(state, subject, DURABLE, note.target)


def _noted(state: State, subject: int, level: int, target: int) -> State:
    return state._replace(notes=(*state.notes[:subject], Note(level, target), *state.notes[subject + 1 :]))


def _flush(state: State) -> Iterator[Step]:
    """One flush of D_h at a time: what waits is written, then it is durable and everybody is told."""
    levels = {outcome.level for outcome in state.outcomes if outcome is not None}
    if WRITTEN in levels:
        outcomes = _raised(state.outcomes, WRITTEN, DURABLE)
        links = tuple(_after_flush(link, outcomes) for link in state.links)
        yield ("D fsyncs D_h",), state._replace(outcomes=outcomes, links=links)
    elif MEMORY in levels:
        outcomes = _raised(state.outcomes, MEMORY, WRITTEN)
        links = tuple(link._replace(phase=FLUSHING) if link.phase == RECORDING else link for link in state.links)
        yield ("D writes outcomes to D_h",), state._replace(outcomes=outcomes, links=links)


def _raised(outcomes: tuple[Outcome | None, ...], level: int, to: int) -> tuple[Outcome | None, ...]:
    return tuple(
        outcome._replace(level=to) if outcome is not None and outcome.level == level else outcome
        for outcome in outcomes
    )


def _after_flush(link: Link, outcomes: tuple[Outcome | None, ...]) -> Link:
    undecided = tuple(pair for pair in link.sent if (found := outcomes[pair[1]]) is None or found.level < DURABLE)
    link = link._replace(sent=undecided)
    return link._replace(phase=READY, settled=True) if link.phase == FLUSHING else link


def _watermark(state: State, link: Link, removed: Removed) -> W:
    if not link.settled:
        return (0, 0)
    undecided = [batch_id for batch_id, row in link.sent if "H1_durable" not in removed or state.outcomes[row] is None]
    if "H1_prefix" in removed:
        decided = [batch_id for batch_id in range(1, link.last_id + 1) if batch_id not in undecided]
        return (state.epoch, max(decided, default=0))
    return (state.epoch, min(undecided, default=link.last_id + 1) - 1)


def _routed(state: State, number: int, subjects: tuple[int, ...], removed: Removed) -> list[int]:
    """Rows whose subject goes to this target."""
    level = WRITTEN if "H5_noted" in removed else DURABLE
    return [
        row
        for row, subject in enumerate(subjects)
        if (note := state.notes[subject]) is not None and note.level >= level and note.target == number
    ]


def _lacks(state: State, row: int) -> bool:
    """Whether a row has no durable outcome."""
    outcome = state.outcomes[row]
    return outcome is None or outcome.level < DURABLE


def _send(state: State, number: int, link: Link, subjects: tuple[int, ...], removed: Removed) -> Iterator[Step]:
    """A frame with the first of the waiting rows, or with all of them."""
    taken = {row for _, row in link.sent}
    waiting = [
        row for row in _routed(state, number, subjects, removed) if state.outcomes[row] is None and row not in taken
    ]
    for count in {1, len(waiting)} if waiting else ():
        pairs = tuple((link.last_id + 1 + at, row) for at, row in enumerate(waiting[:count]))
        batches = tuple(Batch(state.epoch, batch_id, row) for batch_id, row in pairs)
        frame = Item(Line(state.epoch, number, link.session), _watermark(state, link, removed), batches)
        sent = link._replace(last_id=link.last_id + count, sent=link.sent + pairs)
        told = ("D sends", _names(batches), "with W", frame.w)
        yield told, _post(with_link(state, number, sent), link.at, frame)


def _hear(state: State, number: int, link: Link, removed: Removed) -> Step:
    reply = link.replies[0]
    if reply.kind == "window" and link.at != number:
        # The answer carries another log_id than that of the target: alarm (rule H7).
        return (f"D finds T{link.at} where T{number} was",), hang_up(
            state, Line(state.epoch, number, link.session), removed
        )
    link = link._replace(replies=link.replies[1:])
    if reply.kind == "refused":
        numbers = {batch.id for batch in reply.batches}
        link = link._replace(sent=tuple(pair for pair in link.sent if pair[0] not in numbers))
        return (f"D hears from T{number}: refused", _names(reply.batches)), with_link(state, number, link)
    if reply.kind == "taken":
        state = _record(with_link(state, number, link), number, link, reply, removed)
        return (f"D hears from T{number}: taken", _names(reply.batches)), state
    told = (f"D hears from T{number}: the window", _names(reply.batches))
    state = _record(state, number, link, reply, removed)
    if "H4_take_back" not in removed:
        link = link._replace(sent=tuple(pair for pair in link.sent if state.outcomes[pair[1]] is not None))
    return told, with_link(state, number, _begun(state, link, removed))


def _begun(state: State, link: Link, removed: Removed) -> Link:
    """An answered link waits until everything that it recorded is durable."""
    levels = {outcome.level for outcome in state.outcomes if outcome is not None}
    if "H4_durable" in removed or "H4_ask" in removed or not levels & {MEMORY, WRITTEN}:
        return link._replace(phase=READY, settled=True)
    return link._replace(phase=RECORDING if MEMORY in levels else FLUSHING)


def _record(state: State, number: int, link: Link, reply: Reply, removed: Removed) -> State:
    """DISPATCHED for rows that T holds, if they have no outcome.

    The set of batches that the code of a link keeps until it is settled saves looking their rows up: here they are.
    """
    sent = dict(link.sent)
    outcomes = list(state.outcomes)
    wrong = state.wrong
    for batch in reply.batches:
        ours = batch.epoch == state.epoch
        if (ours and sent.get(batch.id) != batch.sequence) or (not ours and link.settled and "H4_known" not in removed):
            continue
        if outcomes[batch.sequence] is None:
            outcomes[batch.sequence] = Outcome(MEMORY, link.at, batch.key)
        elif "H4_known" in removed and not ours:
            wrong = f"row {batch.sequence} has two outcomes"
    return state._replace(outcomes=tuple(outcomes), wrong=wrong)


def _post(state: State, server: int, item: Item) -> State:
    target = state.targets[server]
    wires = tuple(sorted((*target.wires, item), key=lambda posted: posted.line))
    return with_target(state, server, target._replace(wires=wires))


def _names(batches: tuple[Batch, ...]) -> str:
    return ", ".join(f"row {batch.sequence} as batch {batch.epoch}.{batch.id}" for batch in batches) or "nothing"
