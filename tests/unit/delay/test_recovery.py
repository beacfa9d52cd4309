"""A start finds what was promised: order, sequences, hours, what is decided, and what the next checkpoint owes."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from delayd.delay.books.dispatch_logs import read_outcomes
from delayd.delay.core import DelayCore
from delayd.delay.filing.hour_table import HourFile
from delayd.delay.quarantine import quarantine_path
from delayd.delay.recovery import recover
from delayd.delay.timers.loader import LoadedHour, load_hour
from delayd.errors import DamagedData, NewerFormat
from delayd.executor import Beside, Later
from delayd.hours import hour_name, hour_of_ms
from delayd.log.checkpoint import read_checkpoint
from delayd.log.dispatch import END_ROW, NewPart, Outcome
from delayd.log.log import segment_name
from delayd.log.schedule import decode_hours, dispatch_path
from delayd.log.segment import FileKind, open_segment
from delayd.reading import dispatch as reading
from delayd.reading.directory import find_directories
from delayd.reading.groups import file_size
from delayd.reading.schedule import take_snapshot
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash, MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.delay_harness import FOLDER, TARGET_IDS, Remains, World, new_world, wanted

HOUR_MS = 3_600_000
HOUR = hour_of_ms(START_MS)
WAYS = [None, *PowerLoss]


def reopened(world: World) -> World:
    """The next life after a power loss that took all that was not synced."""
    return world.after_crash(PowerLoss.ALL_LOST)


@pytest.mark.parametrize("way", WAYS)
def test_rule_P4_what_a_dispatch_log_has_is_not_dispatched_again(way: PowerLoss | None) -> None:
    world = World()
    world.send(wanted(3, 500, "a"))
    world.pass_ms(1_000)
    assert len(world.outcomes()) == 3
    world = world.after_crash(way)
    assert world.core.counters()["loaded_rows"] == 0
    world.drain()
    world.check_books()
    assert len(world.outside.targets[TARGET_IDS[0]].log) == 1


def test_rule_P4_a_dispatch_log_is_never_cut_to_a_checkpoint() -> None:
    world = World()
    world.send(wanted(1, 100, "a"))
    world.pass_ms(300)
    world.checkpoint()
    world.send(wanted(2, 500, "b"))
    world.pass_ms(1_000)
    told = world.outcomes()
    again = reopened(world)
    assert again.outcomes() == told and len(told) == 3


def test_rule_I5_sequences_are_never_given_twice_with_or_without_a_checkpoint() -> None:
    world = World()
    for number in range(6):
        world.send(wanted(3, HOUR_MS * 5, f"m{number}"))
        world.settle()
        if number % 2:
            world.checkpoint()
        assert world.core.intake.next_sequence == 1 + 3 * (number + 1)
        world = reopened(world)
    world.drain(8 * HOUR_MS)
    world.check_books()


def test_rule_I5_sequences_go_on_when_every_segment_but_an_empty_one_is_gone() -> None:
    world = World(None, core=DelayCore, seed=0, segment_bytes=4_096)
    for number in range(60):
        world.send(wanted(3, 0, f"m{number}"))
        world.settle()
    world.pass_ms(1_000)
    world.checkpoint()
    world.pass_ms(400_000)
    world.sweep()
    world.pass_ms(61_000)  # A checkpoint says so before anything goes.
    world.sweep()
    assert len(world.disk.list_folder(f"{FOLDER}/message")) == 1
    assert reopened(world).core.intake.next_sequence == 181


def test_rule_P5_every_unsealed_hour_up_to_the_last_append_is_loaded_when_the_clock_is_behind() -> None:
    world = World()
    world.clock.advance(3 * HOUR_MS)
    world.send(wanted(2, 3 * HOUR_MS, "a"))
    world.settle()
    world.checkpoint()
    world.crash_target(TARGET_IDS[0])
    remains = world.remains(PowerLoss.ALL_LOST)
    remains.outside.machine.step_wall(-2 * HOUR_MS)
    again = World(remains)
    assert again.core.counters()["loaded_rows"] == 2
    again.send(wanted(1, HOUR_MS, "b"))
    again.settle()
    assert again.core.intake.appended_at_ms >= START_MS + 3 * HOUR_MS
    again.drain(4 * HOUR_MS)
    again.check_books()


def test_hours_that_passed_while_the_server_was_down_are_delivered_late() -> None:
    world = World()
    world.send([row for hour in range(6) for row in wanted(2, HOUR_MS * hour + 5_000, f"m{hour}")])
    world.settle()
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    remains.outside.machine.advance(10 * HOUR_MS)
    again = World(remains)
    again.drain()
    again.check_books()
    again.check_sealing()


def test_rule_P7_an_hour_is_loaded_from_its_file_and_from_what_the_message_log_has_above_it() -> None:
    world = World(None, core=DelayCore, seed=0, checkpoint_every_ms=HOUR_MS)
    world.send(wanted(2, HOUR_MS + 1_000, "filed"))
    world.settle()
    world.checkpoint()
    world.send(wanted(2, HOUR_MS + 1_000, "logged"))
    world.settle()
    for life in (world, reopened(world)):
        life.clock.advance(HOUR_MS - 20_000)
        life.pass_ms(3_000)
        assert life.core.counters()["loaded_rows"] == 4
        life.drain()
        life.check_books()


def test_rule_P7_rows_that_arrive_while_their_hour_is_loaded_are_held_once() -> None:
    world = World(None, core=DelayCore, seed=0, checkpoint_every_ms=HOUR_MS, load_ahead_ms=20_000)
    world.send(wanted(2, HOUR_MS + 1_000, "filed"))
    world.settle()
    world.checkpoint()
    # What else the worker does after an hour is done before the load is due.
    world.clock.advance(HOUR_MS - 40_000)
    world.core.wake()
    world.settle()
    world.clock.advance(21_000)
    world.core.wake()
    worker = world.executors()[2]
    assert worker.waiting == 1
    world.send(wanted(1, HOUR_MS + 1_000, "before the load"))
    commit = world.executors()[0]
    commit.run_all()
    worker.run_one()
    world.send(wanted(1, HOUR_MS + 1_000, "during the load"))
    commit.run_all()
    world.core.checkpoint(lambda offset: None)
    assert worker.waiting == 0, "no checkpoint begins during a load"
    worker.complete_one()
    worker.run_one()
    world.send(wanted(1, HOUR_MS + 1_000, "while they are ordered"))
    commit.run_all()
    assert worker.waiting == 0
    worker.complete_one()
    assert world.core.counters()["loaded_rows"] == 5
    world.drain()
    world.check_books()


class LoadDuringCheckpoint:
    """A checkpoint under way that gives way at each of its pieces, and an hour that falls due for its load at one.

    At piece ``begin`` the loop looks for hours to load. From then on, by chance, the loop hears what the worker has
    done, or more messages of the hour come.
    """

    def __init__(self, begin: int, seed: int) -> None:
        self.world = World(None, core=DelayCore, seed=seed, load_ahead_ms=20_000)
        self.pieces = 0
        self.loads = 0  # Read while the checkpoint was under way.
        self.near = 4
        self._begin = begin
        self._draw = Random(seed)
        for name in ("filed", "logged"):
            self.world.send([*wanted(2, HOUR_MS + 1_000, name), *wanted(2, 5 * HOUR_MS, f"far {name}")])
            self.world.settle()
            if name == "filed":
                self.world.checkpoint()
        self.commit, _, self.worker = self.world.executors()

    def run(self) -> None:
        """Let the checkpoint run, and everything that comes of it."""
        worker, give_way = self.worker, self.worker.give_way

        def giving_way() -> None:
            if self.pieces == self._begin:
                self.world.clock.advance(HOUR_MS - 19_000)
                self.world.core.wake()
            self.pieces += 1
            waiting = worker.waiting
            give_way()
            self.loads += waiting - worker.waiting
            self._by_chance()

        worker.give_way = giving_way  # type: ignore[method-assign]
        self.world.core.checkpoint(lambda offset: None)
        worker.run_one()
        worker.give_way = give_way  # type: ignore[method-assign]
        while worker.waiting or worker.ran:
            if worker.waiting and self._draw.random() < 0.5:
                worker.run_one()
            self._by_chance()
        self.world.settle()

    def _by_chance(self) -> None:
        if self.worker.ran and self._draw.random() < 0.5:
            self.worker.complete_one()
        if self.near < 10 and self._draw.random() < 0.3:
            self.world.send(wanted(1, HOUR_MS + 1_000, f"more-{self.near}"))
            self.commit.run_all()
            self.near += 1


def test_rule_P7_an_hour_that_is_loaded_in_the_midst_of_a_checkpoint_is_held_once() -> None:
    pieces = loads = 0
    for seed in range(20):
        made = LoadDuringCheckpoint(seed % 5, seed)
        made.run()
        pieces, loads = max(pieces, made.pieces), loads + made.loads
        assert made.world.core._wheel.len_of(HOUR + 1) == (made.near if seed % 5 < made.pieces else 0), f"seed {seed}"
        made.world.checkpoint()
        for life in (made.world, made.world.after_crash(None)):
            life.drain(10 * HOUR_MS)
            life.check_books()
            life.check_sealing()
    assert pieces >= 4 and loads >= 14, "a load does not wait for the checkpoint's end"


def test_rule_B2_checkpoints_back_to_back_do_not_keep_an_hour_from_being_loaded() -> None:
    world = World(None, core=DelayCore, seed=0, checkpoint_bytes=1_000, load_ahead_ms=20_000)
    world.send(wanted(3, HOUR_MS + 1_000, "near"))
    world.settle()
    commit, _, worker = world.executors()
    world.clock.advance(HOUR_MS - 19_000)
    jobs = 0
    while not world.core._wheel.has_hour(HOUR + 1):
        # The flood never pauses: with each end of a checkpoint the next one is due.
        world.send(wanted(4, 100 * HOUR_MS + jobs * HOUR_MS, f"{jobs}-" + "f" * 1_000))
        commit.run_all()
        world.core.wake()
        assert worker.waiting
        worker.step()
        jobs += 1
        assert jobs <= 4, "the checkpoint under way, and a load's two jobs"
    world.drain(200 * HOUR_MS)
    world.check_books()


def test_the_loader_leaves_decided_rows_out() -> None:
    world = World()
    world.send(wanted(4, 1_000, "a"))
    world.settle()
    world.checkpoint()
    log_id, file = world.core.identity.log_id, world.hours().get(HOUR)
    loaded = load_hour(world.disk, FOLDER, log_id, HOUR, file, np.array([1, 3], np.uint64))
    assert loaded.prepared.rows["sequence"].tolist() == [2, 4] and loaded.damage is None
    nothing = load_hour(world.disk, FOLDER, log_id, HOUR + 1, HourFile())
    assert not len(nothing.prepared.rows) and nothing.damage is None


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


def damaged_dispatch_log(position: int) -> Remains:
    """What a life leaves in whose dispatch log one byte was flipped since, at a position or counted from the end."""
    world = World()
    for number in range(3):
        world.send(wanted(1, 500 * number, f"m{number}"))
        world.pass_ms(600)
    world.send(wanted(2, HOUR_MS + 5_000, "next"))
    world.settle()
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    flip(remains, position)
    return remains


def flip(remains: Remains, position: int) -> None:
    """Flip a byte of the hour's dispatch log, durably; a second time is a repair."""
    file = remains.disk.open(dispatch_path(FOLDER, HOUR), write=True)
    at = position if position > 0 else file.size() + position
    file.pwritev([bytes([file.pread(1, at)[0] ^ 0xFF])], at)
    file.sync()
    file.close()


