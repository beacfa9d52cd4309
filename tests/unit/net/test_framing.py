"""Framing that can't be trusted ends a connection, and whatever else is wrong ends one request."""

from __future__ import annotations

import asyncio

from delayd.errors import (
    BadRequest,
    BadVersion,
    ConnectionLost,
)
from delayd.wire.frame import ANSWER, ERROR, Frame, FrameReader, Head, encode_frame
from delayd.wire.heads import error_from_head

from .loopback import HOST, Echo, Loopback, answer_nothing, error_of, on_loop

GOOD = b"".join(encode_frame(20, 1, {"good": True}))
DAMAGED = bytearray(b"".join(encode_frame(20, 2, {"a": 1})))
DAMAGED[24] ^= 1


def test_a_request_id_that_is_under_way_or_reserved_ends_the_connection() -> None:
    async def scenario(loopback: Loopback) -> None:
        handler = Echo(answer_nothing)
        _, port = await loopback.serve(handler)
        for stream in (GOOD + GOOD, b"".join(encode_frame(20, 0, {}))):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(stream)
            (frame,) = cut(await read_to_end(reader))
            assert frame.request_id == 0
            assert isinstance(error_from_head(frame.head), BadRequest)
            writer.close()

    on_loop(scenario)


def test_what_the_peer_says_of_the_whole_connection_is_raised_to_all_under_way() -> None:
    async def scenario(loopback: Loopback, answered_before: bool) -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            (first, *_) = cut(await reader.read(1 << 16))
            if answered_before:
                writer.write(b"".join(encode_frame(20, first.request_id, {}, (), ANSWER)))
            head: Head = {"code": "bad_version", "message": "speak 2", "retry_after_ms": 0, "details": {}}
            writer.write(b"".join(encode_frame(0, 0, head, (), ANSWER | ERROR)))
            writer.close()

        listener = await asyncio.start_server(refuse, HOST, 0)
        client = await loopback.connect(listener.sockets[0].getsockname()[1])
        answers = [client.request(20, {}) for _ in range(3)]
        errors = [await error_of(answer) for answer in answers[1:]]
        if answered_before:
            # Something was served on this connection, so what became of the others is not known.
            assert (await answers[0]).head == {}
            for error in errors:
                assert isinstance(error, ConnectionLost)
                assert error.sent
                assert isinstance(error.__cause__, BadVersion)
        else:
            errors.append(await error_of(answers[0]))
            assert [type(error) for error in errors] == [BadVersion] * 3
        listener.close()

    on_loop(lambda loopback: scenario(loopback, answered_before=False))
    on_loop(lambda loopback: scenario(loopback, answered_before=True))


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the end, which may be a reset when bytes of this side were never read."""
    pieces = b""
    while True:
        try:
            piece = await reader.read(1 << 16)
        except ConnectionResetError:
            return pieces
        if not piece:
            return pieces
        pieces += piece


def cut(stream: bytes) -> list[Frame]:
    reader = FrameReader()
    room = reader.get_buffer()
    room[: len(stream)] = stream
    return reader.received(len(stream))
