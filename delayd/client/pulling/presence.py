"""Presence: the connection of a consumer that its server must not miss, because its group lives as long as that
connection (``broadcast``, ``ephemeral``), or because it leads its group (``exclusive``).

Invariant: from the first request on until the close, a connection that ends is replaced at once, whatever the caller
does meanwhile. So the server hears of this consumer again within seconds of being back, also while a handler works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from delayd.client.retry import Backoff
from delayd.errors import DelaydError
from delayd.net.connection import Connection


class Presence:
    """Of one consumer at one server; belongs to a loop. ``connect`` makes the connection, and calls `watch` with it."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self.watched: Connection | None = None
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._returning: asyncio.Task[None] | None = None
        self._rests = False

    def watch(self, connection: Connection) -> None:
        """Replace this connection when it ends."""
        self.watched = connection
        self._rests = False
        connection.closed.add_done_callback(lambda _: self._ended(connection))

    def rest(self) -> None:
        """Replace no connection, until one is watched again."""
        self._rests = True
        if self._returning is not None:
            self._returning.cancel()

    def _ended(self, connection: Connection) -> None:
        is_back = connection is not self.watched
        if not self._rests and not is_back and (self._returning is None or self._returning.done()):
            self._returning = self._loop.create_task(self._return())

    async def _return(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._connect()
            except DelaydError:
                # The server is away: whoever waits for a message of it says so.
                await asyncio.sleep(backoff.next_ms() / 1000)
            else:
                return
