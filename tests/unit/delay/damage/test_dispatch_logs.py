"""Damaged dispatch logs: their hours are quarantined, all else goes on, and what is restored is settled once."""

from typing import Any

import numpy as np
import pytest

from delayd.delay.books.dispatch_logs import read_outcomes
from delayd.delay.quarantine import quarantine_path
from delayd.errors import DamagedData
from delayd.hours import hour_name
from delayd.log.dispatch import NewPart, Outcome
from delayd.log.schedule import dispatch_path
from delayd.log.segment import FileKind, open_segment
from delayd.reading.files import origins as reading
from delayd.reading.files.directory import find_directories, take_snapshot
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.unit.delay.damage.dispatch_logs import HOUR, HOUR_MS, damaged_dispatch_log, flip
from tests.worlds.delay import FOLDER, TARGET_IDS, Remains, World, new_world, wanted


def test_rule_L5_a_damaged_group_of_an_hour_is_quarantined_and_the_others_are_delivered() -> None:
    world = World()
    world.send(wanted(2, HOUR_MS + 5_000, "fine"))
    world.settle()
    world.checkpoint()
    world.send(wanted(2, HOUR_MS + 5_000, "rotten"))
    world.settle()
    world.checkpoint()
    path = f"{FOLDER}/schedule/20270115/2027011509.log"
    file = world.disk.open(path, write=True)
    file.pwritev([b"ROTTEN-0"], file.pread(file.size(), 0).index(b"rotten-0"))
    world.clock.advance(HOUR_MS)
    world.pass_ms(10_000)
    assert {body for kept in world.outside.targets[TARGET_IDS[0]].log for body in kept.bodies} == {b"fine-0", b"fine-1"}
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    assert not world.hours().get(HOUR + 1).sealed


# The first group, with others behind it; and the last one, which without the checkpoint's word is a torn tail.
@pytest.mark.parametrize("position", [200, -1])
def test_rule_L5_an_hour_whose_dispatch_log_is_damaged_is_quarantined_and_all_else_goes_on(
    position: int,
) -> None:
    remains = damaged_dispatch_log(position)
    path = dispatch_path(FOLDER, HOUR)
    size = remains.disk.open(path).size()
    world = World(remains)
    (damage,) = world.core._mending._damaged.values()
    assert damage.path == path and 64 <= damage.position < size
    assert world.core.counters()["quarantined_hours"] == 1
    before = {body for target in world.outside.targets.values() for kept in target.log for body in kept.bodies}
    world.send([*wanted(1, 60_500, "into the hour"), *wanted(1, 2 * HOUR_MS, "later")])
    world.settle()
    world.clock.advance(3 * HOUR_MS)
    world.pass_ms(40_000)
    world.checkpoint()
    sent = {body for target in world.outside.targets.values() for kept in target.log for body in kept.bodies} - before
    assert sent == {b"next-0", b"next-1", b"later-0"}, "nothing of the hour is sent, as it may have been sent before"
    world.sweep()
    assert not world.hours().get(HOUR).sealed and world.hours().get(HOUR + 1).sealed
    assert world.disk.open(path).size() == size, "and nothing of the damaged file is cut off"


def test_rule_L5_readers_are_told_what_was_durable_of_a_damaged_dispatch_log_also_after_a_restart() -> None:
    remains = damaged_dispatch_log(-1)
    for life in ("as it was left", "started on the damage"):
        if life != "as it was left":
            world = World(remains)
            world.checkpoint()
            remains = world.remains(PowerLoss.ALL_LOST)
        (directory,) = find_directories(remains.disk, FOLDER)
        durable = take_snapshot(remains.disk, directory).outcome_ends[HOUR]
        with pytest.raises(DamagedData, match="checksum"):
            reading.read_outcomes(remains.disk, directory, HOUR, durable=durable)


def test_rule_L5_a_quarantined_hour_goes_on_when_its_dispatch_log_is_restored() -> None:
    remains = damaged_dispatch_log(-1)
    world = World(remains)
    world.send(wanted(1, 60_500, "into the hour"))
    world.settle()
    world.clock.advance(HOUR_MS)
    world.pass_ms(10_000)
    again = world.remains(PowerLoss.ALL_LOST)
    flip(again, -1)
    life = World(again)
    life.drain()
    life.check_books()
    life.check_sealing()


