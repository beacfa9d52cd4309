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


def test_rule_B1_memory_follows_the_messages_that_are_held_and_not_the_extensions_made() -> None:
    world, peer = ready_world([b"%d" % number for number in range(3_000)])
    ((incarnation, first, count),) = world.pull(peer, most=3_000).handles
    pulls, (group,) = world.core._pulls, world.core._pulls.groups.values()
    for number in range(3_000):
        # As a heartbeat does, whose lease is now longer, now shorter.
        assert _extend(world, peer, [[incarnation, first, 1]], 10_000_000 + number * (-1) ** number) == []
        world.pass_time(1)
    assert len(list(group.window.held())) == 2 and len(pulls._ends) < 1_100
    # Pieces that are extended together are one again.
    assert _extend(world, peer, [[incarnation, first, count]], 10_000_000) == []
    assert len(list(group.window.held())) == 1
    for number in range(count):
        handle = [incarnation, first + number, 1]
        _extend(world, peer, [handle], 10_000_000)
        world.ack(peer, [handle], kind=RequestType.NACK if number % 2 else RequestType.ACK)
    assert group.outstanding == 0 and len(pulls._ends) < 1_100
