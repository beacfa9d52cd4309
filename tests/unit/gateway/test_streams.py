"""Rows of a stream are found however its bytes are cut, and what is no row ends it, or has an error of its own."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

import msgpack
import pytest

from delayd.errors import BadArgument, CallerError, DelaydError, MessageTooLarge
from delayd.gateway.streams import MSGPACK, NDJSON, ROW_BYTES_MAX, STREAM_FORMS, Wished
from delayd.gateway.values import PackedMessage

GOOD = msgpack.packb({"body": b"x", "delay_ms": 1})
Found = list[Wished | type[CallerError]]  # Messages, and behind them the error that ended the stream, if one did.


def found(parts: Sequence[bytes], media_type: str = MSGPACK) -> Found:
    form, seen = STREAM_FORMS[media_type], Found()

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def read() -> None:
        try:
            async for rows in form.rows(body()):
                seen.extend(form.read(rows))
        except CallerError as error:
            seen.append(type(error))

    asyncio.run(read())
    return seen


@pytest.mark.parametrize(
    ("media_type", "stream"),
    [
        (NDJSON, b'{"body":"\xc3\xa9","delay":"1h"}\n\n{"body":"2","delay_ms":5,"tags":["a"]}\n'),
        (MSGPACK, msgpack.packb({"body": b"\n\xff", "delay": "1h"}) + msgpack.packb({"body": b"", "tags": ["a"] * 20})),
    ],
)
def test_where_the_bytes_are_cut_makes_no_difference(media_type: str, stream: bytes) -> None:
    whole = found([stream], media_type)
    assert len(whole) == 2 and not any(isinstance(row, DelaydError) for row in whole)
    assert all(found([stream[:cut], stream[cut:]], media_type) == whole for cut in range(len(stream) + 1))
    assert found([stream[at : at + 1] for at in range(len(stream))], media_type) == whole


def test_values_are_those_of_msgpack() -> None:
    at = datetime(2027, 1, 31, 9, 0, 0, 500_000, tzinfo=UTC)
    rows = [{"body": b"\xff", "deliver_at": given} for given in (at.isoformat(), msgpack.Timestamp.from_datetime(at))]
    assert found([msgpack.packb(row) for row in rows]) == [PackedMessage(body=b"\xff", deliver_at=at)] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        msgpack.packb({"body": "a text is no bin"}),
        msgpack.packb({"body": msgpack.ExtType(7, b"x")}),
        b"\x82\xa4body\xc4\x01x\xaadeliver_at\xc7\x03\xffxyz",
        msgpack.packb({"body": b"x", "deliver_at": msgpack.Timestamp((1 << 63) - 1)}),
        msgpack.packb({"body": b"x", "nobody": 1}),
        msgpack.packb({1: b"x"}),
        msgpack.packb([GOOD]),
        msgpack.packb(None),
        msgpack.packb({"body": b"x", "delay_ms": (1 << 64) - 1}),
        msgpack.packb({"body": b"x", "delay_ms": float("nan")}),
        b"\x82\xa4body\xc4\x01x\xa3key\xa1\xff",
        b"\x81\xa4body" + b"\x91" * 500 + b"\xc0",
    ],
)
def test_a_value_that_is_no_message_has_an_error_of_its_own(wrong: bytes) -> None:
    first, second, third = found([GOOD + wrong + GOOD])
    assert first == third == PackedMessage(body=b"x", delay_ms=1)
    assert isinstance(second, BadArgument)


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(b"\xc1", id="no value"),
        pytest.param(b"\x91" * 100_000, id="nested"),
        pytest.param(b"\x81" * 100_000, id="nested maps"),
        pytest.param(GOOD[:-1], id="cut off"),
        pytest.param(b"\x81\xa4body\xc6\xff\xff\xff\xffx", id="4 GiB declared"),
        pytest.param(b"\xdd\xff\xff\xff\xff\x01", id="4 G items declared"),
        pytest.param(b"\xdf\xff\xff\xff\xff\x01", id="4 G pairs declared"),
        pytest.param(b"\xc9\x7f\xff\xff\xff\x01x", id="2 GiB of a type that is not known"),
    ],
)
def test_bytes_without_a_next_row_end_the_stream_and_what_is_before_them_stands(hostile: bytes) -> None:
    assert found([GOOD + hostile]) == [PackedMessage(body=b"x", delay_ms=1), BadArgument]


@pytest.mark.parametrize("beginning", [b"\x81\xa4body\xc6\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"])
def test_whatever_a_row_declares_no_more_than_its_most_is_held(beginning: bytes) -> None:
    part = b"\x01" * (1 << 20)
    tracemalloc.start()
    try:
        assert found([beginning, *[part] * 64]) == [MessageTooLarge]
        assert tracemalloc.get_traced_memory()[1] < 6 * ROW_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_of_a_name_that_comes_twice_the_last_counts() -> None:
    assert found([b"\x82\xa4body\xc4\x01a\xa4body\xc4\x01b"]) == [PackedMessage(body=b"b")]
