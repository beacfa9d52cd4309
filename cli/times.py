"""Instants and durations as people write them.

Invariant: an instant that is read names exactly one moment: it carries its offset from UTC, or counts from now.
"""

import re
import time
from datetime import UTC, datetime, timedelta

import click

from delayd.errors import BadArgument
from delayd.hours import EPOCH, INSTANT_MS_MIN, instant_text

DURATION_MAX = timedelta(days=36_500)  # Beyond any use, and below what clocks and timers of the system can count.

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdw])")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_MS = timedelta(milliseconds=1)
_DATE_OFFSET = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[+-][0-9]{2}:[0-9]{2}")
_DIGITS = re.compile(r"[0-9]{9,14}")
_CLOCK_TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}")
_LOOSE_TIME = re.compile(r"[ T]([0-9]{1,2}):([0-9]{2})")


def duration(text: str) -> timedelta:
    """Read a length of time of an option, such as ``30m``, ``1h30m`` or ``250ms``."""
    length = parse_duration(text)
    if length is None:
        raise click.BadParameter(f"{text!r} is no duration; write one such as 250ms, 30s, 30m, 1h30m, 2d or 1w")
    if length > DURATION_MAX:
        raise click.BadParameter(f"{text!r} is longer than {DURATION_MAX.days} days; write a shorter one")
    return length


def shift(text: str) -> timedelta:
    """Read by how much something moves: a length of time, with a ``-`` before it when it moves back."""
    length = duration(text.removeprefix("-"))
    return -length if text.startswith("-") else length


def instant(text: str) -> int:
    """Read a moment of an option, in ms since the epoch: ISO 8601 with an offset, ``now``, ``+30m`` or ``-2h``."""
    if text == "now":
        return _now_ms()
    distance = parse_duration(text[1:]) if text[:1] in ("+", "-") else None
    if distance is not None:
        return _now_ms() + (distance if text[0] == "+" else -distance) // _MS
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no instant; {_hint(text)}") from error
    if moment.tzinfo is None:
        # What looks like an offset behind a date is read as a time of that day.
        dated = f"write {text[:10]}T00:00{text[10:]}" if _DATE_OFFSET.fullmatch(text) else _with_offset(moment)
        raise click.BadParameter(f"{text!r} does not say its offset from UTC; {dated}")
    return (moment - EPOCH) // _MS


def check_order(from_ms: int | None, to_ms: int | None) -> None:
    """Refuse a --from behind its --to: a listing of nothing would look like an answer."""
    if from_ms is not None and to_ms is not None and from_ms > to_ms:
        raise BadArgument(
            f"--from {instant_text(from_ms)} is after --to {instant_text(to_ms)}, so nothing lies between; swap them"
        )


def parse_duration(text: str) -> timedelta | None:
    """The length that a text such as ``1h30m`` names, in whole milliseconds; None when it names none."""
    if _DURATION.fullmatch(text) is None:
        return None
    total_ms = sum(float(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text))
    try:
        return timedelta(milliseconds=round(total_ms))
    except OverflowError:
        return None


def _hint(text: str) -> str:
    """What to write instead of a text that is no instant: the text itself, mended where it is clear what is meant."""
    if _DIGITS.fullmatch(text):
        number = int(text)
        unit, ms = ("milliseconds", number) if number >= INSTANT_MS_MIN else ("seconds", number * 1000)
        return f"as {unit} since the epoch it is {instant_text(ms)}; write that"
    if _CLOCK_TIME.fullmatch(text):
        return f"write of which day, such as {datetime.now(UTC).date()}T{text:0>5}Z"
    if parse_duration(text) is not None:
        return f"write +{text} for so long from now, or -{text} for so long ago"
    tidy = _LOOSE_TIME.sub(lambda found: f"T{found[1]:0>2}:{found[2]}", text.strip().upper(), count=1)
    for mended in (tidy, tidy.replace(" ", ""), f"{tidy[:10]}T00:00{tidy[10:]}"):
        try:
            moment = datetime.fromisoformat(mended)
        except ValueError:
            continue
        return _with_offset(moment) if moment.tzinfo is None else f"write {mended}"
    return "write one such as 2027-01-01T09:00:00+01:00, now, +30m or -2h"


def _with_offset(moment: datetime) -> str:
    """An instant without its offset as it may be copied: in UTC, and in this machine's time where that is another."""
    whole = moment.isoformat(timespec="auto" if moment.second or moment.microsecond else "minutes")
    try:
        offset = moment.astimezone().isoformat()[-6:]
    except (ValueError, OverflowError):
        # At either end of the calendar.
        offset = "+00:00"
    there = f"{whole}+01:00 with another offset" if offset == "+00:00" else f"{whole}{offset} for this machine's time"
    return f"write {whole}Z for UTC, or {there}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
