"""What a realtime server does: fence, group commit, window (realtime/{core,handoff,commit,intake}.py)."""

from collections.abc import Iterator

from tests.model.state import (
    Batch,
    Item,
    Line,
    Removed,
    Reply,
    State,
    Target,
    hang_up,
    hears,
    tell,
    with_target,
)

Step = tuple[tuple[object, ...], State]


def realtime_steps(state: State, number: int, removed: Removed) -> Iterator[Step]:
    """All that one T may do next: take a request of any connection, or finish what the disk has."""
    target = state.targets[number]
    lines = set()
    for at, item in enumerate(target.wires):
        if item.line in lines:
            continue
        lines.add(item.line)
        rest = with_target(state, number, target._replace(wires=target.wires[:at] + target.wires[at + 1 :]))
        if item.batches:
            yield from _dispatch(rest, number, item, removed)
        else:
            yield _greet(rest, number, item, removed)
    if target.under_way:
        yield _commit(state, number, removed)


def restarts(target: Target, removed: Removed) -> Iterator[tuple[int, Target]]:
    """T after a crash: any prefix of what was appended and not fsynced is found, the hellos first."""
    durable = len(target.log) - target.unsynced
    found = [Target(target.log[:kept], target.w, recorded=target.recorded) for kept in range(durable, len(target.log))]
    after = Target(target.log, target.w, recorded=target.recorded)
    found.append(after)
    for item in sorted(target.under_way, key=lambda appended: bool(appended.batches)):
        if not item.batches:
            recorded = max(after.recorded, (item.line.epoch, item.line.session))
            after = after._replace(w=max(after.w, item.w), recorded=recorded)
            found.append(after)
        for batch in item.batches:
            after = after._replace(w=max(after.w, item.w), log=(*after.log, batch))
            found.append(after)
    for after in found:
        if "H2_rescan" in removed and after.log:
            after = after._replace(w=max(after.w, max(batch.key for batch in after.log)))
        unsynced = len(after.log) - durable if "L1_target" in removed else 0
        yield len(after.log), after._replace(heard=after.recorded, unsynced=unsynced)


def _greet(state: State, number: int, hello: Item, removed: Removed) -> Step:
    told = (f"T{number} hears", _hello(hello))
    line, target = hello.line, state.targets[number]
    if line.link != number and "H7_named" not in removed:
        return (*told, "and refuses it: it is for another server"), hang_up(state, line, removed)
    heard = (line.epoch, line.session)
    if heard <= target.heard:
        return (*told, "and refuses it: not newer"), hang_up(state, line, removed)
    if "H3_drop" not in removed:
        target = target._replace(queue=())
    older = target.current
    at_once = "H3_record" in removed or ("H3_sync" in removed and not target.under_way)
    target = target._replace(heard=heard, current=line)
    if "H3_sync" in removed and at_once:
        target = target._replace(w=max(target.w, hello.w))
    else:
        target = _put(target, hello)
    state = _close(with_target(state, number, target), number, older, removed)
    if at_once:
        state = tell(state, line, Reply("window", _window(target._replace(w=max(target.w, hello.w)))))
    return told, state


def _hello(hello: Item) -> str:
    return f"hello: epoch {hello.line.epoch}, session {hello.line.session}, W {hello.w}"


def _dispatch(state: State, number: int, frame: Item, removed: Removed) -> Iterator[Step]:
    target = state.targets[number]
    names = ", ".join(f"{batch.epoch}.{batch.id}" for batch in frame.batches)
    current = frame.line == target.current
    if not current and "H3_fence" not in removed:
        yield (f"T{number} fences off", names), _close(state, number, frame.line, removed)
        return
    known = {batch.key for item in (*target.under_way, *target.queue) for batch in item.batches}
    known.update(batch.key for batch in target.log)
    if any(batch.key in known or batch.key <= target.w for batch in frame.batches):
        yield (f"T{number} meets", names), state._replace(wrong=f"T refuses {names}, a number that was sent before")
        return
    taken = with_target(state, number, _put(target, frame))
    if "L2_answer" in removed:
        taken = tell(taken, frame.line, Reply("taken", frame.batches))
    yield (f"T{number} takes", names), taken
    if state.budget.refusals and hears(state, frame.line):
        budget = state.budget._replace(refusals=state.budget.refusals - 1)
        refused = tell(state._replace(budget=budget), frame.line, Reply("refused", frame.batches))
        yield (f"T{number} refuses by name", names), refused
        if "H6_never" in removed:
            yield (f"T{number} appends and refuses", names), with_target(refused, number, _put(target, frame))
        if "H6_whole" in removed and len(frame.batches) > 1:
            part = frame._replace(batches=frame.batches[:1])
            yield (f"T{number} takes the first of", names), with_target(refused, number, _put(target, part))


def _put(target: Target, item: Item) -> Target:
    """Queue for the disk, which begins at once if it has nothing to do."""
    if target.under_way:
        return target._replace(queue=(*target.queue, item))
    return target._replace(under_way=(item,))


def _close(state: State, number: int, line: Line | None, removed: Removed) -> State:
    """T closes a connection and reads no more of it."""
    target = state.targets[number]
    wires = tuple(item for item in target.wires if item.line != line)
    return hang_up(with_target(state, number, target._replace(wires=wires)), line, removed)


def _window(target: Target) -> tuple[Batch, ...]:
    return tuple(batch for batch in target.log if batch.key > target.w)


def _commit(state: State, number: int, removed: Removed) -> Step:
    """The group under way is durable: T answers its hellos first, as they stand first in it, then its frames."""
    target = state.targets[number]
    under_way, target = target.under_way, target._replace(under_way=target.queue, queue=(), unsynced=0)
    replies: list[tuple[Line, Reply]] = []
    for item in under_way:
        if not item.batches:
            recorded = max(target.recorded, (item.line.epoch, item.line.session))
            target = target._replace(w=max(target.w, item.w), recorded=recorded)
            if item.line == target.current and "H3_record" not in removed:
                replies.append((item.line, Reply("window", _window(target))))
    for item in under_way:
        if item.batches:
            target = target._replace(w=max(target.w, item.w), log=target.log + item.batches)
            if "H2_until_w" in removed:
                target = target._replace(w=max(target.w, item.batches[-1].key))
            if "L2_answer" not in removed:
                replies.append((item.line, Reply("taken", item.batches)))
    state = with_target(state, number, target)
    for line, reply in replies:
        state = tell(state, line, reply)
    return (f"T{number} fsyncs its log",), state
