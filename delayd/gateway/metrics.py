"""Metrics: what Prometheus reads of a whole cluster, asked of its servers each time, and what this gateway counts.

They have the names of the servers' own pages, because both are made of STATUS (`delayd.wire.metrics`). A server that
does not answer has ``delayd_up`` 0 and nothing else. Histograms are on the servers' pages only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from heapq import nlargest

from delayd.client.asking import ask
from delayd.client.asking.ask import GROUPS, Known, groups_head
from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.wire import exposition
from delayd.wire.consuming import GroupInfo
from delayd.wire.exposition import Family
from delayd.wire.metrics import (
    GATEWAY_LEASES,
    GATEWAY_REQUESTS,
    TOP,
    UP,
    Asked,
    families_of,
    families_of_groups,
    waiting_of,
)
from delayd.wire.requests import RequestType

ASKED_S = 5.0  # A server that answers later counts as down.


class Gathered:
    """What the servers say at one moment."""

    def __init__(self) -> None:
        self._up: dict[tuple[str, str], bool] = {}
        self._asked: list[Asked] = []
        self._groups: list[tuple[str, GroupInfo]] = []

    async def ask(self, meta: str) -> None:
        """Ask meta and all servers that it knows."""
        try:
            async with asyncio.timeout(ASKED_S), ask.meta(meta) as connection:
                known = await ask.known_servers(connection)
                await self._note("meta", "meta", connection)
        except (DelaydError, TimeoutError):
            self._up["meta", "meta"] = False
            return
        await asyncio.gather(*map(self._ask_one, known))

    def families(self) -> Iterator[Family]:
        """All of it."""
        yield Family(UP, [(labels, int(is_up)) for labels, is_up in sorted(self._up.items())])
        yield from families_of(sorted(self._asked, key=lambda each: each[:2]))
        yield from families_of_groups(lambda: self._groups)

    async def _ask_one(self, server: Known) -> None:
        name = f"{server.log_id:016x}"
        try:
            async with asyncio.timeout(ASKED_S), ask.reached(server) as connection:
                await self._note(server.role, name, connection)
                if server.role == "realtime":
                    self._groups += [(name, group) for group in await _top(connection)]
        except (DelaydError, TimeoutError):
            self._up[server.role, name] = False

    async def _note(self, role: str, name: str, connection: Connection) -> None:
        self._asked.append(Asked(role, name, await ask.ask(connection, RequestType.STATUS, {})))
        self._up[role, name] = True


async def _top(connection: Connection) -> list[GroupInfo]:
    """The groups with most messages waiting; only these are asked for their ages, which may cost reads."""
    top = nlargest(TOP, await GROUPS.at(connection, groups_head(None, ages=False)), key=waiting_of)
    aged: dict[tuple[str, str], GroupInfo] = {}
    for subject in dict.fromkeys(group.subject for group in top):
        found = await GROUPS.at(connection, groups_head(subject, ages=True))
        aged |= {(group.subject, group.group): group for group in found}
    return [aged.get((group.subject, group.group), group) for group in top]


async def page(meta: str, requests: Counter[tuple[str, int]], held: int) -> bytes:
    """All metrics, in the text format of Prometheus."""
    gathered = Gathered()
    await gathered.ask(meta)
    answers = [((method, str(status)), count) for (method, status), count in sorted(requests.items())]
    own = Family(GATEWAY_REQUESTS, answers), Family(GATEWAY_LEASES, [((), held)])
    return b"".join(exposition.exposition([*gathered.families(), *own]))