# The first group, with others behind it; and the last one, which without the checkpoint's word is a torn tail.
@pytest.mark.parametrize("position", [200, -1])
def test_rule_L5_an_hour_whose_dispatch_log_is_damaged_is_quarantined_and_all_else_goes_on(
    position: int,
) -> None:
    remains = damaged_dispatch_log(position)
    path = dispatch_path(FOLDER, HOUR)
    size = remains.disk.open(path).size()
    world = World(remains)
    (damage,) = world.core._earlier.quarantined.values()
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


def test_a_directory_of_a_newer_format_is_refused_by_name() -> None:
    world = World()
    remains = world.remains()
    remains.state.commit([(b"format", b"\x63")])
    with pytest.raises(NewerFormat):
        World(remains)


def test_recovery_that_is_repeated_finds_the_same() -> None:
    world = World()
    world.send([*wanted(3, 500, "a"), *wanted(3, 50_000, "b", b"mail"), *wanted(2, 3 * HOUR_MS, "c")])
    world.pass_ms(1_000)
    found = []
    for _ in range(2):
        remains = world.remains(PowerLoss.ALL_LOST)
        life = World(remains)
        config = life.core._config
        again = recover(remains.disk, remains.state, remains.clock, config, life.core.identity)
        found.append((again.next_sequence, again.targets, len(again.pending), len(again.wheel), again.replay))
    assert found[0] == found[1]


