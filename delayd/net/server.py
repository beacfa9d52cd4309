"""The listening side: accepts connections up to a limit and gives all of them the same handler.

Invariant: after `close` has returned no connection is open and no handler is called again.

`LoopWatch` is a short timer that notes how late it was called (rule B2): a long turn of the loop delays every request,
and STATUS shows the longest wait, since the start and of the last minute. Nobody can be heard while the loop stands
still, because its process is stopped or its machine is paused. So whoever counts the silence of others is told of it,
before it judges anything (rule T5).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar

import uvloop

from delayd.address import Endpoint
from delayd.errors import DelaydError, TooManyConnections
from delayd.machine.clock import STALL_MS
from delayd.machine.operating import tell_left_out
from delayd.net.budget import BOUNDS, Bounds, Budget
from delayd.net.budget import connections_max as connections_of_this_process
from delayd.net.connection import RETRY_CONNECT_MS, Connection, Handler
from delayd.net.endpoint import Listening, listen
from delayd.net.timer import Ticks
from delayd.net.tokens import TokenBook
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestLimits

PLACES_KEPT_MAX = 64  # Kept for trusted peers when strangers have all other places; a quarter of all places at most.
REFUSED_MAX = 64  # Connections above the limit that are being told so; further ones are just ended.
LOOK_S = 1.0  # How often connections are looked at for deadlines.
SWITCH_INTERVAL_S = 0.0005  # A worker thread gives the interpreter back to the loop after this long.

R = TypeVar("R")
log = logging.getLogger(__name__)


class Server:
    """Accepts connections for a handler. ``unheard`` hears for how many ms nobody could be heard, because the loop
    stood still. ``book`` says whose token is over.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        limits: RequestLimits | None = None,
        bounds: Bounds = BOUNDS,
        unheard: Callable[[int], None] = lambda ms: None,
        book: TokenBook | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.budget = Budget(loop, lambda: self.connections, bounds.unfinished_bytes_max, bounds.untaken_bytes_max)
        self._loop = loop
        self._handler = handler
        self._limits = limits
        self._bounds = bounds
        wanted = bounds.connections_max
        self._connections_max = connections_of_this_process() if wanted is None else wanted
        self._places_kept = min(PLACES_KEPT_MAX, self._connections_max // 4)
        self._trusted = 0  # Connections that were trusted at the last look.
        self._refused = 0  # Connections above the limit that have not ended yet.
        self._watch = LoopWatch(loop, self._stood_still)
        # Finds out whether the loop stood still; a handler calls it before it judges by anybody's silence.
        self.look = self._watch.look
        self._unheard = unheard
        self.book = book
        self._looks: Ticks | None = None
        self._listening: Listening | None = None

    async def listen(self, endpoint: Endpoint) -> Endpoint:
        """Begin to accept; return the endpoint with its port, which the system chooses for port 0. BadSetting if it
        can't be used.
        """
        self._listening = await listen(endpoint, self._accept)
        bound = self._listening.endpoint
        if not bound.is_inside:  # A program is not told of the servers within it.
            log.info("listening host=%s port=%d connections_max=%d", bound.host, bound.port, self._connections_max)
        self._watch.start()
        self._looks = Ticks(self._loop, LOOK_S, self._look)
        return bound

    def status(self) -> Head:
        """The fields of STATUS about a server's connections and its loop."""
        return {
            "connections": len(self.connections),
            "connections_max": self._connections_max,
            "loop_wait_ms_max": self._watch.wait_ms_max,
            "loop_wait_ms_max_minute": self._watch.wait_ms_max_minute,
        }

    def stop_accepting(self) -> None:
        """Take no further connection; open ones go on."""
        if self._listening is not None:
            self._listening.close()

    async def close(self) -> None:
        """Take no further connection, let answers leave, and end every connection, each with a last word."""
        self.stop_accepting()
        self._watch.close()
        if self._looks is not None:
            self._looks.close()
        standing = list(self.connections)
        for connection in standing:
            connection.leave()
        # This wait is bounded: each connection is aborted CLOSE_MS_MAX after its close.
        await asyncio.gather(*(connection.closed for connection in standing))

    def _accept(self) -> Connection:
        if len(self.connections) >= self._connections_max:
            return self._refuse()
        connection = Connection(self._handler, bounds=self._bounds, limits=self._limits, budget=self.budget)
        connection.must_prove = len(self.connections) - self._trusted >= self._connections_max - self._places_kept
        self.connections.add(connection)
        connection.closed.add_done_callback(lambda _: self.connections.discard(connection))
        return connection

    def _refuse(self) -> Connection:
        def ended(_: asyncio.Future[None]) -> None:
            self._refused -= 1

        self._refused += 1
        refused = Connection(_Refusing(self._connections_max, told=self._refused <= REFUSED_MAX))
        refused.closed.add_done_callback(ended)
        return refused

    def _look(self) -> None:
        self._watch.look()
        if self._listening is not None:
            self._listening.look()
        if self.book is not None:
            self.book.look(self.connections)
        now = self._loop.time()
        for connection in list(self.connections):
            connection.look(now)
        self._trusted = sum(connection.trusted for connection in self.connections)
        tell_left_out()

    def _stood_still(self, seconds: float) -> None:
        for connection in self.connections:
            connection.unheard(seconds)
        ms = int(seconds * 1000)
        if ms >= STALL_MS:
            log.info("stood_still ms=%d", ms)
        self._unheard(ms)


def run(main: Callable[[], Coroutine[object, object, R]]) -> R:
    """Run a server's main coroutine on uvloop, with short turns for other threads and a quiet collector."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(main())


class _Refusing:
    """Handles a connection above the limit: it tells the peer so and ends the connection."""

    def __init__(self, connections_max: int, *, told: bool) -> None:
        self._connections_max = connections_max
        self._told = told

    def connected(self, connection: Connection) -> None:
        if not self._told:
            connection.abort()
            return
        connection.refuse(
            TooManyConnections(
                f"this server has {self._connections_max} connections and takes no more; close some",
                retry_after_ms=RETRY_CONNECT_MS,
            )
        )

    def received(self, connection: Connection, frame: Frame) -> None:
        """Do nothing: nothing is read from a connection that was closed at its start."""

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Do nothing: the server's handler never knew of it."""

    def crashed(self, error: Exception) -> None:
        """Raise the error: a refusal runs none of the server's code."""
        raise error


# The measured wait may be too short by up to this; twenty wake-ups a second cost a thousandth of a processor, and all
# that the loop does again and again comes with them.
TICK_S = 0.05
STALL_S = 0.1  # A timer that is later than this by so much means that the loop stood still.
PART_S = 30.0  # The last minute is two parts, the present one and the one before: never less than half a minute.

# By `clock_gettime`, which a program that freezes its time does not freeze. It is asked for each piece that arrives.
_now_s = partial(time.clock_gettime, time.CLOCK_MONOTONIC)


class LoopWatch:
    """Measures one loop, from `start` to `close`. ``stood_still`` hears for how many seconds it stood still."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, stood_still: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._loop = loop
        self._stood_still = stood_still
        self._longest_s = 0.0
        self._parts_s = [0.0, 0.0]
        self._part_ends = 0.0
        self._due = math.inf
        self._ticks: Ticks | None = None

    @property
    def wait_ms_max(self) -> int:
        """The longest wait since the start."""
        return int(self._longest_s * 1000)

    @property
    def wait_ms_max_minute(self) -> int:
        """The longest wait of the last minute, or of half of it at least."""
        return int(max(self._parts_s) * 1000)

    def start(self) -> None:
        """Begin to measure."""
        self._part_ends = _now_s() + PART_S
        self._ticks = Ticks(self._loop, TICK_S, self._tick)
        self._expect()

    def look(self) -> None:
        """Tell of a stall now, if there was one: the timer may come only after what waited for the loop meanwhile."""
        now = _now_s()
        if now - self._due > STALL_S:
            self._note(now)

    def close(self) -> None:
        """Measure no more."""
        self._due = math.inf
        if self._ticks is not None:
            self._ticks.close()

    def _expect(self) -> None:
        assert self._ticks is not None
        self._due = _now_s() + self._ticks.due_s - self._loop.time()

    def _tick(self) -> None:
        now = _now_s()
        if now >= self._part_ends:
            self._parts_s = [0.0, self._parts_s[0]]
            self._part_ends = now + PART_S
        self._note(now)
        self._expect()

    def _note(self, now: float) -> None:
        late_s, self._due = now - self._due, now
        self._parts_s[0] = max(self._parts_s[0], late_s)
        self._longest_s = max(self._longest_s, late_s)
        if late_s > STALL_S:
            self._stood_still(late_s)
