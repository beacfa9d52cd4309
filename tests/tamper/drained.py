"""A directory of two delay servers, of which one was drained into the other.

Invariant: everything in it was written by the servers themselves, so every reader must find nothing wrong. In place of
realtime servers there are fakes that leave no files.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS, copy_tree
from tests.tamper.honest import DELAY
from tests.worlds.delay import FOLDER, World, wanted
from tests.worlds.drain import carry, log_id, piece, two

HOUR_MS = 3_600_000
TAKER = f"{BOOKS}/delay-taker"


class Drained(NamedTuple):
    """The directory, when it is looked at, and who is who in it."""

    disk: MemoryDisk
    now_ms: int
    source: int  # Its hours: one of both kinds, sealed; one with drained rows only; one whose rows are on their way.
    taker: int


@cache
def drained() -> Drained:
    """Six rows were handed over, seven were drained, and two are on their way; copy the disk before you change it."""
    source, taker = two()
    taker.send(wanted(2, 40 * HOUR_MS, "own"))
    source.send([*wanted(6, 2_000, "near"), *wanted(3, 20 * 60_000, "same hour"), *wanted(4, 26 * HOUR_MS, "far")])
    source.checkpoint()
    for world in (source, taker):
        world.pass_ms(5_000)
    piece(source, log_id(taker))
    carry(source, taker)
    for world in (source, taker):
        _pass_hour(world)
    source.send(wanted(2, 30 * HOUR_MS, "on their way"))
    source.checkpoint()
    piece(source, log_id(taker))
    disk = MemoryDisk()
    for world, folder in ((source, DELAY), (taker, TAKER)):
        world.settle()
        copy_tree(world.disk, FOLDER, disk, folder)
    return Drained(disk, source.clock.now_ms(), log_id(source), log_id(taker))


def _pass_hour(world: World) -> None:
    """The hour ends, and seals."""
    world.clock.advance(HOUR_MS)
    world.pass_ms(5_000)
    world.checkpoint()
    world.sweep()
    world.checkpoint()
