"""Dispatch: what is due leaves, what can't leave waits and holds up nobody, and what is refused is given up late."""

import numpy as np
import pytest

from delayd.delay.books.outcomes import list_dispatch_logs, read_outcomes
from delayd.delay.core import DelayCore
from delayd.delay.handoff.link import Link
from delayd.delay.handoff.sender import BATCHES_A_FRAME, REFUSED_AGAIN_MS
from delayd.errors import BatchMalformed, DiskReserve, DispatchRefused
from delayd.hours import hour_of_ms
from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import DEAD, SEALED, NewPart, Outcome, encode_outcomes
from delayd.log.segment import FileHeader, FileKind, create_segment, open_segment
from delayd.testing.clock import START_MS, SimClock
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import FOLDER, TARGET_IDS, World, new_world, wanted
from tests.worlds.target import FakeTarget

TARGET = TARGET_IDS[0]
HOUR = hour_of_ms(START_MS)


def target_of(world: World, log_id: int = TARGET) -> FakeTarget:
    return world.outside.targets[log_id]


def link_of(world: World, log_id: int = TARGET) -> Link:
    return world.core.handoff.dispatcher.links[log_id]


def dead_of(world: World) -> list[int]:
    """Sequences that are DEAD in the dispatch log of the first hour."""
    found: list[int] = []
    for _, path in list_dispatch_logs(world.disk, FOLDER):
        rows = read_outcomes(open_segment(world.disk, path, FileKind.DISPATCH, None, write=False))
        dead = rows.parts["outcome"][rows.part_of] == Outcome.DEAD
        found.extend(rows.sequences[dead].tolist())
    return found


def test_rows_without_a_route_wait_and_leave_when_there_is_one() -> None:
    world = World()
    world.meta_up = False
    world.send(wanted(3, 0, "a"))
    world.pass_ms(3_000)
    assert world.core.standing.counters()["waiting_rows"] == 3 and not target_of(world).log
    world.meta_up = True
    world.pass_ms(2_000)
    assert world.core.standing.counters()["waiting_rows"] == 0
    world.check_books()


def test_rows_without_a_route_survive_a_crash() -> None:
    world = World()
    world.meta_up = False
    world.send(wanted(3, 0, "a"))
    world.pass_ms(1_000)
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.drain()
    world.check_books()


def test_one_target_that_is_dead_delays_no_other() -> None:
    world = World(new_world(TARGET_IDS))
    world.crash_target(TARGET)
    subjects = [b"a", b"b"]
    assert {world.target_of(subject) for subject in subjects} == set(TARGET_IDS)
    for index, subject in enumerate(subjects):
        world.send(wanted(5, 1_000, f"m{index}", subject))
    world.pass_ms(1_100)
    assert sum(len(kept.bodies) for kept in target_of(world, TARGET_IDS[1]).log) == 5
    assert world.core.standing.counters()["waiting_rows"] == 5
    world.drain()
    world.check_books()


def test_rows_leave_in_the_order_in_which_they_come_due() -> None:
    world = World(None, core=DelayCore, seed=0, frame_rows_max=2)
    rows = wanted(9, 1_000, "m", every_ms=3)
    world.send(rows[::2])
    world.send(rows[1::2][::-1])
    world.pass_ms(1_500)
    assert [body for kept in target_of(world).log for body in kept.bodies] == [body for _, _, body in rows]


def test_rows_of_more_subjects_than_a_frame_takes_leave_in_the_next_frames_in_their_order() -> None:
    world = World(None, core=DelayCore, seed=0, segment_bytes=1 << 20)
    world.meta_up = False
    count = BATCHES_A_FRAME + 20
    world.send([row for n in range(count) for row in wanted(1, 0, f"m{n:04}", b"subject%04d" % n)])
    world.pass_ms(500)
    world.meta_up = True
    world.pass_ms(3_000)
    world.check_books()
    assert len(target_of(world).log) == count


