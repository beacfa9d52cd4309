"""Messages that come again through their delay server, and dead letters (rule Q2), against the core in memory."""

import json
from collections.abc import Sequence

import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId
from delayd.batch.labels import DEAD_KEPT_MS, DEAD_TAG, Headers
from delayd.batch.names import retry_subject
from delayd.batch.validate import check_batch
from delayd.errors import BadRequest, BadSubject, SlowDown
from delayd.wire.frame import Head
from delayd.wire.heads import (
    need_maps,
    need_rows,
    need_u64,
)
from delayd.wire.requests import RequestType
from realtime import retries
from realtime.retries import Undone
from realtime.retry_batch import headers_of
from tests.batches import tags_of
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN, bodies_of, dispatch_batch
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


def _oldest(world: World, peer: SimPeer) -> int:
    (group,) = need_maps(world.ask(peer, RequestType.GROUPS, {"subject": SUBJECT})[0], "groups")
    oldest = group["oldest_unacked"]
    assert isinstance(oldest, int)
    return oldest


def _crashed(world: World) -> World:
    return World(world.disk.after_crash(), world.state.after_crash(), world.clock.restarted())


def _come_again(world: World, peer: SimPeer, batch: Batch, batch_id: int, sequence: int) -> None:
    """The delay server hands the messages of a retry batch over, as new messages."""
    (subject,) = batch.subjects()
    bodies = [bytes(body) for body in bodies_of(batch.buffer)]
    assert subject.decode() == retry_subject(world.core.log_id, 1)
    starts, ends = batch.region(ColumnId.HEADERS_END)
    headers = [bytes(batch.heap[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    made = dispatch_batch(batch_id, bodies, subject=subject.decode(), first_sequence=sequence, headers=headers)
    world.dispatch(peer, 1, made)


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


def test_its_messages_are_unacknowledged_until_the_delay_server_has_them() -> None:
    world, peer = ready_world([b"a", b"b"])
    ((incarnation, first, _),) = world.pull(peer).handles
    _retry(world, peer, [[incarnation, first, 1, 0, ""]])
    assert world.ack(peer, [[incarnation, first + 1, 1]]) == []
    assert _oldest(world, peer) == 0
    ((undone, _),) = _undone(world)
    world.core.retries.accepted(undone)
    assert _oldest(world, peer) == 2
    assert _undone(world) == []
    assert world.core.retries.origins() == []


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


def test_after_a_restart_numbers_belong_to_another_producer() -> None:
    world, peer = ready_world([b"a", b"b"])
    ((incarnation, first, _),) = world.pull(peer).handles
    _retry(world, peer, [[incarnation, first, 1, 0, ""]])
    ((before, _),) = _undone(world)
    world, peer = world.restarted(), SimPeer()
    world.pass_time(60_000)
    ((incarnation, first, _),) = world.pull(peer).handles
    _retry(world, peer, [[incarnation, first, 1, 0, ""]])
    (old, _), (new, batch) = _undone(world)
    assert old == before
    assert new.producer != before.producer
    assert batch.producer.low_water == new.number == 1


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


def test_what_is_repeated_is_done_and_what_is_not_held_is_stale() -> None:
    world, peer = ready_world([b"a", b"b"])
    ((incarnation, first, _),) = world.pull(peer).handles
    row: Row = [incarnation, first, 1, 0, ""]
    assert _retry(world, peer, [row]) == []
    assert _retry(world, peer, [row]) == []
    assert world.ack(peer, [[incarnation, first, 1]]) == [[incarnation, first, 1]]
    assert len(_undone(world)) == 1
    world.pass_time(30_000)
    assert _retry(world, peer, [[incarnation, first + 1, 1, 0, ""]]) == [[incarnation, first + 1, 1]]
    assert _retry(world, peer, [[incarnation ^ 1, first + 1, 1, 0, ""]]) == [[incarnation ^ 1, first + 1, 1]]
    assert len(_undone(world)) == 1


def test_what_comes_again_goes_to_the_group_before_new_messages() -> None:
    world, peer = ready_world([b"a", b"b"])
    handle = world.pull(peer, most=1).handles[0]
    _retry(world, peer, [[*handle, 0, "first"]])
    ((undone, batch),) = _undone(world)
    world.core.retries.accepted(undone)
    _come_again(world, peer, batch, 2, 5_000)
    world.pull(peer, "other")
    pulled = world.pull(peer)
    assert pulled.bodies == [b"a"]
    assert _retry(world, peer, [[*pulled.handles[0], 0, "second"]]) == []
    ((undone, batch),) = _undone(world)
    (life,) = _lives(batch)
    assert (life["delayd.attempt"], life["delayd.origin"], life["delayd.error"]) == ("2", "1000", "second")
    assert len(json.loads(str(life["delayd.history"]))) == 2
    assert world.pull(peer).bodies == [b"b"]
    assert world.pull(peer, "other").bodies == []


def test_a_pull_that_waits_gets_what_comes_again() -> None:
    world, peer = ready_world([b"a"])
    handle = world.pull(peer).handles[0]
    _retry(world, peer, [[*handle, 0, ""]])
    ((_, batch),) = _undone(world)
    waiting = world.send(peer, RequestType.PULL, pull_head(wait_ms=60_000))
    assert waiting not in peer.answers
    _come_again(world, peer, batch, 2, 5_000)
    ((_, body),) = peer.answers[waiting]
    assert bodies_of(body) == [b"a"]


@pytest.mark.parametrize("restart", [False, True])
def test_one_acknowledgement_covers_what_came_again_and_what_is_new(restart: bool) -> None:
    world, peer = ready_world([b"a", b"b"])
    handle = world.pull(peer, most=1).handles[0]
    _retry(world, peer, [[*handle, 0, ""]])
    ((undone, batch),) = _undone(world)
    world.core.retries.accepted(undone)
    _come_again(world, peer, batch, 2, 5_000)
    (again,), (new,) = world.pull(peer, most=1).handles, world.pull(peer, most=1).handles
    assert (again[0], again[1] + 1) == (new[0], new[1])
    both = [[again[0], again[1], 2]]
    if restart:
        assert world.ack(peer, []) == []
        world = world.restarted()
        assert world.pull(peer).bodies == []
    assert world.ack(peer, both) == []
    assert world.ack(peer, both) == []
    assert _oldest(world, peer) == 2
    world.pass_time(60_000)
    assert world.pull(peer).bodies == []


def test_what_came_again_is_offered_again_when_its_lease_ends() -> None:
    world, peer = ready_world([b"a"])
    handle = world.pull(peer).handles[0]
    _retry(world, peer, [[*handle, 0, ""]])
    ((undone, batch),) = _undone(world)
    world.core.retries.accepted(undone)
    _come_again(world, peer, batch, 2, 5_000)
    pulled = world.pull(peer)
    assert pulled.attempts == [1]
    world.pass_time(30_000)
    assert world.ack(peer, pulled.handles) == pulled.handles
    pulled = world.pull(peer)
    assert (pulled.bodies, pulled.attempts) == ([b"a"], [2])
    assert world.give_back(peer, pulled.handles) == []
    assert world.ack(peer, pulled.handles, kind=RequestType.NACK) == []
    assert world.pull(peer).attempts == [2]


def test_a_rejected_message_is_kept_as_a_dead_letter() -> None:
    world, peer = ready_world([b"a"])
    handle = world.pull(peer).handles[0]
    now_ms = world.clock.now_ms()
    assert _reject(world, peer, [[*handle, "no such order", "KeyError: 42"]]) == []
    ((undone, batch),) = _undone(world)
    check_batch(batch)
    assert tags_of(batch) == [(DEAD_TAG,)]
    assert batch.int64s(ColumnId.DELIVER_AT_MS).tolist() == [now_ms + DEAD_KEPT_MS]
    (life,) = _lives(batch)
    assert (life["delayd.reason"], life["delayd.error"]) == ("no such order", "KeyError: 42")
    assert life["delayd.dead_at_ms"] == str(now_ms)
    world.core.retries.accepted(undone)
    _come_again(world, peer, batch, 2, 5_000)
    # Somebody has sent it back to the group: its attempts begin anew.
    again = world.pull(peer)
    assert _retry(world, peer, [[*again.handles[0], 0, ""]]) == []
    ((_, batch),) = _undone(world)
    (life,) = _lives(batch)
    assert (life["delayd.attempt"], "delayd.reason" in life) == ("1", False)


def test_messages_of_several_delay_servers_become_a_batch_for_each() -> None:
    world, peer = ready_world([b"a"])
    second = SimPeer()
    world.window(second, world.hello_later(second, 1, origin=ORIGIN + 1))
    world.dispatch(second, 1, dispatch_batch(1, [b"b"], origin=ORIGIN + 1))
    handles = world.pull(peer).handles
    _retry(world, peer, [[*handle, 0, ""] for handle in handles])
    assert [bodies_of(batch.buffer) for _, batch in _undone(world)] == [[b"a"]]
    assert [bodies_of(batch.buffer) for _, batch in _undone(world, ORIGIN + 1)] == [[b"b"]]


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


def test_a_deleted_group_sends_nothing_again() -> None:
    world, peer = ready_world([b"a"])
    _retry(world, peer, [[*world.pull(peer).handles[0], 0, ""]])
    world.ask(peer, RequestType.DELETE_GROUP, {"subject": SUBJECT, "group": GROUP})
    assert _undone(world) == []
    world = world.restarted()
    assert _undone(world) == []
    assert world.core._pulls.groups == {}


def test_the_group_of_a_retry_subject_is_nobodys_own() -> None:
    world, peer = ready_world([b"a"])
    _retry(world, peer, [[*world.pull(peer).handles[0], 0, ""]])
    name = retry_subject(world.core.log_id, 1)
    for kind, head in ((RequestType.PULL, pull_head(GROUP, name)), (RequestType.PULL, pull_head("new", name))):
        with pytest.raises(BadSubject):
            world.ask(peer, kind, head)
    (group,) = need_maps(world.ask(peer, RequestType.GROUPS, {"subject": None})[0], "groups")
    assert (group["subject"], group["group"], group["group_id"], group["leaving"]) == (SUBJECT, GROUP, 1, 1)
    ((undone, batch),) = _undone(world)
    world.core.retries.accepted(undone)
    _come_again(world, peer, batch, 2, 5_000)
    (group,) = need_maps(world.ask(peer, RequestType.GROUPS, {"subject": None})[0], "groups")
    assert (group["leaving"], group["redelivering"]) == (0, 1)
    listed = need_maps(world.ask(peer, RequestType.SUBJECTS, {"prefix": "", "after": "", "limit": 9})[0], "subjects")
    assert [subject["name"] for subject in listed] == [SUBJECT]


@pytest.mark.parametrize(
    "row",
    [
        [1, 2, 3],
        [1, 2, 0, 0, ""],
        [1, -1, 1, 0, ""],
        [1, 2, 1, -1, ""],
        [1, 2, 1, 1 << 62, ""],
        [1, 2, 1, True, ""],
        [1, 2, 1, 0, 7],
        [1, 2, 1, 0, "x" * 10_000],
        [1 << 64, 2, 1, 0, ""],
        "row",
    ],
)
def test_bad_rows_are_refused_by_name(row: object) -> None:
    world, peer = ready_world([b"a"])
    world.pull(peer)
    with pytest.raises(BadRequest):
        _retry(world, peer, [row])  # type: ignore[list-item]


def test_a_handle_that_is_named_twice_is_refused() -> None:
    world, peer = ready_world([b"a", b"b", b"c"])
    ((incarnation, first, _),) = world.pull(peer).handles
    with pytest.raises(BadRequest):
        _retry(world, peer, [[incarnation, first, 2, 0, ""], [incarnation, first + 1, 1, 9, ""]])
    with pytest.raises(BadRequest):
        _reject(world, peer, [[incarnation, first, 1, "", ""]])
    assert _undone(world) == []


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
