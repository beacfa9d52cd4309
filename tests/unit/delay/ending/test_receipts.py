"""Cancels and moves by receipt: full disks, rows that can't be read, and requests that meet or contradict."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import MOVED_PRODUCER_ID, ProducerPart
from delayd.errors import BadArgument, BatchMalformed, DiskReserve
from delayd.outcome import MessageState
from delayd.testing.clock import START_MS
from delayd.wire.asked import AnswerRows, Asked, CancelAnswer, RescheduleAnswer
from tests.worlds.delay import FOLDER, World, encode_wanted, wanted

CANCELLED = CancelAnswer.CANCELLED
HOUR_MS = 3_600_000


def cancel(world: World, asked: Asked) -> list[CancelAnswer]:
    """Cancel messages and let everything happen that takes no time: the answers."""
    told = world.cancel(asked)
    world.settle()
    (answers,) = told
    return answers


def end(world: World) -> None:
    world.drain(6 * HOUR_MS)
    world.check_books()
    world.check_sealing()


@pytest.mark.parametrize("due_ms", [5_000, 40 * HOUR_MS])
def test_a_full_disk_undoes_the_claims(due_ms: int) -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(3, due_ms, "row"))
    world.settle()
    asked = world.receipts("row")
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    assert not world.cancel(asked)
    world.settle()
    assert isinstance(world.outside.refused[-1][1], DiskReserve)
    world.disk.capacity_bytes = capacity
    world.look_around()
    assert world.states(asked) == [MessageState.PENDING] * 3
    assert cancel(world, asked.take([1])) == [CANCELLED]
    end(world)


def test_a_row_that_falls_due_while_its_cancel_is_written_is_delivered_when_the_write_fails() -> None:
    world = World()
    world.send(wanted(2, 2_000, "row"))
    world.pass_ms(1_990)
    asked = world.receipts("row")
    capacity, world.disk.capacity_bytes = world.disk.capacity_bytes, 0
    told = world.cancel(asked.take([0]))
    world.clock.advance(50)
    world.core.wake()
    world.settle()
    world.disk.capacity_bytes = capacity
    assert not told
    end(world)
    assert not world.outside.cancelled


def test_a_row_of_a_sealed_hour_is_known_in_each_later_life_as_long_as_the_logs_are_kept() -> None:
    world = World(load_ahead_ms=1_000, retention_hours=1)
    world.send(wanted(2, 500, "sent"))
    world.send(wanted(1, 500, "gone"))
    world.settle()
    cancel(world, world.receipts("gone"))
    world.drain()
    world.check_sealing()
    later = world.after_crash()
    assert later.states(later.receipts("sent", "gone")) == [MessageState.DISPATCHED] * 2 + [MessageState.CANCELLED]
    assert cancel(later, later.receipts("sent", "gone")) == [*[CancelAnswer.ALREADY_DISPATCHED] * 2, CANCELLED]
    later.clock.advance(2 * HOUR_MS)
    later.delete_hours()
    assert later.states(later.receipts("sent", "gone")) == [MessageState.UNKNOWN] * 3


@pytest.mark.parametrize("filed", [False, True])
def test_a_request_about_one_subject_touches_no_message_of_another(filed: bool) -> None:
    world = World(load_ahead_ms=1_000)
    world.send([*wanted(1, 5 * HOUR_MS, "mine", b"mails"), *wanted(1, 5 * HOUR_MS, "theirs")])
    world.settle()
    if filed:
        world.checkpoint()
    told: list[object] = []
    receipts = world.receipts("mine", "theirs")
    world.core.asked.endings.cancel(receipts, told.append, b"mails")
    world.settle()
    assert [type(what) for what in told] == [BadArgument]
    assert world.states(receipts) == [MessageState.PENDING] * 2


def test_a_producer_can_not_use_the_id_of_moved_rows() -> None:
    world, heard = World(), list[object]()
    data = encode_wanted(wanted(1, 1_000, "false"), ProducerPart(MOVED_PRODUCER_ID, 0, 0))
    world.core.send(parse(data), lambda what, _: heard.append(what))
    world.settle()
    assert isinstance(heard[0], BatchMalformed) and world.core.logs.intake.next_sequence == 1


MOVED = RescheduleAnswer.MOVED


def move(world: World, asked: Asked, due_ms: int) -> list[RescheduleAnswer]:
    """Move messages to one instant and let everything happen that takes no time: the answers."""
    return [RescheduleAnswer(answer) for answer in told(world, asked, due_ms)["answer"].tolist()]


def told(world: World, asked: Asked, due_ms: int) -> AnswerRows:
    answers = world.reschedule(asked, START_MS + due_ms)
    world.settle()
    (rows,) = answers
    return rows


def test_long_messages_move_a_few_at_a_time_with_all_that_they_have() -> None:
    world = World(segment_bytes=64 << 20, intake_queue_bytes_max=64 << 20)
    for number in range(12):
        body = b"long-%d" % number
        world.send([(START_MS + HOUR_MS, b"mail", body.ljust(900_000, b"."))])
        world.settle()
    base = Asked(np.arange(1, 13, dtype=np.uint64), np.full(12, START_MS + HOUR_MS), np.full(12, START_MS))
    before = world.core.logs.intake.durable.offset
    assert move(world, base, 3 * HOUR_MS) == [MOVED] * 12
    assert 12 * 900_000 < world.core.logs.intake.durable.offset - before < 12 * 920_000
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
    assert move(world, world.receipts("whole", "damaged"), 9_000) == [MOVED, MOVED, *[RescheduleAnswer.IN_FLIGHT] * 2]
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
