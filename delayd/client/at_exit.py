"""At exit: flushes clients that a program leaves open when it ends, and ends their threads.

A thread that is in the event loop's C code when the interpreter is gone crashes the program as soon as it wakes up: the
exit code would be that of a segmentation fault, after everything went well. So no such thread outlives this.

Invariant: the program's end waits at most EXIT_S for all flushes together, and THREAD_S for each thread, whatever the
servers do. The log says what was not flushed. A process that is killed, or ends by `os._exit` as children of a fork
often do, flushes nothing.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol

from delayd.client.instants import monotonic_s

EXIT_S = 5.0  # A flush takes milliseconds; a server that is away for longer should not hold up a program's end.
THREAD_S = 1.0  # A thread ends in a millisecond, unless a callback of the program's own holds it up.


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
