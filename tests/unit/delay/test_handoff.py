"""The handoff, seen from the delay server: sessions, windows, W, and what is sent again (rules H1 to H7)."""

import pytest

from delayd.delay.core import DelayCore
from delayd.delay.link import ALARM_RETRY_MS, Link, Phase
from delayd.errors import InternalError
from delayd.testing.clock import START_MS
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from delayd.wire.frame import ANSWER, Frame, Head
from delayd.wire.requests import RequestType
from tests.delay_harness import TARGET_IDS, World, new_world, wanted
from tests.delay_target import Cable, FakeTarget

TARGET = TARGET_IDS[0]


def target_of(world: World) -> FakeTarget:
    return world.outside.targets[TARGET]


def link_of(world: World) -> Link:
    return world.core.dispatcher.links[TARGET]


def cable_of(world: World) -> Cable:
    """The open connection."""
    (cable,) = [cable for cable in world.cables if not cable.ended]
    return cable


def ready_world(**settings: int) -> World:
    """A world whose target was greeted and whose first message was delivered and decided."""
    world = World(None, core=DelayCore, seed=0, **settings)
    world.send(wanted(1, 0, "first"))
    world.pass_ms(200)
    assert link_of(world).phase is Phase.READY and link_of(world).sender.window.w == (1, 1)
    return world


def run_threads(world: World) -> None:
    """Everything but the network and the target."""
    for _ in range(3):
        world.core.wake()
        for executor in world.executors():
            executor.run_all()


def put_on_cable(world: World, count: int) -> None:
    """Let messages ``a-0`` and so on come due; their frames are on their way, as far as the window has room."""
    world.send(wanted(count, world.clock.now_ms() - START_MS + 100, "a"))
    world.settle()
    world.clock.advance(100)
    world.core.wake()


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
    assert after.core.dispatcher.targets == {b"orders.eu": TARGET}
    commit.complete_one()
    assert len(world.cables) == 1


def test_rule_H5_notes_survive_checkpoints_and_crashes_in_any_order() -> None:
    world = World()
    world.send(wanted(1, 0, "a"))
    world.settle()
    for _ in range(3):
        world = world.after_crash(PowerLoss.ALL_LOST)
        assert world.core.dispatcher.targets == {b"orders.eu": TARGET}
        assert TARGET in world.core.dispatcher.links
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
    assert world.hours().unsealed(10**6) == [] and len(world.hours().files) == 1
    sealed = world.after_crash(PowerLoss.ALL_LOST)
    sealed.drain()
    assert target_of(sealed).lives == 1 and link_of(sealed).phase is Phase.READY
    assert len(sealed.outcomes()) == 1
    world.clock.advance(3_700_000)
    world.pass_ms(2_000)
    world.core.sweep()
    world.settle()
    assert not world.hours().files and not world.outcomes()
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
    assert World(remains.after_crash(PowerLoss.ALL_LOST)).core.identity.epoch == 2


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
    world.pass_ms(ALARM_RETRY_MS)
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
    world.core.dispatcher.place(TARGET, f"target-{TARGET}", 2)
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


def test_a_connection_that_is_lost_before_it_stood_counts_as_away() -> None:
    world = World()
    lost: list[str] = []
    world.core.dispatcher.place(TARGET, f"target-{TARGET}", 1)
    world.send(wanted(1, 0, "a"))
    target_of(world).up = False
    world.pass_ms(1_000)
    lost.append(link_of(world).phase.value)
    target_of(world).restart()
    world.drain()
    world.check_books()
    assert lost == ["closed"]
