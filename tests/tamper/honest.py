"""An honest directory: a delay and two realtime servers on a virtual clock, hours sealed and deleted, rows that wait.

Invariant: everything in it was written by the servers themselves, so the audit must find nothing.
"""

from __future__ import annotations

from functools import cache
from random import Random

from delayd.testing.disk import MemoryDisk
from tests.simulation.audit import BOOKS, copy_tree
from tests.simulation.cluster import HOUR_MS, Cluster
from tests.worlds.delay import FOLDER

SUBJECTS = (b"orders.eu", b"orders.us", b"mail")
DELAY = f"{BOOKS}/delay"
SETTINGS = {
    "retention_hours": 2,
    "segment_bytes": 1 << 20,
    "load_ahead_ms": 4_000,
    "checkpoint_every_ms": 60_000,
    "frame_rows_max": 8_000,
}


def _grown() -> Cluster:
    """Six hours of life: the first ones are deleted, later ones sealed, the last one open, some rows years ahead."""
    cluster = Cluster(Random(1), lambda line: None)
    # Each subject at another server than the next, and settings that no seed draws.
    for number, subject in enumerate(cluster.subjects):
        cluster.router.routes[subject] = cluster.sides[number % len(cluster.sides)].log_id
    cluster._delay_settings.update(SETTINGS)
    cluster.delay_dies(None)
    cluster.delay_starts(faults=False)
    cluster.calm(2_000)
    for hour in range(6):
        now_ms = cluster.machine.wall_ms
        rows = [
            (now_ms + after_ms, SUBJECTS[number % 3], b"%d of hour %d" % (number, hour) + bytes(number))
            for number, after_ms in enumerate((-5_000, 0, 500, 1_000, 20_000, 90_000, HOUR_MS // 2, 40 * HOUR_MS))
        ]
        cluster.world.send(rows[:4])
        cluster.world.send(rows[4:])
        for _ in range(20):
            cluster.calm(1_000)
            for consumer in cluster.consumers:
                consumer.step()
        cluster.calm(100_000)
        cluster.machine.advance(HOUR_MS - 200_000)
        cluster.calm(65_000)
        cluster.world.sweep()
        cluster.calm(65_000)
        cluster.world.sweep()
    cluster.world.send([(cluster.machine.wall_ms + 1_000, SUBJECTS[0], b"on its way")])
    cluster.world.send([(cluster.machine.wall_ms + 2 * HOUR_MS, SUBJECTS[1], b"not filed yet")])
    cluster.calm(65_000)
    cluster.world.send([(cluster.machine.wall_ms + 1_000, SUBJECTS[0], b"newer than any checkpoint")])
    cluster.calm(5_000)
    cluster.world.send([(cluster.machine.wall_ms + 2 * HOUR_MS, SUBJECTS[1], b"the newest of all")])
    cluster.calm(1_000)
    for side in cluster.sides:
        assert side.life is not None
    return cluster


@cache
def honest() -> tuple[MemoryDisk, int]:
    """The directory, and the instant at which it is looked at; copy it before it is changed."""
    cluster = _grown()
    disk = MemoryDisk()
    copy_tree(cluster.world.disk, FOLDER, disk, DELAY)
    for number, side in enumerate(cluster.sides):
        copy_tree(side.disk, side.config.folder, disk, f"{BOOKS}/realtime-{number}")
    return disk, cluster.machine.wall_ms