def test_rule_S3_rows_refused_by_name_are_tried_again_alone_while_others_go_on() -> None:
    world = World()
    target = target_of(world)
    target.refused_bodies, target.refuse_with = {b"bad-0"}, BatchMalformed("no")
    world.send([*wanted(1, 0, "bad", b"mail"), *wanted(2, 0, "good", b"orders.eu")])
    world.pass_ms(REFUSED_AGAIN_MS - 100)
    assert target.refused == 1 and not target.log
    world.pass_ms(200)
    assert [kept.bodies for kept in target.log] == [(b"good-0", b"good-1")]
    world.pass_ms(5 * REFUSED_AGAIN_MS)
    assert 5 <= target.refused <= 8
    target.refuse_with = None
    world.pass_ms(2 * REFUSED_AGAIN_MS)
    world.check_books()


@pytest.mark.parametrize("error", [BatchMalformed("no"), DispatchRefused("no")])
def test_rule_S3_rows_are_dead_when_they_were_refused_for_long_enough(error: BatchMalformed | DispatchRefused) -> None:
    world = World(None, core=DelayCore, seed=0, dispatch_give_up_after_ms=5_000)
    target = target_of(world)
    target.refused_bodies, target.refuse_with = {b"bad-1"}, error
    world.send(wanted(2, 0, "bad"))
    world.send(wanted(1, 0, "good", b"mail"))
    world.pass_ms(4_500)
    assert world.core.standing.counters()["dead_rows"] == 0
    world.pass_ms(2_500)
    assert world.core.standing.counters()["dead_rows"] == 2
    assert dead_of(world) == [1, 2]
    target.refuse_with = None
    again = world.after_crash(PowerLoss.ALL_LOST)
    again.pass_ms(5_000)
    assert [kept.bodies for kept in target_of(again).log] == [(b"good-0",)]


def test_rule_S3_time_during_which_a_target_is_away_makes_nothing_dead() -> None:
    world = World(None, core=DelayCore, seed=0, dispatch_give_up_after_ms=15_000)
    target = target_of(world)
    target.refused_bodies, target.refuse_with = {b"bad-0"}, BatchMalformed("no")
    world.send(wanted(1, 0, "bad"))
    world.pass_ms(1_500)
    assert target.refused >= 1
    for _ in range(4):
        world.crash_target(TARGET)
        world.pass_ms(20_000)
        target.restart()
        world.pass_ms(3_000)
        assert world.core.standing.counters()["dead_rows"] == 0
    target.refuse_with = None
    world.drain()
    world.check_books()


def test_rule_S2_an_hour_with_dead_rows_seals_and_is_not_deleted() -> None:
    world = World(None, core=DelayCore, seed=0, dispatch_give_up_after_ms=1_000, retention_hours=1)
    target = target_of(world)
    target.refused_bodies, target.refuse_with = {b"bad-0"}, BatchMalformed("no")
    world.send(wanted(1, 0, "bad"))
    world.pass_ms(5_000)
    assert world.core.standing.counters()["dead_rows"] == 1
    for _ in range(4):
        world.clock.advance(3_700_000)
        world.pass_ms(2_000)
        world.checkpoint()
        world.core.sweep()
        world.settle()
    assert world.hours().get(HOUR).flags == SEALED | DEAD


def test_a_target_that_says_later_is_left_alone_for_so_long() -> None:
    world = World()
    world.send(wanted(1, 0, "a"))
    world.pass_ms(200)
    target = target_of(world)
    target.refusals = [DiskReserve("full", retry_after_ms=2_000)]
    world.send(wanted(3, 300, "b"))
    world.pass_ms(1_900)
    assert target.refused == 1 and len(target.log) == 1
    world.pass_ms(600)
    world.check_books()
    assert [kept.bodies for kept in target.log[1:]] == [(b"b-0", b"b-1", b"b-2")]


