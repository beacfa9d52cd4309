"""One frame of a connection: a header of 24 bytes, a msgpack map (the head), and a body of batches as they are.

Invariant: a body is a read-only view of the bytes that the socket wrote; it begins at a multiple of 8 bytes, and its
bytes are not changed for as long as anyone holds it. Bytes in, frames out: nothing here does I/O (docs/protocol.md,
version 1).

     0  u32  magic          8  u32  request_id      20  u32  crc32c over bytes 0 to 19 and the head
     4  u8   version       12  u32  head_bytes      24  head, then zeros up to a multiple of 8
     5  u8   type          16  u32  body_bytes       …  body
     6  u16  flags
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgpack
import numpy as np
from crc32c import crc32c

from delayd.batch.columns import Buffer
from delayd.batch.labels import undecoded_reason
from delayd.errors import BadMagic, BadRequest, BadVersion, FrameDamaged, FrameTooLarge, HeadTooLarge, ProtocolError

HeadValue = None | bool | int | float | str | bytes | Sequence["HeadValue"] | Mapping[str, "HeadValue"]
Head = dict[str, HeadValue]

MAGIC = 0x31594C44  # "DLY1" as bytes.
VERSION = 1
HEADER_BYTES = 24

ANSWER = 1  # The frame answers the request that it names.
ERROR = 2  # With ANSWER: the head is an error.
MORE = 4  # With ANSWER: further frames of this answer follow.

HEAD_BYTES_MAX = 1 << 20  # Head of an answer: names and numbers; what grows with the messages goes into the body.
# One list or map has at most this many, so that a small head can't unfold into gigabytes of objects.
HEAD_ITEMS_MAX = 1 << 16
BODY_BYTES_MAX = (64 << 20) + (64 << 10)  # Body of an answer: four batches at their limit (H2).
SEND_BODY_BYTES_MAX = (16 << 20) + (64 << 10)  # A request to a delay server holds one batch at its limit.

CHUNK_BYTES = 256 << 10  # One read of a busy socket.
GROWTH = 9  # A chunk that one frame has filled is followed by one this many times as large, until the frame fits.
# A chunk with less room than this is left, because its last reads would become many and tiny.
READ_BYTES_MIN = 32 << 10

_HEADER = struct.Struct("<IBBHIIII")
_CHECKED_HEADER = struct.Struct("<IBBHIII")
_TLS_BEGINS = b"\x16"  # The first byte of a handshake of TLS.
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")
_PADDING = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")
_NO_BODY = memoryview(b"")
_PACKER = msgpack.Packer()  # It keeps its buffer of 256 KiB: `packb` would allocate one for each frame.


class Room(NamedTuple):
    """How large head and body of a frame may be."""

    head_bytes: int
    body_bytes: int


class Frame(NamedTuple):
    """One frame that checks. `fault` is set when its head is no map of fields; then only this request is refused."""

    type: int
    flags: int
    request_id: int
    head: Head
    body: memoryview
    fault: BadRequest | None = None


def encode_frame(
    frame_type: int, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), flags: int = 0
) -> list[Buffer]:
    """Lay out one frame for `writelines`: header and head as one piece, then the body's buffers without a copy.

    The buffers must not change until they have left. HeadTooLarge if the head does not fit or holds what can't be
    encoded; AssertionError if the body is too large or no multiple of 8 bytes: the caller must split it.
    """
    try:
        packed = _PACKER.pack(head)
    except (OverflowError, UnicodeError) as error:
        raise HeadTooLarge(f"a head holds a number of more than 64 bits or half a character ({error})") from error
    head_bytes = len(packed)
    if head_bytes > HEAD_BYTES_MAX:
        raise HeadTooLarge(f"a head of {head_bytes} bytes, and at most {HEAD_BYTES_MAX} fit one; ask for less")
    pieces: list[Buffer] = [b""]
    body_bytes = 0
    for buffer in body:
        # Transports count a view's items and not its bytes, so columns of wider items are cast to bytes.
        piece = buffer.cast("B") if isinstance(buffer, memoryview) and buffer.itemsize != 1 else buffer
        body_bytes += len(piece)
        pieces.append(piece)
    assert not body_bytes & 7 and body_bytes <= BODY_BYTES_MAX, f"a body can't have {body_bytes} bytes"
    checked = _CHECKED_HEADER.pack(MAGIC, VERSION, frame_type, flags, request_id, head_bytes, body_bytes)
    checksum = crc32c(packed, crc32c(checked))
    pieces[0] = b"".join((checked, checksum.to_bytes(4, "little"), packed, _PADDING[head_bytes & 7]))
    return pieces


class FrameReader:
    """Cuts a stream of bytes into frames, without a copy: the socket reads into chunks and frames are views of them.

    A chunk is filled behind the frames that were cut from it and then left to the holders of these frames, so a
    small body that is kept for long keeps 256 KiB alive: copy it. A large frame gets room as its bytes arrive, not as
    its header claims. The first fault ends the reader: `fault` names it, the frames before it are still handed out,
    and any further call raises it.
    """

    __slots__ = (
        "_chunk",
        "_end",
        "_frame_bytes",
        "_needed",
        "_room",
        "_start",
        "_view",
        "cut_bytes",
        "cut_count",
        "fault",
        "room_by_type",
    )

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX, room: Room | None = None) -> None:
        self.fault: ProtocolError | None = None
        self.cut_bytes = 0  # The size of the frame that was cut last.
        self.cut_count = 0
        # May be changed at any time; types that are not in it get `room`.
        self.room_by_type: Mapping[int, Room] = {}
        self._room = Room(HEAD_BYTES_MAX, body_bytes_max) if room is None else room
        self._chunk = memoryview(b"")
        self._view = self._chunk
        # The unfinished frame lies at [start, end); it is looked at again when `needed` bytes of it are there.
        self._start = 0
        self._end = 0
        self._needed = HEADER_BYTES
        self._frame_bytes = 0  # The length of the unfinished frame; 0 while its header is not known.

    def get_buffer(self) -> memoryview:
        """Room to receive into, at least one byte; valid until the next call of `received`."""
        if self.fault is not None:
            raise self.fault
        room = len(self._chunk) - self._end
        unfinished = self._end - self._start
        # If the frame ends within this chunk it is completed in it, however little room is left.
        if room < READ_BYTES_MIN and not 0 < self._frame_bytes - unfinished <= room:
            self._next_chunk(unfinished)
        return self._chunk[self._end :]

    def received(self, byte_count: int) -> list[Frame]:
        """The frames that `byte_count` more bytes in the buffer complete, in order; see `fault` afterwards."""
        self.arrived(byte_count)
        frames: list[Frame] = []
        while (frame := self.next()) is not None:
            frames.append(frame)
        return frames

    def arrived(self, byte_count: int) -> None:
        """Count bytes that were put into the buffer; `next` cuts them into frames."""
        if self.fault is not None:
            raise self.fault
        self._end += byte_count

    def next(self) -> Frame | None:
        """The next frame, once all of it is there; None when it is not, or when there is a `fault` instead."""
        # Most calls find nothing, because a caller that has taken all frames asks once more.
        if self._end == self._start or self.fault is not None:
            return None
        try:
            while self._end - self._start >= self._needed:
                frame = self._cut()
                if frame is not None:
                    return frame
            if 0 < self._end - self._start < HEADER_BYTES:
                self._look_at_magic()
        except ProtocolError as error:
            self.fault = error
        return None

    @property
    def may_have_next(self) -> bool:
        """Whether `next` has something to look at."""
        return self._end - self._start >= self._needed and self.fault is None

    @property
    def next_type(self) -> int:
        """The type that the next frame claims; only while it `may_have_next`."""
        return self._view[self._start + 5]

    def rest(self) -> None:
        """Give back a chunk without an unfinished frame; holders of its frames keep it alive."""
        if self._start == self._end:
            self._drop_chunk()

    def compact(self) -> None:
        """Give back a chunk that frames have filled and of which only the beginning of the next frame is still needed.

        Otherwise a peer that sends many frames and one byte more would keep a whole chunk alive with that byte.
        """
        unfinished = self._end - self._start
        if self._start > unfinished > 0:
            self._move_to(np.empty(unfinished + READ_BYTES_MIN, dtype=np.uint8).data)

    def drop(self) -> None:
        """Give back the chunk with its contents: nothing more is cut from this stream."""
        self._drop_chunk()
        self._needed = HEADER_BYTES
        self._frame_bytes = 0

    @property
    def unfinished_bytes(self) -> int:
        """How many bytes of an incomplete frame have come; above 0 at the end of a stream, the frame was torn."""
        return self._end - self._start

    def _cut(self) -> Frame | None:
        start, view = self._start, self._view
        header = _HEADER.unpack_from(view, start)
        magic, version, frame_type, flags, request_id, head_bytes, body_bytes, checksum = header
        if magic != MAGIC:
            begun = bytes(view[start : start + 4])
            raise _other_protocol(begun)
        if version != VERSION:
            raise BadVersion(f"the peer speaks version {version} of the protocol, this side {VERSION}", version=version)
        # A length can be any number until its checksum was verified, so it is bounded before it sizes anything.
        room = self.room_by_type.get(frame_type, self._room)
        if head_bytes > room.head_bytes or body_bytes > room.body_bytes:
            raise FrameTooLarge(
                f"a frame of type {frame_type} claims {head_bytes} bytes of head and {body_bytes} of body; at most "
                f"{room.head_bytes} and {room.body_bytes} are taken of it here"
            )
        if body_bytes & 7:
            raise FrameDamaged(f"a frame claims a body of {body_bytes} bytes, which is no multiple of 8")
        body_start = start + HEADER_BYTES + (head_bytes + 7 & -8)
        frame_end = body_start + body_bytes
        self._frame_bytes = frame_end - start
        if body_start > self._end:
            self._needed = body_start - start
            return None
        packed = view[start + HEADER_BYTES : start + HEADER_BYTES + head_bytes]
        if crc32c(packed, crc32c(view[start : start + 20])) != checksum:
            raise FrameDamaged("a frame's checksum differs from its header and head")
        if frame_end > self._end:
            self._needed = self._frame_bytes
            return None
        self.cut_bytes = self._frame_bytes
        self.cut_count += 1
        self._start = frame_end
        self._needed = HEADER_BYTES
        self._frame_bytes = 0
        if len(view) > CHUNK_BYTES:
            # The chunk was made for this frame. The next frame may be small, and an idle connection should not hold
            # megabytes.
            if frame_end == self._end:
                self._drop_chunk()
            else:
                self._next_chunk(self._end - frame_end)
        body = view[body_start:frame_end] if body_bytes else _NO_BODY
        try:
            return Frame(frame_type, flags, request_id, _decode_head(packed), body)
        except BadRequest as fault:
            return Frame(frame_type, flags, request_id, {}, body, fault)

    def _look_at_magic(self) -> None:
        # A peer with another protocol may wait for an answer after fewer bytes than a header has.
        begun = bytes(self._view[self._start : min(self._end, self._start + 4)])
        if not _MAGIC_BYTES.startswith(begun):
            raise _other_protocol(begun)

    def _next_chunk(self, unfinished: int) -> None:
        size = max(CHUNK_BYTES, unfinished + READ_BYTES_MIN, min(self._frame_bytes, GROWTH * unfinished))
        self._move_to(np.empty(size, dtype=np.uint8).data)

    def _move_to(self, chunk: memoryview) -> None:
        unfinished = self._end - self._start
        chunk[:unfinished] = self._chunk[self._start : self._end]
        self._chunk = chunk
        self._view = chunk.toreadonly()
        self._start = 0
        self._end = unfinished

    def _drop_chunk(self) -> None:
        self._chunk = self._view = memoryview(b"")
        self._start = self._end = 0


def _other_protocol(begun: bytes) -> BadMagic:
    if begun[:1] == _TLS_BEGINS:
        return BadMagic("the peer speaks TLS, and this side does not; write delayd:// in front of its address")
    return BadMagic(f"a frame begins with {begun!r} instead of {_MAGIC_BYTES!r}; is the peer a delayd?")


def _decode_head(packed: memoryview) -> Head:
    try:
        # Extensions have at least one byte, so this limit refuses all of them.
        head = msgpack.unpackb(
            packed, strict_map_key=True, max_ext_len=0, max_array_len=HEAD_ITEMS_MAX, max_map_len=HEAD_ITEMS_MAX
        )
    except ValueError as error:
        raise BadRequest(f"the head of a frame can't be decoded: {undecoded_reason(error)}") from error
    if not isinstance(head, dict):
        raise BadRequest(f"the head of a frame is a {type(head).__name__} instead of a map")
    return head
