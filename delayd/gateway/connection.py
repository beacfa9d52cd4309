"""Connection: one caller of a gateway, and how many there may be.

Invariant: who does nothing takes nothing from those who work. A caller has HEAD_S for the head of a request and may be
silent in its body for SILENT_S; and when all places are taken, the connection that has been without a request for
longest ends for the new one. Only when each of them has a request under way is a new one refused. What a caller waits
for, listens to or sends ends with the token that it has shown.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from delayd.errors import DelaydError, TlsRequired
from delayd.gateway.problems import MEDIA_TYPE, Refusal, problem
from delayd.net.tokens import Pass
from delayd.wire.tokens import Right

IDLE_S = 75.0  # Proxies keep connections for a minute, and should not find them closed.
HEAD_S = 10.0
SILENT_S = 60.0  # A stream whose sender has no more for now ends, and is begun anew.
HEAD_BYTES_MAX = 64 << 10  # Also of what is between two pieces of a body, and of trailers.
BESIDE_BYTES = 4  # A header has so many besides its name and its value.
LOOK_S = 1.0
UNREAD_S = 5.0  # So long the end of a stream waits for a caller whose token has ended and who reads nothing.

FULL = Refusal(
    503, "too_many_connections", "each connection of this gateway has a request under way", {"Retry-After": "1"}
)
SLOW_HEAD = Refusal(408, "frame_overdue", f"the head of a request was not there within {HEAD_S:g} s")
SLOW_BODY = Refusal(408, "frame_overdue", f"nothing of the body came for {SILENT_S:g} s; what was whole is sent")
LONG_HEAD = Refusal(431, "head_too_large", f"the head of a request has more than {HEAD_BYTES_MAX} bytes")
NO_HTTP = Refusal(400, "bad_request", "this is no request of HTTP/1.1")
NO_TLS = Refusal(400, TlsRequired.code, "this port speaks HTTPS; write https:// in front of its address")
READ_BYTES = 256 << 10
VISIT = "delayd.visit"  # Where a request has its `Visit`, while callers are asked for tokens.
_PHRASES = {
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


T = TypeVar("T")


class Lobby:
    """All connections of a gateway; those without a request under way stand in the order in which they came to rest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.resting: dict[HttpConnection, None] = {}

    def enter(self, connections: int) -> bool:
        """Whether a new one may stay, as one of so many; one that rests leaves for it if need be."""
        if connections <= self.most:
            return True
        longest = next(iter(self.resting), None)
        if longest is None:
            return False
        longest.leave()
        return True


