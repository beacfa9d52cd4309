"""Each compiled piece returns the bytes of its twin, and refuses what is damaged without reading or writing beyond it.

``make asan`` runs these tests with the address and undefined behaviour sanitizers.
"""

from __future__ import annotations

import ast
import importlib
import struct
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import delayd
from delayd import kernel
from delayd.batch import validate
from delayd.batch.batch import encode_subject_table, parse
from delayd.batch.columns import HEADER_BYTES, BatchKind, ColumnArray, ColumnId, SchedulePart, padded
from delayd.batch.names import HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX
from delayd.batch.sequences import ROW_BITS
from delayd.batch.validate import check_batch
from delayd.client.limits import lengths_of, lengths_of_bytes
from delayd.client.pulling.message import cut_items
from delayd.client.sending.outbox import pack_columns
from delayd.client.sending.send_options import SendItems
from delayd.delay.handoff.frames import pick_rows
from delayd.delay.rows import Stored, new_rows, numbers_of, pack_rows
from delayd.delay.subjects import Subjects
from delayd.errors import DelaydError
from delayd.hours import HOUR_MS, INSTANT_MS_MAX
from tests.batches import messages, with_true_checksums
from tests.compiled import build_kernel, load_kernel

SUBJECTS = [b"a", b"orders.eu", b"x/y", b"eight.by"]
REGIONS = [ColumnId.KEY_END, ColumnId.TAGS_END, ColumnId.HEADERS_END, ColumnId.BODY_END]
AT_MS = 500_000 * HOUR_MS + 17
FILED = SchedulePart(0, 8, 500_000)

bodies = st.binary(max_size=40) | st.integers(0, 3_000).map(lambda size: bytes(range(256)) * 12 + bytes(size))
row = st.tuples(
    st.integers(0, INSTANT_MS_MAX) | st.integers(AT_MS - 50 * 24 * HOUR_MS, AT_MS + HOUR_MS),
    bodies,
    st.binary(max_size=9),
    st.integers(0, len(SUBJECTS) - 1),
    st.integers(0, 1),
)


@st.composite
def encoded(draw: st.DrawFn, /, rows_max: int = 40, **fixed: Any) -> bytes:
    """A batch of a producer, or, with ``kind``, one of another kind."""
    rows = draw(st.lists(row, min_size=1, max_size=rows_max))
    has_headers, has_keys, has_tags, has_order, has_expiry, has_subjects = draw(st.tuples(*[st.booleans()] * 6))
    one_subject = fixed.get("kind") == BatchKind.DISPATCH or not has_subjects
    return messages(
        [body for _, body, *_ in rows],
        due=[due for due, *_ in rows],
        headers=[header for _, _, header, *_ in rows] if has_headers else None,
        keys=[header.hex().encode() for _, _, header, *_ in rows] if has_keys else None,
        tags=[["tag"] * some for *_, some in rows] if has_tags else None,
        ordering=[some * 77 for *_, some in rows] if has_order else None,
        expires=[some * INSTANT_MS_MAX for *_, some in rows] if has_expiry else None,
        subjects=[SUBJECTS[rows[0][3]]] if one_subject else SUBJECTS,
        subject_of=None if one_subject else [subject for *_, subject, _ in rows],
        **fixed,
    )


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return load_kernel(build_kernel(tmp_path_factory.mktemp("kernel")))


