"""Engine: what a client runs on in one process: its loop and its connections, and how they end with the program.

A client is written once, for the caller's event loop, and its blocking form is made from that. A method of an
asynchronous client is a coroutine that gives to `_run` whatever needs the loop; `blocking` makes of it a plain method
with the same arguments and text. It runs the coroutine on the caller's thread, and `_run` hands the work to the loop's
thread and waits there. So arguments are checked, and messages that are here already are handed out, without a change of
thread.

    producer.cancel(...)         AsyncProducer.cancel, run by the caller's thread until it ends
      checks, self._run(work) ──▶ OnThread.call: the loop's thread runs ``work``, the caller waits

Invariants: work is done on the loop's thread in the order in which each caller posted it. After a fork the child gets
an engine of its own at its first call, and never touches the one that it inherited, because the parent goes on with its
thread, its sockets and its batch numbers (rule I2). The child never frees the inherited engine either: that would
remove the parent's sockets from the epoll set that both share.

A thread that is in the event loop's C code when the interpreter is gone crashes the program as soon as it wakes up: the
exit code would be that of a segmentation fault, after everything went well. So no such thread outlives the program's
end, which waits at most EXIT_S for all flushes together, and THREAD_S for each thread, whatever the servers do. The log
says what was not flushed. A process that is killed, or ends by `os._exit` as children of a fork often do, flushes
nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import re
import sys
import threading
from _queue import SimpleQueue  # As in `delayd.machine.executor`.
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import wraps
from threading import get_ident
from types import TracebackType, coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, TypeVarTuple, overload

import uvloop

from delayd.client.instants import monotonic_s
from delayd.errors import AlreadyClosed, BadSetting, DelaydError, WrongLoop
from delayd.machine.executor import Done

EXIT_S = 5.0  # A flush takes milliseconds; a server that is away for longer should not hold up a program's end.
THREAD_S = 1.0  # A thread ends in a millisecond, unless a callback of the program's own holds it up.

R = TypeVar("R")


class Engine(Protocol):
    """The engine of any client."""

    @property
    def pid(self) -> int:
        """The process that made it."""


class Process:
    """This process. ``pid`` is what os.getpid says, without a call of the system for each message: Python tells each
    child of a fork.
    """

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Note that this is another process."""
        self.pid = os.getpid()


PROCESS = Process()
os.register_at_fork(after_in_child=PROCESS.begin)


class LoopEngine(Engine, Protocol):
    """The engine of an asynchronous client."""

    @property
    def is_here(self) -> bool:
        """Whether the caller is in the loop that it was made in."""

    def check_loop(self) -> None:
        """Raise WrongLoop outside of the loop that it was made in."""


Own = TypeVar("Own", bound=Engine)
AtLoop = TypeVar("AtLoop", bound=LoopEngine)


class OnLoop:
    """What a client has on one event loop of one process. Of an asynchronous client it is the whole engine."""

    def __init__(self, what: str) -> None:
        """``what`` is made, as errors name it."""
        self.pid = PROCESS.pid
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop(f"{what} is made inside a running event loop; make it in an `async def`") from None
        self.ident = get_ident()  # The thread that runs the loop.
        self.is_running = self.loop.is_running
        self._what = what

    @property
    def is_here(self) -> bool:
        """Whether the caller is in this loop. asyncio asks the system which process this is, at each call."""
        return self.ident == get_ident() and self.pid == PROCESS.pid and self.is_running()

    def check_loop(self) -> None:
        """Raise WrongLoop outside of the loop that this was made in."""
        if not self.is_here:
            what = f"{self._what} belongs to the event loop that it was made in"
            raise WrongLoop(f"{what}, and nothing was done; make one in each")

    @property
    def core(self) -> Self:
        """As of the engine of a blocking client."""
        return self

    def run(self, work: Coroutine[object, object, R]) -> Coroutine[object, object, R]:
        """What to await for this work."""
        return work

    def leave(self) -> None:
        """Hand out nothing more; from any thread. Most clients hand out nothing by themselves."""

    async def close(self) -> None:
        """Flush, and disconnect."""
        raise NotImplementedError

    def end(self, until: float) -> None:
        """Do nothing but log: the program ends, and the loop has ended before; see `remember`."""
        self.tell_at_end(flushed=False)

    async def flush_at_end(self) -> None:
        """Flush because the program ends."""

    def tell_at_end(self, *, flushed: bool) -> None:
        """Log what the end of the program has cut off."""


