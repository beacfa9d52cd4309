"""Calls: the requests of one connection whose answers have not come.

Invariant: each call ends exactly once: with its last answer, at its time limit, or with the connection's end. A
forgotten call ends silently. Only a call that never left this process says `sent=False` (rule I3).
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
    TooManyConnections,
)
from delayd.net.writer import Writer
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
        # If the peer refused the connection before any answer, it has served nothing, so its own error is the result.
        # After any other end nobody knows which requests were served.
        refused = isinstance(ending, BadMagic | BadVersion | TooManyConnections) and not self._heard
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
