"""Groups that begin elsewhere than at the earliest message, are moved, are paused, or end with their last consumer.

Rule Q6.
"""

import pytest

from delayd.errors import BadArgument, SlowDown
from delayd.wire.consuming import GroupInfo, read_groups
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType
from realtime import group_records
from realtime.group_records import GONE_MS
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head, ready_world

SECOND_MS = 1_000


def _names(group: str = GROUP, subject: str = SUBJECT) -> Head:
    return {"subject": subject, "group": group}


def _move(world: World, to: HeadValue, group: str = GROUP, **more: HeadValue) -> Head:
    return world.ask(SimPeer(), RequestType.MOVE_GROUP, {**_names(group), "to": to, **more})[0]


def _begun(world: World, start: HeadValue, group: str = "new", *, ephemeral: bool = False) -> list[bytes]:
    """What a new group gets first."""
    head = {**pull_head(group), "start": start, "ephemeral": ephemeral}
    peer = SimPeer()
    request_id = world.send(peer, RequestType.PULL, head)
    if request_id in peer.errors:
        raise peer.errors[request_id]
    world.core.disconnected(peer)
    return _bodies(peer, request_id)


def _bodies(peer: SimPeer, request_id: int) -> list[bytes]:
    return bodies_of(peer.answers[request_id][0][1])


def _info(world: World, *, ages: bool = False, group: str = GROUP) -> GroupInfo:
    head: Head = {"subject": SUBJECT, "ages": ages}
    return next(
        each for each in read_groups(world.ask(SimPeer(), RequestType.GROUPS, head)[0])[0] if each.group == group
    )


def _over_time() -> World:
    """Three messages, handed over a minute apart."""
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    for number, body in enumerate((b"a", b"b", b"c"), 1):
        world.dispatch(peer, 1, dispatch_batch(number, [body], claimed_at_ms=world.clock.now_ms()))
        world.clock.advance(60 * SECOND_MS)
    return world


def test_an_instant_is_the_first_message_that_was_handed_over_then_or_later() -> None:
    for after_s, bodies in ((-1, [b"a", b"b", b"c"]), (0, [b"a", b"b", b"c"]), (1, [b"b", b"c"]), (60, [b"b", b"c"]),
                            (61, [b"c"]), (121, [])):  # fmt: skip
        world = _over_time()
        begin_ms = world.clock.now_ms() - 180 * SECOND_MS
        world.pull(SimPeer())
        _move(world, {"instant_ms": begin_ms + after_s * SECOND_MS})
        assert world.pull(SimPeer()).bodies == bodies, after_s


def test_what_retention_has_removed_can_not_be_had_again_and_the_error_says_what_is_kept() -> None:
    world, peer = ready_world([b"a" * 3_000], [b"b" * 3_000], retention_ms=1_000, segment_bytes=4096)
    world.ack(peer, world.pull(peer).handles)
    world.dispatch(peer, 1, dispatch_batch(3, [b"c" * 3_000], w=(1, 2)))
    world.pass_time(2_000)
    world.core.retain()
    world.core.retain()
    first = world.core._index.first(world.core._index.subject(SUBJECT))
    assert first > 0
    with pytest.raises(
        BadArgument, match=f"the messages {first} to 2, and a group may go on at {first} to 3, not at 0"
    ):
        _move(world, {"sequence": 0})
    assert _move(world, "earliest")["next"] == first


def test_an_ephemeral_group_ends_when_it_has_had_no_consumers_for_a_while() -> None:
    world, _ = ready_world([b"a"])
    peer = SimPeer()
    assert _begun(world, "earliest", ephemeral=True) == [b"a"]
    world.send(peer, RequestType.PULL, pull_head("new", wait_ms=60_000, lease_ms=60_000))
    for _ in range(11):
        world.pass_time(5_000)
    # The first consumer's lease has ended, and the second one holds the message.
    assert _info(world, group="new").ephemeral
    world.core.disconnected(peer)
    _until_gone(world)


def test_rule_T5_an_ephemeral_group_does_not_end_because_the_server_stood_still() -> None:
    world, _ = ready_world([b"a"])
    _begun(world, "latest", ephemeral=True)
    world.clock.advance(10 * GONE_MS)
    world.core.unheard(10 * GONE_MS)
    world.core.wake()
    assert (SUBJECT, "new") in world.core._pulls.groups
    _until_gone(world)


def test_rule_B1_consumers_of_ephemeral_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_records, "CONSUMERS_MAX", 3)
    world, _ = ready_world([b"a"])
    peers = [SimPeer() for _ in range(4)]
    for number, peer in enumerate(peers[:3]):
        world.ask(peer, RequestType.PULL, {**pull_head(f"g{number}"), "ephemeral": True})
    with pytest.raises(SlowDown):
        world.ask(peers[3], RequestType.PULL, {**pull_head("g3"), "ephemeral": True})
    assert (SUBJECT, "g3") not in world.core._pulls.groups
    world.core.disconnected(peers[0])
    world.ask(peers[3], RequestType.PULL, {**pull_head("g3"), "ephemeral": True})
    world.ask(peers[3], RequestType.DELETE_GROUP, {"subject": SUBJECT, "group": "g3"})
    world.ask(peers[3], RequestType.PULL, {**pull_head("g4"), "ephemeral": True})


def _until_gone(world: World) -> None:
    passed_ms = 0
    while (SUBJECT, "new") in world.core._pulls.groups:
        assert passed_ms < 3 * GONE_MS
        world.pass_time(1_000)
        passed_ms += 1_000
    assert passed_ms >= GONE_MS - 5_000


def test_a_subscription_begins_its_groups_at_the_latest_message_and_those_of_new_subjects_at_the_first() -> None:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, [b"old"], subject="s.a"))
    head: Head = {"group": GROUP, "pattern": "s.*", "start": "latest"}
    consumer = SimPeer()
    number = world.ask(consumer, RequestType.SUBSCRIBE, head)[0]["subscription"]
    world.core.wake()
    world.dispatch(peer, 1, dispatch_batch(2, [b"new"], subject="s.b"), dispatch_batch(3, [b"next"], subject="s.a"))
    world.core.wake()
    pull: Head = {"subscription": number, "max_messages": 9, "max_bytes": 1 << 20, "wait_ms": 0, "lease_ms": 0,
                  "consumer": ""}  # fmt: skip
    _, body = world.ask(consumer, RequestType.PULL, pull)
    assert b"new" in body and b"next" in body and b"old" not in body
