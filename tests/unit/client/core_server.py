"""The realtime server's core in the test's loop, behind a real socket: for tests of clients that need all that it does.

Its clock goes on only when a test moves it, or by `beat`, which lets as much time pass as on the loop.
"""

from __future__ import annotations

import asyncio

from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.wire.frame import Frame
from delayd.wire.requests import RequestType
from tests.unit.client.servers import SmallServer
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer
from tests.worlds.realtime import World as Life

BEAT_S = 0.002


class CoreServer(SmallServer):
    """One realtime server over all its lives."""

    def __init__(self, log_id: int) -> None:
        super().__init__(log_id)
        self.life = Life(log_id=log_id)
        self.beating: asyncio.Task[None] | None = None
        self.keeps: RequestType | None = None  # Requests of this type wait until `release`.
        self._kept: list[tuple[Connection, Frame]] = []
        self._session = 0
        self._batches = 0
        self._greet()

    def put(self, subject: str, *bodies: bytes) -> None:
        """These messages are due."""
        self._batches += 1
        self.life.dispatch(self._origin, self._session, dispatch_batch(self._batches, bodies, subject=subject))

    async def start(self) -> None:
        await super().start()
        self.beating = asyncio.get_running_loop().create_task(self._beat())

    async def stop(self) -> None:
        if self.beating is not None:
            self.beating.cancel()
            self.beating = None
        await super().stop()

    async def restart(self) -> None:
        """Stop, and start again at the same port."""
        await self.stop()
        self.life = self.life.restarted()
        self._greet()
        await self.start()

    def serve(self, connection: Connection, frame: Frame) -> None:
        if frame.type == self.keeps:
            self._kept.append((connection, frame))
        else:
            self.life.core.received(connection, frame)

    def release(self) -> None:
        """Serve what waits."""
        self.keeps = None
        kept, self._kept = self._kept, []
        for connection, frame in kept:
            self.serve(connection, frame)

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        self.life.core.disconnected(connection)

    def _greet(self) -> None:
        self._origin = SimPeer()
        self._session += 1
        self.life.hello(self._origin, self._session)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(BEAT_S)
            passed_ms = int((loop.time() - before) * 1_000)
            before += passed_ms / 1_000
            self.life.clock.advance(passed_ms)
            self.life.core.wake()
