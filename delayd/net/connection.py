"""One TCP connection, the same on both sides: many requests at once, each answered by a frame that names it.

Invariant: every request asked here ends exactly once, and no more than a bounded number of requests is taken from a
peer before answers have left.

     this side asks                                   the peer asks
     request, call ──▶ under way ──▶ on_answer         received ──▶ asked ──▶ answer, answer_error
                         │ connection ends               │ too many unanswered: held back, and the socket not read
                         ▼                               ▼
                       ConnectionLost (sent?)          taken when answers have left

A fault of one request is answered for it alone; bytes that are no frame end the connection (docs/protocol.md). All
methods belong to the loop's thread, and none blocks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, cast

from delayd.batch import Buffer
from delayd.config import CONNECTION_BYTES_MAX
from delayd.errors import (
    BadRequest,
    ConnectionLost,
    DelaydError,
    FrameDamaged,
    HeadTooLarge,
    ServerUnavailable,
    UnknownRequest,
)
from delayd.net.calls import Calls, OnAnswer, lost, outcome
from delayd.net.writer import Writer
from delayd.wire.frame import ANSWER, BODY_BYTES_MAX, ERROR, MORE, Frame, FrameReader, HeadValue, encode_frame
from delayd.wire.requests import error_head

REQUESTS_MAX = 1024  # Unanswered on one connection; docs/protocol.md.
IN_FLIGHT_BYTES_MAX = CONNECTION_BYTES_MAX  # Four batches at their limit; the last one may pass it.
CLOSE_MS_MAX = 2_000  # For a peer to take what was written before the close; a stop has 5 s for everything.
# A peer that is gone without a word is noticed by the kernel: an idle connection is probed, and what was sent must be
# taken. Far above what a stopped process or a cable that is plugged over needs; who needs an answer sooner asks for it.
DEAD_PEER_MS = 60_000
PROBE_AFTER_S = 30
PROBE_EVERY_S = 10
CONNECT_MS_DEFAULT = 5_000  # A lost first packet is sent again after 1 and after 3 s.

_CONNECTION_ITSELF = 0  # The request id of an error that concerns no single request.

P = ParamSpec("P")
log = logging.getLogger(__name__)


class Handler(Protocol):
    """What a side does with the requests it receives; called on the loop, must not block."""

    def connected(self, connection: Connection) -> None:
        """A connection stands."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """A request, to be answered now or later by its request_id; a DelaydError raised here is its error answer."""

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """The connection is gone and its requests can't be answered any more; no error if this side closed it."""

    def crashed(self, error: Exception) -> None:
        """A bug of ours: what is in memory can't be trusted any more, so the server must stop."""