def test_the_compiled_pieces_are_those_that_delayd_chooses(pieces: ModuleType) -> None:
    chosen = [
        str(call.args[0].value)
        for path in Path(delayd.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "choose"
        if isinstance(call.args[0], ast.Constant)
    ]
    assert sorted(chosen) == sorted(name for name in vars(pieces) if name.islower() and name[0] != "_")
    assert pieces.VERSION == kernel.VERSION


@given(st.lists(encoded(), min_size=1, max_size=4), st.integers(0, 1 << 40), st.integers(0, INSTANT_MS_MAX))
def test_rows_are_the_same(pieces: ModuleType, batches: list[bytes], base: int, appended_at_ms: int) -> None:
    stored = [Stored(8 * (base + at), base + 1_000 * at, parse(data)) for at, data in enumerate(batches)]
    numbers = numbers_of(stored, Subjects())
    made = pieces.message_rows(stored, numbers, appended_at_ms)
    assert bytes(made) == bytes(pack_rows(stored, numbers, appended_at_ms))


@given(st.lists(st.binary(max_size=9)), st.booleans())
def test_lengths_are_the_same(pieces: ModuleType, items: list[bytes], is_tuple: bool) -> None:
    given_items = tuple(items) if is_tuple else items
    twin = lengths_of_bytes(given_items)
    assert twin is not None and bytes(pieces.lengths_of(given_items)) == bytes(twin)
    for other in ("text", bytearray(b"x"), None):
        with_other: list[Any] = [*items, other]
        assert pieces.lengths_of(with_other) is lengths_of_bytes(with_other) is None


@given(encoded(), st.data())
def test_cut_items_are_the_same(pieces: ModuleType, made: bytes, data: st.DataObject) -> None:
    batch = parse(made)
    first = data.draw(st.integers(0, batch.count - 1))
    stop = data.draw(st.integers(first + 1, batch.count))
    for column in batch.layout.regions:
        assert pieces.cut_items(batch, column, first, stop) == cut_items(batch, column, first, stop)


@given(st.lists(row, min_size=1, max_size=60), st.booleans(), st.booleans())
def test_packed_columns_are_the_same(pieces: ModuleType, rows: list[Any], has_keys: bool, has_flags: bool) -> None:
    columns: list[tuple[ColumnId, ColumnArray | SendItems]] = [
        (ColumnId.DELIVER_AT_MS, np.array([due for due, *_ in rows], np.int64)),
        (ColumnId.SUBJECT, np.array([subject for *_, subject, _ in rows], np.uint32)),
    ]
    if has_keys:
        keys = tuple(key for _, _, key, *_ in rows)
        columns.append((ColumnId.KEY_END, SendItems(keys, lengths_of(keys))))
    items = [body for _, body, *_ in rows]
    columns.append((ColumnId.BODY_END, SendItems(items, lengths_of(items))))
    if has_flags:
        columns.append((ColumnId.ROW_FLAGS, np.array([some for *_, some in rows], np.uint16)))
    table = encode_subject_table(SUBJECTS)
    assert pieces.pack_columns(64, table, columns) == pack_columns(64, table, columns)


@given(st.lists(encoded() | encoded(kind=BatchKind.SCHEDULE, part=FILED), min_size=1, max_size=3), st.data())
def test_picked_rows_are_the_same(pieces: ModuleType, encoded_batches: list[bytes], data: st.DataObject) -> None:
    found = [parse(made) for made in encoded_batches]
    picked = data.draw(
        st.lists(
            st.integers(0, len(found) - 1).flatmap(
                lambda at: st.tuples(st.just(at), st.integers(0, found[at].count - 1))
            ),
            min_size=1,
            max_size=32,
        )
    )
    rows = new_rows(len(picked))
    rows["sequence"] = data.draw(st.integers(0, 1 << 62)) + np.arange(len(picked))
    rows["location"] = [(at << ROW_BITS) | number for at, number in picked]
    batches, subject = [found[at] for at, _ in picked], data.draw(st.sampled_from(SUBJECTS))
    for batch in batches:
        batch.verify()
    made, twin = (piece(96, subject, rows, batches) for piece in (pieces.pick_rows, pick_rows))
    assert [bytes(part) for part in made] == [bytes(part) for part in twin]


@given(st.integers(1, 32), encoded(rows_max=40))
def test_picked_neighbours_are_the_same(pieces: ModuleType, count: int, made: bytes) -> None:
    batch = parse(made)
    batch.verify()
    rows = new_rows(min(count, batch.count))
    rows["location"] = np.arange(len(rows))
    made_of = [piece(96, b"name", rows, [batch] * len(rows)) for piece in (pieces.pick_rows, pick_rows)]
    assert [bytes(part) for part in made_of[0]] == [bytes(part) for part in made_of[1]]


damage = st.lists(st.tuples(st.integers(0, 1 << 16), st.sampled_from([0, 1, 7, 8, 0x7F, 0x80, 0xFF])), max_size=3)


def damaged(made: bytes, changes: list[tuple[int, int]], *, from_byte: int = 0) -> bytearray:
    """Change some bytes, most of them in front of the heap."""
    changed = bytearray(made)
    front = int.from_bytes(made[16:20], "little")
    for at, value in changes:
        changed[
            from_byte + at % (max(front, 1) + 16 - from_byte) if at & 1 else from_byte + at % (len(made) - from_byte)
        ] = value
    return changed


def fault_in(data: bytes) -> tuple[str, str, object] | None:
    """What `check_batch` finds wrong."""
    try:
        check_batch(parse(data))
    except DelaydError as error:
        return type(error).__name__, error.message, error.details
    return None


@settings(max_examples=300)
@given(encoded(), damage)
def test_a_check_finds_the_same_faults_in_the_same_words(
    pieces: ModuleType, made: bytes, changes: list[tuple[int, int]]
) -> None:
    data = with_true_checksums(damaged(made, changes, from_byte=HEADER_BYTES))
    twin = fault_in(data)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(validate, "_items_fit", pieces.items_fit)
        assert fault_in(data) == twin


WHOLE: dict[str, Any] = {
    "bodies": [b"12345678", b"abc", b""],
    "keys": [b"k", b"", b"key"],
    "tags": [["some"], [], []],
    "headers": [b"\x80", b"", b"\x81\xa1a\xa1b"],
}


def with_ends(column: ColumnId, ends: list[int]) -> bytes:
    """The batch WHOLE with other ends in one of its columns."""
    made = bytearray(messages(**WHOLE))
    struct.pack_into(f"<{len(ends)}I", made, parse(made).offsets[column], *ends)
    return with_true_checksums(made)


@pytest.mark.parametrize("column", REGIONS)
def test_ends_that_fall_or_leave_the_heap_are_faults_for_both(pieces: ModuleType, column: ColumnId) -> None:
    whole = parse(messages(**WHOLE))
    assert pieces.items_fit(whole, HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX)
    good = whole.uint32s(column).tolist()
    heap_bytes = whole.total_bytes - whole.heap_offset
    for ends in (
        [good[0], good[0] - 8, good[2]],
        [0, *good[1:]],
        [*good[:2], heap_bytes + 1],
        [*good[:2], (1 << 32) - 1],
        [(1 << 32) - 8, *good[1:]],
        [*good[:2], good[2] + 8],
        [*good[:2], good[2] - 8],
    ):
        made = with_ends(column, ends)
        assert not pieces.items_fit(parse(made), HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX), ends
        assert fault_in(made) is not None


@pytest.mark.parametrize("column", REGIONS)
def test_bytes_behind_an_item_that_are_not_zeros_are_a_fault_for_both(pieces: ModuleType, column: ColumnId) -> None:
    whole = parse(messages(**WHOLE))
    for end in whole.uint32s(column).tolist():
        for at in range(end, padded(end)):
            made = bytearray(messages(**WHOLE))
            made[whole.heap_offset + at] = 1
            changed = with_true_checksums(made)
            assert not pieces.items_fit(parse(changed), HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX)
            assert fault_in(changed) is not None


def test_items_as_large_as_allowed_fit_and_larger_ones_may_not(pieces: ModuleType) -> None:
    for headers_bytes, body_bytes, fits in (
        (HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX - HEADERS_BYTES_MAX, True),
        (HEADERS_BYTES_MAX + 1, 8, False),
        (8, MESSAGE_BYTES_MAX - 7, False),
        (0, MESSAGE_BYTES_MAX, True),
        (0, MESSAGE_BYTES_MAX + 1, False),
    ):
        made = messages([bytes(body_bytes)], headers=[bytes(headers_bytes)])
        assert pieces.items_fit(parse(made), HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX) is fits
        assert (fault_in(made) is None) is fits


@settings(max_examples=400)
@given(encoded(), damage, st.integers(0, 1 << 16), st.data())
def test_no_piece_leaves_the_bytes_of_a_damaged_batch(
    pieces: ModuleType, made: bytes, changes: list[tuple[int, int]], cut: int, data: st.DataObject
) -> None:
    # A copy of exactly these bytes: a sanitizer notices the first one beyond it.
    bytes_given = bytes(damaged(made, changes))[: len(made) - cut % len(made) if cut & 1 else len(made)]
    batch: Any = SimpleNamespace(buffer=np.frombuffer(bytes_given, np.uint8).copy())
    rows = new_rows(1)
    rows["location"] = data.draw(st.integers(0, 1 << 62))
    calls: list[tuple[Any, ...]] = [
        (pieces.message_rows, [(8, 1, batch)], [np.array([5], np.uint32)], AT_MS),
        (pieces.items_fit, batch, HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX),
        (pieces.pick_rows, 96, b"name", rows, [batch]),
        *[(pieces.cut_items, batch, column, 0, data.draw(st.integers(0, 70_000))) for column in REGIONS],
    ]
    for piece, *arguments in calls:
        try:
            piece(*arguments)
        except ValueError:
            assert piece is not pieces.items_fit


def test_wrong_arguments_are_refused(pieces: ModuleType) -> None:
    whole = parse(messages([b"x", b"yy"]))
    due = np.zeros(2, np.int64)
    record = new_rows(1)
    wrong: list[tuple[Any, ...]] = [
        (pieces.message_rows,),
        (pieces.message_rows, [], [due], 0),
        (pieces.message_rows, [(1, 2)], [due], 0),
        (pieces.message_rows, [(1, -2, whole)], [due], 0),
        (pieces.message_rows, [(1, 2, None)], [due], 0),
        (pieces.message_rows, [(1, 2, whole)], [b""], 0),
        (pieces.message_rows, [(1, 2, whole)], [None], 0),
        (pieces.lengths_of, 5),
        (pieces.cut_items, whole, 1, 0, 1),
        (pieces.cut_items, whole, ColumnId.KEY_END, 0, 1),
        (pieces.cut_items, whole, ColumnId.BODY_END, 2, 1),
        (pieces.cut_items, whole, ColumnId.BODY_END, 0, 3),
        (pieces.items_fit, None, 1, 1),
        (pieces.items_fit, whole, -1, 1),
        (pieces.pack_columns, 64, b"", [(1, due)]),
        (pieces.pack_columns, 64, b"odd", [(9, ([b"x"],))]),
        (pieces.pack_columns, 64, b"", [(9, ([],))]),
        (pieces.pack_columns, 64, b"", [(9, (["text"],))]),
        (pieces.pack_columns, 64, b"", [(9, (None,))]),
        (pieces.pack_columns, 64, b"", [(1, due), (9, ([b"x", b"y", b"z"],))]),
        (pieces.pack_columns, 64, b"", [(8, ([b"x"],)), (9, ([b"x", b"y"],))]),
        (pieces.pack_columns, 64, b"", [(1 << 16, due), (9, ([b"x", b"y"],))]),
        (pieces.pack_columns, 1 << 20, b"", [(9, ([b"x"],))]),
        (pieces.pack_columns, 64, b"", [(9, ([b"x"],))] * 33),
        (pieces.pack_columns, 64, b"", ((9, ([b"x"],)),)),
        (pieces.pick_rows, 96, b"", record, [whole]),
        (pieces.pick_rows, 96, b"name", record, []),
        (pieces.pick_rows, 96, b"name", new_rows(1_025), [whole] * 1_025),
        (pieces.pick_rows, 96, b"name", record, [None]),
    ]
    for piece, *arguments in wrong:
        with pytest.raises((TypeError, ValueError, AttributeError, OverflowError)):
            piece(*arguments)


def test_a_kernel_of_another_version_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel.VARIABLE, raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(VERSION=kernel.VERSION + 1))
    found, state = kernel._load()
    assert found is None and state == (
        f"python (delayd-kernel {kernel.VERSION + 1} is installed, and this delayd needs {kernel.VERSION}:"
        " pip install 'delayd[fast]')"
    )


def test_the_setting_turns_a_kernel_off(monkeypatch: pytest.MonkeyPatch, pieces: ModuleType) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _: pieces)
    monkeypatch.setenv(kernel.VARIABLE, "off")
    assert kernel._load() == (None, "python (DELAYD_KERNEL=off)")
    monkeypatch.delenv(kernel.VARIABLE)
    assert kernel._load() == (pieces, f"compiled {kernel.VERSION}")
