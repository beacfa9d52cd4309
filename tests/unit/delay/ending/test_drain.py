"""Drain: pending rows go to another delay server, each as one durable decision (rule I7; docs/drain.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ColumnId
from delayd.batch.content import Names, slots_of_names
from delayd.delay.ending import copies
from delayd.delay.ending.drain import LEAVING_MAX, NEAR_MS
from delayd.delay.producers import AcceptedBatch
from delayd.errors import (
    BadArgument,
    BatchNumberReused,
    DelaydError,
    DiskReserve,
    ServerCordoned,
    ServerInUse,
    SlowDown,
)
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.drain import DrainOrder
from delayd.wire.ending import ANSWER, AnswerRows, Asked, MessageState
from delayd.wire.slots import NO_SLOTS, slot_set
from tests.worlds.delay import World, encode_wanted, wanted
from tests.worlds.drain import ask, carry, carry_one, log_id, piece, two

HOUR_MS = 3_600_000
ALL_SLOTS = ~NO_SLOTS
TOOK = {"base_sequence": 1, "appended_at_ms": START_MS}


def delivered(*worlds: World) -> Counter[bytes]:
    """The bodies at the targets of some servers when all that they hold has fallen due."""
    found: Counter[bytes] = Counter()
    for world in worlds:
        world.outside.cancel_asked.update(range(1, world.core.intake.next_sequence))
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

    world.core.endings.get(asked, heard)
    world.settle()
    return told[0]


def sent(world: World) -> set[bytes]:
    return {body for batch, _ in world.outside.accepted.values() for _, _, body in batch.wanted}


@pytest.mark.parametrize("filed", [False, True])
def test_pending_rows_go_from_wherever_they_stand_and_are_delivered_once(filed: bool) -> None:
    world, other = two()
    for due_ms, name in ((20_000, "wheel"), (2 * HOUR_MS, "soon"), (26 * HOUR_MS, "far")):
        world.send([*wanted(10, due_ms, name), *wanted(5, due_ms, f"mail-{name}", b"mail")])
    world.settle()
    if filed:
        world.checkpoint()
    progress = piece(world, log_id(other))
    assert (progress.found, progress.drained, progress.leaving, progress.place) == (45, 45, 45, None)
    carry(world, other)
    assert world.core.counters()["leaving_rows"] == 0
    assert delivered(world) == {}
    assert delivered(other) == Counter(sent(world))


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


def test_what_senders_gave_stays_with_a_message() -> None:
    world, other = two()
    world.send(wanted(2, 5 * HOUR_MS, "far"), expires=[START_MS + 6 * HOUR_MS, 0])
    world.settle()
    piece(world, log_id(other))
    (leaving,) = world.core.endings.drain.waiting(log_id(other))
    batch = parse(memoryview(world.core.endings.drain.batch_of(leaving)))
    assert batch.int64s(ColumnId.EXPIRES_AT_MS).tolist() == [START_MS + 6 * HOUR_MS, 0]
    assert batch.uint64s(ColumnId.ORIGIN_SEQUENCE).tolist() == [1, 2]


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
        elif next(world.core.endings.drain.waiting(log_id(other)), None) is not None:
            journey = carry_one(world, other)
            next(journey)
        elif world.core.endings.drain.rows or not told or world.core.counters()["leaving_rows"]:
            world.pass_ms(100)
        elif steps > 200 or not world.core.ledger.owed.all().size:
            break
        else:
            world.pass_ms(50)
        steps += 1
        check()
    assert steps > 10
    check()


def test_a_batch_that_comes_again_without_some_rows_is_answered_as_the_first_time() -> None:
    world, other = two()
    world.send(wanted(3, 3 * HOUR_MS, "far"))
    world.settle()
    piece(world, log_id(other))
    (leaving,) = world.core.endings.drain.waiting(log_id(other))
    batch = parse(memoryview(world.core.endings.drain.batch_of(leaving)))
    fewer = parse(memoryview(encode_wanted(wanted(1, 3 * HOUR_MS, "far"), batch.producer)))
    taken: list[tuple[AcceptedBatch | DelaydError, bool]] = []
    for each in (batch, fewer):
        other.core.send_drained(each, lambda what, duplicate: taken.append((what, duplicate)))
        other.settle()
    other.core.send(fewer, lambda what, duplicate: taken.append((what, duplicate)))
    other.settle()
    first, again, by_a_client = taken
    assert first == (again[0], False) and again[1]
    assert isinstance(by_a_client[0], BatchNumberReused)


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
    assert any("drain" in wait.command for wait in life.core.waits())
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


def test_slots_that_leave_go_to_one_server() -> None:
    world, other = two()
    world.own_all_keys()
    world.send(wanted(1, 3 * HOUR_MS, "keyed"), keys=[b"k"])
    world.settle()
    piece(world, log_id(other), ALL_SLOTS)
    told = ask(world, DrainOrder(77, ALL_SLOTS))
    world.settle()
    assert isinstance(told[0], BadArgument)


def test_what_the_other_server_refuses_waits_and_is_named_with_its_reason() -> None:
    world, other = two()
    world.send(wanted(2, 3 * HOUR_MS, "far"))
    world.settle()
    piece(world, log_id(other))
    drain = world.core.endings.drain
    (leaving,) = drain.waiting(log_id(other))
    drain.refused(leaving, DiskReserve("its disk is full"))
    (wait,) = [wait for wait in world.core.waits() if "on their way" in wait.what]
    assert wait.why == "its disk is full" and "2 messages" in wait.what
    carry(world, other)
    assert not [wait for wait in world.core.waits() if "on their way" in wait.what]


def test_no_more_leaves_while_much_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LEAVE_ROWS", 1)
    world, other = two()
    world.send(wanted(LEAVING_MAX, 3 * HOUR_MS, "far"))
    world.settle()
    piece(world, log_id(other))
    with pytest.raises(SlowDown):
        world.core.endings.let_leave(DrainOrder(log_id(other), None), lambda what: None)
    with pytest.raises(BadArgument):
        world.core.endings.let_leave(DrainOrder(log_id(world), None), lambda what: None)


def test_a_cordoned_server_refuses_new_messages_and_takes_those_with_its_keys() -> None:
    world = World()
    world.own_all_keys()
    number = world.send(wanted(1, HOUR_MS, "before"))
    world.settle()
    world.core.cordon(True)
    world.send_again(number)
    world.send(wanted(1, HOUR_MS, "keyed"), keys=[b"k"])
    world.send(wanted(1, HOUR_MS, "after"))
    world.settle()
    assert sent(world) == {b"before-0", b"keyed-0"}
    ((_, error),) = world.outside.refused
    assert isinstance(error, ServerCordoned)
    world.core.cordon(False)
    world.send(wanted(1, HOUR_MS, "open"))
    world.settle()
    assert b"open-0" in sent(world)


def test_a_server_retires_only_when_it_holds_nothing() -> None:
    world, other = two()
    told: list[str | DelaydError] = []

    def retire() -> str:
        told.clear()
        world.core.retiring.retire(told.append)
        world.settle()
        return str(told[0])

    with pytest.raises(BadArgument, match="cordon"):
        retire()
    world.core.cordon(True)
    assert "holds nothing" in retire()
    world.core.cordon(False)
    world.send([*wanted(2, 3 * HOUR_MS, "far"), *wanted(1, 1_000, "near")])
    world.settle()
    world.core.cordon(True)
    assert "3 messages are pending" in retire()
    assert isinstance(told[-1], ServerInUse)
    piece(world, log_id(other))
    assert "1 messages are pending" in retire()
    world.pass_ms(3_000)
    assert "2 messages are on their way" in retire()
    carry(world, other)
    world.pass_ms(1_000)
    assert "holds nothing" in retire()
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    assert "not sealed" in retire()


def test_a_walk_that_only_counts_changes_nothing() -> None:
    world, _ = two()
    world.send([*wanted(2, 3 * HOUR_MS, "far"), *wanted(3, 1_000, "near")])
    world.settle()
    before = len(world.disk.operations)
    assert piece(world, 0).found == 5
    assert len(world.disk.operations) == before
    assert np.all(world.core.ledger.owed.all()["sequence"] == 0)
