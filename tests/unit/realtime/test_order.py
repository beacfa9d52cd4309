"""Ordered groups: of each ordering key the next message only when the one before is settled (rule Q8)."""

from __future__ import annotations

import pytest

from delayd.testing.executor import StepExecutor
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from realtime.group_window import Stage
from realtime.groups import Group
from realtime.order import KNOWN_MAX, LOOKED_AT, LOOKED_AT_A_BATCH, Order
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head

LEASE_MS = 30_000
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


@pytest.mark.parametrize("word", [RequestType.ACK, RequestType.REJECT])
def test_the_next_of_a_key_leaves_when_what_was_said_of_the_one_before_is_durable(word: RequestType) -> None:
    world, peer, other, sync = _world(([b"a1", b"a2"], [1, 1])), SimPeer(), SimPeer(), StepExecutor()
    pulled = _pull(world, peer)
    world.core.stop(lambda: None)
    world.core.close()
    world.lock.release()
    world = World(world.disk, world.state, world.clock.restarted(), pulls=sync, settings=world.settings)
    rejects: list[HeadValue] = [[*_handle(pulled, 0), "broken", ""]]
    said: Head = {"handles": [_handle(pulled, 0)]} if word == RequestType.ACK else {"rejects": rejects}
    waiting = world.send(other, RequestType.PULL, {**pull_head(wait_ms=10_000), "ordered": True})
    world.send(peer, word, {**NAMES, **said})
    assert waiting not in other.answers
    sync.run_all()
    ((_, body),) = other.answers[waiting]
    assert bodies_of(body) == [b"a2"]


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
