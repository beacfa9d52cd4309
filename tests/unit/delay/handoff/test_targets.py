"""Targets that are away, elsewhere, not who they were, or make no sense (rule H7)."""

import pytest

from delayd.delay.handoff.link import Phase
from delayd.errors import InternalError
from delayd.machine.alarms import DAMAGED_AGAIN_MS
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import ANSWER, Frame, Head
from delayd.wire.requests import RequestType
from tests.unit.delay.handoff import TARGET, cable_of, link_of, put_on_cable, ready_world, run_threads, target_of
from tests.worlds.delay import World, wanted


@pytest.mark.parametrize("restarted", [False, True])
def test_rule_H7_a_target_that_lost_what_it_acknowledged_is_sent_nothing(restarted: bool) -> None:
    world = ready_world()
    if restarted:
        world = world.after_crash(PowerLoss.ALL_LOST)
    target = target_of(world)
    target.log.clear()
    target.synced = 0
    world.cut(TARGET)
    world.send(wanted(1, 0, "a"))
    world.pass_ms(10_000)
    assert "log ends at 0" in link_of(world).alarm and not target.log


def test_rule_H7_a_target_with_another_log_id_is_sent_nothing_until_the_right_one_is_back() -> None:
    world = ready_world()
    target = target_of(world)
    world.cut(TARGET)
    target.log_id = 0xBAD
    world.send(wanted(1, 0, "a"))
    world.pass_ms(5_000)
    assert "for another server" in link_of(world).alarm and len(target.log) == 1
    target.log_id = TARGET
    world.pass_ms(DAMAGED_AGAIN_MS)
    assert link_of(world).phase is Phase.READY and not link_of(world).alarm
    world.check_books()


def test_rule_H7_a_hello_names_the_target_that_it_is_for() -> None:
    world = World()
    world.send(wanted(1, 0, "a"))
    run_threads(world)
    world.answer_routes()
    run_threads(world)
    cable_of(world).carry_down()
    (call,) = cable_of(world).up
    assert call.asked.kind == RequestType.HELLO and call.asked.head["target"] == TARGET


def test_a_target_that_listens_elsewhere_is_tried_at_once_though_its_last_address_raised_the_alarm() -> None:
    world = ready_world()
    target = target_of(world)
    world.cut(TARGET)
    target.log_id = 0xBAD
    world.send(wanted(1, 0, "a"))
    world.pass_ms(1_000)
    assert link_of(world).alarm
    target.log_id = TARGET
    world.core.handoff.dispatcher.place(TARGET, f"target-{TARGET}", 2)
    world.settle()
    assert link_of(world).phase is Phase.READY and not link_of(world).alarm


def test_a_hello_that_is_refused_as_another_instance_raises_the_alarm() -> None:
    world = World()
    target_of(world).origin = (1, 12345)
    world.send(wanted(1, 0, "a"))
    world.pass_ms(1_000)
    assert "instance" in link_of(world).alarm and not target_of(world).log


def answer_with(world: World, head: Head, body: bytes = b"") -> None:
    """Answer the request that is under way with a frame that the target would not send."""
    cable = cable_of(world)
    call = cable.up.popleft()
    cable.down.append(lambda: call.on_answer(Frame(call.asked.kind, ANSWER, 0, head, memoryview(body))))


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"log_id": TARGET, "end_offset": -1, "batches": []},
        {"log_id": TARGET, "end_offset": 10_000, "batches": [[1, 1, 500_000, 0, 0, 0, 5]]},
    ],
)
def test_a_window_that_makes_no_sense_ends_the_session_and_nothing_else(head: Head) -> None:
    world = ready_world()
    world.cut(TARGET)
    world.cables[0].carry_down()
    world.clock.advance(100)
    world.core.wake()
    cable_of(world).carry_down()
    answer_with(world, head)
    world.settle()
    assert link_of(world).phase is not Phase.READY
    world.send(wanted(1, 0, "a"))
    world.drain()
    world.check_books()


@pytest.mark.parametrize("head", [{}, {"appended_at_ms": 1, "batches": []}, {"appended_at_ms": 1, "batches": [[9, 1]]}])
def test_an_acknowledgement_that_makes_no_sense_ends_the_session_and_nothing_else(head: Head) -> None:
    world = ready_world()
    put_on_cable(world, 1)
    answer_with(world, head)
    world.drain()
    world.check_books()


