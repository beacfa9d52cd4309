"""Streams: messages of a request of any length, as they come, and their answers, in one of two forms (docs/gateway.md).

     application/x-ndjson   {…}↵{…}↵…   a message a line, and an answer a line
     application/msgpack    map map …   one map right behind the other, and so the answers; a body is bin

Invariant: a row that is whole, but no message, has an error of its own in its place. Bytes in which no next row can be
found end the stream with an error; rows before them stand. No row holds more memory than `ROW_BYTES_MAX`, whatever it
declares: a row is decoded only when all of it is there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgpack
import msgspec

from delayd.batch.names import MESSAGE_BYTES_MAX
from delayd.errors import BadArgument, DelaydError, MessageTooLarge
from delayd.gateway.values import Given, NewMessage, PackedMessage, fault_of

NDJSON, MSGPACK = "application/x-ndjson", "application/msgpack"
ROW_BYTES_MAX = 2 * MESSAGE_BYTES_MAX  # A body of the largest size in base64, and the rest.

Parts = AsyncIterator[bytes]  # A body as it comes.
Wished = NewMessage | PackedMessage | DelaydError  # A message to be sent, or why it can't be read.
Told = Given | dict[str, object]  # A receipt, or a problem.
_Decode = Callable[[bytes], NewMessage | PackedMessage]

_pack = msgspec.msgpack.Encoder().encode


class StreamForm(NamedTuple):
    """One form of a stream: how its rows are found and read, and how answers are written."""

    media_type: str
    rows: Callable[[Parts], AsyncIterator[list[bytes]]]  # Rows as they come; CallerError where they can't be found.
    kind: type[PackedMessage | NewMessage]  # A row is decoded to this.
    decode: _Decode
    encode: Callable[[Sequence[Told]], bytes]

    def read(self, rows: Sequence[bytes]) -> Sequence[Wished]:
        """Messages, each of which is right or wrong by itself."""
        try:
            return [self.decode(row) for row in rows]
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return [self._read_one(row) for row in rows]  # So that each that is wrong has its own answer.

    def _read_one(self, row: bytes) -> Wished:
        try:
            return self.decode(row)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return BadArgument(f"a message of this stream: {fault_of(error, self.kind)}")


async def _lines(parts: Parts) -> AsyncIterator[list[bytes]]:
    """The lines that are not empty."""
    rest = b""
    async for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        if lines := [line for line in whole if line.strip()]:
            yield lines
        _check_length(rest)
    if rest.strip():
        yield [rest]


async def _maps(parts: Parts) -> AsyncIterator[list[bytes]]:
    """The values of msgpack that stand one behind the other.

    An example: the bytes ``81 a1 61 01 81 a1`` come. The unpacker skips a map of four bytes, and has begun another one;
    ``81 a1`` stays in ``rest``, and it goes on there when more comes, so no byte is looked at twice.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    rest, begin = b"", 0  # What belongs to no row yet, and where in the stream it begins.
    async for part in parts:
        rest += part
        unpacker.feed(part)
        rows: list[bytes] = []
        at, wrong = 0, False
        try:
            while True:
                unpacker.skip()
                end = unpacker.tell() - begin
                rows.append(rest[at:end])
                at = end
        except msgpack.OutOfData:
            pass
        except (msgpack.FormatError, msgpack.StackError):
            wrong = True
        if rows:
            yield rows
        rest, begin = rest[at:], begin + at
        if wrong:
            raise BadArgument(
                f"byte {begin} of this stream begins no value of msgpack, or one that is nested too deeply; no message"
                " from there on was read"
            )
        _check_length(rest)
    if rest:
        raise BadArgument("the last message of this stream is cut off; it is not kept")


def _check_length(row: bytes) -> None:
    if len(row) > ROW_BYTES_MAX:
        raise MessageTooLarge(
            f"a message of this stream has more than {ROW_BYTES_MAX} bytes; neither it nor one behind it was read"
        )


def _packed(told: Sequence[Told]) -> bytes:
    return b"".join([_pack(each) for each in told])


_LINES = StreamForm(
    NDJSON, _lines, NewMessage, msgspec.json.Decoder(NewMessage).decode, msgspec.json.Encoder().encode_lines
)
_MAPS = StreamForm(MSGPACK, _maps, PackedMessage, msgspec.msgpack.Decoder(PackedMessage).decode, _packed)
STREAM_FORMS = {
    NDJSON: _LINES,
    MSGPACK: _MAPS,
    "application/x-msgpack": _MAPS,
    "application/vnd.msgpack": _MAPS,
}
