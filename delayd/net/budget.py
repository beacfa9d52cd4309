"""Budget: what the connections of one server may use together: bytes that they make it hold, and their share of each
turn.

Invariant: one turn of the loop begins at most QUEUED_UNITS and FRESH_UNITS of requests, and at most SHARE_UNITS of one
connection. A request that took longer than its type and size suggest counts for the time that it took. Requests beyond
a connection's share wait in a queue. Cheap ones go first: a connection goes to the back if its next request may cost
much, or if it has used more than its share. So a flood never delays a connection that asks one thing (rule B2). Bytes
of unfinished frames, and of answers that wait to be taken, are bounded over all connections: above the bound, the
connection is ended that has held the most of it for the longest (rule B1). Trusted peers are servers and operators of
this cluster, and are ended last.

    bytes come ──▶ frames begun, up to the share ──▶ rest: in the queue, and the socket not read ──▶ next turn ──▶ …

How many connections there may be follows from the limit of open files. Invariant: connections never take the files that
logs, checkpoints and the state need, so idle clients can't end a server.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from delayd.config import CONNECTION_BYTES_MAX
from delayd.errors import DelaydError, SlowDown
from delayd.wire.frame import BODY_BYTES_MAX
from delayd.wire.requests import Cost, RequestType

UNFINISHED_BYTES_MAX = 256 << 20  # All frames under way: sixteen SENDs of the largest size at the same moment.
UNTAKEN_BYTES_MAX = 256 << 20  # All answers that peers have not read: sixteen PULLs of the largest size.
QUEUED_UNITS = 64  # A turn takes this much from the queue; a unit is a plain request, some 10 us.
FRESH_UNITS = 256  # A turn takes this much from connections that had nothing in the queue.
# A connection pays its debt off when it was served 64 times, so that none stays in debt for long.
DEBT_UNITS_MAX = 1_024
SHARE_UNITS = 16  # One connection gets this much; if it is alone in the queue it gets everything.
UNIT_BYTES = 16 << 10  # A request costs one unit for each of these bytes: checking them takes as long as a PING.
# It costs one unit for each 20 us that it took, if that is more: its answer may be far larger than itself.
UNITS_A_S = 50_000
LISTING_UNITS = QUEUED_UNITS  # A listing has a thousand rows: one listing is a turn.
STATUS_UNITS = SHARE_UNITS  # STATUS reads all counters.
# A turn begins with at least this much: most turns use only a few units and need no renewal.
RENEW_UNITS = FRESH_UNITS // 2
RETRY_MS = 1_000

MAY_BE_HEAVY = frozenset(kind for kind in RequestType if kind.terms.cost >= Cost.HEAVY)

log = logging.getLogger(__name__)


class Member(Protocol):
    """A connection, as its budget sees it."""

    trusted: bool

    def go_on(self) -> None:
        """Begin the requests that waited for their turn."""

    def unfinished_since(self) -> tuple[int, float]:
        """Bytes of an unfinished frame, and when it began, by the loop's clock."""

    def untaken_since(self) -> tuple[int, float]:
        """Bytes of answers that the peer does not take, and since when."""

    def end(self, error: DelaydError) -> None:
        """End the connection, and free at once the bytes that it holds."""


# By type of frame: the units that it costs besides its bytes; any other type costs one.
_UNITS = {Cost.COUNTERS: STATUS_UNITS, Cost.LISTING: LISTING_UNITS}
UNITS_OF_TYPE = {int(kind): _UNITS[kind.terms.cost] for kind in RequestType if kind.terms.cost in _UNITS}


def units_of(frame_type: int, frame_bytes: int) -> int:
    """The least that a request costs of a turn; one that takes longer costs more."""
    return UNITS_OF_TYPE.get(frame_type, 1) + frame_bytes // UNIT_BYTES