def test_rule_L5_a_dispatch_log_that_is_gone_or_shorter_than_a_checkpoint_knows_is_damage() -> None:
    for length in (0, 64, 200):
        world = World()
        for number in range(3):
            world.send(wanted(1, 500 * number, f"m{number}"))
            world.pass_ms(600)
        world.checkpoint()
        remains = world.remains(PowerLoss.ALL_LOST)
        if length:
            remains.disk.open(dispatch_path(FOLDER, HOUR), write=True).truncate(length)
        else:
            remains.disk.remove(dispatch_path(FOLDER, HOUR))
        again = World(remains)
        again.drain(5_000)
        again.check_logs()
        assert again.core.counters()["quarantined_hours"] == 1


@pytest.mark.parametrize("gone", [False, True])
def test_rule_L5_a_late_outcome_cuts_nothing_off_a_closed_dispatch_log_that_was_damaged(gone: bool) -> None:
    world = World(new_world(TARGET_IDS))
    world.send([*wanted(3, 1_000, "early"), *wanted(3, 1_000, "late", b"mails")])
    away = world.target_of(b"mails")
    assert away != world.target_of(b"orders.eu")
    world.settle()
    world.crash_target(away)
    world.pass_ms(2_000)
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    world.checkpoint()
    world.sweep()
    assert world.core._outcomes.segment_of(HOUR) is None, "it was closed to be compared"
    path = dispatch_path(FOLDER, HOUR)
    size = world.disk.open(path).size()
    if gone:
        world.disk.remove(path)
    else:
        flip(Remains(world.disk, world.state, world.outside, world.clock), -1)
    world.outside.targets[away].restart()
    world.pass_ms(5_000)
    assert not world.missing(), "what this life knows to be undelivered is delivered"
    assert not world.disk.exists(path) if gone else world.disk.open(path).size() == size
    assert [entry.id for entry in world.core.quarantine] == [f"dispatch/{hour_name(HOUR)}"]
    again = world.after_crash()
    assert again.core.counters()["quarantined_hours"] == 1
    again.drain(5_000)
    again.check_logs()
    if gone:
        return
    # Restored without a restart, the file takes what stood beside it.
    flip(Remains(world.disk, world.state, world.outside, world.clock), -1)
    world.pass_ms(31_000)
    assert not len(world.core.quarantine) and not world.disk.exists(quarantine_path(FOLDER, HOUR))
    world.check_books()
    world.check_sealing()


def rot(disk: MemoryDisk, path: str) -> bytes:
    """Put another file, which does not check, in the place of one: what the first one held."""
    file = disk.open(path)
    whole = file.pread(file.size(), 0)
    put(disk, path, b"rotten" + whole[6:])
    return whole


def put(disk: MemoryDisk, path: str, data: bytes) -> None:
    disk.remove(path)
    file = disk.open(path, write=True, create=True)
    file.pwritev([data], 0)
    file.sync()
    file.close()
    disk.sync_filesystem("/")


def rotten_in_a_row(world: World, count: int) -> dict[str, bytes]:
    """Damage an hour's dispatch log, then each file that stands in for it, with an outcome in each: what they held."""
    held: dict[str, bytes] = {}
    paths = [dispatch_path(FOLDER, HOUR), *(quarantine_path(FOLDER, HOUR, number) for number in range(1, count))]
    for number, path in enumerate(paths):
        world.send([*wanted(1, 500, f"now{number}"), *wanted(1, HOUR_MS, f"next{number}")])
        world.pass_ms(1_000)
        assert f"now{number}-0".encode() not in world.missing()
        held[path] = rot(world.disk, path)
        world.pass_ms(31_000)
    world.send(wanted(1, 500, "last"))
    world.pass_ms(1_000)
    assert not world.core._outcomes.blocked and world.disk.exists(quarantine_path(FOLDER, HOUR, count))
    assert [entry.id for entry in world.core.quarantine] == [f"dispatch/{hour_name(HOUR)}"]
    return held


