"""A recurrence: the instants at which something recurs, by a cron line in a time zone or by a steady interval.

Invariant: the occurrences of a recurrence are a set of instants that depends on its fields, and on the rules of tzdata,
alone. They are walked in *pieces*: a piece lies within one local day and one era of its zone, so its instants are times
of the day minus one offset. Pieces follow each other in time, so no instant comes twice, whatever clocks do.

What a cron line does when clocks change. Berlin, 2027: on 28 March 02:00 to 03:00 is a gap, on 31 October a fold.

| line | on 28 March | on 31 October |
| --- | --- | --- |
| ``30 2 * * *``, default (``gap="shift"``, ``fold="first"``) | 03:00, when the gap is over | 02:30, the first one |
| the same with ``gap="skip"``, ``fold="last"`` | not at all | 02:30, the second one |
| the same with ``fold="both"`` | 03:00 | 02:30, twice: an hour apart |
| ``30 * * * *``, default (``gap="skip"``, ``fold="both"``) | 01:30, 03:30: an hour apart | 02:30, twice |
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date, datetime, timedelta
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, Self, TypeGuard, get_args

from delayd.errors import BadArgument, BadRequest, NaiveDatetime
from delayd.hours import EPOCH, INSTANT_MS_MIN, duration_word, instant_text
from delayd.recurrence.cron_line import CronLine
from delayd.recurrence.zones import DAY_MS, OFFSET_MS_MAX, Era, check_zone, era_at, first_showing

Fold = Literal["first", "last", "both"]
Gap = Literal["shift", "skip"]
Encoded = dict[str, int | str | list[int]]

VERSION = 1  # The encoded form: fields are added under a higher one.
EVERY_MIN = timedelta(seconds=1)  # Each occurrence is a decision that is written to disk.
EVERY_MAX = timedelta(days=731)  # The furthest that a message may be due.
JITTER_MAX = timedelta(days=1)
DATES_MAX = 1_000  # Holidays of many years, and some kilobytes of a request.
PREVIEW_MAX = 10_000
OCCURRENCES_MAX = (1 << 31) - 1
# A 29 February that is a Monday is forty years from the last one where a century has no leap day between them.
SEARCH_MS = 50 * 366 * DAY_MS
LAST_MS = (
    253_339_228_800_000  # The begin of the year 9998: what comes later is too near to the end of Python's calendar.
)

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_MS = timedelta(milliseconds=1)
# How each field is called in the encoded form, and what it is.
_FIELDS: dict[str, tuple[str, type]] = {
    "c": ("cron", str),
    "e": ("every", timedelta),
    "a": ("anchor", datetime),
    "z": ("timezone", str),
    "f": ("fold", str),
    "g": ("gap", str),
    "x": ("skip_dates", date),
    "o": ("only_dates", date),
    "j": ("jitter", timedelta),
    "s": ("starts_at", datetime),
    "u": ("until", datetime),
    "n": ("max_occurrences", int),
}


class _Piece(NamedTuple):
    """Some instants of one day: ``base_ms`` plus each of ``times[first:end]``."""

    base_ms: int
    times: Sequence[int]
    first: int
    end: int

    def instants(self) -> Iterator[int]:
        return (self.base_ms + time for time in self.times[self.first : self.end])


class _Interval:
    """The instants that lie a whole number of steps from an anchor; a day is only how they are walked."""

    follows_clock = True

    def __init__(self, every_ms: int, anchor_ms: int) -> None:
        self._every_ms = every_ms
        self._anchor_ms = anchor_ms

    def next_day(self, day: int, last: int) -> int | None:
        from_ms = day * DAY_MS - OFFSET_MS_MAX
        next_ms = from_ms + (self._anchor_ms - from_ms) % self._every_ms
        # Clocks may show its day this much earlier or later, so the day that is returned may have no instant.
        day_ahead = max(day, (next_ms - OFFSET_MS_MAX) // DAY_MS)
        return day_ahead if day_ahead <= last else None

    def times(self, day: int, offset_ms: int) -> tuple[int, Sequence[int]]:
        start_ms = day * DAY_MS - offset_ms
        return start_ms, range((self._anchor_ms - start_ms) % self._every_ms, DAY_MS, self._every_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """When something recurs: a cron line, or an interval.

    ``Recurrence(cron="0 9 * * MON-FRI", timezone="Europe/Berlin").preview(5, now_ms)`` are the next five instants, in
    ms since the epoch, UTC.

    Attributes:
        cron: five fields, or a word such as ``@daily`` (docs/recurring.md); or say ``every``.
        every: the time from one occurrence to the next, by elapsed time: whole milliseconds, 1 s to 731 days.
        anchor: an instant from which ``every`` counts, in both directions; `starts_at` unless given, else the epoch.
        timezone: the zone of a cron line and of dates, by its IANA name.
        fold: which of two equal local times fires when clocks are set back. As cron does it unless given: ``first`` for
            a line with fixed times, ``both`` when its minute or hour begins with ``*``.
        gap: what becomes of a local time that clocks skip: ``shift`` fires once when the gap is over, ``skip`` does
            not. Unless given: ``shift`` for fixed times, ``skip`` when the minute or hour begins with ``*``.
        skip_dates: local dates on which nothing fires, such as holidays.
        only_dates: the only local dates on which anything fires.
        jitter: each occurrence is due so much later at most: `due_ms`.
        starts_at: the first instant at which it may fire.
        until: the last one.
        max_occurrences: it ends after so many that ran; those that were skipped do not count.

    Raises:
        BadArgument: a value is out of range, fields contradict each other, or nothing would ever fire.
        NaiveDatetime: a datetime without a time zone.
    """

    cron: str | None = None
    every: timedelta | None = None
    anchor: datetime | None = None
    timezone: str = "UTC"
    fold: Fold | None = None
    gap: Gap | None = None
    skip_dates: Sequence[date] = ()
    only_dates: Sequence[date] = ()
    jitter: timedelta = timedelta(0)
    starts_at: datetime | None = None
    until: datetime | None = None
    max_occurrences: int | None = None

    _source: CronLine | _Interval = field(init=False, repr=False, compare=False)
    _fold: Fold = field(init=False, repr=False, compare=False)
    _shifts: bool = field(init=False, repr=False, compare=False)
    _skipped_days: frozenset[int] = field(init=False, repr=False, compare=False)
    _only_days: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _start_ms: int = field(init=False, repr=False, compare=False)
    _last_ms: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_zone(self.timezone)
        for name in ("anchor", "starts_at", "until"):
            self._set(name, _whole_ms(name, getattr(self, name)))
        for name in ("skip_dates", "only_dates"):
            self._set(name, _sorted_dates(name, getattr(self, name)))
        self._check_choices()
        self._check_numbers()
        source = self._made_source()
        self._set("_source", source)
        self._set("_fold", self.fold or ("both" if source.follows_clock else "first"))
        self._set("_shifts", self.gap == "shift" if self.gap else not source.follows_clock)
        self._set("_skipped_days", frozenset(map(_day_of, self.skip_dates)))
        self._set("_only_days", tuple(map(_day_of, self.only_dates)))
        start_ms = 0 if self.starts_at is None else _ms_of(self.starts_at)
        # No clock is further ahead of UTC than a day.
        self._set("_start_ms", max(start_ms, (self._only_days[0] - 1) * DAY_MS if self._only_days else 0))
        self._set("_last_ms", LAST_MS if self.until is None else min(_ms_of(self.until), LAST_MS))
        self._check_it_fires()

    def next_after(self, instant_ms: int) -> int | None:
        """The first occurrence after an instant; None when there is none, at least not within fifty years."""
        return next(self._search(instant_ms), None)

    def between(self, after_ms: int, to_ms: int) -> Iterator[int]:
        """The occurrences after an instant, up to another one (included), in order; each is found when it is asked
        for.
        """
        return chain.from_iterable(piece.instants() for piece in self._pieces(after_ms, to_ms))

    def count(self, after_ms: int, to_ms: int) -> int:
        """How many `between` would give; some microseconds for each day that fires, however often it does."""
        return sum(piece.end - piece.first for piece in self._pieces(after_ms, to_ms))

    def newest(self, most: int, after_ms: int, to_ms: int) -> list[int]:
        """The last ``most`` that `between` would give, in order."""
        if not most:
            return []
        span_ms = DAY_MS if self.count(after_ms, to_ms) > most else to_ms - after_ms
        while to_ms - span_ms > after_ms and self.count(to_ms - span_ms, to_ms) < most:
            span_ms *= 2
        return list(self.between(max(after_ms, to_ms - span_ms), to_ms))[-most:]

    def preview(self, most: int, after_ms: int, ran: int = 0) -> list[int]:
        """The next ``most`` occurrences after an instant, when ``ran`` ran before it; fewer when it ends.

        Raises:
            BadArgument: less than 1, or more than 10,000 at once.
        """
        if not is_whole(most) or not 1 <= most <= PREVIEW_MAX:
            raise BadArgument(f"a preview has 1 to {PREVIEW_MAX} occurrences, not {most!r}")
        found: list[int] = []
        while len(found) < self.left(most, ran):
            # A search ends fifty years behind the last occurrence, not behind the first.
            found += islice(self._search(after_ms), self.left(most, ran) - len(found))
            if not found or found[-1] <= after_ms:
                break
            after_ms = found[-1]
        return found

    def left(self, most: int, ran: int) -> int:
        """``most``, or fewer where `max_occurrences` allows fewer when ``ran`` have run."""
        return most if self.max_occurrences is None else max(0, min(most, self.max_occurrences - ran))

    def due_ms(self, name: str, instant_ms: int) -> int:
        """When the occurrence of an instant is due in the schedule of this name: later by its jitter, which is the same
        wherever it is computed.
        """
        jitter_ms = self.jitter // _MS
        if not jitter_ms:
            return instant_ms
        drawn = hashlib.blake2b(f"{instant_ms} {name}".encode(), digest_size=8).digest()
        return instant_ms + int.from_bytes(drawn, "little") % (jitter_ms + 1)

    def encoded(self) -> Encoded:
        """A map for msgpack, with the fields that differ from their defaults; `decoded` makes an equal recurrence.

        Instants and lengths are ms, dates are days since 1970-01-01 (docs/recurring.md).
        """
        encoded: Encoded = {"v": VERSION}
        for key, (name, _) in _FIELDS.items():
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                encoded[key] = _plain(value)
        return encoded

    @classmethod
    def decoded(cls, encoded: Mapping[str, object]) -> Self:
        """The recurrence of a map that `encoded` made, here or on another machine.

        Raises:
            BadRequest: it has a version or a field that is not known, or a field of another type.
            BadArgument: a value that no recurrence has.
        """
        version = encoded.get("v")
        if not is_whole(version) or version != VERSION:
            raise BadRequest(f"a recurrence has version {version!r}, and {VERSION} is known here; upgrade this delayd")
        unknown = [key for key in encoded if key != "v" and key not in _FIELDS]
        if unknown:
            raise BadRequest(f"a recurrence has a field {unknown[0]!r}, which is not known here; upgrade this delayd")
        return cls(**{_FIELDS[key][0]: _read(key, value) for key, value in encoded.items() if key != "v"})

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_choices(self) -> None:
        if (self.cron is None) == (self.every is None):
            raise BadArgument("say cron= or every=, and one of them only")
        for name, value, choices in (("fold", self.fold, get_args(Fold)), ("gap", self.gap, get_args(Gap))):
            if value is None:
                continue
            if value not in choices:
                raise BadArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}")
            if self.cron is None:
                raise BadArgument(f"{name}= is for a cron line: every= counts elapsed time, whatever clocks do")
        if self.anchor is not None and self.every is None:
            raise BadArgument("anchor= is for every=: a cron line says itself when it fires")
        if self.skip_dates and self.only_dates:
            raise BadArgument("say skip_dates= or only_dates=, and not both: leave the skipped dates out of only_dates")
        if self.starts_at is not None and self.until is not None and self.until < self.starts_at:
            raise BadArgument(f"until {self.until.isoformat()} is before starts_at {self.starts_at.isoformat()}")

    def _check_numbers(self) -> None:
        if self.every is not None:
            _check_length("every", self.every, EVERY_MIN, EVERY_MAX)
        _check_length("jitter", self.jitter, timedelta(0), JITTER_MAX)
        most = self.max_occurrences
        if most is not None and (not is_whole(most) or not 1 <= most <= OCCURRENCES_MAX):
            raise BadArgument(f"max_occurrences must be a whole number from 1 to {OCCURRENCES_MAX}, not {most!r}")

    def _made_source(self) -> CronLine | _Interval:
        if self.cron is not None:
            line = CronLine(self.cron)
            self._set("cron", line.text)
            return line
        assert self.every is not None, "checked: it is cron or every"
        anchor = self.anchor or self.starts_at or EPOCH
        return _Interval(self.every // _MS, _ms_of(anchor))

    def _check_it_fires(self) -> None:
        if self.next_after(INSTANT_MS_MIN if self.starts_at is None else -1) is not None:
            return
        bounds = {
            "starts_at": self.starts_at and instant_text(_ms_of(self.starts_at)),
            "until": self.until and instant_text(_ms_of(self.until)),
            "skip_dates": self.skip_dates and f"of {len(self.skip_dates)} days",
            "only_dates": self.only_dates and f"of {len(self.only_dates)} days",
        }
        with_these = ", ".join(f"{name} {value}" for name, value in bounds.items() if value)
        what = f"cron {self.cron!r}" if self.cron is not None else f"every {self.every}"
        if with_these:
            raise BadArgument(f"{what} in {self.timezone} never fires with {with_these}; change one of them")
        raise BadArgument(f"{what} never fires: no day of fifty years has such a date; change the day or the month")

    def _search(self, after_ms: int) -> Iterator[int]:
        """The occurrences of the fifty years behind an instant, or behind the first one at which it may fire."""
        after_ms = max(after_ms, self._start_ms - 1)
        return self.between(after_ms, after_ms + SEARCH_MS)

    def _pieces(self, after_ms: int, to_ms: int) -> Iterator[_Piece]:
        """The pieces of a time that have instants, in order."""
        at = max(after_ms + 1, self._start_ms)
        to_ms = min(to_ms, self._last_ms)
        last_day = (to_ms + DAY_MS) // DAY_MS  # No clock is further ahead of UTC than a day.
        while at <= to_ms:
            era = era_at(self.timezone, at)
            local_ms = at + era.offset_ms
            if self._shifts and at == era.start_ms and self._fires_within(era.shown_before_ms, local_ms):
                yield _Piece(at, (0,), 0, 1)
                local_ms += 1
            day = local_ms // DAY_MS
            day_ahead = self._next_day(day, last_day)
            if day_ahead is None:
                return
            if day_ahead > day:
                at = first_showing(self.timezone, day_ahead * DAY_MS, at)
                continue
            end_ms = min(era.end_ms, (day + 1) * DAY_MS - era.offset_ms, to_ms + 1)
            base_ms, times = self._source.times(day, era.offset_ms)
            shown = self._within(era, local_ms, end_ms + era.offset_ms)
            first, end = (bisect_left(times, shown_ms - era.offset_ms - base_ms) for shown_ms in shown)
            if first < end:
                yield _Piece(base_ms, times, first, end)
            at = end_ms

    def _within(self, era: Era, from_ms: int, to_ms: int) -> tuple[int, int]:
        """Which local times of an era count: clocks may have shown them before, or show them again."""
        if self._fold == "first":
            return max(from_ms, era.shown_before_ms), to_ms
        if self._fold == "last":
            return from_ms, min(to_ms, era.shown_after_ms)
        return from_ms, to_ms

    def _fires_within(self, from_ms: int, to_ms: int) -> bool:
        """Whether a local time in a gap would fire; the gap may hold a whole day."""
        day: int | None = from_ms // DAY_MS
        last = (to_ms - 1) // DAY_MS
        while day is not None and day <= last:
            day = self._next_day(day, last)
            if day is not None:
                base_ms, times = self._source.times(day, 0)
                if bisect_left(times, from_ms - base_ms) < bisect_left(times, to_ms - base_ms):
                    return True
                day += 1
        return False

    def _next_day(self, day: int, last: int) -> int | None:
        """The first day from ``day`` to ``last`` on which anything may fire."""
        if self._only_days:
            for only in self._only_days[bisect_left(self._only_days, day) :]:
                if only > last or self._source.next_day(only, only) is not None:
                    return only if only <= last else None
            return None
        found = self._source.next_day(day, last)
        while found is not None and found in self._skipped_days:
            found = self._source.next_day(found + 1, last)
        return found


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number."""
    # A bool is an int in Python and never one here.
    return isinstance(value, int) and not isinstance(value, bool)


