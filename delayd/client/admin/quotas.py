"""Quotas: what subjects may have at the delay servers, and how much of it they use (docs/quotas.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from delayd.client.admin import ask
from delayd.client.admin.groups import Listing
from delayd.errors import DelaydError, NoDelayServer
from delayd.net.connection import Connection
from delayd.secret import Secret
from delayd.wire.quotas import QuotaInfo, read_quotas
from delayd.wire.requests import RequestType


class QuotaAt(NamedTuple):
    """A subject's quota at one delay server, and how much of it is used.

    Fields:
        server: the delay server.
        info: its numbers there, see `delayd.wire.quotas.QuotaInfo`.
    """

    server: ask.Known
    info: QuotaInfo

    @property
    def subject(self) -> str:
        """The subject that it is for."""
        return self.info.subject


async def list_quotas(address: str, prefix: str = "") -> Listing[QuotaAt]:
    """The quotas of subjects that begin with ``prefix``, by subject and server."""
    found: list[QuotaAt] = []
    missing: list[str] = []

    async def ask_one(server: ask.Known) -> None:
        try:
            async with ask.reached(server) as connection:
                found.extend([QuotaAt(server, info) async for info in quotas_of(connection, prefix)])
        except DelaydError as error:
            missing.append(f"quotas of {server.address} are missing: {error.message}")

    # All at once, so that one which hangs leaves the others their time.
    await asyncio.gather(*map(ask_one, await _delay_servers(address)))
    return Listing(sorted(found, key=lambda each: (each.subject, each.server.log_id)), missing)


async def set_quota(address: str, subject: str, limits: Mapping[str, int | None], secret: Secret) -> Listing[ask.Known]:
    """Set a subject's quota as a whole at all delay servers; returns those where it is set now."""
    done: list[ask.Known] = []
    missing: list[str] = []

    async def set_at(server: ask.Known) -> None:
        try:
            await ask.decide(server, RequestType.SET_QUOTA, {"subject": subject, **limits}, secret)
            done.append(server)
        except DelaydError as error:
            missing.append(f"the quota is not set at {server.log_id:016x}: {error.message}")

    await asyncio.gather(*map(set_at, await _delay_servers(address)))
    return Listing(sorted(done, key=lambda server: server.log_id), sorted(missing))


async def quotas_of(connection: Connection, prefix: str) -> AsyncIterator[QuotaInfo]:
    """The quotas that a delay server has for subjects with this prefix, and how much of them is used."""
    after, more = "", True
    while more:
        head = {"after": after, "prefix": prefix}
        page, more = read_quotas(await ask.ask(connection, RequestType.QUOTAS, head))
        for info in page:
            yield info
        more = more and bool(page)
        after = page[-1].subject if page else after


async def _delay_servers(address: str) -> list[ask.Known]:
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, "delay")
    if not servers:
        raise NoDelayServer("meta knows no delay server; start one with `delayd up`")
    return servers
