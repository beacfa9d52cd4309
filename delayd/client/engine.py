"""Engine: what a client runs on in one process: its loop and its connections, and how they end with the program.

Invariants: after a fork the child gets an engine of its own at its first call, and never touches the one that it
inherited, because the parent goes on with its thread, its sockets and its batch numbers (rule I2). The child never
frees the inherited engine either: that would remove the parent's sockets from the epoll set that both share.

A thread that is in the event loop's C code when the interpreter is gone crashes the program as soon as it wakes up: the
exit code would be that of a segmentation fault, after everything went well. So no such thread outlives the program's
end, which waits at most EXIT_S for all flushes together, and THREAD_S for each thread, whatever the servers do. The log
says what was not flushed. A process that is killed, or ends by `os._exit` as children of a fork often do, flushes
nothing.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from delayd.client.instants import monotonic_s
from delayd.errors import AlreadyClosed, DelaydError, WrongLoop

EXIT_S = 5.0  # A flush takes milliseconds; a server that is away for longer should not hold up a program's end.
THREAD_S = 1.0  # A thread ends in a millisecond, unless a callback of the program's own holds it up.

R = TypeVar("R")


class Engine(Protocol):
    """The engine of any client."""

    @property
    def pid(self) -> int:
        """The process that made it."""


class LoopEngine(Engine, Protocol):
    """The engine of an asynchronous client."""

    def check_loop(self) -> None:
        """Raise WrongLoop outside of the loop that it was made in."""


Own = TypeVar("Own", bound=Engine)
AtLoop = TypeVar("AtLoop", bound=LoopEngine)


class OnLoop:
    """What a client has on one event loop of one process. Of an asynchronous client it is the whole engine."""

    def __init__(self, what: str) -> None:
        """``what`` is made, as errors name it."""
        self.pid = os.getpid()
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop(f"{what} is made inside a running event loop; make it in an `async def`") from None
        self._what = what

    def check_loop(self) -> None:
        """Raise WrongLoop outside of the loop that this was made in."""
        if asyncio._get_running_loop() is not self.loop:
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
        if engine is not None and engine.pid == os.getpid():
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
        return engine if engine is not None and engine.pid == os.getpid() else None

    def close(self) -> Own | None:
        """Give no engine from now on; return the one of this process, which the caller closes, if there is one."""
        with self._making:
            self._closed = True
            engine = self.here()
            self._leave_to_parent()
            self.engine = None
            return engine

    def _leave_to_parent(self) -> None:
        if self.engine is not None and self.engine.pid != os.getpid():
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
        # Written out for speed: a call less for each message. In a child of a fork no loop of the parent runs.
        if core is None or core.loop is not asyncio._get_running_loop():
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
        if client.pid == os.getpid():
            client.end(until)


_LEFT_TO_PARENTS: list[Engine] = []
