"""What operators ask over HTTP: subjects, groups, dead letters and quotas, and what they decide about them.

Invariant: what only an operator may decide needs a gateway that has the cluster's secret; without it the answer is 403.
What can't be undone is only told, unless the caller says `"dry_run": false`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from delayd.client.admin import AsyncAdmin, Letter
from delayd.client.asking import ask
from delayd.client.asking.ask import GroupAt, Listing, QuotaAt
from delayd.client.asking.walking import Walked
from delayd.client.instants import instant_ms
from delayd.errors import BadArgument, DelaydError
from delayd.gateway.problems import Refusal, problem
from delayd.gateway.sends import Lines, decoded, part, queried, query_of, read_body
from delayd.gateway.values import INTEGER_MAX, JSON, Instant, body_of, header_texts, utc
from delayd.hours import instant_text
from delayd.secret import Secret
from delayd.wire.frame import Head
from delayd.wire.meta import read_subject_page
from delayd.wire.requests import RequestType

WORDS_BYTES_MAX = 4_096
SUBJECTS_MAX = 1_000

Walk = Callable[..., Coroutine[object, object, Walked]]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]


class SubjectsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subjects that begin with `prefix`, behind the name `after`."""

    prefix: str = ""
    after: str = ""
    limit: Annotated[int, Meta(ge=1, le=SUBJECTS_MAX)] = SUBJECTS_MAX


class SubjectPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A subject, and the realtime server that serves it."""

    subject: str
    realtime_log_id: str


class SubjectsListed(msgspec.Struct, frozen=True, kw_only=True):
    """A page of subjects in the order of their names, and whether there are more behind the last one."""

    subjects: list[SubjectPlace]
    more: bool


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group is in its subject, at one realtime server."""

    subject: str
    group: str
    realtime_log_id: str
    waiting: int
    outstanding: int
    redelivering: int
    leaving: int
    quarantined: int
    next: int
    end: int
    paused: bool
    ordered: bool
    exclusive: bool
    filter: str
    oldest_ms_ago: int | None


class GroupsListed(msgspec.Struct, frozen=True, kw_only=True):
    """Groups, and a sentence for each server that could not be asked."""

    groups: list[GroupFigures]
    missing: tuple[str, ...]


class PausedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the consumers of a group get nothing."""

    paused: bool


class Rewinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a group goes on: one of `to`, `at` and `sequence`."""

    to: Literal["earliest", "latest"] | None = None
    at: Instant | None = None
    sequence: Count | None = None
    dry_run: bool = True

    def place(self) -> str | datetime | int:
        """The argument of a rewind."""
        given = [each for each in (self.to, self.at, self.sequence) if each is not None]
        if len(given) != 1:
            raise BadArgument("give one of to, at and sequence: where the group goes on")
        return given[0]


class Rewound(msgspec.Struct, frozen=True, kw_only=True):
    """What a rewind does, or has done: the sequence that came next before, the one that comes next now, and how many
    messages the group had besides.
    """

    before: int
    next: int
    dropped: int
    dry_run: bool


