"""A checkpoint that a stop abandons between two of its pieces leaves what a crash would leave there."""

from __future__ import annotations

import pytest

from delayd.executor import Abandoned
from delayd.testing.tree import PowerLoss
from tests.unit.delay.ending.keyed import REPLACE, sent
from tests.worlds.delay import World, wanted

HOUR_MS = 3_600_000
PIECES_MAX = 100


def filled() -> World:
    """A world with rows of many hours, some with keys, of which a checkpoint knows some."""
    world = World(load_ahead_ms=1_000)
    for number in range(3):
        rows = [row for hour in range(1, 12) for row in wanted(2, hour * HOUR_MS + number, f"{number}-{hour}")]
        sent(world, rows, [b"k%d" % (row % 5) if row % 3 == 0 else b"" for row in range(len(rows))], REPLACE)
        if number == 0:
            world.checkpoint()
    return world


def is_abandoned(world: World, pieces: int) -> bool:
    """Whether a checkpoint of a server that stops was still under way after so many pieces."""
    *_, worker = world.executors()
    left = [pieces]

    def give_way() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Abandoned("the thread is being closed")

    worker.give_way = give_way  # type: ignore[method-assign]
    try:
        assert world.stop()
    except Abandoned:
        return True
    return False


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST])
def test_a_checkpoint_that_a_stop_abandons_at_any_piece_loses_nothing(way: PowerLoss | None) -> None:
    for pieces in range(PIECES_MAX):
        world = filled()
        abandoned = is_abandoned(world, pieces)
        later = world.after_crash(way)
        later.checkpoint()
        later.drain(12 * HOUR_MS)
        later.check_books()
        later.check_sealing()
        if not abandoned:
            break
    assert pieces > 10 and not abandoned
