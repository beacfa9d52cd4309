"""Tries: a change that is asked for again under its number is done once, and is answered as the first time (rule I1,
docs/keys.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from delayd.delay.ending.requested import RequestWish
from delayd.errors import SlowDown
from delayd.outcome import MessageState
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import (
    AnswerRows,
    Asked,
    AskedKeys,
    CancelAnswer,
    MoveTry,
    RescheduleAnswer,
    Tries,
    encode_asked_keys,
    read_asked_keys,
)
from tests.unit.delay.ending.keyed import REJECT, SUBJECT, sent
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
ASKER = 7
TEN, NOON, ONE = (START_MS + hours * HOUR_MS for hours in (10, 12, 13))
SAME = ("answer", "state", "sequence", "deliver_at_ms", "accepted_at_ms")


def ask_by_key(
    world: World, wish: RequestWish, keys: list[bytes], numbers: list[int], wanted_at_ms: int | None = None
) -> AnswerRows:
    """Ask for a change by keys, under numbers; the answers."""
    batch = read_asked_keys(encode_asked_keys(AskedKeys(SUBJECT, keys)))
    assert batch is not None
    instants = None if wanted_at_ms is None else np.full(len(keys), wanted_at_ms, np.int64)
    told: list[AnswerRows] = []
    tries = Tries(ASKER, min(numbers), np.array(numbers, np.uint64))
    world.core.asked.endings.ask_by_key(wish, batch, told.append, instants, tries)  # type: ignore[arg-type]
    world.settle()
    (rows,) = told
    return rows


def lives(world: World) -> list[World]:
    """The same life, one after a power loss, and one after a checkpoint and a power loss."""
    after = world.after_crash(PowerLoss.ALL_LOST)
    other = world.after_crash(PowerLoss.ALL_LOST)
    other.settle()
    other.checkpoint()
    return [world, after, other.after_crash(PowerLoss.ALL_LOST)]


def test_rule_I1_a_cancel_by_key_that_is_asked_again_ends_no_other_message() -> None:
    world = World()
    sent(world, wanted(2, 5 * HOUR_MS, "first"), [b"k", b"l"], REJECT)
    told = ask_by_key(world, RequestWish.CANCEL, [b"k", b"l"], [1, 2])
    assert told["answer"].tolist() == [CancelAnswer.CANCELLED] * 2
    assert sent(world, wanted(1, 6 * HOUR_MS, "second"), [b"k"], REJECT) == [(0, 0)]
    for life in lives(world):
        life.settle()
        again = ask_by_key(life, RequestWish.CANCEL, [b"k", b"l"], [1, 2])
        assert again["answer"].tolist() == [CancelAnswer.CANCELLED] * 2
        assert again["sequence"].tolist() == told["sequence"].tolist()
        assert again["decided_at_ms"].tolist() == told["decided_at_ms"].tolist()
        assert life.states(life.receipts("second")) == [MessageState.PENDING]
        other = ask_by_key(life, RequestWish.CANCEL, [b"k"], [3])
        assert other["answer"].tolist() == [CancelAnswer.CANCELLED], "another number is another try"
        assert life.states(life.receipts("second")) == [MessageState.CANCELLED]


def begin_move(world: World, asked: Asked, to_ms: int | Sequence[int], number: int = 0) -> list[AnswerRows]:
    """Ask for a move by receipts, under a number if it has one; the list holds the answer once it is there."""
    told: list[AnswerRows] = []
    instants = np.array(np.broadcast_to(np.array(to_ms, np.int64), len(asked.sequences)))
    moved_by = MoveTry(ASKER, number, number) if number else None
    world.core.asked.endings.reschedule(asked, instants, told.append, moved_by=moved_by)  # type: ignore[arg-type]
    return told


def move(world: World, asked: Asked, to_ms: int | Sequence[int], number: int = 0) -> AnswerRows:
    """The same, and let everything happen that takes no time; the answers."""
    told = begin_move(world, asked, to_ms, number)
    world.settle()
    (rows,) = told
    return rows


def same(told: AnswerRows, again: AnswerRows) -> bool:
    """Whether two answers say the same."""
    return all(told[name].tolist() == again[name].tolist() for name in SAME)


def due_of(world: World, asked: Asked) -> list[int]:
    """When messages are due that are pending."""
    told: list[AnswerRows] = []
    world.core.asked.endings.get(asked, told.append)  # type: ignore[arg-type]
    world.settle()
    (rows,) = told
    assert set(rows["state"].tolist()) == {MessageState.PENDING}
    due: list[int] = rows["deliver_at_ms"].tolist()
    return due


def accepted(world: World, count: int = 1) -> Asked:
    """Send messages; their receipts."""
    world.send(wanted(count, 5 * HOUR_MS, "first"))
    world.settle()
    return world.receipts("first")


def test_rule_I1_a_move_by_receipt_that_is_asked_again_undoes_no_later_move() -> None:
    world = World()
    receipt = accepted(world)
    told = move(world, receipt, TEN, number=1)
    assert told["answer"].tolist() == [RescheduleAnswer.MOVED]
    assert move(world, receipt, NOON)["answer"].tolist() == [RescheduleAnswer.MOVED]
    for life in lives(world):
        life.settle()
        for _ in range(2):
            assert same(told, move(life, receipt, TEN, number=1))
        assert due_of(life, receipt) == [NOON]
        assert move(life, receipt, TEN, number=2)["answer"].tolist() == [RescheduleAnswer.MOVED]
        assert due_of(life, receipt) == [TEN], "another number is another try"


@pytest.mark.parametrize("seed", range(40))
def test_rule_I1_a_move_that_is_asked_again_while_its_first_try_is_under_way_is_done_once(seed: int) -> None:
    random, world = Random(seed), World(load_ahead_ms=1_000)
    receipt = accepted(world)
    first = begin_move(world, receipt, TEN, number=1)
    others: dict[int, list[list[AnswerRows]]] = {number: [] for number in (0, 1)}
    begins = {random.randrange(20): 0, random.randrange(20): 1}
    for step in range(30):
        if step in begins:
            number = begins[step]
            others[number].append(begin_move(world, receipt, TEN if number else NOON, number))
        if moves := world.moves():
            random.choice(moves)()
    world.settle()
    again, other = ([rows for told in others[number] for rows in told] for number in (1, 0))
    (rows,) = first
    assert all(same(rows, each) for each in again)
    # Requests that are under way together may be decided in any order.
    is_last = all(each["sequence"][0] < rows["sequence"][0] for each in other)
    assert due_of(world, receipt) == [TEN if is_last else NOON]


def test_rule_B1_a_try_that_can_not_be_remembered_is_refused() -> None:
    world = World()
    sent(world, wanted(1, 5 * HOUR_MS, "first"), [b"k"], REJECT)
    receipt = world.receipts("first")
    world.core.logs.producers._bytes_max = 0
    with pytest.raises(SlowDown, match="as many tries as it can"):
        begin_move(world, receipt, TEN, number=1)
    with pytest.raises(SlowDown, match="as many tries as it can"):
        ask_by_key(world, RequestWish.MOVE, [b"k"], [1], TEN)
    assert due_of(world, receipt) == [START_MS + 5 * HOUR_MS]