def test_a_start_that_reads_log_and_hours_at_once_finds_the_same() -> None:
    world = World()
    world.send([*wanted(30, 50_000, "a"), *wanted(3, 55_000, "b", b"mail"), *wanted(2, 3 * HOUR_MS, "c")])
    world.settle()
    world.checkpoint()
    for at in range(20):  # Several groups, and none of them is full.
        world.send([*wanted(5, 50_000 + at, f"d{at}"), *wanted(1, 2 * HOUR_MS, f"e{at}")])
        world.settle()
    found = []
    for begin_load in (Later, Beside):
        remains = world.remains(PowerLoss.ALL_LOST)
        life = World(remains)
        again = recover(remains.disk, remains.state, remains.clock, life.core._config, life.core.identity, begin_load)
        rows = np.sort(again.wheel.rows_of(HOUR), order="sequence")
        assert len(rows) == 133 and len(again.pending) == 120
        found.append((rows.tobytes(), again.subjects.names, again.next_sequence, again.pending.count_by_hour()))
    assert found[0] == found[1]


def test_a_start_that_fails_leaves_nothing_that_reads_on() -> None:
    world = World()
    world.send(wanted(3, 50_000, "a"))
    world.settle()
    world.checkpoint()
    world.send(wanted(3, 50_000, "b"))
    world.settle()
    remains = world.remains(PowerLoss.ALL_LOST)
    life = World(remains)
    left: list[str] = []

    class Begun(Later[dict[int, LoadedHour]]):
        def leave(self) -> None:
            left.append("hours")

    remains.disk.remove(f"{FOLDER}/message/{segment_name(0)}")
    with pytest.raises(DamagedData):
        recover(remains.disk, remains.state, remains.clock, life.core._config, life.core.identity, Begun)
    assert left == ["hours"]


