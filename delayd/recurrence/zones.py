"""Zones: what the clocks of a place show, as *eras* in which they keep one offset from UTC.

The rules come from the package tzdata and never from the machine, so two servers with the same package decide alike.
Invariant: the eras of a zone follow each other without a hole, so each instant lies in exactly one of them. A local
time lies in two of them where clocks were set back (a *fold*), and in none where they were set forward (a *gap*).

An example. In Berlin one era ends at 2027-03-28T01:00Z, when clocks show 02:00. The next one begins at that instant,
and its clocks show 03:00: the local times from 02:00 up to 03:00 are a gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.resources import files
from typing import NamedTuple
from zoneinfo import ZoneInfo

import tzdata

from delayd.errors import BadArgument
from delayd.hours import EPOCH

DAY_MS = 86_400_000
OFFSET_MS_MAX = 15 * 3_600_000  # No zone has been further from UTC.
# Eras are found year by year. A local day, and the change at either end of it, lies within so much of its year.
MARGIN_S = 2 * 86_400
STEP_S = 6 * 3_600  # No zone has changed its offset and taken the change back within so short a time.
YEARS_KEPT = 4_096  # Of all zones together. A year has few eras: some megabytes at most.

_MS = timedelta(milliseconds=1)


class Era(NamedTuple):
    """A time in which the clocks of a zone keep one offset. Local times are in ms, as if they were in UTC."""

    start_ms: int
    end_ms: int  # The next era begins here.
    offset_ms: int  # A clock shows the instant and so much more.
    shown_before_ms: int  # What clocks showed when the era before ended: more than `start_ms + offset_ms` is a fold.
    shown_after_ms: int  # What clocks show when the next era begins: less than `end_ms + offset_ms` is a fold.


def tzdata_version() -> str:
    """The release of the rules of all zones, such as ``2026f``."""
    return str(tzdata.IANA_VERSION)


def check_zone(name: str) -> None:
    """Raise BadArgument unless this is the name of a zone."""
    if not isinstance(name, str):
        raise BadArgument(f"timezone must be the name of a zone such as 'Europe/Berlin', not {type(name).__name__}")
    if name in _zone_names():
        return
    shown = name if len(name) <= 60 else f"{name[:60]}…"
    near = get_close_matches(name[:60].title(), _zone_names(), n=1, cutoff=0.75)
    hint = f"did you mean {near[0]!r}?" if near else "give one of the IANA list, such as 'Europe/Berlin' or 'UTC'"
    raise BadArgument(f"timezone {shown!r} is not known to tzdata {tzdata_version()}; {hint}")


def era_at(zone: str, ms: int) -> Era:
    """The era that holds an instant, as far as it lies within the year of the instant and two days around it."""
    starts, eras = _eras_of(zone, (EPOCH + timedelta(milliseconds=ms)).year)
    return eras[bisect_right(starts, ms) - 1]


def shown_at(zone: str, ms: int) -> datetime:
    """What clocks of a zone show at an instant, with their offset."""
    return (EPOCH + timedelta(milliseconds=ms)).astimezone(timezone(timedelta(milliseconds=era_at(zone, ms).offset_ms)))


def first_showing(zone: str, local_ms: int, from_ms: int) -> int:
    """The first instant from ``from_ms`` on at which clocks show this local time or a later one."""
    at = max(from_ms, local_ms - OFFSET_MS_MAX)
    era = era_at(zone, at)
    while era.end_ms + era.offset_ms <= local_ms:
        at = era.end_ms
        era = era_at(zone, at)
    return max(at, local_ms - era.offset_ms)


@cache
def _zone_names() -> frozenset[str]:
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="utf-8").split())


@cache
def _rules_of(name: str) -> ZoneInfo:
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


@lru_cache(maxsize=YEARS_KEPT)
def _eras_of(zone: str, year: int) -> tuple[tuple[int, ...], tuple[Era, ...]]:
    """The eras of a year with a margin before and behind it, and the start of each. The outermost are cut there."""
    first_s = int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) - MARGIN_S
    end_s = int(datetime(year + 1, 1, 1, tzinfo=UTC).timestamp()) + MARGIN_S
    rules = _rules_of(zone)
    starts = [first_s, *_changes(rules, first_s, end_s)]
    offsets = [_offset_ms(rules, start_s) for start_s in starts]
    bounds = [*(start_s * 1_000 for start_s in starts), end_s * 1_000]
    around = [offsets[0], *offsets, offsets[-1]]
    eras = tuple(
        Era(bounds[i], bounds[i + 1], offsets[i], bounds[i] + around[i], bounds[i + 1] + around[i + 2])
        for i in range(len(offsets))
    )
    return tuple(bounds[:-1]), eras


def _changes(rules: ZoneInfo, from_s: int, to_s: int) -> Iterator[int]:
    """The seconds within a time at which the offset becomes another one."""
    offset, last_s = _offset_ms(rules, from_s), from_s
    for next_s in range(from_s + STEP_S, to_s + STEP_S, STEP_S):
        while (new := _offset_ms(rules, next_s)) != offset:
            low_s, high_s = last_s, next_s
            while high_s - low_s > 1:
                middle_s = (low_s + high_s) // 2
                if _offset_ms(rules, middle_s) == offset:
                    low_s = middle_s
                else:
                    high_s = middle_s
            if high_s >= to_s:
                return
            yield high_s
            last_s, offset = high_s, _offset_ms(rules, high_s)
            if offset == new:
                break
        last_s = next_s


def _offset_ms(rules: ZoneInfo, second: int) -> int:
    offset = datetime.fromtimestamp(second, rules).utcoffset()
    assert offset is not None, "a zone of tzdata always has an offset"
    return offset // _MS
