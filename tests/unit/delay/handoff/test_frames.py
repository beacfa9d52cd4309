"""Rows become frames in the order that they have, from however many batches, by whichever way is cheapest."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from delayd.batch.batch import Batch, encode_bare, parse
from delayd.batch.columns import FEW_ROWS, BatchKind, DispatchPart
from delayd.batch.content import content_hash
from delayd.batch.gather import Gathered
from delayd.batch.sequences import ROW_BITS
from delayd.delay.handoff import frames
from delayd.delay.handoff.frames import (
    PICK_ROWS,
    SINGLE_BYTES_MAX,
    collect,
    collect_singles,
    encode_dispatch,
    split_by_subject_and_hour,
)
from delayd.delay.rows import Rows, new_rows
from tests.batches import bodies_of, messages, parsed
from tests.counts import lines

BATCHES = 40
BATCH_ROWS = 50


class Heap:
    """Batches at the places that rows name."""

    def __init__(self) -> None:
        bodies = [[b"%d/%d" % (number, row) for row in range(BATCH_ROWS)] for number in range(BATCHES)]
        self.batches = [parse(messages(each)) for each in bodies]
        self.asked: list[int] = []

    def batch(self, hour: int, location: int) -> Batch:
        """See Sources."""
        assert hour == 1
        self.asked.append(location >> ROW_BITS)
        return self.batches[(location >> ROW_BITS) // 8]


def rows_at(places: list[tuple[int, int]]) -> Rows:
    rows = new_rows(len(places))
    rows["hour"] = 1
    rows["location"] = [(8 * batch << ROW_BITS) | row for batch, row in places]
    return rows


def drawn(rows: int, batches: int) -> list[tuple[int, int]]:
    draw = np.random.default_rng(rows * 100 + batches)
    return list(zip(draw.integers(0, batches, rows).tolist(), draw.integers(0, BATCH_ROWS, rows).tolist(), strict=True))


RUNS = [(batch, row) for batch in (3, 1, 2) for row in range(7, 7 + 2 * PICK_ROWS)]


@pytest.mark.parametrize(
    ("places", "way"),
    [
        ([(5, 0)], "gather_singles"),
        (drawn(FEW_ROWS, 1), "gather_singles"),
        (drawn(FEW_ROWS + 1, BATCHES), "gather_singles"),
        (drawn(500, 10), "_collect_by_source"),
        (RUNS, "gather"),
        ([(batch, row) for batch in range(BATCHES) for row in range(BATCH_ROWS)], "gather"),
    ],
)
def test_rows_come_in_their_order_by_the_way_that_fits_them(
    places: list[tuple[int, int]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def noted(name: str) -> None:
        original = getattr(frames, name)

        def call(*args: object) -> Gathered:
            taken.append(name)
            gathered: Gathered = original(*args)
            return gathered

        monkeypatch.setattr(frames, name, call)

    for name in ("gather_singles", "_collect_by_source", "gather"):
        noted(name)
    rows = rows_at(places)
    part = DispatchPart(1, 2, 3, 4, 5, 6, 1)
    gathered = collect(rows, Heap())
    pieces, hashes = encode_dispatch(part, rows, gathered, b"s")
    batch = parsed(b"".join(pieces))
    assert batch.content_hashes().tolist() == hashes.tolist()
    assert batch.content_hashes().tolist() == [content_hash(b"s", b"", body) for body in bodies_of(batch)]
    assert batch.kind is BatchKind.DISPATCH
    assert bodies_of(batch) == [b"%d/%d" % place for place in places]
    assert taken[0] == way


def test_rows_are_split_by_subject_and_hour_and_those_that_came_last_are_left() -> None:
    rows = new_rows(9)
    rows["subject"] = [7, 2, 7, 9, 2, 1, 9, 1, 7]
    rows["hour"] = [1, 1, 1, 1, 2, 1, 1, 1, 1]
    rows["sequence"] = range(9)
    everything, none = split_by_subject_and_hour(rows, 5)
    assert [part["sequence"].tolist() for part in everything] == [[0, 2, 8], [1], [3, 6], [4], [5, 7]]
    assert not len(none)
    parts, left = split_by_subject_and_hour(rows, 2)
    assert [part["sequence"].tolist() for part in parts] == [[0, 2, 8], [1]]
    assert left["sequence"].tolist() == [3, 4, 5, 6, 7]
    (alone,), none = split_by_subject_and_hour(rows[2:3], 2)
    assert alone["sequence"].tolist() == [2] and not len(none)


def test_scattered_rows_have_each_batch_read_once_though_it_is_cached_for_a_moment_only() -> None:
    heap = Heap()
    collect(rows_at(drawn(150, BATCHES)), heap)
    reads = 1 + sum(one != other for one, other in pairwise(heap.asked))
    assert reads == len(set(heap.asked))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 200, 203])
def test_a_frame_of_single_rows_takes_two_fifths_of_the_lines_that_its_parts_would_take_alone(size: int) -> None:
    body = bytes(range(size))
    source = parse(messages([body] * 20))
    names = [b"orders.%d" % number for number in range(20)]
    rows = new_rows(20)
    rows["hour"], rows["subject"], rows["location"] = 1, range(20), range(20)
    parts = [rows[at : at + 1] for at in range(20)]
    life = DispatchPart(1, 2, 3, 4, 5, 6, 1)

    class One:
        def batch(self, hour: int, location: int) -> Batch:
            return source

    def together() -> list[bytes]:
        found = collect_singles(parts, One(), names)
        return [encode_bare(life, one.row, one.subject, one.body, one.length) for one in found.values()]

    def alone() -> list[bytes]:
        made = (encode_dispatch(life, part, collect(part, One()), names[at])[0] for at, part in enumerate(parts))
        return [b"".join(pieces) for pieces in made]

    assert together() == alone()
    assert 5 * lines(together) <= 2 * lines(alone)


def test_a_long_row_is_left_to_whoever_copies_it_once() -> None:
    rows = new_rows(2)
    rows["hour"], rows["length"] = 1, [SINGLE_BYTES_MAX, SINGLE_BYTES_MAX + 1]
    assert [*collect_singles([rows[:1], rows[1:]], Heap(), [b"s"])] == [0]
