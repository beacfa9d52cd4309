"""Lease keeper: it extends the leases of messages that handlers have and have not settled (``auto_extend``).

Invariant: a message is kept from the moment at which it is handed out until something is said of it, and no longer than
``auto_extend`` in all. Callers of any thread tell of both; the timer on the loop reads what they told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator

from delayd.client.pulling.acks import Handles
from delayd.log_limit import LogLimit

TICKS_A_LEASE = 3  # One extension may be late, and another one lost, before a lease ends.
TOLD_MAX = 1_000  # As many are read at once: a millisecond.

limited = LogLimit(logging.getLogger(__name__))


class LeaseKeeper:
    """Of one consumer; made on its loop. ``extend`` asks for another lease, of so many seconds, for handles of one
    message each.
    """

    def __init__(
        self,
        names: tuple[str, str],
        lease_s: float,
        most_s: float,
        now_s: Callable[[], float],
        extend: Callable[[Handles, float], None],
    ) -> None:
        self._names = names
        self._lease_s = lease_s
        self._every_s = lease_s / TICKS_A_LEASE
        self._most_s = most_s
        self._now_s = now_s
        self._extend = extend
        self._loop = asyncio.get_running_loop()
        self._told: deque[tuple[Handles, float]] = deque()  # With when they were handed out; 0: they are settled.
        self._since: dict[tuple[int, ...], float] = {}  # By the handle of one message.
        self._timer = self._loop.call_later(self._every_s, self._tick)
        self._reads_soon = False

    def handed_out(self, handles: Handles) -> None:
        """A handler has these messages from now on."""
        self._tell(handles, self._now_s())

    def settled(self, handles: Handles) -> None:
        """Something was said of them, or no handler has got them."""
        self._tell(handles, 0.0)

    def close(self) -> None:
        """Keep nothing any more."""
        self._timer.cancel()

    def _tell(self, handles: Handles, since: float) -> None:
        self._told.append((handles, since))
        if len(self._told) >= TOLD_MAX and not self._reads_soon:
            self._reads_soon = True
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        self._reads_soon = False
        while self._told:
            handles, since = self._told.popleft()
            for handle in handles:
                # Most handles are of one message.
                for one in (tuple(handle),) if handle[2] == 1 else _ones(handle):
                    if since:
                        self._since[one] = since
                    else:
                        self._since.pop(one, None)

    def keep(self, ahead_s: float = 0.0) -> bool:
        """Extend the leases now, from ``ahead_s`` on, as far as they may be; returns whether there are any."""
        self._read()
        now_s = self._now_s()
        over = [one for one, since in self._since.items() if since <= now_s - self._most_s]
        for one in over:
            del self._since[one]
        if over:
            limited.warning("lease_let_go", "lease_let_go subject=%s group=%s messages=%d", *self._names, len(over))
        by_lease: dict[float, Handles] = {}
        for one, since in self._since.items():
            lease_s = min(ahead_s, since + self._most_s - now_s) + self._lease_s
            by_lease.setdefault(lease_s, []).append([*one])
        for lease_s, handles in by_lease.items():
            self._extend(handles, lease_s)
        return bool(by_lease)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._tick)
        self.keep()


def _ones(handle: list[int]) -> Iterator[tuple[int, ...]]:
    """The handle of each message of a handle of many."""
    incarnation, first, count, *place = handle
    for sequence in range(first, first + count):
        yield incarnation, sequence, 1, *place