def test_rule_L10_however_many_files_beside_a_dispatch_log_are_damaged_all_hours_are_delivered() -> None:
    world = World()
    held = rotten_in_a_row(world, 4)
    world.clock.advance(HOUR_MS)
    world.pass_ms(2_000)
    assert not world.missing() and not world.core._outcomes.blocked
    for path, whole in held.items():
        assert len(world.core.quarantine) == 1
        put(world.disk, path, whole)
        world.pass_ms(31_000)
    assert not len(world.core.quarantine) and not world.disk.list_folder(f"{FOLDER}/quarantine")
    world.drain()
    world.check_books()
    world.check_sealing()


def test_rule_L10_a_start_on_several_damaged_files_beside_a_dispatch_log_delivers_the_other_hours() -> None:
    world = World()
    held = rotten_in_a_row(world, 3)
    last = quarantine_path(FOLDER, HOUR, 3)
    held[last] = rot(world.disk, last)
    again = World(world.remains(PowerLoss.ALL_LOST))
    again.send([*wanted(1, 500, "this hour"), *wanted(1, 3 * HOUR_MS, "later")])
    again.settle()
    again.clock.advance(3 * HOUR_MS)
    again.pass_ms(5_000)
    assert again.missing() == {b"this hour-0"}
    for path, whole in held.items():
        put(again.disk, path, whole)
    again.pass_ms(31_000)
    again.drain()
    again.check_books()
    again.check_sealing()


def test_an_operator_gives_up_only_those_files_of_an_hour_that_are_damaged() -> None:
    world = World()
    held = rotten_in_a_row(world, 3)
    second = quarantine_path(FOLDER, HOUR, 2)
    for path in held.keys() - {second}:
        put(world.disk, path, held[path])
    told: list[bool] = []
    world.core.drop(f"dispatch/{hour_name(HOUR)}", lambda done, text: told.append(done))
    world.settle()
    assert told == [True] and not len(world.core.quarantine)
    assert world.disk.list_folder(f"{FOLDER}/quarantine") == [f"{hour_name(HOUR)}.2.dispatch.dropped"]
    file = world.disk.open(dispatch_path(FOLDER, HOUR))
    assert file.pread(len(held[dispatch_path(FOLDER, HOUR)]), 0) == held[dispatch_path(FOLDER, HOUR)]


def test_rule_H4_what_a_target_answers_of_a_quarantined_hour_is_kept_for_the_restored_log() -> None:
    world = World()
    world.send(wanted(1, 0, "a"))
    world.pass_ms(600)
    world.checkpoint()
    world.send(wanted(1, 0, "in doubt"))
    held = world.outside.targets[TARGET_IDS[0]].log
    # The target has it, and its acknowledgement does not arrive.
    while not any(b"in doubt-0" in kept.bodies for kept in held):
        (world.moves() or [world.core.wake])[0]()
    world.outside.targets[TARGET_IDS[0]].sync()
    remains = world.remains(PowerLoss.ALL_LOST)
    flip(remains, 200)
    again = World(remains)
    again.send(wanted(1, HOUR_MS, "next hour"))
    again.settle()
    again.clock.advance(HOUR_MS)
    again.pass_ms(3_000)
    bodies = [body for kept in again.outside.targets[TARGET_IDS[0]].log for body in kept.bodies]
    assert bodies == [b"a-0", b"in doubt-0", b"next hour-0"], "the target is served, though it was asked of the hour"
    # By now W has passed the batch in doubt: only the file beside the damaged one still knows of it.
    twice = again.remains(PowerLoss.ALL_LOST)
    assert twice.disk.exists(quarantine_path(FOLDER, HOUR))
    restored = World(twice).remains(PowerLoss.ALL_LOST)
    flip(restored, 200)
    life = World(restored)
    life.drain()
    life.check_books()
    life.check_sealing()
    assert not life.disk.exists(quarantine_path(FOLDER, HOUR))


def away_with_a_damaged_log() -> tuple[World, int]:
    """A life that knows nothing of an hour's outcomes, for its log is damaged, with the target that got them away.

    The target has forgotten W, as it does at a restart, so its answer names what the damaged log has.
    """
    world = World(new_world((TARGET_IDS[0],)))
    for number in range(3):
        world.send(wanted(1, 500 * number, f"m{number}"))
        world.pass_ms(600)
    world.checkpoint()
    (target,) = world.outside.targets.values()
    assert len(target.log) == 3
    remains = world.remains(PowerLoss.ALL_LOST)
    flip(remains, 200)
    remains.outside.targets[target.log_id].crash(world.random)
    return World(remains), target.log_id


