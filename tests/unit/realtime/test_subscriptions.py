"""Subscriptions: one PULL for many subjects, against the core in memory (rules Q1, Q4, B1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from delayd.batch.names import SUBSCRIBED_MAX
from delayd.errors import BadArgument, BadRequest, BadSubject, DelaydError, SlowDown
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import (
    need_int,
    need_list,
    need_maps,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from realtime import consumers, subscriptions
from realtime import groups as realtime_groups
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import SimPeer, World

GROUP = "billing"
WAIT_MS = 5_000


class Feed:
    """A server, and a delay server that hands messages over to it."""

    def __init__(self, world: World | None = None, session: int = 1) -> None:
        self.world = world or World()
        self.origin = SimPeer()
        self.session = session
        self.batches = 1_000 * session
        self.world.hello(self.origin, session)

    def put(self, subject: str, *bodies: bytes) -> None:
        self.batches += 1
        self.world.dispatch(self.origin, self.session, dispatch_batch(self.batches, bodies, subject=subject))

    def settle(self) -> None:
        """Let the groups join that are waiting to."""
        while self.world.core.next_wake_ms() <= self.world.clock.monotonic_ms():
            self.world.core.wake()


class Taker:
    """A connection with one subscription."""

    def __init__(self, feed: Feed, what: str | Sequence[str], group: str = GROUP) -> None:
        self.world = feed.world
        self.peer = SimPeer()
        self.number = subscribed(self.world, self.peer, what, group)
        feed.settle()

    def ask(self, most: int = 1_000, wait_ms: int = WAIT_MS, ahead: int = 0) -> int:
        head: Head = {"subscription": self.number, "max_messages": most, "max_bytes": 1 << 20, "wait_ms": wait_ms}
        head |= {"lease_ms": 30_000, "consumer": "test", "ahead": ahead}
        return self.world.send(self.peer, RequestType.PULL, head)

    def answer(self, request_id: int) -> tuple[Head, list[bytes]]:
        ((head, body),) = self.peer.answers[request_id]
        return head, bodies_of(body)

    def pull(self, most: int = 1_000) -> tuple[Head, list[bytes]]:
        return self.answer(self.ask(most, 0))

    def settle(self, head: Head, kind: RequestType = RequestType.ACK, **more: HeadValue) -> Head:
        """Acknowledge a whole answer."""
        incarnation = need_u64(head, "incarnation")
        handles: HeadValue = [[incarnation, first, count] for first, _, count, _ in need_rows(head, "parts", 4)]
        answer, _ = self.world.ask(
            self.peer, kind, {"group": GROUP, "subjects": head["subjects"], "handles": handles, **more}
        )
        return answer


def subscribed(world: World, peer: SimPeer, what: str | Sequence[str], group: str = GROUP) -> int:
    head: Head = {"group": group} | ({"pattern": what} if isinstance(what, str) else {"subjects": list(what)})
    return need_int(world.ask(peer, RequestType.SUBSCRIBE, head)[0], "subscription")


def names(head: Head) -> list[HeadValue]:
    return [row[0] for row in need_list(head, "subjects") if isinstance(row, list)]


def groups(world: World) -> list[Head]:
    return need_maps(world.ask(SimPeer(), RequestType.GROUPS, {"subject": None})[0], "groups")


def test_subjects_take_turns_whatever_waits_in_each() -> None:
    feed = Feed()
    feed.put("flood", *[b"f%d" % number for number in range(500)])
    for number in range(4):
        feed.put(f"quiet{number}", b"q%d" % number)
    taker = Taker(feed, ["flood", *(f"quiet{number}" for number in range(4))])
    assert taker.pull(most=10)[1] == [b"f0", b"f1", b"q0", b"q1", b"q2", b"q3"]
    # When it is the only one, it gets all there is room for.
    assert len(taker.pull(most=8)[1]) == 8


def test_a_group_without_room_is_tried_again_and_keeps_nothing_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = Feed()
    feed.put("a", b"a")
    feed.put("b", b"b")
    monkeypatch.setattr(realtime_groups, "GROUPS_MAX", 1)
    taker = Taker(feed, ["a", "b"])
    assert taker.pull()[1] == [b"a"]
    monkeypatch.setattr(realtime_groups, "GROUPS_MAX", 2)
    asked = taker.ask()
    feed.world.pass_time(consumers.RETRY_MS)
    feed.settle()
    assert taker.answer(asked)[1] == [b"b"]


def test_rule_B2_groups_join_some_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed()
    for number in range(40):
        feed.put(f"s.{number:02}", b"x")
    monkeypatch.setattr(consumers, "TURN_WORK", consumers.MAKE_WORK * 5)
    peer = SimPeer()
    subscribed(feed.world, peer, "s.*")
    counts = [len(groups(feed.world))]
    while counts[-1] < 40:
        feed.world.core.wake()
        counts.append(len(groups(feed.world)))
        assert len(counts) < 30
    assert max(after - before for before, after in pairwise(counts)) <= 6


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({}, BadRequest),
        ({"subjects": ["a"], "pattern": "*"}, BadRequest),
        ({"subjects": "a"}, BadRequest),
        ({"subjects": [1]}, BadRequest),
        ({"subjects": []}, BadArgument),
        ({"subjects": ["a b"]}, BadSubject),
        ({"subjects": ["a.*"]}, BadSubject),
        ({"subjects": [f"s{number}" for number in range(SUBSCRIBED_MAX + 1)]}, BadArgument),
        ({"pattern": "orders"}, BadSubject),
        ({"pattern": "a.>.b"}, BadSubject),
        ({"pattern": 1}, BadRequest),
        ({"pattern": "*", "group": ""}, BadRequest),
    ],
)
def test_rule_E1_what_is_no_subscription_is_refused_by_name(asked: Head, error: type[DelaydError]) -> None:
    world, peer = World(), SimPeer()
    with pytest.raises(error):
        world.ask(peer, RequestType.SUBSCRIBE, {"group": GROUP, **asked})
    assert len(world.core._pulls.subscriptions) == 0 and not groups(world)


def test_rule_B1_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed()
    peer = SimPeer()
    for number in range(subscriptions.OF_PEER_MAX):
        subscribed(feed.world, peer, ["a"], f"group{number}")
    with pytest.raises(SlowDown, match="connection"):
        subscribed(feed.world, peer, ["a"], "one more")
    subscribed(feed.world, peer, ["a"], "group0")
    monkeypatch.setattr(subscriptions, "NAMES_MAX", subscriptions.OF_PEER_MAX + 1)
    with pytest.raises(SlowDown, match="room"):
        subscribed(feed.world, SimPeer(), ["a", "b"], "names")
    subscribed(feed.world, SimPeer(), ["a"], "names")
    monkeypatch.setattr(subscriptions, "SUBSCRIPTIONS_MAX", subscriptions.OF_PEER_MAX + 1)
    with pytest.raises(SlowDown, match="room"):
        subscribed(feed.world, SimPeer(), "a.*", "one more")
    feed.world.core.disconnected(peer)
    subscribed(feed.world, SimPeer(), ["a", "b"], "one more")
