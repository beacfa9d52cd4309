"""What one turn of the delay server's loop works on is bounded, and work for many subjects or batches is no square."""

from functools import partial

import numpy as np
import pytest

from delayd.batch import sequences as sequences_module
from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.batch.sequences import Sequences
from delayd.delay import intake, producers
from delayd.delay.filing.checkpoint import Told
from delayd.delay.handoff import dispatcher
from delayd.delay.handoff.dispatcher import _split
from delayd.delay.handoff.waiting import WaitingRows
from delayd.delay.rows import new_rows
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.machine.executor import Priority
from delayd.testing.clock import START_MS
from tests.counts import calls
from tests.unit.delay.handoff import ready_world
from tests.unit.delay.ledger.bare import bare_ledger
from tests.worlds.delay import FOLDER, World, encode_wanted, wanted

HOUR = 500_000
DAY_MS = 24 * HOUR_MS
HOUR_OF_START = hour_of_ms(START_MS)
PIECE_OPERATIONS = 6  # To open a file, to read its head and its first group, or to append one to it.
PIECE_SYNCS = 1  # Each may take long; those of folders come by twos when a day begins.
SYNCS = ("sync ", "sync_filesystem ", "commit")


def test_rule_B2_a_herd_leaves_the_wheel_in_several_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "ROWS_A_STEP", 4)
    world = ready_world()
    world.send(wanted(10, world.clock.now_ms() - START_MS + 100, "herd"))
    world.settle()
    world.clock.advance(100)
    held = []
    for _ in range(3):
        assert (world.core.next_due_ms() or 0) <= world.clock.now_ms(), "the next turn comes at once"
        world.core.wake()
        held.append(world.core.standing.counters()["loaded_rows"])
    assert held == [6, 2, 0]
    world.drain()
    world.check_books()


def test_rule_B2_a_group_holds_so_many_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "GROUP_ROWS_MAX", 10)
    world = World()
    answered: list[int] = []
    for number in range(1, 9):
        batch = parse(encode_wanted(wanted(4, 50_000, f"m{number}"), ProducerPart(7, number, number)))
        world.core.send(batch, lambda accepted, duplicate: answered.append(len(answered)))
    commit = world.executors()[0]
    groups = []
    while commit.step():
        groups.append(len(answered))
    assert groups == [1, 3, 5, 7, 8], "two batches a group; the first was alone"


@pytest.mark.parametrize("keys", [10, 10_000])
def test_rule_B2_rows_of_many_subjects_are_told_apart_in_one_sort(keys: int) -> None:
    rows = new_rows(20_000)
    rows["subject"], rows["sequence"] = np.arange(20_000) % keys, np.arange(20_000)
    parts = _split(rows, rows["subject"])
    assert [int(part["subject"][0]) for part in parts] == list(range(keys))
    assert all(bool((np.diff(part["sequence"].astype(np.int64)) > 0).all()) for part in parts)
    assert calls(lambda: _split(rows, rows["subject"])) < 20


@pytest.mark.parametrize("batches", [200, 800])
def test_rule_B2_the_batches_of_an_answer_are_put_together_a_few_times_each(
    monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    moved: list[int] = []
    merged = sequences_module._merged

    def counting(parts: list[Sequences]) -> Sequences:
        moved.append(sum(map(len, parts)))
        return merged(parts)

    monkeypatch.setattr(sequences_module, "_merged", counting)
    known, handoff = bare_ledger({HOUR: np.arange(0, 10, dtype=np.uint64)})
    order = np.random.default_rng(1).permutation(batches)
    for number in order.tolist():
        sequences = np.arange(10 + 8 * number, 18 + 8 * number, dtype=np.uint64)
        assert known.without_outcome(HOUR, sequences).all()
        known.name(HOUR, sequences)
        assert not known.without_outcome(HOUR, sequences).any()
    assert sum(moved) <= 8 * batches * (batches.bit_length() + 1)
    known.drop_named()
    assert sum(map(len, handoff.dropped)) == 8 * batches
    assert np.array_equal(known.ended_in(range(HOUR, HOUR + 1))[HOUR], np.arange(10 + 8 * batches, dtype=np.uint64))


def test_rule_B2_what_an_answer_decides_is_dropped_a_frame_at_a_time() -> None:
    counts = []
    for parts in (10, 1_000):
        world = ready_world()
        (link,) = world.core.handoff.dispatcher.links.values()
        for number in range(parts):
            rows = new_rows(2)
            rows["hour"], rows["sequence"], rows["length"] = HOUR, [2 * number, 2 * number + 1], 64
            link.sender.waiting.add(rows)
        decided = np.arange(1_000, dtype=np.uint64)
        counts.append(calls(partial(world.core.handoff.dispatcher.drop, decided)))
    assert counts[0] == counts[1]


def test_rule_B2_a_checkpoint_of_many_producers_begins_in_several_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producers, "PIECE_PRODUCERS", 2)
    world = World()
    for producer_id in range(1, 8):
        batch = parse(encode_wanted(wanted(1, 50_000, f"m{producer_id}"), ProducerPart(producer_id, 1, 1)))
        world.core.send(batch, lambda accepted, duplicate: None)
        world.settle()
    done: list[int] = []
    world.core.checkpoint(done.append)
    turns = 0
    while world.core.upkeep.checkpointer.collecting:
        assert world.core.next_wake_ms() <= world.clock.monotonic_ms(), "the next turn comes at once"
        world.core.wake()
        turns += 1
    world.settle()
    assert turns == 3 and len(done) == 1
    again = world.after_crash(None)
    assert all(again.core.outcome(producer_id, 1) is not None for producer_id in range(1, 8))


