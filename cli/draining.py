"""Draining: how ``delayd server`` moves the pending messages of a delay server to others (docs/drain.md).

Invariant: the command decides nothing that is lost with it. Each piece is durable at the server before it is counted,
so the command may end at any moment and be given again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np

from delayd.errors import BadArgument, NoDelayServer, NotReady, ServerInUse
from delayd.net.connection import Connection
from delayd.wire.drain import DrainOrder, DrainProgress, read_drain_progress
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_map, need_str
from delayd.wire.requests import RequestType
from delayd.wire.slots import SlotOwners, SlotSet, read_slot_owners, slot_set, slots_bytes, versions_bytes

from . import ask
from .operate import Operator, patiently

GROUPS_OF_SLOTS = 8  # While a group of slots moves, sends with its keys wait: the fewer rows a group has, the shorter.
LOOK_S = 0.5  # Between two walks, when what is left waits for its instant.
HEARD_S = 60.0  # Far above any heartbeat.
RETIRE_MS = 600_000  # A million messages take some ten seconds.


class Told(NamedTuple):
    """How far a drain is."""

    drained: int  # By this command.
    left: int  # Messages that are still here: pending, in flight, and on their way.


OnTold = Callable[[Told], None]


def server_of(servers: Sequence[ask.Known], which: str) -> ask.Known:
    """The delay server that an operator means, by its address or its log_id; BadArgument when there is none."""
    for server in servers:
        if which in (server.address, f"{server.log_id:016x}"):
            return server
    raise BadArgument(f"meta knows no delay server {which}; see `delayd servers --role delay`")


async def set_standing(meta: Connection, log_id: int, standing: str) -> str:
    """Have meta use a delay server otherwise from now on; what it says. The connection is trusted."""
    head: Head = {"log_id": log_id, "standing": standing}
    return need_str(await patiently(meta, RequestType.CORDON_SERVER, head), "message")


async def drain(operator: Operator, which: str, told: OnTold) -> int:
    """Cordon a server, and move its pending messages and its keys to others until it has none: how many were moved."""
    async with operator.at_meta() as meta:
        servers = await ask.known_servers(meta, "delay")
        server = server_of(servers, which)
        if not server.cordoned:
            await set_standing(meta, server.log_id, "cordoned")
        takers = [each.log_id for each in servers if each.alive and not each.cordoned and each is not server]
        if not takers:
            raise NoDelayServer("no other delay server is alive and takes messages; start one")
        async with ask.reached(server) as connection:
            await ask.prove(connection, operator.secret)
            await _until_cordoned(connection)
            return await _Drain(meta, connection, server.log_id, takers, told).run()


async def _until_cordoned(server: Connection) -> None:
    """Wait until a server has heard of its cordon, with its next heartbeat: until then it takes new messages."""
    for _ in range(int(HEARD_S / LOOK_S)):
        if (await ask.ask(server, RequestType.STATUS, {})).get("cordoned") is True:
            return
        await asyncio.sleep(LOOK_S)
    raise NotReady("the server has not heard of its cordon from meta; see `delayd status`")


async def retire(operator: Operator, which: str) -> str:
    """Let a drained server leave the cluster for good; what it says. Raises ServerInUse, which says what it holds."""
    async with operator.at_meta() as meta:
        known = await ask.known_servers(meta)
        server = server_of([each for each in known if each.role == "delay"], which)
        async with ask.reached(server) as connection:
            await ask.prove(connection, operator.secret)
            # It looks at the outcome of each message that it has had and whose hour is not over.
            answer = await connection.request(RequestType.RETIRE, {}, timeout_ms=RETIRE_MS)
        said = need_str(answer.head, "message")
        for other in known:
            if other.role == "realtime" and (owed := await _retries_for(other, server.log_id)):
                raise ServerInUse(f"{owed} batches that come again through it wait at realtime server {other.address}")
        await set_standing(meta, server.log_id, "retired")
        return said


async def _retries_for(realtime: ask.Known, log_id: int) -> int:
    """How many batches of messages that come again a realtime server still has for a delay server."""
    async with ask.reached(realtime) as connection:
        counters = need_map(await ask.ask(connection, RequestType.STATUS, {}), "counters")
    found = counters.get(f"retries_for_{log_id:016x}", 0)
    return found if isinstance(found, int) else 0


async def slot_owners(meta: Connection) -> SlotOwners:
    """Ask meta which delay server owns which slots."""
    wanted = slots_bytes(slot_set(np.empty(0, np.intp)))
    return read_slot_owners(await patiently(meta, RequestType.SLOTS, {"wanted": wanted}))


class _Drain:
    """One command, over connections that are trusted."""

    def __init__(self, meta: Connection, server: Connection, log_id: int, takers: Sequence[int], told: OnTold) -> None:
        self._meta = meta
        self._server = server
        self._log_id = log_id
        self._takers = takers
        self._next_taker = cycle(takers)
        self._told = told
        self._drained = 0
        self._left = 0

    async def run(self) -> int:
        """Go on until nothing is left here."""
        while True:
            moved = (await self._walk(None, None)).drained
            owned = (await slot_owners(self._meta)).of(self._log_id)
            if not moved and owned.any():
                await self._move_slots(owned)
            self._left = await self._count()
            self._told(Told(self._drained, self._left))
            if not self._left and not owned.any():
                return self._drained
            if not moved:
                await asyncio.sleep(LOOK_S)

    async def _walk(self, slots: SlotSet | None, to: int | None) -> DrainProgress:
        """Let everything of one kind go that may: what the last piece said, with all that were drained."""
        order, drained = DrainOrder(0, slots), 0
        while True:
            taker = next(self._next_taker) if to is None else to
            piece = await self._piece(order._replace(to=taker))
            drained += piece.drained
            self._drained += piece.drained
            self._told(Told(self._drained, max(0, self._left - drained)))
            if piece.place is None:
                return piece._replace(drained=drained)
            order = order._replace(place=piece.place, until_sequence=piece.until_sequence)

    async def _count(self) -> int:
        order, left = DrainOrder(0, None), 0
        while True:
            piece = await self._piece(order)
            left += piece.found + piece.in_flight
            if piece.place is None:
                return left + piece.leaving
            order = order._replace(place=piece.place, until_sequence=piece.until_sequence)

    async def _piece(self, order: DrainOrder) -> DrainProgress:
        return read_drain_progress(await patiently(self._server, RequestType.DRAIN, order.to_head()))

    async def _move_slots(self, owned: SlotSet) -> None:
        """Move keys with their messages, a group of slots after the other, in turn to those who may own keys."""
        places = np.flatnonzero(owned)
        for number, group in enumerate(np.array_split(places, min(GROUPS_OF_SLOTS, len(places)))):
            owners = await slot_owners(self._meta)
            takers = [each for each in self._takers if each in owners.members] or list(self._takers)
            slots, to = slot_set(group), takers[number % len(takers)]
            while True:
                piece = await self._walk(slots, to)
                if not piece.left and not piece.leaving:
                    break
                await asyncio.sleep(LOOK_S)
            # The other server has all messages with these keys, so it judges the keys from now on.
            head: dict[str, HeadValue] = {
                "slots": slots_bytes(slots),
                "versions": versions_bytes((await slot_owners(self._meta)).versions),
                "to": to,
                "lost": True,
            }
            await patiently(self._meta, RequestType.MOVE_SLOTS, head)
