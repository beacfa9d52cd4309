"""What intake proves of a batch: each thing that can't be is refused, with the rows and the column at fault."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from delayd.batch.batch import Batch, encode, parse
from delayd.batch.columns import (
    FEW_ROWS,
    HEADER_BYTES,
    BatchKind,
    ColumnId,
    DispatchPart,
    KindPart,
    OutcomePart,
    SchedulePart,
    padded,
)
from delayd.batch.names import HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX, check_subject
from delayd.batch.validate import ROWS_NAMED_MAX, check_batch, refused_rows
from delayd.errors import BadSubject, BatchMalformed, MessageTooLarge
from delayd.log.control import encode_records
from delayd.log.hour import NewPart, encode_outcomes
from delayd.log.pull import PullEntry, PullOp, encode_entries
from delayd.outcome import Outcome
from tests.batches import PRODUCER, messages, with_true_checksums

DISPATCH = DispatchPart(1, 2, 3, 4, 5, 6, 7)


def with_end(data: bytes, column: ColumnId, row: int, end: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into("<I", changed, parse(data).offsets[column] + 4 * row, end)
    return bytes(changed)


@pytest.mark.parametrize("count", [1, 2, 500])
def test_honest_batches_of_every_kind_pass(count: int) -> None:
    bodies, numbers = [b"b" * (row % 20) for row in range(count)], np.arange(count)
    made = [
        messages(bodies),
        messages(
            bodies,
            headers=bodies,
            subjects=[b"a", b"b/c-d_e%20.F9"][:count],
            subject_of=[row % 2 for row in range(count)],
        ),
        messages(bodies, sequences=range(count), kind=BatchKind.SCHEDULE, part=SchedulePart(0, 9, 1)),
        messages(bodies, sequences=range(count), kind=BatchKind.DISPATCH, part=DISPATCH),
        encode_outcomes(1, [NewPart(numbers.astype(np.uint64), numbers, Outcome.DISPATCHED)]),
        encode_records([{"type": "target", "row": row} for row in range(count)]),
        *encode_entries([PullEntry(PullOp.ACK, 1, 1, 1, row, 0, 1, 5) for row in range(count)]),
    ]
    for data in made:
        check_batch(parse(data))


@pytest.mark.parametrize("count", [1, 3, FEW_ROWS + 1])
def test_an_end_outside_of_its_place_names_row_and_column(count: int) -> None:
    data = messages([b"0123456789"] * count, headers=[b"h"] * count)
    heap_bytes = parse(data).total_bytes - parse(data).heap_offset
    last = count - 1
    for column, row, end in [
        (ColumnId.BODY_END, last, heap_bytes + 1),
        (ColumnId.BODY_END, last, 0xFFFFFFFF),
        (ColumnId.BODY_END, 0, 0),
        (ColumnId.HEADERS_END, 0, 23),
        (ColumnId.HEADERS_END, last, heap_bytes + 8),
    ]:
        with pytest.raises(BatchMalformed, match=f"row {row}: column {column.name.lower()} is {end}"):
            check_batch(parse(with_end(data, column, row, end)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (b"", "0 bytes"),
        (b"x" * 256, "256 bytes"),
        (b"a b", "character"),
        ("ü".encode(), "character"),
        (b"a\x00", "character"),
    ],
)
def test_a_bad_subject_is_refused_with_the_rows_that_have_it(name: bytes, said: str) -> None:
    with pytest.raises(BadSubject, match=said):
        check_subject(name)
    data = messages([b""] * 4, subjects=[b"good", name], subject_of=[0, 1, 0, 1])
    for _ in range(2):
        with pytest.raises(BadSubject, match=said) as caught:
            check_batch(parse(data))
        assert refused_rows(caught.value) == [1, 3]
    with pytest.raises(BadSubject) as caught:
        check_batch(parse(messages([b""] * 3, subjects=[name])))
    assert refused_rows(caught.value) == [0, 1, 2]


def test_a_subject_table_that_does_not_fit_its_heap_is_refused() -> None:
    data = bytearray(messages([b"x", b"y"], subjects=[b"a", b"b"], subject_of=[0, 1]))
    heap = parse(data).heap_offset
    for ends in ((1, 0xFFFFFFFF), (0xFFFFFFFF, 2), (2, 1), (0, 2)):
        struct.pack_into("<2I", data, heap, *ends)
        with pytest.raises((BatchMalformed, BadSubject)):
            check_batch(parse(data))


def test_subject_indices_beyond_the_table_name_the_row() -> None:
    with pytest.raises(BatchMalformed, match="row 2: column subject"):
        check_batch(parse(messages([b""] * 3, subject_of=[0, 0, 1])))
    with pytest.raises(BatchMalformed, match="row 0: column subject"):
        check_batch(parse(messages([b""], subject_of=[4_000_000_000])))


@pytest.mark.parametrize("others", [0, 2])
def test_messages_over_their_limits_are_named(others: int) -> None:
    small = [b"s"] * others
    check_batch(parse(messages([*small, bytes(MESSAGE_BYTES_MAX - 4)], headers=[*small, b"1234"])))
    check_batch(parse(messages([*small, b""], headers=[*small, bytes(HEADERS_BYTES_MAX)])))
    for body, headers in ((MESSAGE_BYTES_MAX - 3, 4), (1, HEADERS_BYTES_MAX + 1)):
        with pytest.raises(MessageTooLarge) as caught:
            check_batch(parse(messages([*small, bytes(body)], headers=[*small, bytes(headers)])))
        assert refused_rows(caught.value) == [others]


def test_no_more_than_1000_rows_are_named() -> None:
    with pytest.raises(BadSubject) as caught:
        check_batch(parse(messages([b""] * 5_000, subjects=[b"!"])))
    assert refused_rows(caught.value) == list(range(ROWS_NAMED_MAX))


def test_columns_that_a_kind_needs_or_can_not_have_are_named() -> None:
    with pytest.raises(BatchMalformed, match="can't have the column sequence"):
        check_batch(parse(messages([b""], sequences=[5])))
    with pytest.raises(BatchMalformed, match="needs the column sequence"):
        check_batch(parse(messages([b""], kind=BatchKind.DISPATCH, part=DISPATCH)))
    with pytest.raises(BatchMalformed, match="can't have the column subject"):
        check_batch(parse(messages([b""], sequences=[5], subject_of=[0], kind=BatchKind.DISPATCH, part=DISPATCH)))
    with pytest.raises(BatchMalformed, match="needs the column body_end"):
        check_batch(parse(encode(BatchKind.CONTROL, None, 1, [], [b""])))


def test_outcome_parts_that_do_not_add_up_are_refused() -> None:
    columns = [(column, np.arange(3)) for column in (ColumnId.DELIVER_AT_MS, ColumnId.SEQUENCE, ColumnId.CONTENT_HASH)]
    with pytest.raises(BatchMalformed, match="not made of"):
        check_batch(parse(encode(BatchKind.OUTCOME, OutcomePart(1), 3, columns, [bytes(72)])))
    with pytest.raises(BatchMalformed, match="0 rows for 3"):
        check_batch(parse(encode(BatchKind.OUTCOME, OutcomePart(1), 3, columns, [bytes(64)])))
    with pytest.raises(BatchMalformed, match="heap of 8"):
        entry = np.zeros(1, "V48")
        check_batch(parse(encode(BatchKind.PULL, None, 1, [(ColumnId.ENTRY, entry)], [bytes(8)])))


# Bytes that no reader looks at, and each way in which counts do not add up (rule E2).


def pads_of(batch: Batch) -> list[int]:
    """The position of each byte that stands between columns, names and items, by the format page alone."""
    heap, buffer, rows = batch.heap_offset, batch.buffer, batch.count
    pads: list[int] = []
    widths = {ColumnId.DELIVER_AT_MS: 8, ColumnId.SEQUENCE: 8, ColumnId.ACCEPTED_AT_MS: 8, ColumnId.CONTENT_HASH: 8}
    for column, offset in batch.offsets.items():
        end = offset + widths.get(ColumnId(column), 4) * rows
        pads += range(end, padded(end))
    ends = 4 * batch.subject_count
    names = padded(ends)
    (last,) = struct.unpack_from("<I", buffer, heap + ends - 4)
    pads += range(heap + ends, heap + names)
    pads += range(heap + names + last, heap + names + padded(last))
    for column in (ColumnId.HEADERS_END, ColumnId.BODY_END):
        if column in batch.offsets:
            for end in batch.uint32s(column).tolist():
                pads += range(heap + end, heap + padded(end))
    if batch.kind is BatchKind.DISPATCH:
        pads += range(HEADER_BYTES + batch.kind_bytes - 4, HEADER_BYTES + batch.kind_bytes)
    return pads


@pytest.mark.parametrize("count", [1, 3, FEW_ROWS + 3])
@pytest.mark.parametrize("kind", [BatchKind.PRODUCER, BatchKind.SCHEDULE, BatchKind.DISPATCH])
def test_rule_E2_each_byte_between_columns_names_and_items_must_be_zero(kind: BatchKind, count: int) -> None:
    bodies = [b"b" * (1 + row % 9) for row in range(count)]
    parts: dict[BatchKind, KindPart] = {
        BatchKind.PRODUCER: PRODUCER,
        BatchKind.SCHEDULE: SchedulePart(0, 9, 1),
        BatchKind.DISPATCH: DISPATCH,
    }
    subjects = [b"a", b"bc", b"def"][: 1 if kind is BatchKind.DISPATCH else count]
    data = messages(
        bodies,
        headers=bodies[::-1],
        subjects=subjects,
        subject_of=None if kind is BatchKind.DISPATCH else [row % len(subjects) for row in range(count)],
        sequences=None if kind is BatchKind.PRODUCER else range(count),
        kind=kind,
        part=parts[kind],
    )
    check_batch(parse(data))
    positions = pads_of(parse(data))
    assert len(positions) > 10
    for position in positions:
        changed = bytearray(data)
        changed[position] = 1
        with pytest.raises(BatchMalformed, match="zeros"):
            check_batch(parse(with_true_checksums(changed)))


@pytest.mark.parametrize("count", [1, FEW_ROWS + 1])
@pytest.mark.parametrize("behind", [bytes(8), b"12345678", bytes(4096)])
def test_rule_E2_bytes_behind_the_last_body_are_refused(count: int, behind: bytes) -> None:
    data = bytearray(messages([b"12345678"] * count)) + behind
    struct.pack_into("<I", data, 8, len(data))
    with pytest.raises(BatchMalformed, match="nothing may stand behind"):
        check_batch(parse(with_true_checksums(data)))


def test_rule_E2_columns_that_overlap_or_leave_a_gap_are_refused() -> None:
    data = messages([b"x"] * 4, subject_of=[0] * 4)
    directory = HEADER_BYTES + 24
    places = [struct.unpack_from("<HHI", data, directory + 8 * index)[2] for index in range(3)]
    for index in range(3):
        for place in (*places, places[index] + 8, places[index] - 8):
            if place == places[index]:
                continue
            changed = bytearray(data)
            struct.pack_into("<I", changed, directory + 8 * index + 4, place)
            with pytest.raises(BatchMalformed, match="must be at"):
                parse(with_true_checksums(changed))


def test_rule_E2_a_subject_that_no_row_has_or_that_stands_twice_is_refused() -> None:
    with pytest.raises(BatchMalformed, match="subject 1 of its 3 subjects is that of no row"):
        check_batch(parse(messages([b""] * 4, subjects=[b"a", b"b", b"c"], subject_of=[0, 2, 2, 0])))
    with pytest.raises(BatchMalformed, match="without a column"):
        check_batch(parse(messages([b""] * 4, subjects=[b"a", b"b"])))
    for names in ([b"a", b"a"], [b"a", b"b", b"a"], [b"n" * 200] * 30):
        rows = list(range(len(names)))
        with pytest.raises(BatchMalformed, match="names each once"):
            check_batch(parse(messages([b""] * len(rows), subjects=names, subject_of=rows)))