class OwnEngine(Generic[Own]):
    """The engine of one client in this process; ``make`` makes it, ``what`` names the client in errors.

    Any thread may call it. Calls that come for each message look at ``engine`` themselves: it is to be used only if its
    ``pid`` is this process's.
    """

    __slots__ = ("_closed", "_making", "_what", "engine", "make")

    def __init__(self, what: str, make: Callable[[], Own]) -> None:
        self.make = make
        self.engine: Own | None = None
        self._what = what
        self._closed = False
        # Reentrant, because a signal handler may close the client that it interrupted.
        self._making = threading.RLock()

    def standing(self) -> Own:
        """The engine of this process; the first call in a process makes it. AlreadyClosed after the close."""
        engine = self.engine
        if engine is not None and engine.pid == PROCESS.pid:
            return engine
        with self._making:
            if self._closed:
                raise AlreadyClosed(f"this {self._what} was closed")
            engine = self.here()
            if engine is None:
                engine = self.make()
                self._leave_to_parent()
                self.engine = engine
            return engine

    def here(self) -> Own | None:
        """The engine of this process; None when it has none."""
        engine = self.engine
        return engine if engine is not None and engine.pid == PROCESS.pid else None

    def close(self) -> Own | None:
        """Give no engine from now on; return the one of this process, which the caller closes, if there is one."""
        with self._making:
            self._closed = True
            engine = self.here()
            self._leave_to_parent()
            self.engine = None
            return engine

    def _leave_to_parent(self) -> None:
        if self.engine is not None and self.engine.pid != PROCESS.pid:
            _LEFT_TO_PARENTS.append(self.engine)


class OwnLoopEngine(OwnEngine[AtLoop]):
    """The engine of an asynchronous client, which belongs to the loop in which it was made."""

    __slots__ = ()

    def on_this_loop(self) -> AtLoop:
        """As `standing`; WrongLoop in another loop."""
        engine = self.standing()
        engine.check_loop()
        return engine

    def close(self) -> AtLoop | None:
        """As for any client; WrongLoop in another loop, and the client stays open then."""
        engine = self.here()
        if engine is not None:
            engine.check_loop()
        return super().close()


Seat = TypeVar("Seat", bound=OnLoop)


class Client(ABC, Generic[Seat]):
    """A client in either form."""

    @property
    @abstractmethod
    def _core(self) -> Seat:
        """What it has on a loop of this process. AlreadyClosed after the close, WrongLoop where it may not be used."""

    @abstractmethod
    def _run(
        self, work: Coroutine[object, object, R], *, ends_with_caller: bool = False
    ) -> Coroutine[object, object, R]:
        """Run this on that loop, after what was asked before; it goes on when the caller is interrupted, or ends."""


class AsyncClient(Client[Seat]):
    """A client of the caller's own event loop. Its methods are written once: `blocking` makes the other form of them.

    For that, whatever needs the loop is given to `_run`, and a method calls no public method of its own client.
    """

    _own: OwnLoopEngine[Seat]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except DelaydError as failed:
            note_close(error, failed)

    @abstractmethod
    async def close(self) -> None:
        """Flush, and disconnect."""

    @property
    def _core(self) -> Seat:
        core = self._own.engine
        if core is None or not core.is_here:
            core = self._own.on_this_loop()
        return core

    def _run(
        self, work: Coroutine[object, object, R], *, ends_with_caller: bool = False
    ) -> Coroutine[object, object, R]:
        return work


def note_close(error: BaseException | None, failed: DelaydError) -> None:
    """Raise why a close failed; where an error has ended the block, that says more than what was lost because of it."""
    if error is None:
        raise failed
    error.add_note(f"the close failed, too: {failed.message}")


class Open(Protocol):
    """The engine of a client that was used and not closed."""

    @property
    def pid(self) -> int:
        """The process that made it."""

    def end(self, until: float) -> None:
        """Flush until the instant ``until`` on `monotonic_s`, log what could not be flushed, and end the thread.

        A client that is used later raises AlreadyClosed.
        """


_open: dict[Open, None] = {}
_registered: list[bool] = []


def remember(client: Open) -> None:
    """End this client when the program ends, unless it is closed before."""
    if not _registered:
        _registered.append(True)
        atexit.register(_end_all)
    _open[client] = None


def forget(client: Open) -> None:
    """Forget a client that was closed."""
    _open.pop(client, None)


def _end_all() -> None:
    until = monotonic_s() + EXIT_S
    while _open:
        client, _ = _open.popitem()
        # A child leaves alone what it inherited.
        if client.pid == PROCESS.pid:
            client.end(until)


_LEFT_TO_PARENTS: list[Engine] = []


A = TypeVar("A")
P = ParamSpec("P")
Fields = TypeVarTuple("Fields")
Work = Callable[[], None]

_ASYNC = re.compile(
    r"\b(?:await|async) |(?<=[`.])Async(?=[A-Z])"
)  # What a text about an asynchronous client says more.


