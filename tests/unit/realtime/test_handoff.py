"""The receiving side of the handoff (rules H1, H2, H3, H6), against the core in memory."""

import pytest

from delayd.errors import (
    DelaydError,
    DiskReserve,
    HandoffRefused,
    RestoredOrigin,
    ServerStopped,
)
from delayd.hours import hour_of_ms
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN, dispatch_batch
from tests.worlds.realtime import SimPeer, World

GIVEN = 1 << 40  # The next sequence of a delay server that has given all numbers that came.


def test_rule_L8_a_disk_at_its_reserve_refuses_by_name_and_takes_again_when_space_returns() -> None:
    world = World(settings={"free_bytes_all": 1 << 20})
    peer = SimPeer()
    world.hello(peer, 1)
    capacity = world.disk.capacity_bytes
    world.disk.capacity_bytes = world.disk.used_bytes + (1 << 20)
    with pytest.raises(DiskReserve):
        world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))
    world.disk.capacity_bytes = capacity
    world.dispatch(peer, 1, dispatch_batch(1, [b"a"]))


def test_rule_H6_after_a_failed_append_the_server_stops_instead_of_refusing() -> None:
    world = World()
    peer = SimPeer()
    world.hello(peer, 1)
    world.disk.faults.fail_write_at = world.disk.writes + 1
    request_id = world.send(peer, RequestType.DISPATCH, {"session": 1, "epoch": 1}, dispatch_batch(1, [b"a"]))
    assert request_id not in peer.answers and request_id not in peer.errors
    assert [type(failure) for failure in world.failures] == [ServerStopped]


def test_a_large_window_is_answered_in_several_frames() -> None:
    world = World()
    peer = SimPeer()
    world.hello(peer, 1)
    for batch_id in range(1, 11):
        world.dispatch(peer, 1, dispatch_batch(batch_id, [b""] * 60_000))
    asker = SimPeer()
    assert [row[1] for row in world.hello(asker, 2)] == list(range(1, 11))
    frames = asker.answers[1]
    assert len(frames) > 1
    assert sum(len(body) for _, body in frames) == 10 * 60_000 * 24


def named_hello(
    world: World, session: int, named_offset: int, origin: int = ORIGIN, **more: HeadValue
) -> DelaydError | None:
    """Say hello with an offset that the dispatch logs name; why it was refused."""
    peer = SimPeer()
    head: Head = {
        "log_id": origin,
        "target": world.core.log_id,
        "epoch": 1,
        "instance": 7,
        "session": session,
        "w": [0, 0],
        "named_offset": named_offset,
        **more,
    }
    request_id = world.send(peer, RequestType.HELLO, head)
    return peer.errors.get(request_id)


def test_rule_H7_a_hello_that_names_a_batch_which_is_gone_is_refused_though_the_log_has_grown_again() -> None:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    _, ((_, first), (_, last)) = world.dispatch(peer, 1, dispatch_batch(1, [b"a"]), dispatch_batch(2, [b"b"]))
    assert named_hello(world, 2, last) is None
    assert named_hello(world, 3, first) is None
    # Within a batch, behind the end, and one of another delay server.
    for session, (offset, origin) in enumerate([(last + 8, ORIGIN), (1 << 40, ORIGIN), (last, 0xBAD)], 4):
        error = named_hello(world, session, offset, origin)
        assert isinstance(error, HandoffRefused) and "has lost data" in error.message
    # The server did not remember the hello that it refused.
    assert named_hello(world, 4, last) is None


def test_rule_H7_what_retention_has_removed_is_not_lost() -> None:
    world, peer = World(settings={"segment_bytes": 4096, "retention_ms": 1_000}), SimPeer()
    world.hello(peer, 1)
    _, ((_, first),) = world.dispatch(peer, 1, dispatch_batch(1, [bytes(4_000)]))
    kept = 0
    for batch_id in range(2, 5):
        named = kept
        _, ((_, kept),) = world.dispatch(peer, 1, dispatch_batch(batch_id, [bytes(4_000)], w=(1, batch_id - 1)))
    for _ in range(2):
        world.pass_time(60_000)
        world.core.retain()
    assert world.recovered.message_log.start > first
    assert named_hello(world, 2, named) is None


