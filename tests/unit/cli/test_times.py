"""Instants and durations as people write and read them."""

import time
from datetime import UTC, datetime, timedelta

import click
import pytest
from freezegun import freeze_time

from cli.times import duration, instant
from delayd.hours import duration_text, duration_word, instant_text

_NEW_YEAR_MS = int(datetime(2027, 1, 1, 8, tzinfo=UTC).timestamp()) * 1000


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("250ms", timedelta(milliseconds=250)),
        ("30s", timedelta(seconds=30)),
        ("30m", timedelta(minutes=30)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("1.5h", timedelta(minutes=90)),
        ("2d", timedelta(days=2)),
        ("1w", timedelta(weeks=1)),
        ("0s", timedelta(0)),
    ],
)
def test_a_duration_is_a_number_with_its_unit_or_several(text: str, length: timedelta) -> None:
    assert duration(text) == length


@pytest.mark.parametrize("text", ["250ms", "30s", "1h30m", "90d1s", "1d2h3m4s5ms", "0s"])
def test_a_duration_is_written_as_it_is_read(text: str) -> None:
    assert duration_word(duration(text)) == text


@pytest.mark.parametrize(
    "text", ["2027-01-01T09:00:00+01:00", "2027-01-01T08:00:00Z", "2027-01-01T08:00Z", "20270101T080000.000Z"]
)
def test_an_instant_is_iso_8601_with_its_offset(text: str) -> None:
    assert instant(text) == _NEW_YEAR_MS


def test_an_instant_keeps_its_milliseconds_and_drops_what_is_finer() -> None:
    assert instant("2027-01-01T08:00:00.123999Z") == _NEW_YEAR_MS + 123


@pytest.mark.parametrize(("text", "ahead_ms"), [("now", 0), ("+30m", 1_800_000), ("-2h", -7_200_000)])
def test_an_instant_may_count_from_now(text: str, ahead_ms: int) -> None:
    with freeze_time("2027-01-01T08:00:00Z"):
        assert instant(text) == _NEW_YEAR_MS + ahead_ms


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ("2027-01-01T09:00:00", "2027-01-01T09:00"),
        ("2027-01-01", "2027-01-01T00:00"),
        ("20270101", "2027-01-01T00:00"),
        ("2027-01-01 9:00", "2027-01-01T09:00"),
        ("2027-01-01T09:00:07", "2027-01-01T09:00:07"),
        ("0001-01-01", "0001-01-01T00:00"),
        ("9999-12-31", "9999-12-31T00:00"),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/St_Johns"])
def test_an_instant_without_an_offset_is_refused_with_one_that_may_be_copied(
    text: str, mended: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        with pytest.raises(click.BadParameter) as refused:
            instant(text)
    finally:
        monkeypatch.undo()
        time.tzset()
    there = {"UTC": "+01:00", "Asia/Tokyo": "+09:00", "America/St_Johns": "-03:30"}[zone]
    if mended[:4] not in ("0001", "9999"):
        assert f"write {mended}Z for UTC, or {mended}{there} " in refused.value.message
    assert instant(f"{mended}Z") % 1_000 == 0


def test_an_instant_is_written_in_utc_to_the_millisecond() -> None:
    assert instant_text(_NEW_YEAR_MS + 7) == "2027-01-01T08:00:00.007Z"
    assert instant_text(-1) == "1969-12-31T23:59:59.999Z"


def test_an_instant_beyond_any_calendar_is_written_as_its_number() -> None:
    assert instant_text(2**63 - 1) == f"{2**63 - 1} ms"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (3, "3 ms"),
        (2.5, "2.5 ms"),
        (999, "999 ms"),
        (1_250, "1.250 s"),
        (125_000, "2 min 05 s"),
        (12_000_000, "3 h 20 min"),
        (200_000_000, "2 d 07 h"),
        (-3, "-3 ms"),
    ],
)
def test_a_duration_is_written_with_the_unit_that_suits_it(ms: float, text: str) -> None:
    assert duration_text(ms) == text
