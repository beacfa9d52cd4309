"""Worker: functions and coroutines that are called for the messages of subjects (docs/worker.md).

     made ──serve──▶ pulling ──stop, SIGTERM, SIGINT──▶ draining ──handlers ended, or drain over──▶ closed ──▶ made
                        └──a request that can never succeed──▶ draining, and its error is raised

Invariants: a message is acknowledged only after its handler has returned. From the first signal on the process is gone
within the drain and GRACE_S, whatever the handlers do: also when a coroutine blocks the event loop, on which the drain
itself would run. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import threading
from _queue import Empty, SimpleQueue  # As in `delayd.machine.executor`.
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import uvloop

from delayd.client.engine import need_real_threads
from delayd.client.limits import check_group, need_callable, need_meta, need_timedelta
from delayd.client.pulling.acks import Backoff
from delayd.client.pulling.consume_options import BACKOFF, LEASE, Start
from delayd.client.pulling.consumer import AsyncConsumer
from delayd.errors import BadArgument, BadSetting, WrongLoop
from delayd.machine.operating import tell_left_out
from delayd.worker.handler import ATTEMPTS, BY_LEASE, CONCURRENCY, Decode, Handler, HandlerSettings, TimeLimit, name_of
from delayd.worker.job import Chain
from delayd.worker.lane import Lane
from delayd.worker.verdicts import consumer_of

DRAIN, DRAIN_MAX = timedelta(seconds=30), timedelta(days=1)
TICK_S = 1.0  # How often the worker looks whether its loop stood still, and tells how many log lines were left out.
BLOCKED_S = 1.0  # A loop that is late by this is blocked: it runs no other coroutine and acknowledges nothing.

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
Hook = TypeVar("Hook", bound=Callable[[], object])
MakeConsumer = Callable[[str, HandlerSettings], AsyncConsumer]
"""Makes the consumer of one handler, in the running loop; the first argument is the address of meta."""


class Worker:
    """Calls functions and coroutines for due messages, several at a time, and acknowledges what they have done.

    Example::

        worker = delayd.Worker("127.0.0.1:7400")

        @worker.on("orders.cancel", group="billing", decode="json")
        def cancel_if_unpaid(order):
            ...

        worker.run()

    `run` serves until SIGTERM or SIGINT; ``delayd work module:worker`` does the same in several processes.

    Args:
        address: where meta listens, as ``host:port``, or over TLS as ``delayds://host:port?ca=FILE``
            (docs/security.md). The default is the environment variable DELAYD_META, or 127.0.0.1:7400.
        group: the consumer group of handlers that name none.
        middleware: objects with any of ``before(message)``, ``after(message, result)`` and
            ``error(message, exception)``, which may be functions or coroutine functions.
        drain: how long a stop waits for handlers that are at work; then their messages go back, uncounted.
        token: what lets this client in where servers ask for tokens (docs/security.md); it must not be in a repository.
            The default is the environment variable DELAYD_TOKEN, or none.
        consumers: makes the consumer of a handler; for tests, which put something else in its place.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        group: str | None = None,
        middleware: Sequence[object] = (),
        drain: timedelta = DRAIN,
        consumers: MakeConsumer = consumer_of,
        token: str | None = None,
    ) -> None:
        self._address = need_meta(address, token, others="group=, middleware= and drain=")
        self._chain = Chain(middleware)
        if not timedelta(0) <= need_timedelta("drain", drain, BadSetting) <= DRAIN_MAX:
            raise BadSetting(f"drain is {drain} and must lie within 0 and {DRAIN_MAX}")
        need_callable("consumers", consumers)
        self._drain_s = drain.total_seconds()
        self._make_consumer = consumers
        if group is not None:
            check_group(group)
        self._group = group
        self._handlers: list[Handler] = []
        self._at_start: list[Callable[[], object]] = []
        self._at_stop: list[Callable[[], object]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # While it serves.
        self._stopping: asyncio.Event | None = None
        self._stops = False  # `stop` was called: before the loop was there, or while it runs.

    @property
    def handlers(self) -> Sequence[Handler]:
        """What was registered."""
        return list(self._handlers)

    def on(
        self,
        subject: str | Sequence[str],
        *,
        group: str | None = None,
        concurrency: int = CONCURRENCY,
        max_attempts: int | None = ATTEMPTS,
        lease: timedelta = LEASE,
        time_limit: TimeLimit = BY_LEASE,
        decode: Decode = "bytes",
        pass_message: bool = False,
        backoff: Backoff = BACKOFF,
        ordered: bool = False,
        start: Start | None = None,
        tags_any: Sequence[str] = (),
        tags_all: Sequence[str] = (),
        exclusive: bool | timedelta = False,
        group_max_in_flight: int | None = None,
    ) -> Callable[[Function], Function]:
        """Register a function, which runs in a thread, or a coroutine function, which runs on the event loop.

        It gets the decoded body. It also gets the message if one of its parameters is named ``message``.

        Args:
            subject: the name under which the messages were sent; also a list of names, or a pattern such as
                ``orders.*``.
            group: the name of the consumer group. All processes that share the work give the same name. Without it,
                the worker's own.
            concurrency: how many messages of the subject this process handles at the same time.
            max_attempts: after so many failed attempts a message becomes a dead letter. None: it comes again for ever.
            lease: how long a message stays with a worker that has died.
            time_limit: how long a handler may take for a message, at most a day; by default a coroutine has five
                sixths of the lease, and a function, which nobody can end, as long as it likes. None: as long as it
                likes. The worker extends the lease while a handler takes longer than that, for a day at most.
            decode: what the body is: "bytes", "json", "msgpack", or a function of the bytes. A message whose body
                can't be decoded is rejected.
            pass_message: the second parameter gets the message, whatever its name is.
            backoff: how long a message waits that has failed; see `delayd.Backoff`.
            ordered: messages with one ordering key come one after the other (docs/consuming.md, In order).
            start, tags_any, tags_all, exclusive, group_max_in_flight: as of a `delayd.Consumer`.
        """
        named = self._group if group is None else group
        if named is None:
            raise BadArgument(
                "say which group handles it: group= of this handler, or Worker(group=...) for all of them"
            )
        own = (subject, named, concurrency, max_attempts, lease, time_limit, decode, pass_message, backoff)
        settings = HandlerSettings(*own, ordered, start, tags_any, tags_all, exclusive, group_max_in_flight)

        def register(function: Function) -> Function:
            handler = Handler(function, settings)
            for earlier in self._handlers:
                handler.check_apart(earlier)
            self._handlers.append(handler)
            return function

        return register

    def on_start(self, function: Hook) -> Hook:
        """Have a function or a coroutine function called on the event loop before the first message is pulled.

        Those of one worker are called in their order. What one raises ends `serve` or `run`.

        Args:
            function: takes no argument.
        """
        need_callable("function", function)
        self._at_start.append(function)
        return function

    def on_stop(self, function: Hook) -> Hook:
        """Have a function or a coroutine function called on the event loop when all handlers have ended.

        Those of one worker are called in reverse order, also when `on_start` failed. What one raises is logged
        (``hook_failed``), and the others are called all the same.

        Args:
            function: takes no argument.
        """
        need_callable("function", function)
        self._at_stop.append(function)
        return function

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. A second signal ends the process at once, with exit code 130.

        Raises:
            WrongLoop: an event loop runs here, as in a notebook; say ``await worker.serve()`` there.
        """
        if asyncio._get_running_loop() is not None:
            raise WrongLoop(
                "an event loop runs here already; say `await worker.serve()` in it in place of worker.run()"
            )
        need_real_threads()
        with Signals(self.stop, self._drain_s):
            uvloop.run(self.serve())

    async def serve(self) -> None:
        """Serve in the running loop until `stop`, then drain. When it is cancelled, it drains for no time.

        Raises:
            CallerError: a server refused a subject or group by name; the other handlers are drained first.
        """
        if not self._handlers:
            raise BadArgument("this worker has no handler; register one with @worker.on(subject, group=...)")
        if self._loop is not None:
            raise BadArgument("this worker serves already; make another one, or give its handlers more concurrency")
        loop = self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        if self._stops:
            self._stopping.set()
        try:
            for hook in self._at_start:
                await _called(hook)
            lanes = [
                Lane(handler, self._make_consumer(self._address, handler.settings), self._chain)
                for handler in self._handlers
            ]
            await self._serve(loop, lanes, self._stopping)
        finally:
            for hook in reversed(self._at_stop):
                try:
                    await _called(hook)
                except Exception:
                    log.exception("hook_failed hook=%s", name_of(hook))
            self._loop = self._stopping = None
            self._stops = False

    def stop(self) -> None:
        """Have `serve` or `run` stop pulling, drain and return. From any thread, from a handler or a signal's handler.

        When the worker does not serve yet, its next `serve` returns at once.
        """
        self._stops = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._begin_stop)
            except RuntimeError:
                pass  # The loop has ended meanwhile, and the worker with it.

    def _begin_stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    async def _serve(self, loop: asyncio.AbstractEventLoop, lanes: list[Lane], stopping: asyncio.Event) -> None:
        log.info("worker_ready handlers=%d pid=%d", len(lanes), os.getpid())
        pulls = [loop.create_task(lane.pull()) for lane in lanes]
        watch = loop.create_task(_watch(lanes))
        stopped = loop.create_task(stopping.wait())
        drain_s = self._drain_s
        ends: list[asyncio.Future[Any]] = [stopped, watch, *pulls, *(lane.failed for lane in lanes)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            drain_s = 0.0
            raise
        finally:
            failed = list(_errors(ends))
            for task in (stopped, *pulls):
                task.cancel()
            await asyncio.wait(pulls)
            await self._drain(loop, lanes, drain_s)
            watch.cancel()
        if failed:
            raise failed[0]

    async def _drain(self, loop: asyncio.AbstractEventLoop, lanes: list[Lane], drain_s: float) -> None:
        log.info("worker_drains running=%d limit_s=%g", sum(lane.running for lane in lanes), drain_s)
        until = loop.time() + drain_s
        for lane in lanes:
            await lane.drain(until)
        given_back = await asyncio.gather(*(lane.close() for lane in lanes))
        log.info("worker_stopped given_back=%d", sum(given_back))


async def _called(hook: Callable[[], object]) -> None:
    result = hook()
    if inspect.isawaitable(result):
        await result


async def _watch(lanes: list[Lane]) -> None:
    """Say when a handler blocks the loop, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s = loop.time() - due
        if late_s > BLOCKED_S:
            names = ",".join(lane.handler.name for lane in lanes if lane.handler.is_coroutine)
            log.error("loop_blocked wait_ms=%d coroutines=%s", late_s * 1000, names)
        tell_left_out()


def _errors(ends: list[asyncio.Future[Any]]) -> Iterator[BaseException]:
    for end in ends:
        if end.done() and not end.cancelled() and (error := end.exception()) is not None:
            yield error


GRACE_S = 10.0  # Longer than it takes to cancel coroutines and to tell the server what became of messages.
EXIT_OVERDUE = 1
EXIT_AT_ONCE = 130  # As `delayd up`, and what a shell reports for a program that Ctrl-C ended.
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Takes both signals while it is entered. ``stop`` begins the drain; it is called in the signal's handler."""

    def __init__(self, stop: Callable[[], None], drain_s: float) -> None:
        self._stop = stop
        self._limit_s = drain_s + GRACE_S
        # Putting into this queue is safe in a handler of a signal, which may interrupt any code of the main thread.
        self._begun: SimpleQueue[bool] = SimpleQueue()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int] = {}

    def __enter__(self) -> Self:
        # Python calls handlers of signals on the main thread only; elsewhere the program itself calls `stop`.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None stands for a handler that Python did not install, and can't put back.
                self._before[number] = signal.signal(number, self._on_signal) or signal.SIG_DFL
            threading.Thread(target=self._end_in_time, name="delayd-worker-stop", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._begun.put(False)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for other in SIGNALS:
            signal.signal(other, _end_at_once)
        self._begun.put(True)
        self._stop()

    def _end_in_time(self) -> None:
        if not self._begun.get():
            return
        try:
            self._begun.get(timeout=self._limit_s)
        except Empty:
            log.critical("drain_overdue limit_s=%g", self._limit_s)
            os._exit(EXIT_OVERDUE)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_AT_ONCE)
