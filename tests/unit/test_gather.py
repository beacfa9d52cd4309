"""Rows of several batches in a new one: the right bytes in the right order, whatever the picks are."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import BatchKind, ColumnId, DispatchPart, SchedulePart
from delayd.batch.content import content_hash
from delayd.batch.gather import Pick, compose, gather, gather_singles, reorder, row_bytes
from delayd.batch.labels import bloom_of, encode_tags
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


def test_rows_one_by_one_are_what_picks_of_one_row_are() -> None:
    plain, with_headers = parse(messages(BODIES)), parse(messages(BODIES, headers=HEADERS))
    for batches in ([plain] * 5, [with_headers] * 5, [plain, with_headers, plain, with_headers, with_headers]):
        rows = [4, 0, 1, 2, 0]
        singles = gather_singles(batches, rows)
        picked = gather([Pick(batch, range(row, row + 1)) for batch, row in zip(batches, rows, strict=True)])
        made = [
            compose(BatchKind.DISPATCH, DISPATCH, gathered, np.arange(5, dtype=np.uint64), [b"s"]).joined()
            for gathered in (singles, picked)
        ]
        assert made[0] == made[1]


def test_single_rows_of_several_batches_come_in_the_order_of_the_picks() -> None:
    batches = [parse(messages([body], due=[due])) for due, body in enumerate(BODIES)]
    picks = [Pick(batch, range(1)) for batch in reversed(batches)]
    assert composed(picks, 5) == list(reversed(list(enumerate(BODIES))))


@pytest.mark.parametrize("row", range(5))
def test_one_row_of_a_larger_batch_is_copied_whether_as_range_or_as_array(row: int) -> None:
    batch = parse(messages(BODIES, headers=HEADERS))
    for rows in (range(row, row + 1), np.array([row])):
        assert composed([Pick(batch, rows)], 1) == [(row, BODIES[row])]


def test_neighbours_are_copied_with_their_headers() -> None:
    batch = parse(messages(BODIES, headers=HEADERS))
    gathered = gather([Pick(batch, range(1, 4))])
    headers, bodies = gathered.regions[ColumnId.HEADERS_END], gathered.regions[ColumnId.BODY_END]
    assert headers.lengths.tolist() == [0, 9, 0]
    assert bodies.lengths.tolist() == [0, 12, 8]
    assert b"".join(map(bytes, headers.pieces)) == b"h" * 9 + bytes(7)
    assert b"".join(map(bytes, bodies.pieces)) == b"twelve bytes" + bytes(4) + b"x" * 8


def test_scattered_rows_come_in_the_order_that_was_asked_for_also_twice() -> None:
    batch = parse(messages(BODIES))
    assert composed([Pick(batch, np.array([4, 0, 2, 0]))], 4) == [
        (4, BODIES[4]),
        (0, BODIES[0]),
        (2, BODIES[2]),
        (0, BODIES[0]),
    ]


def test_more_scattered_rows_than_one_piece_has_are_all_copied() -> None:
    bodies = [b"%d" % number * (number % 5) for number in range(20_000)]
    batch = parse(messages(bodies))
    rows = np.random.default_rng(1).permutation(20_000)[:17_000]
    assert composed([Pick(batch, rows)], 17_000) == [(row, bodies[row]) for row in rows.tolist()]


def test_rows_without_headers_stay_so_beside_rows_that_have_some() -> None:
    plain, with_headers = parse(messages([b"p"])), parse(messages([b"q"], headers=[b"hh"]))
    for plain_rows in (range(1), np.array([0])):
        gathered = gather([Pick(plain, plain_rows), Pick(with_headers, range(1)), Pick(plain, plain_rows)])
        assert gathered.regions[ColumnId.HEADERS_END].lengths.tolist() == [0, 2, 0]
    batch = parsed(compose(BatchKind.DISPATCH, DISPATCH, gathered, np.arange(3, dtype=np.uint64), [b"s"]).joined())
    check_batch(batch)
    assert bodies_of(batch) == [b"p", b"q", b"p"]


@pytest.mark.parametrize("rows", [range(2), np.array([1, 0])])
def test_empty_bodies_only_make_a_batch_without_a_body(rows: range | np.ndarray) -> None:
    assert [body for _, body in composed([Pick(parse(messages([b"", b""])), rows)], 2)] == [b"", b""]


def test_reordered_rows_take_their_headers_and_bodies_with_them() -> None:
    gathered = gather([Pick(parse(messages(BODIES, headers=HEADERS)), range(5))])
    moved = reorder(gathered, np.array([3, 1, 4, 0, 2]))
    batch = parsed(compose(BatchKind.DISPATCH, DISPATCH, moved, np.arange(5, dtype=np.uint64), [b"s"]).joined())
    assert bodies_of(batch) == [BODIES[index] for index in (3, 1, 4, 0, 2)]
    starts, ends = batch.region(ColumnId.HEADERS_END)
    found = [bytes(batch.heap[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert found == [HEADERS[index] for index in (3, 1, 4, 0, 2)]
    empty = reorder(gather([Pick(parse(messages([b"", b""])), range(2))]), np.array([1, 0]))
    assert empty.regions[ColumnId.BODY_END].lengths.tolist() == [0, 0]


def test_tags_and_their_blooms_go_along_with_their_rows() -> None:
    tags = [["t0"], [], ["t1", "a longer tag"], ["t0", "t2"], ["t4"]]
    items = list(map(encode_tags, tags))
    keyed, plain = parse(messages(BODIES, headers=HEADERS, tags=tags)), parse(messages(BODIES))
    order = [4, 0, 2, 1]
    expected = [*((items[row], HEADERS[row], BODIES[row]) for row in order), (b"", b"", BODIES[2])]
    for gathered in (
        gather([Pick(keyed, np.array(order)), Pick(plain, np.array([2]))]),
        gather([*(Pick(keyed, range(row, row + 1)) for row in order), Pick(plain, range(2, 3))]),
        gather_singles([keyed] * 4 + [plain], [*order, 2]),
        reorder(gather([Pick(keyed, range(5)), Pick(plain, range(2, 3))]), np.array([*order, 5])),
    ):
        batch = parsed(compose(BatchKind.DISPATCH, DISPATCH, gathered, np.arange(5, dtype=np.uint64), [b"s"]).joined())
        check_batch(batch)
        assert batch.uint64s(ColumnId.TAG_BLOOM).tolist() == [bloom_of(tags[row]) for row in order] + [0]
        found = [
            [bytes(batch.heap[start:end]) for start, end in zip(*batch.region(column), strict=True)]
            for column in (ColumnId.TAGS_END, ColumnId.HEADERS_END, ColumnId.BODY_END)
        ]
        assert list(zip(*found, strict=True)) == expected
        assert batch.content_hashes().tolist() == [content_hash(b"s", *items) for _, *items in expected]


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


def test_a_schedule_batch_keeps_subjects_and_instants_of_acceptance() -> None:
    gathered = gather([Pick(parse(messages([b"a", b"b"], due=[5, 6])), range(2))])
    data = compose(
        kind=BatchKind.SCHEDULE,
        part=SchedulePart(0, 100, 7),
        gathered=gathered,
        sequences=np.array([8, 9], np.uint64),
        subjects=[b"s", b"t"],
        others={ColumnId.SUBJECT: np.array([1, 0], np.uint32), ColumnId.ACCEPTED_AT_MS: np.array([3, 4])},
    ).joined()
    batch = parsed(data)
    check_batch(batch)
    assert batch.uint32s(ColumnId.SUBJECT).tolist() == [1, 0]
    assert batch.int64s(ColumnId.ACCEPTED_AT_MS).tolist() == [3, 4]
    assert batch.schedule == SchedulePart(0, 100, 7)


def test_a_source_that_rotted_is_found_before_anything_is_copied() -> None:
    data = bytearray(messages(BODIES))
    data[-1] ^= 1
    with pytest.raises(BatchMalformed, match="checksum of its heap"):
        gather_singles([parse(data)], [0])
    with pytest.raises(BatchMalformed, match="checksum of its heap"):
        gather([Pick(parse(data), range(1))])


@pytest.mark.parametrize("headers", [None, HEADERS])
def test_row_bytes_of_some_rows_are_those_of_all(headers: list[bytes] | None) -> None:
    batch = parse(messages(BODIES, headers=headers))
    whole = row_bytes(batch, 0, batch.count).tolist()
    for first in range(batch.count):
        for rows in range(batch.count - first + 1):
            assert row_bytes(batch, first, rows).tolist() == whole[first : first + rows]


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
