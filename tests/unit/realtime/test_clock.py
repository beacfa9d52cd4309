"""The clock of a realtime server: what a step of it moves and what it never moves, and an operator's word about it."""

import pytest

from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World, pull_head

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
LEASE_MS = 30_000
STEPS_MS = [sign * step for step in (1_000, HOUR_MS, DAY_MS) for sign in (1, -1)]


def checkpoints_of(world: World) -> object:
    counters = world.ask(SimPeer(), RequestType.STATUS, {})[0]["counters"]
    assert isinstance(counters, dict)
    return counters["checkpoints"]


@pytest.mark.parametrize("step_ms", STEPS_MS)
def test_rule_T3_leases_long_polls_and_checkpoints_take_their_time_after_any_step(step_ms: int) -> None:
    world, peer = World(settings={"checkpoint_every_ms": 60_000}), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))
    assert world.pull(peer).bodies == [b"a"]
    waiting = world.send(peer, RequestType.PULL, pull_head(group="other", subject="none", wait_ms=20_000))
    world.clock.step_wall(step_ms)
    world.pass_time(19_999)
    assert waiting not in peer.answers
    world.pass_time(1)
    assert waiting in peer.answers
    world.pass_time(LEASE_MS - 20_001)
    assert world.pull(peer).bodies == []
    world.pass_time(1)
    assert (again := world.pull(peer)).bodies == [b"a"] and again.attempts == [2]
    assert not world.ack(peer, again.handles)
    world.pass_time(LEASE_MS - 1)
    assert checkpoints_of(world) == 0
    world.pass_time(1)
    assert checkpoints_of(world) == 1


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
