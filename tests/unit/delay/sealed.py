"""Hours of a simulated delay server that are sealed, and the seals that its log holds."""

from __future__ import annotations

from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import Seal, decode_seals, seal_place
from delayd.log.log import open_log
from delayd.testing.clock import START_MS
from tests.worlds.delay import FOLDER, World
from tests.worlds.outside import wanted


def sealed_hour(world: World, name: str, *, sealed: bool = True) -> None:
    """Have an hour's messages delivered, and the hour sealed unless that can't be."""
    hour = hour_of_ms(world.clock.now_ms())
    world.send(wanted(3, 500, name))
    world.pass_ms(2_000)
    world.checkpoint()
    world.clock.advance(HOUR_MS)
    world.pass_ms(3_000)
    world.checkpoint()
    world.sweep()
    assert world.hours().get(hour).sealed is sealed


def seals_of(world: World) -> list[Seal]:
    """What the seal log holds."""
    place = seal_place(FOLDER, world.core.site.identity.log_id)
    log = open_log(world.disk, place, START_MS)
    return [seal for group in log.scan(0, log.durable) for _, batch in group.batches() for seal in decode_seals(batch)]
