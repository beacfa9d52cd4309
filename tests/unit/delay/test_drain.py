"""Drain: pending rows go to another delay server, each as one durable decision (rule I7; docs/drain.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from delayd.batch.content import Names, slots_of_names
from delayd.errors import SlowDown
from delayd.outcome import MessageState
from delayd.testing.tree import PowerLoss
from delayd.wire.asked import Asked, DrainOrder, decode_answers, encode_asked
from delayd.wire.meta import NO_SLOTS, slot_set
from delayd.wire.requests import RequestType
from tests.worlds.delay import World, wanted
from tests.worlds.drain import ask, carry, carry_one, log_id, piece, two

HOUR_MS = 3_600_000
NEAR_MS = 10_000  # A row that is due so soon stays.
ALL_SLOTS = ~NO_SLOTS


def delivered(*worlds: World) -> Counter[bytes]:
    """The bodies at the targets of some servers when all that they hold has fallen due."""
    found: Counter[bytes] = Counter()
    for world in worlds:
        world.outside.cancel_asked.update(range(1, world.status("next_sequence")))
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


def sent(world: World) -> Counter[bytes]:
    return Counter(body for batch, _ in world.outside.accepted.values() for _, _, body in batch.wanted)


def test_a_receipt_says_where_the_message_is_now() -> None:
    world, other = two()
    world.send([*wanted(3, 5 * HOUR_MS, "far"), *wanted(2, NEAR_MS - 1, "near")])
    world.settle()
    receipts = world.receipts("far")
    other.send(wanted(2, 5 * HOUR_MS, "before"))
    other.settle()
    progress = piece(world, log_id(other))
    assert (progress.found, progress.drained) == (5, 3), "what is due about now is delivered here"
    # While nobody knows whether the other server has them, they are asked about again.
    assert world.states(receipts) == [MessageState.IN_FLIGHT] * 3
    carry(world, other)
    for life in (world, world.after_crash(PowerLoss.ALL_LOST)):
        told = decode_answers(life.ask(RequestType.GET, {"log_id": log_id(life)}, encode_asked(receipts))[1])
        assert told["state"].tolist() == [MessageState.DRAINED] * 3
        assert told["target_log_id"].tolist() == [log_id(other)] * 3 and told["other"].tolist() == [3, 4, 5]
        there = Asked(told["other"].copy(), told["other_at_ms"].copy(), told["target_appended_at_ms"].copy())
        assert other.states(there) == [MessageState.PENDING] * 3
    assert sorted(delivered(world)) == [b"near-0", b"near-1"]


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST, PowerLoss.ALL_KEPT])
def test_whenever_both_servers_die_each_row_is_deliverable_at_one_of_them(
    way: PowerLoss | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayd.delay.ending.copies.LEAVE_ROWS", 4)  # Several batches, of several hours.
    world, other = two()
    world.send([*wanted(3, 30_000, "soon"), *wanted(3, 3 * HOUR_MS, "far"), *wanted(3, 27 * HOUR_MS, "later", b"mail")])
    world.settle()
    world.checkpoint()
    world.send(wanted(2, 3 * HOUR_MS, "not filed"))
    world.settle()

    def check() -> None:
        ended, taker = world.after_crash(way), other.after_crash(way)
        carry(ended, taker)
        piece(ended, log_id(taker))  # The command is given again.
        carry(ended, taker)
        assert delivered(ended, taker) == sent(world)

    told = ask(world, DrainOrder(log_id(other), None))
    steps = 0
    journey: Iterator[None] | None = None
    drain = world.core.asked.endings.drain
    while steps <= 200:
        if (move := world.next_move()) is not None:
            move()
        elif journey is not None:
            next(journey, None)
            journey = None  # The answer has come; before that a crash would have lost it.
        elif next(drain.waiting(log_id(other)), None) is not None:
            journey = carry_one(world, other)
            next(journey)
        elif drain.rows or not told or world.status("leaving_rows") or world.status("owed_rows"):
            world.pass_ms(50)
        else:
            break
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
    assert "drain" in str(life.ask(RequestType.STATUS)[0]["waits"])
    assert piece(world, log_id(other), ALL_SLOTS).drained == 6 - first.drained
    carry(world, other)
    # The other server knows the keys from the moment on at which it took the messages.
    other.own_all_keys()
    (verdict,) = other.sent_keyed(wanted(1, 3 * HOUR_MS, "rival"), keys[:1], 0)
    assert verdict[0], "the message with this key is pending there"
    assert delivered(world, other) == sent(world)
