"""A lie in a dispatch log: as many outcomes as the hour has messages, and one of them of another message (rule S1).

Invariant: the file is as it was when `lie` returns, whatever happens meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delayd.log.group import GroupKind, NewGroup
from delayd.log.hour import NewPart, encode_outcomes
from delayd.log.segment import FileKind, create_segment, open_segment
from delayd.outcome import Outcome
from delayd.testing.disk import MemoryDisk
from delayd.testing.tree import Inode
from tests.simulation.delay_side import NAME
from tests.simulation.threads import SOME, WHOLE
from tests.worlds.delay import FOLDER
from tests.worlds.delay_adapter import list_dispatch_logs, read_outcomes

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

NEVER_GIVEN = 1 << 40  # A sequence that no message has.


def lie(cluster: Cluster) -> None:
    """Put a wrong sequence into the last hour that could seal now; no sweep may seal that hour."""
    world = cluster.world
    if cluster.delay_damages.any(world.disk):
        # Nothing of it could be read, here as well.
        return
    if world.own.begun or not world.server.writes_no_outcomes:
        # An outcome that is on its way into the file would be written behind the lie.
        return
    hours = world.hours()
    scheduled: dict[int, set[int]] = {}
    for sequence, hour in world.scheduled().items():
        scheduled.setdefault(hour, set()).add(sequence)
    told: dict[int, set[int]] = {}
    for sequence, (hour, *_) in world.outcomes().items():
        told.setdefault(hour, set()).add(sequence)
    for hour, path in reversed(list_dispatch_logs(world.disk, FOLDER)):
        if hour in scheduled and scheduled[hour] == told.get(hour) and not hours.get(hour).sealed:
            _lie_about(cluster, hour, path)
            return


def _lie_about(cluster: Cluster, hour: int, path: str) -> None:
    world = cluster.world
    data = _with_one_wrong(world.disk, path, world.server.log_id, hour)
    node = world.disk._find(path)
    assert isinstance(node, Inode), "a dispatch log is a file"
    cached = node.cached
    kept = bytes(cached)
    cached[:] = data
    world.turns.operations = WHOLE
    try:
        world.sweep()
        for _ in range(4):
            for move in list(world.own.moves()):
                if move.what.startswith((f"{NAME} runs a outcomes", f"{NAME} runs a worker", f"{NAME} hears of")):
                    move.do()
        assert not world.hours().get(hour).sealed, f"hour {hour} is sealed with an outcome of a message it never had"
    finally:
        world.turns.operations = SOME
        cached[:] = kept


def _with_one_wrong(disk: MemoryDisk, path: str, log_id: int, hour: int) -> bytes:
    segment = open_segment(disk, path, FileKind.DISPATCH, log_id, write=False)
    rows = read_outcomes(segment)
    segment.close()
    sequences = rows.sequences.copy()
    sequences[-1] = NEVER_GIVEN
    part = NewPart(sequences, rows.deliver_at_ms, Outcome.DISPATCHED)
    scratch = MemoryDisk()
    scratch.make_folder("/scratch")
    forged = create_segment(scratch, "/scratch/log", segment.header)
    forged.append([NewGroup(GroupKind.DATA, [encode_outcomes(hour, [part])], 1, 0, 0, len(sequences))])
    forged.flush()
    assert np.count_nonzero(sequences == NEVER_GIVEN) == 1
    return scratch.open("/scratch/log").pread(1 << 30, 0)
