"""Dispatch logs that somebody damaged."""

from __future__ import annotations

from delayd.hours import hour_of_ms
from delayd.log.hour import dispatch_path
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import FOLDER, Remains, World, wanted

HOUR_MS = 3_600_000
HOUR = hour_of_ms(START_MS)


def damaged_dispatch_log(position: int) -> Remains:
    """What a life leaves in whose dispatch log one byte was flipped since, at a position or counted from the end."""
    world = World()
    for number in range(3):
        world.send(wanted(1, 500 * number, f"m{number}"))
        world.pass_ms(600)
    world.send(wanted(2, HOUR_MS + 5_000, "next"))
    world.settle()
    world.checkpoint()
    remains = world.remains(PowerLoss.ALL_LOST)
    flip(remains, position)
    return remains


def flip(remains: Remains, position: int) -> None:
    """Flip a byte of the hour's dispatch log, durably; a second time is a repair."""
    file = remains.disk.open(dispatch_path(FOLDER, HOUR), write=True)
    at = position if position > 0 else file.size() + position
    file.pwritev([bytes([file.pread(1, at)[0] ^ 0xFF])], at)
    file.sync()
    file.close()