class Loads:
    """Loads that fall due before each operation of what the worker does, and how long each of them waits."""

    def __init__(self, world: World) -> None:
        self.operations = 0
        self.waited: list[tuple[int, int]] = []  # Operations and syncs of each.
        self._world = world

    def work(self) -> None:
        """Do all that there is to do."""
        world, (commit, outcomes, worker) = self._world, self._world.executors()
        while True:
            if worker.waiting:
                world.disk.before_each = self._fall_due
                worker.run_one()
                world.disk.before_each = lambda: None
                # The requests that still wait have waited for the whole job.
                while worker._waiting.jobs[Priority.DUE]:
                    worker.run_one()
            elif worker.ran:
                worker.complete_one()
            elif not (commit.run_all() or outcomes.run_all()):
                return

    def _fall_due(self) -> None:
        world = self._world
        self.operations += 1
        done, begun = self.operations, len(world.disk.operations)

        def load() -> None:
            syncs = sum(each.startswith(SYNCS) for each in world.disk.operations[begun:])
            self.waited.append((self.operations - done + 1, syncs))

        world.threads.worker.submit(load, lambda ended: None, Priority.DUE)


def test_rule_B2_a_load_that_falls_due_at_any_operation_of_the_worker_waits_for_a_piece_of_it() -> None:
    world = ready_world(retention_hours=10)
    loads = Loads(world)
    for number in range(3):
        # Some of them in new files of new days, some behind others.
        world.send([row for day in range(3) for row in wanted(2, 50_000 + day * DAY_MS, f"m-{number}-{day}")])
        world.settle()
        world.core.checkpoint(lambda offset: None)
        loads.work()
    checkpoints = loads.operations
    path = schedule_path(FOLDER, HOUR_OF_START)
    sealed = removed = 0
    for _ in range(3):
        world.clock.advance(12 * HOUR_MS)
        world.pass_ms(61_000)
        world.checkpoint()
        was_sealed, was_there = world.hours().get(HOUR_OF_START).sealed, world.disk.exists(path)
        world.core.sweep()
        loads.work()
        sealed += world.hours().get(HOUR_OF_START).sealed and not was_sealed
        removed += was_there and not world.disk.exists(path)
    assert checkpoints > 60 and (sealed, removed) == (1, 1), "the worker files, compares, seals and removes"
    assert len(loads.waited) == loads.operations
    assert max(operations for operations, _ in loads.waited) <= PIECE_OPERATIONS
    assert max(syncs for _, syncs in loads.waited) <= PIECE_SYNCS


def test_rule_B2_what_a_full_disk_keeps_from_checkpoints_is_merged_once_a_try() -> None:
    told = Told(None, {b"a": b"1", b"b": b"1"}, {b"x"}, {}, {}, ())
    for number in range(2, 2_000):
        # The one before has failed: it was merged when it began.
        told.merged()
        told = Told(told, {b"a": b"%d" % number}, {b"b"} if number == 5 else set(), {}, {}, ())
    assert told.merged() == ({b"a": b"1999"}, {b"x", b"b"})


def test_rule_B2_rows_that_wait_are_few_arrays_and_looked_at_once_for_the_lowest_offset() -> None:
    waiting = WaitingRows()
    for number in range(20_000):
        row = new_rows(1)
        row["sequence"], row["length"], row["location"] = number, 10, (20_000 - number) << 8
        waiting.add(row)
    assert len(waiting.parts()) < 20
    assert [int(row) for part in waiting.parts() for row in part["sequence"]] == list(range(20_000))
    first = calls(waiting.lowest_message_log_offset)
    waiting.add(new_rows(1))
    again = calls(waiting.lowest_message_log_offset)
    assert again < first, "only what is new is looked at"
    taken = [int(number) for _ in range(4) for number in waiting.take(6_000, 1 << 30)["sequence"][:6_000]]
    assert taken[:20_000] == list(range(20_000)) and not len(waiting)
    assert waiting.lowest_message_log_offset() is None
