"""Dispatch: what is due leaves, what can't leave waits and holds up nobody, and what is refused is given up late."""

import errno
import logging
import os

import pytest

from delayd.delay.books.outcomes import list_dispatch_logs, read_outcomes
from delayd.delay.core import DelayCore
from delayd.delay.handoff.sender import BATCHES_A_FRAME, REFUSED_AGAIN_MS
from delayd.errors import BatchMalformed, DiskReserve, DispatchRefused
from delayd.log.segment import FileKind, open_segment
from delayd.outcome import Outcome
from delayd.testing.disk import CAPACITY_BYTES
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import FOLDER, TARGET_IDS, World, wanted
from tests.worlds.target import FakeTarget

TARGET = TARGET_IDS[0]


def target_of(world: World, log_id: int = TARGET) -> FakeTarget:
    return world.outside.targets[log_id]


def dead_of(world: World) -> list[int]:
    """Sequences that are DEAD in the dispatch log of the first hour."""
    found: list[int] = []
    for _, path in list_dispatch_logs(world.disk, FOLDER):
        rows = read_outcomes(open_segment(world.disk, path, FileKind.DISPATCH, None, write=False))
        dead = rows.parts["outcome"][rows.part_of] == Outcome.DEAD
        found.extend(rows.sequences[dead].tolist())
    return found


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


def test_a_full_disk_of_outcomes_is_told_with_the_error_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.send(wanted(1, 2_000, "m"))
    world.pass_ms(500)
    world.disk.capacity_bytes = world.disk.used_bytes
    world.pass_ms(5_000)
    (told,) = (line for line in caplog.messages if line.startswith("dispatch_logs_full"))
    assert told.startswith("dispatch_logs_full hours=1 reason='no space is left for ")
    assert os.strerror(errno.ENOSPC) in told and "free some or move the directory to a larger disk" in told
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(5_000)
    assert caplog.messages[-1].startswith("dispatch_logs_full hours=0")
    world.check_books()


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