def test_rule_P2_what_a_checkpoint_counts_is_durable_before_the_state_counts_it() -> None:
    world = World()
    world.send([row for hour in range(4) for row in wanted(2, 2 * HOUR_MS + hour * HOUR_MS, f"m{hour}")])
    world.settle()
    world.disk.faults.crash_on = "commit"
    with pytest.raises(Crash):
        world.checkpoint()
    last_sync = max(i for i, name in enumerate(world.disk.operations) if name.startswith("sync_filesystem"))
    writes = [i for i, name in enumerate(world.disk.operations) if name.startswith("write /data/delay/schedule")]
    assert len(writes) == 4 and max(writes) < last_sync, "a new file is written with one call"
    again = reopened(world)
    again.drain(10 * HOUR_MS)
    again.check_books()


def test_rule_P3_the_file_is_published_after_the_state_and_says_the_same() -> None:
    world = World()
    world.send(wanted(2, 2 * HOUR_MS, "a"))
    world.settle()
    offset = world.checkpoint()
    payload = read_checkpoint(world.disk, FOLDER, world.core.identity.log_id)
    assert payload is not None
    assert (payload["replay_offset"], payload["next_sequence"], payload["epoch"]) == (offset, 3, 1)
    table = payload["hours"]
    assert isinstance(table, bytes)
    assert decode_hours(table)["rows"].tolist() == [2]
    world.send(wanted(1, 2 * HOUR_MS, "b"))
    world.settle()
    world.disk.faults.crash_on = "checkpoint"
    with pytest.raises(Crash):
        world.checkpoint()
    after = reopened(world)
    payload = read_checkpoint(after.disk, FOLDER, world.core.identity.log_id)
    assert payload is not None and payload["replay_offset"] == offset
    assert after.hours().get(HOUR + 2).rows == 3
    assert after.checkpoint() > offset