def test_a_clock_that_is_set_back_puts_rows_back_that_are_not_due_any_more() -> None:
    world = World()
    world.crash_target(TARGET)
    world.send(wanted(2, 500, "a"))
    world.pass_ms(1_000)
    assert world.core.standing.counters()["waiting_rows"] == 2
    world.clock.step_wall(-60_000)
    target_of(world).restart()
    world.pass_ms(5_000)
    assert not target_of(world).log and world.core.standing.counters()["loaded_rows"] == 2
    world.pass_ms(56_000)
    world.check_books()


def test_a_clock_that_is_set_back_an_hour_before_the_first_message_stops_no_server() -> None:
    world = World()
    world.clock.step_wall(-3_600_000)
    world.send([*wanted(2, -3_599_000, "early"), *wanted(2, 500, "late")])
    world.pass_ms(2_000)
    assert [kept.bodies for kept in target_of(world).log] == [(b"early-0", b"early-1")]
    world.drain(8_000_000)
    world.check_books()


def test_rule_T1_nothing_leaves_by_a_clock_that_nobody_has_confirmed() -> None:
    world = World()
    world.send(wanted(2, 3_600_000, "a"))
    world.settle()
    remains = world.remains(PowerLoss.ALL_LOST)
    evidence = world.clock.restart_evidence()
    remains.outside.machine.reboot()
    remains.outside.machine.step_wall(7_200_000)
    clock = SimClock(machine=remains.outside.machine, previous=evidence)
    assert not clock.confirmed
    booted = World(type(remains)(remains.disk, remains.state, remains.outside, clock))
    booted.pass_ms(20_000)
    assert not target_of(booted).log
    booted.clock.step_wall(-7_200_000)
    booted.pass_ms(20_000)
    assert not target_of(booted).log and booted.clock.confirmed
    booted.drain(8_000_000)
    booted.check_books()


def test_rule_T1_no_producer_is_forgotten_by_an_unconfirmed_clock() -> None:
    world = World()
    number = world.send(wanted(1, 100_000_000, "a"))
    world.settle()
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    evidence = world.clock.restart_evidence()
    remains.outside.machine.reboot()
    remains.outside.machine.step_wall(3 * 86_400_000)
    clock = SimClock(machine=remains.outside.machine, previous=evidence)
    booted = World(type(remains)(remains.disk, remains.state, remains.outside, clock))
    booted.checkpoint()
    booted.send_again(number)
    booted.settle()
    assert booted.core.logs.intake.next_sequence == 2


def test_rule_L8_a_full_disk_under_the_dispatch_logs_stops_sending_and_recovers_by_itself() -> None:
    world = World(None, core=DelayCore, seed=0, frames_in_flight_max=1, frame_rows_max=1)
    world.send(wanted(6, 1_000, "a", every_ms=100))
    world.pass_ms(900)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.pass_ms(3_000)
    sent = len(target_of(world).log)
    assert 1 <= sent <= 3 and world.core.standing.counters()["waiting_rows"] == 6 - sent
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(2_000)
    world.check_books()


def test_a_full_disk_with_refused_rows_does_not_spin() -> None:
    world = World()
    target = target_of(world)
    target.refused_bodies, target.refuse_with = {b"bad-0"}, BatchMalformed("no")
    world.send(wanted(1, 0, "bad"))
    world.send(wanted(1, 2_000, "good", b"mail"))
    world.pass_ms(1_500)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.pass_ms(1_000)
    naps = []
    for _ in range(40):
        naps.append(world.idle_ms())
        world.clock.advance(max(1, world.idle_ms()))
        world.settle()
    assert sum(nap <= 0 for nap in naps) <= 2, naps


