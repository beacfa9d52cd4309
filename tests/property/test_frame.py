"""However a stream is cut into reads, the same frames come out of it; and no stream of bytes does anything worse."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delayd.wire.frame import CHUNK_BYTES, Frame, FrameReader, Head, encode_frame

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
heads = st.dictionaries(st.text(max_size=8), scalars | st.lists(scalars, max_size=3), max_size=4)
bodies = st.integers(0, 40).map(lambda words: bytes(range(8)) * words) | st.sampled_from(
    [bytes(CHUNK_BYTES - 64), bytes(CHUNK_BYTES), bytes(CHUNK_BYTES * 2 + 8)]
)
frames = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), heads, bodies, st.integers(0, 7)), max_size=12
)


def read(stream: bytes, cuts: list[int]) -> tuple[FrameReader, list[Frame]]:
    reader = FrameReader()
    out: list[Frame] = []
    position = turn = 0
    while position < len(stream) and reader.fault is None:
        room = reader.get_buffer()
        wanted = cuts[turn % len(cuts)]
        piece = stream[position : position + min(len(room), wanted)]
        room[: len(piece)] = piece
        out += reader.received(len(piece))
        position += len(piece)
        turn += 1
    return reader, out


@given(frames, st.lists(st.integers(1, 100) | st.integers(10_000, 600_000), min_size=1, max_size=20))
def test_frames_come_out_the_same_however_the_stream_is_cut(
    sent: list[tuple[int, int, Head, bytes, int]], cuts: list[int]
) -> None:
    stream = b"".join(
        b"".join(encode_frame(kind, number, head, [body], flags)) for kind, number, head, body, flags in sent
    )
    # Short cuts through long bodies would take the whole time budget and try nothing new.
    cuts = cuts if len(stream) < 20_000 else [cut * 500 for cut in cuts]
    reader, received = read(stream, cuts)
    assert reader.fault is None
    assert reader.unfinished_bytes == 0
    assert [(f.type, f.request_id, f.head, bytes(f.body), f.flags) for f in received] == sent


@given(st.binary(max_size=200), st.lists(st.integers(1, 64), min_size=1))
def test_garbage_ends_the_stream_or_waits_for_more_and_raises_nothing(garbage: bytes, cuts: list[int]) -> None:
    reader, received = read(garbage, cuts)
    assert received == []
    assert reader.fault is not None or reader.unfinished_bytes == len(garbage) < 24


@given(frames, st.data())
def test_a_stream_damaged_anywhere_yields_a_prefix_of_its_frames_with_only_bodies_changed(
    sent: list[tuple[int, int, Head, bytes, int]], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(b"".join(encode_frame(k, n, head, [body], flags)) for k, n, head, body, flags in sent))
    if not stream:
        return
    position = data.draw(st.integers(0, len(stream) - 1))
    stream[position] ^= data.draw(st.integers(1, 255))
    _, received = read(bytes(stream), [1 << 20])
    # A body is checked by its batches' own checksums, so here only what the frame's checksum covers must hold.
    expected = [(kind, number, head, len(body), flags) for kind, number, head, body, flags in sent]
    assert [(f.type, f.request_id, f.head, len(f.body), f.flags) for f in received] == expected[: len(received)]
