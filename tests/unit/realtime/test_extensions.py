"""Leases that a consumer extends, against the core in memory."""

import pytest

from delayd.errors import BadRequest
from delayd.wire.requests import RequestType, need_rows
from realtime.extensions import CLEAN_MIN, Extensions
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, ready_world

LEASE_MS = 30_000  # Of the pulls of these tests.


def _extend(world: World, peer: SimPeer, handles: list[list[int]], lease_ms: int = LEASE_MS) -> list[list[int]]:
    head = {"subject": SUBJECT, "group": GROUP, "lease_ms": lease_ms, "handles": handles}
    return need_rows(world.ask(peer, RequestType.EXTEND, head)[0], "stale", 3)  # type: ignore[arg-type]


def test_what_is_extended_is_held_until_its_new_lease_ends_and_the_rest_lapses() -> None:
    world, peer = ready_world([b"a", b"b", b"c", b"d"])
    ((incarnation, first, _),) = world.pull(peer).handles
    world.pass_time(20_000)
    assert _extend(world, peer, [[incarnation, first + 1, 2]]) == []
    world.pass_time(10_000)
    assert world.pull(peer).bodies == [b"a", b"d"]
    world.pass_time(19_000)
    assert world.pull(peer).bodies == []
    assert world.ack(peer, [[incarnation, first + 1, 1]]) == []
    world.pass_time(1_000)
    assert (pulled := world.pull(peer)).bodies == [b"c"]
    assert pulled.attempts == [2]


def test_a_lease_may_be_extended_again_and_again_and_made_shorter() -> None:
    world, peer = ready_world([b"a"])
    handles = world.pull(peer).handles
    for _ in range(10):
        world.pass_time(29_000)
        assert _extend(world, peer, handles) == []
    assert _extend(world, peer, handles, 1_000) == []
    world.pass_time(1_000)
    assert world.pull(peer).attempts == [2]


def test_what_is_not_held_is_stale() -> None:
    world, peer = ready_world([b"a", b"b", b"c"])
    ((incarnation, first, _),) = world.pull(peer).handles
    world.ack(peer, [[incarnation, first, 1]])
    world.ack(peer, [[incarnation, first + 1, 1]], kind=RequestType.NACK)
    assert _extend(world, peer, [[incarnation, first, 3]]) == [[incarnation, first, 1], [incarnation, first + 1, 1]]
    assert _extend(world, peer, [[incarnation ^ 1, first + 2, 1]]) == [[incarnation ^ 1, first + 2, 1]]
    assert _extend(world, peer, [[incarnation, first + 50, 1]]) == [[incarnation, first + 50, 1]]
    world.pass_time(60_000)
    assert _extend(world, peer, [[incarnation, first + 2, 1]]) == [[incarnation, first + 2, 1]]


def test_after_a_restart_a_pull_has_a_whole_lease_of_its_first_length() -> None:
    world, peer = ready_world([b"a"])
    handles = world.pull(peer).handles
    assert _extend(world, peer, handles, 600_000) == []
    world = world.restarted()
    world.pass_time(LEASE_MS - 1)
    assert world.pull(SimPeer()).bodies == []
    world.pass_time(1)
    assert world.pull(SimPeer()).bodies == [b"a"]


@pytest.mark.parametrize("lease_ms", [0, -1, 1 << 50, "long"])
def test_a_lease_that_makes_no_sense_is_refused(lease_ms: int) -> None:
    world, peer = ready_world([b"a"])
    with pytest.raises(BadRequest):
        _extend(world, peer, world.pull(peer).handles, lease_ms)


def test_a_group_that_does_not_exist_extends_nothing() -> None:
    world, peer = World(), SimPeer()
    assert _extend(world, peer, [[1, 2, 3]]) == [[1, 2, 3]]
    assert world.core._pulls.groups == {}


def test_extensions_that_are_over_are_forgotten() -> None:
    extensions = Extensions()
    for at in range(3 * CLEAN_MIN):
        extensions.extend(2 * at, 2 * at + 1, at + 10, at)
    assert len(extensions) < CLEAN_MIN + 20
    assert extensions.ended(0, 10, 100_000) == [(0, 10)]