class KeepPending(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether dead letters and retries of a deleted group stay."""

    keep_pending: bool = False


class GroupDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """How many dead letters and retries ended with their group."""

    ended: int


class DeathWindow(TypedDict):
    """Which dead letters are meant."""

    since: datetime | None
    before: datetime | None


class DiedWithin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A window of dead letters, by when they died."""

    since: Instant | None = None
    before: Instant | None = None

    def window(self) -> DeathWindow:
        """The arguments of the call."""
        return {"since": utc(self.since, "since"), "before": utc(self.before, "before")}


class DiedAsked(DiedWithin, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dead letters of a window, which are only counted unless `dry_run` is false."""

    dry_run: bool = True


class DeadLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a list: one dead letter."""

    id: str
    dead_at: str
    attempts: int
    reason: str
    error: str
    origin: int
    first_due: str | None = None
    key: str | None = None
    tags: tuple[str, ...] = ()
    headers: dict[str, str] | None = None
    body: str | None = None
    body_base64: str | None = None


class DeadTotal(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a list of dead letters: how many it has, and how many hours can't be read."""

    dead: int
    unread: int


class LettersDone(msgspec.Struct, frozen=True, kw_only=True):
    """What was done about dead letters, or how many there are."""

    found: int
    done: int
    in_flight: int
    ended: int
    unread: int
    dry_run: bool


class NewQuota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quota; a limit that is left out is none."""

    per_second: Count | None = None
    pending: Count | None = None
    pending_bytes: Count | None = None


class QuotasQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subjects that begin with `prefix`."""

    prefix: str = ""


class QuotaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A quota at one delay server, and how much of it is used: null while the server still counts."""

    subject: str
    delay_log_id: str
    per_second: int | None
    pending: int | None
    pending_bytes: int | None
    pending_now: int | None
    bytes_now: int | None


class QuotasListed(msgspec.Struct, frozen=True, kw_only=True):
    """Quotas, and a sentence for each server that could not be asked."""

    quotas: list[QuotaFigures]
    missing: tuple[str, ...]


_REWINDING, _DIED = msgspec.json.Decoder(Rewinding), msgspec.json.Decoder(DiedAsked)
_NEW_QUOTA = msgspec.json.Decoder(NewQuota)
_encode = msgspec.json.Encoder().encode


class AdminRoutes:
    """What is asked of a cluster; belongs to one loop, between `start` and `close`."""

    def __init__(self, meta: str, secret: Secret | None) -> None:
        self._meta = meta
        self._secret = secret
        self._admin: AsyncAdmin | None = None
        self._open = AsyncExitStack()

    async def start(self) -> None:
        """Be ready to ask."""
        self._admin = await self._open.enter_async_context(AsyncAdmin(self._meta, secret=self._secret))

    async def close(self) -> None:
        """Disconnect."""
        await self._open.aclose()

    async def subjects(self, request: Request) -> Response:
        """A page of subjects."""
        wish = query_of(request, SubjectsQuery)
        head: Head = {"prefix": wish.prefix, "after": wish.after, "limit": wish.limit}
        async with ask.meta(self._meta) as connection:
            page, more = read_subject_page(await ask.ask(connection, RequestType.META_SUBJECTS, head))
        told = [SubjectPlace(subject=name, realtime_log_id=f"{log_id:016x}") for name, log_id in page]
        return _answer(SubjectsListed(subjects=told, more=more))

    async def groups(self, request: Request) -> Response:
        """All groups, or those of a subject."""
        queried(request)
        subject = part(request, "subject") if "subject" in request.path_params else None
        return _answer(_groups_listed(await self.asked.groups(subject)))

    async def group(self, request: Request) -> Response:
        """One group, wherever it is."""
        queried(request)
        return _answer(_groups_listed(await self._found(*_names(request))))

    async def pause(self, request: Request) -> Response:
        """A group gets nothing any more."""
        return await self._set_paused(request, paused=True)

    async def resume(self, request: Request) -> Response:
        """A paused group gets messages again."""
        return await self._set_paused(request, paused=False)

    async def rewind(self, request: Request) -> Response:
        """A group goes on elsewhere."""
        queried(request)
        wish = decoded(_REWINDING, await read_body(request, WORDS_BYTES_MAX))
        subject, group = await self._operated(request)
        moved = await self.asked.rewind(subject, group, wish.place(), dry_run=wish.dry_run)
        return _answer(Rewound(**moved._asdict(), dry_run=wish.dry_run))

    async def delete(self, request: Request) -> Response:
        """A group ends."""
        wish = query_of(request, KeepPending)
        subject, group = await self._operated(request)
        ended = await self.asked.delete_group(subject, group, keep_pending=wish.keep_pending)
        return _answer(GroupDeleted(ended=ended))

    async def dead_letters(self, request: Request) -> Response:
        """The dead letters of a group, as lines."""
        wish = query_of(request, DiedWithin)
        subject, group = _names(request)
        await self._found(subject, group)
        pages = await self.asked.dead_letters(subject, group, **wish.window())
        first = await anext(pages, None)  # An error before any line has a status of its own.

        async def lines() -> AsyncIterator[bytes]:
            page, dead = first, 0
            while page is not None:
                dead += len(page)
                yield b"".join(_encode(_dead_line(letter)) + b"\n" for letter in page)
                try:
                    page = await anext(pages, None)
                except DelaydError as error:
                    yield _encode(problem(error)) + b"\n"
                    return
            yield _encode(DeadTotal(dead=dead, unread=pages.unread)) + b"\n"

        return Lines(lines())

    async def redrive(self, request: Request) -> Response:
        """Dead letters are sent to their group again."""
        return await self._walk(request, AsyncAdmin.redrive)

    async def purge(self, request: Request) -> Response:
        """Dead letters end for good."""
        return await self._walk(request, AsyncAdmin.purge)

    async def quotas(self, request: Request) -> Response:
        """Quotas, and how much of them is used."""
        wish = query_of(request, QuotasQuery)
        found = await self.asked.quotas(wish.prefix)
        return _answer(QuotasListed(quotas=[_quota(each) for each in found], missing=found.missing))

    async def set_quota(self, request: Request) -> Response:
        """A subject has this quota from now on."""
        queried(request)
        wish = decoded(_NEW_QUOTA, await read_body(request, WORDS_BYTES_MAX))
        self._need_secret()
        await self.asked.set_quota(part(request, "subject"), **msgspec.structs.asdict(wish))
        return _answer(wish)

    @property
    def asked(self) -> AsyncAdmin:
        """Who asks for all requests."""
        assert self._admin is not None, "requests come after the start"
        return self._admin

    def _need_secret(self) -> None:
        if self._secret is None:
            raise Refusal(
                403, "not_trusted", "only an operator may do this; start the gateway with the cluster's --secret-file"
            )

    async def _operated(self, request: Request) -> tuple[str, str]:
        """The group about which an operator decides."""
        self._need_secret()
        subject, group = _names(request)
        await self._found(subject, group)
        return subject, group

    async def _found(self, subject: str, group: str) -> Listing[GroupAt]:
        listed = await self.asked.groups(subject)
        found = [place for place in listed if place.group == group]
        if not found and not listed.missing:
            raise Refusal(404, "unknown", f"no realtime server has a group {group[:300]} of {subject[:300]}")
        return Listing(found, listed.missing)

    async def _set_paused(self, request: Request, *, paused: bool) -> Response:
        queried(request)
        subject, group = await self._operated(request)
        await (self.asked.pause if paused else self.asked.resume)(subject, group)
        return _answer(PausedGroup(paused=paused))

    async def _walk(self, request: Request, walk: Walk) -> Response:
        queried(request)
        wish = decoded(_DIED, await read_body(request, WORDS_BYTES_MAX) or b"{}")
        subject, group = _names(request)
        await self._found(subject, group)
        done = await walk(self.asked, subject, group, **wish.window(), dry_run=wish.dry_run)
        told = {name: value for name, value in done._asdict().items() if name != "resume"}
        return _answer(LettersDone(**told, dry_run=wish.dry_run))


def _names(request: Request) -> tuple[str, str]:
    return part(request, "subject"), part(request, "group")


def _groups_listed(listed: Listing[GroupAt]) -> GroupsListed:
    figures = [
        GroupFigures(
            subject=place.subject,
            group=place.group,
            realtime_log_id=f"{place.server.log_id:016x}",
            waiting=place.waiting,
            outstanding=place.info.outstanding,
            redelivering=place.info.redelivering,
            leaving=place.info.leaving,
            quarantined=place.info.quarantined,
            next=place.info.next,
            end=place.info.end,
            paused=place.info.paused,
            ordered=place.info.ordered,
            exclusive=place.info.exclusive,
            filter=place.info.filter,
            oldest_ms_ago=place.info.oldest_ms_ago,
        )
        for place in listed
    ]
    return GroupsListed(groups=figures, missing=listed.missing)


def _dead_line(letter: Letter) -> DeadLine:
    assert letter.dead_at is not None, "these are dead letters"
    return DeadLine(
        id=letter.receipt.token,
        dead_at=_text(letter.dead_at),
        attempts=letter.attempts,
        reason=letter.reason,
        error=letter.error,
        origin=letter.origin,
        first_due=None if letter.first_due is None else _text(letter.first_due),
        key=letter.key,
        tags=letter.tags,
        headers=header_texts(letter.headers) or None,
        **body_of(letter.body),
    )


def _text(moment: datetime) -> str:
    return instant_text(instant_ms(moment, "instant"))


def _quota(each: QuotaAt) -> QuotaFigures:
    info = each.info
    return QuotaFigures(
        subject=info.subject,
        delay_log_id=f"{each.server.log_id:016x}",
        per_second=info.per_second,
        pending=info.pending,
        pending_bytes=info.pending_bytes,
        pending_now=info.pending_now if info.counted else None,
        bytes_now=info.bytes_now if info.counted else None,
    )


def _answer(told: msgspec.Struct) -> Response:
    return Response(_encode(told), media_type=JSON)
