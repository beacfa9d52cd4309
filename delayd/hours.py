"""Hours: the granule in which messages rest on disk, as whole hours since the epoch, UTC; times as people read them.

Invariant: ``hour_start_ms(h) <= ms < hour_start_ms(h + 1)`` exactly when ``hour_of_ms(ms) == h``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from delayd.errors import BadArgument

HOUR_MS = 3_600_000
HOUR_SECONDS = 3_600
INSTANT_MS_MIN = 1_000_000_000_000  # 2001-09-09; every instant of our time that was written in seconds lies below it.
INSTANT_MS_MAX = 253_402_300_799_999  # The end of the year 9999: no later instant can be shown as a date.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAME_DIGITS = 10  # YYYYMMDDHH sorts as text the way hours sort as numbers.


def hour_of_ms(ms: int) -> int:
    """Hour that holds the instant ``ms``."""
    return ms // HOUR_MS


def hour_start_ms(hour: int) -> int:
    """First millisecond of an hour."""
    return hour * HOUR_MS


def hours_of(ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Hour of each instant: int64[n] in, int64[n] out, a new array."""
    return np.floor_divide(ms, np.int64(HOUR_MS))


def hour_name(hour: int) -> str:
    """Name of an hour: YYYYMMDDHH, UTC."""
    start = datetime.fromtimestamp(hour * HOUR_SECONDS, tz=UTC)
    return f"{start.year:04d}{start.month:02d}{start.day:02d}{start.hour:02d}"


def period_name(hour: int, by: str) -> str:
    """The name of the ``hour``, ``day`` or ``month`` that an hour belongs to, in UTC."""
    begin = datetime.fromtimestamp(hour * HOUR_SECONDS, UTC)
    return begin.strftime({"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}[by])


def hour_from_name(name: str) -> int:
    """Hour of a name; BadArgument for anything that `hour_name` does not write."""
    if len(name) != NAME_DIGITS or not (name.isascii() and name.isdigit()):
        raise BadArgument(f"{name!r} is no hour; write ten digits YYYYMMDDHH in UTC")
    try:
        start = datetime(int(name[:4]), int(name[4:6]), int(name[6:8]), int(name[8:]), tzinfo=UTC)
    except ValueError as error:
        raise BadArgument(f"{name!r} is no hour ({error}); write ten digits YYYYMMDDHH in UTC") from error
    return int(start.timestamp()) // HOUR_SECONDS


def instant_text(ms: int) -> str:
    """An instant in UTC to the millisecond; its number when no calendar reaches it."""
    seconds, rest_ms = divmod(ms, 1_000)
    try:
        return f"{_second_text(seconds)}.{rest_ms:03d}Z"
    except OverflowError:
        return f"{ms} ms"


@lru_cache(256)  # Messages that are sent one behind the other are due in few seconds.
def _second_text(seconds: int) -> str:
    return (EPOCH + timedelta(seconds=seconds)).isoformat().removesuffix("+00:00")


def duration_text(ms: float) -> str:
    """A length of time with the unit that suits it: ``3 ms``, ``1.250 s``, ``2 min 05 s``, ``3 h 20 min``."""
    if ms < 0:
        return f"-{duration_text(-ms)}"
    if ms < 1_000:
        return f"{ms:.3g} ms" if ms != int(ms) else f"{int(ms)} ms"
    if ms < 60_000:
        return f"{ms / 1_000:.3f} s"
    seconds = int(ms // 1_000)
    if seconds < 3_600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86_400:
        return f"{seconds // 3_600} h {seconds % 3_600 // 60:02d} min"
    return f"{seconds // 86_400} d {seconds % 86_400 // 3_600:02d} h"


def duration_word(length: timedelta) -> str:
    """A length of time as an option takes it, such as ``1h30m``; it is one of whole milliseconds."""
    left_ms = length // timedelta(milliseconds=1)
    words = []
    for unit, unit_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)):
        count, left_ms = divmod(left_ms, unit_ms)
        words += [f"{count}{unit}"] if count else []
    return "".join(words) or "0s"
