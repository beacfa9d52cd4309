"""Reschedule by receipt: a row moves from wherever it stands, and old receipts lead to its newest row."""

from __future__ import annotations

import numpy as np

from delayd.testing.clock import START_MS
from delayd.wire.asked import AnswerRows, Asked, MessageState, RescheduleAnswer
from tests.worlds.delay import FOLDER, World, wanted

MOVED, DISPATCHED = RescheduleAnswer.MOVED, RescheduleAnswer.ALREADY_DISPATCHED
IN_FLIGHT, UNKNOWN, CANCELLED = RescheduleAnswer.IN_FLIGHT, RescheduleAnswer.UNKNOWN, RescheduleAnswer.CANCELLED
HOUR_MS = 3_600_000


def move(world: World, asked: Asked, due_ms: int) -> list[RescheduleAnswer]:
    """Move messages to one instant and let everything happen that takes no time: the answers."""
    return [RescheduleAnswer(answer) for answer in told(world, asked, due_ms)["answer"].tolist()]


def told(world: World, asked: Asked, due_ms: int) -> AnswerRows:
    answers = world.reschedule(asked, START_MS + due_ms)
    world.settle()
    (rows,) = answers
    return rows


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


def test_long_messages_move_a_few_at_a_time_with_all_that_they_have() -> None:
    world = World(segment_bytes=64 << 20, intake_queue_bytes_max=64 << 20)
    for number in range(12):
        body = b"long-%d" % number
        world.send([(START_MS + HOUR_MS, b"mail", body.ljust(900_000, b"."))])
        world.settle()
    base = Asked(np.arange(1, 13, dtype=np.uint64), np.full(12, START_MS + HOUR_MS), np.full(12, START_MS))
    before = world.core.intake.durable.offset
    assert move(world, base, 3 * HOUR_MS) == [MOVED] * 12
    assert 12 * 900_000 < world.core.intake.durable.offset - before < 12 * 920_000
    end(world)


def test_a_message_that_can_not_be_read_stays_and_is_asked_about_again() -> None:
    world = World(tail_bytes=0)
    world.send(wanted(2, HOUR_MS, "whole"))
    world.settle()
    world.send(wanted(2, HOUR_MS, "damaged"))
    world.settle()
    (name,) = world.disk.list_folder(f"{FOLDER}/message")
    path = f"{FOLDER}/message/{name}"
    file = world.disk.open(path, write=True)
    file.pwritev([b"D"], file.pread(file.size(), 0).index(b"damaged-1"))
    assert move(world, world.receipts("whole", "damaged"), 9_000) == [MOVED, MOVED, IN_FLIGHT, IN_FLIGHT]
    assert world.states(world.receipts("damaged")) == [MessageState.PENDING] * 2


def test_two_moves_of_one_row_in_one_commit_are_both_done() -> None:
    world = World()
    world.send(wanted(1, HOUR_MS, "one"))
    world.settle()
    one = world.receipts("one")
    world.send(wanted(1, 5_000, "before"))
    first, second = world.reschedule(one, START_MS + 2 * HOUR_MS), world.reschedule(one, START_MS + 9_000)
    world.settle()
    assert [rows["answer"].tolist() for rows in (*first, *second)] == [[MOVED], [MOVED]]
    assert world.outside.newest(1, 0)[:2] == (int(second[0]["sequence"][0]), START_MS + 9_000)
    end(world)