def _whole_ms(name: str, value: datetime | None) -> datetime | None:
    """An instant in UTC, rounded up to whole milliseconds: a message must not be early."""
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise BadArgument(f"{name} must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise NaiveDatetime.of(name, value)
    ms = _ms_of(value)
    if not 0 <= ms < LAST_MS:
        raise BadArgument(f"{name} {value.isoformat()} must lie between 1970 and 9997")
    return EPOCH + ms * _MS


def _ms_of(value: datetime) -> int:
    return -((EPOCH - value) // _MS)


def _sorted_dates(name: str, values: object) -> tuple[date, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise BadArgument(f"{name} must be a list of dates, not {type(values).__name__}")
    dates = set[date]()
    value: object
    for value in values:
        if not isinstance(value, date) or isinstance(value, datetime):
            raise BadArgument(f"{name} must be dates such as date(2027, 12, 25), not {value!r}")
        if not 1970 <= value.year <= 9997:
            raise BadArgument(f"{name} has {value}, and dates from 1970 to 9997 are taken")
        dates.add(value)
        if len(dates) > DATES_MAX:
            raise BadArgument(f"{name} has more than {DATES_MAX} dates; leave out those that are over")
    return tuple(sorted(dates))


def _check_length(name: str, value: timedelta, least: timedelta, most: timedelta) -> None:
    if not isinstance(value, timedelta):
        raise BadArgument(f"{name} must be a timedelta, not {type(value).__name__}; write timedelta(minutes=5)")
    if not least <= value <= most:
        within = f"{duration_word(least)} and {duration_word(most)}"
        shown = duration_word(value) if value > timedelta(0) and not value % _MS else value
        raise BadArgument(f"{name} is {shown} and must lie within {within}")
    if value % _MS:
        raise BadArgument(f"{name} of {value} must be whole milliseconds")


def _plain(value: object) -> int | str | list[int]:
    """A field as msgpack has it."""
    if isinstance(value, timedelta):
        return value // _MS
    if isinstance(value, datetime):
        return _ms_of(value)
    if isinstance(value, tuple):
        return [_day_of(each) for each in value]
    assert isinstance(value, int | str), "checked when the recurrence was made"
    return value


def _read(key: str, value: object) -> Any:
    """The field of one key of an encoded recurrence."""
    name, kind = _FIELDS[key]
    try:
        if kind is str and isinstance(value, str):
            return value
        if kind is int and is_whole(value):
            return value
        if kind is timedelta and is_whole(value):
            return value * _MS
        if kind is datetime and is_whole(value):
            return EPOCH + value * _MS
        if kind is date and isinstance(value, list | tuple) and all(map(is_whole, value)):
            return [date.fromordinal(day + _EPOCH_ORDINAL) for day in value]
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"{name} of a recurrence is out of range: {error}", field=key) from error
    raise BadRequest(f"{name} of a recurrence has a wrong type, {type(value).__name__}", field=key)


def _day_of(value: date) -> int:
    return value.toordinal() - _EPOCH_ORDINAL


_DEFAULTS = {each.name: each.default for each in fields(Recurrence) if each.init}
