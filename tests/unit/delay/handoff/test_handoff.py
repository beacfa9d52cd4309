"""The handoff, seen from the delay server: sessions, windows, W, and what is sent again (rules H1 to H7)."""

import pytest

from delayd.delay.handoff.link import Phase
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.requests import RequestType
from tests.unit.delay.handoff import TARGET, cable_of, link_of, put_on_cable, ready_world, run_threads, target_of
from tests.worlds.delay import World, new_world, wanted


def test_rule_H5_a_note_is_durable_before_the_first_batch_leaves() -> None:
    world = World()
    world.send(wanted(1, 0, "a"))
    run_threads(world)
    world.answer_routes()
    commit = world.executors()[0]
    assert commit.waiting == 1 and not world.cables
    commit.run_one()
    assert not world.cables
    after = world.after_crash(PowerLoss.ALL_LOST)
    assert after.core.handoff.dispatcher.targets == {b"orders.eu": TARGET}
    commit.complete_one()
    assert len(world.cables) == 1


def test_rule_H5_notes_survive_checkpoints_and_crashes_in_any_order() -> None:
    world = World()
    world.send(wanted(1, 0, "a"))
    world.settle()
    for _ in range(3):
        world = world.after_crash(PowerLoss.ALL_LOST)
        assert world.core.handoff.dispatcher.targets == {b"orders.eu": TARGET}
        assert TARGET in world.core.handoff.dispatcher.links
        world.send(wanted(1, 100_000_000, "far"))
        world.settle()
        world.checkpoint()


def test_rule_H4_nothing_is_sent_before_the_window_was_answered() -> None:
    world = World()
    world.send(wanted(3, 0, "a"))
    run_threads(world)
    world.answer_routes()
    run_threads(world)
    cable = cable_of(world)
    cable.carry_down()
    run_threads(world)
    assert [call.asked.kind for call in cable.up] == [RequestType.HELLO]
    cable.carry_up()
    run_threads(world)
    assert not cable.up
    cable.carry_down()
    assert [call.asked.kind for call in cable.up] == [RequestType.DISPATCH]


def test_rule_H4_nothing_is_sent_before_the_answered_rows_are_durable() -> None:
    world = ready_world()
    put_on_cable(world, 2)
    cable_of(world).carry_up()
    target_of(world).sync()
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.send(wanted(1, 0, "other"))
    run_threads(world)
    world.look_around()
    cable = cable_of(world)
    for _ in range(10):
        if link_of(world).phase is Phase.RECORDING:
            break
        (cable.carry_down if cable.down else cable.carry_up)()
    outcomes = world.executors()[1]
    assert link_of(world).phase is Phase.RECORDING and outcomes.waiting == 1 and not cable.up
    outcomes.run_one()
    world.core.wake()
    assert not cable.up
    assert set(world.outcomes()) == {1, 2, 3}
    outcomes.complete_one()
    assert [call.asked.kind for call in cable.up] == [RequestType.DISPATCH]
    world.drain()
    world.check_books()


def test_rule_H4_answered_rows_of_sealed_and_of_deleted_hours_are_ignored() -> None:
    world = ready_world(retention_hours=1)
    assert target_of(world).log[0].key == (1, 1)
    world.clock.advance(3_700_000)
    world.pass_ms(2_000)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    assert world.hours().unsealed(10**6) == [] and len(world.hours()) == 1
    sealed = world.after_crash(PowerLoss.ALL_LOST)
    sealed.drain()
    assert target_of(sealed).lives == 1 and link_of(sealed).phase is Phase.READY
    assert len(sealed.outcomes()) == 1
    world.clock.advance(3_700_000)
    world.pass_ms(2_000)
    world.delete_hours()
    assert not world.hours() and not world.outcomes()
    deleted = world.after_crash(PowerLoss.ALL_LOST)
    deleted.drain()
    assert link_of(deleted).phase is Phase.READY
    assert not deleted.outcomes()


def test_rule_H1_w_is_nothing_while_an_earlier_epoch_is_undecided() -> None:
    world = ready_world().after_crash(PowerLoss.ALL_LOST)
    world.look_around()
    cable = cable_of(world)
    cable.carry_down()
    assert cable.up[0].asked.head["w"] == [0, 0]
    world.settle()
    assert link_of(world).sender.window.w == (2, 0)


def test_rule_H1_w_passes_a_batch_only_when_its_outcome_is_durable() -> None:
    world = ready_world()
    put_on_cable(world, 1)
    cable = cable_of(world)
    cable.carry_up()
    target_of(world).sync()
    cable.carry_down()
    window = link_of(world).sender.window
    assert window.w == (1, 1) and len(window) == 1
    world.clock.advance(50)
    world.core.wake()
    outcomes = world.executors()[1]
    outcomes.run_one()
    assert window.w == (1, 1)
    outcomes.complete_one()
    assert window.w == (1, 2) and not len(window)


