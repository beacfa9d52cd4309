"""Endpoint: how one is dialled, and how it is listened on.

Invariant: nothing else opens a connection or a port. Callers hand an `Endpoint` on as one value; whether it is reached
over TCP, with TLS (`delayd.net.tls`) or without, or lies within this process (`delayd.net.inside`) is decided here
alone.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from delayd.address import OPEN, Endpoint, Tls
from delayd.errors import BadSetting, ServerUnavailable
from delayd.net import inside
from delayd.net.tls import TlsEnd, TlsGate, check_files, dialling_context, not_encrypted

ACCEPTS_A_TURN = 8  # The loop accepts one connection a turn for each listening descriptor that it watches.
ACCEPT_QUEUE = 1024  # Connections that wait to be accepted, as after a restart when all clients come back.
_LISTEN_FAULTS = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES}

P = TypeVar("P", bound=asyncio.BufferedProtocol)


async def dial(endpoint: Endpoint, make: Callable[[], P], timeout_ms: float) -> P:
    """Connect a new protocol to a server.

    Raises:
        ServerUnavailable: it can't be reached in time, or is not who it should be; nothing was sent to it.
        BadSetting: the files for TLS can't be used.
        AlreadyClosed: it belongs to a home within this process that was closed.
    """
    if endpoint.is_inside:
        protocol = make()
        inside.connect(endpoint._replace(access=OPEN), protocol)
        return protocol
    loop = asyncio.get_running_loop()
    tls = endpoint.access.tls
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            if tls is not None:
                return await _dial_tls(endpoint, tls, make)
            _, protocol = await loop.create_connection(make, endpoint.host, endpoint.port)
    except (OSError, TimeoutError, UnicodeError) as error:
        # The resolver encodes a name before it looks it up, and a label may be too long for that.
        why = str(error) or f"no answer within {timeout_ms:.0f} ms"
        raise ServerUnavailable(f"no connection to {endpoint} ({why}); is the server running?") from error
    return protocol


async def _dial_tls(endpoint: Endpoint, tls: Tls, make: Callable[[], P]) -> P:
    loop = asyncio.get_running_loop()
    context = dialling_context(tls)
    shaken: asyncio.Future[Exception | None] = loop.create_future()

    def ended(end: TlsEnd[P], error: Exception | None) -> None:
        if not shaken.done():
            shaken.set_result(error)

    def over() -> TlsEnd[P]:
        return TlsEnd(make(), context, ended, name=tls.name or endpoint.host, cert=tls.cert)

    transport, end = await loop.create_connection(over, endpoint.host, endpoint.port)
    try:
        failed = await shaken
    except BaseException:
        transport.abort()
        raise
    if failed is not None:
        raise not_encrypted(endpoint, failed)
    return end.inner


class Listening:
    """What accepts connections at an endpoint, until `close`."""

    def __init__(
        self, endpoint: Endpoint, listeners: Sequence[asyncio.Server | inside.Listener], gate: TlsGate | None = None
    ) -> None:
        self.endpoint = endpoint  # With the port that was taken.
        self._listeners = listeners
        self._gate = gate

    def look(self) -> None:
        """Take a new certificate, if there is one."""
        if self._gate is not None:
            self._gate.look()

    def close(self) -> None:
        """Accept no further connection; open ones go on."""
        for listener in self._listeners:
            listener.close()
        if self._gate is not None:
            self._gate.close()


async def listen(endpoint: Endpoint, accept: Callable[[], asyncio.BufferedProtocol]) -> Listening:
    """Accept connections on the running loop; the system chooses the port for port 0.

    Raises:
        BadSetting: the endpoint can't be used, or the files for TLS.
    """
    if endpoint.is_inside:
        own = inside.listen(endpoint._replace(access=OPEN), accept)
        return Listening(own.endpoint, [own])
    tls = endpoint.access.tls
    if tls is None:
        return await _listen(endpoint, accept, None)
    check_files(tls)
    gate = TlsGate(tls)
    return await _listen(endpoint, lambda: gate.accept(accept()), gate)


async def _listen(
    endpoint: Endpoint, accept: Callable[[], asyncio.BufferedProtocol], gate: TlsGate | None
) -> Listening:
    loop = asyncio.get_running_loop()
    try:
        first = await loop.create_server(accept, endpoint.host, endpoint.port, backlog=ACCEPT_QUEUE)
    except OSError as error:
        if error.errno not in _LISTEN_FAULTS and not isinstance(error, socket.gaierror):
            raise
        why = error.strerror or str(error)
        raise BadSetting(f"{endpoint} can't be listened on ({why}); choose another host or port") from error
    listeners = [first]
    listening = Listening(endpoint._replace(port=first.sockets[0].getsockname()[1]), listeners, gate)
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
