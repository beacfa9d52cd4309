"""In flight: the messages that a consumer's handlers have got and have said nothing of, at most so many at once
(``max_in_flight``).

Invariant: a message that is handed out has a place here until something is said of it, it goes back, or its lease ends.
There is no lock: a thread that a signal has interrupted may wait for the loop, and the loop must go on then. So each
step is one of a dict's own, and a caller that finds that another one was faster puts its messages back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from delayd.client.instants import monotonic_s
from delayd.client.pulling.acks import Handles
from delayd.errors import CallerError, StaleHandle

_Key = tuple[int, int]  # Incarnation and pull sequence.


class InFlight:
    """Of one consumer; made on its loop, where `wait` and `close` belong. The others may be called from any thread."""

    def __init__(self, most: int, lease_s: Callable[[], float]) -> None:
        self._most = most
        self._lease_s = lease_s
        self._ends: dict[_Key, float] = {}  # When the lease of each ends, on the clock of leases.
        self._loop = asyncio.get_running_loop()
        self._waiting = 0
        self._freed = asyncio.Event()
        self._closed = False

    @property
    def room(self) -> int:
        """How many more messages may be handed out now."""
        if len(self._ends) >= self._most:
            now = self._lease_s()
            # A dict is copied in one step of the interpreter, whatever other threads do.
            for key, ends in list(self._ends.items()):
                if ends <= now:
                    self._ends.pop(key, None)
        return max(self._most - len(self._ends), 0)

    def hand_out(self, handles: Handles, lease_ends: float) -> bool:
        """Give messages their places; False, and no place, when other threads have taken these meanwhile."""
        self._ends.update(dict.fromkeys(_keys(handles), lease_ends))
        if len(self._ends) <= self._most:
            return True
        self.let_go(handles)
        return False

    def extend(self, handles: Handles, lease_ends: float, extended: asyncio.Future[None]) -> None:
        """The leases of those that are in flight end at another instant, if the server extends them. On the loop.

        While nobody knows, the later of both instants counts. A message that the server does not hold any more has no
        place; when it refused the word, the lease ends as before.
        """
        before = {key: self._ends[key] for key in _keys(handles) if key in self._ends}
        for key, ends in before.items():
            self._ends[key] = max(ends, lease_ends)

        def heard(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            if isinstance(error, StaleHandle):
                self.let_go([*error.handles])
            for key, ends in before.items():
                # A message that has left its place meanwhile gets none again.
                if key in self._ends and isinstance(error, CallerError):
                    self._ends[key] = ends
                elif key in self._ends and (error is None or isinstance(error, StaleHandle)):
                    self._ends[key] = lease_ends
            if self._waiting:
                self._freed.set()

        extended.add_done_callback(heard)

    def let_go(self, handles: Handles) -> None:
        """Something was said of these messages, or no handler has got them."""
        for key in _keys(handles):
            self._ends.pop(key, None)
        if self._waiting:
            self._loop.call_soon_threadsafe(self._freed.set)

    @property
    def waiting(self) -> int:
        """How many calls of `wait` have no room yet."""
        return 0 if self._freed.is_set() else self._waiting

    async def wait(self, until: float | None) -> bool:
        """Wait until a message may be handed out; False when none may be before the instant ``until`` on `monotonic_s`,
        or at the close.
        """
        self._waiting += 1
        try:
            while not self._closed:
                self._freed.clear()
                if self.room:
                    return True
                left_s = min(list(self._ends.values()), default=0.0) - self._lease_s()
                if until is not None:
                    if until <= (now := monotonic_s()):
                        return False
                    left_s = min(left_s, until - now)
                timer = self._loop.call_later(max(left_s, 0), self._freed.set)
                try:
                    await self._freed.wait()
                finally:
                    timer.cancel()
            return False
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closed = True
        self._freed.set()


def _keys(handles: Handles) -> list[_Key]:
    return [
        (incarnation, sequence) for incarnation, first, count, *_ in handles for sequence in range(first, first + count)
    ]
