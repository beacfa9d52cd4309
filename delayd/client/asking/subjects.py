"""Subjects: each with the realtime server that serves it, and what is kept of it there.

Invariant: the list is meta's, complete and in order of the names; numbers of a realtime server that can't be asked are
missing, never guessed.
"""

from __future__ import annotations

from typing import NamedTuple

from delayd.client.asking import ask
from delayd.client.asking.ask import ROUTES, SUBJECTS, Known, Listing
from delayd.client.asking.looking import silence
from delayd.errors import ServerUnavailable
from delayd.net.connection import Connection
from delayd.wire.consuming import SubjectInfo
from delayd.wire.frame import Head

PAGE = 1_000  # Subjects asked for at once: an answer of at most 256 KB.


class SubjectAt(NamedTuple):
    """A subject and where it is.

    Fields:
        subject: its name.
        log_id: of the realtime server that serves it.
        server: that server; None when meta does not know it any more.
        info: its numbers there; None when they are missing, or nothing was delivered yet.
    """

    subject: str
    log_id: int
    server: Known | None
    info: SubjectInfo | None


class SubjectList(NamedTuple):
    """Subjects, all servers that meta knows, and a sentence for each server whose numbers are missing."""

    subjects: list[SubjectAt]
    servers: list[Known]
    missing: tuple[str, ...]


async def list_subjects(address: str, prefix: str = "", *, after: str = "", limit: int = 0) -> SubjectList:
    """The subjects that begin with ``prefix`` and stand behind ``after``; at most ``limit`` and one more, which says
    that there are more; 0: all.
    """
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection)
        routes = await _routes(connection, prefix, after, limit)
    by_log_id = {server.log_id: server for server in servers if server.role == SUBJECTS.role}
    wanted = {log_id for _, log_id in routes}
    last = routes[-1][0] if routes else ""
    head: Head = {"prefix": prefix, "limit": min(limit, PAGE) or PAGE}

    async def numbers(server: Known) -> list[tuple[tuple[int, str], SubjectInfo]]:
        if not server.alive:
            raise ServerUnavailable(silence(server))
        async with ask.reached(server) as connection:
            found: list[tuple[tuple[int, str], SubjectInfo]] = []
            async for page in SUBJECTS.pages(connection, head, after):
                found += [((server.log_id, info.name), info) for info in page]
                if page and page[-1].name >= last:
                    break
            return found

    kept: Listing[tuple[tuple[int, str], SubjectInfo]] = await ask.at_each(
        [server for log_id, server in by_log_id.items() if log_id in wanted],
        numbers,
        lambda server: f"{SUBJECTS.what} of the {server.role} server at {server.address} are missing",
    )
    infos = dict(kept)
    found = [SubjectAt(name, log_id, by_log_id.get(log_id), infos.get((log_id, name))) for name, log_id in routes]
    return SubjectList(found, servers, kept.missing)


async def _routes(connection: Connection, prefix: str, after: str, limit: int) -> list[tuple[str, int]]:
    head: Head = {"prefix": prefix, "limit": min(limit + 1, PAGE) if limit else PAGE}
    routes: list[tuple[str, int]] = []
    async for page in ROUTES.pages(connection, head, after):
        routes += page
        if limit and len(routes) > limit:
            return routes[: limit + 1]
    return routes
