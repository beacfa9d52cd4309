"""Messages that come again through their delay server, and dead letters (rule Q2), against the core in memory."""

import json
from collections.abc import Sequence

import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.labels import Headers
from delayd.errors import SlowDown
from delayd.wire.heads import (
    need_rows,
)
from delayd.wire.requests import RequestType
from realtime import retries
from realtime.retries import Undone, headers_of
from tests.worlds.dispatch_batches import ORIGIN, bodies_of
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, ready_world

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
    _reject(world, peer, [[*world.pull(peer, max_bytes=16 << 20).handles[0], "r" * 2_000, "e" * 5_000]])
    ((_, batch),) = _undone(world)
    (life,) = _lives(batch)
    assert life["delayd.reason"] == "r" * 2_000
    assert 1_900 < len(str(life["delayd.error"])) < 2_100


def test_errors_of_4_kib_are_kept_ten_of_them_in_a_shorter_form() -> None:
    world, peer = ready_world([b"a"])
    _reject(world, peer, [[*world.pull(peer).handles[0], "r" * 2_000, "e" * 5_000]])
    ((_, batch),) = _undone(world)
    (life,) = _lives(batch)
    assert life["delayd.error"] == "e" * 4_096
    ((_, _, in_history),) = json.loads(life["delayd.history"])
    assert in_history == "e" * 2_000


def test_a_decision_counts_what_is_said_of_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BATCH_BYTES", 20_000)
    world, peer = ready_world([b"a"] * 10)
    _retry(world, peer, [[*handle, 0, "e" * 4_096] for handle in world.pull(peer).handles])
    found = [batch for _, batch in _undone(world)]
    assert [batch.count for batch in found] == [3, 3, 3, 1]
    assert all(batch.total_bytes < 30_000 for batch in found)
