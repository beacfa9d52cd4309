"""A cron line: the days on which it fires, and the times of these days.

The fields are those of Debian's cron, parsed by CronSim: minute, hour, day of the month, month, day of the week, with
names (``MON``, ``JAN``), steps, ranges, ``L`` and ``LW`` (the last day, or weekday, of the month), ``5L`` (its last
Friday) and ``MON#2`` (its second Monday). ``@hourly``, ``@daily``, ``@weekly``, ``@monthly`` and ``@yearly`` are words
for whole lines. When both the day of the month and the day of the week are limited, a day needs only one of them, as
cron has it: ``0 0 13 * FRI`` fires on each 13th and on each Friday.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta

from cronsim import CronSim, CronSimError
from cronsim.cronsim import FIELD_NAMES

from delayd.errors import BadArgument
from delayd.hours import EPOCH
from delayd.recurrence.zones import DAY_MS

CHARACTERS_MAX = 1_000  # Sixty minutes and all else, each written out, take less than 500.
FIELDS = ("minute", "hour", "day of the month", "month", "day of the week")
WORDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_DAY = timedelta(days=1)
_MINUTE_MS = 60_000
_HINTS = {
    "minute": "write 0 to 59, such as 30, 0,30 or */15",
    "hour": "write 0 to 23, such as 9, 8-18 or */6",
    "day of the month": "write 1 to 31 that one of the months has, L for the last day or LW for the last weekday",
    "month": "write 1 to 12, or JAN to DEC",
    "day of the week": "write 0 to 7 (0 and 7 are Sunday), SUN to SAT, 5L (the last Friday) or MON#2",
}


class CronLine:
    """The days and times of a line.

    Attributes:
        text: the line with single spaces; words such as ``@daily`` stay.
        follows_clock: the minute or the hour begins with ``*``, so the line means "as often as", and not "at".
    """

    __slots__ = ("_fields", "_times_ms", "follows_clock", "text")

    def __init__(self, text: str) -> None:
        """Raises BadArgument, which says what is wrong with which field."""
        self.text = " ".join(_checked_text(text).split())
        self._fields = _parsed(self.text)
        minute, hour = WORDS.get(self.text.lower(), self.text).split()[:2]
        self.follows_clock = minute.startswith("*") or hour.startswith("*")
        hours, minutes = sorted(self._fields.hours), sorted(self._fields.minutes)
        self._times_ms = tuple((h * 60 + m) * _MINUTE_MS for h in hours for m in minutes)

    def next_day(self, day: int, last: int) -> int | None:
        """The first day that matches, from ``day`` to ``last``, both counted from 1970-01-01; None if there is none."""
        months, matches = self._fields.months, self._fields.match_day
        at, end = date.fromordinal(day + _EPOCH_ORDINAL), date.fromordinal(last + _EPOCH_ORDINAL)
        while at <= end:
            if at.month not in months:
                at = (at.replace(day=1) + 31 * _DAY).replace(day=1)
            elif matches(at):
                return at.toordinal() - _EPOCH_ORDINAL
            else:
                at += _DAY
        return None

    def explained(self) -> str:
        """The line as an English sentence, without a full stop."""
        return self._fields.explain()

    def times(self, day: int, offset_ms: int) -> tuple[int, Sequence[int]]:
        """When the line fires on a day that matches, by clocks of one offset: an instant, and the ms from it on."""
        return day * DAY_MS - offset_ms, self._times_ms


def _checked_text(text: str) -> str:
    if not isinstance(text, str):
        raise BadArgument(f"cron must be a text such as '0 9 * * MON-FRI', not {type(text).__name__}")
    if len(text) > CHARACTERS_MAX:
        raise BadArgument(f"the cron line has {len(text)} characters, and {CHARACTERS_MAX} at most are taken")
    return text


def _parsed(text: str) -> CronSim:
    plain = WORDS.get(text.lower(), text)
    if plain.startswith("@"):
        why = ": a schedule has no boot" if plain.lower() == "@reboot" else ""
        raise BadArgument(f"{text!r} is no word for a cron line{why}; the words are {', '.join(WORDS)}")
    count = len(plain.split())
    if count != len(FIELDS):
        raise BadArgument(
            f"the cron line {text!r} has {count} fields and needs five: {', '.join(FIELDS)};"
            f" write '0 9 * * MON-FRI', or every= for a schedule of seconds"
        )
    try:
        # The instant is not used: only the fields are asked, and days one by one.
        return CronSim(plain, EPOCH)
    except CronSimError as error:
        # CronSim says "Bad day-of-month".
        place = FIELD_NAMES.index(str(error).removeprefix("Bad ")) - 1
        name, value = FIELDS[place], plain.split()[place]
        raise BadArgument(f"the cron line {text!r} has a bad {name}, {value!r}: {_HINTS[name]}") from error