@overload
def blocking(
    method: Callable[Concatenate[A, P], Coroutine[object, object, R]],
) -> Callable[Concatenate[Any, P], R]: ...


@overload
def blocking(
    method: Callable[Concatenate[A, P], Coroutine[object, object, object]], gives: type[R]
) -> Callable[Concatenate[Any, P], R]: ...


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[object, object, object]], gives: type | None = None
) -> Callable[Concatenate[Any, P], object]:
    """The blocking form of a method of an asynchronous client, or of what it gives out.

    ``gives``: what the form's own parts make of it, where that is another type.
    """

    @wraps(method)
    def called(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> object:
        # One line, so that no Ctrl-C comes between the end of the coroutine and the return of its result.
        return next(_ended(method(self, *args, **kwargs)))[0]

    return told(called, method, None if gives is None else gives.__name__)


@coroutine
def _ended(running: Coroutine[object, object, R]) -> Generator[tuple[R], None, None]:
    """Run a coroutine that is never suspended, because it waits in its `_run` only; the result comes in a tuple."""
    yield ((yield from running),)


def told(called: Callable[P, R], method: Callable[..., object], returns: str | None) -> Callable[P, R]:
    """Let help() say of a method what is true of its blocking form."""
    called.__doc__ = plain(method.__doc__ or "")
    called.__qualname__ = method.__qualname__.removeprefix("Async")
    if returns is not None:
        signature = inspect.signature(method)
        called.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    return called


def plain(text: str) -> str:
    """A text about an asynchronous client as it is true of the blocking one."""
    return _ASYNC.sub("", text)


def form_of(other: type) -> Callable[[type[R]], type[R]]:
    """Completes the text of a blocking class, which has a first sentence, by that of the asynchronous one."""

    def complete(made: type[R]) -> type[R]:
        _, _, more = (inspect.getdoc(other) or "").partition("\n\n")
        made.__doc__ = f"{made.__doc__}\n\n{plain(more)}"
        return made

    return complete


class OnThread(Generic[Seat]):
    """The engine of a blocking client: what it has on a loop, and the thread of that loop."""

    def __init__(self, name: str, make: Callable[[LoopThread], Seat]) -> None:
        self.pid = PROCESS.pid
        self.thread = LoopThread(name)
        self.core = self.thread.run(lambda: make(self.thread))
        remember(self)

    def end(self, until: float) -> None:
        """Flush because the program ends; see `remember`."""
        self.core.leave()
        flushed = self.thread.call_within(self.core.flush_at_end(), max(until - monotonic_s(), 0))
        self.core.tell_at_end(flushed=flushed)
        self.thread.end(THREAD_S)

    async def run(self, work: Coroutine[object, object, R]) -> R:
        """Run this on the loop, and wait for it in the caller's thread."""
        return self.thread.call(work)

    async def close(self) -> None:
        """Flush, disconnect and end the thread."""
        forget(self)
        self.core.leave()
        try:
            self.thread.call(self.core.close())
        finally:
            self.thread.close()


class BlockingClient(Client[Seat]):
    """A client of any thread, made of the methods of an `AsyncClient`; after a fork the child gets one of its own."""

    _own: OwnEngine[OnThread[Seat]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DelaydError as failed:
            note_close(error, failed)

    def close(self) -> None:
        """Flush, and disconnect."""
        raise NotImplementedError

    @property
    def _core(self) -> Seat:
        engine = self._own.engine
        # Written out for speed: a call less for each message.
        return engine.core if engine is not None and engine.pid == PROCESS.pid else self._own.standing().core

    async def _run(self, work: Coroutine[object, object, R], *, ends_with_caller: bool = False) -> R:
        # It blocks the caller's thread.
        return self._own.standing().thread.call(work, ends_with_caller=ends_with_caller)


# Libraries that put greenlets in place of threads: who they are, the module that knows, what it is asked, and how they
# leave threads alone.
_PATCHERS = (
    ("gevent", "gevent.monkey", "is_module_patched", "threading", "monkey.patch_all(thread=False)"),
    ("eventlet", "eventlet.patcher", "is_monkey_patched", "thread", "eventlet.monkey_patch(thread=False)"),
)


def need_real_threads() -> None:
    """BadSetting where threads are greenlets: all of them would wait for ever for a loop that never gets its turn."""
    for who, module, asks, what, instead in _PATCHERS:
        patcher = sys.modules.get(module)
        if patcher is not None and getattr(patcher, asks)(what):
            raise BadSetting(
                f"{who} has put greenlets in place of this program's threads, and delayd needs a thread of its own;"
                f" patch with {instead}, or use delayd in another process"
            )


class LoopThread:
    """A running loop; made by the first use of a blocking client in a process, ended by its close."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        need_real_threads()
        self.loop = uvloop.new_event_loop() if loop is None else loop
        self._inbox: deque[Work] = deque()
        self._woken = False
        self._closed = False
        self._ended = False  # Nobody reads the inbox any more.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Work) -> None:
        """Run this on the loop soon; many posts cost one wake-up. AlreadyClosed when the thread has ended."""
        self._inbox.append(work)
        # The flag is set before the wake-up and cleared before the inbox is emptied: a post in between wakes the loop
        # once more.
        if not self._woken:
            try:
                self._woken = True
                self.loop.call_soon_threadsafe(self._empty_inbox)
            except RuntimeError:
                self._ended = True
            except BaseException:
                # A Ctrl-C came in between: the next post wakes the loop.
                self._woken = False
                raise
        # The thread sets its flag and then looks into the inbox once more, so either the thread sees this work or this
        # call sees the flag.
        if self._ended:
            raise AlreadyClosed("this client was closed")

    def call(self, coroutine: Coroutine[object, object, R], *, ends_with_caller: bool = False) -> R:
        """Run a coroutine on the loop, after all work that was posted before, and wait for its result.

        If the caller is interrupted, as by Ctrl-C, the coroutine goes on, or is cancelled if it ``ends_with_caller``.
        AlreadyClosed when the thread has ended.
        """
        # A Ctrl-C in a future's wait can leave the future's lock taken, and then this loop would wait for it for ever.
        answers: SimpleQueue[Done[R]] = SimpleQueue()
        tasks: list[asyncio.Task[R]] = []

        def start() -> None:
            task = self.loop.create_task(coroutine)
            tasks.append(task)
            task.add_done_callback(finished)

        def finished(task: asyncio.Task[R]) -> None:
            if task.cancelled():
                answers.put(Done(AlreadyClosed("this client was closed meanwhile")))
            elif (error := task.exception()) is not None:
                answers.put(Done(error))
            else:
                answers.put(Done((task.result(),)))

        def leave() -> None:
            if not tasks:
                coroutine.close()
            elif ends_with_caller:
                tasks[0].cancel()

        try:
            if self._closed:
                raise AlreadyClosed("this client was closed")
            self.post(start)
            answer = answers.get()
        except AlreadyClosed:
            if not tasks:
                coroutine.close()
            raise
        except BaseException:
            # This runs after `start`, if `start` was posted at all.
            self.post(leave)
            raise
        return answer.result()

    def run(self, function: Callable[[], R]) -> R:
        """As `call`, for a function that makes what belongs to the loop."""

        async def called() -> R:
            return function()

        return self.call(called())

    def call_within(self, coroutine: Coroutine[object, object, object], limit_s: float) -> bool:
        """Run a coroutine on the loop; return whether it ended in time. Its exception is ignored."""
        ended = threading.Event()

        def start() -> None:
            self.loop.create_task(coroutine).add_done_callback(finished)

        def finished(task: asyncio.Task[object]) -> None:
            if not task.cancelled():
                # An exception that nobody fetches would be logged as a bug.
                task.exception()
            ended.set()

        self.post(start)
        return ended.wait(limit_s)

    def close(self) -> None:
        """End the loop and the thread; callers that still wait in `call` get AlreadyClosed."""
        self.end(None)

    def end(self, limit_s: float | None) -> None:
        """As `close`, and wait for the thread's end at most so long."""
        if not self._closed:
            self._closed = True
            # The loop may be emptying the inbox at this moment: then it has stopped before `post` wakes it.
            with suppress(AlreadyClosed):
                self.post(self.loop.stop)
            self._thread.join(limit_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self._ended = True
            self._empty_inbox()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self.loop.close()

    def _empty_inbox(self) -> None:
        self._woken = False
        inbox = self._inbox
        while inbox:
            inbox.popleft()()


class Inbox(Generic[*Fields]):
    """What callers of any thread hand to the loop, in their order; many items cost one post.

    ``take`` is called on the loop, and takes all items out.
    """

    __slots__ = ("_items", "_posted", "_take", "_thread")

    def __init__(self, thread: LoopThread, take: Callable[[deque[tuple[*Fields]]], None]) -> None:
        self._thread = thread
        self._take = take
        self._items: deque[tuple[*Fields]] = deque()
        self._posted = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: tuple[*Fields]) -> None:
        """Hand one item over. AlreadyClosed when the thread has ended."""
        self._items.append(item)
        # The flag is set before the post and cleared before the items are taken: a put in between posts once more.
        if not self._posted:
            try:
                self._posted = True
                self._thread.post(self._take_all)
            except BaseException:
                # A Ctrl-C came in between: the next put posts again.
                self._posted = False
                raise

    def _take_all(self) -> None:
        self._posted = False
        self._take(self._items)
