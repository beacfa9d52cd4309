"""The listening side: accepts connections up to a limit and gives all of them the same handler.

Invariant: after `close` has returned no connection is open and no handler is called again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import TypeVar

import uvloop

from delayd.errors import BadSetting, DelaydError, TooManyConnections
from delayd.net.connection import IN_FLIGHT_BYTES_MAX, REQUESTS_MAX, Connection, Handler
from delayd.wire.frame import BODY_BYTES_MAX, Frame

CONNECTIONS_MAX = 4096  # Each costs up to one chunk of 256 KiB to receive into: 1 GiB if all of them talk.
ACCEPT_QUEUE = 1024  # Connections that wait to be accepted, as after a restart when all clients come back.
SWITCH_INTERVAL_S = 0.0005  # A worker thread gives the interpreter back to the loop after this long.
RETRY_CONNECT_MS = 1_000

_LISTEN_FAULTS = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}

R = TypeVar("R")
log = logging.getLogger(__name__)


class Server:
    """Accepts connections for a handler."""

    def __init__(
        self,
        handler: Handler,
        *,
        body_bytes_max: int = BODY_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX,
        requests_max: int = REQUESTS_MAX,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:
        self.connections: set[Connection] = set()
        self._handler = handler
        self._body_bytes_max = body_bytes_max
        self._connections_max = connections_max
        self._requests_max = requests_max
        self._in_flight_bytes_max = in_flight_bytes_max
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin to accept; returns the port, which 0 leaves to the system. BadSetting if it can't be had."""
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._accept, host, port, backlog=ACCEPT_QUEUE)
        except OSError as error:
            if error.errno not in _LISTEN_FAULTS and not isinstance(error, socket.gaierror):
                raise
            why = error.strerror or str(error)
            raise BadSetting(f"{host}:{port} can't be listened on ({why}); choose another host or port") from error
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def stop_accepting(self) -> None:
        """Take no further connection; those that stand go on."""
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Take no further connection, let what was answered leave, and end every connection."""
        self.stop_accepting()
        standing = list(self.connections)
        for connection in standing:
            connection.close()
        # Each connection bounds this wait: it is aborted CLOSE_MS_MAX after its close.
        await asyncio.gather(*(connection.closed for connection in standing))

    def _accept(self) -> Connection:
        full = len(self.connections) >= self._connections_max
        connection = Connection(
            _Refusing(self._connections_max) if full else self._handler,
            body_bytes_max=self._body_bytes_max,
            requests_max=self._requests_max,
            in_flight_bytes_max=self._in_flight_bytes_max,
        )
        self.connections.add(connection)
        connection.closed.add_done_callback(lambda _: self.connections.discard(connection))
        return connection


def run(main: Callable[[], Coroutine[object, object, R]]) -> R:
    """Run a server's main coroutine on uvloop, with short turns for other threads and a quiet collector."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(main())


class _Refusing:
    """Handles a connection above the limit: it is told so and ended."""

    def __init__(self, connections_max: int) -> None:
        self._connections_max = connections_max

    def connected(self, connection: Connection) -> None:
        connection.refuse(
            TooManyConnections(
                f"this server has {self._connections_max} connections and takes no more; close some",
                retry_after_ms=RETRY_CONNECT_MS,
            )
        )

    def received(self, connection: Connection, frame: Frame) -> None:
        """Nothing is read from a connection that was closed at its start."""

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Its handler never knew of it."""

    def crashed(self, error: Exception) -> None:
        """A refusal runs nothing of the server."""
        raise error
