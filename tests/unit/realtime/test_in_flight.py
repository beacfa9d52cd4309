"""How many messages a group may have in flight (rule Q10)."""

from __future__ import annotations

import pytest

from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_int,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head, ready_world

NAMES: Head = {"subject": SUBJECT, "group": GROUP}
BODIES = [b"0", b"1", b"2", b"3", b"4", b"5"]
LEASE_MS = 1_000
WAIT_MS = 600_000


def _head(bound: int, most: int = 10, wait_ms: int = 0) -> Head:
    return {**pull_head(most=most, wait_ms=wait_ms, lease_ms=LEASE_MS), "in_flight_max": bound}


def _pull(world: World, peer: SimPeer, bound: int, most: int = 10) -> Pulled:
    answer, body = world.ask(peer, RequestType.PULL, _head(bound, most))
    return Pulled(need_u64(answer, "incarnation"), need_rows(answer, "parts", 4), bodies_of(body), body)


def _waits(world: World, peer: SimPeer, bound: int) -> int:
    request_id = world.send(peer, RequestType.PULL, _head(bound, wait_ms=WAIT_MS))
    assert request_id not in peer.answers
    return request_id


def _got(peer: SimPeer, request_id: int) -> list[bytes]:
    ((_, body),) = peer.answers[request_id]
    return bodies_of(body)


@pytest.mark.parametrize("how", ["ack", "nack", "retry", "reject", "lapse", "raise", "drop"])
def test_rule_Q10_whatever_makes_room_lets_the_next_message_leave(how: str) -> None:
    world, _ = ready_world(BODIES)
    one, other = SimPeer(), SimPeer()
    pulled = _pull(world, one, 2)
    waiting = _waits(world, other, 2)
    handle, *_ = pulled.handles
    first = [handle[0], handle[1], 1]
    if how == "ack":
        world.ask(one, RequestType.ACK, {**NAMES, "handles": [first]})
    elif how == "nack":
        world.ask(one, RequestType.NACK, {**NAMES, "handles": [first]})
    elif how == "retry":
        world.ask(one, RequestType.RETRY, {**NAMES, "retries": [[*first, 60_000, ""]]})
    elif how == "reject":
        world.ask(one, RequestType.REJECT, {**NAMES, "rejects": [[*first, "no", ""]]})
    elif how == "lapse":
        world.pass_time(LEASE_MS)
    elif how == "raise":
        world.send(one, RequestType.PULL, _head(3, most=1))
    else:
        world.send(one, RequestType.PULL, _head(0, most=1))
    expected = {"nack": [b"0"], "lapse": [b"0", b"1"], "drop": [b"2", b"3", b"4", b"5"]}
    assert _got(other, waiting) == expected.get(how, [b"2"])


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
