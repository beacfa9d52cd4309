"""Exclusive groups: one consumer gets the messages, and another one takes over from it (rule Q9)."""

from __future__ import annotations

from collections.abc import Sequence

from delayd.testing.executor import StepExecutor
from delayd.wire.consuming import read_stale
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import bodies_of, dispatch_batch
from tests.worlds.realtime import GROUP, SUBJECT, Pulled, SimPeer, World, pull_head, ready_world

WINDOW_MS = 4_000
NAMES: Head = {"subject": SUBJECT, "group": GROUP}
BODIES = [[b"0", b"1", b"2", b"3"]]


def _head(wait_ms: int = 0, most: int = 2, was: int = 0) -> Head:
    return {**pull_head(most=most, wait_ms=wait_ms), "exclusive_ms": WINDOW_MS, "was": was}


def _pull(world: World, peer: SimPeer, wait_ms: int = 0, most: int = 2, was: int = 0) -> Pulled:
    """A pull of an exclusive consumer that is answered at once."""
    answer, body = world.ask(peer, RequestType.PULL, _head(wait_ms, most, was))
    return Pulled(need_u64(answer, "incarnation"), need_rows(answer, "parts", 4), bodies_of(body), body)


def _waits(world: World, peer: SimPeer) -> int:
    """A pull that waits; its request id."""
    request_id = world.send(peer, RequestType.PULL, _head(60_000))
    assert request_id not in peer.answers and request_id not in peer.errors
    return request_id


def _got(peer: SimPeer, request_id: int) -> list[bytes]:
    ((_, body),) = peer.answers[request_id]
    return bodies_of(body)


def _stale(
    world: World, peer: SimPeer, handles: Sequence[Sequence[int]], kind: RequestType = RequestType.ACK
) -> set[int]:
    """Why handles are stale."""
    rows: list[HeadValue] = [list(handle) for handle in handles]
    answer, _ = world.ask(peer, kind, {**NAMES, "handles": rows})
    return {row[3] for row in read_stale(answer)}


def _end(world: World, peer: SimPeer) -> None:
    peer.close()
    world.core.disconnected(peer)


def test_who_takes_over_gets_messages_when_the_end_of_the_other_leases_is_durable() -> None:
    sync = StepExecutor()
    world, origin, other = World(pulls=sync), SimPeer(), SimPeer()
    world.hello(origin, 1)
    world.dispatch(origin, 1, dispatch_batch(1, BODIES[0]))
    lead = SimPeer()
    first = _waits(world, lead)
    sync.run_all()
    assert _got(lead, first) == [b"0", b"1"]
    second = _waits(world, other)
    _end(world, lead)
    assert second not in other.answers
    sync.run_all()
    assert _got(other, second) == [b"0", b"1"]


def _come_back(world: World, peer: SimPeer, was: Sequence[int]) -> None:
    """A consumer that works on what it has got says that it has another connection."""
    head: Head = {**NAMES, "exclusive_ms": WINDOW_MS, "was": list(was)}
    assert world.ask(peer, RequestType.PULL_END, head)[0] == {}


def test_rule_T5_a_lead_whose_words_waited_unread_keeps_the_lead() -> None:
    world, _ = ready_world(*BODIES)
    lead, other = SimPeer(), SimPeer()
    _pull(world, lead)
    waiting = _waits(world, other)
    world.clock.advance(3 * WINDOW_MS)
    world.core.unheard(3 * WINDOW_MS)
    world.core.wake()
    world.ask(lead, RequestType.PING, {})
    assert _got(other, waiting) == []
    assert _pull(world, lead).bodies == [b"2", b"3"]


def test_rule_T5_a_lead_that_gave_up_its_connection_to_a_stopped_server_may_come_back() -> None:
    world, _ = ready_world(*BODIES)
    lead, other, again = SimPeer(), SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    world.clock.advance(20_000)
    world.core.unheard(20_000)
    _end(world, lead)
    waiting = _waits(world, other)
    world.pass_time(WINDOW_MS // 2)
    assert _got(other, waiting) == []
    _come_back(world, again, [pulled.incarnation])
    assert _stale(world, again, pulled.handles) == set()
    assert _pull(world, again).bodies == [b"2", b"3"]
