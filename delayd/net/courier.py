"""The courier: it takes batches that live on elsewhere to delay servers, until they have taken them: messages that come
again to their group (rule Q2), and those of a server that is drained (docs/drain.md).

One task a delay server lives as long as there is something for it. It sends batches in the order of their numbers, a
few at a time, and always to the same delay server. While that is away it tries again, with back-off.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from delayd.errors import BadRequest, ConnectionLost, DelaydError, ServerUnavailable, error_by_code
from delayd.machine.operating import LogLimit, Wait, WaitKind
from delayd.net.connection import Connection
from delayd.net.entry import connect
from delayd.net.trust import Membership
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    ERROR_TEXT_BYTES_MAX,
    need_maps,
    need_str,
    need_u64,
)
from delayd.wire.meta import ServerInfo
from delayd.wire.requests import RequestType

UNDER_WAY = 4  # Batches that a delay server has not answered for: their disk writes overlap with the way of the next.
CONNECT_MS = 2_000.0
ANSWER_MS = 30_000.0
AWAY_S_MIN, AWAY_S_MAX = 0.05, 2.0  # Between two tries to reach a delay server that is away.
REFUSED_S = 5.0  # A delay server that refuses a batch by name may take it later, when its disk or a quota has room.

log = logging.getLogger(__name__)
limited = LogLimit(log)


L = TypeVar("L")


class Letters(Protocol[L]):
    """What is to be sent: `realtime.retries.Retries` and `delayd.delay.ending.drain.Drain`."""

    on_new: Callable[[int], None]

    def origins(self) -> list[int]:
        """The delay servers for which there is something."""

    def waiting(self, origin: int) -> Iterator[L]:
        """What is to be sent to one, in order."""

    def batch_of(self, undone: L) -> bytes:
        """The batch; DelaydError: try later."""

    def accepted(self, undone: L, result: Head) -> None:
        """The delay server has taken it; ``result`` is that of its answer."""

    def unread(self, undone: L, error: DelaydError) -> None:
        """Its batch can't be made now."""

    def refused(self, undone: L, error: DelaydError) -> None:
        """The delay server has refused it by name."""


class ServerDirectory(Protocol):
    """Where delay servers are: `delayd.net.registration.Registration`."""

    async def servers(self, role: str | None = None) -> list[ServerInfo]:
        """The servers of a role that meta knows. Raises DelaydError while it is away."""


class CourierTerms(NamedTuple):
    """How letters are sent, and what people call them."""

    request: RequestType
    away: WaitKind  # What waits while a delay server is away.


class Courier(Generic[L]):
    """Sends what waits; belongs to the loop. ``after`` is called when something was told to the core."""

    def __init__(
        self,
        letters: Letters[L],
        terms: CourierTerms,
        meta: ServerDirectory,
        membership: Membership,
        after: Callable[[], None],
    ) -> None:
        self._letters = letters
        self._terms = terms
        self._meta = meta
        self._membership = membership
        self._after = after
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._news: dict[int, asyncio.Event] = {}
        self._away: dict[int, str] = {}  # Why a delay server can't be reached.

    def start(self) -> None:
        """Begin with what waits already."""
        self._letters.on_new = self._new
        for origin in self._letters.origins():
            self._new(origin)

    async def close(self) -> None:
        """Stop; what was not taken is sent again in the next life."""
        self._letters.on_new = lambda origin: None
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def waits(self) -> Iterator[Wait]:
        """List the delay servers that are away while messages are to come again through them."""
        for origin, why in self._away.items():
            yield self._terms.away.wait(why, origin=f"{origin:016x}")

    def _new(self, origin: int) -> None:
        self._news.setdefault(origin, asyncio.Event()).set()
        if origin not in self._tasks:
            task = self._tasks[origin] = asyncio.get_running_loop().create_task(self._serve(origin))
            task.add_done_callback(partial(self._ended, origin))

    def _ended(self, origin: int, task: asyncio.Task[None]) -> None:
        del self._tasks[origin]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "a bug in the courier", "exception": error})
        elif next(self._letters.waiting(origin), None) is not None:
            self._new(origin)  # It came while the task ended.

    async def _serve(self, origin: int) -> None:
        """Take all that waits to one delay server."""
        failures = 0
        connection: Connection | None = None
        try:
            while next(self._letters.waiting(origin), None) is not None:
                self._news[origin].clear()
                try:
                    if connection is None or not connection.is_open:
                        connection = await self._connect(origin)
                    moved = await self._send_all(connection, origin)
                except DelaydError as error:
                    moved = False
                    if self._away.get(origin) is None:
                        limited.warning(
                            "courier_waits", "courier_waits delay_server=%016x reason=%r", origin, error.message
                        )
                    self._away[origin] = error.message
                    # Realtime servers that lost it at the same moment should not all come back at the same moment.
                    wait_s = min(AWAY_S_MAX, AWAY_S_MIN * 2 ** min(failures, 10))
                    await asyncio.sleep(wait_s * (0.5 + 0.5 * random.random()))
                    failures += 1
                    continue
                self._away.pop(origin, None)
                failures = 0
                if not moved:
                    # All that is left was refused, or can't be read: it waits, unless there is something new.
                    await _either(self._news[origin], REFUSED_S)
        finally:
            self._away.pop(origin, None)
            if connection is not None:
                connection.close()

    async def _connect(self, origin: int) -> Connection:
        """Connect to a delay server, and prove that this server is of its cluster."""
        found = [info.server for info in await self._meta.servers("delay") if info.server.log_id == origin]
        if not found:
            raise ServerUnavailable(f"meta knows no delay server {origin:016x}")
        connection = await connect(found[0].endpoint, timeout_ms=CONNECT_MS)
        try:
            proved = await self._membership.prove(connection, CONNECT_MS)
            if proved.log_id != origin:
                raise ServerUnavailable(f"another server answers where the delay server {origin:016x} was")
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _send_all(self, connection: Connection, origin: int) -> bool:
        """Send what waits now; return whether any of it was taken.

        Raises:
            DelaydError: the delay server does not answer.
        """
        left = self._letters.waiting(origin)
        under_way: dict[asyncio.Future[Frame], L] = {}
        moved = False
        try:
            while True:
                while len(under_way) < UNDER_WAY and (undone := next(left, None)) is not None:
                    try:
                        batch = self._letters.batch_of(undone)
                    except DelaydError as error:
                        # The file with its messages can't be read now; others are sent meanwhile.
                        self._letters.unread(undone, error)
                        continue
                    under_way[connection.request(self._terms.request, {}, [batch], ANSWER_MS)] = undone
                if not under_way:
                    return moved
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for answered in done:
                    moved |= self._answered(under_way.pop(answered), answered.result(), origin)
                self._after()
        finally:
            for answered in under_way:
                answered.cancel()

    def _answered(self, undone: L, answer: Frame, origin: int) -> bool:
        if need_u64(answer.head, "log_id") != origin:
            raise ConnectionLost("another delay server has answered", sent=True)
        results = need_maps(answer.head, "results")
        if len(results) != 1:
            raise BadRequest(f"{len(results)} results came for one batch")
        error = _refusal(results[0])
        if error is None:
            self._letters.accepted(undone, results[0])
            return True
        self._letters.refused(undone, error)
        return False


def _refusal(result: Head) -> DelaydError | None:
    if "error" not in result:
        return None
    return error_by_code(need_str(result, "error"), need_str(result, "message", ERROR_TEXT_BYTES_MAX), 0, {})


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, and not longer than so."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
