"""Groups that begin elsewhere than at the earliest message, are moved, are paused, or end with their last consumer.

Rule Q6.
"""

import pytest

from delayd.errors import BadArgument, BadRequest, SlowDown
from delayd.wire.consuming import GroupInfo, Why, read_groups, read_stale
from delayd.wire.frame import Head, HeadValue
from delayd.wire.requests import RequestType
from realtime import ephemeral as ephemeral_groups
from realtime.ephemeral import GONE_MS
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head, ready_world

SECOND_MS = 1_000


def _names(group: str = GROUP, subject: str = SUBJECT) -> Head:
    return {"subject": subject, "group": group}


def _move(world: World, to: HeadValue, group: str = GROUP, **more: HeadValue) -> Head:
    return world.ask(SimPeer(), RequestType.MOVE_GROUP, {**_names(group), "to": to, **more})[0]


def _pause(world: World, paused: bool) -> None:
    answer, _ = world.ask(SimPeer(), RequestType.PAUSE_GROUP, {**_names(), "paused": paused})
    assert answer["paused"] is paused


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


def test_a_rewound_group_gets_what_it_had_acknowledged_again_and_nobody_holds_anything() -> None:
    world, peer = ready_world([b"a", b"b"], [b"c"])
    pulled = world.pull(peer)
    world.ack(peer, [[pulled.incarnation, pulled.parts[0][0], 1]])
    assert _move(world, "earliest") == {**_names(), "before": 3, "next": 0, "dropped": 2}
    again = world.pull(SimPeer())
    assert again.bodies == [b"a", b"b", b"c"] and again.attempts == [1, 1]
    head: Head = {**_names(), "handles": [*pulled.handles]}
    first = pulled.parts[0][0]
    # Of these the first was acknowledged, and saying so again is no error.
    assert read_stale(world.ask(peer, RequestType.ACK, head)[0]) == [
        [pulled.incarnation, first + 1, 2, Why.LEASE_ENDED]
    ]
    world.ack(SimPeer(), again.handles)
    world.pass_time(600 * SECOND_MS)
    assert world.pull(SimPeer()).bodies == []


@pytest.mark.parametrize(("to", "bodies"), [("latest", []), ({"sequence": 2}, [b"c"]), ({"sequence": 3}, [])])
def test_a_group_skips_messages_also_those_that_were_to_come_again(to: HeadValue, bodies: list[bytes]) -> None:
    world, peer = ready_world([b"a", b"b"], [b"c"])
    pulled = world.pull(peer, most=2)
    world.ack(peer, [[pulled.incarnation, pulled.parts[0][0], 1]], kind=RequestType.NACK)
    assert _move(world, to)["dropped"] == 2
    assert world.pull(peer).bodies == bodies
    world.pass_time(600 * SECOND_MS)
    assert world.pull(peer).bodies == bodies


def test_an_instant_is_the_first_message_that_was_handed_over_then_or_later() -> None:
    for after_s, bodies in ((-1, [b"a", b"b", b"c"]), (0, [b"a", b"b", b"c"]), (1, [b"b", b"c"]), (60, [b"b", b"c"]),
                            (61, [b"c"]), (121, [])):  # fmt: skip
        world = _over_time()
        begin_ms = world.clock.now_ms() - 180 * SECOND_MS
        world.pull(SimPeer())
        _move(world, {"instant_ms": begin_ms + after_s * SECOND_MS})
        assert world.pull(SimPeer()).bodies == bodies, after_s


def test_a_dry_run_says_what_a_move_would_do_and_does_nothing() -> None:
    world, peer = ready_world([b"a", b"b"])
    pulled = world.pull(peer, most=1)
    assert _move(world, "latest", dry_run=True) == {**_names(), "before": 1, "next": 2, "dropped": 1}
    assert world.ack(peer, pulled.handles) == [] and world.pull(peer).bodies == [b"b"]


def test_a_consumer_that_waits_gets_what_a_rewound_group_has() -> None:
    world, peer = ready_world([b"a"])
    world.ack(peer, world.pull(peer).handles)
    request_id = world.send(peer, RequestType.PULL, pull_head(wait_ms=60_000))
    assert request_id not in peer.answers
    _move(world, "earliest")
    assert _bodies(peer, request_id) == [b"a"]


def test_a_move_survives_a_checkpoint_and_a_restart() -> None:
    for checkpoint in (False, True):
        world, peer = ready_world([b"a", b"b", b"c"])
        pulled = world.pull(peer)
        world.ack(peer, pulled.handles)
        _move(world, {"sequence": 1})
        if checkpoint:
            world.core.checkpoint()
        world = world.restarted()
        assert world.pull(SimPeer()).bodies == [b"b", b"c"]


@pytest.mark.parametrize(
    ("to", "error"),
    [
        ({"sequence": 4}, BadArgument),
        ("first", BadRequest),
        (7, BadRequest),
        ({"sequence": -1}, BadRequest),
        ({"instant_ms": 1 << 62}, BadRequest),
        ({"instant_ms": 1, "sequence": 1}, BadRequest),
        ({}, BadRequest),
    ],
)
def test_a_move_to_nowhere_is_refused(to: HeadValue, error: type[Exception]) -> None:
    world, peer = ready_world([b"a", b"b", b"c"])
    pulled = world.pull(peer)
    with pytest.raises(error):
        _move(world, to)
    with pytest.raises(BadArgument, match="no group other"):
        _move(world, "latest", "other")
    assert world.ack(peer, pulled.handles) == []


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