class Budget:
    """Shared by all connections of a server; belongs to the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        members: Callable[[], Collection[Member]],
        unfinished_bytes_max: int = UNFINISHED_BYTES_MAX,
        untaken_bytes_max: int = UNTAKEN_BYTES_MAX,
    ) -> None:
        self.unfinished_bytes = 0
        self.untaken_bytes = 0
        self._loop = loop
        self._members = members
        self._unfinished_bytes_max = unfinished_bytes_max
        self._untaken_bytes_max = untaken_bytes_max
        # The units that all connections together may still use; no request begins while this is below 1.
        self.left = FRESH_UNITS
        self.share = SHARE_UNITS  # The units that one connection may use at this moment, as far as `left` allows.
        self._light: deque[Member] = deque()
        self._heavy: deque[Member] = deque()
        self._turn_due = False

    def used(self, units: int) -> None:
        """Note that a connection has used this many units."""
        self.left -= units
        if self.left < RENEW_UNITS:
            self._turn_soon()

    def wait(self, member: Member, *, heavy: bool) -> None:
        """Call `go_on` when it is this connection's turn; call this only once per turn."""
        (self._heavy if heavy else self._light).append(member)
        self._turn_soon()

    def unfinished(self, by: int) -> None:
        """Note that unfinished frames have grown or shrunk."""
        self.unfinished_bytes += by
        while by > 0 and self.unfinished_bytes > self._unfinished_bytes_max:
            why = "unfinished requests take all the room that this server has for them; send again"
            if not self._end_one(lambda member: member.unfinished_since(), why):
                return

    def untaken(self, by: int) -> None:
        """Note that answers that wait to be taken have grown or shrunk."""
        self.untaken_bytes += by
        while by > 0 and self.untaken_bytes > self._untaken_bytes_max:
            why = "answers that are not taken fill all the room that this server has for them; read them as they come"
            if not self._end_one(lambda member: member.untaken_since(), why):
                return

    def _end_one(self, held: Callable[[Member], tuple[int, float]], why: str) -> bool:
        now = self._loop.time()

        def burden(member: Member) -> tuple[bool, float]:
            held_bytes, since = held(member)
            # A moment is added, so that among connections that began just now the largest is ended.
            return not member.trusted, held_bytes * (now - since + 0.001)

        worst = max(self._members(), key=burden, default=None)
        if worst is None or not held(worst)[0]:
            return False
        worst.end(SlowDown(why, retry_after_ms=RETRY_MS))
        return True

    def _turn_soon(self) -> None:
        """Renew the units, and serve the queue, in the next turn of the loop."""
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        self.left = QUEUED_UNITS
        # If the server has nothing else to do, a client that outruns it is served as fast as possible.
        self.share = max(SHARE_UNITS, QUEUED_UNITS // max(1, len(self._light) + len(self._heavy)))
        for _ in range(len(self._light)):
            if self.left <= 0:
                break
            self._light.popleft().go_on()
        # However many light connections there are, a heavy one gets its turn.
        self.left = max(self.left, 1)
        for _ in range(len(self._heavy)):
            if self.left <= 0:
                break
            self._heavy.popleft().go_on()
        self.left = FRESH_UNITS
        self.share = SHARE_UNITS
        if self._light or self._heavy:
            self._turn_soon()


REQUESTS_MAX = 1024  # Unanswered requests of one connection: beyond, nothing is read until answers have left.


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one server: first those of each connection, then those of all connections together."""

    body_bytes_max: int = BODY_BYTES_MAX
    requests_max: int = REQUESTS_MAX
    in_flight_bytes_max: int = CONNECTION_BYTES_MAX  # Four batches at their limit; the last one may go beyond it.
    connections_max: int | None = None  # None: as many as the process may open files for.
    unfinished_bytes_max: int = UNFINISHED_BYTES_MAX
    untaken_bytes_max: int = UNTAKEN_BYTES_MAX


BOUNDS = Bounds()


CONNECTIONS_MAX = 4096  # Connections of one server, and at most half of the open files that it is allowed.
CONNECTIONS_MIN = 16
# 512 that a checkpoint holds open, 96 others that were used last, and those of the state and the process itself.
FILES_KEPT_MIN = 640
# Files have as many descriptors as connections, and then they are never short.
FILES_MIN = 2 * CONNECTIONS_MAX


def raise_file_limit() -> int:
    """Raise this process's limit to the hard one and return it; the lower soft limit is for programs that use
    select.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_max() -> int:
    """The number of connections for this process's limit: half of the files, unless that leaves too few for the
    rest.
    """
    return connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def connections_for(files: int) -> int:
    """As `connections_max`, for a given limit."""
    kept = max(FILES_KEPT_MIN, files // 2)
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, files - kept))