def test_an_error_that_says_nothing_of_the_outcome_ends_the_session_and_the_window_decides() -> None:
    world = ready_world()
    target_of(world).refusals.append(InternalError("a bug"))
    put_on_cable(world, 2)
    world.drain()
    world.check_books()
    assert target_of(world)._heard == (1, 2)


def test_a_target_that_is_away_is_tried_again_with_rising_waits() -> None:
    world = ready_world()
    world.crash_target(TARGET)
    world.settle()
    assert link_of(world).phase is Phase.CLOSED
    tries = [link_of(world)._session]
    for _ in range(10):
        world.pass_ms(1_000)
        tries.append(link_of(world)._session)
    assert tries[1] - tries[0] >= 3 and tries[-1] - tries[-3] == 1
    target_of(world).restart()
    world.pass_ms(2_100)
    assert link_of(world).phase is Phase.READY


@pytest.mark.parametrize("sent_in_vain", [False, True])
def test_rows_that_wait_for_a_target_that_is_away_are_told_also_those_that_it_was_sent(sent_in_vain: bool) -> None:
    world = ready_world()
    if sent_in_vain:
        put_on_cable(world, 2)
        world.crash_target(TARGET)
    else:
        world.crash_target(TARGET)
        world.settle()
        world.send(wanted(2, 0, "a"))
    world.pass_ms(3_000)
    (wait,) = world.core.standing.waits()
    assert wait.what == f"2 due messages for realtime server {TARGET:016x}"


def test_a_connection_that_is_lost_before_it_stood_counts_as_away() -> None:
    world = World()
    lost: list[str] = []
    world.core.handoff.dispatcher.place(TARGET, f"target-{TARGET}", 1)
    world.send(wanted(1, 0, "a"))
    target_of(world).up = False
    world.pass_ms(1_000)
    lost.append(link_of(world).phase.value)
    target_of(world).restart()
    world.drain()
    world.check_books()
    assert lost == ["closed"]


@pytest.mark.parametrize("deleted", [False, True])
def test_rule_H7_a_loss_is_noticed_after_a_restart_though_the_hours_that_name_the_offsets_are_sealed(
    deleted: bool,
) -> None:
    world = ready_world(retention_hours=1)
    older = list(target_of(world).log)
    world.send(wanted(3, 200, "a"))
    world.pass_ms(1_000)
    world.clock.advance(3_700_000)
    world.pass_ms(2_000)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    if deleted:
        world.clock.advance(3_700_000)
        world.pass_ms(2_000)
        world.delete_hours()
    assert bool(world.hours()) is not deleted and world.hours().unsealed(10**6) == []
    world = world.after_crash(PowerLoss.ALL_LOST)
    # The target comes back with a copy that was made before.
    target_of(world).log[:] = older
    target_of(world).synced = len(older)
    world.send(wanted(1, 0, "new"))
    world.pass_ms(2_000)
    assert "it had acknowledged" in link_of(world).alarm and target_of(world).log == older


def test_rule_H7_outcomes_between_the_last_checkpoint_and_the_seal_of_their_hour_count() -> None:
    world = ready_world()
    older = list(target_of(world).log)
    world.send(wanted(1, 3_500_000, "late"))
    world.settle()
    target_of(world).hangs = True
    world.clock.advance(3_499_000)
    world.pass_ms(9_000)
    # The hour is over and a checkpoint covers that; its last outcome comes only now.
    world.clock.advance(100_000)
    world.pass_ms(2_000)
    world.checkpoint()
    assert world.hours().unsealed(500_000) == [500_000]
    target_of(world).hangs = False
    world.pass_ms(12_000)
    world.core.sweep()
    world.settle()
    assert world.hours().unsealed(500_000) == []
    world = world.after_crash(PowerLoss.ALL_LOST)
    target_of(world).log[:] = older
    target_of(world).synced = len(older)
    world.pass_ms(2_000)
    assert "it had acknowledged" in link_of(world).alarm


def test_rule_H7_what_only_a_window_told_counts_after_its_hour_is_sealed() -> None:
    world = ready_world()
    older = list(target_of(world).log)
    put_on_cable(world, 2)
    cable_of(world).carry_up()
    target_of(world).sync()
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.drain()
    world.check_sealing()
    world = world.after_crash(PowerLoss.ALL_LOST)
    target_of(world).log[:] = older
    target_of(world).synced = len(older)
    world.pass_ms(2_000)
    assert "it had acknowledged" in link_of(world).alarm
