"""A cron line: what is read, and what is refused in which words."""

from __future__ import annotations

from datetime import date

import pytest

from delayd.errors import BadArgument
from delayd.recurrence.cron_line import CHARACTERS_MAX, WORDS, CronLine

_EPOCH = date(1970, 1, 1).toordinal()


def days_of(line: str, year: int = 2027) -> list[date]:
    cron, found = CronLine(line), list[date]()
    day: int | None = date(year, 1, 1).toordinal() - _EPOCH
    last = date(year, 12, 31).toordinal() - _EPOCH
    while day is not None and (day := cron.next_day(day, last)) is not None:
        found.append(date.fromordinal(day + _EPOCH))
        day += 1
    return found


def times_of(line: str) -> list[str]:
    base_ms, times = CronLine(line).times(0, 0)
    assert base_ms == 0
    return [f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}" for ms in times]


def test_times_are_those_of_each_hour_and_minute_in_order() -> None:
    assert times_of("30,0 9-10 * * *") == ["09:00", "09:30", "10:00", "10:30"]
    assert times_of("*/20 23 * * *") == ["23:00", "23:20", "23:40"]


@pytest.mark.parametrize(
    ("line", "days"),
    [
        ("0 0 L * *", [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]),
        ("0 0 LW * *", [29, 26, 31, 30, 31, 30, 30, 31, 30, 29, 30, 31]),
        ("0 0 * * MON#2", [11, 8, 8, 12, 10, 14, 12, 9, 13, 11, 8, 13]),
        ("0 0 * * 5L", [29, 26, 26, 30, 28, 25, 30, 27, 24, 29, 26, 31]),
        ("0 0 28 feb-APR *", [28, 28, 28]),
    ],
)
def test_days_of_the_month_have_names(line: str, days: list[int]) -> None:
    assert [each.day for each in days_of(line)] == days


def test_a_day_needs_one_of_both_when_both_are_limited_and_both_when_one_begins_with_a_star() -> None:
    either = days_of("0 0 13 * FRI")
    assert date(2027, 1, 13) in either and date(2027, 1, 15) in either
    both = days_of("0 0 */13 * FRI")
    assert {(each.day, each.weekday()) for each in both} <= {(1, 4), (14, 4), (27, 4)}


def test_sunday_is_0_and_7() -> None:
    assert days_of("0 0 * * 0") == days_of("0 0 * * 7") == days_of("0 0 * * sun") == days_of("@weekly")


@pytest.mark.parametrize("word", WORDS)
def test_a_word_stands_for_a_line(word: str) -> None:
    assert days_of(word) == days_of(WORDS[word])
    assert times_of(word.upper()) == times_of(WORDS[word])


def test_a_line_with_a_star_in_minute_or_hour_follows_the_clock() -> None:
    assert [CronLine(line).follows_clock for line in ("*/5 2 * * *", "0 * * * *", "@hourly")] == [True] * 3
    assert [CronLine(line).follows_clock for line in ("0 2 * * *", "0,30 0-23 * * *", "@daily")] == [False] * 3


def test_spaces_are_made_single() -> None:
    assert CronLine("  0\t9  * * 1-5 ").text == "0 9 * * 1-5"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("60 * * * *", "bad minute, '60': write 0 to 59"),
        ("* 24 * * *", "bad hour, '24': write 0 to 23"),
        ("0 0 32 * *", "bad day of the month, '32'"),
        ("0 0 30 2 *", "bad day of the month, '30': write 1 to 31 that one of the months has"),
        ("0 0 * 13 *", "bad month, '13': write 1 to 12"),
        ("0 0 * * FOO", "bad day of the week, 'FOO': write 0 to 7"),
        ("0 0 * * MON#6", "bad day of the week"),
        ("*/0 * * * *", "bad minute"),
        ("5-1 * * * *", "bad minute"),
        ("٣ * * * *", "bad minute"),
        ("* * * *", "has 4 fields and needs five: minute, hour"),
        ("* * * * * *", "has 6 fields and needs five"),
        ("", "has 0 fields"),
        ("@reboot", "a schedule has no boot"),
        ("@often", "is no word for a cron line; the words are @hourly"),
        ("1," * CHARACTERS_MAX, "characters, and 1000 at most"),
    ],
)
def test_a_bad_line_is_refused_with_its_field_and_what_to_write(line: str, told: str) -> None:
    with pytest.raises(BadArgument, match="cron") as refused:
        CronLine(line)
    assert told in str(refused.value)


def test_something_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadArgument, match="must be a text such as"):
        CronLine(5)  # type: ignore[arg-type]
