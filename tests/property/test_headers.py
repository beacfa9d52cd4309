"""Headers are proved in arrays and one by one; both say the same of any bytes."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delayd.batch.batch import parse
from delayd.batch.labels import IN_ARRAYS_FROM, decode_headers
from delayd.batch.validate import check_batch, check_headers, refused_rows
from delayd.errors import BadHeaders
from tests.batches import messages

TEXT = st.text(max_size=12)
HONEST = st.dictionaries(TEXT, TEXT | st.binary(max_size=140), max_size=17).map(lambda made: bytes(msgpack.packb(made)))
# Bytes that mean something to msgpack, in any order.
MARKS = st.sampled_from(
    [b"\x80", b"\x81", b"\x82", b"\x8f", b"\xa0", b"\xa1", b"\xd9", b"\xc4", b"\xde", b"a", b"\x00"]
)
NOISE = st.lists(MARKS | st.binary(max_size=2), max_size=9).map(b"".join)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """An honest map with a byte changed, cut or added."""
    packed = bytearray(draw(HONEST))
    at = draw(st.integers(0, len(packed) - 1))
    how = draw(st.sampled_from(["change", "cut", "add"]))
    if how == "change":
        packed[at] = draw(st.integers(0, 255))
    elif how == "cut":
        del packed[at]
    else:
        packed[at:at] = draw(st.binary(min_size=1, max_size=2))
    return bytes(packed)


@pytest.mark.parametrize("packed", [b"\xc1", b"\x81\xa1a\xc1", b"\x81\xa1a" * 3_000 + b"\x80"])
def test_a_refusal_says_why_where_msgpack_says_nothing(packed: bytes) -> None:
    with pytest.raises(BadHeaders, match=r"can't be decoded: \w.*\w$"):
        decode_headers(packed)


def readable(packed: bytes) -> bool:
    try:
        decode_headers(packed)
    except BadHeaders:
        return False
    return True


@settings(max_examples=300)
@given(st.lists(HONEST | spoiled() | NOISE, min_size=1, max_size=2 * IN_ARRAYS_FROM))
def test_rows_are_refused_whose_headers_can_not_be_decoded_and_no_others(headers: list[bytes]) -> None:
    headers = headers * (1 + IN_ARRAYS_FROM // len(headers))
    batch = parse(messages([b"x"] * len(headers), headers=headers))
    check_batch(batch)
    expected = [row for row, packed in enumerate(headers) if not readable(packed)]
    try:
        check_headers(batch)
        found: list[int] = []
    except BadHeaders as error:
        found = refused_rows(error)
    assert found == expected
