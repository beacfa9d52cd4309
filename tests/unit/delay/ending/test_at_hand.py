"""A look-up reads files once: what it has read is at hand, until something is written in that hour."""

from __future__ import annotations

import numpy as np

from delayd.errors import DelaydError
from delayd.wire.ending import AnswerRows, Asked, CancelAnswer, MessageState
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
PENDING, CANCELLED = MessageState.PENDING, MessageState.CANCELLED


def get(world: World, asked: Asked) -> list[MessageState] | None:
    """What is told in the turn of the request itself; None when the files must be read."""
    told: list[AnswerRows | DelaydError] = []
    world.core.endings.get(asked, told.append)
    at_once = list(told)
    world.settle()
    (answers,) = told
    assert not isinstance(answers, DelaydError)
    return [MessageState(state) for state in answers["state"].tolist()] if at_once else None


def test_a_look_up_waits_for_the_worker_once_and_again_when_the_hour_has_new_outcomes() -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(40, 40 * HOUR_MS, "row"))
    for name in ("first", "second"):
        world.send(wanted(2, 40 * HOUR_MS, name))
    world.settle()
    world.checkpoint()
    rows = world.receipts("row")
    assert get(world, rows) is None
    assert get(world, rows) == [PENDING] * 40
    for name in ("first", "second"):
        gone = world.receipts(name)
        world.cancel(gone)
        world.pass_ms(1_000)
        assert get(world, gone) is None, "an outcome is read from its file"
        assert world.states(gone) == [CANCELLED] * 2
        assert get(world, rows) == [PENDING] * 40


def test_a_look_up_at_hand_says_what_the_files_say() -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(40, 40 * HOUR_MS, "row"))
    world.settle()
    world.checkpoint()
    asked = world.receipts("row")
    made_up = asked._replace(sequences=asked.sequences + np.uint64(1_000))
    other_hour = asked._replace(deliver_at_ms=asked.deliver_at_ms + 1)
    assert get(world, asked) is None
    assert get(world, made_up) == [MessageState.UNKNOWN] * 40
    assert get(world, other_hour) == [MessageState.UNKNOWN] * 40
    told = world.cancel(asked)
    world.settle()
    assert told == [[CancelAnswer.CANCELLED] * 40]
    world.send(wanted(40, 40 * HOUR_MS, "later"))
    world.settle()
    world.checkpoint()
    assert get(world, world.receipts("later")) is None, "the schedule log has grown"
    assert get(world, world.receipts("later")) == [PENDING] * 40
    assert world.states(asked) == [CANCELLED] * 40