def test_rule_L5_a_rotten_batch_is_quarantined_and_everything_else_goes_on() -> None:
    world = World(None, core=DelayCore, seed=0, tail_bytes=0)
    world.send(wanted(2, 1_000, "rotten"))
    world.settle()
    world.send(wanted(2, 1_000, "fine"))
    world.send(wanted(2, 1_200, "later"))
    world.settle()
    place = f"{FOLDER}/message/{0:020d}.log"
    file = world.disk.open(place, write=True)
    data = file.pread(file.size(), 0)
    file.pwritev([b"ROTTEN-1"], data.index(b"rotten-1"))
    world.pass_ms(3_000)
    assert world.core.standing.counters()["quarantined_rows"] == 2
    bodies = {body for kept in target_of(world).log for body in kept.bodies}
    assert bodies == {b"fine-0", b"fine-1", b"later-0", b"later-1"}


def test_rule_S1_an_hour_seals_when_each_row_has_exactly_one_outcome_and_not_before() -> None:
    world = World()
    world.send(wanted(3, 1_000, "a"))
    world.settle()
    world.crash_target(TARGET)
    world.clock.advance(3_700_000)
    world.pass_ms(2_000)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    assert not world.hours().get(HOUR).sealed
    target_of(world).restart()
    world.pass_ms(3_000)
    world.core.sweep()
    world.settle()
    assert world.hours().get(HOUR).sealed
    world.check_books()


def test_rule_S1_counters_seal_nothing() -> None:
    world = World()
    world.send(wanted(2, 0, "a"))
    world.pass_ms(500)
    world.checkpoint()
    # Two outcomes for two rows, but one of them is of a row that was never scheduled.
    path = f"{FOLDER}/dispatch/20270115/2027011508.log"
    log_id = world.core.site.identity.log_id
    world.disk.remove(path)
    segment = create_segment(world.disk, path, FileHeader(FileKind.DISPATCH, log_id, 0, HOUR, START_MS))
    part = NewPart(np.array([1, 7], np.uint64), np.array([0, 0], np.int64), Outcome.DISPATCHED)
    segment.append([NewGroup(GroupKind.DATA, [encode_outcomes(HOUR, [part])], 1, START_MS, 0, 2)])
    segment.flush()
    world.clock.advance(3_700_000)
    world.pass_ms(2_000)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    assert not world.hours().get(HOUR).sealed


def test_rule_P6_segments_go_when_no_checkpoint_reader_or_row_needs_them() -> None:
    world = World(None, core=DelayCore, seed=0, segment_bytes=4_096)
    world.crash_target(TARGET)
    for number in range(60):
        world.send(wanted(4, 1_000, f"held{number}"))
        world.settle()
    world.checkpoint()
    folder = f"{FOLDER}/message"
    before = world.disk.list_folder(folder)
    assert len(before) > 2
    world.pass_ms(310_000)
    world.core.sweep()
    world.settle()
    assert world.disk.list_folder(folder) == before
    target_of(world).restart()
    world.pass_ms(5_000)
    world.check_books()
    world.delete_hours()
    assert len(world.disk.list_folder(folder)) < len(before)
    world.send(wanted(2, 400_000, "after"))
    world.settle()
    again = world.after_crash(PowerLoss.ALL_LOST)
    again.drain(600_000)
    again.check_books()


def test_rule_P6_nothing_goes_within_minutes_of_the_checkpoint_that_passed_it() -> None:
    world = World(None, core=DelayCore, seed=0, segment_bytes=4_096, checkpoint_every_ms=3_600_000)
    for number in range(60):
        world.send(wanted(4, 0, f"m{number}"))
        world.settle()
    world.pass_ms(1_000)
    world.checkpoint()
    before = world.disk.list_folder(f"{FOLDER}/message")
    world.pass_ms(290_000)
    world.core.sweep()
    world.settle()
    assert world.disk.list_folder(f"{FOLDER}/message") == before
    world.pass_ms(15_000)
    world.sweep()
    assert world.disk.list_folder(f"{FOLDER}/message") == before, "a reader must be able to know why they are gone"
    world.send(wanted(1, 3_600_000, "later"))
    world.settle()
    world.checkpoint()
    world.sweep()
    assert len(world.disk.list_folder(f"{FOLDER}/message")) == 1
