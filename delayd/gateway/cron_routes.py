"""Recurring schedules over HTTP: `/v1/cron` (docs/gateway.md, docs/recurring.md).

Invariant: nothing is overwritten silently. The ETag of a schedule is its version; a change with `If-Match` holds for
that version alone, and one with `If-None-Match: *` only where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from delayd.client.asking.recurring import RecurringInfo
from delayd.client.instants import instant_ms
from delayd.client.producer import AsyncProducer, run_under
from delayd.errors import NoRecurring, RecurringConflict
from delayd.gateway.conditions import changed_since, entity_tag, if_match, if_new
from delayd.gateway.once import number_of
from delayd.gateway.problems import Refusal
from delayd.gateway.sends import decoded, part, queried, query_of, read_body
from delayd.gateway.values import (
    JSON,
    Duration,
    Instant,
    Integer,
    body_bytes,
    body_of,
    duration,
    duration_word,
    header_texts,
    utc,
)
from delayd.hours import instant_text
from delayd.recurrence.recurrence import PREVIEW_MAX, Recurrence
from delayd.recurrence.zones import shown_at

BYTES_MAX = 1 << 20  # A body of the largest size in base64, and two lists of dates.
COUNT = 5

_encode = msgspec.json.Encoder().encode
_Text = Annotated[str, Meta(max_length=400)]


class Recurs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When something recurs: `cron`, a line of five fields, or `every`, a length of time."""

    cron: _Text | None = None
    every: Duration | None = None
    anchor: Instant | None = None
    timezone: _Text = "UTC"
    fold: Literal["first", "last", "both"] | None = None
    gap: Literal["shift", "skip"] | None = None
    skip_dates: list[date] = []
    only_dates: list[date] = []
    jitter: Duration = "0ms"
    starts_at: Instant | None = None
    until: Instant | None = None
    max_occurrences: Integer | None = None

    def when(self) -> dict[str, Any]:
        """The arguments of `Recurrence`."""
        given: dict[str, Any] = {name: getattr(self, name) for name in Recurs.__struct_fields__}
        given["every"] = None if self.every is None else duration(self.every)
        given["jitter"] = duration(self.jitter)
        return {**given, **{name: utc(given[name], name) for name in ("anchor", "starts_at", "until")}}


