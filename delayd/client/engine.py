"""Engine: what a client runs on in one process: its connections, and the background thread of a blocking client.

Invariant: after a fork the child gets an engine of its own at its first call, and never touches the one that it
inherited, because the parent goes on with its thread, its sockets and its batch numbers (rule I2). The child never
frees the inherited engine either: that would remove the parent's sockets from the epoll set that both share.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from delayd.errors import AlreadyClosed


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
OnLoop = TypeVar("OnLoop", bound=LoopEngine)


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


class OwnLoopEngine(OwnEngine[OnLoop]):
    """The engine of an asynchronous client, which belongs to the loop in which it was made."""

    __slots__ = ()

    def on_this_loop(self) -> OnLoop:
        """As `standing`; WrongLoop in another loop."""
        engine = self.standing()
        engine.check_loop()
        return engine

    def close(self) -> OnLoop | None:
        """As for any client; WrongLoop in another loop, and the client stays open then."""
        engine = self.here()
        if engine is not None:
            engine.check_loop()
        return super().close()


_LEFT_TO_PARENTS: list[Engine] = []
