"""Rule Q7: what has expired when a pull meets it is passed over, and counts as acknowledged."""

from __future__ import annotations

import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind
from delayd.testing.tree import PowerLoss
from delayd.wire.requests import RequestType
from tests.batches import messages
from tests.worlds.dispatch_batches import DUE_MS, dispatch_batch
from tests.worlds.realtime import SUBJECT, SimPeer, World, ready_world

SOON_MS = DUE_MS + 5_000


def _batch(batch_id: int, expires: list[int]) -> bytes:
    """A batch whose bodies say which row of which batch they are."""
    bodies = [b"%d-%d" % (batch_id, row) for row in range(len(expires))]
    return messages(
        bodies,
        due=[DUE_MS] * len(bodies),
        expires=expires,
        subjects=[SUBJECT.encode()],
        sequences=range(1_000 * batch_id, 1_000 * batch_id + len(bodies)),
        kind=BatchKind.DISPATCH,
        part=parse(dispatch_batch(batch_id, bodies)).dispatch,
    )


def _world(*batches: list[int]) -> tuple[World, SimPeer]:
    world, peer = ready_world()
    for number, expires in enumerate(batches, 1):
        world.dispatch(peer, 1, _batch(number, expires))
    return world, peer


def _all(world: World, peer: SimPeer, group: str = "billing", most: int = 1_000) -> list[bytes]:
    """All that a group gets and acknowledges, until it is behind everything."""
    found: list[bytes] = []
    for _ in range(300):
        pulled = world.pull(peer, group, most=most)
        found += pulled.bodies
        if pulled.handles:
            assert world.ack(peer, pulled.handles, group) == []
        elif _oldest(world, group) == world.core._index.subject(SUBJECT).end:
            return found
    raise AssertionError("the group never comes to the end")


def _oldest(world: World, group: str = "billing") -> int:
    (found,) = [each for each in world.core._pulls.groups.values() if each.name == group]
    return found.oldest


def test_a_message_that_was_given_back_expires_too_and_one_that_is_held_does_not() -> None:
    world, peer = _world([SOON_MS, SOON_MS, 0])
    pulled = world.pull(peer)
    ((incarnation, first, _),) = pulled.handles
    world.pass_time(6_000)
    assert world.ack(peer, [[incarnation, first, 1]]) == []
    assert world.ack(peer, [[incarnation, first + 1, 2]], kind=RequestType.NACK) == []
    again = world.pull(peer)
    assert again.bodies == [b"1-2"] and again.attempts == [2]
    assert world.ack(peer, again.handles) == [] and _oldest(world) == 3


@pytest.mark.parametrize("loss", list(PowerLoss))
@pytest.mark.parametrize("durable", [False, True])
def test_rule_Q5_a_crash_after_a_pass_over_loses_nothing_and_gives_nothing_that_expired(
    loss: PowerLoss, durable: bool
) -> None:
    world, peer = _world([SOON_MS, SOON_MS, 0], [0, SOON_MS], [SOON_MS], [0], [SOON_MS])
    world.pass_time(6_000)
    first, second = world.pull(peer, most=1), world.pull(peer, most=1)
    assert (first.bodies, second.bodies) == ([b"1-2"], [b"2-0"])
    if durable:
        assert world.ack(peer, first.handles) == []
    disk = world.disk.after_crash(loss, seed=1)
    again, peer = World(disk, world.state.after_crash(disk), world.clock.restarted()), SimPeer()
    again.pass_time(60_000)  # The leases of what was pulled end.
    assert sorted(_all(again, peer)) == [b"1-2"] * (not durable) + [b"2-0", b"4-0"]


def test_while_the_clock_is_in_doubt_nothing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world, peer = _world([SOON_MS])
    world.pass_time(6_000)
    monkeypatch.setattr(type(world.clock), "confirmed", property(lambda clock: False))
    assert world.pull(peer).bodies == [b"1-0"]
