"""Exclusive groups: one consumer gets the messages, and another one takes over from it (rule Q9)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from delayd.errors import BadRequest, ExclusiveConflict
from delayd.testing.disk import Faults, MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.wire.consuming import Why, read_stale
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_rows, need_u64
from delayd.wire.requests import RequestType
from realtime.roster import RETRY_MS
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


def test_one_gets_messages_and_the_other_stands_by() -> None:
    world, _ = ready_world(*BODIES)
    lead, other = SimPeer(), SimPeer()
    assert _pull(world, lead).bodies == [b"0", b"1"]
    waiting = _waits(world, other)
    assert _pull(world, lead).bodies == [b"2", b"3"]
    info = world.core._pulls.groups[SUBJECT, GROUP]
    assert info.lead is not None and len(info.standby) == 1
    # A pull that stands by is answered at its end, as any other one, which is half of the window here.
    world.pass_time(WINDOW_MS // 2)
    assert _got(other, waiting) == []


def test_the_end_of_its_connection_hands_over_at_once() -> None:
    world, _ = ready_world(*BODIES)
    lead, other, third = SimPeer(), SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    first, second = _waits(world, other), _waits(world, third)
    _end(world, lead)
    assert _got(other, first) == [b"0", b"1"] and second not in third.answers
    assert _stale(world, SimPeer(), pulled.handles) == {Why.FENCED}
    assert _stale(world, SimPeer(), pulled.handles, RequestType.NACK) == {Why.FENCED}


def test_one_that_stands_by_ends_at_the_same_time_as_the_lead() -> None:
    world, _ = ready_world(*BODIES)
    lead, other, third = SimPeer(), SimPeer(), SimPeer()
    _pull(world, lead)
    _waits(world, other)
    waiting = _waits(world, third)
    other.close()  # Its connection has ended, and nobody has told the server yet.
    _end(world, lead)
    assert _got(third, waiting) == [b"0", b"1"]
    world.core.disconnected(other)
    world.pass_time(WINDOW_MS)
    assert not world.core._pulls.groups[SUBJECT, GROUP].standby


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


def test_a_lead_that_is_silent_for_its_window_is_replaced() -> None:
    world, _ = ready_world(*BODIES)
    lead, other = SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    world.pass_time(WINDOW_MS // 2)
    waiting = _waits(world, other)
    world.pass_time(WINDOW_MS // 2 - 1)
    assert waiting not in other.answers
    world.pass_time(1)
    assert _got(other, waiting) == [b"0", b"1"]
    # The old one comes to itself: what it has is refused by name, and it stands by.
    assert _stale(world, lead, pulled.handles) == {Why.FENCED}
    waiting = _waits(world, lead)
    _end(world, other)
    assert _got(lead, waiting) == [b"0", b"1"]


@pytest.mark.parametrize("kind", [RequestType.PING, RequestType.ACK])
def test_a_lead_that_says_anything_keeps_its_lead(kind: RequestType) -> None:
    world, _ = ready_world(*BODIES)
    lead, other = SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    head: Head = {} if kind == RequestType.PING else {**NAMES, "handles": [list(pulled.handles[0])]}
    for _ in range(5):
        waiting = _waits(world, other)
        world.pass_time(WINDOW_MS // 2)
        world.ask(lead, kind, head)
        assert _got(other, waiting) == []
    assert _pull(world, lead).bodies == [b"2", b"3"]


def test_a_lead_that_nobody_replaces_keeps_it_beyond_its_window() -> None:
    world, _ = ready_world(*BODIES)
    lead = SimPeer()
    pulled = _pull(world, lead)
    world.pass_time(3 * WINDOW_MS)
    assert _stale(world, lead, pulled.handles) == set()
    assert _pull(world, lead).bodies == [b"2", b"3"]


def test_who_comes_back_on_another_connection_keeps_what_it_holds() -> None:
    world, _ = ready_world(*BODIES)
    lead, again = SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    _end(world, lead)
    assert _pull(world, again, was=pulled.incarnation).bodies == [b"2", b"3"]
    assert _stale(world, again, pulled.handles) == set()


@pytest.mark.parametrize("was", [0, 7])
def test_another_one_ends_the_leases_of_the_one_before(was: int) -> None:
    world, _ = ready_world(*BODIES)
    lead, again = SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    _end(world, lead)
    taken = _pull(world, again, was=was)
    assert taken.bodies == [b"0", b"1"] and taken.attempts == [2]
    assert _stale(world, again, pulled.handles) == {Why.FENCED}


def test_a_start_gives_the_lead_to_the_first_and_its_own_messages_to_who_had_them() -> None:
    world, _ = ready_world(*BODIES)
    pulled = _pull(world, SimPeer())
    world = world.restarted()
    again = SimPeer()
    assert _pull(world, again, was=pulled.incarnation).bodies == [b"2", b"3"]
    assert _stale(world, again, pulled.handles) == set()


def test_what_was_taken_over_stays_refused_after_a_start() -> None:
    world, _ = ready_world(*BODIES)
    lead, other = SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    _end(world, lead)
    _pull(world, other)
    world = World(world.disk.after_kill(), world.state.after_crash(), world.clock.restarted())
    assert _stale(world, SimPeer(), pulled.handles) == {Why.LEASE_ENDED}


def test_a_shared_pull_of_a_led_group_is_refused_and_the_other_way_round() -> None:
    world, _ = ready_world(*BODIES)
    lead, shared = SimPeer(), SimPeer()
    _pull(world, lead)
    with pytest.raises(ExclusiveConflict, match="has an exclusive consumer"):
        world.pull(shared)
    _end(world, lead)
    world.pull(shared)  # Takes what is left.
    world.send(shared, RequestType.PULL, pull_head(wait_ms=60_000))
    with pytest.raises(ExclusiveConflict, match="is shared by consumers"):
        _pull(world, SimPeer())


def test_a_deleted_group_is_made_anew_by_the_first_of_its_consumers() -> None:
    world, _ = ready_world(*BODIES)
    lead, other = SimPeer(), SimPeer()
    _pull(world, lead)
    waiting = _waits(world, other)
    world.ask(SimPeer(), RequestType.DELETE_GROUP, NAMES)
    assert _got(other, waiting) == []
    assert not world.core._pulls.leads.of_peer
    assert _pull(world, other).bodies == [b"0", b"1"]
    _end(world, lead)
    assert _pull(world, other).bodies == [b"2", b"3"]


def test_a_take_over_that_the_disk_refuses_is_tried_again() -> None:
    disk = MemoryDisk(Faults())
    world, peer = World(disk), SimPeer()
    world.hello(peer, 1)
    world.dispatch(peer, 1, dispatch_batch(1, BODIES[0]))
    lead, other = SimPeer(), SimPeer()
    _pull(world, lead)
    waiting = _waits(world, other)
    room, disk.capacity_bytes = disk.capacity_bytes, disk.used_bytes
    _end(world, lead)
    assert waiting not in other.answers and waiting not in other.errors
    disk.capacity_bytes = room
    world.pass_time(RETRY_MS)
    assert _got(other, waiting) == [b"0", b"1"]


def test_each_that_takes_over_is_looked_at_in_turn() -> None:
    world, _ = ready_world(*BODIES)
    second, third = SimPeer(), SimPeer()
    _pull(world, SimPeer())
    world.pass_time(WINDOW_MS - 1)
    first, last = _waits(world, second), _waits(world, third)
    world.pass_time(1)
    assert _got(second, first) == [b"0", b"1"] and last not in third.answers
    world.pass_time(WINDOW_MS // 2 - 1)
    assert _got(third, last) == []
    last = _waits(world, third)
    world.pass_time(WINDOW_MS // 2 + 1)
    assert _got(third, last) == [b"0", b"1"]


def _killed(world: World) -> World:
    """The next life after a kill; all pulls had been fsynced with their answers."""
    return World(world.disk.after_kill(), world.state.after_crash(), world.clock.restarted())


def _come_back(world: World, peer: SimPeer, was: Sequence[int]) -> None:
    """A consumer that works on what it has got says that it has another connection."""
    head: Head = {**NAMES, "exclusive_ms": WINDOW_MS, "was": list(was)}
    assert world.ask(peer, RequestType.PULL_END, head)[0] == {}


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_lead_keeps_what_it_got_on_any_of_its_connections(restarts: int) -> None:
    world, _ = ready_world(*BODIES)
    peer = SimPeer()
    first = _pull(world, peer, most=1)
    was, pulled = [first.incarnation], [first]
    for number in range(1, 4):
        if number <= restarts:
            world = _killed(world)
        else:
            _end(world, peer)
        peer = SimPeer()
        head: Head = {**_head(most=1), "was": list[HeadValue](was)}
        answer, body = world.ask(peer, RequestType.PULL, head)
        assert bodies_of(body) == [b"%d" % number]
        was.append(need_u64(answer, "incarnation"))
        pulled.append(Pulled(was[-1], need_rows(answer, "parts", 4), bodies_of(body), body))
    for each in pulled:
        assert _stale(world, SimPeer(), each.handles) == set()


def test_what_survives_a_start_is_its_leads_until_its_lease_ends() -> None:
    world, _ = ready_world(*BODIES)
    pulled = _pull(world, SimPeer(), most=1)
    world = _killed(world)
    other = SimPeer()
    for _ in range(5):
        waiting = _waits(world, other)
        world.pass_time(WINDOW_MS // 2)
        assert _got(other, waiting) == []
    waiting = _waits(world, other)
    # The other one leads as soon as nothing is held: here because it is acknowledged.
    assert _stale(world, SimPeer(), pulled.handles) == set()
    world.pass_time(0)
    assert _got(other, waiting) == [b"1", b"2"]


def test_who_stands_by_after_a_start_leads_when_the_lease_ends() -> None:
    world, _ = ready_world(*BODIES)
    pulled = _pull(world, SimPeer(), most=1)
    world = _killed(world)
    other, passed_ms, bodies = SimPeer(), 0, list[bytes]()
    while not bodies:
        assert passed_ms <= 31_000
        asked = world.send(other, RequestType.PULL, _head(500))
        world.pass_time(500)
        passed_ms += 500
        bodies = _got(other, asked)
    assert passed_ms >= 30_000 and bodies[0] == b"0"
    assert _stale(world, SimPeer(), pulled.handles) <= {Why.LEASE_ENDED, Why.ANOTHER_HOLDS}


def test_a_busy_lead_that_comes_back_after_a_start_leads_and_gets_no_message() -> None:
    world, _ = ready_world(*BODIES)
    pulled = _pull(world, SimPeer(), most=1)
    world = _killed(world)
    other, again = SimPeer(), SimPeer()
    waiting = _waits(world, other)
    _come_back(world, again, [pulled.incarnation])
    assert _stale(world, again, pulled.handles) == set()
    world.pass_time(WINDOW_MS // 2)
    assert _got(other, waiting) == []
    assert _pull(world, again, was=pulled.incarnation).bodies == [b"1", b"2"]


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


def test_a_lead_that_does_not_come_back_to_a_server_that_stood_still_is_replaced_after_its_window() -> None:
    world, _ = ready_world(*BODIES)
    lead, other = SimPeer(), SimPeer()
    _pull(world, lead)
    world.core.unheard(60_000)
    _end(world, lead)
    world.pass_time(WINDOW_MS // 2 + 1)
    waiting = _waits(world, other)
    world.pass_time(WINDOW_MS // 2)
    assert _got(other, waiting) == [b"0", b"1"]


def test_a_group_whose_lead_did_not_come_back_is_shared_again() -> None:
    world, _ = ready_world(*BODIES)
    lead = SimPeer()
    _pull(world, lead)
    world.core.unheard(60_000)
    _end(world, lead)
    with pytest.raises(ExclusiveConflict):
        world.pull(SimPeer())
    world.pass_time(WINDOW_MS)
    assert world.pull(SimPeer()).bodies == [b"2", b"3"]


def test_a_lead_that_connects_again_before_its_old_connection_ends_goes_on_at_once() -> None:
    world, _ = ready_world(*BODIES)
    lead, again = SimPeer(), SimPeer()
    pulled = _pull(world, lead)
    assert _pull(world, again, was=pulled.incarnation).bodies == [b"2", b"3"]
    _end(world, lead)
    assert _stale(world, again, pulled.handles) == set()
    assert world.core._pulls.leads.of_peer.keys() == {again}


@pytest.mark.parametrize("was", [[-1], ["a"], "a", list(range(1_001))])
def test_what_names_no_incarnations_is_refused(was: HeadValue) -> None:
    world, _ = ready_world(*BODIES)
    for kind, head in ((RequestType.PULL, _head()), (RequestType.PULL_END, {**NAMES, "exclusive_ms": WINDOW_MS})):
        with pytest.raises(BadRequest):
            world.ask(SimPeer(), kind, {**head, "was": was})