def test_rule_L5_the_file_says_how_much_of_each_dispatch_log_is_durable() -> None:
    world = World()
    world.send([*wanted(3, 500, "a"), *wanted(2, HOUR_MS + 500, "b")])
    world.settle()
    world.drain(2 * HOUR_MS)
    for _ in range(2):  # The second one has nothing that moved, and says all of it again.
        world.checkpoint()
        payload = read_checkpoint(world.disk, FOLDER, world.core.identity.log_id)
        assert payload is not None and isinstance(payload["outcomes"], bytes)
        said = {int(row["hour"]): int(row["length"]) for row in np.frombuffer(payload["outcomes"], END_ROW)}
        assert said == {hour: file_size(world.disk, dispatch_path(FOLDER, hour)) for hour in (HOUR, HOUR + 1)}


def fail_to_publish(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A second checkpoint is in the state and finds no space for its file; what is answered to who asked for it."""
    for name in ("a", "b"):
        answers: list[int] = []
        world.send(wanted(2, 2 * HOUR_MS, name))
        world.settle()
        world.core.checkpoint(answers.append)
        if name == "a":
            world.settle()
    commit = world.state.commit

    def commit_and_fill(puts: Sequence[tuple[bytes, bytes]], removes: Sequence[bytes] = ()) -> None:
        commit(puts, removes)
        world.disk.capacity_bytes = world.disk.used_bytes

    commits = world.state.commits
    with monkeypatch.context() as patched:
        patched.setattr(world.state, "commit", commit_and_fill)
        world.executors()[2].run_all()
    world.settle()
    assert not answers and world.state.commits == commits + 1
    world.disk.capacity_bytes = CAPACITY_BYTES
    return answers


def test_rule_P2_a_checkpoint_that_could_not_be_published_is_published_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    answers = fail_to_publish(world, monkeypatch)
    world.pass_ms(2_000)
    assert answers == [world.core.counters()["replay_offset"]]
    world.drain(3 * HOUR_MS)
    world.check_books()
    world.check_sealing()


def test_rule_P2_a_checkpoint_that_could_not_be_published_is_counted_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    fail_to_publish(world, monkeypatch)
    world.clock.advance(1_100)
    world.send(wanted(1, 2 * HOUR_MS, "c"))
    # The next one dies when its rows are in the schedule log and not counted: what was counted must still be there.
    world.disk.faults.crash_on = "commit"
    with pytest.raises(Crash):
        world.settle()
    again = reopened(world)
    again.drain(3 * HOUR_MS)
    again.check_books()
    again.check_sealing()


def test_what_a_failed_checkpoint_would_have_said_is_said_by_the_next() -> None:
    world = World()
    number = world.send(wanted(2, 2 * HOUR_MS, "a"))
    world.settle()
    world.disk.capacity_bytes = world.disk.used_bytes
    world.core.checkpoint(lambda offset: None)
    world.settle()
    world.disk.capacity_bytes = CAPACITY_BYTES
    world.pass_ms(1_500)
    assert world.checkpoint() == world.core.counters()["replay_offset"] == world.core.counters()["message_log_end"]
    again = reopened(world)
    assert again.core.dispatcher.targets == {b"orders.eu": TARGET_IDS[0]}
    again.send_again(number)
    again.settle()
    assert again.core.intake.next_sequence == 3


def test_a_stop_makes_everything_durable_and_the_next_start_replays_nothing() -> None:
    world = World()
    world.send([*wanted(2, 2 * HOUR_MS, "a"), *wanted(2, 500, "b")])
    world.pass_ms(600)
    assert world.stop()
    again = reopened(world)
    assert again.core.counters()["pending_rows"] == 0
    assert again.core.counters()["replay_offset"] == again.core.counters()["message_log_end"]
    again.drain(3 * HOUR_MS)
    again.check_books()


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
        # The file was opened anew, nobody has heard of it, and what was answered meanwhile waits.
        exchange = world.core._outcomes.exchange

        def exchanging(hour: int, make: Any, done: Any) -> None:
            exchange(hour, make, done)
            sequences = np.arange(1, 4, dtype=np.uint64)
            world.core._outcomes.record(
                hour, NewPart(sequences, np.zeros(3, np.int64), Outcome.DISPATCHED), lambda: None
            )
            world.core._outcomes.flush()

        monkeypatch.setattr(world.core._outcomes, "exchange", exchanging)
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
