"""Forecast: how many pending messages come due in each hour, day or month (docs/gateway.md): of all subjects, from the
counts that delay servers keep; of one, from the messages that they list, with the second in which most of them are due.

Memory is bounded by the seconds that have messages, not by the messages. An example: 1,000,000 messages are due within
a day. Their pages are counted by seconds as they come, and nothing of a page stays but a count for each of at most
86,400 seconds. One forecast is made at a time, because one with ten million such seconds holds 160 MB.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from delayd.batch.columns import Int64s
from delayd.client.asking.ask import list_due_hours
from delayd.client.producer import AsyncProducer
from delayd.gateway.sends import part, query_of
from delayd.gateway.values import JSON, Instant, utc
from delayd.hours import HOUR_SECONDS, hours_of, instant_text, period_name

SECOND_MS = 1_000
UNSORTED_MAX = 1 << 20  # Seconds that came since they were last put in order, 8 MB.

_encode = msgspec.json.Encoder().encode


class ForecastQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pending messages are counted, and by which periods, in UTC."""

    by: Literal["hour", "day", "month"] = "day"
    due_from: Instant | None = None
    due_before: Instant | None = None
    tag: str | None = None


class DuePeriod(msgspec.Struct, frozen=True, kw_only=True):
    """What comes due in a period, and the second of it in which most messages do; `bytes` are those of bodies."""

    period: str
    messages: int
    bytes: int
    fullest_second: str
    fullest_second_ms: int
    fullest_second_messages: int


class SubjectForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The periods that have messages, in order. `in_flight` and `unread`: messages that are in none of them."""

    by: str
    periods: list[DuePeriod]
    pending: int
    in_flight: int
    unread: int


class PeriodQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By which periods, in UTC."""

    by: Literal["hour", "day", "month"] = "day"


class PeriodCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages come due in a period."""

    period: str
    messages: int


class ClusterForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The periods that have messages, in order; in `missing` a sentence for each server that could not be asked."""

    by: str
    periods: list[PeriodCount]
    pending: int
    missing: tuple[str, ...]


class BusySeconds(NamedTuple):
    """How many messages are due in each second that has any: rising seconds since the epoch, and their counts."""

    seconds: Int64s
    counts: Int64s

    @classmethod
    def joined(cls, parts: list[BusySeconds]) -> BusySeconds:
        """All of these as one."""
        seconds, places = np.unique(np.concatenate([part.seconds for part in parts]), return_inverse=True)
        counts = np.zeros(len(seconds), np.int64)
        np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
        return cls(seconds, counts)


class _HourDue(NamedTuple):
    messages: int
    byte_count: int
    fullest: int  # Messages of its fullest second.
    second: int  # That second, since the epoch.


class DueCounts:
    """Counts messages by when they are due."""

    def __init__(self) -> None:
        self._parts = [BusySeconds(np.empty(0, np.int64), np.empty(0, np.int64))]
        self._unsorted = 0
        self._bytes: Counter[int] = Counter()  # By hour.

    def add(self, due_ms: Int64s, sizes: Int64s) -> None:
        """Count messages: due_ms int64[n], when each is due; sizes int64[n], the bytes of each body."""
        part = BusySeconds(*np.unique(due_ms // SECOND_MS, return_counts=True))
        self._parts.append(part)
        self._unsorted += len(part.seconds)
        if self._unsorted > UNSORTED_MAX:
            self._join()
        hours, places = np.unique(hours_of(due_ms), return_inverse=True)
        for hour, size in zip(hours.tolist(), np.bincount(places, weights=sizes).tolist(), strict=True):
            self._bytes[hour] += int(size)

    def periods(self, by: str) -> list[DuePeriod]:
        """The periods that have messages, in order; ``by``: hour, day or month."""
        found = self._join()
        hours, firsts = np.unique(found.seconds // HOUR_SECONDS, return_index=True)
        bounds = pairwise([*firsts.tolist(), len(found.seconds)])
        periods: dict[str, list[_HourDue]] = defaultdict(list)
        for hour, (first, end) in zip(hours.tolist(), bounds, strict=True):
            counts = found.counts[first:end]
            fullest = int(counts.argmax())
            due = _HourDue(
                int(counts.sum()), self._bytes[hour], int(counts[fullest]), int(found.seconds[first + fullest])
            )
            periods[period_name(hour, by)].append(due)
        return [_period(name, own) for name, own in periods.items()]

    def _join(self) -> BusySeconds:
        if len(self._parts) > 1:
            self._parts, self._unsorted = [BusySeconds.joined(self._parts)], 0
        return self._parts[0]


class Forecasts:
    """Makes forecasts, of subjects one at a time; belongs to one loop."""

    def __init__(self, meta: str) -> None:
        self._meta = meta
        self._one = asyncio.Lock()

    async def of_cluster(self, request: Request) -> Response:
        """How many messages come due in each period."""
        by = query_of(request, PeriodQuery).by
        listed = await list_due_hours(self._meta)
        counts: Counter[str] = Counter()
        for due in sorted(listed):
            counts[period_name(due.hour, by)] += due.messages
        told = ClusterForecast(
            by=by,
            periods=[PeriodCount(period=name, messages=messages) for name, messages in counts.items()],
            pending=counts.total(),
            missing=listed.missing,
        )
        return Response(_encode(told), media_type=JSON)

    async def of_subject(self, producer: AsyncProducer, request: Request) -> Response:
        """How many messages of a subject come due in each period."""
        wish = query_of(request, ForecastQuery)
        pages = producer.pending(
            part(request, "subject"),
            due_from=utc(wish.due_from, "due_from"),
            due_before=utc(wish.due_before, "due_before"),
            tag=wish.tag,
        )
        async with self._one:
            counts = DueCounts()
            async for page in pages:
                counts.add(page.deliver_at_ms, page.sizes)
            told = SubjectForecast(
                by=wish.by,
                periods=counts.periods(wish.by),
                pending=pages.found,
                in_flight=pages.in_flight,
                unread=pages.unread,
            )
        return Response(_encode(told), media_type=JSON)


def _period(name: str, hours: list[_HourDue]) -> DuePeriod:
    fullest = max(hours, key=lambda hour: hour.fullest)  # The first of several.
    return DuePeriod(
        period=name,
        messages=sum(hour.messages for hour in hours),
        bytes=sum(hour.byte_count for hour in hours),
        fullest_second=instant_text(fullest.second * SECOND_MS),
        fullest_second_ms=fullest.second * SECOND_MS,
        fullest_second_messages=fullest.fullest,
    )
