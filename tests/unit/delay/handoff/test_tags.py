"""Tags go with their messages to the realtime server, from the message log and from a schedule log; keys do not."""

from __future__ import annotations

import pytest

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId, ProducerPart
from delayd.batch.labels import bloom_of
from delayd.testing.clock import START_MS
from tests.batches import bodies_of, messages, tags_of
from tests.worlds import target as target_module
from tests.worlds.delay import PRODUCER_ID, World
from tests.worlds.target import Kept

HOUR_MS = 3_600_000
TAGS: list[list[str]] = [["eu"], [], ["eu", "urgent"], ["käse"]]


def test_tags_are_handed_over_with_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over: dict[bytes, tuple[str, ...]] = {}
    kept_of = target_module._kept

    def keep(batch: Batch, offset: int, now_ms: int) -> Kept:
        handed_over.update(zip(bodies_of(batch), tags_of(batch), strict=True))
        if ColumnId.TAG_BLOOM in batch:
            assert batch.uint64s(ColumnId.TAG_BLOOM).tolist() == [bloom_of(tags) for tags in tags_of(batch)]
        assert ColumnId.KEY_END not in batch and ColumnId.ROW_FLAGS not in batch
        return kept_of(batch, offset, now_ms)

    monkeypatch.setattr(target_module, "_kept", keep)
    world = World()
    expected: dict[bytes, tuple[str, ...]] = {}
    # Due now, in a few seconds, and in an hour that only its schedule log holds by then.
    for number, (delay_ms, rows) in enumerate(((0, 1), (0, 40), (5_000, 7), (3 * HOUR_MS, 50), (3 * HOUR_MS, 1)), 1):
        bodies = [b"%d-%d" % (number, row) for row in range(rows)]
        tags = [TAGS[(row + number) % len(TAGS)] for row in range(rows)]
        part = ProducerPart(PRODUCER_ID, number, 0)
        due = [START_MS + delay_ms + row % 3 for row in range(rows)]
        headers = [b""] * rows if number % 2 else None
        world.core.send(parse(messages(bodies, due=due, headers=headers, tags=tags, part=part)), _ignore)
        plain = messages([b"plain %d" % number], due=due[:1], part=ProducerPart(PRODUCER_ID, 100 + number, 0))
        world.core.send(parse(plain), _ignore)
        expected |= {body: tuple(own) for body, own in zip(bodies, tags, strict=True)} | {b"plain %d" % number: ()}
    world.settle()
    world.checkpoint()
    for _ in range(4 * 60):
        world.pass_ms(60_000)
        world.settle()
    assert handed_over == expected


def _ignore(*_: object) -> None:
    """Nobody waits for the answer."""
