"""Leases that a consumer extends, against the core in memory."""

from random import Random

import pytest

from delayd.errors import BadRequest
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


def test_what_was_extended_lapses_when_its_last_lease_ends_however_it_was_extended_before() -> None:
    random = Random(1)
    for _ in range(40):
        world, peer = ready_world([b"%d" % number for number in range(6)])
        ((incarnation, first, _),) = world.pull(peer).handles
        now_ms, ends = 0, dict.fromkeys(range(6), LEASE_MS)
        for _ in range(12):
            at, lease_ms = random.randrange(6), random.choice((5_000, 20_000, 60_000, 200_000))
            count = random.randint(1, 6 - at)
            stale = {row[1] - first for row in _extend(world, peer, [[incarnation, first + at, count]], lease_ms)}
            gone = {row for row in range(at, at + count) if ends[row] <= now_ms}
            assert gone == {each for row in range(at, at + count) for each in stale if each == row} or gone
            ends.update({row: now_ms + lease_ms for row in range(at, at + count) if row not in gone})
            passed = random.choice((0, 1_000, 10_000))
            world.pass_time(passed)
            now_ms += passed
            lapsed = world.core._pulls.counters["lapsed"]
            assert lapsed == sum(end <= now_ms for end in ends.values())


def test_a_stall_of_the_server_ends_no_lease() -> None:
    world, peer = ready_world([b"a", b"b"])
    ((incarnation, first, _),) = world.pull(peer).handles
    _extend(world, peer, [[incarnation, first, 1]], 2 * LEASE_MS)
    world.core.unheard(LEASE_MS)
    world.pass_time(2 * LEASE_MS - 1)
    assert world.pull(SimPeer()).bodies == []
    world.pass_time(1)
    assert world.pull(SimPeer()).bodies == [b"b"]
    world.pass_time(LEASE_MS - 1)
    assert world.pull(SimPeer()).bodies == []
    world.pass_time(1)
    assert b"a" in world.pull(SimPeer()).bodies
