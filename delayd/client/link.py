"""Link: the connection to one server, which is opened when it is needed, and opened again after it ended.

Invariant: a connection is handed out only after the server behind it has said which log it holds, so a batch that went
to one log is never repeated to another at the same address (rule I3). A meta server says which cluster it is of, and a
client that has met one cluster speaks to no other.
"""

from __future__ import annotations

import asyncio
import logging

from delayd.client.home_clock import clock_of
from delayd.client.instants import monotonic_us
from delayd.client.retry import Backoff
from delayd.errors import AlreadyClosed, ConnectionLost, DelaydError, RequestTimedOut, ServerUnavailable
from delayd.net.connection import Connection, connect
from delayd.wire.frame import Head
from delayd.wire.heads import need_instant, need_u64
from delayd.wire.requests import RequestType

GREETING_MS_MAX = 5_000.0  # A server that accepts connections but answers nothing counts as away.
ALIVE_EVERY_MS = 5_000.0  # This also keeps the sample of the server's clock fresh.
ALIVE_MS_MAX = 10_000.0  # Longer than any server's loop may stall; after it the connection counts as dead.

log = logging.getLogger(__name__)


class ServerLink:
    """One server; belongs to a loop, and any number of tasks may ask for its connection at once."""

    def __init__(self, host: str, port: int, log_id: int | None = None) -> None:
        self.log_id = log_id
        self.cluster_id = 0  # The first one that the server named; 0 while it has named none.
        self.clock = clock_of(host).server_clock(f"{host}:{port}")
        self.failing = False  # The last try to connect failed.
        self.failure: ServerUnavailable | None = None  # Why it did.
        self.left_ms = 0  # The server's clock when it was heard last on the connection before.
        self._heard_ms = 0  # The same on this one.
        self.heard_at = 0.0  # When the server last answered anything, on the loop's clock.
        self._address = (host, port)
        self._connection: Connection | None = None
        self._attempt: asyncio.Task[Connection] | None = None
        self._alive: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._not_before = 0.0
        self._loop = asyncio.get_running_loop()

    @property
    def address(self) -> str:
        """The address as users write it."""
        return f"{self._address[0]}:{self._address[1]}"

    @property
    def standing(self) -> Connection | None:
        """The connection, if there is one now."""
        connection = self._connection
        return connection if connection is not None and connection.is_open else None

    @property
    def connecting(self) -> bool:
        """Whether a try to connect is under way."""
        return self._attempt is not None

    def move(self, host: str, port: int) -> None:
        """Use a new address of the server; requests under way stay on their connection."""
        if (host, port) != self._address:
            self._address = (host, port)
            self._backoff.reset()
            self._not_before = 0.0
            if self._connection is not None:
                self._connection.close()

    async def connection(self) -> Connection:
        """The connection, made if need be, after the back-off of earlier failures.

        Raises:
            ServerUnavailable: this try failed; nothing was sent.
        """
        standing = self.standing
        if standing is not None:
            return standing
        # If one caller gives up, the try must go on for the others.
        return await asyncio.shield(self.knock())

    def knock(self) -> asyncio.Task[Connection]:
        """The try to connect that is under way; one begins if there is none. Only while no connection stands."""
        if self._attempt is None:
            self._attempt = self._loop.create_task(self._connect())
            self._attempt.add_done_callback(self._attempted)
        return self._attempt

    def hear(self, asked_us: int, head: Head) -> None:
        """Take the clock of an answer; ``asked_us``: when its request left."""
        self.heard_at = self._loop.time()
        self.clock.hear(asked_us, monotonic_us(), head)
        self._heard_ms = need_instant(head, "now_ms") if "now_ms" in head else self._heard_ms

    def heard(self) -> None:
        """Note that the server has answered, whatever it said."""
        self.heard_at = self._loop.time()

    async def disconnect(self) -> None:
        """End the connection, so that the server forgets the requests on it; the next use opens another."""
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed

    async def close(self) -> None:
        """Let written frames leave, and end the connection for good."""
        for task in (self._alive, self._attempt):
            if task is not None:
                task.cancel()
        await self.disconnect()

    async def _connect(self) -> Connection:
        wait_s = self._not_before - self._loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        try:
            connection = await connect(*self._address)
            self.left_ms = self._heard_ms
            try:
                await self._greet(connection)
            except BaseException:
                connection.abort()
                raise
        except ServerUnavailable:
            self._failed()
            raise
        except RequestTimedOut as error:
            self._failed()
            # Only the greeting was asked, so no request can have been served.
            raise ServerUnavailable(f"{self.address} takes connections and answers nothing: it hangs") from error
        except AlreadyClosed:
            raise  # The home of this client is in this process, and was closed: it never comes back.
        except DelaydError as error:
            self._failed()
            raise ServerUnavailable(f"{self.address} takes no requests: {error.message}") from error
        self.failing = False
        self._backoff.reset()
        self._connection = connection
        if self._alive is not None:
            self._alive.cancel()
        self._alive = self._loop.create_task(self._keep_alive(connection))
        return connection

    async def _greet(self, connection: Connection) -> None:
        asked_us = monotonic_us()
        answer = await connection.request(RequestType.STATUS, {}, timeout_ms=GREETING_MS_MAX)
        self.hear(asked_us, answer.head)
        cluster_id = need_u64(answer.head, "cluster_id") if "cluster_id" in answer.head else 0
        if self.cluster_id and cluster_id and cluster_id != self.cluster_id:
            raise ServerUnavailable(
                f"{self.address} belongs to another cluster now: {cluster_id:016x} instead of {self.cluster_id:016x}"
            )
        self.cluster_id = self.cluster_id or cluster_id
        if self.log_id is None:
            return
        log_id = need_u64(answer.head, "log_id")
        if log_id != self.log_id:
            raise ServerUnavailable(
                f"{self.address} is another server now: its log is {log_id:016x} instead of {self.log_id:016x}"
            )

    def _failed(self) -> None:
        if not self.failing:
            log.warning("server_unavailable address=%s", self.address)
        self.failing = True
        self._not_before = self._loop.time() + self._backoff.next_ms() / 1000

    def _attempted(self, attempt: asyncio.Task[Connection]) -> None:
        self._attempt = None
        if not attempt.cancelled():
            # The caller may have given up; an exception that nobody fetches would be logged as a bug.
            error = attempt.exception()
            self.failure = error if isinstance(error, ServerUnavailable) else None

    async def _keep_alive(self, connection: Connection) -> None:
        # If a server hangs, or a network drops everything, the connection stays open; so PINGs find that out.
        while connection.is_open:
            await asyncio.sleep(ALIVE_EVERY_MS / 1000)
            asked_us = monotonic_us()
            try:
                answer = await connection.request(RequestType.PING, {}, timeout_ms=ALIVE_MS_MAX)
                self.hear(asked_us, answer.head)
            except DelaydError as error:
                if connection.is_open:
                    log.warning("server_silent address=%s code=%s", self.address, error.code)
                    connection.abort()


def unreadable(connection: Connection, error: DelaydError) -> ConnectionLost:
    """The error for an answer that can't be read: nobody knows what it says, and the connection is ended.

    It must not be treated as a refusal, because the request may have been served (rule I3).
    """
    connection.abort()
    why = f"{connection.peer} gave an answer that can't be read ({error.message})"
    return ConnectionLost(f"{why}; the request may have been served", sent=True)
