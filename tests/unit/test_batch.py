"""A batch: what was encoded is parsed, and whatever is not one is refused by name."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from delayd.batch.batch import parse
from delayd.batch.columns import BYTES_MAX, ROWS_MAX, ColumnId
from delayd.errors import BatchMalformed
from tests.batches import messages, parsed, with_true_checksums


def changed(data: bytes, position: int, layout: str, value: int) -> bytes:
    other = bytearray(data)
    struct.pack_into(layout, other, position, value)
    other[36:40] = crc32c(other[40:64], crc32c(other[:36])).to_bytes(4, "little")
    return bytes(other)


@pytest.mark.parametrize(
    ("position", "layout", "value", "said"),
    [
        (0, "<I", 1, "magic"),
        (4, "<B", 2, "version 2"),
        (5, "<B", 9, "kind 9"),
        (5, "<B", 3, "kind 3 with 24 bytes"),
        (6, "<H", 1, "flags 0x1 are not known"),
        (6, "<H", 0x8000, "flags 0x8000 are not known"),
        (8, "<I", 1 << 31, "do not fit"),
        (8, "<I", 100, "do not fit|not possible"),
        (12, "<I", 0, "not possible"),
        (12, "<I", ROWS_MAX + 1, "not possible"),
        (12, "<I", 50, "fewer than 50 rows"),
        (16, "<I", 64, "do not fit"),
        (16, "<I", 1 << 31, "do not fit"),
        (20, "<H", 0xFFFF, "do not fit"),
        (22, "<H", 0xFFF8, "do not fit"),
        (24, "<I", 1 << 31, "subjects do not fit"),
        (64, "<H", 0x3FFF, "must be understood"),
        (64, "<H", 0x4001, "comes behind"),
        (66, "<H", 4, "4 bytes wide instead of 8"),
        (68, "<I", 0, "must be at 80"),
        (68, "<I", 88, "must be at 80"),
        (68, "<I", 1 << 31, "must be at 80"),
    ],
)
def test_a_header_or_directory_that_can_not_be_is_refused_by_name(
    position: int, layout: str, value: int, said: str
) -> None:
    with pytest.raises(BatchMalformed, match=said):
        parse(changed(messages([b"x"]), position, layout, value))


def test_a_column_from_0x4000_on_is_skipped() -> None:
    data = with_true_checksums(changed(messages([b"x"], subject_of=[0]), 64 + 16, "<H", 0x4001))
    batch = parse(changed(messages([b"x"]), 64 + 8, "<H", 0x4001))
    assert ColumnId.BODY_END not in batch
    assert parse(data).count == 1


def test_each_checksum_guards_its_part() -> None:
    data = messages([b"body of it"], headers=[b"h"])
    heap = parse(data).heap_offset
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 4
        if position < 64:
            with pytest.raises(BatchMalformed):
                parse(broken)
        else:
            with pytest.raises(BatchMalformed, match="column" if position < heap else "heap"):
                parse(broken).verify()


def test_the_largest_batch_is_parsed() -> None:
    data = messages([b""] * ROWS_MAX)
    assert parsed(data).count == ROWS_MAX
    room = BYTES_MAX - len(messages([b""]))
    assert parsed(messages([bytes(room)])).total_bytes == BYTES_MAX
