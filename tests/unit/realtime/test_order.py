"""Ordered groups: of each ordering key the next message only when the one before is settled (rule Q8)."""

from __future__ import annotations

import pytest

from delayd.errors import BadArgument, NotOrdered
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from realtime.groups import Group
from realtime.order import KNOWN_MAX, LOOKED_AT, LOOKED_AT_A_BATCH, Order
from realtime.window import Stage
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head

LEASE_MS = 30_000
HOUR_MS = 3_600_000
NAMES: Head = {"subject": SUBJECT, "group": GROUP}


def _pull(world: World, peer: SimPeer, most: int = 1000, **fields: bool) -> Pulled:
    head = {**pull_head(most=most, lease_ms=LEASE_MS), "ordered": True, **fields}
    answer, body = world.ask(peer, RequestType.PULL, head)
    return Pulled(need_u64(answer, "incarnation"), need_rows(answer, "parts", 4), bodies_of(body), body)


def _world(*batches: tuple[list[bytes], list[int]]) -> World:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    for number, (bodies, keys) in enumerate(batches, 1):
        world.dispatch(peer, 1, dispatch_batch(number, bodies, ordering=keys))
    return world


def _handle(pulled: Pulled, place: int) -> list[int]:
    """The handle of one message of an answer."""
    for first, _, count, _ in pulled.parts:
        if place < count:
            return [pulled.incarnation, first + place, 1]
        place -= count
    raise LookupError(place)


def test_a_delay_of_more_than_a_day_is_refused_by_name() -> None:
    world, peer = _world(([b"a1"], [1])), SimPeer()
    retry: list[HeadValue] = [*_handle(_pull(world, peer), 0), 24 * HOUR_MS + 1, ""]
    with pytest.raises(BadArgument, match="24 hours at most"):
        world.ask(peer, RequestType.RETRY, {**NAMES, "retries": [retry]})


def test_a_group_that_was_made_without_an_order_refuses_one() -> None:
    world, peer = _world(([b"a1", b"a2"], [1, 1])), SimPeer()
    assert _pull(world, peer, ordered=False).bodies == [b"a1", b"a2"]
    with pytest.raises(NotOrdered, match="was made without an order"):
        _pull(world, peer)


def _put_off(world: World, peer: SimPeer, pulled: Pulled) -> None:
    retry: list[HeadValue] = [*_handle(pulled, 0), HOUR_MS, "failed"]
    assert world.ask(peer, RequestType.RETRY, {**NAMES, "retries": [retry]})[0]["stale"] == []


def test_what_is_put_off_after_a_move_does_not_come_when_an_earlier_pause_ends() -> None:
    world, peer = _world(([b"a1", b"a2"], [1, 1])), SimPeer()
    _put_off(world, peer, _pull(world, peer))
    world.pass_time(HOUR_MS // 2)
    world.ask(peer, RequestType.MOVE_GROUP, {**NAMES, "to": "earliest"})
    _put_off(world, peer, _pull(world, peer))
    world.pass_time(HOUR_MS // 2)
    assert _pull(world, peer).bodies == []
    world.pass_time(HOUR_MS // 2)
    assert _pull(world, peer).bodies == [b"a1"]


def test_how_many_messages_it_looks_ahead_is_bounded() -> None:
    order = Order()
    order.begin(0, (), ())
    while order.wants_more(10 * KNOWN_MAX):
        order.add([1] * LOOKED_AT)
    assert order.scanned == KNOWN_MAX and order.ready == 1 and order.waiting == KNOWN_MAX - 1
    order.moved(0, 1, Stage.HELD, 1)
    assert not order.offers_any(10 * KNOWN_MAX)
    order.moved(0, 1, Stage.SETTLED, 1)
    assert order.offers_any(10 * KNOWN_MAX)


def _group(world: World) -> Group:
    return world.core._pulls.groups[SUBJECT, GROUP]


def test_one_pull_reads_a_bounded_number_of_batches() -> None:
    count = 3 * LOOKED_AT // LOOKED_AT_A_BATCH
    world, peer = _world(*[([b"%d" % number], [7]) for number in range(count)]), SimPeer()
    assert _pull(world, peer, most=1).bodies == [b"0"]
    order = _group(world).order
    assert order is not None
    before = order.scanned
    assert _pull(world, peer).bodies == [] and order.scanned == before + LOOKED_AT // LOOKED_AT_A_BATCH


def test_messages_that_the_group_does_not_want_hold_up_nobody() -> None:
    world, peer = _world(([b"x"] * 500, [7] * 500)), SimPeer()
    head = {**pull_head(), "ordered": True, "tags_any": ["red"]}
    world.ask(peer, RequestType.PULL, head)
    assert _group(world).next == 500 and _group(world).oldest == 500
