"""Sends: a request with one message, with several, or with a stream of any length, and its answer.

     POST …/messages   application/json      {…}        201, a receipt
                                             [{…}, …]   200, a list: a receipt or a problem for each
                       a stream's type       {…}↵{…}↵   200, the same a row, while the request is still read
                       anything else         bytes      201: they are the body, and the query has the rest

Invariant: an answer to a message comes when the message is durable. Of a list or a stream each message is kept or
refused by itself, and the answers are in the order of the messages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import cache, lru_cache, partial
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
from delayd.errors import BadArgument, CallerError, DelaydError, ServerUnavailable
from delayd.gateway.connection import VISIT, Listener, cycle_of
from delayd.gateway.keeping import Keeper, keep_each
from delayd.gateway.once import OnceRequest, OnceRequests, Queue
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.streams import NDJSON, STREAM_FORMS, StreamForm, Told, Wished
from delayd.gateway.values import INSTANT_FAULT, JSON, Given, NewMessage, SendOptions, fault_of, queued

EVENTS = "text/event-stream"
BODY_BYTES_MAX = 64 << 20  # A list of messages; longer ones are streams.
UNDER_WAY_MAX = 8_192  # Messages of a stream without an answer: then no more of it is read.
PIECE_ROWS = 512
PIECES_UNDER_WAY_MAX = UNDER_WAY_MAX // PIECE_ROWS
QUERIES_KNOWN, QUERY_BYTES_KNOWN = 1_024, 256  # Queries that were read already: most senders have a few.

T = TypeVar("T")
Q = TypeVar("Q", bound=msgspec.Struct)
P = TypeVar("P")
_Keep = Callable[[Sequence[Wished]], Coroutine[None, None, list[Told]]]  # Sends messages, and tells of each.

_ONE, _SOME = msgspec.json.Decoder(NewMessage), msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Lines(Response):
    """An answer of lines as they come, also while the request is still read: nothing else reads it meanwhile."""

    def __init__(self, lines: AsyncIterator[bytes], media_type: str = NDJSON) -> None:
        super().__init__(headers={"Cache-Control": "no-store"}, media_type=media_type)
        del self.headers["content-length"]
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        flow = cycle_of(receive).flow
        last = b""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for line in self._lines:
                await send({"type": "http.response.body", "body": line, "more_body": True})
                if flow.write_paused:
                    await flow.drain()  # Nothing is got for a caller that does not read what it has got.
        except asyncio.CancelledError:
            if VISIT not in scope:
                raise
            last = _encode(problem(scope[VISIT].cut())) + b"\n"
        await send({"type": "http.response.body", "body": last})


async def send(
    producer: AsyncProducer, named: OnceRequests, subject: str, request: Request, listener_of: Callable[[], Listener]
) -> Response:
    """Answer a POST of messages. A stream is read until the listener that ``listener_of`` makes of its caller leaves.

    Messages without a trace of their own get that of the request, as those that a handler sends get its message's.
    """
    if trace := traceparent_of(request.headers):
        traceparent.set(trace)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    form = STREAM_FORMS.get(kind)
    if kind == JSON or form is not None:
        queried(request)
    once = named.of(request, subject)
    queue: Queue
    keep: _Keep
    if once is None:
        queue, keep = partial(queued, producer.send_nowait, subject), Keeper(producer, subject).keep
    else:
        queue, keep = once.one(), partial(keep_each, once.each(of_stream=form is not None))
    if form is not None:
        _check_encoding(request)
        told = _stream(form, keep, request, listener_of())
        if once is not None:
            await once.is_stream()
            told = once.held(told, form)
        return Lines(told, form.media_type)
    body = await read_body(request, BODY_BYTES_MAX if kind == JSON else MESSAGE_BYTES_MAX)
    if once is None:
        return await _answer(queue, keep, None, request, kind, body)
    with once.under_way():
        return await _answer(queue, keep, once, request, kind, body)


async def _answer(
    queue: Queue, keep: _Keep, once: OnceRequest | None, request: Request, kind: str, body: bytes
) -> Response:
    """Send a message or a list of messages."""
    if kind != JSON:
        return _given(await queue(query_of(request, SendOptions), body))
    if not body.lstrip().startswith(b"["):
        message = decoded(_ONE, body)
        return _given(await queue(message, message.content(), message.headers))
    parts = decoded(_SOME, body)
    return Response(await _send_list(keep, once, parts), media_type=JSON)


async def _send_list(keep: _Keep, once: OnceRequest | None, parts: Sequence[msgspec.Raw]) -> bytes:
    """Send a list of messages, of which all can be read, and tell of each. A long one holds nobody else up."""
    pieces: list[list[NewMessage]] = []
    for piece in _pieces(parts):
        first = PIECE_ROWS * len(pieces)
        pieces.append(
            [decoded(_ONE, each, f"message {first + row + 1} of {len(parts)}") for row, each in enumerate(piece)]
        )
        await asyncio.sleep(0)
    if once is not None:
        await once.is_list(pieces)
    told: list[bytes] = []
    for first in range(0, len(pieces), PIECES_UNDER_WAY_MAX):
        sending: list[asyncio.Task[list[Told]]] = []
        for messages in pieces[first : first + PIECES_UNDER_WAY_MAX]:
            sending.append(asyncio.get_running_loop().create_task(keep(messages)))
            await asyncio.sleep(0)
        told += [_encode(await each)[1:-1] for each in sending]
    return b"[%b]" % b",".join(told)


async def read_body(request: Request, most: int) -> bytes:
    """The whole body of a request; refused as soon as it is known to be too long."""
    _check_encoding(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most:
        raise _too_long(most)
    body = b""
    parts: list[bytes] = []  # Behind the first piece, which is the whole body most often.
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message["body"]
        size += len(part)
        if size > most:
            raise _too_long(most)
        if not body:
            body = part
        else:
            parts.append(part)
        if not message["more_body"]:
            return b"".join([body, *parts]) if parts else body


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
    query: bytes = request.scope["query_string"]
    return _query_known(query, kind) if len(query) <= QUERY_BYTES_KNOWN else _query_read(query, kind)


def _query_read(query: bytes, kind: type[Q]) -> Q:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict")
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


_query_known = lru_cache(QUERIES_KNOWN)(_query_read)


def _converted(found: dict[str, object], kind: type[Q]) -> Q:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        fault = fault_of(error, kind)
        if INSTANT_FAULT in fault and any(isinstance(value, str) and " " in value for value in found.values()):
            fault += ", and in a query + as %2B"
        raise BadArgument(f"the query of this request: {fault}") from error


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


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, name: str = "the body of this request") -> T:
    """A body of JSON, or a part of one, which has a name; BadArgument says what is wrong, and where."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadArgument(f"{name}: {fault_of(error, decoder.type)}") from error


