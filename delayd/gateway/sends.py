"""Sends: a request with one message, with several, or with a stream of any length, and its answer.

     POST …/messages   application/json      {…}        201, a receipt
                                             [{…}, …]   200, a list: a receipt or a problem for each
                       application/x-ndjson  {…}↵{…}↵   200, the same as lines, while the request is still read
                       anything else         bytes      201: they are the body, and the query has the rest

Invariant: an answer to a message comes when the message is durable. Of a list or a stream each message is kept or
refused by itself, and the answers are in the order of the messages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from delayd.batch.labels import traceparent, traceparent_of
from delayd.batch.names import MESSAGE_BYTES_MAX
from delayd.client.producer import AsyncProducer
from delayd.client.sending.receipts import Receipt
from delayd.errors import BadArgument, DelaydError, MessageTooLarge, ServerUnavailable
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.values import JSON, Given, NewMessage, SendOptions, milliseconds

NDJSON, EVENTS = "application/x-ndjson", "text/event-stream"
LINE_BYTES_MAX = 2 * MESSAGE_BYTES_MAX  # A body of the largest size in base64, and the rest.
BODY_BYTES_MAX = 64 << 20  # A list of messages; longer ones are streams.
UNDER_WAY_MAX = 8_192  # Messages of a stream without an answer: then no more of it is read.
PIECE_LINES = 512

T = TypeVar("T")
Q = TypeVar("Q", bound=msgspec.Struct)
_Sent = asyncio.Future[Receipt] | DelaydError  # A message under way, or why it is not sent.

_ONE, _SOME = msgspec.json.Decoder(NewMessage), msgspec.json.Decoder(list[NewMessage])
_encode = msgspec.json.Encoder().encode


class Lines(Response):
    """An answer of lines as they come, also while the request is still read: nothing else reads it meanwhile."""

    def __init__(self, lines: AsyncIterator[bytes], media_type: str = NDJSON) -> None:
        super().__init__(headers={"Cache-Control": "no-store"}, media_type=media_type)
        del self.headers["content-length"]
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for line in self._lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def send(producer: AsyncProducer, subject: str, request: Request, until_stop: Receive) -> Response:
    """Answer a POST of messages. ``until_stop`` receives what is sent, until the gateway stops.

    Messages without a trace of their own get that of the request, as those that a handler sends get its message's.
    """
    if trace := traceparent_of(request.headers):
        traceparent.set(trace)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in (JSON, NDJSON):
        queried(request)
    if kind == NDJSON:
        _check_encoding(request)
        return Lines(_stream(producer, subject, Request(request.scope, until_stop)))
    body = await read_body(request, BODY_BYTES_MAX if kind == JSON else MESSAGE_BYTES_MAX)
    if kind != JSON:
        return _given(await _queue(producer, subject, query_of(request, SendOptions), body))
    if not body.lstrip().startswith(b"["):
        message = decoded(_ONE, body)
        return _given(await _queue(producer, subject, message, message.content(), message.headers))
    wished = decoded(_SOME, body)
    told: list[Given | dict[str, object]] = []
    for first in range(0, len(wished), UNDER_WAY_MAX):
        sent: list[_Sent] = []
        for message in wished[first : first + UNDER_WAY_MAX]:
            if not len(sent) % PIECE_LINES:
                await asyncio.sleep(0)  # A long list holds nobody else up.
            sent.append(_begin(producer, subject, message))
        told += [await _told(each) for each in sent]
    return Response(_encode(told), media_type=JSON)


async def read_body(request: Request, most: int) -> bytes:
    """The whole body of a request; refused as soon as it is known to be too long."""
    _check_encoding(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise _too_long(most)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_long(most)
        parts.append(part)
    return b"".join(parts)


def _check_encoding(request: Request) -> None:
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise Refusal(415, "bad_encoding", f"a body in the encoding {coding[:40]!r} is not read; send it as it is")


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of most requests."""


def queried(request: Request) -> None:
    """Refuse a request that has a query."""
    query_of(request, NoQuery)


def query_of(request: Request, kind: type[Q]) -> Q:
    """The query of a request; BadArgument for what it may not have."""
    try:
        text = request.scope["query_string"].decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict")
    except ValueError as error:
        raise BadArgument(f"the query of this request: {error}") from error
    if not pairs:
        return _converted({}, kind)
    readers = _readers(kind)
    found: dict[str, object] = {}
    for name, value in pairs:
        if name not in readers:
            what = ", ".join(readers) or "nothing"
            raise BadArgument(f"the query of this request may have {what}; it has {name[:40]!r}")
        read = readers[name]
        if read is None:
            several = found.setdefault(name, [])
            assert isinstance(several, list), "only this line sets it"
            several.append(value)
        elif name in found:
            raise BadArgument(f"the query of this request has {name!r} twice")
        else:
            found[name] = read(value)
    return _converted(found, kind)


