"""Sharing: what a group is holds for all its consumers, whether they name its subject alone, in a list, or by a pattern
(rules Q7, Q8, Q9).
"""

from __future__ import annotations

from typing import Any

import pytest

from delayd.errors import ExclusiveConflict
from delayd.wire.frame import Head
from delayd.wire.heads import need_int
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head

WAYS = ("alone", "list", "pattern")
EXCLUSIVE: Head = {"exclusive_ms": 4_000}
PLAIN: dict[str, Any] = {}


class Taker:
    """A consumer of one subject in one of the ways."""

    def __init__(self, world: World, way: str, said: dict[str, Any]) -> None:
        self.world = world
        self.peer = SimPeer()
        self.head: Head = {**pull_head(most=1), **said}
        if way == "alone":
            return
        what: Head = {"subjects": [SUBJECT]} if way == "list" else {"pattern": "*"}
        answer, _ = world.ask(self.peer, RequestType.SUBSCRIBE, {"group": GROUP, **what, **said})
        _settle(world)
        self.head = {"subscription": need_int(answer, "subscription"), **pull_head(most=1)}
        del self.head["subject"], self.head["group"]

    def pull(self) -> list[bytes]:
        return bodies_of(self.world.ask(self.peer, RequestType.PULL, self.head)[1])


def _settle(world: World) -> None:
    """Let the groups of subscriptions join."""
    while world.core.next_wake_ms() <= world.clock.monotonic_ms():
        world.core.wake()


def _world() -> World:
    world, origin = World(), SimPeer()
    world.hello(origin, 1)
    world.dispatch(origin, 1, dispatch_batch(1, [b"0", b"1", b"2"], subject=SUBJECT))
    return world


@pytest.mark.parametrize("way", WAYS)
def test_who_would_share_an_exclusive_group_is_refused(way: str) -> None:
    world = _world()
    lead = Taker(world, "alone", EXCLUSIVE)
    assert lead.pull() == [b"0"]
    with pytest.raises(ExclusiveConflict):
        Taker(world, way, PLAIN).pull()
    assert lead.pull() == [b"1"]
    lead.peer.close()
    world.core.disconnected(lead.peer)
    assert Taker(world, way, PLAIN).pull() == [b"2"]


@pytest.mark.parametrize("way", WAYS[1:])
def test_nobody_leads_a_group_that_a_subscription_shares(way: str) -> None:
    world = _world()
    taker = Taker(world, way, PLAIN)
    with pytest.raises(ExclusiveConflict):
        Taker(world, "alone", EXCLUSIVE).pull()
    assert taker.pull() == [b"0"]
    taker.peer.close()
    world.core.disconnected(taker.peer)
    Taker(world, "alone", EXCLUSIVE).pull()