class NewSchedule(Recurs, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A schedule as it is to be: when it recurs, what it sends, and what becomes of what was missed."""

    subject: str
    body: str | None = None
    body_base64: str | None = None
    headers: dict[str, str] | None = None
    tags: list[str] | None = None
    ttl: Duration | None = None
    ordering_key: str | None = None
    misfire: Literal["last", "all", "skip"] = "last"
    catchup: Duration | None = None
    catchup_max: Integer = 100
    overlap: Literal["all", "skip"] = "all"

    def options(self) -> dict[str, Any]:
        """The arguments of `Producer.recurring` behind the body."""
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("headers", "tags", "ordering_key", "misfire", "catchup_max", "overlap")
        }
        given["ttl"] = None if self.ttl is None else duration(self.ttl)
        given["catchup"] = None if self.catchup is None else duration(self.catchup)
        return {**self.when(), **given}


class Schedule(NewSchedule, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule as it is kept, and what it did. `ordered`: its messages have an ordering key, of which a hash alone is
    kept; a change has to give it again.
    """

    name: str
    state: Literal["active", "paused", "ended"]
    version: int
    ordered: bool = False
    note: str = ""
    next: str | None = None
    last: str | None = None
    sent: int
    skipped: dict[str, int]
    created_at: str
    changed_at: str
    decided_until: str


class SchedulesListed(msgspec.Struct, frozen=True, kw_only=True):
    """Schedules, by name."""

    schedules: list[Schedule]


class CronQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which schedules are listed: those whose names begin so."""

    prefix: str = ""


class CronNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a schedule is paused."""

    note: str = ""


class NextQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many occurrences are shown, and behind which instant: what is decided, unless given."""

    count: Annotated[int, Meta(ge=1, le=PREVIEW_MAX)] = COUNT
    after: Instant | None = None


class NextAsked(Recurs, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A recurrence to be tried out; `after` is now unless given."""

    count: Annotated[int, Meta(ge=1, le=PREVIEW_MAX)] = COUNT
    after: Instant | None = None


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """An occurrence, in UTC and as clocks of its zone show it."""

    occurrence: str
    occurrence_ms: int
    local: str


class ComingListed(msgspec.Struct, frozen=True, kw_only=True):
    """Occurrences in order; fewer than asked for when nothing recurs any more. Jitter and pauses are not in them."""

    occurrences: list[Coming]


class ScheduleDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that has ended."""

    name: str


_NEW, _NOTE = msgspec.json.Decoder(NewSchedule), msgspec.json.Decoder(CronNote)
_ASKED = msgspec.json.Decoder(NextAsked)


class CronRoutes:
    """What is asked of recurring schedules; ``producer`` gives the producer of all requests."""

    def __init__(self, producer: Callable[[], AsyncProducer], now_ms: Callable[[], int]) -> None:
        self._producer = producer
        self._now_ms = now_ms

    async def listed(self, request: Request) -> Response:
        """All schedules, or those of a prefix."""
        found = await self._producer().list_recurring(query_of(request, CronQuery).prefix)
        return Response(_encode(SchedulesListed(schedules=[_shown(info) for info in found])), media_type=JSON)

    async def get(self, request: Request) -> Response:
        """One schedule."""
        queried(request)
        return _answer(await self._found(request))

    async def put(self, request: Request) -> Response:
        """Make a schedule, or change it."""
        queried(request)
        wish = decoded(_NEW, await read_body(request, BYTES_MAX))
        content = body_bytes(wish.body, wish.body_base64)
        version = 0 if if_new(request) else _version(request)

        async def put() -> RecurringInfo:
            return await self._producer().recurring(
                part(request, "name"), wish.subject, content, if_version=version, **wish.options()
            )

        return await _changed(put, version)

    async def delete(self, request: Request) -> Response:
        """End a schedule."""
        queried(request)
        name, version = part(request, "name"), _version(request)
        try:
            found = await self._producer().delete_recurring(name, if_version=version)
        except RecurringConflict as error:
            raise _other(error) from error
        if not found:
            raise _none(name)
        return Response(_encode(ScheduleDeleted(name=name)), media_type=JSON)

    async def pause(self, request: Request) -> Response:
        """Let a schedule send nothing for now."""
        queried(request)
        note = decoded(_NOTE, await read_body(request, BYTES_MAX) or b"{}").note
        version = _version(request)
        name = part(request, "name")
        return await _changed(lambda: self._producer().pause_recurring(name, note, if_version=version), version)

    async def resume(self, request: Request) -> Response:
        """Let a paused schedule send again."""
        queried(request)
        version = _version(request)
        name = part(request, "name")
        return await _changed(lambda: self._producer().resume_recurring(name, if_version=version), version)

    async def run(self, request: Request) -> Response:
        """Send one message now."""
        queried(request)
        name = part(request, "name")
        number = number_of(request, name)
        return await _changed(lambda: run_under(self._producer(), name, number), None)

    async def next(self, request: Request) -> Response:
        """The next occurrences of a schedule."""
        wish = query_of(request, NextQuery)
        info = await self._found(request)
        return _coming(info.recurrence, [_ms(each) for each in info.preview(wish.count, utc(wish.after, "after"))])

    async def preview(self, request: Request) -> Response:
        """The next occurrences of a recurrence that nobody keeps."""
        queried(request)
        wish = decoded(_ASKED, await read_body(request, BYTES_MAX))
        recurrence = Recurrence(**wish.when())
        after = utc(wish.after, "after")
        return _coming(recurrence, recurrence.preview(wish.count, self._now_ms() if after is None else _ms(after)))

    async def _found(self, request: Request) -> RecurringInfo:
        name = part(request, "name")
        info = await self._producer().get_recurring(name)
        if info is None:
            raise _none(name)
        return info


async def _changed(change: Callable[[], Any], version: int | None) -> Response:
    try:
        return _answer(await change())
    except NoRecurring as error:
        raise Refusal(404, error.code, error.message) from error
    except RecurringConflict as error:
        if version is None:
            what = "another specification is kept under this name; send If-Match with its ETag to change that one"
            raise Refusal(409, error.code, f"{what}, or choose another name", entity_tag(error.version)) from error
        raise _other(error) from error


def _version(request: Request) -> int | None:
    tag = if_match(request)
    if tag is None:
        return None
    if not (tag.isascii() and tag.isdigit() and 1 <= len(tag) <= 9 and int(tag)):
        raise changed_since(f"no schedule has the ETag {tag[:40]!r}: it is a version", "*")
    return int(tag)


def _other(error: RecurringConflict) -> Refusal:
    now = f'the schedule has the ETag "{error.version}" now' if error.version else "there is no schedule of this name"
    return changed_since(now, error.version)


def _none(name: str) -> Refusal:
    return Refusal(404, NoRecurring.code, f"there is no recurring schedule {name[:200]!r}")


def _answer(info: RecurringInfo) -> Response:
    return Response(_encode(_shown(info)), 200, entity_tag(info.version), JSON)


def _shown(info: RecurringInfo) -> Schedule:
    when, policy = info.recurrence, info.policy
    return Schedule(
        name=info.name,
        state="paused" if info.paused else "ended" if info.next is None else "active",
        version=info.version,
        subject=info.subject,
        **body_of(info.body),
        headers=header_texts(info.headers) or None,
        tags=list(info.tags) or None,
        ttl=_word(info.ttl),
        ordered=info.ordered,
        cron=when.cron,
        every=_word(when.every),
        anchor=when.anchor,
        timezone=when.timezone,
        fold=when.fold,
        gap=when.gap,
        skip_dates=list(when.skip_dates),
        only_dates=list(when.only_dates),
        jitter=duration_word(when.jitter),
        starts_at=when.starts_at,
        until=when.until,
        max_occurrences=when.max_occurrences,
        misfire=policy.misfire,
        catchup=_word(policy.catchup),
        catchup_max=policy.catchup_max,
        overlap=policy.overlap,
        note=info.note,
        next=_text(info.next),
        last=_text(info.last),
        sent=info.sent,
        skipped=dict(info.skipped),
        created_at=instant_text(_ms(info.created_at)),
        changed_at=instant_text(_ms(info.changed_at)),
        decided_until=instant_text(_ms(info.decided_until)),
    )


def _coming(recurrence: Recurrence, instants: list[int]) -> Response:
    listed = [
        Coming(
            occurrence=instant_text(each),
            occurrence_ms=each,
            local=shown_at(recurrence.timezone, each).isoformat(timespec="seconds"),
        )
        for each in instants
    ]
    return Response(_encode(ComingListed(occurrences=listed)), media_type=JSON)


def _word(length: timedelta | None) -> str | None:
    return None if length is None else duration_word(length)


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else instant_text(_ms(moment))


def _ms(moment: datetime) -> int:
    return instant_ms(moment.astimezone(UTC), "after")
