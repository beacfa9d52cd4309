"""How many messages a group may have in flight (rule Q10)."""

from __future__ import annotations

from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_int,
)
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SimPeer, World

BODIES = [b"0", b"1", b"2", b"3", b"4", b"5"]
LEASE_MS = 1_000


def test_rule_Q10_a_subscription_bounds_each_of_its_groups() -> None:
    world, origin = World(), SimPeer()
    world.hello(origin, 1)
    for number, subject in enumerate(("a", "b"), 1):
        world.dispatch(origin, 1, dispatch_batch(number, BODIES, subject=subject, w=(0, number - 1)))
    peer = SimPeer()

    def subscribe(bound: int) -> int:
        asked: Head = {"group": GROUP, "subjects": ["a", "b"], "in_flight_max": bound}
        number = need_int(world.ask(peer, RequestType.SUBSCRIBE, asked)[0], "subscription")
        world.pass_time(0)
        return number

    def pull() -> list[bytes]:
        asked: Head = {"subscription": subscribe(bound), "max_messages": 100, "max_bytes": 1 << 20, "wait_ms": 0}
        _, body = world.ask(peer, RequestType.PULL, {**asked, "lease_ms": LEASE_MS, "consumer": "test"})
        return bodies_of(body)

    bound = 2
    assert sorted(pull()) == [b"0", b"0", b"1", b"1"] and pull() == []
    bound = 3
    assert sorted(pull()) == [b"2", b"2"] and pull() == []
