"""The clock of a realtime server: what a step of it moves and what it never moves, and an operator's word about it."""

import pytest

from delayd.testing.clock import SimClock
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


def test_rule_T1_an_operators_word_makes_a_clock_that_jumped_believed() -> None:
    world, peer = World(), SimPeer()
    before_ms = world.clock.now_ms()
    world.clock.step_wall(HOUR_MS)
    status, _ = world.ask(peer, RequestType.STATUS, {})
    assert (status["now_ms"], status["clock_confirmed"]) == (before_ms, False)
    answer, _ = world.ask(peer, RequestType.TRUST_CLOCK, {})
    assert answer == {"now_ms": before_ms + HOUR_MS}
    status, _ = world.ask(peer, RequestType.STATUS, {})
    assert (status["now_ms"], status["clock_confirmed"]) == (before_ms + HOUR_MS, True)


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


def test_rule_T4_nothing_is_stamped_ahead_while_the_boot_is_in_doubt() -> None:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    stamped_ms, _ = world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))
    evidence = world.clock.restart_evidence()
    world.clock.machine.reboot()
    world.clock.step_wall(60 * DAY_MS)
    clock = SimClock(machine=world.clock.machine, previous=evidence)
    booted = World(world.disk.after_kill(), world.state, clock)
    assert not booted.clock.confirmed
    booted.hello(peer, 2)
    assert booted.dispatch(peer, 2, dispatch_batch(2, [b"b"]))[0] == stamped_ms
    clock.step_wall(-60 * DAY_MS)
    booted.pass_time(30_000)
    assert clock.confirmed and booted.dispatch(peer, 2, dispatch_batch(3, [b"c"]))[0] == clock.now_ms()
