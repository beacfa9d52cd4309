"""A large request is done in pieces, each in a turn of the loop of its own; its caller sees one answer."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.columns import Int64s
from delayd.batch.sequences import Locations
from delayd.delay.ending import requested
from delayd.delay.ending.requested import RequestWish
from delayd.delay.ledger.ledger import Ledger, RowPlaces
from delayd.delay.ledger.wanted import Wanted
from delayd.errors import DelaydError
from delayd.outcome import MessageState
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES
from delayd.wire.asked import AnswerRows, Asked, CancelAnswer, RescheduleAnswer
from tests.unit.delay.ending.keyed import names
from tests.worlds.delay import World

HOUR_MS = 3_600_000
ROWS, HOURS = 60, 20
Told = list[AnswerRows | DelaydError]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each look for rows was about, with pieces of a few rows."""
    monkeypatch.setattr(requested, "PIECE_ROWS", 64)
    monkeypatch.setattr(requested, "HOUR_ROWS", 8)
    found: list[int] = []
    look = Ledger.places

    def counting(self: Ledger, asked: Wanted, locations: Locations | None = None) -> RowPlaces:
        found.append(len(asked))
        return look(self, asked, locations)

    monkeypatch.setattr(Ledger, "places", counting)
    return found


def filled() -> tuple[World, Asked]:
    world = World(load_ahead_ms=1_000)
    rows = [(START_MS + (5 + row % HOURS) * HOUR_MS, b"orders.eu", b"m-%d" % row) for row in range(ROWS)]
    world.send(rows, [b"k%d" % row for row in range(ROWS)])
    world.settle()
    return world, world.receipts("m")


def ask(world: World, wish: RequestWish, asked: Asked, moved_at_ms: Int64s, told: Told, *, by_key: bool) -> None:
    endings = world.core.asked.endings
    if by_key:
        instants = moved_at_ms.tolist() if wish is RequestWish.MOVE else None
        keys = names([b"k%d" % (sequence - 1) for sequence in asked.sequences.tolist()], instants)
        endings.ask_by_key(wish, keys, told.append, moved_at_ms if wish is RequestWish.MOVE else None)
    elif wish is RequestWish.MOVE:
        endings.reschedule(asked, moved_at_ms, told.append)
    else:
        (endings.get if wish is RequestWish.GET else endings.cancel)(asked, told.append)


@pytest.mark.parametrize("filed", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("wish", list(RequestWish))
def test_rule_B2_a_request_of_many_rows_and_hours_is_answered_in_the_order_of_its_rows(
    wish: RequestWish, by_key: bool, filed: bool, looked: list[int]
) -> None:
    world, asked = filled()
    if filed:
        world.checkpoint()
    order = np.random.default_rng(3).permutation(ROWS)
    asked = Asked._make(column.take(order) for column in asked)
    moved_at_ms = START_MS + 50 * HOUR_MS + order.astype(np.int64)
    told = Told()
    looked.clear()
    ask(world, wish, asked, moved_at_ms, told, by_key=by_key)
    world.settle()
    (rows,) = told
    assert not isinstance(rows, DelaydError), rows
    assert len(looked) >= 4 and max(looked) <= 20, "each turn is about a piece"
    if wish is RequestWish.MOVE:
        assert set(rows["answer"].tolist()) == {RescheduleAnswer.MOVED}
        assert rows["deliver_at_ms"].tolist() == moved_at_ms.tolist()
    else:
        state = MessageState.PENDING if wish is RequestWish.GET else MessageState.CANCELLED
        assert set(rows["state"].tolist()) == {state}
        assert rows["sequence"].tolist() == asked.sequences.tolist()
    assert world.core.standing.counters()["asked_rows"] == 0


@pytest.mark.parametrize("wish", [RequestWish.CANCEL, RequestWish.MOVE])
def test_a_disk_that_is_full_in_the_middle_leaves_the_other_rows_to_be_asked_for_again(
    wish: RequestWish, looked: list[int]
) -> None:
    world, asked = filled()
    moved_at_ms = np.full(ROWS, START_MS + 50 * HOUR_MS, np.int64)
    told = Told()
    ask(world, wish, asked, moved_at_ms, told, by_key=False)
    while not world.core.standing.counters()["owed_rows"]:
        move = world.next_move()
        assert move is not None
        move()
    world.disk.capacity_bytes = world.disk.used_bytes
    world.settle()
    world.disk.capacity_bytes = CAPACITY_BYTES
    (rows,) = told
    assert not isinstance(rows, DelaydError), "what was done can't be refused any more"
    done = {CancelAnswer.CANCELLED} if wish is RequestWish.CANCEL else {RescheduleAnswer.MOVED}
    again = CancelAnswer.IN_FLIGHT if wish is RequestWish.CANCEL else RescheduleAnswer.IN_FLIGHT
    assert set(rows["answer"].tolist()) == done | {again}
    world.pass_ms(60_000)
    told.clear()
    ask(world, wish, asked, moved_at_ms, told, by_key=False)
    world.settle()
    (rows,) = told
    assert not isinstance(rows, DelaydError), rows
    assert set(rows["answer"].tolist()) == done