class Connection(asyncio.BufferedProtocol):
    """One end of a connection; made by `connect` or by a Server."""

    trusted: bool = False  # True once the peer has proved that it knows the cluster's secret.

    def __init__(
        self,
        handler: Handler | None = None,
        *,
        body_bytes_max: int = BODY_BYTES_MAX,
        requests_max: int = REQUESTS_MAX,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.peer = "a peer"
        self.closed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._handler = handler
        self._requests_max = requests_max
        self._in_flight_bytes_max = in_flight_bytes_max
        self._transport: asyncio.Transport | None = None
        self._closing = False
        self._ending: DelaydError | None = None  # Why the connection ends, once that is known.
        self._reader = FrameReader(body_bytes_max)
        self._writer = Writer(loop)
        self._calls = Calls(loop, self._writer, self._guard)
        # Type and body bytes of what the peer asked and this side has not answered, and what is held back.
        self._asked: dict[int, tuple[int, int]] = {}
        self._asked_bytes = 0
        self._serves = False  # Requests go one way on a connection, so the side that has got one only answers.
        self._held_back: deque[Frame] = deque()
        self._reading = True
        self._read_on_due = False

    @property
    def is_open(self) -> bool:
        """Whether requests and answers can still leave."""
        return self._transport is not None and not self._closing

    @property
    def writable(self) -> bool:
        """False while the peer does not take what was written; whoever can wait should."""
        return self._writer.writable

    @property
    def buffered_bytes(self) -> int:
        """Bytes written that have not left this process."""
        return self._writer.buffered_bytes

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call back once: at the next turn of the loop, or when the peer takes bytes again; never after the end."""
        self._writer.on_writable(callback)

    def request(
        self,
        frame_type: int,
        head: Mapping[str, HeadValue],
        body: Sequence[Buffer] = (),
        timeout_ms: float | None = None,
    ) -> asyncio.Future[Frame]:
        """Ask; the future holds the answer, or raises the peer's error, ConnectionLost or RequestTimedOut.

        A cancelled future forgets the request; if it has left, the peer serves it all the same.
        """
        answered: asyncio.Future[Frame] = self._loop.create_future()

        def on_answer(answer: Frame | DelaydError) -> None:
            if answered.done():
                return
            if isinstance(answer, DelaydError):
                answered.set_exception(answer)
            elif answer.flags & MORE:
                answered.set_exception(FrameDamaged("an answer came in several frames where one was expected"))
            else:
                answered.set_result(answer)

        request_id = self.call(frame_type, head, body, on_answer, timeout_ms)
        answered.add_done_callback(lambda done: self.forget(request_id) if done.cancelled() else None)
        return answered

    def call(
        self,
        frame_type: int,
        head: Mapping[str, HeadValue],
        body: Sequence[Buffer],
        on_answer: OnAnswer,
        timeout_ms: float | None = None,
    ) -> int:
        """Ask without a future: `on_answer` is called with each frame of the answer, or once with an error.

        Returns the request id for `forget`. The time limit is for the whole answer. On a connection that has ended the
        error comes at the next turn of the loop. The body's buffers must not change until the answer has come.
        """
        if self.is_open:
            return self._calls.ask(frame_type, head, body, on_answer, timeout_ms)
        ending = self._ending or ConnectionLost(f"the connection to {self.peer} is closed", sent=False)
        self._loop.call_soon(self._guard, on_answer, lost(ending, sent=False))
        return _CONNECTION_ITSELF

    def forget(self, request_id: int) -> None:
        """Expect no answer to this request any more; if it has not left yet, it never will."""
        self._calls.forget(request_id)

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        """Answer a request; with `more` a further frame of the answer follows. Does nothing once the peer is gone."""
        self._answer(request_id, head, body, ANSWER | MORE if more else ANSWER)

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """Answer a request with an error, which the peer raises again."""
        self._answer(request_id, error_head(error), (), ANSWER | ERROR)

    def refuse(self, error: DelaydError) -> None:
        """Tell the peer why the whole connection ends, and end it."""
        if self.is_open:
            log.warning("connection_refused peer=%s code=%s message=%r", self.peer, error.code, error.message)
            self._ending = error
            self._writer.write(encode_frame(0, _CONNECTION_ITSELF, error_head(error), (), ANSWER | ERROR))
            self.close()

    def close(self) -> None:
        """End the connection when what was written has left, at the latest after CLOSE_MS_MAX."""
        if self._closing:
            return
        self._writer.flush()
        self._closing = True
        if self._transport is None:
            return
        self._transport.close()
        limit = self._loop.call_later(CLOSE_MS_MAX / 1000, self._transport.abort)
        self.closed.add_done_callback(lambda _: limit.cancel())

    def abort(self) -> None:
        """End the connection now; what was written and has not left is lost."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket stands."""
        self._transport = cast(asyncio.Transport, transport)
        if self._closing:
            # It was closed while its socket was being made.
            self._transport.abort()
            return
        self._writer.attach(self._transport)
        address = transport.get_extra_info("peername")
        if address:
            self.peer = f"{address[0]}:{address[1]}"
        _set_up(transport.get_extra_info("socket"))
        if self._handler is not None:
            self._guard(self._handler.connected, self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the socket is read into."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """More bytes of the peer have come."""
        for frame in self._reader.received(nbytes):
            if self._closing:
                return
            if frame.flags & ANSWER:
                self._answered(frame)
            elif self._held_back or self._is_full():
                self._held_back.append(frame)
            else:
                self._deliver(frame)
        if self._reader.fault is not None:
            self.refuse(self._reader.fault)
        elif self._held_back or self._is_full():
            self._stop_reading()

    def eof_received(self) -> bool:
        """The peer closed its side: nobody reads the answers any more."""
        return False

    def pause_writing(self) -> None:
        """The transport is full; a peer that does not take its answers gets no more requests served."""
        self._writer.pause()
        if self._serves:
            self._stop_reading()

    def resume_writing(self) -> None:
        """The peer takes bytes again."""
        self._writer.resume()
        self._soon_read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone: all that was under way ends."""
        if self._ending is None and not self._closing:
            torn = " in the middle of a frame" if self._reader.unfinished_bytes else ""
            why = f": {exc}" if exc is not None else ""
            self._ending = ConnectionLost(f"the connection to {self.peer} ended{torn}{why}", sent=False)
        self._closing = True
        self._transport = None
        closed_here = ConnectionLost(f"this side closed the connection to {self.peer}", sent=False)
        self._calls.end_all(self._ending or closed_here)
        self._writer.detach()
        self._asked.clear()
        self._held_back.clear()
        if self._handler is not None:
            self._guard(self._handler.disconnected, self, self._ending)
        # Whoever waited for it may have been cancelled, as by Ctrl-C, and the future with it.
        if not self.closed.done():
            self.closed.set_result(None)

    # Requests of the peer.

    def _deliver(self, frame: Frame) -> None:
        request_id = frame.request_id
        if request_id == _CONNECTION_ITSELF or request_id in self._asked:
            # Answers could not be matched any more, so this is a fault of the connection.
            self.refuse(BadRequest(f"the request id {request_id} is reserved or still under way"))
            return
        self._asked[request_id] = (frame.type, len(frame.body))
        self._asked_bytes += len(frame.body)
        self._serves = True
        try:
            if frame.fault is not None:
                raise frame.fault
            if self._handler is None:
                raise UnknownRequest("this side of the connection serves no requests")
            self._handler.received(self, frame)
        except DelaydError as error:
            self.answer_error(request_id, error)
        except Exception as error:
            log.exception("bug peer=%s request_type=%d", self.peer, frame.type)
            self._crash(error)

    def _answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], flags: int) -> None:
        if self._transport is None:
            return
        frame_type, body_bytes = self._asked[request_id]
        if not flags & MORE:
            del self._asked[request_id]
            self._asked_bytes -= body_bytes
            if self._held_back or not self._reading:
                self._soon_read_on()
        if self._closing:
            return
        try:
            pieces = encode_frame(frame_type, request_id, head, body, flags)
        except HeadTooLarge as error:
            # Answers page, so this is a bug; but it concerns this answer alone, and nothing in memory.
            log.error("answer_too_large peer=%s request_type=%d reason=%r", self.peer, frame_type, error.message)
            if flags & MORE:
                self.refuse(error)
                return
            pieces = encode_frame(frame_type, request_id, error_head(error), (), ANSWER | ERROR)
        self._writer.write(pieces)

    def _is_full(self) -> bool:
        # Only who serves stops reading when it can't write: two sides that both did would wait for each other.
        return self._serves and (
            len(self._asked) >= self._requests_max
            or self._asked_bytes >= self._in_flight_bytes_max
            or not self._writer.writable
        )

    def _stop_reading(self) -> None:
        if self._reading and self._transport is not None and not self._closing:
            self._reading = False
            self._transport.pause_reading()

    def _soon_read_on(self) -> None:
        # Not at once: an answer given inside `received` would deliver the next request inside it too.
        if not self._read_on_due:
            self._read_on_due = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._read_on_due = False
        while self._held_back and not self._closing and not self._is_full():
            self._deliver(self._held_back.popleft())
        if not self._reading and self._transport is not None and not self._closing and not self._is_full():
            self._reading = True
            self._transport.resume_reading()

    # Answers of the peer, and bugs.

    def _answered(self, frame: Frame) -> None:
        if frame.request_id != _CONNECTION_ITSELF:
            self._calls.answered(frame)
            return
        ending = outcome(frame)
        self._ending = ending if isinstance(ending, DelaydError) else FrameDamaged("an answer names no request")
        self.close()

    def _guard(self, callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            log.exception("bug peer=%s", self.peer)
            self._crash(error)

    def _crash(self, error: Exception) -> None:
        self.abort()
        if self._handler is not None:
            self._handler.crashed(error)


def _set_up(line: socket.socket) -> None:
    # A frame is complete when it is written, so waiting for more to fill a packet only delays it.
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)


async def connect(
    host: str,
    port: int,
    handler: Handler | None = None,
    timeout_ms: float = CONNECT_MS_DEFAULT,
    body_bytes_max: int = BODY_BYTES_MAX,
) -> Connection:
    """Connect to a server; ServerUnavailable if it can't be reached in time, so nothing was sent to it."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            _, connection = await loop.create_connection(
                lambda: Connection(handler, body_bytes_max=body_bytes_max), host, port
            )
    except (OSError, TimeoutError, UnicodeError) as error:
        # The resolver encodes a name before it looks for it, and a part of it may be too long for that.
        why = str(error) or f"no answer within {timeout_ms:.0f} ms"
        raise ServerUnavailable(f"no connection to {host}:{port} ({why}); is the server running?") from error
    return connection
