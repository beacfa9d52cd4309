"""A line to a server, which hands bytes on until a test has it fail."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine

HOST = "127.0.0.1"
BYTES_MAX = 1 << 16
FAULTS = {
    "silent": "takes connections and requests, and no answer comes",
    "stopped": "as a stopped process: the kernel takes connections, and nobody reads",
    "slow": "answers come at one byte a second",
    "away": "nobody listens",
}


class FaultyLine:
    """Belongs to a loop. ``log_id`` is that of the server behind it, as meta names it."""

    def __init__(self, port: int, log_id: int) -> None:
        self.log_id = log_id
        self.port = 0
        self._behind = port
        self._fault = ""
        self._listener = socket.socket()
        self._lines: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Listen."""
        self._listener.bind((HOST, 0))
        self._listener.listen(1_000)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._spawn(self._accept())

    def begin(self, fault: str) -> None:
        """Fail in this way from now on."""
        assert not fault or fault in FAULTS
        self._fault = fault
        if fault in ("stopped", "away"):
            self._end_tasks()
        if fault == "away":
            self._close()

    def stop(self) -> None:
        """End all connections."""
        self._end_tasks()
        self._close()

    async def _accept(self) -> None:
        while True:
            near, _ = await self._loop.sock_accept(self._listener)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            far = socket.socket()
            far.setblocking(False)
            self._lines |= {near, far}
            await self._loop.sock_connect(far, (HOST, self._behind))
            self._spawn(self._carry(near, far))
            self._spawn(self._carry(far, near, answers=True))

    async def _carry(self, source: socket.socket, sink: socket.socket, *, answers: bool = False) -> None:
        try:
            while some := await self._loop.sock_recv(source, BYTES_MAX):
                if answers and self._fault == "slow":
                    for byte in some:
                        await self._loop.sock_sendall(sink, bytes([byte]))
                        await asyncio.sleep(1)
                elif not (answers and self._fault):
                    await self._loop.sock_sendall(sink, some)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # One side has ended, and the other one sees it.

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _close(self) -> None:
        for line in [self._listener, *self._lines]:
            line.close()
        self._lines.clear()
