"""Groups that want only messages with some tags; the others are passed over (rule Q7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from delayd.batch.batch import encode, encode_subject_table, lay_out
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, DispatchPart
from delayd.batch.labels import bloom_of_item, encode_tags
from delayd.errors import BadRequest, OtherFilter
from delayd.hours import hour_of_ms
from delayd.log.pull import PullEntry, PullOp
from delayd.wire.frame import Head
from delayd.wire.heads import need_u64
from delayd.wire.requests import RequestType
from tests.worlds.dispatch_batches import DUE_MS, ORIGIN, bodies_of
from tests.worlds.realtime import GROUP, SUBJECT, SimPeer, World, pull_head

Tagged = tuple[bytes, tuple[str, ...]]
RED, BLUE, BOTH, NONE = ("red",), ("blue",), ("blue", "red"), ()


def _batch(batch_id: int, rows: list[Tagged]) -> bytes:
    table = encode_subject_table([SUBJECT.encode()])
    items = [encode_tags(tags) for _, tags in rows]
    tag_ends, packed = lay_out(items, len(table))
    packed += bytes(-len(packed) & 7)
    ends, heap = lay_out([body for body, _ in rows], len(table) + len(packed))
    first = 1000 * batch_id
    columns: list[tuple[ColumnId, ColumnArray]] = [
        (ColumnId.DELIVER_AT_MS, np.full(len(rows), DUE_MS, np.int64)),
        (ColumnId.SEQUENCE, np.arange(first, first + len(rows), dtype=np.uint64)),
        (ColumnId.TAG_BLOOM, np.array([bloom_of_item(item) for item in items], np.uint64)),
        (ColumnId.TAGS_END, tag_ends.astype(np.uint32)),
        (ColumnId.BODY_END, ends.astype(np.uint32)),
    ]
    w = (1, batch_id - 1) if batch_id > 1 else (0, 0)
    part = DispatchPart(ORIGIN, 1, batch_id, *w, DUE_MS + 1, hour_of_ms(DUE_MS))
    return encode(BatchKind.DISPATCH, part, len(rows), columns, [table, packed, heap, bytes(-len(heap) & 7)], 1)


def _world(*batches: list[Tagged]) -> World:
    world, peer = World(), SimPeer()
    world.hello(peer, 1)
    for number, rows in enumerate(batches, 1):
        world.dispatch(peer, 1, _batch(number, rows))
    return world


def _pull(world: World, most: int = 100, group: str = GROUP, **wanted: Any) -> list[bytes]:
    """What one pull gets; it is acknowledged."""
    peer = SimPeer()
    answer, body = world.ask(peer, RequestType.PULL, {**pull_head(group, most=most), **wanted})
    incarnation, parts = answer["incarnation"], answer["parts"]
    assert isinstance(parts, list)
    handles = [[incarnation, part[0], part[2]] for part in parts]
    if handles:
        head: Head = {"subject": SUBJECT, "group": group, "handles": handles}
        assert world.ask(peer, RequestType.ACK, head)[0]["stale"] == []
    return bodies_of(body)


MIXED: list[Tagged] = [(b"0", RED), (b"1", NONE), (b"2", BLUE), (b"3", BOTH), (b"4", NONE), (b"5", RED), (b"6", BLUE)]


@pytest.mark.parametrize(
    ("wanted", "bodies"),
    [
        ({"tags_any": ["red"]}, [b"0", b"3", b"5"]),
        ({"tags_any": ["red", "blue"]}, [b"0", b"2", b"3", b"5", b"6"]),
        ({"tags_all": ["red", "blue"]}, [b"3"]),
        ({"tags_any": ["green", "blue"], "tags_all": ["red"]}, [b"3"]),
        ({"tags_any": ["green"]}, []),
        ({"tags_any": [], "tags_all": []}, [b"0", b"1", b"2", b"3", b"4", b"5", b"6"]),
    ],
)
@pytest.mark.parametrize("most", [1, 2, 100])
def test_a_group_gets_the_messages_that_it_wants(wanted: dict[str, Any], bodies: list[bytes], most: int) -> None:
    world = _world(MIXED, MIXED)
    found: list[bytes] = []
    while part := _pull(world, most, **wanted):
        assert len(part) <= most
        found += part
    assert found == bodies + bodies
    group = world.core._pulls.groups[SUBJECT, GROUP]
    assert (group.oldest, group.next, group.outstanding) == (14, 14, 0)
    counters = world.core._pulls.counters
    assert (counters["pulled"], counters["filtered"]) == (2 * len(bodies), 14 - 2 * len(bodies))


def test_one_answer_goes_on_behind_messages_that_nobody_wants() -> None:
    world = _world(MIXED, MIXED)
    assert _pull(world, tags_any=["red"]) == [b"0", b"3", b"5"] * 2


def test_messages_without_tags_match_no_filter() -> None:
    world = _world([(b"0", NONE), (b"1", NONE)])
    assert _pull(world, tags_any=["red"]) == [] and _pull(world, group="all") == [b"0", b"1"]


def test_a_filter_survives_a_checkpoint_and_a_restart() -> None:
    for checkpoint in (False, True):
        world = _world(MIXED)
        assert _pull(world, 1, tags_any=["blue"]) == [b"2"]
        if checkpoint:
            world.core.checkpoint()
        world = world.restarted()
        # Who names no filter takes that of the group.
        assert _pull(world) == [b"3", b"6"]


def test_what_a_crash_leaves_is_what_was_logged() -> None:
    world = _world(MIXED)
    assert _pull(world, 1, tags_any=["red"]) == [b"0"]
    pulled = world.pull(SimPeer(), most=2)
    assert pulled.bodies == [b"3", b"5"]
    for lost in (world.disk.after_kill(), world.disk.after_crash()):
        later = World(lost, world.state.after_crash(lost))
        later.pass_time(60_000)
        assert _pull(later) == [b"3", b"5"] and _pull(later) == []


def test_what_comes_again_is_compared_once_only() -> None:
    world = _world(MIXED)
    peer = SimPeer()
    pulled = world.ask(peer, RequestType.PULL, {**pull_head(most=1), "tags_any": ["blue"]})[0]
    incarnation, parts = need_u64(pulled, "incarnation"), pulled["parts"]
    assert isinstance(parts, list)
    world.ack(peer, [[incarnation, parts[0][0], 1]], kind=RequestType.NACK)
    assert world.pull(peer).bodies == [b"2", b"3", b"6"]


def test_who_wants_other_messages_than_the_group_is_refused_by_name() -> None:
    world = _world(MIXED)
    _pull(world, tags_any=["red"])
    assert _pull(world, tags_any=["red", "red"]) == []
    others: tuple[dict[str, Any], ...] = ({"tags_any": ["blue"]}, {"tags_all": ["red"]})
    for other in others:
        with pytest.raises(OtherFilter, match="wants the tags any of red, and not"):
            _pull(world, **other)
    _pull(world, group="all")
    with pytest.raises(OtherFilter, match="wants the tags none"):
        _pull(world, group="all", tags_any=["red"])


@pytest.mark.parametrize("tags", ["red", [7], [""], ["x" * 65], [str(number) for number in range(17)], {"a": 1}])
def test_tags_that_no_message_may_have_are_refused(tags: Any) -> None:
    world = _world(MIXED)
    for name in ("tags_any", "tags_all"):
        with pytest.raises(BadRequest):
            _pull(world, **{name: tags})
    assert world.core._pulls.groups == {}


def test_a_consumer_that_waits_gets_the_first_message_that_it_wants() -> None:
    world, consumer, delay = World(), SimPeer(), SimPeer()
    world.hello(delay, 1)
    number = world.send(consumer, RequestType.PULL, {**pull_head(wait_ms=60_000), "tags_any": ["red"]})
    world.dispatch(delay, 1, _batch(1, [(b"0", NONE), (b"1", BLUE)]))
    world.core.wake()
    assert number not in consumer.answers
    world.dispatch(delay, 1, _batch(2, [(b"2", BLUE), (b"3", RED)]))
    world.core.wake()
    assert bodies_of(consumer.answers[number][0][1]) == [b"3"]


def test_the_log_has_a_pull_and_an_acknowledgement_for_what_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world(MIXED)
    seen: list[tuple[PullOp, int, int]] = []
    append = world.core._pull_log.append

    def note(entries: Sequence[PullEntry], *records: Any) -> None:
        seen.extend((entry.op, entry.consume_first, entry.covered) for entry in entries)
        append(entries, *records)

    monkeypatch.setattr(world.core._pull_log, "append", note)
    assert _pull(world, tags_any=["blue"]) == [b"2", b"3", b"6"]
    pulls = [(first, covered) for op, first, covered in seen if op == PullOp.PULL]
    # No consume sequence is left out (rule Q5).
    assert pulls == [(0, 2), (2, 2), (4, 2), (6, 1)]


def test_a_subscription_gets_the_messages_that_it_wants_of_each_subject() -> None:
    world = _world(MIXED, MIXED)
    consumer = SimPeer()
    head: Head = {"group": GROUP, "pattern": ">", "tags_any": ["blue"]}
    number = world.ask(consumer, RequestType.SUBSCRIBE, head)[0]["subscription"]
    world.core.wake()
    pull: Head = {"subscription": number, "max_messages": 9, "max_bytes": 1 << 20, "wait_ms": 0, "lease_ms": 0,
                  "consumer": ""}  # fmt: skip
    answer, body = world.ask(consumer, RequestType.PULL, pull)
    assert bodies_of(body) == [b"2", b"3", b"6"] * 2
    parts = answer["parts"]
    assert isinstance(parts, list) and answer["subjects"] == [[SUBJECT, len(parts)]]