def _converted(found: dict[str, object], kind: type[Q]) -> Q:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise BadArgument(f"the query of this request: {error}") from error


@cache
def _readers(kind: type[msgspec.Struct]) -> dict[str, Callable[[str], object] | None]:
    """What reads a value of each member; None for one that may come several times."""
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    readers: dict[str, Callable[[str], object] | None] = {}
    for member in described.fields:
        kinds = member.type.types if isinstance(member.type, msgspec.inspect.UnionType) else (member.type,)
        readers[member.encode_name] = next((_READERS[type(each)] for each in kinds if type(each) in _READERS), str)
    return readers


def _number(text: str) -> int | str:
    return int(text) if re.fullmatch("-?[0-9]{1,19}", text) else text


def _truth(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


_READERS: dict[type, Callable[[str], object] | None] = {
    msgspec.inspect.IntType: _number,
    msgspec.inspect.BoolType: _truth,
    msgspec.inspect.ListType: None,
}


def part(request: Request, name: str) -> str:
    """A part of the path, such as the subject: routes see the path as it was sent, so an encoded / is of the name."""
    try:
        return unquote(request.path_params[name], errors="strict")
    except UnicodeDecodeError as error:
        raise BadArgument(f"the {name} in the path of this request is no UTF-8") from error


def _too_long(most: int) -> Refusal:
    return Refusal(413, "message_too_large", f"the body of this request has more than {most} bytes")


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A body of JSON; BadArgument says what is wrong, and where."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadArgument(f"the body of this request: {error}") from error


def _queue(
    producer: AsyncProducer, subject: str, message: SendOptions, body: bytes, headers: dict[str, str] | None = None
) -> asyncio.Future[Receipt]:
    """Queue a message; raises what is wrong with it."""
    return producer.send_nowait(
        subject,
        body,
        **message.terms(),  # type: ignore[arg-type]
        headers=message.all_headers(headers),
        key=message.key,
        on_conflict=message.on_conflict,
        tags=message.tags,
        ttl=None if message.ttl_ms is None else milliseconds("ttl_ms", message.ttl_ms),
        expires_at=message.expires_at,
        ordering_key=message.ordering_key,
        spread=None if message.spread_ms is None else milliseconds("spread_ms", message.spread_ms),
    )


def _begin(producer: AsyncProducer, subject: str, message: NewMessage) -> _Sent:
    try:
        return _queue(producer, subject, message, message.content(), message.headers)
    except DelaydError as error:
        return error


async def _told(sent: _Sent) -> Given | dict[str, object]:
    """A receipt, or why the message is not kept."""
    if isinstance(sent, DelaydError):
        return problem(sent)
    try:
        return Given.of(await sent)
    except DelaydError as error:
        return problem(error)


def _given(receipt: Receipt) -> Response:
    given = Given.of(receipt)
    return Response(_encode(given), 201, {"Location": f"messages/{given.id}"}, JSON)


async def _stream(producer: AsyncProducer, subject: str, request: Request) -> AsyncIterator[bytes]:
    """Answer a stream: its lines are sent as they come, and answered in their order as they are kept.

    Lines that came together are one piece: most often they share a batch, so they are kept at the same moment.
    """
    under_way: asyncio.Queue[list[_Sent] | None] = asyncio.Queue(UNDER_WAY_MAX // PIECE_LINES)

    async def read() -> None:
        try:
            async for lines in _lines(request):
                for first in range(0, len(lines), PIECE_LINES):
                    piece = lines[first : first + PIECE_LINES]
                    await under_way.put([_begin_line(producer, subject, line) for line in piece])
        except ClientDisconnect:
            # Whole lines are sent all the same. Somebody hears the answers when it is this gateway that stops.
            await under_way.put([ServerUnavailable("the gateway stops; no line behind these was read")])
        except MessageTooLarge as error:
            await under_way.put([error])
        finally:
            await under_way.put(None)

    reading = asyncio.get_running_loop().create_task(read())
    try:
        while (sent := await under_way.get()) is not None:
            yield b"".join([_encode(await _told(each)) + b"\n" for each in sent])
        await reading
    finally:
        reading.cancel()


def _begin_line(producer: AsyncProducer, subject: str, line: bytes) -> _Sent:
    try:
        return _begin(producer, subject, decoded(_ONE, line))
    except DelaydError as error:
        return error


async def _lines(request: Request) -> AsyncIterator[list[bytes]]:
    """The lines of a stream that are not empty, as they come; MessageTooLarge when one is too long."""
    rest = b""
    async for part in request.stream():
        *whole, rest = (rest + part).split(b"\n")
        if lines := [line for line in whole if line.strip()]:
            yield lines
        if len(rest) > LINE_BYTES_MAX:
            raise MessageTooLarge(
                f"a line of this stream has more than {LINE_BYTES_MAX} bytes; no line behind it was read"
            )
    if rest.strip():
        yield [rest]
