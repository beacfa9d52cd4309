"""Inside: connections within one process, between loops of any threads, with no sockets.

A server that listens on a host of `new_host` is reached by `delayd.net.connection.connect` at that host, from anywhere
in the process, and from nowhere else. Bytes go from one end to the other as the buffers that were written.

Invariant: an end's protocol is called on its own loop only. Each counter has one writer: an end counts what it has
written, and what it has taken of what the other one wrote.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakSet

from delayd.address import INSIDE_SUFFIX, Endpoint
from delayd.batch.columns import Buffer
from delayd.errors import AlreadyClosed, ServerUnavailable

HIGH_BYTES = 1 << 20  # Above this an end is told that the other one does not take its bytes.
TURN_BYTES = 4 << 20  # An end takes so many bytes in one turn of its loop.

_numbers = itertools.count(1)
_hosts: set[str] = set()  # The owners that are open. An owner that opens again draws another host.
_listeners: dict[Endpoint, Listener] = {}
_lock = threading.Lock()


def new_host() -> str:
    """A host for the servers of one owner in this process."""
    host = f"p{os.getpid()}-{next(_numbers)}{INSIDE_SUFFIX}"
    _hosts.add(host)
    return host


def forget_host(host: str) -> None:
    """Its owner was closed: nobody will ever listen at this host again."""
    _hosts.discard(host)


def listen(endpoint: Endpoint, accept: Callable[[], asyncio.BufferedProtocol]) -> Listener:
    """Accept connections on the running loop; for port 0 at the first port of the host that is free."""
    return Listener(endpoint, accept)


def connect(endpoint: Endpoint, protocol: asyncio.BufferedProtocol) -> None:
    """Connect a protocol of the running loop to a server.

    Raises:
        AlreadyClosed: the host's owner was closed in this process.
        ServerUnavailable: nobody listens there.
    """
    own = endpoint.host.startswith(f"p{os.getpid()}-")
    if own and endpoint.host not in _hosts:
        raise AlreadyClosed("the servers in this program that this client belongs to were closed")
    listener = _listeners.get(endpoint)
    if listener is None or listener.pid != os.getpid():
        where = "in this process any more" if own else "in this process"
        raise ServerUnavailable(f"no server listens at {endpoint} {where}; open its directory here")
    end = InsideEnd(asyncio.get_running_loop(), (endpoint.host, endpoint.port))
    listener.connected(end)
    end.begin(protocol)


def abort(host: str) -> None:
    """End all connections with the servers of a host, because they have failed; on their loop."""
    with _lock:
        found = [listener for endpoint, listener in _listeners.items() if endpoint.host == host]
    for listener in found:
        listener.abort()


def _free_at(host: str) -> Endpoint:
    # A process may make any number of connections and homes, but a port has 16 bits wherever an address is written.
    return next(free for port in itertools.count(1) if (free := Endpoint(host, port)) not in _listeners)


class Listener:
    """Where a server of this process accepts connections."""

    def __init__(self, endpoint: Endpoint, accept: Callable[[], asyncio.BufferedProtocol]) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._accept = accept
        self._ends: WeakSet[InsideEnd] = WeakSet()
        with _lock:
            self.endpoint = endpoint if endpoint.port else _free_at(endpoint.host)
            _listeners[self.endpoint] = self

    def close(self) -> None:
        """Accept no further connection."""
        with _lock:
            _listeners.pop(self.endpoint, None)

    def abort(self) -> None:
        """End every connection, when the server has failed; on its loop."""
        self.close()
        for end in list(self._ends):
            end.abort()

    def connected(self, other: InsideEnd) -> None:
        """Give an end its other end, and have the server accept that one; from any thread."""
        mine = InsideEnd(self._loop, ("a client in this process", next(_numbers)))
        mine.join(other)
        try:
            self._loop.call_soon_threadsafe(self._begin, mine)
        except RuntimeError as error:
            raise ServerUnavailable(f"the server at {self.endpoint} has ended; open its directory") from error

    def _begin(self, end: InsideEnd) -> None:
        self._ends.add(end)
        end.begin(self._accept())


class InsideEnd(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer_name: tuple[str, int]) -> None:
        super().__init__({"peername": peer_name})
        self._loop = loop
        self._protocol: asyncio.BufferedProtocol | None = None
        self._other: InsideEnd | None = None
        self._inbox: deque[memoryview] = deque()  # Written by the other end, and not taken yet.
        self._woken = False
        self._reading = True
        self._closing = False  # Here: nothing is written or read any more.
        self._lost = False
        self._ended: BaseException | bool = False  # The other end is closed: True, or as it was aborted.
        self._written = self._taken = 0
        self._high = HIGH_BYTES
        self._full = False

    def join(self, other: InsideEnd) -> None:
        """Make two ends one connection."""
        self._other, other._other = other, self

    def begin(self, protocol: asyncio.BufferedProtocol) -> None:
        """Give this end its protocol; on its loop."""
        self._protocol = protocol
        protocol.connection_made(self)
        self._wake()

    # Writing.

    def write(self, data: Buffer) -> None:
        """Give bytes to the other end."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Give buffers to the other end, which must not change any more."""
        other = self._other
        if self._closing or other is None:
            return
        if other._closing:
            # Nobody takes these bytes any more. An end that reads hears so behind all that was written to it, which may
            # be a last word; one that does not read would never hear it.
            if not self._reading:
                self._closing = True
                self._loop.call_soon(self._lose, ConnectionResetError("the other end is closed"))
            return
        for data in list_of_data:
            view = memoryview(data)
            if view.nbytes:
                other._inbox.append(view)
                self._written += view.nbytes
        other._wake()
        if not self._full and self.get_write_buffer_size() > self._high:
            self._full = True
            if self._protocol is not None:
                self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        """Bytes that the other end has not taken."""
        return 0 if self._other is None else self._written - self._other._taken

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set from how many bytes on the protocol is told to pause; ``low`` is half of it."""
        self._high = HIGH_BYTES if high is None else high

    def can_write_eof(self) -> bool:
        """No: an end is closed as a whole."""
        return False

    # Reading.

    def is_reading(self) -> bool:
        """Whether bytes are taken."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """Take no bytes."""
        self._reading = False

    def resume_reading(self) -> None:
        """Take bytes again."""
        if not self._reading:
            self._reading = True
            self._wake()

    def _wake(self) -> None:
        """Have `_deliver` called on this end's loop; from any thread."""
        # The flag is set before the call and cleared before the inbox is read: what comes in between wakes once more.
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # Its loop has ended, and with it its owner.

    def _deliver(self) -> None:
        self._woken = False
        protocol, left = self._protocol, TURN_BYTES
        if protocol is None or self._lost:
            return
        while self._inbox and self._reading and not self._closing and left > 0:
            data = self._inbox[0]
            room = memoryview(protocol.get_buffer(data.nbytes))
            size = min(room.nbytes, data.nbytes)
            room[:size] = data[:size]
            if size == data.nbytes:
                self._inbox.popleft()
            else:
                self._inbox[0] = data[size:]
            self._taken += size
            left -= size
            protocol.buffer_updated(size)
        if self._other is not None and self._other._full:
            self._other._tell_of_room()
        if self._inbox and self._reading and not self._closing:
            self._wake()
        elif self._ended and self._reading and not self._closing:
            if self._ended is True:
                protocol.eof_received()
            self._closing = True
            self._lose(self._ended if isinstance(self._ended, Exception) else None)

    def _tell_of_room(self) -> None:
        """The other end has taken bytes; from its thread."""
        try:
            self._loop.call_soon_threadsafe(self._room)
        except RuntimeError:
            return

    def _room(self) -> None:
        if self._full and not self._lost and self.get_write_buffer_size() <= self._high // 2:
            self._full = False
            if self._protocol is not None:
                self._protocol.resume_writing()

    # The end.

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._closing

    def close(self) -> None:
        """Close this end; the other one still gets what was written."""
        self._end(True)

    def abort(self) -> None:
        """Close this end at once."""
        self._end(ConnectionResetError("the other end was aborted"))

    def _end(self, how: BaseException | bool) -> None:
        if self._closing:
            return
        self._closing = True
        self._inbox.clear()
        other = self._other
        if other is not None and not other._ended:
            other._ended = how
            other._wake()
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        protocol, self._protocol, other = self._protocol, None, self._other
        if other is not None and not other._ended:
            other._ended = True
            other._wake()
        if protocol is not None:
            protocol.connection_lost(error)