def decided_world() -> tuple[World, list[int]]:
    """A server whose delay server has recorded two of three batches; returns the offsets of all."""
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    offsets = []
    for batch_id in range(1, 4):
        batch = dispatch_batch(batch_id, [b"%d" % batch_id], w=(1, batch_id - 1))
        offsets += [offset for _, offset in world.dispatch(peer, 1, batch)[1]]
    return world, offsets


def restarts(world: World, way: str) -> World:
    if way == "checkpoint":
        world.core.checkpoint()
    if way == "clean":
        return world.restarted()
    return World(world.disk.after_crash(), world.state.after_crash(), world.clock.restarted())


@pytest.mark.parametrize("way", ["same life", "clean", "checkpoint", "crash"])
def test_rule_H8_a_damaged_dispatch_log_explains_only_batches_of_its_own_hour(way: str) -> None:
    world, offsets = decided_world()
    if way != "same life":
        world = restarts(world, way)
    hour = hour_of_ms(DUE_MS)
    unread: list[list[HeadValue]] = [[], [hour - 1], [hour + 1, 0]]
    for session, hours in enumerate(unread, 5):
        refused = named_hello(world, session, offsets[0], unread_hours=hours, next_sequence=GIVEN)
        assert isinstance(refused, RestoredOrigin)
    # A copy has not given the numbers of what came since, whatever is damaged in it; it was not heard.
    highest = max(origin.highest_sequence for origin in world.core._origins)
    copy = named_hello(world, 8, offsets[0], unread_hours=[hour], next_sequence=highest)
    assert isinstance(copy, RestoredOrigin)
    assert named_hello(world, 8, offsets[0], unread_hours=[hour - 1, hour], next_sequence=highest + 1) is None
    # The offset that it names must lie in this log all the same.
    error = named_hello(world, 9, offsets[0] + 8, unread_hours=[hour], next_sequence=GIVEN)
    assert isinstance(error, HandoffRefused) and "has lost data" in error.message
    # The figure stands: a hello without damage has to name as much again.
    assert isinstance(named_hello(world, 9, offsets[0]), RestoredOrigin)
    head: Head = {"log_id": ORIGIN, "target": world.core.log_id, "epoch": 1, "instance": 7, "session": 9}
    answer, _ = world.ask(SimPeer(), RequestType.HELLO, {**head, "w": [0, 0], "named_offset": offsets[1]})
    assert answer["decided_offset"] == offsets[1]


@pytest.mark.parametrize("way", ["same life", "clean", "checkpoint", "crash"])
def test_rule_H8_an_operator_accepts_it_and_it_counts_its_batches_anew(way: str) -> None:
    world, _ = decided_world()
    operator, peer = SimPeer(), SimPeer()
    answer, _ = world.ask(operator, RequestType.ORIGIN_ACCEPT, {"log_id": ORIGIN})
    assert (answer["epoch"], answer["highest_sequence"]) == (1, 3000)
    if way != "same life":
        world = restarts(world, way)
    head: Head = {"log_id": ORIGIN, "target": world.core.log_id, "epoch": 1, "instance": 8, "session": 1}
    window, _ = world.ask(peer, RequestType.HELLO, {**head, "w": [0, 0], "named_offset": 0})
    assert (window["batches"], window["highest_sequence"]) == ([], 0)
    world.dispatch(peer, 1, dispatch_batch(1, [b"again"]))
    later = restarts(world, "crash")
    assert [row[:2] for row in later.hello(SimPeer(), 2, instance=8)] == [[1, 1]]
