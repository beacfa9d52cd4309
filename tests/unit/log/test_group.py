"""One group: valid only at its own place, and never written when no reader would take it."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from delayd.log.group import (
    BYTES_MAX,
    BadGroup,
    GroupKind,
    IncompleteGroup,
    NewerGroup,
    NewGroup,
    encode_header,
    parse_header,
    verify_group,
)
from tests.batches import messages

BATCHES = [messages([b"a"]), messages([b"b", b"c"]), messages([b"d" * 50])]


def encoded(offset: int = 640, previous: int = 9) -> bytes:
    new = NewGroup(GroupKind.DATA, BATCHES, 3, 1_000, 40, 4)
    header, _ = encode_header(new, [len(batch) for batch in BATCHES], 77, offset, 600, previous)
    return header + b"".join(BATCHES)


def test_what_was_encoded_is_read_back() -> None:
    data = encoded()
    header = parse_header(data, 0, 77, 640)
    verify_group(memoryview(data), header, 9)
    assert (header.kind, header.batch_count, header.epoch, header.base_sequence) == (GroupKind.DATA, 3, 3, 40)
    assert (header.appended_at_ms, header.durable_offset, header.row_count) == (1_000, 600, 4)
    assert header.total_bytes == len(data)


def test_a_group_is_not_valid_in_another_log_at_another_offset_or_behind_another_one() -> None:
    data = encoded()
    with pytest.raises(BadGroup, match="belongs to the log"):
        parse_header(data, 0, 78, 640)
    with pytest.raises(BadGroup, match="belongs at offset 640"):
        parse_header(data, 0, 77, 648)
    with pytest.raises(BadGroup, match="does not follow"):
        verify_group(memoryview(data), parse_header(data, 0, 77, 640), 10)


def test_a_group_that_is_cut_short_says_how_many_bytes_it_needs() -> None:
    data = encoded()
    for size in range(len(data)):
        with pytest.raises(IncompleteGroup) as caught:
            verify_group(memoryview(data)[:size], parse_header(data[:size], 0, 77, 640), 9)
        assert size < caught.value.size_bytes <= len(data)


def test_an_intact_group_of_a_newer_version_is_told_from_a_torn_one() -> None:
    changed = bytearray(encoded())
    changed[4] = 2
    with pytest.raises(BadGroup, match="checksum"):
        parse_header(changed, 0, 77, 640)
    changed[76:80] = crc32c(changed[80:92], crc32c(changed[:76])).to_bytes(4, "little")
    with pytest.raises(NewerGroup, match="version 2"):
        parse_header(changed, 0, 77, 640)


@pytest.mark.parametrize("sizes", [[BYTES_MAX], [12], [8] * 65_537], ids=["too large", "not padded", "too many"])
def test_a_group_that_no_reader_would_take_is_not_encoded(sizes: list[int]) -> None:
    with pytest.raises(AssertionError, match="not possible"):
        encode_header(NewGroup(GroupKind.DATA, [], 1, 1), sizes, 1, 0, 0, 0)
