"""A start finds what was promised: order, sequences, hours, what is decided, and what the next checkpoint owes."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from delayd.delay.core import DelayCore
from delayd.delay.filing.hour_table import HourFile
from delayd.delay.recovery import recover
from delayd.delay.timers.loader import load_hour
from delayd.errors import NewerFormat
from delayd.hours import hour_of_ms
from delayd.log.checkpoint import read_checkpoint
from delayd.log.dispatch import END_ROW
from delayd.log.group import MAGIC_BYTES
from delayd.log.schedule import decode_hours, dispatch_path
from delayd.reading.files.groups import file_size
from delayd.site import Site
from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, TARGET_IDS, Remains, World, wanted

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


def test_rule_I5_what_outcomes_name_behind_the_log_s_end_is_given_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.send(wanted(2, 300, "first"))
    world.pass_ms(500)
    world.checkpoint()
    world.send(wanted(3, 300, "old"))
    world.pass_ms(1_500)
    remains = world.remains(None)
    (name,) = remains.disk.list_folder(f"{FOLDER}/message")
    path = f"{FOLDER}/message/{name}"
    data = content(remains.disk, path)
    put(remains.disk, path, data[: data.rfind(MAGIC_BYTES)])  # The last group is gone, with which "old" was accepted.
    again = World(remains)
    number = again.send(wanted(3, 300, "new"))
    again.settle()
    assert again.outside.accepted[number][1].base_sequence == 6
    assert "log_end_lost" in caplog.text and "outcomes_up_to=5" in caplog.text
    # A later life, too, delivers the new messages: no outcome of an old one is taken for theirs.
    later = World(again.remains(None))
    later.pass_ms(10_000)
    came = [body for target in later.outside.targets.values() for kept in target.log for body in kept.bodies]
    assert sorted(came) == [b"first-0", b"first-1", b"new-0", b"new-1", b"new-2", b"old-0", b"old-1", b"old-2"]


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
    # The worker ends its other work on the hour before the load is due.
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


def test_a_directory_of_a_newer_format_is_refused_by_name() -> None:
    world = World()
    remains = world.remains()
    remains.state.commit([(b"format", b"\x63")])
    with pytest.raises(NewerFormat):
        World(remains)


def site_of(life: World, remains: Remains) -> Site:
    return Site(remains.disk, remains.state, FOLDER, life.core.identity, remains.clock, life.threads.worker)


def test_recovery_that_is_repeated_finds_the_same() -> None:
    world = World()
    world.send([*wanted(3, 500, "a"), *wanted(3, 50_000, "b", b"mail"), *wanted(2, 3 * HOUR_MS, "c")])
    world.pass_ms(1_000)
    found = []
    for _ in range(2):
        remains = world.remains(PowerLoss.ALL_LOST)
        life = World(remains)
        config = life.core._config
        again = recover(site_of(life, remains), config)
        found.append((again.next_sequence, again.targets, len(again.pending), len(again.wheel), again.replay))
    assert found[0] == found[1]


def test_a_start_finds_the_rows_of_all_groups_above_the_checkpoint() -> None:
    world = World()
    world.send([*wanted(30, 50_000, "a"), *wanted(3, 55_000, "b", b"mail"), *wanted(2, 3 * HOUR_MS, "c")])
    world.settle()
    world.checkpoint()
    for at in range(20):  # Several groups, which are indexed together.
        world.send([*wanted(5, 50_000 + at, f"d{at}"), *wanted(1, 2 * HOUR_MS, f"e{at}")])
        world.settle()
    remains = world.remains(PowerLoss.ALL_LOST)
    life = World(remains)
    again = recover(site_of(life, remains), life.core._config)
    rows = again.wheel.rows_of(HOUR)
    assert len(rows) == 133 and len(set(rows["sequence"].tolist())) == 133 and len(again.pending) == 120


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
