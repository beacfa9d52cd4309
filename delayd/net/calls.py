"""Calls: what one connection has under way: requests without an answer, and frames that are not sent.

Invariant: each call ends exactly once: with its last answer, at its time limit, or with the connection's end. A
forgotten call ends silently. Only a call that never left this process says `sent=False` (rule I3).

Frames leave in the order in which they were written, and a frame that is still in the `Writer` can be taken back. Small
ones of one turn of the loop leave in one write; while the transport is full they stay here instead of in its buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from delayd.batch.columns import Buffer
from delayd.errors import (
    BadMagic,
    BadRequest,
    BadVersion,
    ConnectionLost,
    DelaydError,
    FrameDamaged,
    RequestTimedOut,
    Stopping,
    TlsRequired,
    TooManyConnections,
)
from delayd.wire.frame import ERROR, MORE, Frame, HeadValue, encode_frame
from delayd.wire.heads import error_from_head
from delayd.wire.requests import ANSWERED_IN_FRAMES

OnAnswer = Callable[[Frame | DelaydError], None]

SEVERAL_FRAMES = "an answer came in several frames where one was expected"
_REQUEST_ID_MAX = (1 << 32) - 1  # 0 is the connection itself.


class Calls:
    """Sends requests and matches their answers; used by one Connection, which catches errors of an `on_answer`."""

    __slots__ = ("_heard", "_last_id", "_loop", "_run", "_under_way", "_writer")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        writer: Writer,
        run: Callable[[OnAnswer, Frame | DelaydError], None],
    ) -> None:
        self._loop = loop
        self._writer = writer
        self._run = run
        self._under_way: dict[int, _Call] = {}
        self._last_id = 0
        self._heard = False

    def __len__(self) -> int:
        return len(self._under_way)

    def ask(
        self,
        frame_type: int,
        head: Mapping[str, HeadValue],
        body: Sequence[Buffer],
        on_answer: OnAnswer,
        timeout_ms: float | None,
        *,
        now: bool = False,
    ) -> int:
        """Write a request; see Connection.call."""
        request_id = self._last_id + 1
        if request_id > _REQUEST_ID_MAX or request_id in self._under_way:
            request_id = self._free_id(request_id)
        self._last_id = request_id
        pieces = encode_frame(frame_type, request_id, head, body)
        timer = None if timeout_ms is None else self._loop.call_later(timeout_ms / 1000, self._timed_out, request_id)
        several = frame_type in ANSWERED_IN_FRAMES
        self._under_way[request_id] = _Call(on_answer, pieces, self._writer.flushes, timer, several)
        self._writer.write(pieces, now=now)
        return request_id

    def forget(self, request_id: int) -> None:
        """Expect no answer any more; a request that has not left is taken back."""
        call = self._under_way.pop(request_id, None)
        if call is not None:
            self._close(call)

    def answered(self, frame: Frame) -> None:
        """Deliver an answer; an answer to a forgotten request is dropped.

        `on_answer` is called for more than one frame only if the request is of a type with such answers.
        """
        self._heard = True
        call = self._under_way.get(frame.request_id)
        if call is None:
            return
        answer = outcome(frame) if frame.fault is not None or frame.flags & ERROR else frame
        if frame.flags & MORE and call.several and not isinstance(answer, DelaydError):
            self._run(call.on_answer, answer)
            return
        del self._under_way[frame.request_id]
        self._close(call)
        if frame.flags & MORE and not isinstance(answer, DelaydError):
            # The request may have been done; further frames of this answer find no request.
            answer = lost(FrameDamaged(SEVERAL_FRAMES), sent=True)
        self._run(call.on_answer, answer)

    def end_all(self, ending: DelaydError) -> None:
        """The connection is gone: every call ends with this error, and with whether its bytes may have left."""
        # If the peer refused the connection before any answer, it has served nothing; if it stops, nothing without an
        # answer. Then its own error is the result. After any other end nobody knows which requests were served.
        refused = isinstance(ending, BadMagic | BadVersion | TlsRequired | TooManyConnections) and not self._heard
        refused = refused or isinstance(ending, Stopping)
        calls, self._under_way = list(self._under_way.values()), {}
        for call in calls:
            sent = self._close(call)
            self._run(call.on_answer, ending if refused else lost(ending, sent=sent))

    def _free_id(self, request_id: int) -> int:
        """The first free number from this one on: long polls stay under way while numbers start again from 1."""
        while request_id > _REQUEST_ID_MAX or request_id in self._under_way:
            request_id = 1 if request_id > _REQUEST_ID_MAX else request_id + 1
        return request_id

    def _timed_out(self, request_id: int) -> None:
        call = self._under_way.pop(request_id)
        sent = self._close(call)
        known = "it may have been served" if sent else "nothing of it was sent"
        self._run(call.on_answer, RequestTimedOut(f"no answer came in time; {known}", sent=sent))

    def _close(self, call: _Call) -> bool:
        if call.timer is not None:
            call.timer.cancel()
        sent = self._writer.flushes > call.flushes
        if not sent:
            call.pieces.clear()
        return sent


class _Call(NamedTuple):
    on_answer: OnAnswer
    pieces: list[Buffer]
    flushes: int
    timer: asyncio.TimerHandle | None
    several: bool  # Whether its answer may come in several frames.


def lost(ending: DelaydError, *, sent: bool) -> ConnectionLost:
    """The error of a call whose connection ended."""
    known = "the request may have been served" if sent else "nothing of the request was sent"
    error = ConnectionLost(f"{ending.message}; {known}", sent=sent)
    error.__cause__ = ending
    return error


def outcome(frame: Frame) -> Frame | DelaydError:
    """The frame of an answer, or the error in it.

    An answer that can't be read is no refusal: the request may have been done.
    """
    fault = frame.fault
    if fault is None:
        if not frame.flags & ERROR:
            return frame
        try:
            return error_from_head(frame.head)
        except BadRequest as unreadable:
            fault = unreadable
    return lost(fault, sent=True)


WRITE_BUFFER_BYTES_MAX = 1 << 20  # Enough to keep a socket busy for a turn of the loop; above it the peer is slow.
# Frames of this size are worth a system call: the peer begins with them while more are being made.
WRITE_NOW_BYTES = 64 << 10


class Writer:
    """Gathers the frames of one turn of the loop; used by one Connection."""

    __slots__ = ("_flush_due", "_loop", "_pending", "_pending_bytes", "_transport", "_waiting", "flushes", "writable")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.writable = True
        self.flushes = 0  # A frame written while this was n has been given to the socket when it is above n.
        self._loop = loop
        self._transport: asyncio.WriteTransport | None = None
        self._pending: list[list[Buffer]] = []
        self._pending_bytes = 0  # Bytes of the pending frames, including frames that were taken back.
        self._flush_due = False
        self._waiting: list[Callable[[], None]] = []

    @property
    def buffered_bytes(self) -> int:
        """Bytes written that have not left this process."""
        held = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return held + sum(len(piece) for pieces in self._pending for piece in pieces)

    @property
    def held_bytes(self) -> int:
        """As `buffered_bytes`, plus frames that were taken back since the last flush, but in constant time."""
        return self._pending_bytes + (0 if self._transport is None else self._transport.get_write_buffer_size())

    def attach(self, transport: asyncio.WriteTransport) -> None:
        """Take the transport for the bytes."""
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        self._transport = transport

    def detach(self) -> None:
        """The transport is gone, and with it everything that was not sent."""
        self._transport = None
        self._pending.clear()
        self._waiting.clear()

    def write(self, pieces: list[Buffer], *, now: bool = False) -> None:
        """Send one frame at the end of this turn; emptying `pieces` before it left takes it back.

        With ``now`` it leaves at once, with all frames before it, because no further frame is expected in this turn.
        """
        self._pending.append(pieces)
        self._pending_bytes += sum(map(len, pieces))
        if self.writable and (now or self._pending_bytes > WRITE_NOW_BYTES):
            # The flush also lets the transport say in this very turn that it is full, before more requests are
            # answered.
            self.flush()
            return
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call back once: at the next turn of the loop, or when the peer takes bytes again; never after the end."""
        if self.writable:
            self._loop.call_soon(callback)
        else:
            self._waiting.append(callback)

    def pause(self) -> None:
        """The transport is full."""
        self.writable = False

    def resume(self) -> None:
        """The transport has room again."""
        self.writable = True
        self.flush()
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self._loop.call_soon(callback)

    def flush(self) -> None:
        """Give everything to the transport, full or not."""
        # A transport that is closing takes bytes and drops them; then nobody could say "nothing was sent" for sure.
        if self._transport is None or not self._pending or self._transport.is_closing():
            return
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self.flushes += 1
        self._transport.writelines([piece for pieces in pending for piece in pieces])

    def _flush(self) -> None:
        self._flush_due = False
        if self.writable:
            self.flush()
