"""Producer core: the part that the asynchronous and the blocking producer share: outbox and connections, on one loop of
one process.

Invariant: all of it belongs to the loop's thread; arguments were checked before, and the caller bounds the bytes that
it queues.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from delayd.client.meta import MetaView
from delayd.client.sending.arguments import Columns, ProducerSettings
from delayd.client.sending.block import Progress
from delayd.client.sending.lives import Follower
from delayd.client.sending.message_asker import MessageAsker
from delayd.client.sending.outbox import Outbox
from delayd.client.sending.place_asker import PlaceAsker
from delayd.client.sending.receipt import BatchReceipt
from delayd.client.sending.sender import Sender
from delayd.client.sending.unheard import Unheard
from delayd.client.sending.walker import Walker
from delayd.errors import QueueFull

log = logging.getLogger(__name__)


class ProducerCore:
    """Made inside the running loop; ``on_free`` is called with how many queued bytes have ended."""

    def __init__(self, address: str, settings: ProducerSettings, on_free: Callable[[int], None]) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._meta = MetaView(address)
        self.sender = Sender(self._meta, settings.timeout_ms, settings.unreached_s)
        self.messages = MessageAsker(self.sender.groups, self.sender.owners, settings.timeout_ms, settings.unreached_s)
        self.walker = Walker(self.messages)
        self.follower = Follower(address, self.messages)
        self.places = PlaceAsker(self.sender.groups, self._meta, settings.timeout_ms, settings.unreached_s)
        self.unheard = Unheard()
        self.outbox = Outbox(self.sender, settings.linger_ms, settings.timeout_ms, on_free, self.unheard)

    async def send_batch(self, columns: Columns, window_ms: int | None = None) -> BatchReceipt:
        """Send the rows of one call and wait until each has ended; with a window, a server chooses their instants."""
        if window_ms is not None:
            columns = await self.places.place_columns(columns, window_ms)
        if not columns.bodies:
            return BatchReceipt(())
        answered: asyncio.Future[BatchReceipt] = self._loop.create_future()
        await self.outbox.add_batch(Progress(len(columns.bodies), answered), columns)
        return await answered

    async def disconnect(self) -> None:
        """End all connections, and tell which sends have failed without anybody's knowledge."""
        self.unheard.tell()
        await self.sender.close()
        await self._meta.close()


def queue_full(settings: ProducerSettings) -> QueueFull:
    """The error of a send that found no room in time."""
    waited_s = settings.timeout_ms / 1000
    return QueueFull(
        f"{settings.queue_bytes_max} bytes of sends are queued and none left for {waited_s:g} s; nothing was sent"
    )


def tell_at_end(core: ProducerCore, waiting: int) -> None:
    """Log that a program ends before messages of a producer had an outcome, ``waiting`` of them outside of its outbox;
    and which of its sends have failed without anybody's knowledge.
    """
    core.unheard.tell()
    if unsent := core.outbox.unsent + waiting:
        log.warning("ended_before_sent messages=%d", unsent)
