"""One TCP connection, the same on both sides: many requests at once, each answered by a frame that names it.

Invariant: every request asked here ends exactly once, and no more than a bounded number of requests is taken from a
peer before answers have left.

     this side asks                                   the peer asks
     request, call ──▶ under way ──▶ on_answer         received ──▶ asked ──▶ answer, answer_error
                         │ connection ends               │ too many unanswered, or its share of this turn is used up:
                         ▼                               ▼ the socket is not read
                       ConnectionLost (sent?)          taken when answers have left, or at its next turn

A fault of one request is answered for it alone; bytes that are no frame end the connection (docs/protocol.md). All
methods belong to the loop's thread, and none blocks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import ParamSpec, Protocol, cast

from delayd.address import OPEN, Endpoint
from delayd.batch.columns import Buffer
from delayd.errors import (
    BadRequest,
    ConnectionLost,
    DelaydError,
    FrameDamaged,
    FrameOverdue,
    HeadTooLarge,
    Stopping,
    TooManyConnections,
    UnknownRequest,
)
from delayd.machine.operating import LogLimit
from delayd.net.budget import (
    BOUNDS,
    DEBT_UNITS_MAX,
    MAY_BE_HEAVY,
    SHARE_UNITS,
    UNIT_BYTES,
    UNITS_A_S,
    UNITS_OF_TYPE,
    Bounds,
    Budget,
)
from delayd.net.calls import SEVERAL_FRAMES, Calls, OnAnswer, Writer, lost, outcome
from delayd.net.tls import CHANNEL
from delayd.net.tokens import Pass
from delayd.wire.frame import ANSWER, ERROR, MORE, Frame, FrameReader, HeadValue, encode_frame
from delayd.wire.heads import error_head
from delayd.wire.requests import RequestLimits, RequestType, request_type

FIRST_FRAME_S = 30.0  # For the first whole request on a new connection; a client that connects has something to ask.
PROOF_S = 2.0  # For a peer to prove that it may use a place that is kept for trusted peers.
# For a frame that has begun; one that takes longer must arrive at the rate below, so that it ends at all.
FRAME_S = 30.0
FRAME_BYTES_A_S_MIN = 64 << 10  # A SEND of 16 MiB may take four minutes.
RETRY_CONNECT_MS = 1_000
CLOSE_MS_MAX = 2_000  # For a peer to take what was written before the close; a stop as a whole has 5 s.
LEAVE_MS_MAX = 500  # For a peer to hear that this server stops and to close its side: round trips, no work.
# The kernel notices a peer that is gone without a word: it probes an idle connection, and bytes that were sent must be
# taken in time. This is far longer than a stopped process or a replugged cable needs; a caller that needs an answer
# sooner sets a time limit.
DEAD_PEER_MS = 60_000
PROBE_AFTER_S = 30
PROBE_EVERY_S = 10
CONNECT_MS_DEFAULT = 5_000  # A lost first packet is sent again after 1 and after 3 s.

PROOF = frozenset({RequestType.CHALLENGE, RequestType.PROVE, RequestType.TOKEN})
UNBOUNDED = 1 << 62  # Units of a turn, for a connection without a budget.

_CONNECTION_ITSELF = 0  # The request id of an error that concerns no single request.
_STOPPING = Stopping("this server is stopping and did nothing of this request; ask again when it is back")

P = ParamSpec("P")
log = logging.getLogger(__name__)
limited = LogLimit(log)


class Handler(Protocol):
    """How a side serves the requests it receives; called on the loop, must not block."""

    def connected(self, connection: Connection) -> None:
        """A connection is open."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Serve a request, now or later, by its request_id; a DelaydError raised here is its error answer."""

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """The connection has ended and its requests can't be answered any more; no error if this side closed it."""

    def crashed(self, error: Exception) -> None:
        """An error is a bug of ours: memory can't be trusted any more, so the server must stop."""


