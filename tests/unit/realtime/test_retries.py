"""Messages that come again through their delay server, and dead letters (rule Q2), against the core in memory."""

import json
from collections.abc import Sequence

import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId
from delayd.batch.labels import Headers
from delayd.batch.names import retry_subject
from delayd.batch.validate import check_batch
from delayd.errors import SlowDown
from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from realtime import retries
from realtime.retries import Undone, headers_of
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN, bodies_of
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head, ready_world

Row = list[object]


def _retry(world: World, peer: SimPeer, rows: Sequence[Row], subject: str = SUBJECT) -> list[list[int]]:
    head = {"subject": subject, "group": GROUP, "retries": list(rows)}
    return need_rows(world.ask(peer, RequestType.RETRY, head)[0], "stale", 3)  # type: ignore[arg-type]


def _reject(world: World, peer: SimPeer, rows: Sequence[Row]) -> list[list[int]]:
    head = {"subject": SUBJECT, "group": GROUP, "rejects": list(rows)}
    return need_rows(world.ask(peer, RequestType.REJECT, head)[0], "stale", 3)  # type: ignore[arg-type]


def _undone(world: World, origin: int = ORIGIN) -> list[tuple[Undone, Batch]]:
    found: list[tuple[Undone, Batch]] = []
    for undone in world.core.retries.waiting(origin):
        batch = parse(world.core.retries.batch_of(undone))
        batch.verify()
        found.append((undone, batch))
    return found


def _lives(batch: Batch) -> list[Headers]:
    return [headers_of(batch, row) for row in range(batch.count)]


def _crashed(world: World) -> World:
    return World(world.disk.after_crash(), world.state.after_crash(), world.clock.restarted())


def test_a_retry_becomes_a_batch_for_its_delay_server() -> None:
    world, peer = ready_world([b"a", b"b", b"c"])
    pulled = world.pull(peer)
    ((incarnation, first, _),) = pulled.handles
    now_ms = world.clock.now_ms()
    assert _retry(world, peer, [[incarnation, first + 1, 1, 5_000, "no route"]]) == []
    ((undone, batch),) = _undone(world)
    check_batch(batch)
    assert batch.subjects() == [retry_subject(world.core.log_id, 1).encode()]
    assert bodies_of(batch.buffer) == [b"b"]
    assert batch.int64s(ColumnId.DELIVER_AT_MS).tolist() == [now_ms + 5_000]
    assert batch.uint64s(ColumnId.ORIGIN_SEQUENCE).tolist() == [1001]
    assert batch.producer == (undone.producer, undone.number, undone.number)
    (life,) = _lives(batch)
    history = json.loads(str(life.pop("delayd.history")))
    assert life == {
        "delayd.attempt": "1",
        "delayd.origin": "1001",
        "delayd.first_due_ms": str(DUE_MS),
        "delayd.error": "no route",
    }
    assert history == [[1, now_ms, "no route"]]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_restart_makes_the_same_batch_again(checkpoint: bool) -> None:
    world, peer = ready_world([b"a", b"b"], [b"c"])
    handles = world.pull(peer).handles
    _retry(world, peer, [[*handle, 60_000, "later"] for handle in handles])
    ((undone, batch),) = _undone(world)
    world = world.restarted() if checkpoint else _crashed(world)
    ((again, same),) = _undone(world)
    assert (again, bytes(same.buffer)) == (undone, bytes(batch.buffer))
    world.core.retries.accepted(again)
    world = world.restarted() if checkpoint else _crashed(world)
    assert _undone(world) == []


def test_numbers_below_the_low_water_are_never_sent_again() -> None:
    world, peer = ready_world([b"a", b"b", b"c"])
    ((incarnation, first, _),) = world.pull(peer).handles
    for at in range(3):
        _retry(world, peer, [[incarnation, first + at, 1, 0, ""]])
    assert [batch.producer.low_water for _, batch in _undone(world)] == [1, 1, 1]
    (_, _), (second, _), _ = _undone(world)
    world.core.retries.accepted(second)
    assert [(undone.number, batch.producer.low_water) for undone, batch in _undone(world)] == [(1, 1), (3, 1)]
    world.core.retries.accepted(_undone(world)[0][0])
    assert [(undone.number, batch.producer.low_water) for undone, batch in _undone(world)] == [(3, 3)]


def test_a_decision_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BATCH_ROWS", 3)
    monkeypatch.setattr(retries, "BATCH_BYTES", 3_000)
    world, peer = ready_world([b"a"] * 7, [bytes(1_200)] * 3)
    _retry(world, peer, [[*handle, 0, ""] for handle in world.pull(peer).handles])
    found = [bodies_of(batch.buffer) for _, batch in _undone(world)]
    assert [len(bodies) for bodies in found] == [3, 3, 3, 1]


def test_too_many_undone_decisions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "UNDONE_MAX", 1)
    world, peer = ready_world([b"a", b"b"])
    ((incarnation, first, _),) = world.pull(peer).handles
    _retry(world, peer, [[incarnation, first, 1, 0, ""]])
    with pytest.raises(SlowDown):
        _retry(world, peer, [[incarnation, first + 1, 1, 0, ""]])
    world.core.retries.accepted(_undone(world)[0][0])
    assert _retry(world, peer, [[incarnation, first + 1, 1, 0, ""]]) == []


def test_headers_of_the_largest_message_still_fit() -> None:
    world, peer = ready_world([bytes((4 << 20) - 100)])
    _reject(world, peer, [[*world.pull(peer, max_bytes=16 << 20).handles[0], "r" * 2_000, "e" * 2_000]])
    ((_, batch),) = _undone(world)
    (life,) = _lives(batch)
    assert life["delayd.reason"] == "r" * 2_000


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_left_of_an_ephemeral_group_is_known_until_it_has_ended(restarts: bool) -> None:
    world, _ = ready_world([b"a", b"b"])
    peer = SimPeer()
    answer, _ = world.ask(peer, RequestType.PULL, {**pull_head(), "ephemeral": True})
    incarnation, first = need_u64(answer, "incarnation"), need_rows(answer, "parts", 4)[0][0]
    rejects: Head = {"subject": SUBJECT, "group": GROUP, "rejects": [[incarnation, first, 2, "bad", ""]]}
    assert world.ask(peer, RequestType.REJECT, rejects)[0]["stale"] == []
    world.core.disconnected(peer)
    for _ in range(20):
        world.pass_time(5_000)
    # What is on its way to a delay server could not be ended there.
    assert (SUBJECT, GROUP) in world.core._pulls.groups
    for undone in list(world.core.retries.waiting(ORIGIN)):
        world.core.retries.accepted(undone)
    for _ in range(20):
        world.pass_time(5_000)
    if restarts:
        world = world.restarted()
    (left,) = world.core.groups.left
    assert left.subject.name.startswith("%retry/") and left.parent is None
    assert world.ask(SimPeer(), RequestType.GROUPS, {"subject": None})[0]["groups"] == []
    # Another group of this name has nothing to do with it.
    assert bodies_of(world.ask(SimPeer(), RequestType.PULL, pull_head())[1]) == [b"a", b"b"]
    world.core.groups.delete(left)
    assert not world.core.groups.left and not world.restarted().core.groups.left
