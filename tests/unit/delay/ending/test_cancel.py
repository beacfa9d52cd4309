"""Cancel by receipt: a row is claimed wherever it stands, each answer is true, and books and seals agree."""

from __future__ import annotations

import pytest

from delayd.errors import BadArgument, DiskReserve
from delayd.wire.asked import Asked, CancelAnswer, MessageState
from tests.worlds.delay import World, wanted

CANCELLED, DISPATCHED = CancelAnswer.CANCELLED, CancelAnswer.ALREADY_DISPATCHED
IN_FLIGHT, UNKNOWN = CancelAnswer.IN_FLIGHT, CancelAnswer.UNKNOWN
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
    assert cancel(later, later.receipts("sent", "gone")) == [DISPATCHED, DISPATCHED, CANCELLED]
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
    world.core.endings.cancel(receipts, told.append, b"mails")
    world.settle()
    assert [type(what) for what in told] == [BadArgument]
    assert world.states(receipts) == [MessageState.PENDING] * 2
