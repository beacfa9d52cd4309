"""What a send, a dispatch and an answer cost, as counts that fail when they grow; and how much one turn works on."""

from __future__ import annotations

import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.hours import hour_of_ms
from delayd.log.hour import schedule_path
from delayd.testing.clock import START_MS
from delayd.testing.disk import MemoryFile
from delayd.testing.tree import PowerLoss
from tests.counts import calls, operations
from tests.worlds.delay import FOLDER, World, encode_wanted, wanted

# Calls of Python functions, the disk in memory included, measured and rounded up by a tenth: a call costs a server
# 0.3 to 1 us, and these run for each group, frame and answer.
SEND_CALLS_MAX = {5: 175, 500: 235}  # By rows: few are indexed in plain integers, many as arrays.
FRAME_CALLS_MAX = 147
ANSWER_CALLS_MAX = 38
OUTCOME_CALLS_MAX = 244  # From an answer until its outcomes are durable; a third of them are those of the test.
IDLE_WAKE_CALLS_MAX = 32
BATCH_CALLS_MAX = 28  # The calls that a subject with one row costs, besides those of the frame.
ROW_CALLS_MAX = 7  # The calls for a row that lies in another batch than its neighbours.
ROW_BYTES = 32  # Of a row that was handed over before its checkpoint: due, sequence, end of the body, length, hash.
BATCH_BYTES = 400  # Headers of file, group and batch, directory, and subject table.
COLUMNS_BYTES = 28  # What a load reads of a row.
FAR_MS = 2 * 3_600_000


def send(world: World, rows: int, number: int = 1, after_ms: int = 100) -> int:
    """Have a batch taken, durable and indexed; the calls of that."""
    due_ms = world.clock.now_ms() - START_MS + after_ms
    batch = parse(encode_wanted(wanted(rows, due_ms, f"m{number}"), ProducerPart(7, number, number)))
    commit = world.executors()[0]

    def take() -> None:
        world.server.send(batch, lambda accepted, duplicate: None)
        commit.run_all()

    return calls(take)


def due_world(rows: int, batches: int = 1) -> World:
    """Messages are due and nobody has looked yet."""
    world = World.greeted()
    for number in range(1, batches + 1):
        send(world, rows, number)
    world.settle()
    world.clock.advance(100)
    return world


@pytest.mark.parametrize("rows", SEND_CALLS_MAX)
def test_the_calls_of_a_send_do_not_grow_with_its_rows(rows: int) -> None:
    assert send(World.greeted(), rows) <= SEND_CALLS_MAX[rows]


@pytest.mark.parametrize("rows", [5, 500])
def test_the_calls_of_a_frame_its_answer_and_its_outcomes_do_not_grow_with_its_rows(rows: int) -> None:
    world = due_world(rows)
    assert calls(world.server.wake) <= FRAME_CALLS_MAX
    assert len(world.cable.up) == 1
    cable = world.cable
    cable.carry_up()
    cable.target.sync()
    assert calls(cable.carry_down) <= ANSWER_CALLS_MAX
    world.clock.advance(100)  # Twice as long as outcomes wait for others.
    before = len(world.disk.operations)
    assert calls(world.settle) <= OUTCOME_CALLS_MAX
    assert any("dispatch" in operation for operation in world.disk.operations[before:])


def test_a_row_of_another_batch_or_another_subject_than_its_neighbours_costs_a_few_calls() -> None:
    assert calls(due_world(1, batches=20).server.wake) <= FRAME_CALLS_MAX + 20 * ROW_CALLS_MAX
    world = World.greeted()
    due_ms = world.clock.now_ms() - START_MS + 100
    world.send([each for number in range(50) for each in wanted(1, due_ms, f"m{number}", b"subject.%d" % number)])
    world.settle()
    world.clock.advance(100)
    assert calls(world.server.wake) <= FRAME_CALLS_MAX + 50 * BATCH_CALLS_MAX


def test_a_wake_up_without_anything_due_costs_little() -> None:
    world = World.greeted()
    world.server.wake()
    assert calls(world.server.wake) <= IDLE_WAKE_CALLS_MAX


def test_a_group_of_batches_and_the_outcomes_of_many_frames_cost_one_write_and_one_sync() -> None:
    world = World.greeted()
    for number in range(1, 20):
        world.send(wanted(3, 10_000, f"m{number}"))
    # The first was alone, and all that came while it was written is the next group.
    assert operations(world.disk, world.settle) == ["write", "sync"] * 2
    before = len(world.disk.operations)
    for number in range(1, 11):
        send(world, 3, number)
    world.pass_ms(205)
    made = [operation for operation in world.disk.operations[before:] if "dispatch" in operation]
    assert [operation.split()[0] for operation in made] == ["write", "sync"]


def test_rows_that_were_all_handed_over_before_their_checkpoint_cost_32_bytes_each_on_disk() -> None:
    world, rows = World(), 2_000
    world.send(wanted(rows, 100, "m" * 200))
    world.pass_ms(1_000)
    world.checkpoint()
    size = world.disk.open(schedule_path(FOLDER, hour_of_ms(START_MS))).size()
    assert size <= rows * ROW_BYTES + BATCH_BYTES


def test_a_load_reads_the_columns_and_not_the_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rows = World(), 12_000
    world.send(wanted(rows, FAR_MS, "m" * 200))
    world.settle()
    world.checkpoint()
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.clock.advance(FAR_MS - 200_000)
    reads: list[int] = []
    pread = MemoryFile.pread

    def counting(file: MemoryFile, size: int, position: int) -> bytes:
        data = pread(file, size, position)
        reads.append(len(data))
        return data

    monkeypatch.setattr(MemoryFile, "pread", counting)
    world.pass_ms(2_000)
    assert world.status("loaded_rows") == rows
    assert sum(reads) <= rows * COLUMNS_BYTES + 4 * 5_000 + 3 * 27_000, "the columns, and little beyond them"
    assert len(reads) <= 9, "file and group header, three batches, the first of them twice, and the dispatch log"


# Bounds of one turn (rule B2).


def test_rule_B2_a_herd_leaves_the_wheel_in_several_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.handoff.dispatcher.ROWS_A_STEP", 4)
    world = World.greeted()
    world.send_due(10, "herd")
    world.settle()
    world.clock.advance(100)
    held = []
    for _ in range(3):
        assert world.idle_ms() <= 0, "the next turn comes at once"
        world.server.wake()
        held.append(world.status("loaded_rows"))
    assert held == [6, 2, 0]
    world.drain()
    world.check_books()


def test_rule_B2_a_checkpoint_of_many_producers_begins_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayd.delay.producers.PIECE_PRODUCERS", 2)
    world, done = World(), list[int]()
    for producer in range(1, 8):
        batch = parse(encode_wanted(wanted(1, 50_000, f"m{producer}"), ProducerPart(producer, 1, 1)))
        world.server.send(batch, lambda accepted, duplicate: None)
        world.settle()
    world.server.checkpoint(done.append)
    turns = 0
    while not world.executors()[2].waiting:
        assert world.idle_ms() <= 0, "the next turn comes at once"
        world.server.wake()
        turns += 1
    world.settle()
    assert turns == 3 and len(done) == 1
    again = world.after_crash(None)
    assert all(again.server.answer_to(producer, 1) is not None for producer in range(1, 8))
