"""Batches made at random come back whole, and hostile ones are refused or harmless."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from delayd.batch.batch import Batch, parse
from delayd.batch.columns import HEADER, REGIONS, BatchKind, ColumnId, DispatchPart
from delayd.batch.gather import Pick, compose, gather, reorder
from delayd.batch.validate import check_batch
from delayd.errors import BadKey, BadSubject, BadTags, BatchMalformed, MessageTooLarge
from tests.batches import bodies_of, messages, parsed, tags_of, with_true_checksums

DISPATCH = DispatchPart(1, 2, 3, 4, 5, 6, 7)
BODY = st.binary(max_size=40)
KEY = st.text(max_size=12).map(str.encode)
TAGS = st.lists(st.sampled_from(["eu", "urgent", "retry-2", "käse", "x" * 64]), max_size=4, unique=True)
SUBJECTS = st.lists(st.from_regex(rb"[A-Za-z0-9._%/-]{1,20}", fullmatch=True), min_size=1, max_size=4, unique=True)


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    bodies = draw(st.lists(BODY, min_size=1, max_size=9))
    rows = len(bodies)
    # Each subject is that of a row: the first rows take one each, the others any.
    subjects = draw(SUBJECTS)[:rows]
    subject_of = list(range(len(subjects))) + draw(
        st.lists(st.integers(0, len(subjects) - 1), min_size=rows - len(subjects), max_size=rows - len(subjects))
    )
    keys = draw(st.none() | st.lists(KEY, min_size=rows, max_size=rows))
    return messages(
        bodies,
        due=draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows)),
        headers=draw(st.none() | st.lists(BODY, min_size=rows, max_size=rows)),
        keys=keys,
        flags=None if keys is None else draw(st.none() | st.just([len(key) % 3 for key in keys])),
        tags=draw(st.none() | st.lists(TAGS, min_size=rows, max_size=rows)),
        subjects=subjects,
        subject_of=subject_of if len(subjects) > 1 else draw(st.sampled_from([None, subject_of])),
    )


def items_of(batch: Batch, column: ColumnId) -> list[bytes]:
    """The items of a region, read by the format page alone."""
    ends_at = batch.offsets[column]
    ends = [int.from_bytes(batch.buffer[ends_at + 4 * row :][:4], "little") for row in range(batch.count)]
    starts = [batch.region_start(column), *((end + 7) // 8 * 8 for end in ends[:-1])]
    assert all(start <= end <= len(batch.heap) for start, end in zip(starts, ends, strict=True))
    return [bytes(batch.heap[start:end]) for start, end in zip(starts, ends, strict=True)]


def use(batch: Batch, seed: int) -> None:
    """Copy rows out in every way there is, and compare with the bytes themselves."""
    bodies = items_of(batch, ColumnId.BODY_END)
    assert bodies == bodies_of(batch)
    order = np.random.default_rng(seed).integers(0, batch.count, 5)
    first = int(order[0])
    picks = {
        "range": ([Pick(batch, range(first, batch.count))], list(range(first, batch.count))),
        "array": ([Pick(batch, order)], order.tolist()),
        "single": ([Pick(batch, range(row, row + 1)) for row in order.tolist()], order.tolist()),
        "mixed": ([Pick(batch, order[:1]), Pick(batch, range(batch.count))], [first, *range(batch.count)]),
    }
    for made, rows in picks.values():
        gathered = gather(made)
        numbers = np.arange(len(rows), dtype=np.uint64)
        copied = parsed(compose(BatchKind.DISPATCH, DISPATCH, gathered, numbers, [b"s"]).joined())
        check_batch(copied)
        assert bodies_of(copied) == [bodies[row] for row in rows]
        due = batch.int64s(ColumnId.DELIVER_AT_MS)
        assert copied.int64s(ColumnId.DELIVER_AT_MS).tolist() == due.take(rows).tolist()
        if ColumnId.HEADERS_END in batch:
            headers = items_of(batch, ColumnId.HEADERS_END)
            assert items_of(copied, ColumnId.HEADERS_END) == [headers[row] for row in rows]
        if ColumnId.KEY_END in batch:
            keys = items_of(batch, ColumnId.KEY_END)
            copied_keys = items_of(copied, ColumnId.KEY_END) if ColumnId.KEY_END in copied else [b""] * len(rows)
            assert copied_keys == [keys[row] for row in rows]
        assert ColumnId.ROW_FLAGS not in copied
        assert tags_of(copied) == [tags_of(batch)[row] for row in rows]
    gathered = gather([Pick(batch, range(batch.count))])
    turned = reorder(gathered, np.arange(batch.count)[::-1])
    numbers = np.arange(batch.count, dtype=np.uint64)
    assert bodies_of(parsed(compose(BatchKind.DISPATCH, DISPATCH, turned, numbers, [b"s"]).joined())) == bodies[::-1]


@given(batches(), st.integers(0, 1 << 32))
def test_any_rows_of_any_honest_batch_are_copied_as_they_are(data: bytes, seed: int) -> None:
    batch = parsed(data)
    check_batch(batch)
    use(batch, seed)


def change_a_byte(draw: st.DataObject, batch: Batch, changed: bytearray) -> None:
    """Mostly of what lengths and offsets are made of, for bodies may be anything."""
    position = draw.draw(st.integers(0, batch.heap_offset + 16))
    if position < len(changed) and not 8 <= position < 12:
        changed[position] = draw.draw(st.sampled_from([0, 1, 4, 7, 8, 15, 16, 0x7F, 0x80, 0xFF]))


def change_an_end(draw: st.DataObject, batch: Batch, changed: bytearray) -> None:
    """To a number about the heap's size, or about that of the row before, or far away."""
    column = draw.draw(st.sampled_from([c for c in REGIONS if c in batch.offsets]))
    # The last end is the one that alone must be inside the heap.
    row = draw.draw(st.just(batch.count - 1) | st.integers(0, batch.count - 1))
    at = batch.offsets[column] + 4 * row
    heap_bytes = batch.total_bytes - batch.heap_offset
    near = [int.from_bytes(changed[at - 4 : at], "little"), int.from_bytes(changed[at : at + 4], "little"), heap_bytes]
    value = draw.draw(st.sampled_from(near)) + draw.draw(st.sampled_from([-8, -1, 0, 1, 7, 8, 1 << 31]))
    changed[at : at + 4] = (value % (1 << 32)).to_bytes(4, "little")


@settings(max_examples=300)
@given(batches(), st.data())
def test_a_hostile_batch_with_true_checksums_is_refused_or_copied_within_its_bounds(
    data: bytes, draw: st.DataObject
) -> None:
    changed = bytearray(data)
    for _ in range(draw.draw(st.sampled_from([1, 1, 2, 4]))):
        draw.draw(st.sampled_from((change_a_byte, change_an_end)))(draw, parse(data), changed)
    try:
        fixed = with_true_checksums(changed)
        batch = parse(fixed)
        check_batch(batch)
    except (BatchMalformed, BadSubject, BadKey, BadTags, MessageTooLarge):
        return
    batch.verify()
    assert batch.total_bytes <= len(fixed)
    if ColumnId.BODY_END in batch and ColumnId.DELIVER_AT_MS in batch:
        use(batch, 1)
        assert all(batch.subjects())


@given(st.binary(max_size=300), st.integers(0, 60))
def test_bytes_that_are_no_batch_are_refused(noise: bytes, kept: int) -> None:
    data = messages([b"x"])[:kept] + noise
    try:
        batch = parse(data)
        batch.verify()
    except BatchMalformed:
        return
    assert data[:36] == messages([b"x"])[:36] and len(data) >= HEADER.size
