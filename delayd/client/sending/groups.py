"""The delay servers that a producer may send to, and which of them gets the next batch.

Invariant: a batch is bound to one server group, and is unbound only while none of its bytes may have left (rule I3).

With several servers, a batch goes to one whose connection stands. Connections to the others are made in the background,
again and again while batches are sent, so nobody waits for a server that is away, and one that is back is used at once.
Of the servers that can be reached, these are left out as long as another one is left:

1. One that refused a batch by name: its disk is full, it is fenced, starting, stopping. It gets a batch again after a
   while that grows from 25 ms to 2 s; a refused batch moves on at once, so such a try costs one round trip.
2. One that an operator has cordoned, as meta tells.
3. One that has answered nothing for SILENT_S since it was asked: it hangs. An answer, also to a PING, ends that.
4. One that meta calls dead. While it can be reached all the same, meta is asked again every DOUBT_S.

An example with servers A and B. A's disk fills up: it refuses batch 7, which goes to B in the same turn of the loop, as
do batches 8 to 20. Batch 21 goes to A again after 25 ms, is refused, and moves to B. When the disk of A has space
again, A gets a batch at most 2 s later and takes it, and from then on every second one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from delayd.client.link import ServerLink
from delayd.client.meta import MetaView, ServerAddress
from delayd.client.retry import Backoff
from delayd.errors import DelaydError, NoDelayServer, ServerUnavailable, UnknownServer
from delayd.net.connection import Connection

DOUBT_S = 1.0  # Meta hears of a server that is back within a heartbeat; asking more often finds nothing new.
SILENT_S = 1.0  # Far above a slow fsync; what is under way at a server that hangs may not move, so little should be.


class DelayGroup:
    """One delay server group, named by its log."""

    __slots__ = ("_asked_at", "_backoff", "_left_out_until", "alive", "cordoned", "in_flight", "link", "log_id")

    def __init__(self, server: ServerAddress) -> None:
        self.log_id = server.log_id
        self.link = ServerLink(server.host, server.port, server.log_id)
        self.alive = server.alive
        self.cordoned = server.cordoned  # It takes no new messages; keys that it owns are still its own.
        self.in_flight = 0
        self._asked_at = 0.0  # When it was first asked for something since it last answered.
        self._left_out_until = 0.0
        self._backoff = Backoff()

    def asked(self, now: float) -> None:
        """A batch leaves to it."""
        if self._asked_at <= self.link.heard_at:
            self._asked_at = now

    def refused(self, now: float) -> None:
        """It refused a batch by name, for a reason of its own."""
        # Batches that were under way together are refused together, and count once.
        if now >= self._left_out_until:
            self._left_out_until = now + self._backoff.next_ms() / 1000

    def accepted(self) -> None:
        """It took a batch."""
        if self._left_out_until:
            self._left_out_until = 0.0
            self._backoff.reset()

    def is_left_out(self, now: float) -> bool:
        """Whether batches had better go elsewhere."""
        silent = self._asked_at > self.link.heard_at and now - self._asked_at > SILENT_S
        return self.cordoned or silent or now < self._left_out_until


class Groups:
    """All groups that meta has named so far; batches go to them in turn."""

    def __init__(self, meta: MetaView) -> None:
        self._meta = meta
        self._groups: dict[int, DelayGroup] = {}
        self._turn = 0
        self._doubt_again_at = 0.0
        self._heard: dict[int, ServerAddress] = {}
        self._loop = asyncio.get_running_loop()

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

    def choose(self, refusers: Collection[int] = (), roomy: int = 0) -> DelayGroup | None:
        """Choose a group for a batch: the only one; of several one that can be reached and takes batches as far as is
        known, with the fewest batches under way; equal ones in turn.

        ``refusers``: the logs of groups that have refused this batch for its own sake; they come last. ``roomy``: the
        log of one that has room for all of it, as it has just said; 0 if none has said so.

        None while no group is known, and while none of several can be reached.
        """
        self._take_news()
        groups = list(self._groups.values())
        if len(groups) < 2:
            return groups[0] if groups else None
        self._turn = (self._turn + 1) % len(groups)
        standing: list[DelayGroup] = []
        for group in groups[self._turn :] + groups[: self._turn]:
            if group.link.standing is not None:
                standing.append(group)
            elif group.log_id in self._heard and not group.link.connecting:
                group.link.knock().add_done_callback(self._knocked)
        now = self._loop.time()
        if now >= self._doubt_again_at and any(not group.alive and not group.is_left_out(now) for group in standing):
            # It answers, so it is back, and meta may know by now.
            self._doubt_again_at = now + DOUBT_S
            self._meta.refresh_soon()
        # If meta calls all of them dead it may only have lost contact; the servers themselves know better.
        return min(
            standing,
            key=lambda group: (
                group.log_id in refusers,
                group.is_left_out(now),
                not group.alive,
                group.log_id != roomy,
                group.in_flight,
            ),
            default=None,
        )

    def another_takes(self, refusers: Collection[int] = ()) -> bool:
        """Whether a group that can be reached is neither left out nor one of the refusers."""
        now = self._loop.time()
        return any(
            group.link.standing is not None and group.log_id not in refusers and not group.is_left_out(now)
            for group in self._groups.values()
        )

    def another_may_come(self, refusers: Collection[int]) -> bool:
        """Whether a group that is no refuser is just being connected to for the first time."""
        return any(
            group.link.standing is None and not group.link.failing and group.log_id not in refusers
            for group in self._groups.values()
        )

    async def find(self) -> DelayGroup:
        """As `choose`, after meta was asked if it has not named any, and after the first one was reached.

        Raises:
            NoDelayServer: meta knows none.
            ServerUnavailable: there are several, and none can be reached.
            DelaydError: meta can't be reached or refuses.
        """
        if self.choose() is None and not self._groups:
            await self._ask()
        group = self.choose()
        if group is None and self._groups:
            group = await self._reach()
        if group is None:
            raise NoDelayServer("meta knows no delay server; start one, it is found by itself")
        return group

    async def all(self, until: float) -> list[int]:
        """The log of each group, after meta was asked.

        Raises:
            NoDelayServer: meta knows none.
            DelaydError: meta can't be reached or refuses, or has not answered when it is ``until`` on the loop's clock.
        """
        try:
            async with asyncio.timeout_at(until):
                await self._ask()
        except TimeoutError:
            raise self.unreached(None) from None
        self._take_news()
        if not self._groups:
            raise NoDelayServer("meta knows no delay server; start one, it is found by itself")
        return sorted(self._groups)

    async def reached(self, log_id: int, until: float) -> tuple[DelayGroup, Connection]:
        """The group that holds a log, and the connection to it.

        Raises:
            UnknownServer: meta does not know it either.
            DelaydError: it, or meta, can't be reached, or could not until this instant of the loop's clock.
        """
        group: DelayGroup | None = None
        try:
            async with asyncio.timeout_at(until):
                group = await self._named(log_id)
                return group, await group.link.connection()
        except TimeoutError:
            raise self.unreached(group) from None

    def unreached(self, group: DelayGroup | None) -> ServerUnavailable:
        """The error of a caller whose time is over before this group was reached; None: before meta was."""
        who, link = ("meta", self._meta.link) if group is None else ("the delay server", group.link)
        return link.failure or ServerUnavailable(f"{who} at {link.address} gave no answer in time; nothing was sent")

    async def _named(self, log_id: int) -> DelayGroup:
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
        await asyncio.gather(*(group.link.close() for group in self._groups.values()))

    async def _ask(self) -> None:
        self._meta.keep_fresh()
        await self._meta.find_delay_servers()

    async def _reach(self) -> DelayGroup | None:
        """As `choose`, when one of several groups was reached; ServerUnavailable when none of them can be."""
        tries = {self._loop.create_task(group.link.connection()) for group in self._groups.values()}
        failure: DelaydError | None = None
        try:
            while tries:
                done, tries = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
                if (group := self.choose()) is not None:
                    return group
                errors = [each.exception() for each in done if not each.cancelled()]
                failure = next((error for error in errors if isinstance(error, DelaydError)), failure)
        finally:
            # The tries of the links themselves go on.
            for each in tries:
                each.cancel()
        if failure is not None:
            raise failure
        return None

    def _knocked(self, attempt: asyncio.Task[Connection]) -> None:
        """Take the end of a try in the background: meta may know where the server is now, or that it is back."""
        if not attempt.cancelled():
            attempt.exception()
            self._meta.refresh_soon()

    def _take_news(self) -> None:
        if self._meta.delay_servers is self._heard:
            return
        self._heard = self._meta.delay_servers
        for server in self._meta.delay_servers.values():
            group = self._groups.get(server.log_id)
            if group is None:
                self._groups[server.log_id] = DelayGroup(server)
            else:
                group.alive, group.cordoned = server.alive, server.cordoned
                group.link.move(server.host, server.port)
