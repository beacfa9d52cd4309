"""What one turn of the delay server's loop works on is bounded, and work for many subjects or batches is no square."""

from functools import partial

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.delay import intake, producers
from delayd.delay.filing.checkpointer import CheckpointValues
from delayd.delay.handoff import dispatcher
from delayd.delay.rows import new_rows
from delayd.testing.clock import START_MS
from tests.counts import calls
from tests.unit.delay.handoff import ready_world
from tests.worlds.delay import World, encode_wanted, wanted

HOUR = 500_000


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


def test_rule_B2_what_a_full_disk_keeps_from_checkpoints_is_merged_once_a_try() -> None:
    told = CheckpointValues(None, {b"a": b"1", b"b": b"1"}, {b"x"}, {}, {}, ())
    for number in range(2, 2_000):
        # The one before has failed: it was merged when it began.
        told.merged()
        told = CheckpointValues(told, {b"a": b"%d" % number}, {b"b"} if number == 5 else set(), {}, {}, ())
    assert told.merged() == ({b"a": b"1999"}, {b"x", b"b"})