def _given(receipt: Receipt) -> Response:
    given = Given.of(receipt)
    return Response(_encode(given), 201, {"Location": f"messages/{given.id}"}, JSON)


async def _stream(form: StreamForm, keep: _Keep, request: Request, caller: Listener) -> AsyncIterator[bytes]:
    """Answer a stream: its rows are sent as they come, and answered in their order as they are kept.

    Rows that came together are one piece: most often they share a batch, so they are kept at the same moment.
    """
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[asyncio.Task[list[Told]] | None] = asyncio.Queue(PIECES_UNDER_WAY_MAX)

    async def begin(wished: Sequence[Wished]) -> None:
        await under_way.put(loop.create_task(keep(wished)))

    async def read() -> DelaydError | Refusal | None:
        try:
            async for rows in form.rows(Request(request.scope, caller.receive).stream()):
                for piece in _pieces(rows):
                    await begin(form.read(piece))
        except ClientDisconnect:
            # Whole rows are sent all the same. Somebody hears the answers unless the caller has left by itself.
            return caller.why or ServerUnavailable("the gateway stops; no line behind these was read")
        except CallerError as error:
            return error
        finally:
            await under_way.put(None)
        return None

    with caller:
        reading = loop.create_task(read())
        try:
            while (sent := await under_way.get()) is not None:
                yield form.encode(await sent)
            why = await reading
            if why is not None:
                yield form.encode([problem(why)])
        finally:
            reading.cancel()


def _pieces(rows: Sequence[P]) -> Iterator[Sequence[P]]:
    for first in range(0, len(rows), PIECE_ROWS):
        yield rows[first : first + PIECE_ROWS]