class HttpConnection(HttpToolsProtocol):
    """uvicorn's, with limits of time and size for what is not yet a request, and its refusals as problems."""

    def __init__(
        self,
        lobby: Lobby,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._lobby = lobby
        self._unread_bytes = 0  # Came since the last head or piece of a body.
        self._heard_at = 0.0
        self._answered_at = 0.0
        self._head_since = math.inf
        self.listener: Listener | None = None  # The one of the request under way.
        self.visit: Visit | None = None  # The same; None also while nobody is asked for a token.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        if self._lobby.enter(len(self.connections)):
            self._lobby.resting[self] = None
        else:
            self._refuse(FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._lobby.resting.pop(self, None)
        super().connection_lost(exc)
        if self.listener is not None:
            self.listener.leave()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._heard_at = self.loop.time()
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(LONG_HEAD)

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._head_since = self._heard_at

    def on_headers_complete(self) -> None:
        """See httptools; what this raises ends the connection."""
        # A head that ends in the piece in which it gets too long is not unread any more.
        if (
            len(self.url) + sum([len(name) + len(value) + BESIDE_BYTES for name, value in self.headers])
            > HEAD_BYTES_MAX
        ):
            self._refuse(LONG_HEAD)
            raise ValueError(LONG_HEAD.detail)
        self._unread_bytes, self._head_since = 0, math.inf
        self._lobby.resting.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._unread_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self.visit = None
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._lobby.resting[self] = None
            self._answered_at = self.loop.time()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn."""
        if not self.transport.is_closing():
            self._refuse(NO_HTTP)

    def leave(self) -> None:
        """End a connection that has no request under way."""
        self._lobby.resting.pop(self, None)
        self.transport.close()

    def look(self, now: float) -> None:
        """End the connection if its caller takes too long; called each LOOK_S."""
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request.
        sends = cycle is not None and cycle.more_body
        if self.flow.read_paused:
            return  # It is the gateway that lets the caller wait.
        if now - self._head_since > HEAD_S:
            self._refuse(SLOW_HEAD)
        elif self not in self._lobby.resting:
            if sends and now - self._heard_at > SILENT_S:
                self._refuse(SLOW_BODY)
        elif now - (self._answered_at if sends else self._heard_at) > (HEAD_S if sends else IDLE_S):
            self.leave()  # One whose request was refused may send the rest of its body, so that it hears the answer.

    def end(self, visit: Visit, why: Refusal) -> None:
        """The token of the request under way allows it no more. Called again as long as the request is not answered.

        1. Somebody who waits or listens, or sends a stream: the answer ends with the reason.
        2. Work that may be cut anywhere, as looks may: it is cancelled, and answered with the reason.
        3. A body that is not all there: it is read no further, and the answer is the reason.
        4. Anything else is done by the servers already, or will be in a moment: its answer says what became of it.
        """
        now = self.loop.time()
        if visit.why is not None:
            if self.flow.write_paused and now - visit.ended_at > UNREAD_S:
                self.transport.abort()
            return
        visit.why, visit.ended_at = why, now
        if self.listener is not None:
            self.listener.leave(why)
        elif visit.work is not None:
            visit.work.cancel()
        elif self.cycle.more_body:
            self._refuse(why)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, unless an answer has begun, and end."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = msgspec.json.encode(problem(refusal))
            lines = [b"HTTP/1.1 %d %b" % (refusal.status, _PHRASES[refusal.status])]
            lines += [
                b"content-type: %b" % MEDIA_TYPE.encode(),
                b"content-length: %d" % len(body),
                b"connection: close",
            ]
            lines += [f"{name.lower()}: {value}".encode() for name, value in refusal.headers.items()]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()


class HttpsConnection(HttpConnection, asyncio.BufferedProtocol):
    """The same over TLS: it is given what was decrypted, and tells a caller without TLS so, in the clear."""

    _room = memoryview(bytearray(READ_BYTES))  # All connections share it: what was read is given on at once.

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        self.data_received(bytes(self._room[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio; it also comes when no handshake was made, so that there was no connection."""
        if self in self.connections:
            super().connection_lost(exc)

    def refuse(self, error: DelaydError) -> None:
        """The caller has no TLS."""
        self._refuse(NO_TLS)


class Visit:
    """The request under way of a caller who has shown a token, and the rights for a subject that it needs."""

    __slots__ = ("ended_at", "entry", "rights", "subject", "why", "work")

    def __init__(self, entry: Pass, rights: tuple[Right, ...], subject: str, work: asyncio.Task[object] | None) -> None:
        """``work`` may be cut anywhere: what it has done by then stands, and harms nobody."""
        self.entry, self.rights, self.subject, self.work = entry, rights, subject, work
        self.why: Refusal | None = None  # It has ended.
        self.ended_at = math.inf

    def cut(self) -> Refusal:
        """Why its work was cancelled just now; raises CancelledError again when it was cancelled by somebody else."""
        if self.why is None or self.work is None:
            raise asyncio.CancelledError
        self.work.uncancel()
        self.work = None
        return self.why


class Listener:
    """The caller of a request that may wait for its answer for long, as a context manager: it leaves when it hangs up,
    when its token has ended, or when the gateway stops; then each of its futures is None.
    """

    __slots__ = ("_all", "_connection", "_future", "_receive", "is_gone", "why")

    def __init__(self, request: Request, every: set[Listener]) -> None:
        """``every`` has all those of a gateway whose answers are not out."""
        cycle = cycle_of(request.receive)
        self.is_gone = cycle.disconnected
        self.why: Refusal | None = None  # What to answer, when it has not left by itself.
        self._all = every
        self._connection = connection_of(cycle)
        self._receive = request.receive
        self._future: asyncio.Future[object] | None = None
        cycle.flow.resume_reading()  # Or nobody hears that it hangs up.

    def __enter__(self) -> Self:
        self._connection.listener = self
        self._all.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.listener = None
        self._all.discard(self)

    def future(self) -> asyncio.Future[T | None]:
        """What this caller waits for next; whoever has it sets it."""
        future: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self._future = future  # type: ignore[assignment]
        if self.is_gone:
            future.set_result(None)
        return future

    async def receive(self) -> Message:
        """What it sends next, as ASGI has it: a disconnection when it leaves, also while it goes on sending."""
        coming = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((coming, self.future()), return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            coming.cancel()

    def leave(self, why: Refusal | None = None) -> None:
        """Wait for nothing any more."""
        if self.is_gone:
            return
        self.is_gone, self.why = True, why
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


def cycle_of(side: Receive | Send) -> RequestResponseCycle:
    """The request under way of which this is the one side or the other."""
    cycle = getattr(side, "__self__", None)
    assert isinstance(cycle, RequestResponseCycle), "a gateway is served by its own connections"
    return cycle


def connection_of(cycle: RequestResponseCycle) -> HttpConnection:
    """The connection of a request under way."""
    connection = getattr(cycle.on_response, "__self__", None)
    assert isinstance(connection, HttpConnection), "a gateway is served by its own connections"
    return connection


async def write_answer(
    cycle: RequestResponseCycle, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> None:
    """Write a whole answer at once, where uvicorn's `send` writes its head and its body each, and searches each header.

    An example of the costs: 39 us of processor time for a request whose answer goes by `send`, 23 us so.
    """
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()  # A caller that does not read its answers is asked nothing more.
    if cycle.disconnected:
        return
    lines = [b"%b: %b\r\n" % each for each in (*cycle.default_headers, *headers)]
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    head = STATUS_LINE[status] + b"".join(lines)
    assert head.count(b"\n") == len(lines) + 1, "no header holds a line of its own"
    cycle.response_started = cycle.response_complete = True
    cycle.transport.write(head + (b"\r\n" if cycle.scope["method"] == "HEAD" else b"\r\n%b" % body))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


async def look_after(
    connections: Iterable[HttpConnection], look_at_tokens: Callable[[Sequence[HttpConnection]], None]
) -> None:
    """End connections whose callers take too long, and requests whose tokens have ended, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        now = asyncio.get_running_loop().time()
        look_at_tokens([*connections])
        for connection in list(connections):
            connection.look(now)
