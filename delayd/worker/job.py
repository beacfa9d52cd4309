"""Job: one message in a slot of its handler, and the work on it, which is the same on the loop and in a thread.

Invariant: whatever a handler or a middleware raises ends as a verdict; nothing of it reaches the loop or ends a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback

from delayd.batch.labels import TRACE_HEADER, traceparent, traceparent_of
from delayd.client.pulling.consumer import AsyncMessage, Message
from delayd.client.pulling.message import MessageView
from delayd.errors import BadHeaders
from delayd.worker.handler import Handler
from delayd.worker.middleware import Chain, Finish, Hooks
from delayd.worker.verdicts import ACK, Reject, Retry, Verdict, verdict_of

_PID = os.getpid
_HEADER = TRACE_HEADER.encode()


class Job:
    """One message in a slot."""

    __slots__ = (
        "given",
        "is_given_back",
        "is_lost",
        "is_settled",
        "is_stopped",
        "message",
        "over_time",
        "started",
        "task",
        "trouble",
        "verdict",
    )

    def __init__(self, message: AsyncMessage, given: AsyncMessage | Message, started: float) -> None:
        self.message = message
        self.given = given  # The same message as the handler gets it: with methods that block, if it is a function.
        self.started = started
        self.task: asyncio.Task[None] | None = None  # Of a coroutine.
        self.over_time = False  # It was cancelled because of the time limit, or the log has told that it is slow.
        self.is_stopped = False  # It was cancelled because the worker stops.
        self.is_given_back = False  # And it has ended by that: there is no verdict.
        self.is_lost = False  # It goes on in a thread after its time limit, and holds its slot.
        self.is_settled = False  # The server was told what becomes of the message; nothing may be told twice.
        self.verdict = ACK
        self.trouble = ""  # The traceback of what the handler raised, if that was no word to the worker.


async def work_on(job: Job, handler: Handler, chain: Chain, finish: Finish) -> None:
    """Run middleware and handler; the verdict is in the job then. In a thread this never suspends."""
    pid = _PID()
    message = job.given
    begun: list[Hooks] = []
    try:
        packed = message.headers_bytes
        if packed and _HEADER in packed:
            traceparent.set(_trace_of(message))
        if chain:
            await chain.before(message, begun, finish)
        result = handler.call(message)
        if handler.is_coroutine:
            result = await result
        elif inspect.iscoroutine(result):
            result.close()
            raise TypeError(f"{handler.name} is no coroutine function and returned a coroutine, which nobody runs")
        job.verdict = ACK
        if chain:
            await chain.after(message, result, begun, finish)
    except GeneratorExit:
        raise  # The loop has ended without it.
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt, too, concern this message only.
        cancelled = isinstance(error, asyncio.CancelledError)
        job.is_given_back = cancelled and job.is_stopped
        limit = handler.settings.limit
        if cancelled and job.over_time and limit is not None:
            error = TimeoutError(f"{handler.name} took longer than its time limit, {limit}")
        job.verdict = verdict_of(error)
        if not isinstance(error, Retry | Reject):
            job.trouble = traceback_of(error)
        if chain and pid == _PID():
            await chain.error(message, error, begun, finish)
    if pid != _PID():
        _end_child(job.verdict)


def run_in_thread(job: Job, handler: Handler, chain: Chain, finish: Finish) -> None:
    """`work_on`, on a thread."""
    working = work_on(job, handler, chain, finish)
    try:
        working.send(None)
    except StopIteration:
        return
    working.close()
    raise AssertionError("the work on a message in a thread has suspended")


def traceback_of(error: BaseException) -> str:
    """The traceback, from the user's own code on."""
    try:
        return "".join(traceback.format_exception(error)).rstrip()
    except Exception as untold:  # noqa: BLE001 - the text of a user's exception may raise what it likes.
        return f"{type(error).__name__}, whose traceback can't be had: {untold!r}"


def _trace_of(message: MessageView) -> str:
    try:
        return traceparent_of(message.headers)
    except BadHeaders:
        return ""  # The handler learns that when it asks for them.


def _end_child(verdict: Verdict) -> None:
    """End a process that the handler has forked: the message, its slot and the connections are the parent's."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0 if verdict is ACK else 1)
