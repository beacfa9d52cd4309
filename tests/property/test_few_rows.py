"""A small group is made into rows and checked in plain integers; what comes out is what the arrays make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.batch import batch as batch_module
from delayd.batch import validate
from delayd.batch.batch import Batch, encode_bare, parse
from delayd.batch.columns import FEW_ROWS, BatchKind, ColumnId, DispatchPart, SchedulePart
from delayd.batch.names import HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX
from delayd.batch.sequences import ROW_BITS
from delayd.batch.validate import check_batch, refused_rows
from delayd.client.pulling import message
from delayd.client.pulling.message import FEW_ITEMS, PulledPart, items_of
from delayd.delay import rows as rows_module
from delayd.delay.handoff import frames, window
from delayd.delay.handoff.frames import collect, collect_singles, encode_dispatch, split_by_subject_and_hour
from delayd.delay.handoff.window import size_of
from delayd.delay.rows import COARSE_FROM_MS, ROW, Stored, hour_span, latest_due_ms, message_rows, new_rows
from delayd.delay.subjects import Subjects
from delayd.errors import BatchMalformed, MessageTooLarge
from delayd.hours import HOUR_MS, INSTANT_MS_MAX
from tests.batches import messages, with_true_checksums

APPENDED_AT_MS = 500_000 * HOUR_MS + 17
SUBJECTS = [b"a", b"orders.eu", b"x/y"]

row = st.tuples(
    st.integers(APPENDED_AT_MS - 30 * 24 * HOUR_MS, APPENDED_AT_MS + 3 * HOUR_MS),
    st.binary(max_size=20),
    st.binary(max_size=9),
    st.integers(0, len(SUBJECTS) - 1),
)
batch = st.tuples(st.lists(row, min_size=1, max_size=FEW_ROWS // 4), st.booleans(), st.booleans(), st.booleans())


@given(st.lists(batch, min_size=1, max_size=4), st.integers(0, 1 << 40))
def test_few_rows_are_the_rows_that_arrays_make(
    batches: list[tuple[list[tuple[int, bytes, bytes, int]], bool, bool, bool]], base: int
) -> None:
    stored, offset, sequence = [], 8 * base, base
    for rows, with_headers, with_subjects, with_tags in batches:
        data = messages(
            [body for _, body, _, _ in rows],
            due=[due for due, _, _, _ in rows],
            headers=[header for _, _, header, _ in rows] if with_headers else None,
            keys=[header.hex().encode() for _, _, header, _ in rows] if with_tags else None,
            tags=[["tag"] * (len(body) & 1) for _, body, _, _ in rows] if with_tags else None,
            subjects=SUBJECTS if with_subjects else [b"only"],
            subject_of=[subject for _, _, _, subject in rows] if with_subjects else None,
        )
        stored.append(Stored(offset, sequence, parse(data)))
        offset += len(data)
        sequence += len(rows)
    few = message_rows(stored, Subjects(), APPENDED_AT_MS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows_module, "FEW_ROWS", 0)
        many = message_rows(stored, Subjects(), APPENDED_AT_MS)
    assert few.dtype == many.dtype and few.tolist() == many.tolist()


pending = st.tuples(
    st.integers(-COARSE_FROM_MS - 5, HOUR_MS - 1),
    st.integers(32, 1 << 20),
    st.integers(0, 1),
    st.integers(500_000, 500_001),
    st.integers(1, 1 << 40),
    st.integers(0, 1 << 62),
)


@given(st.lists(pending, min_size=1, max_size=FEW_ROWS))
def test_few_pending_rows_are_looked_at_as_many_are(drawn: list[tuple[int, ...]]) -> None:
    made = np.array(drawn, ROW)

    def looked() -> object:
        parts, left = split_by_subject_and_hour(made, 2)
        return latest_due_ms(made), hour_span(made), size_of(made), [part.tolist() for part in parts], left.tolist()

    few = looked()
    with pytest.MonkeyPatch.context() as patched:
        for module in (rows_module, frames, window):
            patched.setattr(module, "FEW_ROWS", 0)
        assert looked() == few


stored_row = st.tuples(
    st.integers(0, 2), st.integers(0, len(SUBJECTS) - 1), st.integers(1, INSTANT_MS_MAX), st.binary(max_size=40)
)


@given(st.lists(stored_row, min_size=1, max_size=12), st.integers(0, 1 << 62))
def test_the_single_rows_of_a_frame_become_the_batches_that_each_alone_would_become(
    drawn: list[tuple[int, int, int, bytes]], sequence: int
) -> None:
    bodies, due = [body for *_, body in drawn], [instant for _, _, instant, _ in drawn]
    subject_of = [subject for _, subject, _, _ in drawn]
    common: dict[str, Any] = {"due": due, "subjects": SUBJECTS, "subject_of": subject_of}
    filed = SchedulePart(0, 8, APPENDED_AT_MS // HOUR_MS)
    batches = [
        parse(messages(bodies, **common)),
        parse(messages(bodies, **common, headers=[b"\x80" * (len(body) & 1) for body in bodies])),
        parse(messages(bodies, **common, sequences=range(len(drawn)), kind=BatchKind.SCHEDULE, part=filed)),
    ]

    class Sources:
        def batch(self, hour: int, location: int) -> Batch:
            return batches[location >> ROW_BITS]

    rows = new_rows(len(drawn))
    rows["subject"], rows["sequence"] = subject_of, range(sequence, sequence + len(drawn))
    rows["location"] = [(source << ROW_BITS) | row for row, (source, *_) in enumerate(drawn)]
    parts = [rows[at : at + 1] for at in range(len(rows))]
    singles = collect_singles(parts, Sources(), SUBJECTS)
    assert [*singles] == [at for at, (source, *_) in enumerate(drawn) if source != 1]
    for at, single in singles.items():
        part = DispatchPart(1, 2, at, 4, 5, 6, 7)
        found, name = collect(parts[at], Sources()), SUBJECTS[subject_of[at]]
        pieces, deliver_at_ms, hashes = encode_dispatch(part, parts[at], found, name)
        assert encode_bare(part, single.row, single.subject, single.body, single.length) == b"".join(pieces)
        assert single.hashes.dtype == hashes.dtype and single.hashes.tolist() == hashes.tolist()
        assert single.deliver_at_ms.dtype == deliver_at_ms.dtype
        assert single.deliver_at_ms.tolist() == deliver_at_ms.tolist()


@given(st.lists(st.tuples(st.binary(max_size=20), st.booleans()), min_size=1, max_size=2 * FEW_ITEMS), st.data())
def test_few_pulled_messages_have_the_bytes_that_many_have(
    drawn: list[tuple[bytes, bool]], data: st.DataObject
) -> None:
    bodies = [body for body, _ in drawn]
    made = messages(bodies, headers=[b"\x80" if has_headers else b"" for _, has_headers in drawn])
    start = data.draw(st.integers(0, len(drawn) - 1))
    rows = range(start, data.draw(st.integers(start + 1, len(drawn))))
    part = PulledPart(parse(made), rows, 5, 1)

    def items() -> list[list[bytes]]:
        return [items_of(part, column) for column in (ColumnId.BODY_END, ColumnId.HEADERS_END)]

    few = items()
    assert few[0] == bodies[rows.start : rows.stop]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(message, "FEW_ITEMS", 0)
        assert items() == few


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=FEW_ROWS))
def test_the_extremes_of_a_column_of_few_rows_are_those_of_many(due: list[int]) -> None:
    data = parse(messages([b"x"] * len(due), due=due))
    few = data.range_of(ColumnId.DELIVER_AT_MS), data.highest(ColumnId.DELIVER_AT_MS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch_module, "FEW_ROWS", 0)
        assert (data.range_of(ColumnId.DELIVER_AT_MS), data.highest(ColumnId.DELIVER_AT_MS)) == few
    assert few[0] == (min(due), max(due))


@given(
    st.lists(st.sampled_from([0, 5, HEADERS_BYTES_MAX, HEADERS_BYTES_MAX + 1]), min_size=1, max_size=5),
    st.sampled_from([0, 1, MESSAGE_BYTES_MAX - HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX]),
)
def test_few_rows_are_refused_as_many_are(headers: list[int], body: int) -> None:
    data = parse(messages([bytes(body)] + [b"x"] * (len(headers) - 1), headers=[bytes(size) for size in headers]))
    assert _refused(data, few_rows=0) == _refused(data, few_rows=32)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=5))
def test_ends_that_fall_or_leave_the_heap_are_refused_as_among_many(ends: list[int]) -> None:
    made = bytearray(messages([b"12345678"] * len(ends)))
    column = parse(made).offsets[ColumnId.BODY_END]
    made[column : column + 4 * len(ends)] = np.array(ends, "<u4").tobytes()
    data = parse(with_true_checksums(made))
    assert _refused(data, few_rows=0)[0] == _refused(data, few_rows=32)[0]


def _refused(data: Batch, few_rows: int) -> tuple[str, list[int]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(validate, "FEW_ROWS", few_rows)
        try:
            check_batch(data)
        except MessageTooLarge as error:
            return "too large", refused_rows(error)
        except BatchMalformed:
            return "malformed", []
        return "good", []
