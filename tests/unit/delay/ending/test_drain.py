"""Drain: pending rows go to another delay server, each as one durable decision (rule I7; docs/drain.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from delayd.batch.content import Names, slots_of_names
from delayd.delay.ending import copies
from delayd.delay.ending.drain import NEAR_MS
from delayd.errors import (
    DelaydError,
    SlowDown,
)
from delayd.outcome import MessageState
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import ANSWER, AnswerRows, Asked, DrainOrder
from delayd.wire.meta import NO_SLOTS, slot_set
from tests.worlds.delay import World, wanted
from tests.worlds.drain import ask, carry, carry_one, log_id, piece, two

HOUR_MS = 3_600_000
ALL_SLOTS = ~NO_SLOTS


def delivered(*worlds: World) -> Counter[bytes]:
    """The bodies at the targets of some servers when all that they hold has fallen due."""
    found: Counter[bytes] = Counter()
    for world in worlds:
        world.outside.cancel_asked.update(range(1, world.core.logs.intake.next_sequence))
        world.drain(6 * HOUR_MS)
        for hours in (1, 30):
            world.clock.advance(hours * HOUR_MS)
            world.pass_ms(5_000)
        world.check_sealing()
        for target in world.outside.targets.values():
            for kept in target.log:
                found.update(kept.bodies)
                assert all(kept.part.claimed_at_ms >= due for due in kept.deliver_at_ms), "it was early"
    return found


def answers(world: World, asked: Asked) -> AnswerRows:
    told: list[AnswerRows] = []

    def heard(what: AnswerRows | DelaydError) -> None:
        assert not isinstance(what, DelaydError), what
        told.append(what)

    world.core.asked.endings.get(asked, heard)
    world.settle()
    return told[0]


def sent(world: World) -> set[bytes]:
    return {body for batch, _ in world.outside.accepted.values() for _, _, body in batch.wanted}


def test_a_receipt_says_where_the_message_is_now() -> None:
    world, other = two()
    world.send(wanted(3, 5 * HOUR_MS, "far"))
    world.settle()
    receipts = world.receipts("far")
    other.send(wanted(2, 5 * HOUR_MS, "before"))
    other.settle()
    piece(world, log_id(other))
    # While nobody knows whether the other server has them, they are asked about again.
    assert answers(world, receipts)["state"].tolist() == [MessageState.IN_FLIGHT] * 3
    carry(world, other)
    for life in (world, world.after_crash(PowerLoss.ALL_LOST)):
        told = answers(life, receipts)
        assert told["state"].tolist() == [MessageState.DRAINED] * 3
        assert told["target_log_id"].tolist() == [log_id(other)] * 3
        there = Asked(told["other"].copy(), told["other_at_ms"].copy(), told["target_appended_at_ms"].copy())
        assert answers(other, there)["state"].tolist() == [MessageState.PENDING] * 3
        assert told["other"].tolist() == [3, 4, 5]
        assert told.dtype == ANSWER


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST, PowerLoss.ALL_KEPT])
def test_whenever_both_servers_die_each_row_is_deliverable_at_one_of_them(
    way: PowerLoss | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEAVE_ROWS", 4)  # Several batches, of several hours.
    world, other = two()
    world.send([*wanted(3, 30_000, "soon"), *wanted(3, 3 * HOUR_MS, "far"), *wanted(3, 27 * HOUR_MS, "later", b"mail")])
    world.settle()
    world.checkpoint()
    world.send(wanted(2, 3 * HOUR_MS, "not filed"))
    world.settle()
    bodies = Counter(sent(world))

    def check() -> None:
        ended, taker = world.after_crash(way), other.after_crash(way)
        carry(ended, taker)
        piece(ended, log_id(taker))  # The command is given again.
        carry(ended, taker)
        assert delivered(ended, taker) == bodies

    told = ask(world, DrainOrder(log_id(other), None))
    steps = 0
    journey: Iterator[None] | None = None
    while True:
        move = world.next_move()
        if move is not None:
            move()
        elif journey is not None:
            next(journey, None)
            journey = None  # The answer has come; before that a crash would have lost it.
        elif next(world.core.asked.endings.drain.waiting(log_id(other)), None) is not None:
            journey = carry_one(world, other)
            next(journey)
        elif world.core.asked.endings.drain.rows or not told or world.core.standing.counters()["leaving_rows"]:
            world.pass_ms(100)
        elif steps > 200 or not world.core.memory.ledger.owed.all().size:
            break
        else:
            world.pass_ms(50)
        steps += 1
        check()
    assert steps > 10
    check()


def test_keyed_rows_go_with_their_slots_which_are_served_no_more() -> None:
    world, other = two()
    world.own_all_keys()
    keys = [b"k%d" % number for number in range(6)]
    world.send(wanted(6, 3 * HOUR_MS, "keyed"), keys=keys)
    world.send(wanted(2, 3 * HOUR_MS, "plain"))
    world.settle()
    assert piece(world, log_id(other)).drained == 2, "rows with keys stay"
    slots = slot_set(slots_of_names(Names.of_lists([b"orders.eu"] * 3, keys[:3])))
    first = piece(world, log_id(other), slots)
    assert first.drained >= 3 and first.left >= 3, "those on their way may still be nowhere"
    carry(world, other)
    assert piece(world, log_id(other), slots).left == 0
    life = world.after_crash(PowerLoss.ALL_LOST)
    life.send(wanted(1, 3 * HOUR_MS, "again"), keys=keys[:1])
    life.settle()
    assert isinstance(life.outside.refused[-1][1], SlowDown)
    assert any("drain" in wait.command for wait in life.core.standing.waits())
    assert piece(world, log_id(other), ALL_SLOTS).drained == 6 - first.drained
    carry(world, other)
    # The other server knows the keys from the moment on at which it took the messages.
    other.own_all_keys()
    before = len(other.outside.accepted)
    other.send(wanted(1, 3 * HOUR_MS, "rival"), keys=keys[:1])
    other.settle()
    ((_, accepted),) = list(other.outside.accepted.values())[before:]
    assert len(accepted.decided), "the message with this key is pending there"
    assert delivered(world, other) == Counter(sent(world))


def test_rows_that_are_due_about_now_stay_and_are_delivered_here() -> None:
    world, other = two()
    world.send([*wanted(3, NEAR_MS - 1, "near"), *wanted(4, NEAR_MS + 5_000, "later")])
    world.settle()
    progress = piece(world, log_id(other))
    assert (progress.found, progress.drained) == (7, 4)
    carry(world, other)
    assert {body[:4] for body in delivered(world)} == {b"near"} and {body[:5] for body in delivered(other)} == {
        b"later"
    }
