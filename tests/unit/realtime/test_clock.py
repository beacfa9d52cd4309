"""The clock of a realtime server: what a step of it moves and what it never moves, and an operator's word about it."""

import pytest

from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
STEPS_MS = [sign * step for step in (1_000, HOUR_MS, DAY_MS) for sign in (1, -1)]


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_rule_P5_appended_at_never_decreases_at_any_step_or_restart(step_ms: int) -> None:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    stamps = [world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))[0]]
    world.clock.step_wall(step_ms)
    world.pass_time(10)
    stamps.append(world.dispatch(peer, 1, dispatch_batch(2, [b"b"]))[0])
    world = world.restarted()
    world.hello(peer, 2)
    stamps.append(world.dispatch(peer, 2, dispatch_batch(3, [b"c"]))[0])
    assert stamps == sorted(stamps)
    assert stamps[2] - stamps[0] < 5_000, "a jump ahead is in doubt"
    assert world.pull(peer).bodies == [b"a", b"b", b"c"]
