"""What a send, a dispatch and an answer cost, as counts that fail when they grow."""

from __future__ import annotations

import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.testing.clock import START_MS
from tests.counts import calls, operations
from tests.unit.delay.handoff import cable_of, ready_world
from tests.worlds.delay import World, encode_wanted, wanted

# Calls of Python functions, the disk in memory included, measured and rounded up by a tenth: a call costs a server
# 0.3 to 1 us, and these run for each group, frame and answer.
SEND_CALLS_MAX = {5: 171, 500: 230}  # By rows: few are indexed in plain integers, many as arrays.
FRAME_CALLS_MAX = 147
ANSWER_CALLS_MAX = 38
OUTCOME_CALLS_MAX = 241  # From an answer until its outcomes are durable; a third of them are those of the test.
IDLE_WAKE_CALLS_MAX = 32
BATCH_CALLS_MAX = 28  # The calls that a subject with one row costs, besides those of the frame.
ROW_CALLS_MAX = 7  # The calls for a row that lies in another batch than its neighbours.


def send(world: World, rows: int, number: int = 1) -> int:
    """Have a batch taken, durable and indexed, due in 100 ms; the calls of that."""
    due_ms = world.clock.now_ms() - START_MS + 100
    batch = parse(encode_wanted(wanted(rows, due_ms, f"m{number}"), ProducerPart(7, number, number)))
    commit, _, _ = world.executors()

    def take() -> None:
        world.core.send(batch, lambda accepted, duplicate: None)
        commit.run_all()

    return calls(take)


def due_world(rows: int) -> World:
    """Messages are due and nobody has looked yet."""
    world = ready_world()
    send(world, rows)
    world.settle()
    world.clock.advance(100)
    return world


@pytest.mark.parametrize("rows", SEND_CALLS_MAX)
def test_the_calls_of_a_send_do_not_grow_with_its_rows(rows: int) -> None:
    assert send(ready_world(), rows) <= SEND_CALLS_MAX[rows]


@pytest.mark.parametrize("rows", [5, 500])
def test_the_calls_of_a_frame_do_not_grow_with_its_rows(rows: int) -> None:
    world = due_world(rows)
    assert calls(world.core.wake) <= FRAME_CALLS_MAX
    assert len(cable_of(world).up) == 1


def test_a_row_from_another_batch_than_its_neighbours_costs_a_few_calls() -> None:
    world = ready_world()
    for number in range(1, 21):
        send(world, 1, number)
    world.settle()
    world.clock.advance(100)
    assert calls(world.core.wake) <= FRAME_CALLS_MAX + 20 * ROW_CALLS_MAX


def test_a_subject_of_one_row_in_a_frame_of_many_costs_little() -> None:
    world = ready_world()
    due_ms = world.clock.now_ms() - START_MS + 100
    world.send([each for number in range(50) for each in wanted(1, due_ms, f"m{number}", b"subject.%d" % number)])
    world.settle()
    world.clock.advance(100)
    assert calls(world.core.wake) <= FRAME_CALLS_MAX + 50 * BATCH_CALLS_MAX


def test_the_calls_of_an_answer_do_not_grow_with_its_rows() -> None:
    world = due_world(500)
    world.core.wake()
    cable = cable_of(world)
    cable.carry_up()
    cable.target.sync()
    assert calls(cable.carry_down) <= ANSWER_CALLS_MAX


@pytest.mark.parametrize("rows", [5, 500])
def test_the_calls_of_outcomes_do_not_grow_with_their_rows(rows: int) -> None:
    world = due_world(rows)
    world.core.wake()
    cable = cable_of(world)
    cable.carry_up()
    cable.target.sync()
    cable.carry_down()
    world.clock.advance(100)  # Twice as long as outcomes wait for others.
    before = len(world.disk.operations)
    assert calls(world.settle) <= OUTCOME_CALLS_MAX
    assert any("dispatch" in operation for operation in world.disk.operations[before:])


def test_a_wake_up_without_anything_due_costs_little() -> None:
    world = ready_world()
    world.core.wake()
    assert calls(world.core.wake) <= IDLE_WAKE_CALLS_MAX


def test_a_group_costs_the_message_log_one_write_and_one_sync_however_many_batches_it_has() -> None:
    world = ready_world()
    send(world, 1)
    for number in range(2, 20):
        batch = parse(encode_wanted(wanted(3, 10_000, f"m{number}"), ProducerPart(7, number, number)))
        world.core.send(batch, lambda accepted, duplicate: None)
    # The first was alone, and all that came while it was written is the next group.
    assert operations(world.disk, world.settle) == ["write", "sync"] * 2


def test_outcomes_of_many_frames_cost_the_dispatch_log_one_write_and_one_sync() -> None:
    world = ready_world()
    before = len(world.disk.operations)
    for number in range(1, 11):
        send(world, 3, number)
    world.pass_ms(205)
    made = [operation for operation in world.disk.operations[before:] if "dispatch" in operation]
    assert [operation.split()[0] for operation in made] == ["write", "sync"]
