"""Endpoint: how one is dialled, and how it is listened on.

Invariant: nothing else opens a connection or a port. Callers hand an `Endpoint` on as one value; whether it is reached
over TCP or lies within this process (`delayd.net.inside`) is decided here alone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from delayd.address import Endpoint
from delayd.errors import BadSetting, ServerUnavailable
from delayd.net import inside

ACCEPTS_A_TURN = 8  # The loop accepts one connection a turn for each listening descriptor that it watches.
ACCEPT_QUEUE = 1024  # Connections that wait to be accepted, as after a restart when all clients come back.
_LISTEN_FAULTS = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}

P = TypeVar("P", bound=asyncio.BufferedProtocol)


async def dial(endpoint: Endpoint, make: Callable[[], P], timeout_ms: float) -> P:
    """Connect a new protocol to a server.

    Raises:
        ServerUnavailable: it can't be reached in time; nothing was sent to it.
        AlreadyClosed: it belongs to a home within this process that was closed.
    """
    if endpoint.is_inside:
        protocol = make()
        inside.connect(endpoint, protocol)
        return protocol
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            _, protocol = await loop.create_connection(make, endpoint.host, endpoint.port)
    except (OSError, TimeoutError, UnicodeError) as error:
        # The resolver encodes a name before it looks it up, and a label may be too long for that.
        why = str(error) or f"no answer within {timeout_ms:.0f} ms"
        raise ServerUnavailable(f"no connection to {endpoint} ({why}); is the server running?") from error
    return protocol


class Listening:
    """What accepts connections at an endpoint, until `close`."""

    def __init__(self, endpoint: Endpoint, listeners: Sequence[asyncio.Server | inside.Listener]) -> None:
        self.endpoint = endpoint  # With the port that was taken.
        self._listeners = listeners

    def close(self) -> None:
        """Accept no further connection; open ones go on."""
        for listener in self._listeners:
            listener.close()


async def listen(endpoint: Endpoint, accept: Callable[[], asyncio.BufferedProtocol]) -> Listening:
    """Accept connections on the running loop; the system chooses the port for port 0.

    Raises:
        BadSetting: the endpoint can't be used.
    """
    if endpoint.is_inside:
        own = inside.listen(endpoint, accept)
        return Listening(own.endpoint, [own])
    loop = asyncio.get_running_loop()
    try:
        first = await loop.create_server(accept, endpoint.host, endpoint.port, backlog=ACCEPT_QUEUE)
    except OSError as error:
        if error.errno not in _LISTEN_FAULTS and not isinstance(error, socket.gaierror):
            raise
        why = error.strerror or str(error)
        raise BadSetting(f"{endpoint} can't be listened on ({why}); choose another host or port") from error
    listeners = [first]
    listening = Listening(endpoint._replace(port=first.sockets[0].getsockname()[1]), listeners)
    try:
        for line in first.sockets:
            # After a restart all clients come back and each asks for much, so turns are long; with one accept a turn
            # the last client would wait too long.
            for _ in range(ACCEPTS_A_TURN - 1):
                again = socket.socket(fileno=os.dup(line.fileno()))
                listeners.append(await loop.create_server(accept, sock=again, backlog=ACCEPT_QUEUE))
    except OSError:
        # Descriptors ran out. Nobody has this listener yet, so nobody else could free its port.
        listening.close()
        raise
    return listening
