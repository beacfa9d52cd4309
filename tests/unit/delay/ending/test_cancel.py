"""Cancel by receipt: a row is claimed wherever it stands, each answer is true, and books and seals agree."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from delayd.delay.requests import Requests
from delayd.errors import BadRequest, BatchMalformed, DelaydError, DiskReserve, Stopping, UnknownServer
from delayd.testing.clock import START_MS, SimClock
from delayd.wire.ending import (
    AnswerRows,
    Asked,
    CancelAnswer,
    MessageState,
    RescheduleAnswer,
    decode_answers,
    encode_asked,
)
from delayd.wire.frame import Frame, HeadValue
from delayd.wire.requests import RequestType
from tests.unit.delay.answers import Answers
from tests.worlds.delay import TARGET_IDS, World, wanted

CANCELLED, DISPATCHED = CancelAnswer.CANCELLED, CancelAnswer.ALREADY_DISPATCHED
IN_FLIGHT, UNKNOWN = CancelAnswer.IN_FLIGHT, CancelAnswer.UNKNOWN
HOUR_MS = 3_600_000


def cancel(world: World, asked: Asked) -> list[CancelAnswer]:
    """Cancel messages and let everything happen that takes no time: the answers."""
    told = world.cancel(asked)
    world.settle()
    (answers,) = told
    return answers


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("due_ms", [5_000, HOUR_MS + 5_000, 40 * HOUR_MS])
@pytest.mark.parametrize("filed", [False, True])
def test_rule_C1_a_cancelled_row_is_never_sent_wherever_it_stands(due_ms: int, filed: bool) -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(40, due_ms, "gone"))
    world.send(wanted(40, due_ms, "kept"))
    world.settle()
    if filed:
        world.checkpoint()
    asked = world.receipts("gone")
    assert world.states(asked) == [MessageState.PENDING] * 40
    assert cancel(world, asked) == [CANCELLED] * 40
    assert cancel(world, asked) == [CANCELLED] * 40
    assert world.states(asked) == [MessageState.CANCELLED] * 40
    world.pass_ms(100)
    assert world.states(asked) == [MessageState.CANCELLED] * 40
    assert world.states(world.receipts("kept")) == [MessageState.PENDING] * 40
    end(world)
    assert cancel(world, asked) == [CANCELLED] * 40
    assert cancel(world, world.receipts("kept")) == [DISPATCHED] * 40


def test_a_row_of_the_open_slot_and_one_that_is_due_and_has_no_target_are_cancelled() -> None:
    world = World()
    world.meta_up = False
    world.send(wanted(3, 0, "late"))
    world.send(wanted(3, 30, "soon"))
    world.pass_ms(10)
    assert cancel(world, world.receipts("late", "soon")) == [CANCELLED] * 6
    end(world)


def test_a_row_that_waits_for_a_target_that_has_answered_is_cancelled() -> None:
    world = World()
    world.send(wanted(1, 0, "first"))
    world.pass_ms(2_000)
    world.crash_target(TARGET_IDS[0])
    world.send(wanted(3, 2_500, "waits"))
    world.pass_ms(4_000)
    asked = world.receipts("waits")
    assert cancel(world, asked.take([0, 2])) == [CANCELLED, CANCELLED]
    assert world.states(asked) == [MessageState.CANCELLED, MessageState.PENDING, MessageState.CANCELLED]
    end(world)


def test_a_row_that_was_sent_and_not_acknowledged_is_in_flight() -> None:
    world = World()
    world.send(wanted(1, 0, "first"))
    world.pass_ms(2_000)
    world.outside.targets[TARGET_IDS[0]].hangs = True
    world.send(wanted(2, 2_100, "sent"))
    world.pass_ms(500)
    asked = world.receipts("sent")
    assert cancel(world, asked) == [IN_FLIGHT] * 2
    assert world.states(asked) == [MessageState.IN_FLIGHT] * 2
    world.outside.targets[TARGET_IDS[0]].hangs = False
    end(world)
    assert cancel(world, asked) == [DISPATCHED] * 2
    assert world.states(asked) == [MessageState.DISPATCHED] * 2


def test_rule_H5_after_a_crash_rows_that_may_have_left_are_in_flight_until_the_target_answers() -> None:
    world = World()
    world.send(wanted(1, 0, "first"))
    world.pass_ms(2_000)
    world.send([*wanted(2, 2_600, "left"), *wanted(2, 60_000, "later")])
    world.settle()
    world.outside.targets[TARGET_IDS[0]].hangs = True
    world.pass_ms(2_000)
    world = world.after_crash()
    world.pass_ms(1_000)
    asked = world.receipts("left", "later")
    assert cancel(world, asked) == [IN_FLIGHT, IN_FLIGHT, CANCELLED, CANCELLED]
    world.outside.targets[TARGET_IDS[0]].hangs = False
    end(world)
    assert cancel(world, asked) == [DISPATCHED, DISPATCHED, CANCELLED, CANCELLED]


def test_made_up_receipts_are_unknown_and_change_nothing() -> None:
    world = World()
    world.send([*wanted(2, 5_000, "near"), *wanted(2, 50 * HOUR_MS, "far")])
    world.settle()
    world.checkpoint()
    asked = world.receipts("near", "far")
    other_due = Asked(asked.sequences, asked.deliver_at_ms + 1, asked.accepted_at_ms)
    other_hour = Asked(asked.sequences, asked.deliver_at_ms, asked.accepted_at_ms + 200 * HOUR_MS)
    other_row = Asked(asked.sequences + np.uint64(1_000), asked.deliver_at_ms, asked.accepted_at_ms)
    for forged in (other_due, other_hour, other_row):
        assert cancel(world, forged) == [UNKNOWN] * 4
        assert world.states(forged) == [MessageState.UNKNOWN] * 4
    assert world.states(asked) == [MessageState.PENDING] * 4
    world.outside.cancel_asked.clear()
    end(world)


def test_one_request_may_name_a_row_twice_but_not_with_two_instants() -> None:
    world = World()
    world.send(wanted(2, 5_000, "near"))
    world.settle()
    asked = world.receipts("near")
    assert cancel(world, asked.take([1, 0, 1])) == [CANCELLED] * 3
    forged = asked.take([0, 0])
    forged.deliver_at_ms[1] += 1
    with pytest.raises(BadRequest, match="different instants"):
        world.cancel(forged)


def test_two_requests_for_one_row_in_one_commit_are_answered_when_it_is_durable() -> None:
    world = World(load_ahead_ms=1_000)
    world.send([*wanted(2, 5_000, "near"), *wanted(2, 50 * HOUR_MS, "far")])
    world.settle()
    world.send(wanted(1, 7_000, "other"))
    asked = world.receipts("near", "far")
    first, second = world.cancel(asked), world.cancel(asked)
    assert not first and not second, "nothing is durable yet"
    world.settle()
    assert first == second == [[CANCELLED] * 4]
    end(world)


@pytest.mark.parametrize("due_ms", [5_000, 40 * HOUR_MS])
def test_a_full_disk_undoes_the_claims(due_ms: int) -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(3, due_ms, "row"))
    world.settle()
    asked = world.receipts("row")
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    assert not world.cancel(asked)
    world.settle()
    assert isinstance(world.outside.refused[-1][1], DiskReserve)
    world.disk.capacity_bytes = capacity
    world.look_around()
    assert world.states(asked) == [MessageState.PENDING] * 3
    assert cancel(world, asked.take([1])) == [CANCELLED]
    end(world)


def test_a_row_that_falls_due_while_its_cancel_is_written_is_delivered_when_the_write_fails() -> None:
    world = World()
    world.send(wanted(2, 2_000, "row"))
    world.pass_ms(1_990)
    asked = world.receipts("row")
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    told = world.cancel(asked.take([0]))
    world.clock.advance(50)
    world.core.wake()
    world.settle()
    world.disk.capacity_bytes = capacity
    assert not told
    end(world)
    assert not world.outside.cancelled


@pytest.mark.parametrize("checkpointed", [False, True])
def test_rule_C2_a_decision_outlives_a_crash_before_its_outcome_is_durable(checkpointed: bool) -> None:
    world = World(load_ahead_ms=1_000, outcomes_flush_ms=10_000)
    world.send([*wanted(3, 20_000, "near"), *wanted(3, 40 * HOUR_MS, "far"), *wanted(2, 20_500, "kept")])
    world.settle()
    asked = world.receipts("near", "far")
    assert cancel(world, asked) == [CANCELLED] * 6
    assert not world.cancelled(), "no outcome is durable yet"
    if checkpointed:
        world.checkpoint()
    world.settings["outcomes_flush_ms"] = 20
    world = world.after_crash()
    assert world.states(asked) == [MessageState.CANCELLED] * 6
    assert cancel(world, asked) == [CANCELLED] * 6
    end(world)


@pytest.mark.parametrize("delivered", [False, True])
def test_rows_of_an_hour_that_was_loaded_since_the_last_checkpoint_are_cancelled_in_the_wheel(delivered: bool) -> None:
    # They came before their hour was loaded, and no checkpoint has passed them: the pending columns still have them.
    world = World(load_ahead_ms=60_000, checkpoint_every_ms=HOUR_MS)
    world.clock.advance(HOUR_MS // 2)
    world.pass_ms(500)
    world.checkpoint()
    world.send(wanted(4, HOUR_MS + 5_000, "row"))
    world.settle()
    asked = world.receipts("row")
    world.clock.advance(HOUR_MS // 2 - 30_000)
    world.pass_ms(2_000)
    assert cancel(world, asked.take([0])) == [CANCELLED]
    if delivered:
        world.pass_ms(40_000)
        assert cancel(world, asked) == [CANCELLED, DISPATCHED, DISPATCHED, DISPATCHED]
    end(world)
    assert cancel(world, asked) == [CANCELLED, DISPATCHED, DISPATCHED, DISPATCHED]


@pytest.mark.parametrize("moved", [False, True])
def test_rows_that_are_filed_before_their_decision_are_looked_for_anew(moved: bool) -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(40, 40 * HOUR_MS, "far"))
    world.settle()
    asked = world.receipts("far")
    commit, _, worker = world.executors()
    covered: list[int] = []
    world.core.checkpoint(covered.append)
    while not worker.waiting:
        world.clock.advance(1_000)
        world.core.wake()
    world.send(wanted(1, 0, "other"))
    assert commit.waiting, "decisions wait for the commit that is under way"
    moves = world.reschedule(asked, *(asked.deliver_at_ms + HOUR_MS).tolist()) if moved else []
    cancels = [] if moved else world.cancel(asked)
    while not covered:
        (worker.run_one if worker.waiting else worker.complete_one)()
        world.core.wake()
    world.settle()
    if moved:
        (answers,) = moves
        assert (answers["answer"] == RescheduleAnswer.MOVED).all()
    else:
        assert cancels == [[CANCELLED] * 40]
    end(world)


def test_a_row_whose_outcome_is_written_during_the_look_up_is_not_unknown() -> None:
    world = World(outcomes_flush_ms=5_000)
    world.send(wanted(1, 0, "the hour has a dispatch log"))
    world.pass_ms(7_000)
    world.send(wanted(1, 0, "row"))
    world.pass_ms(1_000)
    asked = world.receipts("row")
    answers: list[AnswerRows | DelaydError] = []
    world.core.endings.get(asked, answers.append)
    outcomes = world.executors()[1]
    world.clock.advance(5_000)
    world.core.wake()
    assert outcomes.waiting, "the outcome is not written yet"
    while outcomes.waiting or outcomes.ran:
        (outcomes.run_one if outcomes.waiting else outcomes.complete_one)()
    world.settle()
    (answer,) = answers
    assert not isinstance(answer, DelaydError)
    assert MessageState(answer["state"][0]) is MessageState.DISPATCHED
    end(world)


def test_a_row_that_another_request_is_cancelling_is_not_unknown() -> None:
    world = World(outcomes_flush_ms=5_000)
    world.send(wanted(1, 0, "the hour has a dispatch log"))
    world.pass_ms(7_000)
    world.meta_up = False
    world.send(wanted(1, 0, "due", b"of.unknown.server"))
    world.pass_ms(100)
    asked = world.receipts("due")
    commit, outcomes, _ = world.executors()
    world.cancel(asked)
    assert commit.waiting, "it is claimed, and not durable"
    answers: list[AnswerRows | DelaydError] = []
    world.core.endings.get(asked, answers.append)
    while commit.waiting or commit.ran:
        (commit.run_one if commit.waiting else commit.complete_one)()
    world.clock.advance(5_000)
    world.core.wake()
    while outcomes.waiting or outcomes.ran:
        (outcomes.run_one if outcomes.waiting else outcomes.complete_one)()
    world.settle()
    (answer,) = answers
    assert not isinstance(answer, DelaydError)
    assert MessageState(answer["state"][0]) is MessageState.CANCELLED
    assert world.states(asked) == [MessageState.CANCELLED]
    end(world)


def test_decisions_whose_outcomes_become_durable_in_another_order_are_each_forgotten() -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(80, 2 * HOUR_MS, "far", every_ms=HOUR_MS))  # More hours than are written at once.
    world.send(wanted(2, 5_000, "near"))
    world.settle()
    assert cancel(world, world.receipts("far")) == [CANCELLED] * 80
    assert cancel(world, world.receipts("near")) == [CANCELLED] * 2
    world.pass_ms(1_000)
    assert len(world.core.ledger.owed) == 0
    world.check_books()


def test_rows_that_their_target_refused_are_cancelled_in_any_order() -> None:
    world = World()
    target = world.outside.targets[TARGET_IDS[0]]
    names = ("a", "b", "c")
    target.refused_bodies = {f"{name}-{row}".encode() for name in names for row in range(2)}
    target.refuse_with = BatchMalformed("no")
    for name in names:
        world.send(wanted(2, 0, name))
        world.pass_ms(500)
    for name in ("b", "c", "a"):
        assert cancel(world, world.receipts(name)) == [CANCELLED] * 2
    end(world)


def test_a_moved_clock_a_load_and_a_cancel_of_the_hour_that_is_loaded() -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(30, HOUR_MS + 500, "row"))
    world.settle()
    world.checkpoint()
    asked = world.receipts("row")
    world.clock.advance(HOUR_MS - (world.clock.now_ms() - START_MS) - 900)
    world.core.wake()
    assert cancel(world, asked.take(range(10))) in ([IN_FLIGHT] * 10, [CANCELLED] * 10)
    world.pass_ms(100)
    assert cancel(world, asked.take(range(10))) == [CANCELLED] * 10
    end(world)


def test_a_stopping_server_takes_no_request_and_a_request_names_its_log() -> None:
    world = World()
    world.send(wanted(2, 5_000, "row"))
    world.settle()
    asked = world.receipts("row")
    requests, answers = Requests(world.core, world.clock, dict), Answers()
    body = memoryview(encode_asked(asked))
    head: dict[str, HeadValue] = {"log_id": world.core.identity.log_id}
    requests.received(answers, Frame(RequestType.GET, 0, 1, head, body))
    world.settle()
    rows = decode_answers(answers.bodies[-1])
    assert rows["state"].tolist() == [MessageState.PENDING] * 2
    assert rows["deliver_at_ms"].tolist() == asked.deliver_at_ms.tolist()
    requests.received(answers, Frame(RequestType.CANCEL, 0, 2, head, body))
    world.settle()
    assert decode_answers(answers.bodies[-1])["answer"].tolist() == [CANCELLED] * 2
    with pytest.raises(UnknownServer):
        requests.received(answers, Frame(RequestType.CANCEL, 0, 3, {"log_id": 5}, body))
    assert world.stop()
    with pytest.raises(Stopping):
        requests.received(answers, Frame(RequestType.CANCEL, 0, 4, head, body))


@pytest.mark.parametrize("back_ms", [3_000, 24 * HOUR_MS])
@pytest.mark.parametrize("when", ["before the kill", "while it is down", "with a reboot"])
def test_rule_H5_a_row_that_left_before_the_clock_was_set_back_is_in_flight(back_ms: int, when: str) -> None:
    world = World()
    world.send(wanted(1, 0, "first"))
    world.pass_ms(2_000)
    world.send([*wanted(2, 600_000, "left"), *wanted(1, 50 * HOUR_MS, "later")])
    world.settle()
    world.checkpoint()
    world.outside.targets[TARGET_IDS[0]].hangs = True
    world.pass_ms(601_000)
    if when == "before the kill":
        world.clock.step_wall(-back_ms)
        world.settle()
    remains = world.remains()
    evidence = world.clock.restart_evidence()
    if when != "before the kill":
        world.clock.step_wall(-back_ms)
    if when == "with a reboot":
        world.clock.machine.reboot()
    world = World(dataclasses.replace(remains, clock=SimClock(machine=world.clock.machine, previous=evidence)))
    world.pass_ms(100)
    assert cancel(world, world.receipts("left")) == [IN_FLIGHT, IN_FLIGHT]
    assert cancel(world, world.receipts("later")) == [CANCELLED]


def test_a_row_of_a_sealed_hour_is_known_in_each_later_life_as_long_as_the_logs_are_kept() -> None:
    world = World(load_ahead_ms=1_000, retention_hours=1)
    world.send(wanted(2, 500, "sent"))
    world.send(wanted(1, 500, "gone"))
    world.settle()
    cancel(world, world.receipts("gone"))
    world.drain()
    world.check_sealing()
    later = world.after_crash()
    assert later.states(later.receipts("sent", "gone")) == [MessageState.DISPATCHED] * 2 + [MessageState.CANCELLED]
    assert cancel(later, later.receipts("sent", "gone")) == [DISPATCHED, DISPATCHED, CANCELLED]
    later.clock.advance(2 * HOUR_MS)
    later.delete_hours()
    assert later.states(later.receipts("sent", "gone")) == [MessageState.UNKNOWN] * 3
