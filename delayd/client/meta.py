"""Meta view: the servers as meta's last answers named them.

Invariant: while meta is away the client goes on with the answers that it has; only a question without an answer waits.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import NamedTuple

from delayd.client.home_clock import clock_of
from delayd.client.limits import need_address
from delayd.client.link import ServerLink, unreadable
from delayd.client.retry import Backoff
from delayd.errors import BadRequest, DelaydError, NoRealtimeServer, UnknownRequest
from delayd.wire.frame import Frame, Head
from delayd.wire.meta import SUBJECTS_MAX, ServerInfo, read_routes, read_servers
from delayd.wire.requests import RequestType
from delayd.wire.slots import SlotOwners, SlotSet, read_slot_owners, slots_bytes

REFRESH_MS = 5_000.0  # After this long a server that joins gets its share of the work.
ANSWER_MS_MAX = 5_000.0  # Meta answers from memory; a route costs it one commit.

log = logging.getLogger(__name__)


class ServerAddress(NamedTuple):
    """One server as meta knows it."""

    log_id: int
    host: str
    port: int
    alive: bool
    cordoned: bool = False


class MetaView:
    """Asks meta for servers and routes; keeps the last answer."""

    def __init__(self, address: str) -> None:
        host, port = need_address(address)
        self.link = ServerLink(host, port)
        self.clock = clock_of(host)
        self.delay_servers: dict[int, ServerAddress] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_now = asyncio.Event()

    async def find_delay_servers(self) -> dict[int, ServerAddress]:
        """Ask for the delay servers and keep the answer; an empty answer does not replace the last one.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.SERVERS, {"role": "delay"})
        found = [_address(info) for info in read_servers(answer.head)]
        self.delay_servers = {server.log_id: server for server in found} or self.delay_servers
        return self.delay_servers

    async def route(self, subject: str) -> ServerAddress:
        """The realtime server of a subject, which gets one now if it has none.

        Raises:
            NoRealtimeServer: none is alive that could get it.
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.ROUTES, {"subjects": [subject], "assign": True})
        found = read_routes(answer.head)
        if subject not in found.routes:
            raise NoRealtimeServer(f"no live realtime server serves {subject}; start one, it is found by itself")
        log_id = found.routes[subject]
        for info in found.servers:
            if info.server.log_id == log_id:
                return _address(info)
        raise NoRealtimeServer(f"{subject} is served by {log_id:016x}, which has not registered with this meta yet")

    async def find_realtime_servers(self) -> dict[int, ServerAddress]:
        """Ask for the realtime servers.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.SERVERS, {"role": "realtime"})
        return {info.server.log_id: _address(info) for info in read_servers(answer.head)}

    async def routes(self, subjects: Sequence[str]) -> dict[str, int]:
        """The realtime server of each subject, by log_id; one that can't have any now is left out.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        found: dict[str, int] = {}
        for start in range(0, len(subjects), SUBJECTS_MAX):
            part: Head = {"subjects": [*subjects[start : start + SUBJECTS_MAX]], "assign": True}
            found |= read_routes((await self._ask(RequestType.ROUTES, part)).head).routes
        return found

    async def slot_owners(self, wanted: SlotSet) -> SlotOwners:
        """Who owns the slots of keys; wanted ones that nobody owns get an owner, if a delay server is alive.

        Raises:
            DelaydError: meta can't be reached or refuses.
        """
        answer = await self._ask(RequestType.SLOTS, {"wanted": slots_bytes(wanted)})
        try:
            return read_slot_owners(answer.head)
        except BadRequest as error:
            raise unreadable(await self.link.connection(), error) from error

    def keep_fresh(self) -> None:
        """Ask again every few seconds from now on, until `close`."""
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    def refresh_soon(self) -> None:
        """Ask now, because something has happened that meta may know of."""
        self._refresh_now.set()

    async def close(self) -> None:
        """Ask no more."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self.link.close()

    async def _ask(self, request: RequestType, head: Head) -> Frame:
        connection = await self.link.connection()
        try:
            return await connection.request(request, head, timeout_ms=ANSWER_MS_MAX)
        except UnknownRequest as error:
            # To give another server's port is an easy slip, because the three ports follow one another.
            raise UnknownRequest(f"{self.link.address} is no meta server; give the address of one") from error

    async def _refresh(self) -> None:
        backoff = Backoff()
        away = False
        while True:
            try:
                await self.find_delay_servers()
                away = False
                backoff.reset()
                wait_ms = REFRESH_MS * random.uniform(0.8, 1.2)
            except DelaydError as error:
                if not away:
                    log.warning("meta_unavailable address=%s code=%s", self.link.address, error.code)
                away = True
                wait_ms = backoff.next_ms()
            # Even if news is wanted all the time, meta is asked at most at the pace of the back-off.
            await asyncio.sleep(min(wait_ms, 100.0) / 1000)
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._refresh_now.wait()
            except TimeoutError:
                pass
            self._refresh_now.clear()


def _address(info: ServerInfo) -> ServerAddress:
    server = info.server
    return ServerAddress(server.log_id, server.host, server.port, info.alive, info.cordoned)
