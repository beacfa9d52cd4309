"""Groups: consumer groups as the realtime servers list them, and an operator's decisions about one of them.

Invariant: a server that can't be asked is named; a listing without it never looks complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import NamedTuple, TypeVar

from delayd.client.admin import ask
from delayd.errors import BadArgument, DelaydError, ServerUnavailable
from delayd.net.connection import Connection
from delayd.retry_subject import retry_subject
from delayd.secret import Secret
from delayd.wire.frame import Head, HeadValue
from delayd.wire.heads import need_int
from delayd.wire.listings import GroupInfo, read_groups
from delayd.wire.positions import Position, position_value
from delayd.wire.requests import RequestType

PAGE = 1_000  # Groups asked for at once: an answer takes a few milliseconds of the server.
AGED_PAGE = 100  # The same with the age of their oldest message, which may cost some reads for each.

T = TypeVar("T")


class Listing(list[T]):
    """A list of what the servers that answered have.

    Fields:
        missing: a sentence for each server that could not be asked; what it has is not in the list.
    """

    def __init__(self, items: Iterable[T] = (), missing: Iterable[str] = ()) -> None:
        super().__init__(items)
        self.missing = tuple(missing)


class GroupAt(NamedTuple):
    """A consumer group at one realtime server.

    Fields:
        server: the realtime server.
        info: its numbers there, see `delayd.wire.listings.GroupInfo`.
    """

    server: ask.Known
    info: GroupInfo

    @property
    def subject(self) -> str:
        """The subject that it consumes."""
        return self.info.subject

    @property
    def group(self) -> str:
        """Its name."""
        return self.info.group

    @property
    def waiting(self) -> int:
        """Messages that are due and were not pulled yet."""
        return self.info.end - self.info.next

    @property
    def oldest_age(self) -> timedelta | None:
        """How long ago the oldest message was handed over that it has not acknowledged; None when there is none."""
        age_ms = self.info.oldest_ms_ago
        return None if age_ms is None else timedelta(milliseconds=age_ms)

    @property
    def kept_as(self) -> str:
        """The subject under which delay servers keep its dead letters, and what is to come to it again."""
        return retry_subject(self.server.log_id, self.info.group_id)

    @property
    def names(self) -> Head:
        """As a request names it."""
        return {"subject": self.info.subject, "group": self.info.group}


class Moved(NamedTuple):
    """What a rewind of a group does, or has done.

    Fields:
        before: the sequence of the message that the group would have been given next.
        next: the one that it is given next now.
        dropped: messages that the group held, or was to be offered again, and that are nobody's then.
    """

    before: int
    next: int
    dropped: int


async def list_groups(address: str, subject: str | None = None, *, ages: bool = True) -> Listing[GroupAt]:
    """The groups of a subject, or of all, by subject and group."""
    async with ask.meta(address) as connection:
        servers = await ask.known_servers(connection, "realtime")
    # All at once, so that one which hangs leaves the others their time.
    listed = await asyncio.gather(*(groups_at(server, subject, ages=ages) for server in servers))
    found = [place for at_server in listed for place in at_server]
    missing = [each for at_server in listed for each in at_server.missing]
    return Listing(sorted(found, key=lambda place: (place.subject, place.group)), missing)


async def groups_at(server: ask.Known, subject: str | None, *, ages: bool = False) -> Listing[GroupAt]:
    """The groups of one realtime server."""
    what = f"groups of {server.address} are missing"
    if not server.alive:
        silent_s = server.seen_ms_ago // 1_000
        return Listing((), [f"{what}: meta has not heard of it for {silent_s} s; see `delayd servers`"])
    try:
        async with ask.reached(server) as connection:
            return Listing(
                [GroupAt(server, info) async for page in group_pages(connection, subject, ages) for info in page]
            )
    except DelaydError as error:
        return Listing((), [f"{what}: {error.message}"])


async def find_group(address: str, subject: str, group: str) -> Listing[GroupAt]:
    """A group at each realtime server that has it.

    Raises:
        BadArgument: no server that lives has it.
        ServerUnavailable: nobody knows, because a server can't be asked.
    """
    listed = await list_groups(address, subject)
    found = [place for place in listed if place.group == group]
    if not found and listed.missing:
        raise ServerUnavailable(f"where the group {group} of {subject} is can't be told: {'; '.join(listed.missing)}")
    if not found:
        raise BadArgument(f"no realtime server that lives has a group {group} of {subject}; see `delayd groups`")
    return Listing(found, listed.missing)


async def delete_group(place: GroupAt, secret: Secret) -> None:
    """Delete a group at one server."""
    await ask.decide(place.server, RequestType.DELETE_GROUP, place.names, secret)


async def pause_group(place: GroupAt, secret: Secret, *, paused: bool) -> None:
    """Let nobody pull messages of a group at one server, or let them pull again."""
    await ask.decide(place.server, RequestType.PAUSE_GROUP, {**place.names, "paused": paused}, secret)


async def move_group(place: GroupAt, secret: Secret, to: Position, *, dry_run: bool) -> Moved:
    """Let a group go on at another message, or only tell what that would do."""
    head = {**place.names, "to": position_value(to), "dry_run": dry_run}
    answer = await ask.decide(place.server, RequestType.MOVE_GROUP, head, secret)
    return Moved(need_int(answer, "before"), need_int(answer, "next"), need_int(answer, "dropped"))


def one_place(places: Listing[GroupAt]) -> GroupAt:
    """The place of a group that is at one server; BadArgument when it is at several."""
    (place, *more) = places
    if more:
        where = ", ".join(each.server.address for each in (place, *more))
        what = f"{place.group} of {place.subject} is at several realtime servers, {where}"
        raise BadArgument(f"{what}; delete those that are empty")
    return place


async def group_pages(connection: Connection, subject: str | None, ages: bool) -> AsyncIterator[list[GroupInfo]]:
    """The groups of the realtime server at the other end, page by page."""
    after: list[HeadValue] = ["", ""]
    asked: Head = {"subject": subject, "limit": AGED_PAGE if ages else PAGE, "ages": ages}
    more = True
    while more:
        page, more = read_groups(await ask.ask(connection, RequestType.GROUPS, {**asked, "after": after}))
        yield page
        more = more and bool(page)
        if page:
            after = [page[-1].subject, page[-1].group]