def outcomes_of_hour(world: World) -> list[int]:
    segment = open_segment(
        world.disk, dispatch_path(FOLDER, HOUR), FileKind.DISPATCH, world.core.identity.log_id, write=False
    )
    rows = read_outcomes(segment)
    segment.close()
    return sorted(rows.sequences.tolist())


@pytest.mark.parametrize("answered", ["behind the repair", "while it is repaired"])
def test_rule_S1_an_answer_that_comes_when_a_dispatch_log_is_restored_is_recorded_once(
    answered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, away = away_with_a_damaged_log()
    world.pass_ms(1_000)
    assert world.core.counters()["quarantined_hours"] == 1
    flip(Remains(world.disk, world.state, world.outside, world.clock), 200)
    if answered == "while it is repaired":
        # The file took what stands beside it, nobody has heard of it, and what was answered meanwhile stands beside it.
        without = world.core._outcomes.without

        def exchanging(hour: int, work: Any, done: Any) -> None:
            without(hour, work, done)
            sequences = np.arange(1, 4, dtype=np.uint64)
            world.core._outcomes.record(
                hour, NewPart(sequences, np.zeros(3, np.int64), Outcome.DISPATCHED), lambda: None
            )
            world.core._outcomes.commit()

        monkeypatch.setattr(world.core._outcomes, "without", exchanging)
    world.pass_ms(31_000)
    assert not len(world.core.quarantine)
    world.outside.targets[away].restart()
    world.pass_ms(31_000)
    assert outcomes_of_hour(world) == [1, 2, 3]
    world.drain()
    world.check_books()


def test_rule_H7_a_restored_dispatch_log_names_what_its_targets_have_again() -> None:
    world, away = away_with_a_damaged_log()
    world.core._ends._ends.clear()
    assert world.core._ends.of(away) == 0, "nothing else names it"
    flip(Remains(world.disk, world.state, world.outside, world.clock), 200)
    world.pass_ms(31_000)
    assert world.core._ends.of(away) == max(kept.offset for kept in world.outside.targets[away].log)


def unknown_end(world: World, away: int) -> World:
    """A life whose state never heard how far a target's log reaches: only the damaged log, and the target, know."""
    world.core._ends._ends.clear()
    world.outside.targets[away].restart()
    world.pass_ms(31_000)
    assert world.core.counters()["quarantined_hours"] == 1
    return world


def test_rule_H8_a_damaged_dispatch_log_makes_nobody_a_restored_delay_server() -> None:
    world, away = away_with_a_damaged_log()
    unknown_end(world, away)
    assert not world.core.fence.is_up
    world.send(wanted(1, 2 * HOUR_MS, "receipts are given, and other hours go out"))
    world.clock.advance(3 * HOUR_MS)
    world.pass_ms(40_000)
    assert len(world.outside.targets[away].log) == 4
    # The target has said how far it reaches, so that the next life knows without the log.
    assert world.core._ends.of(away) == world.outside.targets[away].log[-1].offset


def test_rule_H8_a_damaged_dispatch_log_that_is_given_up_makes_nobody_a_restored_delay_server() -> None:
    world, away = away_with_a_damaged_log()
    unknown_end(world, away)
    last = world.outside.targets[away].log[-1].offset
    assert world.core._ends.of(away) == last
    (entry,) = world.core.quarantine
    heard: list[bool] = []
    world.core.drop(entry.id, lambda done, text: heard.append(done))
    world.pass_ms(3_000)
    assert heard == [True]
    assert world.core._ends.unread == {HOUR}, "named until it is deleted: another target may have acknowledged more"
    world.checkpoint()
    again = World(world.remains(PowerLoss.ALL_LOST))
    assert again.core._ends.of(away) == last
    again.pass_ms(31_000)
    assert not again.core.fence.is_up


def test_rule_L10_a_dispatch_log_that_was_being_written_again_when_its_server_died_is_none() -> None:
    world = World()
    world.send(wanted(1, 0, "m"))
    world.pass_ms(600)
    remains = world.remains()
    path = f"{dispatch_path(FOLDER, HOUR)}.new"
    remains.disk.open(path, create=True).close()
    again = World(remains)
    again.send(wanted(1, 0, "later"))
    again.drain()
    again.check_books()
