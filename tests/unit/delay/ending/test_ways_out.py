"""Each request about messages is answered, by name if something is wrong, and then it holds nothing any more."""

from __future__ import annotations

from collections.abc import Callable
from errno import EMFILE

import numpy as np
import pytest

from delayd.delay.ending import copies
from delayd.delay.ending.requested import RequestWish
from delayd.errors import DamagedData, DelaydError, Shortage, SlowDown
from delayd.machine.executor import Done
from delayd.testing.clock import START_MS
from delayd.wire.asked import AnswerRows, AskedWindow, RescheduleAnswer
from tests.unit.delay.ending.keyed import names
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
HELD = ("asked_rows", "asked_copies", "key_look_ups", "find_pieces", "queued_bytes")
Told = list[AnswerRows | DelaydError]


def holds_nothing(world: World) -> bool:
    counters = world.core.standing.counters()
    return all(counters[name] == 0 for name in HELD)


def moved_world(*, remembered: bool) -> World:
    """A world in which row 1 was moved from 5 to 6 o'clock, and is row 2 now."""
    world = World()
    world.send(wanted(1, 5 * HOUR_MS, "row"))
    world.settle()
    world.reschedule(world.receipts("row"), START_MS + 6 * HOUR_MS)
    world.settle()
    if not remembered:
        world = world.after_crash(None)
        world.settle()
    return world


def asks(world: World) -> dict[str, Callable[[Told], None]]:
    """One request of each kind."""
    endings, row, later = world.core.asked.endings, world.receipts("row"), np.array([START_MS + 7 * HOUR_MS])
    key = names([b"k"])
    return {
        "get": lambda told: endings.get(row, told.append),
        "cancel": lambda told: endings.cancel(row, told.append),
        "reschedule": lambda told: endings.reschedule(row, later, told.append),
        "get by key": lambda told: endings.ask_by_key(RequestWish.GET, key, told.append),
        "cancel by key": lambda told: endings.ask_by_key(RequestWish.CANCEL, key, told.append),
        "reschedule by key": lambda told: endings.ask_by_key(RequestWish.MOVE, key, told.append, later),
        "find": lambda told: endings.find(AskedWindow(b"orders.eu", 0, 1 << 60), told.append),
    }


@pytest.mark.parametrize("error", [Shortage("a", EMFILE), DamagedData("a", 0, "rotten")], ids=repr)
@pytest.mark.parametrize("kind", list(asks(moved_world(remembered=True))))
def test_whatever_fails_beside_the_loop_is_told_by_name_and_the_next_request_is_served(
    kind: str, error: DelaydError
) -> None:
    world = World()
    world.send(wanted(1, 5 * HOUR_MS, "row"), [b"k"])
    world.settle()
    world.checkpoint()
    fails = True
    worker = world.threads.worker
    submit = worker.submit

    def failing(work: Callable[[], object], done: Callable[[Done[object]], None], *priority: object) -> None:
        submit((lambda: (_ for _ in ()).throw(error)) if fails else work, done, *priority)  # type: ignore[arg-type]

    worker.submit = failing  # type: ignore[assignment, method-assign]
    told = Told()
    asks(world)[kind](told)
    world.settle()
    assert [type(each) for each in told] == [SlowDown], told
    assert holds_nothing(world)
    fails = False
    world.pass_ms(60_000)
    asks(world)[kind](told)
    world.settle()
    assert not isinstance(told[-1], DelaydError), told
    assert holds_nothing(world)


def test_a_server_that_stops_amid_a_move_says_which_rows_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "COPY_ROWS", 1)  # Each row in a commit of its own.
    partly = steps = 0
    while True:
        world = World()
        world.send(wanted(2, 5 * HOUR_MS, "row"))
        world.settle()
        asked = world.receipts("row")
        told = world.reschedule(asked, START_MS + 6 * HOUR_MS)
        for _ in range(steps):
            move = world.next_move()
            if move is not None:
                move()
        is_done = bool(told)
        world.stop()
        moved = [False, False]
        if told:
            moved = (told[0]["answer"] == RescheduleAnswer.MOVED).tolist()
        after: Told = []
        world = world.after_crash(None)
        world.core.asked.endings.get(asked, after.append)
        world.settle()
        (rows,) = after
        assert not isinstance(rows, DelaydError)
        assert (rows["deliver_at_ms"] == START_MS + 6 * HOUR_MS).tolist() == moved, f"after {steps} steps"
        partly += moved.count(True) == 1
        steps += 1
        if is_done:
            break
    assert partly
