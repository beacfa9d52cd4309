"""Pace: how fast a caller works messages off, and from that how many may be fetched ahead of it (rule Q4).

Each hand-out is timed until the caller comes back for more. With a lease of 60 s this allows:

    time a message    held ahead    given to a pull that names no number
    not known yet     0             1
    10 s              0             1
    0.3 s             1             3
    1 ms              250           1,000, or what the consumer's setting allows
    10 us             what the setting allows, twice; and once

Invariant: nothing is fetched ahead before a pace is known, and at that pace held messages are worked off long before
their lease ends.
"""

from __future__ import annotations

# Messages held ahead are worked off within this: fifty round trips to a server; other consumers hardly miss them.
AHEAD_S = 0.25
# A handler that takes less than this has one message ahead, so that the round trip to a far server costs no time.
ONE_AHEAD_S = 0.5
# A pull that names no number gets as many messages as take this long, so that the fixed cost of a batch pays.
BATCH_S = 1.0
# A message that was not handed out after this goes back: the caller has stalled, or does not come back at all.
HOLD_S = 1.0
# And after this part of a lease: a worker's handler may take five sixths of the lease from its hand-out on, so what
# waited for a tenth before is still its own when the handler ends in time.
HOLD_PARTS = 10
# A fetch is at most this many times as large as the one before: the first messages may cost less than the others.
GROWTH = 8
LIMIT_MAX = 1 << 20
WEIGHT = 0.5  # A new time counts as much as all earlier ones, so a change is followed within a few messages.


class Pace:
    """The pace of one consumer's callers, all threads or tasks together; ``now`` is on `monotonic_s`.

    Two threads that come back at once may spoil one sample, which the next ones mend; so it needs no lock.
    """

    __slots__ = ("_ahead_s", "_batch_s", "_count", "_each_s", "_handed_at", "_limit", "_one_s", "hold_s")

    def __init__(self, lease_s: float) -> None:
        # The limits are shares of a short lease, so that most of it is left to the handler.
        self.hold_s = min(HOLD_S, lease_s / HOLD_PARTS)
        self._ahead_s = min(AHEAD_S, lease_s / 16)
        self._one_s = min(ONE_AHEAD_S, lease_s / 8)
        self._batch_s = min(BATCH_S, lease_s / 8)
        self._each_s: float | None = None
        self._handed_at = 0.0
        self._count = 0  # Messages handed out at `_handed_at`; 0 once somebody came back.
        self._limit = 1

    def came_back(self, now: float) -> None:
        """A caller asks for more: the messages that were handed out last are worked off."""
        count = self._count
        if count:
            self._count = 0
            took_s = (now - self._handed_at) / count
            each_s = self._each_s
            self._each_s = took_s if each_s is None else each_s + (took_s - each_s) * WEIGHT

    def handed_out(self, now: float, count: int) -> None:
        """Note that a caller has got ``count`` messages."""
        self._handed_at = now
        self._count = count

    def next(self, now: float) -> None:
        """A caller asked for more and has got one message: `came_back` and `handed_out` in one."""
        count, each_s = self._count, self._each_s
        if count:
            took_s = (now - self._handed_at) / count
            self._each_s = took_s if each_s is None else each_s + (took_s - each_s) * WEIGHT
        self._count = 1
        self._handed_at = now

    def fetched(self) -> None:
        """Messages came: the next fetch may be larger."""
        self._limit = min(self._limit * GROWTH, LIMIT_MAX)

    def stalled(self) -> None:
        """Messages that were fetched ahead had to go back: begin with few again."""
        self._limit = 1

    def ahead(self, most: int) -> int:
        """How many messages may be held while the caller works, at most ``most``."""
        each_s = self._each_s
        if each_s is None or each_s > self._one_s:
            return 0
        return max(1, self._within(self._ahead_s, each_s, most))

    def batch(self, most: int) -> int:
        """How many messages a caller gets that names no number; at most ``most``."""
        each_s = self._each_s
        return 1 if each_s is None else max(1, self._within(self._batch_s, each_s, most))

    def is_back_soon(self, count: int) -> bool:
        """Whether a caller that has just got ``count`` messages will be back so soon that as many may be held for
        it.
        """
        return self.takes_less(count, self._one_s)

    def takes_less(self, count: int, limit_s: float) -> bool:
        """Whether ``count`` messages are worked off within a time; False when no pace is known."""
        return self._each_s is not None and self._each_s * count <= limit_s

    def _within(self, limit_s: float, each_s: float, most: int) -> int:
        most = min(most, self._limit)
        return most if each_s * most <= limit_s else int(limit_s / each_s)
