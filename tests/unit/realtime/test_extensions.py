"""Leases that a consumer extends, against the core in memory."""

from delayd.wire.heads import need_rows
from delayd.wire.requests import RequestType
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
