"""Frames: what is cut from a stream, what is refused, and that bodies are views that nobody overwrites."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping, Sequence

import msgpack
import numpy as np
import pytest
from crc32c import crc32c

from delayd.batch.columns import Buffer
from delayd.errors import BadMagic, BadVersion, DelaydError, FrameDamaged, FrameTooLarge, HeadTooLarge
from delayd.wire.frame import (
    ANSWER,
    BODY_BYTES_MAX,
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


def raw_frame(
    packed: bytes, body: bytes = b"", *, body_bytes: int | None = None, magic: int = MAGIC, version: int = 1
) -> bytes:
    """A frame laid out by hand from docs/protocol.md, with a checksum that fits whatever it says."""
    size = len(body) if body_bytes is None else body_bytes
    start = struct.pack("<IBBHIII", magic, version, 20, 0, 7, len(packed), size)
    checksum = crc32c(start + packed)
    return start + struct.pack("<I", checksum) + packed + bytes(-len(packed) % 8) + body


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


def test_a_frame_is_laid_out_without_a_buffer_of_its_own() -> None:
    encode_frame(3, 1, {"sequence": 1})
    tracemalloc.start()
    encode_frame(3, 1, {"sequence": 1})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_096, "a packer allocates 256 KiB, with the limits of a server's heap a mapping each time"


def test_a_head_that_cannot_be_packed_leaves_nothing_in_the_next_one() -> None:
    with pytest.raises(TypeError):
        encode_frame(3, 1, {"a": 1, "b": object()})  # type: ignore[dict-item]
    (frame,) = feed(FrameReader(), frame_bytes(head={"a": 2}))
    assert frame.head == {"a": 2}


def test_a_frame_comes_back_as_it_was_sent() -> None:
    (frame,) = feed(FrameReader(), frame_bytes(40, 77, {"subject": "orders", "n": 1 << 63}, [b"x" * 16], ANSWER))
    assert frame == Frame(40, ANSWER, 77, {"subject": "orders", "n": 1 << 63}, memoryview(b"x" * 16))


def test_columns_of_wide_items_are_counted_in_bytes() -> None:
    column = np.arange(3, dtype=np.int64)
    pieces = encode_frame(20, 1, {}, [column.data])
    assert sum(map(len, pieces)) == len(b"".join(pieces))
    (frame,) = feed(FrameReader(), b"".join(pieces))
    assert np.frombuffer(frame.body, dtype=np.int64).tolist() == [0, 1, 2]


def test_many_frames_of_one_read_come_in_order() -> None:
    stream = b"".join(frame_bytes(request_id=number, body=[b"%8d" % number]) for number in range(5_000))
    frames = feed(FrameReader(), stream)
    assert [frame.request_id for frame in frames] == list(range(5_000))
    assert all(bytes(frame.body) == b"%8d" % frame.request_id for frame in frames)


def test_a_frame_that_comes_byte_by_byte_is_cut_when_its_last_byte_has_come() -> None:
    reader = FrameReader()
    stream = frame_bytes(head={"name": "x"}, body=[b"y" * 24])
    assert feed(reader, stream[:-1], read_bytes=1) == []
    assert reader.unfinished_bytes == len(stream) - 1
    assert len(feed(reader, stream[-1:])) == 1
    assert reader.unfinished_bytes == 0


def test_a_frame_of_64_mib_arrives_whole() -> None:
    body = np.arange(BODY_BYTES_MAX // 8, dtype=np.int64)
    (frame,) = feed(FrameReader(), frame_bytes(body=[body.data]))
    assert np.array_equal(np.frombuffer(frame.body, dtype=np.int64), body)


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


def test_a_chunk_is_filled_behind_the_frames_cut_from_it() -> None:
    reader = FrameReader()
    (first,) = feed(reader, frame_bytes(body=[b"a" * 8]))
    (second,) = feed(reader, frame_bytes(body=[b"b" * 8]))
    assert first.body.obj is second.body.obj
    assert (bytes(first.body), bytes(second.body)) == (b"a" * 8, b"b" * 8)


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


@pytest.mark.parametrize("body", [[b"seven b"], [bytes(8), b"x"], [bytes(BODY_BYTES_MAX), bytes(8)]])
def test_a_body_that_no_peer_would_take_is_never_built(body: list[Buffer]) -> None:
    with pytest.raises(AssertionError, match="a body can't have"):
        encode_frame(20, 1, {}, body)


@pytest.mark.parametrize("garbage", [b"G", b"GET", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"DLX1" + bytes(30)])
def test_a_wrong_magic_is_told_by_its_first_bytes(garbage: bytes) -> None:
    reader = FrameReader()
    assert feed(reader, garbage) == []
    assert isinstance(reader.fault, BadMagic)


def test_garbage_behind_a_good_frame_leaves_that_frame() -> None:
    reader = FrameReader()
    (frame,) = feed(reader, frame_bytes(request_id=5) + b"oops")
    assert frame.request_id == 5
    assert isinstance(reader.fault, BadMagic)


def test_another_version_is_refused_by_its_number() -> None:
    reader = FrameReader()
    feed(reader, raw_frame(b"\x80", version=2))
    assert isinstance(reader.fault, BadVersion)
    assert reader.fault.details == {"version": 2}


def test_a_body_length_that_is_no_multiple_of_8_is_damage() -> None:
    reader = FrameReader()
    feed(reader, raw_frame(b"\x80", bytes(16), body_bytes=12))
    assert isinstance(reader.fault, FrameDamaged)


def test_a_damaged_length_of_a_body_is_found_without_waiting_for_that_body() -> None:
    stream = bytearray(frame_bytes(head={"a": 1}, body=[bytes(8)]))
    stream[18] = 0x20
    reader = FrameReader()
    assert feed(reader, bytes(stream[: HEADER_BYTES + 8])) == []
    assert isinstance(reader.fault, FrameDamaged)


def test_any_flipped_bit_of_header_or_head_ends_the_stream_or_asks_for_more_but_never_passes() -> None:
    good = frame_bytes(33, 1234, {"key": "value"}, [b"12345678"])
    covered = HEADER_BYTES + len(msgpack.packb({"key": "value"}))
    for bit in range(covered * 8):
        stream = bytearray(good)
        stream[bit // 8] ^= 1 << bit % 8
        reader = FrameReader()
        assert feed(reader, bytes(stream)) == []
        assert reader.fault is not None or reader.unfinished_bytes == len(stream)


def test_a_reader_that_met_a_fault_is_dead() -> None:
    reader = FrameReader()
    feed(reader, b"nonsense that is no frame at all")
    with pytest.raises(BadMagic):
        reader.get_buffer()
    with pytest.raises(BadMagic):
        reader.received(1)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x01",
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({"t": msgpack.Timestamp(5, 0)}),
        msgpack.packb({"x": msgpack.ExtType(5, b"abcd")}),
        msgpack.packb({"a": 1}) + b"\x00",
        b"\x81\xa1a\xdb\xff\xff\xff\xff",
        b"\x81\xa1a\xa1\xff",
        b"\x81\xa1a" + b"\x91" * 100_000 + b"\x01",
        msgpack.packb({"a": [0] * 70_000}),
    ],
)
def test_a_head_that_is_no_map_of_fields_spoils_only_its_own_request(packed: bytes) -> None:
    reader = FrameReader()
    bad, good = feed(reader, raw_frame(packed, bytes(8)) + frame_bytes(request_id=8))
    assert reader.fault is None
    assert bad.fault is not None
    assert (bad.request_id, bad.head, bad.fault.code) == (7, {}, "bad_request")
    assert (good.request_id, good.fault) == (8, None)


def test_every_fault_is_an_error_with_a_code_of_the_protocol_page() -> None:
    kinds: list[type[DelaydError]] = [BadMagic, BadVersion, FrameTooLarge, FrameDamaged]
    assert [kind.code for kind in kinds] == ["bad_magic", "bad_version", "frame_too_large", "frame_damaged"]