def test_a_paused_group_gives_nothing_and_takes_acknowledgements() -> None:
    world, peer = ready_world([b"a"], [b"b"])
    pulled = world.pull(peer, most=1)
    _pause(world, True)
    assert world.pull(peer).bodies == [] and _info(world).paused
    waiting = world.send(peer, RequestType.PULL, pull_head(wait_ms=60_000))
    assert world.ack(peer, pulled.handles) == []
    world.core.checkpoint()
    _pause(world, True)  # To say it twice is to say it once.
    assert waiting not in peer.answers
    _pause(world, False)
    assert _bodies(peer, waiting) == [b"b"] and not _info(world).paused


def test_a_pause_survives_a_checkpoint_and_a_restart() -> None:
    for checkpoint in (False, True):
        world, peer = ready_world([b"a"])
        world.pull(peer, "x", most=1)
        world.pull(peer, most=1)
        _pause(world, True)
        if checkpoint:
            world.core.checkpoint()
        world = world.restarted()
        world.pass_time(60 * SECOND_MS)
        assert world.pull(SimPeer()).bodies == [] and world.pull(SimPeer(), "x").bodies == [b"a"]
        _pause(world, False)
        assert world.pull(SimPeer()).bodies == [b"a"]


def test_who_fetches_ahead_is_asked_for_nothing_while_the_group_is_paused() -> None:
    world, peer = ready_world([b"a"], [b"b"])
    world.pull(peer, most=1)
    _pause(world, True)
    hungry = SimPeer()
    world.send(hungry, RequestType.PULL, pull_head(wait_ms=60_000))
    answer, _ = world.ask(peer, RequestType.PULL, pull_head(ahead=3))
    assert answer["wanted"] == 0


def test_a_group_begins_where_its_first_pull_says() -> None:
    world = _over_time()
    begin_ms = world.clock.now_ms() - 180 * SECOND_MS
    assert _begun(world, "earliest", "a") == [b"a", b"b", b"c"]
    assert _begun(world, "latest", "b") == []
    assert _begun(world, {"instant_ms": begin_ms + 61 * SECOND_MS}, "c") == [b"c"]
    assert _begun(world, {"sequence": 1}, "d") == [b"b", b"c"]
    with pytest.raises(BadArgument):
        _begun(world, {"sequence": 9}, "e")
    with pytest.raises(BadRequest):
        _begun(world, "last", "e")
    assert (SUBJECT, "e") not in world.core._pulls.groups
    # A group that exists stays where it is.
    assert _begun(world, "earliest", "b") == []


def test_the_beginning_of_a_group_survives_a_restart() -> None:
    world = _over_time()
    assert _begun(world, "latest") == []
    world = world.restarted()
    assert world.pull(SimPeer(), "new").bodies == []
    world.hello(delay := SimPeer(), 2, w=(1, 3))
    world.dispatch(delay, 2, dispatch_batch(4, [b"d"], w=(1, 3)))
    assert world.pull(SimPeer(), "new").bodies == [b"d"]


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


@pytest.mark.parametrize("kind", [RequestType.PULL, RequestType.PULL_END])
def test_an_ephemeral_group_lives_as_long_as_the_connection_of_a_consumer(kind: RequestType) -> None:
    world, _ = ready_world([b"a"])
    _begun(world, "latest", ephemeral=True)
    peer, head = SimPeer(), pull_head("new") if kind == RequestType.PULL else {"subject": SUBJECT, "group": "new"}
    world.ask(peer, kind, head)
    for _ in range(40):
        world.pass_time(5_000)
    assert (SUBJECT, "new") in world.core._pulls.groups
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
    monkeypatch.setattr(ephemeral_groups, "CONSUMERS_MAX", 3)
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


def test_an_ephemeral_group_is_one_after_a_restart_too() -> None:
    for checkpoint in (False, True):
        world, _ = ready_world([b"a"])
        _begun(world, "latest", ephemeral=True)
        if checkpoint:
            world.core.checkpoint()
        world = world.restarted()
        assert (SUBJECT, "new") in world.core._pulls.groups
        _until_gone(world)
        assert (SUBJECT, "new") not in world.restarted().core._pulls.groups


def _until_gone(world: World) -> None:
    passed_ms = 0
    while (SUBJECT, "new") in world.core._pulls.groups:
        assert passed_ms < 3 * GONE_MS
        world.pass_time(1_000)
        passed_ms += 1_000
    assert passed_ms >= GONE_MS - 5_000


def test_a_group_that_is_not_ephemeral_stays() -> None:
    world, peer = ready_world([b"a"])
    world.ack(peer, world.pull(peer).handles)
    for _ in range(20):
        world.pass_time(GONE_MS)
    assert (SUBJECT, GROUP) in world.core._pulls.groups


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


def test_the_age_of_the_oldest_message_is_told_to_who_asks() -> None:
    world = _over_time()
    pulled = world.pull(SimPeer(), most=1)
    assert _info(world).oldest_ms_ago is None
    assert _info(world, ages=True).oldest_ms_ago == 180 * SECOND_MS
    world.ack(SimPeer(), pulled.handles)
    assert _info(world, ages=True).oldest_ms_ago == 120 * SECOND_MS
    _move(world, "latest")
    assert _info(world, ages=True).oldest_ms_ago is None