def test_rule_H1_w_ends_the_contiguous_prefix_of_decided_batches() -> None:
    world = ready_world(frame_rows_max=1)
    put_on_cable(world, 3)
    cable = cable_of(world)
    assert len(cable.up) == 3
    sender = link_of(world).sender
    # The second and third are acknowledged; of the first nothing is known yet.
    for batch_id in (3, 4):
        sent = sender.window.get(batch_id)
        assert sent is not None
        sender.acknowledge(sent, 1_000 * batch_id, 1)
    world.clock.advance(50)
    run_threads(world)
    assert sender.window.w == (1, 1) and len(sender.window) == 1
    sender.window.decide(2)
    assert sender.window.w == (1, 4)


def test_rule_H1_a_batch_has_rows_of_one_subject_and_one_hour_and_a_frame_has_many() -> None:
    world = World(new_world(now_ms=1_800_000_000_000 + 3_599_000))
    rows = [row for n in range(4) for row in wanted(1, 3_599_000 + 500 * n, f"m{n}", (b"mail", b"orders.eu")[n % 2])]
    world.meta_up = False
    world.send(rows)
    world.pass_ms(2_500)
    world.meta_up = True
    world.pass_ms(2_500)
    kept = target_of(world).log
    assert {(batch.subject, batch.part.hour, batch.bodies) for batch in kept} == {
        (b"mail", 500_000, (b"m0-0",)),
        (b"orders.eu", 500_000, (b"m1-0",)),
        (b"mail", 500_001, (b"m2-0",)),
        (b"orders.eu", 500_001, (b"m3-0",)),
    }


def test_rule_H2_undecided_batches_are_bounded_in_frames_and_in_bytes() -> None:
    world = ready_world(frame_rows_max=2, frames_in_flight_max=3)
    put_on_cable(world, 20)
    assert len(cable_of(world).up) == 3
    bytes_of_one = link_of(world).sender.window.size_bytes // 3
    small = ready_world(frame_rows_max=2, frame_bytes_max=100, frames_in_flight_max=8, undecided_bytes_max=800)
    put_on_cable(small, 20)
    assert 0 < len(cable_of(small).up) < 8
    assert link_of(small).sender.window.size_bytes < 800 + bytes_of_one


def test_an_answer_makes_room_and_the_next_frame_leaves_at_once() -> None:
    world = ready_world(frame_rows_max=2, frames_in_flight_max=1)
    put_on_cable(world, 6)
    cable = cable_of(world)
    cable.carry_up()
    target_of(world).sync()
    assert not cable.up
    cable.carry_down()
    assert len(cable.up) == 1


def test_rows_that_never_arrived_are_sent_again_and_those_that_did_are_not() -> None:
    world = ready_world(frame_rows_max=1)
    put_on_cable(world, 3)
    cable_of(world).carry_up()  # The first arrives, and its answer is lost.
    world.cut(TARGET)
    world.drain()
    world.check_books()
    assert [kept.bodies for kept in target_of(world).log] == [(b"first-0",), (b"a-0",), (b"a-1",), (b"a-2",)]


def test_rule_H3_bytes_of_an_older_session_that_arrive_late_are_fenced() -> None:
    world = ready_world()
    put_on_cable(world, 2)
    old = cable_of(world)
    world.cut(TARGET, keep=1)
    while old.down:
        old.carry_down()
    held = old.up.popleft()
    world.pass_ms(3_000)
    world.check_books()
    old.up.append(held)
    world.cables.append(old)
    world.settle()
    assert target_of(world).fenced == 1
    world.drain()
    world.check_books()


def test_rule_H3_sessions_rise_within_a_life_and_epochs_with_each_start() -> None:
    world = ready_world()
    for session in (2, 3, 4):
        world.cut(TARGET)
        world.pass_ms(1_000)
        assert target_of(world).origin[0] == 1 and target_of(world)._heard == (1, session)
    for epoch in (2, 3):
        world = world.after_crash(PowerLoss.ALL_LOST)
        world.pass_ms(100)
        assert target_of(world)._heard == (epoch, 1)


def test_rule_H3_the_epoch_is_durable_before_anything_else() -> None:
    world = ready_world()
    remains = world.remains()
    remains.disk.faults.crash_on = "commit"
    with pytest.raises(Crash):
        World(remains)
    assert not any(name.startswith("write") for name in remains.disk.operations)
    assert World(remains.after_crash(PowerLoss.ALL_LOST)).core.site.identity.epoch == 2


def test_rule_H6_the_window_answers_all_that_the_lost_acknowledgement_said() -> None:
    world = ready_world()
    put_on_cable(world, 2)
    cable_of(world).carry_up()
    target_of(world).sync()
    (_, kept) = target_of(world).log
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.drain()
    world.check_books()
    assert world.outcomes()[2] == (kept.part.hour, TARGET, kept.offset, kept.part.batch_id)
    assert len(target_of(world).log) == 2
