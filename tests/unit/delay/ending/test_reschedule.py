"""Reschedule by receipt: a row moves from wherever it stands, and old receipts lead to its newest row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from delayd.delay.ending.copies import COPY_ROWS
from delayd.delay.ending.requested import STEPS_MAX
from delayd.delay.ledger.files import HourPlace, HourReader, LookedUp
from delayd.delay.ledger.wanted import Wanted
from delayd.errors import BadInstant, BadRequest, DiskReserve, PastHorizon
from delayd.reading.trace import trace
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.ending import AnswerRows, Asked, CancelAnswer, MessageState, RescheduleAnswer
from tests.worlds.delay import DATA, FOLDER, TARGET_IDS, World, wanted

MOVED, DISPATCHED = RescheduleAnswer.MOVED, RescheduleAnswer.ALREADY_DISPATCHED
IN_FLIGHT, UNKNOWN, CANCELLED = RescheduleAnswer.IN_FLIGHT, RescheduleAnswer.UNKNOWN, RescheduleAnswer.CANCELLED
HOUR_MS = 3_600_000


def move(world: World, asked: Asked, due_ms: int) -> list[RescheduleAnswer]:
    """Move messages to one instant and let everything happen that takes no time: the answers."""
    return [RescheduleAnswer(answer) for answer in told(world, asked, due_ms)["answer"].tolist()]


def told(world: World, asked: Asked, due_ms: int) -> AnswerRows:
    answers = world.reschedule(asked, START_MS + due_ms)
    world.settle()
    (rows,) = answers
    return rows


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("to_ms", [3_000, HOUR_MS + 7_000, 50 * HOUR_MS, -1_000])
@pytest.mark.parametrize("due_ms", [5_000, HOUR_MS + 5_000, 40 * HOUR_MS])
@pytest.mark.parametrize("filed", [False, True])
def test_a_row_moves_from_wherever_it_stands_and_is_delivered_once(due_ms: int, filed: bool, to_ms: int) -> None:
    world = World(load_ahead_ms=1_000)
    world.send([*wanted(20, due_ms, "gone"), *wanted(20, due_ms, "other subject", b"mail")])
    world.send(wanted(3, due_ms, "kept"))
    world.settle()
    if filed:
        world.checkpoint()
    asked = world.receipts("gone", "other subject")
    assert move(world, asked, to_ms) == [MOVED] * 40
    end(world)
    assert move(world, asked, to_ms + 1) == [DISPATCHED] * 40


def receipts_of(rows: AnswerRows) -> Asked:
    """The receipts of the rows that answers are about."""
    return Asked(rows["sequence"].copy(), rows["deliver_at_ms"].copy(), rows["accepted_at_ms"].copy())


def test_old_receipts_lead_to_the_newest_row_through_many_moves() -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(2, 40 * HOUR_MS, "far"))
    world.settle()
    asked = world.receipts("far")
    receipts = [asked]
    for number in range(12):
        if number % 4 == 2:
            world.checkpoint()
        rows = told(world, receipts[number // 2], (30 + 3 * number) * HOUR_MS)
        assert rows["answer"].tolist() == [MOVED, MOVED]
        assert rows["deliver_at_ms"].tolist() == [START_MS + (30 + 3 * number) * HOUR_MS] * 2
        receipts.append(receipts_of(rows))
        world.pass_ms(1_000)
    for life in (world, world.after_crash(PowerLoss.ALL_LOST), world.after_crash()):
        for receipt in receipts:
            assert life.states(receipt) == [MessageState.PENDING] * 2
        first, second = receipts[3].take([0]), receipts[5].take([1])
        told_cancel = life.cancel(first)
        life.settle()
        assert told_cancel == [[CancelAnswer.CANCELLED]]
        for receipt in receipts:
            assert life.states(receipt) == [MessageState.CANCELLED, MessageState.PENDING]
            assert move(life, receipt.take([0]), 7 * HOUR_MS) == [CANCELLED]
        assert move(life, second, 60_000) == [MOVED]
        end(life)
        assert life.states(asked) == [MessageState.CANCELLED, MessageState.DISPATCHED]
        assert move(life, asked, 90_000 * HOUR_MS // 90_000) == [CANCELLED, DISPATCHED]


def test_a_request_follows_so_many_moves_and_says_how_far_it_came() -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(1, 40 * HOUR_MS, "far"))
    world.settle()
    asked = newest = world.receipts("far")
    for number in range(STEPS_MAX + 20):
        newest = receipts_of(told(world, newest, 50 * HOUR_MS + number))
    world = world.after_crash()
    rows = told(world, asked, 60 * HOUR_MS)
    assert (rows["answer"].tolist(), rows["state"].tolist()) == ([IN_FLIGHT], [MessageState.MOVED])
    rows = told(world, receipts_of(rows), 60 * HOUR_MS)
    assert rows["answer"].tolist() == [MOVED]
    end(world)


def test_a_receipt_that_was_followed_leads_to_the_newest_row_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(2, 40 * HOUR_MS, "far"))
    world.settle()
    asked = world.receipts("far")
    for number in range(30):
        assert move(world, asked, 50 * HOUR_MS + number) == [MOVED] * 2
        world.pass_ms(50)
    read: list[int] = []
    look_up = HourReader._look_up

    def counted(self: HourReader, wanted: Wanted, places: Sequence[HourPlace]) -> LookedUp:
        read.append(len(wanted))
        return look_up(self, wanted, places)

    monkeypatch.setattr(HourReader, "_look_up", counted)
    assert world.states(asked) == [MessageState.PENDING] * 2
    assert len(read) <= 1
    world = world.after_crash()
    assert world.states(asked) == [MessageState.PENDING] * 2
    first, read[:] = len(read), []
    assert world.states(asked) == [MessageState.PENDING] * 2
    assert len(read) <= 1 < first
    false = Asked(asked.sequences, asked.deliver_at_ms + 1, asked.accepted_at_ms)
    assert MessageState.PENDING not in world.states(false)
    end(world)


def test_a_row_that_is_due_at_the_wanted_instant_already_is_answered_as_it_is() -> None:
    world = World()
    world.send(wanted(2, 5_000, "near"))
    world.settle()
    asked = world.receipts("near")
    first = told(world, asked, 9_000)
    again = told(world, asked, 9_000)
    assert again["answer"].tolist() == [MOVED, MOVED]
    assert again["sequence"].tolist() == first["sequence"].tolist() == [3, 4]
    assert again["accepted_at_ms"].tolist() == first["accepted_at_ms"].tolist()
    assert world.core.intake.next_sequence == 5
    end(world)


def test_requests_of_one_commit_are_decided_in_their_order() -> None:
    world = World()
    world.send(wanted(1, HOUR_MS, "one"))
    world.send(wanted(1, HOUR_MS, "two"))
    world.settle()
    one, two = world.receipts("one"), world.receipts("two")
    world.send(wanted(1, 5_000, "before"))
    told_one = [world.reschedule(one, START_MS + 2 * HOUR_MS), world.reschedule(one, START_MS + 9_000)]
    world.threads.worker.run_all()  # type: ignore[attr-defined]
    cancel_one = world.cancel(one)
    cancel_two = world.cancel(two)
    told_two = world.reschedule(two, START_MS + 9_000)
    world.settle()
    # The second move is copied anew from the row that the first one makes; meanwhile the cancel is decided.
    assert [rows["answer"].tolist() for answers in told_one for rows in answers] == [[MOVED], [CANCELLED]]
    assert cancel_one == cancel_two == [[CancelAnswer.CANCELLED]]
    assert [rows["answer"].tolist() for rows in told_two] == [[CANCELLED]]
    assert world.states(one) == world.states(two) == [MessageState.CANCELLED]
    end(world)


def test_two_moves_of_one_row_in_one_commit_are_both_done() -> None:
    world = World()
    world.send(wanted(1, HOUR_MS, "one"))
    world.settle()
    one = world.receipts("one")
    world.send(wanted(1, 5_000, "before"))
    first, second = world.reschedule(one, START_MS + 2 * HOUR_MS), world.reschedule(one, START_MS + 9_000)
    world.settle()
    assert [rows["answer"].tolist() for rows in (*first, *second)] == [[MOVED], [MOVED]]
    assert world.outside.newest(1, 0)[:2] == (int(second[0]["sequence"][0]), START_MS + 9_000)
    end(world)


def test_a_row_at_its_target_is_in_flight_and_then_dispatched() -> None:
    world = World()
    world.send(wanted(1, 0, "first"))
    world.pass_ms(2_000)
    world.outside.targets[TARGET_IDS[0]].hangs = True
    world.send([*wanted(1, 2_100, "sent"), *wanted(1, 60_000, "later")])
    world.pass_ms(500)
    asked = world.receipts("sent", "later")
    assert move(world, asked, 3_000) == [IN_FLIGHT, MOVED]
    world.outside.targets[TARGET_IDS[0]].hangs = False
    end(world)
    assert move(world, asked, 90_000) == [DISPATCHED, DISPATCHED]


def test_a_row_that_waits_for_its_target_moves_away() -> None:
    world = World()
    world.meta_up = False
    world.send(wanted(3, 0, "late"))
    world.pass_ms(500)
    assert move(world, world.receipts("late"), 60_000) == [MOVED] * 3
    end(world)


def test_an_instant_is_judged_like_that_of_a_send() -> None:
    world = World(horizon_days=10)
    world.send(wanted(2, 5_000, "near"))
    world.settle()
    asked = world.receipts("near")
    with pytest.raises(PastHorizon):
        world.reschedule(asked, START_MS + 241 * HOUR_MS)
    with pytest.raises(BadInstant):
        world.reschedule(asked, 1)
    with pytest.raises(BadRequest):
        world.reschedule(asked.take([0, 0]), START_MS + 1, START_MS + 2)
    world.core.intake.reserve.closed = True
    with pytest.raises(DiskReserve):
        world.reschedule(asked, START_MS + 1)
    world.core.intake.reserve.closed = False
    end(world)


def test_made_up_receipts_move_nothing() -> None:
    world = World()
    world.send([*wanted(2, 5_000, "near"), *wanted(2, 50 * HOUR_MS, "far")])
    world.settle()
    asked = world.receipts("near", "far")
    false = Asked(asked.sequences, asked.deliver_at_ms + 1, asked.accepted_at_ms)
    assert move(world, false, 9_000) == [UNKNOWN] * 4
    assert move(world, Asked(asked.sequences + 100, *asked[1:]), 9_000) == [UNKNOWN] * 4
    assert move(world, asked, 9_000) == [MOVED] * 4
    assert MOVED not in move(world, false, 19_000)
    end(world)


@pytest.mark.parametrize("due_ms", [5_000, 40 * HOUR_MS])
def test_a_full_disk_undoes_moves(due_ms: int) -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(3, due_ms, "stays"))
    world.settle()
    asked = world.receipts("stays")
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    answers = world.reschedule(asked, START_MS + 60_000)
    world.settle()
    assert not answers and isinstance(world.outside.refused[-1][1], DiskReserve)
    world.disk.capacity_bytes = capacity
    world.core.reserve(capacity)
    assert world.states(asked) == [MessageState.PENDING] * 3
    assert move(world, asked.take([1]), 60_000) == [MOVED]
    end(world)


def test_many_rows_move_piece_by_piece_each_to_its_own_instant() -> None:
    world = World(load_ahead_ms=1_000, segment_bytes=8 << 20)
    count = COPY_ROWS + 500
    world.send(wanted(count, 2 * HOUR_MS, "many", every_ms=1_000))
    world.settle()
    world.checkpoint()
    asked = world.receipts("many")
    instants = [START_MS + 2 * HOUR_MS + 500 * (row % 3) for row in range(count)]
    answers = world.reschedule(asked, *instants)
    world.settle()
    assert (answers[0]["answer"] == MOVED).all() and answers[0]["deliver_at_ms"].tolist() == instants
    assert len(np.unique(answers[0]["sequence"])) == count
    world = world.after_crash(PowerLoss.ALL_LOST)
    assert world.states(asked.take([0, count - 1])) == [MessageState.PENDING] * 2
    end(world)


def test_long_messages_move_a_few_at_a_time_with_all_that_they_have() -> None:
    world = World(segment_bytes=64 << 20, intake_queue_bytes_max=64 << 20)
    for number in range(12):
        body = b"long-%d" % number
        world.send([(START_MS + HOUR_MS, b"mail", body.ljust(900_000, b"."))])
        world.settle()
    base = Asked(np.arange(1, 13, dtype=np.uint64), np.full(12, START_MS + HOUR_MS), np.full(12, START_MS))
    before = world.core.intake.durable.offset
    assert move(world, base, 3 * HOUR_MS) == [MOVED] * 12
    assert 12 * 900_000 < world.core.intake.durable.offset - before < 12 * 920_000
    end(world)


def test_a_message_that_can_not_be_read_stays_and_is_asked_about_again() -> None:
    world = World(tail_bytes=0)
    world.send(wanted(2, HOUR_MS, "whole"))
    world.settle()
    world.send(wanted(2, HOUR_MS, "damaged"))
    world.settle()
    (name,) = world.disk.list_folder(f"{FOLDER}/message")
    path = f"{FOLDER}/message/{name}"
    file = world.disk.open(path, write=True)
    file.pwritev([b"D"], file.pread(file.size(), 0).index(b"damaged-1"))
    assert move(world, world.receipts("whole", "damaged"), 9_000) == [MOVED, MOVED, IN_FLIGHT, IN_FLIGHT]
    assert world.states(world.receipts("damaged")) == [MessageState.PENDING] * 2


def test_a_trace_follows_a_message_over_all_of_its_rows() -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(3, 3 * HOUR_MS, "traced"))
    world.settle()
    asked = world.receipts("traced")
    for due_ms in (5 * HOUR_MS, 2_000):
        assert move(world, asked, due_ms) == [MOVED] * 3
        world.pass_ms(100)
        world.checkpoint()
    world.pass_ms(3_000)
    assert world.outside.newest(2, 0)[0] == 8
    (found,) = trace(world.disk.after_kill(), DATA, "orders.eu", 2)
    assert [step.what for step in found.steps if step.what != "filed"][:6] == [
        *("accepted", "moved", "accepted", "moved", "accepted", "claimed")
    ]
    details = [step.detail for step in found.steps if step.what == "moved"]
    assert ["sequence 5," in details[0], "sequence 8," in details[1]] == [True, True], details
    assert found.deliver_at_ms == START_MS + 2_000
