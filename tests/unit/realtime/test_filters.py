"""Groups that want only messages with some tags; the others are passed over (rule Q7)."""

from __future__ import annotations

from typing import Any

import numpy as np

from delayd.batch.batch import encode, encode_subject_table, lay_out
from delayd.batch.columns import BatchKind, ColumnArray, ColumnId, DispatchPart
from delayd.batch.labels import bloom_of_item, encode_tags
from delayd.hours import hour_of_ms
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


def test_a_filter_survives_a_checkpoint_and_a_restart() -> None:
    for checkpoint in (False, True):
        world = _world(MIXED)
        assert _pull(world, 1, tags_any=["blue"]) == [b"2"]
        if checkpoint:
            world.core.checkpoint()
        world = world.restarted()
        # Who names no filter takes that of the group.
        assert _pull(world) == [b"3", b"6"]


def test_what_comes_again_is_compared_once_only() -> None:
    world = _world(MIXED)
    peer = SimPeer()
    pulled = world.ask(peer, RequestType.PULL, {**pull_head(most=1), "tags_any": ["blue"]})[0]
    incarnation, parts = need_u64(pulled, "incarnation"), pulled["parts"]
    assert isinstance(parts, list)
    world.ack(peer, [[incarnation, parts[0][0], 1]], kind=RequestType.NACK)
    assert world.pull(peer).bodies == [b"2", b"3", b"6"]
