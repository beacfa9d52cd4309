"""Stock: messages that a consumer has fetched and not handed out.

Invariant: each message leaves once: it is handed out to a caller that iterates or pulls on any thread, or it is given
back. A caller that is interrupted on its way out, as by Ctrl-C, puts back the messages that it took.

Pace: how fast a caller works messages off, and from that how many may be fetched ahead of it (rule Q4).

Each hand-out is timed until the caller comes back for more. With a lease of 60 s this allows:

    time a message    held ahead    given to a pull that names no number
    not known yet     0             1
    10 s              0             1
    0.3 s             1             3
    1 ms              250           1,000, or what the consumer's setting allows
    10 us             what the setting allows, twice; and once

Invariant: nothing is fetched ahead before a pace is known, and at that pace held messages are worked off long before
their lease ends.

In flight: the messages that a consumer's handlers have got and have said nothing of, at most so many at once
(``max_in_flight``).

Invariant: a message that is handed out has a place here until something is said of it, it goes back, or its lease ends.
There is no lock: a thread that a signal has interrupted may wait for the loop, and the loop must go on then. So each
step is one of a dict's own, and a caller that finds that another one was faster puts its messages back.

Lease keeper: it extends the leases of messages that handlers have and have not settled (``auto_extend``).

Invariant: a message is kept from the moment at which it is handed out until something is said of it, and no longer than
``auto_extend`` in all. Callers of any thread tell of both; the timer on the loop reads what they told.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from delayd.client.instants import monotonic_s
from delayd.client.pulling.acks import Handles
from delayd.client.pulling.message import MessageColumns, Pulled
from delayd.errors import CallerError, StaleHandle
from delayd.machine.operating import LogLimit

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

    def is_behind(self, now: float, put_at: float | None) -> bool:
        """Whether a message that was fetched ahead at ``put_at``, and is still here, shows that the caller has become
        slower.
        """
        return put_at is not None and now - put_at > self._ahead_s

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


_Key = tuple[int, int]  # Incarnation and pull sequence.


class Borrowed:
    """Belongs to one consumer; `wait` and `close` are called on its loop, the others from any thread."""

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


TICKS_A_LEASE = 3  # One extension may be late, and another one lost, before a lease ends.
TOLD_MAX = 1_000  # As many are read at once: a millisecond.

limited = LogLimit(logging.getLogger(__name__))


class LeaseKeeper:
    """Belongs to one consumer. ``extend`` asks for another lease, in seconds, for handles of one message each."""

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


Batch = TypeVar("Batch", bound=MessageColumns)

log = logging.getLogger(__name__)


class Stock(Generic[Batch]):
    """Messages in the order in which they came; each answer to a PULL stands on a *shelf* of its own.

    ``make`` turns pulled messages into the consumer's batch.

    The loop puts in and gives back, any thread takes out. The loop never waits for a thread, because that thread may be
    in a signal handler and wait for the loop.
    """

    __slots__ = ("_closed", "_lock", "_make", "_shelves")

    def __init__(self, make: Callable[[Pulled], Batch]) -> None:
        self._make = make
        self._shelves: deque[_Shelf[Batch]] = deque()
        # Reentrant, because a signal handler may close the consumer that it interrupted.
        self._lock = threading.RLock()
        self._closed = False

    @property
    def count(self) -> int:
        """How many messages."""
        # A deque is copied to a list in one step of the interpreter, whatever other threads do.
        return sum([shelf.left for shelf in list(self._shelves)])

    @property
    def oldest(self) -> float | None:
        """When the first of them was put in; None when there is none."""
        return next((shelf.put_at for shelf in list(self._shelves) if shelf.left), None)

    def put(self, pulled: Pulled, now: float) -> None:
        """Add messages to hand out."""
        self._shelves.append(_Shelf(pulled, now))

    def next(self, now: float, given: list[tuple[Batch, int]]) -> int:
        """Add the next message to ``given``, as its batch and row; return how many messages of its answer are left, or
        -1 when no message is here.

        ``given`` has the message before it leaves the stock, so an interrupted caller loses nothing (`put_back`).
        """
        with self._lock:
            while True:
                # Written out for speed: take the first shelf, if one of its messages may be handed out.
                shelf = self._shelves[0] if self._shelves else None
                if shelf is None or (row := shelf.row) >= shelf.count or now >= shelf.pulled.lease_ends:
                    if self._first(now) is None:
                        return -1
                    continue
                batch = shelf.batch
                if batch is None:
                    batch = shelf.batch = self._make(shelf.pulled)
                given.append((batch, row))
                if self._closed:
                    # A signal handler has just closed the consumer, and gave this message back.
                    given.clear()
                    return -1
                shelf.row = row = row + 1
                return shelf.count - row

    def take(self, most: int, now: float, given: list[Pulled]) -> bool:
        """Take out the next messages, at most ``most``, and add them to ``given`` as one; False when no message is
        here. They may be of several answers, but of one connection.

        ``given`` has them before they leave the stock, so an interrupted caller loses nothing: it puts them back
        (`put_back`). A message whose lease has ended is not handed out.
        """
        with self._lock:
            first = self._first(now)
            if first is None:
                return False
            taken, ends = first.upto(most)
            leaving = [(first, ends)]
            left = most - (ends - first.row)
            for shelf in islice(list(self._shelves), 1, None) if left else ():
                if not left or shelf.pulled.incarnation != taken.incarnation or now >= shelf.pulled.lease_ends:
                    break
                more, ends = shelf.upto(left)
                taken = taken.joined(more)
                leaving.append((shelf, ends))
                left -= ends - shelf.row
            given.append(taken)
            if self._closed:
                given.clear()
                return False
            for shelf, ends in leaving:
                shelf.row = ends
            return True

    def put_back(self, pulled: Pulled, now: float) -> None:
        """Take back messages that did not reach their caller: they are the next to be handed out. Those that have not
        left yet are still here.
        """
        with self._lock:
            first = self._first(now)
            if first is not None and first.pulled.incarnation == pulled.incarnation:
                here = first.rest.parts[0].pull_first
                at = next((at for at, part in enumerate(pulled.parts) if part.pull_first == here), len(pulled.parts))
                pulled = pulled._replace(parts=pulled.parts[:at])
            if pulled.parts:
                self._shelves.appendleft(_Shelf(pulled, now))

    def give_back_older(self, put_before: float) -> Handles | None:
        """Take out messages that were put in before ``put_before`` and are still here; return their handles, None while
        a thread takes something.
        """
        return self._give_back(lambda shelf: shelf.left if shelf.put_at <= put_before else 0)

    def give_back_last(self, count: int) -> Handles | None:
        """Take out the last messages, at most ``count``; as `give_back_older`."""
        left = self.count - count
        kept = 0

        def surplus(shelf: _Shelf[Batch]) -> int:
            nonlocal kept
            keep = max(0, min(shelf.left, left - kept))
            kept += keep
            return shelf.left - keep

        return self._give_back(surplus)

    def close(self) -> Handles:
        """Hand out nothing more; return the handles of the messages that are left."""
        with self._lock:
            self._closed = True
            left = [handle for shelf in self._shelves for handle in shelf.rest.handles]
            self._shelves.clear()
            return left

    def _first(self, now: float) -> _Shelf[Batch] | None:
        while self._shelves:
            shelf = self._shelves[0]
            if shelf.left and now < shelf.pulled.lease_ends:
                return shelf
            if shelf.left:
                log.warning("lease_ended_unused subject=%s messages=%d", shelf.pulled.subject, shelf.left)
            self._shelves.popleft()
        return None

    def _give_back(self, surplus: Callable[[_Shelf[Batch]], int]) -> Handles | None:
        if not self._lock.acquire(blocking=False):
            return None
        try:
            handles: Handles = []
            kept: deque[_Shelf[Batch]] = deque()
            for shelf in self._shelves:
                extra = surplus(shelf)
                keep, back = shelf.rest.cut(shelf.left - extra)
                handles += back.handles
                if extra:
                    shelf = _Shelf(keep, shelf.put_at)
                kept.append(shelf)
            self._shelves = kept
            return handles
        finally:
            self._lock.release()


class _Shelf(Generic[Batch]):
    """The messages of one answer to a PULL that are not handed out yet."""

    __slots__ = ("batch", "count", "pulled", "put_at", "row")

    def __init__(self, pulled: Pulled, put_at: float) -> None:
        self.pulled = pulled
        self.count = pulled.message_count
        self.put_at = put_at
        self.batch: Batch | None = None  # Once one of its messages was iterated over.
        self.row = 0  # The next one to hand out.

    @property
    def left(self) -> int:
        """How many messages."""
        return self.count - self.row

    def upto(self, most: int) -> tuple[Pulled, int]:
        """The next messages, at most ``most``, and the row behind them."""
        end = min(self.row + most, self.count)
        return (self.pulled if end - self.row == self.count else self.rest.cut(most)[0]), end

    @property
    def rest(self) -> Pulled:
        """The messages that are left."""
        return self.pulled.cut(self.row)[1] if self.row else self.pulled
