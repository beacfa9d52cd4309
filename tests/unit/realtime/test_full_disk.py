"""A full disk under each log of a realtime server: refused by name or waited for, nothing lost, it recovers (L8)."""

import pytest

from delayd.errors import DiskReserve
from delayd.testing.disk import CAPACITY_BYTES
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer, World

LEASE_MS = 30_000


def served(*bodies: bytes) -> tuple[World, SimPeer]:
    """A server without a reserve, as if others had filled its disk past that."""
    world, peer = World(settings={"free_bytes_all": 0}), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, list(bodies)))
    return world, peer


def fill(world: World, left: int = 0) -> None:
    """With ``left`` bytes a batch of that size is begun, and does not fit with the header of its group."""
    world.disk.capacity_bytes = world.disk.used_bytes + left


def free(world: World) -> None:
    world.disk.capacity_bytes = CAPACITY_BYTES


def test_rule_L8_a_pull_and_an_acknowledgement_that_find_no_space_are_refused_by_name_and_lose_nothing() -> None:
    world, peer = served(b"a", b"b", b"c")
    first = world.pull(peer, most=1)
    fill(world)
    with pytest.raises(DiskReserve) as of_pull:
        world.pull(peer)
    with pytest.raises(DiskReserve):
        world.ack(peer, first.handles)
    with pytest.raises(DiskReserve):
        world.pull(peer, "new group")
    assert "no space is left" in str(of_pull.value) and of_pull.value.retry_after_ms > 0
    assert not world.failures
    free(world)
    assert not world.ack(peer, first.handles)
    assert world.pull(peer).bodies == [b"b", b"c"]
    assert world.pull(peer, "new group").bodies == [b"a", b"b", b"c"]
    world.pass_time(LEASE_MS)
    assert world.restarted().pull(SimPeer()).bodies == [b"b", b"c"]


def test_rule_L8_a_group_that_could_not_be_made_leaves_nothing_to_the_one_that_is_made_next() -> None:
    world, peer = served(b"a", b"b")
    fill(world)
    for _ in range(3):
        with pytest.raises(DiskReserve):
            world.pull(peer)
    free(world)
    pulled = world.pull(peer)
    assert pulled.bodies == [b"a", b"b"] and not world.ack(peer, pulled.handles)
    world.core.checkpoint()
    assert world.restarted().pull(SimPeer()).bodies == []