class Connection(asyncio.BufferedProtocol):
    """One end of a connection; made by `delayd.net.entry.connect` or by a Server."""

    def __init__(
        self,
        handler: Handler | None = None,
        *,
        bounds: Bounds = BOUNDS,
        limits: RequestLimits | None = None,
        budget: Budget | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.peer = "a peer"
        self.entry: Pass | None = None  # What the peer's token lets it ask for.
        self.access = OPEN  # How this side was let in, if it has dialled.
        self.channel = b""  # Both ends know it of one encrypted connection (delayd.net.tls); empty for any other.
        self.closed: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._handler = handler
        self._requests_max = bounds.requests_max
        self._in_flight_bytes_max = bounds.in_flight_bytes_max
        self._transport: asyncio.Transport | None = None
        self._closing = False
        self._ending: DelaydError | None = None  # Why the connection ends, once that is known.
        self._reader = FrameReader(bounds.body_bytes_max, None if limits is None else limits.plain)
        self._limits = limits
        self._budget = budget
        self.trusted = False
        self.must_prove = False  # This connection has a place that is kept for trusted peers.
        self._began = loop.time()
        self._quiet = False  # Nothing has arrived since the server's last look.
        self._unfinished_bytes = 0  # As the budget has counted them.
        self._unfinished_since = self._began
        self._untaken_bytes = 0
        self._untaken_since = self._began
        self._waits_for_turn = False
        self._debt = 0  # Units that it has used above its share; each time it is served pays one share.
        self._writer = Writer(loop)
        self._calls = Calls(loop, self._writer, self._guard)
        # Type and body bytes of requests that this side has not answered or has held back.
        self._asked: dict[int, tuple[int, int]] = {}
        self._asked_bytes = 0
        self._standing: set[int] = set()  # Those that were answered, and may be again: no answer is owed now.
        self._serves = False  # Requests go one way on a connection, so a side that has received one only answers.
        self._reading = True
        self._read_on_due = False

    @property
    def trusted(self) -> bool:
        """Whether the peer has proved that it knows the cluster's secret."""
        return self._trusted

    @trusted.setter
    def trusted(self, trusted: bool) -> None:
        self._trusted = trusted
        if self._limits is not None:
            self._reader.room_by_type = self._limits.by_type_trusted if trusted else self._limits.by_type

    @property
    def is_open(self) -> bool:
        """Whether requests and answers can still leave; False once the peer has closed its side."""
        return self._transport is not None and not self._closing and not self._transport.is_closing()

    @property
    def writable(self) -> bool:
        """False while the peer does not take bytes; a caller that can wait should."""
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
                answered.set_exception(FrameDamaged(SEVERAL_FRAMES))
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
        *,
        now: bool = False,
    ) -> int:
        """Ask without a future: `on_answer` is called with each frame of the answer, or once with an error. Only
        the answers of a HELLO and of a PULL may have several frames.

        Returns the request id for `forget`. The time limit is for the whole answer. On a connection that has ended the
        error comes at the next turn of the loop. The body's buffers must not change until the answer has come. With
        `now` the request leaves at once, and is not gathered with others of this turn of the loop.
        """
        if self.is_open:
            return self._calls.ask(frame_type, head, body, on_answer, timeout_ms, now=now)
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
            limited.warning(
                error.code, "connection_refused peer=%s code=%s reason=%r", self.peer, error.code, error.message
            )
            self._ending = error
            self._say_last(error)
            self.close()

    def leave(self) -> None:
        """End the connection of a server that stops. The peer hears `Stopping`, which says that nothing without an
        answer was begun. It does not hear it when a request was begun, because nobody knows what becomes of that one.
        """
        if self._asked or not self.is_open or self._transport is None:
            self.close()
            return
        self._say_last(_STOPPING)
        if not self._transport.can_write_eof():
            self.close()
            return
        # What the peer has sent meanwhile is read and dropped until it closes its side: a socket that is closed with
        # unread bytes resets the connection, and the peer may lose the last word.
        self._writer.flush()
        self._end_within(CLOSE_MS_MAX if self._writer.buffered_bytes else LEAVE_MS_MAX)
        try:
            self._transport.write_eof()
        except OSError:
            self._transport.abort()  # The peer has reset it.
        self._reading = True
        self._transport.resume_reading()

    def close(self) -> None:
        """End the connection when all written frames have left, at the latest after CLOSE_MS_MAX."""
        if self._closing:
            return
        self._writer.flush()
        self._end_within(CLOSE_MS_MAX)
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection now; frames that were written and have not left are lost."""
        self._closing = True
        self._drop_unfinished()
        if self._transport is not None:
            self._transport.abort()

    def _say_last(self, error: DelaydError) -> None:
        self._writer.write(encode_frame(0, _CONNECTION_ITSELF, error_head(error), (), ANSWER | ERROR))

    def _end_within(self, limit_ms: int) -> None:
        """Take no more, and end at the latest after this time."""
        self._closing = True
        self._drop_unfinished()
        if self._transport is not None:
            limit = self._loop.call_later(limit_ms / 1000, self._transport.abort)
            self.closed.add_done_callback(lambda _: limit.cancel())

    # Calls of the server that has accepted this connection, and of the budget of all its connections.

    def look(self, now: float) -> None:
        """Free memory that an idle connection does not need, and end one whose peer makes this side wait for a
        frame.
        """
        if self._closing:
            return
        if self._quiet:
            self._reader.rest()
        self._quiet = True
        self._reader.compact()
        # A transport counts as full at 1 MiB. Less than that on each of thousands of connections is gigabytes too, so
        # it is counted.
        self._count_untaken()
        if self.must_prove and not self._trusted and now - self._began > PROOF_S:
            self.refuse(_no_place())
        elif not self._reader.cut_count and now - self._began > FIRST_FRAME_S:
            self.refuse(FrameOverdue(f"no whole request came within {FIRST_FRAME_S:.0f} s; connect when there is one"))
        elif not self._reading or not self._unfinished_bytes:
            # While this side does not read, the peer can't finish a frame.
            self._unfinished_since = now
        else:
            waited_s = now - self._unfinished_since
            if waited_s > FRAME_S and self._unfinished_bytes < waited_s * FRAME_BYTES_A_S_MIN:
                what = f"{self._unfinished_bytes} bytes of a frame came within {waited_s:.0f} s"
                self.refuse(FrameOverdue(f"{what}; send a request as a whole"))

    def unheard(self, seconds: float) -> None:
        """This side read nothing for so long: that counts against no deadline of the peer."""
        self._began += seconds
        self._unfinished_since += seconds
        self._untaken_since += seconds

    def go_on(self) -> None:
        """See Member: it is this connection's turn."""
        self._waits_for_turn = False
        self._take()

    def unfinished_since(self) -> tuple[int, float]:
        """See Member."""
        return self._unfinished_bytes, self._unfinished_since

    def untaken_since(self) -> tuple[int, float]:
        """See Member."""
        return self._untaken_bytes, self._untaken_since

    def end(self, error: DelaydError) -> None:
        """See Member."""
        self.refuse(error)
        if self._untaken_bytes:
            # A peer that takes nothing would not take the reason either.
            self.abort()
            self._drop_untaken()

    # Calls of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = cast(asyncio.Transport, transport)
        if self._closing:
            # The connection was closed while its socket was being opened.
            self._transport.abort()
            return
        self._writer.attach(self._transport)
        address = transport.get_extra_info("peername")
        if address:
            self.peer = str(Endpoint(address[0], address[1]))
        self.channel = transport.get_extra_info(CHANNEL, b"")
        line = transport.get_extra_info("socket")
        if line is not None:  # A connection inside of this process has none.
            _set_up(line)
        if self._handler is not None:
            self._guard(self._handler.connected, self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the socket to read into."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """More bytes of the peer have arrived."""
        if self._closing:
            return
        self._quiet = False
        self._reader.arrived(nbytes)
        self._take()

    def eof_received(self) -> bool:
        """The peer closed its side, so nobody reads the answers any more."""
        return False

    def pause_writing(self) -> None:
        """The transport is full; while a peer does not take its answers, no more of its requests are served."""
        self._writer.pause()
        self._count_untaken()
        if self._serves:
            self._stop_reading()

    def resume_writing(self) -> None:
        """The peer takes bytes again."""
        self._writer.resume()
        self._drop_untaken()
        self._soon_read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed: everything that was under way ends."""
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
        self._standing.clear()
        self._drop_unfinished()
        self._drop_untaken()
        if self._handler is not None:
            self._guard(self._handler.disconnected, self, self._ending)
        # The task that waited for it may have been cancelled, as by Ctrl-C, and the future with it.
        if not self.closed.done():
            self.closed.set_result(None)

    # Requests of the peer.

    def _deliver(self, frame: Frame) -> None:
        request_id = frame.request_id
        if request_id == _CONNECTION_ITSELF or request_id in self._asked:
            # Its answer could not be matched, so this is a fault of the whole connection.
            self.refuse(BadRequest(f"the request id {request_id} is reserved or still under way"))
            return
        if self.must_prove and not self._trusted and frame.type not in PROOF:
            self.refuse(_no_place())
            return
        self._asked[request_id] = (frame.type, len(frame.body))
        self._asked_bytes += len(frame.body)
        self._serves = True
        try:
            if frame.fault is not None:
                raise frame.fault
            if frame.body and self._limits is not None and frame.type not in self._limits.bodies:
                _check_no_body(frame)
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
        if flags & MORE:
            self._standing.add(request_id)
        else:
            self._standing.discard(request_id)
            del self._asked[request_id]
            self._asked_bytes -= body_bytes
            if not self._reading:
                self._soon_read_on()
        if self._closing:
            return
        try:
            pieces = encode_frame(frame_type, request_id, head, body, flags)
        except HeadTooLarge as error:
            # Answers are cut to fit, so this is a bug; but it concerns this answer only, and memory can be trusted.
            log.error("answer_too_large peer=%s request_type=%d reason=%r", self.peer, frame_type, error.message)
            if flags & MORE:
                self.refuse(error)
                return
            pieces = encode_frame(frame_type, request_id, error_head(error), (), ANSWER | ERROR)
        # The last answer that is owed leaves at once: the end of the turn may be far, because others are served in
        # between.
        self._writer.write(pieces, now=len(self._asked) == len(self._standing) and not self._reader.may_have_next)
        if not self._writer.writable:
            self._count_untaken()

    def _is_full(self) -> bool:
        """Whether a side that serves takes no more requests now.

        Only the serving side stops reading when it can't write: if both sides did, they would wait for each other.
        """
        return (
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
        if not self._reading and not self._waits_for_turn:
            self._take()

    def _take(self) -> None:
        """Begin requests that have arrived, until this side is full or this connection has used its share of the
        turn.
        """
        reader, budget = self._reader, self._budget
        units = UNBOUNDED if budget is None else min(budget.share, budget.left)
        used, waits = 0, False
        began = perf_counter()
        while not self._closing:
            if self._serves and self._is_full():
                self._stop_reading()
                break
            if used >= units:
                waits = reader.may_have_next
                break
            frame = reader.next()
            if frame is None:
                break
            if frame.flags & ANSWER:
                self._answered(frame)
            else:
                self._deliver(frame)
            # The same as `units_of`, without a call for each frame.
            told = UNITS_OF_TYPE.get(frame.type, 1) + reader.cut_bytes // UNIT_BYTES
            now = perf_counter()
            # A PULL of few bytes may have read and copied megabytes: the time that it took counts, if that is more.
            used += max(told, int((now - began) * UNITS_A_S))
            began = now
        if budget is not None:
            if used:
                self._debt = min(max(0, self._debt + used - SHARE_UNITS), DEBT_UNITS_MAX)
            budget.used(used)
            if waits:
                self._wait_for_turn()
        if self._closing:
            return
        if reader.fault is not None:
            self.refuse(reader.fault)
            return
        if budget is not None and (self._unfinished_bytes or reader.unfinished_bytes):
            self._count_unfinished(budget, begun=used > 0)
        if not self._reading and not self._waits_for_turn and not (self._serves and self._is_full()):
            self._start_reading()

    def _wait_for_turn(self) -> None:
        assert self._budget is not None, "only a budget bounds the share of a turn"
        self._stop_reading()
        self._waits_for_turn = True
        self._budget.wait(self, heavy=self._debt > 0 or self._reader.next_type in MAY_BE_HEAVY)

    def _start_reading(self) -> None:
        if self._transport is not None and self.is_open:
            self._reading = True
            self._transport.resume_reading()

    def _count_unfinished(self, budget: Budget, *, begun: bool) -> None:
        unfinished = self._reader.unfinished_bytes
        if begun or not self._unfinished_bytes:
            self._unfinished_since = self._loop.time()
        if unfinished != self._unfinished_bytes:
            by, self._unfinished_bytes = unfinished - self._unfinished_bytes, unfinished
            budget.unfinished(by)

    def _drop_unfinished(self) -> None:
        """Nothing more is read: the bytes of an unfinished frame are freed at once, not with the last reference to this
        object.
        """
        self._reader.drop()
        if self._budget is not None:
            by, self._unfinished_bytes = -self._unfinished_bytes, 0
            self._budget.unfinished(by)

    def _count_untaken(self) -> None:
        if self._budget is not None and self._transport is not None:
            untaken = self._writer.held_bytes
            if untaken and not self._untaken_bytes:
                self._untaken_since = self._loop.time()
            by, self._untaken_bytes = untaken - self._untaken_bytes, untaken
            if by:
                self._budget.untaken(by)

    def _drop_untaken(self) -> None:
        if self._budget is not None:
            by, self._untaken_bytes = -self._untaken_bytes, 0
            self._budget.untaken(by)

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


def _no_place() -> TooManyConnections:
    message = "the places that are left are for servers and operators; close some connections"
    return TooManyConnections(message, retry_after_ms=RETRY_CONNECT_MS)


def _check_no_body(frame: Frame) -> None:
    """Raise BadRequest for a body of a type that has none; a type that only another server takes is refused by the
    handler.
    """
    kind = request_type(frame.type)
    if not kind.terms.body_bytes_max:
        raise BadRequest(f"{kind.name} has no body, and this one has {len(frame.body)} bytes")


def _set_up(line: socket.socket) -> None:
    # A frame is complete when it is written, so waiting for more bytes to fill a packet would only delay it.
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
