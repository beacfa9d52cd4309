"""Frames: what is cut from a stream, what is refused, and that bodies are views that nobody overwrites."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import msgpack
import numpy as np
import pytest
from crc32c import crc32c

from delayd.batch.columns import Buffer
from delayd.errors import FrameTooLarge, HeadTooLarge
from delayd.wire.frame import (
    ANSWER,
    CHUNK_BYTES,
    HEAD_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    MORE,
    Frame,
    FrameReader,
    HeadValue,
    encode_frame,
)

HEADER = struct.Struct("<IBBHIIII")


def frame_bytes(
    frame_type: int = 20,
    request_id: int = 1,
    head: Mapping[str, HeadValue] | None = None,
    body: Sequence[Buffer] = (),
    flags: int = 0,
) -> bytes:
    return b"".join(encode_frame(frame_type, request_id, head or {}, body, flags))


def feed(reader: FrameReader, stream: bytes, read_bytes: int = 1 << 30) -> list[Frame]:
    frames: list[Frame] = []
    position = 0
    while position < len(stream) and reader.fault is None:
        room = reader.get_buffer()
        piece = stream[position : position + min(len(room), read_bytes)]
        room[: len(piece)] = piece
        frames += reader.received(len(piece))
        position += len(piece)
    return frames


def test_a_frame_has_the_layout_of_the_protocol_page() -> None:
    assert frame_bytes(31, 9, {"a": 1}, [b"8 bytes!"], ANSWER | MORE) == b"".join(
        [
            b"DLY1",
            b"\x01",
            b"\x1f",
            b"\x05\x00",
            b"\x09\x00\x00\x00",
            b"\x04\x00\x00\x00",
            b"\x08\x00\x00\x00",
            crc32c(b"DLY1\x01\x1f\x05\x00\x09\0\0\0\x04\0\0\0\x08\0\0\0\x81\xa1a\x01").to_bytes(4, "little"),
            b"\x81\xa1a\x01\0\0\0\0",
            b"8 bytes!",
        ]
    )


def test_a_head_that_cannot_be_packed_leaves_nothing_in_the_next_one() -> None:
    with pytest.raises(TypeError):
        encode_frame(3, 1, {"a": 1, "b": object()})  # type: ignore[dict-item]
    (frame,) = feed(FrameReader(), frame_bytes(head={"a": 2}))
    assert frame.head == {"a": 2}


def test_bodies_are_aligned_and_read_only_and_survive_what_comes_later() -> None:
    reader = FrameReader()
    sizes = [8, 0, CHUNK_BYTES // 3 & -8, 16, CHUNK_BYTES * 2, 24] * 4
    frames: list[Frame] = []
    for number, size in enumerate(sizes):
        frames += feed(
            reader, frame_bytes(head={"pad": "x" * number}, body=[bytes([number]) * size]), read_bytes=50_000
        )
    for number, (frame, size) in enumerate(zip(frames, sizes, strict=True)):
        assert bytes(frame.body) == bytes([number]) * size
        assert frame.body.readonly
        assert not size or np.frombuffer(frame.body, dtype=np.uint8).ctypes.data % 8 == 0


def test_a_length_of_4_gib_is_refused_before_anything_is_allocated_for_it() -> None:
    reader = FrameReader()
    room = len(reader.get_buffer())
    header = HEADER.pack(MAGIC, 1, 20, 0, 1, 2, 0xFFFF_FFF8, 0)
    assert feed(reader, header) == []
    assert isinstance(reader.fault, FrameTooLarge)
    assert "4294967288" in reader.fault.message
    assert room == CHUNK_BYTES


def test_a_body_just_above_the_limit_of_this_side_is_refused_and_one_at_it_taken() -> None:
    assert len(feed(FrameReader(body_bytes_max=64), frame_bytes(body=[bytes(64)]))) == 1
    reader = FrameReader(body_bytes_max=64)
    assert feed(reader, frame_bytes(body=[bytes(72)])) == []
    assert isinstance(reader.fault, FrameTooLarge)


def test_a_head_above_its_limit_is_refused_and_is_never_built() -> None:
    reader = FrameReader()
    feed(reader, HEADER.pack(MAGIC, 1, 20, 0, 1, HEAD_BYTES_MAX + 1, 0, 0))
    assert isinstance(reader.fault, FrameTooLarge)
    for head in ({"name": "x" * HEAD_BYTES_MAX}, {"name": "\ud800"}, {"number": 1 << 64}, {"number": -(1 << 63) - 1}):
        with pytest.raises(HeadTooLarge):
            encode_frame(20, 1, head)
    assert encode_frame(20, 1, {})


def test_any_flipped_bit_of_header_or_head_ends_the_stream_or_asks_for_more_but_never_passes() -> None:
    good = frame_bytes(33, 1234, {"key": "value"}, [b"12345678"])
    covered = HEADER_BYTES + len(msgpack.packb({"key": "value"}))
    for bit in range(covered * 8):
        stream = bytearray(good)
        stream[bit // 8] ^= 1 << bit % 8
        reader = FrameReader()
        assert feed(reader, bytes(stream)) == []
        assert reader.fault is not None or reader.unfinished_bytes == len(stream)
