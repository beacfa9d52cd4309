"""The delay servers that a producer may send to, and which of them gets the next batch.

Invariant: a batch is bound to one server group, and is unbound only while none of its bytes may have left (rule I3).
"""

from __future__ import annotations

from delayd.client.link import ServerLink
from delayd.client.meta import MetaView, ServerAddress
from delayd.errors import NoDelayServer, UnknownServer


class DelayGroup:
    """One delay server group, named by its log."""

    __slots__ = ("alive", "in_flight", "link", "log_id")

    def __init__(self, server: ServerAddress) -> None:
        self.log_id = server.log_id
        self.link = ServerLink(server.host, server.port, server.log_id)
        self.alive = server.alive
        self.in_flight = 0


class Groups:
    """All groups that meta has named so far; batches go to them in turn."""

    def __init__(self, meta: MetaView) -> None:
        self._meta = meta
        self._groups: dict[int, DelayGroup] = {}
        self._turn = 0
        self._heard: dict[int, ServerAddress] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def known(self, log_id: int) -> DelayGroup | None:
        """The group that holds a log, if meta has named it."""
        self._take_news()
        return self._groups.get(log_id)

    @property
    def only(self) -> int | None:
        """The log of the only group that is known; None when there are several, or none."""
        self._take_news()
        return next(iter(self._groups)) if len(self._groups) == 1 else None

    def choose(self) -> DelayGroup | None:
        """Choose a group for a new batch: one that is alive and reachable as far as is known, with the fewest batches
        under way; equal ones in turn.

        None while no group is known.
        """
        self._take_news()
        if not self._groups:
            return None
        groups = list(self._groups.values())
        if len(groups) == 1:
            return groups[0]
        self._turn = (self._turn + 1) % len(groups)
        in_turn = groups[self._turn :] + groups[: self._turn]
        # If meta calls all of them dead it may only have lost contact; the servers themselves know better.
        return min(in_turn, key=lambda group: (group.link.failing, not group.alive, group.in_flight))

    async def find(self) -> DelayGroup:
        """As `choose`, after meta was asked.

        Raises:
            NoDelayServer: meta knows none.
            DelaydError: meta can't be reached or refuses.
        """
        self._meta.keep_fresh()
        await self._meta.find_delay_servers()
        group = self.choose()
        if group is None:
            raise NoDelayServer("meta knows no delay server; start one, it is found by itself")
        return group

    async def all(self) -> list[int]:
        """The log of each group, after meta was asked; raises as `find`."""
        await self.find()
        return sorted(self._groups)

    async def named(self, log_id: int) -> DelayGroup:
        """The group that holds a log; UnknownServer when meta does not know it either."""
        self._meta.keep_fresh()
        self._take_news()
        if log_id not in self._groups:
            await self._meta.find_delay_servers()
            self._take_news()
        if log_id not in self._groups:
            raise UnknownServer(f"no delay server with the log {log_id:016x} is known to meta")
        group = self._groups[log_id]
        if group.link.failing:
            # It may have started again at another address.
            self._meta.refresh_soon()
        return group

    async def close(self) -> None:
        """End all connections."""
        for group in self._groups.values():
            await group.link.close()

    def _take_news(self) -> None:
        if self._meta.delay_servers is self._heard:
            return
        self._heard = self._meta.delay_servers
        for server in self._meta.delay_servers.values():
            group = self._groups.get(server.log_id)
            if group is None:
                self._groups[server.log_id] = DelayGroup(server)
            else:
                group.alive = server.alive
                group.link.move(server.host, server.port)
