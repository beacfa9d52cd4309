"""A DISPATCH batch of one row without headers is read in one piece; what is said of it is what the columns say."""

from __future__ import annotations

import struct

from hypothesis import example, given
from hypothesis import strategies as st

from delayd.batch.batch import BARE_DIRECTORY, BARE_HEAP_AT, Batch, encode_bare
from delayd.batch.columns import HEADER_BYTES, DispatchPart
from delayd.batch.names import HEADERS_BYTES_MAX
from delayd.errors import DelaydError
from delayd.hours import INSTANT_MS_MAX
from delayd.wire.heads import INT_MAX
from realtime.delay_servers import HOUR_MAX, read_bare, read_batch
from tests.batches import with_true_checksums
from tests.worlds.dispatch_batches import dispatch_batch

Read = tuple[Batch, DispatchPart, int]
U64 = st.integers(0, (1 << 64) - 1)
instants = st.integers(0, INSTANT_MS_MAX)
parts = st.builds(DispatchPart, U64, U64, U64, U64, U64, instants, st.integers(0, HOUR_MAX))
names = st.text("abcdefghijklmnopqrstuvwxyz0123456789._%/-", min_size=1, max_size=255).map(str.encode)
rows = st.tuples(instants, st.integers(0, INT_MAX), U64)
ORDERS = encode_bare(DispatchPart(1, 2, 3, 2, 1, 5, 6), (7, 8, 9), b"orders.eu", b"body\0\0\0\0", 4)


def said(read: Read | None) -> object:
    """All that is known of a batch that was read."""
    if read is None:
        return None
    batch, part, highest = read
    slots = {name: getattr(batch, name) for name in Batch.__slots__ if name not in ("buffer", "layout", "offsets")}
    return slots, bytes(batch.buffer), tuple(batch.layout), part, highest


def by_columns(data: bytes) -> Read | None:
    """What the columns say; None of what is refused."""
    try:
        return read_batch(memoryview(data), 0)
    except DelaydError:
        return None


def is_bare(data: bytes) -> bool:
    """Whether a batch has the layout of those that `encode_bare` makes, and a heap that needs no look at each row."""
    directory = data[BARE_HEAP_AT - 64 : BARE_HEAP_AT - 32]
    return directory == BARE_DIRECTORY and len(data) - BARE_HEAP_AT <= HEADERS_BYTES_MAX


@given(parts, rows, names, st.binary(max_size=60), st.integers(0, 3))
def test_a_bare_batch_is_read_as_its_columns_say(
    part: DispatchPart, row: tuple[int, int, int], name: bytes, body: bytes, before: int
) -> None:
    data = encode_bare(part, row, name, body + bytes(-len(body) % 8), len(body))
    frame = memoryview(bytes(8 * before) + data + data)
    read = read_bare(frame, 8 * before)
    assert read is not None and said(read) == said(read_batch(frame, 8 * before)) and read[0].verified


def test_a_long_body_headers_and_other_columns_are_left_to_the_columns() -> None:
    body = bytes(HEADERS_BYTES_MAX)
    long = encode_bare(DispatchPart(1, 2, 3, 2, 1, 5, 6), (7, 8, 9), b"orders.eu", body, len(body))
    for data in (long, dispatch_batch(1, [b"one"]), dispatch_batch(1, [b"one", b"two"])):
        assert read_bare(memoryview(data), 0) is None
        assert by_columns(data) is not None


@given(st.integers(0, len(ORDERS) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found_by_a_checksum(at: int, change: int) -> None:
    changed = bytearray(ORDERS)
    changed[at] ^= change
    assert read_bare(memoryview(changed), 0) is None


@given(st.integers(0, len(ORDERS) - 1), st.integers(1, 255), st.integers(0, 24))
@example(BARE_HEAP_AT + 4, 1, 0)  # Behind the end of the only name.
@example(BARE_HEAP_AT - 12, 1, 0)  # Behind the end of the body.
@example(HEADER_BYTES + 52, 1, 0)  # What the kind part reserves.
@example(len(ORDERS) - 1, 1, 0)  # Behind the body.
def test_what_lies_with_true_checksums_is_taken_only_where_the_columns_take_it(at: int, change: int, more: int) -> None:
    changed = bytearray(ORDERS)
    changed[at] ^= change
    data = with_true_checksums(changed)
    read, expected = read_bare(memoryview(data), 0), by_columns(data)
    assert said(read) == (said(expected) if is_bare(data) else None)
    # Bytes of a next batch change nothing, and a batch that is cut short is none.
    assert said(read_bare(memoryview(data + bytes(8 * more)), 0)) == said(read)
    assert read_bare(memoryview(data[: len(data) - 8 * (1 + more)]), 0) is None


EDGES = [0, 1, 4, 9, 17, 24, INSTANT_MS_MAX, INSTANT_MS_MAX + 1, INT_MAX, INT_MAX + 1, HOUR_MAX, HOUR_MAX + 1]


@given(st.integers(0, (len(ORDERS) - 8) // 4), st.sampled_from(EDGES))
@example((BARE_HEAP_AT - 32) // 4, INSTANT_MS_MAX + 1)
@example((BARE_HEAP_AT - 24) // 4, INT_MAX + 1)
@example((HEADER_BYTES + 40) // 4, INSTANT_MS_MAX + 1)
@example((HEADER_BYTES + 48) // 4, HOUR_MAX + 1)
def test_a_number_that_lies_is_taken_only_where_the_columns_take_it(word: int, number: int) -> None:
    for kind in ("<Q", "<I"):
        changed = bytearray(ORDERS)
        struct.pack_into(kind, changed, 4 * word, number & (1 << 8 * struct.calcsize(kind)) - 1)
        lie = with_true_checksums(changed)
        assert said(read_bare(memoryview(lie), 0)) == (said(by_columns(lie)) if is_bare(lie) else None)
