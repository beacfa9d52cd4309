"""Rows of several batches in a new one: the right bytes in the right order, whatever the picks are."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind, ColumnId, DispatchPart, SchedulePart
from delayd.batch.gather import Pick, compose, gather, gather_singles, row_bytes
from delayd.batch.validate import check_batch
from delayd.errors import BatchMalformed
from tests.batches import bodies_of, messages, parsed

DISPATCH = DispatchPart(1, 2, 3, 4, 5, 6, 7)
BODIES = [b"a", b"", b"twelve bytes", b"x" * 8, b"y" * 100]
HEADERS = [b"h1", b"", b"h" * 9, b"", b"\x81\xa1k\xa1v"]


def composed(picks: list[Pick], rows: int) -> list[tuple[int, bytes]]:
    data = compose(BatchKind.DISPATCH, DISPATCH, gather(picks), np.arange(rows, dtype=np.uint64), [b"s"]).joined()
    batch = parsed(data)
    check_batch(batch)
    return list(zip(batch.int64s(ColumnId.DELIVER_AT_MS).tolist(), bodies_of(batch), strict=True))


def test_more_scattered_rows_than_one_piece_has_are_all_copied() -> None:
    bodies = [b"%d" % number * (number % 5) for number in range(20_000)]
    batch = parse(messages(bodies))
    rows = np.random.default_rng(1).permutation(20_000)[:17_000]
    assert composed([Pick(batch, rows)], 17_000) == [(row, bodies[row]) for row in rows.tolist()]


def test_a_key_goes_along_with_its_row_and_what_to_do_about_others_does_not() -> None:
    keys = [b"k0", b"", b"a longer key", b"k3", b""]
    keyed = parse(messages(BODIES, headers=HEADERS, keys=keys, flags=[2, 0, 1, 0, 0]))
    for rows in (range(5), range(2, 4), np.array([3, 0])):
        gathered = gather([Pick(keyed, rows)])
        made = compose(BatchKind.DISPATCH, DISPATCH, gathered, np.zeros(len(rows), np.uint64), [b"s"])
        batch = parsed(made.joined())
        check_batch(batch)
        assert ColumnId.ROW_FLAGS not in batch
        starts, ends = batch.region(ColumnId.KEY_END)
        assert [bytes(batch.heap[start:end]) for start, end in zip(starts, ends, strict=True)] == [
            keys[i] for i in rows
        ]


def test_a_source_that_rotted_is_found_before_anything_is_copied() -> None:
    data = bytearray(messages(BODIES))
    data[-1] ^= 1
    with pytest.raises(BatchMalformed, match="checksum of its heap"):
        gather_singles([parse(data)], [0])
    with pytest.raises(BatchMalformed, match="checksum of its heap"):
        gather([Pick(parse(data), range(1))])


def test_row_bytes_are_at_least_what_a_new_batch_needs_for_them() -> None:
    batch = parse(messages(BODIES, headers=HEADERS))
    needed = row_bytes(batch, 0, batch.count)
    gathered = gather([Pick(batch, range(5))])
    data = compose(
        kind=BatchKind.SCHEDULE,
        part=SchedulePart(0, 1, 0),
        gathered=gathered,
        sequences=np.arange(5, dtype=np.uint64),
        subjects=[b"s"],
        others={ColumnId.SUBJECT: np.zeros(5, np.uint32)},
    ).joined()
    assert int(needed.sum()) >= parse(data).total_bytes - 200
