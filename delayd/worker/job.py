"""Job: one message in a slot of its handler, and the work on it, which is the same on the loop and in a thread.

Around the handler stand middlewares, objects of the user's. Each method may be missing, and may be a function or a
coroutine function:

    before(message)              in the order in which they were given
    after(message, result)       in reverse order, when the handler has returned
    error(message, exception)    in reverse order, when the handler or a ``before`` has raised

``error`` is called for those whose ``before`` had ended. An exception of a ``before`` counts as the handler's; those of
``after`` and ``error`` are logged and change nothing, because the handler's work is done by then.

Invariants: whatever a handler or a middleware raises ends as a verdict; nothing of it reaches the loop or ends a
thread. There are never more threads than messages under way, so a handler has at most as many as it has slots. They are
daemons, because nobody can end a thread whose function hangs, and it must not keep the process.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
import traceback
from _queue import SimpleQueue  # As in `delayd.machine.executor`.
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple

from delayd.batch.labels import TRACE_HEADER, traceparent, traceparent_of
from delayd.client.engine import PROCESS, need_real_threads
from delayd.client.limits import need_listed
from delayd.client.pulling.consumer import AsyncMessage, Message
from delayd.client.pulling.message import MessageView
from delayd.errors import BadArgument, BadHeaders
from delayd.machine.operating import LogLimit
from delayd.worker.handler import Handler
from delayd.worker.verdicts import DONE, JobVerdict, Reject, Retry, verdict_of

_HEADER = TRACE_HEADER.encode()

current: ContextVar[Job | None] = ContextVar("delayd.worker.job", default=None)
"""The job whose handler runs; what the handler has begun may have it for longer."""


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
        self.task: asyncio.Task[None] | None = None  # A coroutine has one.
        self.over_time = False  # It was cancelled because of the time limit, or the log has told that it is slow.
        self.is_stopped = False  # It was cancelled because the worker stops.
        self.is_given_back = False  # And it has ended by that: there is no verdict.
        self.is_lost = False  # It goes on in a thread after its time limit, and holds its slot.
        self.is_settled = False  # The server was told what becomes of the message; nothing may be told twice.
        self.verdict = DONE
        self.trouble = ""  # The traceback of what the handler raised, if that was no word to the worker.


async def work_on(job: Job, handler: Handler, chain: Chain, finish: Finish) -> None:
    """Run middleware and handler; the verdict is in the job then. In a thread this never suspends."""
    pid = PROCESS.pid
    current.set(job)
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
        job.verdict = DONE
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
        if chain and pid == PROCESS.pid:
            await chain.error(message, error, begun, finish)
    if pid != PROCESS.pid:
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


def _end_child(verdict: JobVerdict) -> None:
    """End a process that the handler has forked: the message, its slot and the connections are the parent's."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0 if verdict is DONE else 1)


Finish = Callable[[Coroutine[Any, Any, object]], Awaitable[object]]
"""Has a coroutine of a middleware run to its end on the loop: awaited there, or waited for in a handler's thread."""

HOOKS = ("before", "after", "error")

limited = LogLimit(logging.getLogger(__name__))


class Hooks(NamedTuple):
    """The methods of one middleware; None where it has none."""

    name: str
    before: Callable[..., object] | None
    after: Callable[..., object] | None
    error: Callable[..., object] | None


class Chain:
    """All middleware of a worker."""

    def __init__(self, middleware: Sequence[object]) -> None:
        self._hooks = [_hooks_of(each) for each in need_listed("middleware", middleware, "objects")]

    def __len__(self) -> int:
        return len(self._hooks)

    async def before(self, message: MessageView, begun: list[Hooks], finish: Finish) -> None:
        """Call each ``before``; ``begun`` gets those that have ended."""
        for each in self._hooks:
            if each.before is not None:
                await _called(each.before(message), finish)
            begun.append(each)

    async def after(self, message: MessageView, result: object, begun: list[Hooks], finish: Finish) -> None:
        """Call each ``after``."""
        for each in reversed(begun):
            if each.after is not None:
                try:
                    await _called(each.after(message, result), finish)
                except BaseException as failure:  # noqa: BLE001 - the message is handled, whatever a middleware does.
                    _failed(each, "after", failure)

    async def error(self, message: MessageView, error: BaseException, begun: list[Hooks], finish: Finish) -> None:
        """Call ``error`` of those that have begun."""
        for each in reversed(begun):
            if each.error is not None:
                try:
                    await _called(each.error(message, error), finish)
                except BaseException as failure:  # noqa: BLE001 - as above
                    _failed(each, "error", failure)


def _hooks_of(middleware: object) -> Hooks:
    before, after, error = (getattr(middleware, hook, None) for hook in HOOKS)
    if before is None and after is None and error is None:
        raise BadArgument(f"{middleware!r:.200} is no middleware: it has none of before, after and error")
    return Hooks(type(middleware).__name__, before, after, error)


async def _called(result: object, finish: Finish) -> None:
    if inspect.iscoroutine(result):
        await finish(result)


def _failed(hooks: Hooks, hook: str, error: BaseException) -> None:
    limited.error("middleware_failed", "middleware_failed middleware=%s hook=%s error=%r", hooks.name, hook, error)


class HandlerThreads:
    """The threads of one handler. ``work`` is called in a thread; ``ended`` on the loop, once for many jobs."""

    def __init__(self, name: str, work: Callable[[Job], None], ended: Callable[[list[Job]], None]) -> None:
        need_real_threads()
        self._name = name
        self._work = work
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: deque[Job] = deque()
        self._woken = False
        self._under_way = 0
        self._count = 0

    def start(self, job: Job) -> None:
        """Run a job, in a thread that is idle or in another one."""
        self._under_way += 1
        if self._under_way > self._count:
            self._count += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True).start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads, each as soon as its function ends."""
        for _ in range(self._count):
            self._jobs.put(None)

    def _serve(self) -> None:
        jobs, work, context = self._jobs, self._work, self._context
        while (job := jobs.get()) is not None:
            context.copy().run(work, job)
            self._done.append(job)
            # The flag is set before the wake-up and cleared before the jobs are taken: a job in between wakes again.
            if not self._woken:
                self._woken = True
                try:
                    self._loop.call_soon_threadsafe(self._take)
                except RuntimeError:
                    return  # The loop has ended: the worker stopped without this job.

    def _take(self) -> None:
        self._woken = False
        done, ended = self._done, []
        while done:
            ended.append(done.popleft())
        self._under_way -= len(ended)
        if ended:
            self._ended(ended)
