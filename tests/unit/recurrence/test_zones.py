"""Zones: their eras have no hole, and their names are those of the package."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.resources import files

import pytest

from delayd.errors import BadArgument
from delayd.recurrence import zones
from delayd.recurrence.zones import check_zone, era_at, first_showing, tzdata_version


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000)


def test_an_era_says_what_clocks_show_on_both_sides_of_it() -> None:
    summer = era_at("Europe/Berlin", ms("2027-07-01T00:00Z"))
    assert (summer.start_ms, summer.end_ms) == (ms("2027-03-28T01:00Z"), ms("2027-10-31T01:00Z"))
    assert summer.offset_ms == 7_200_000
    assert summer.shown_before_ms == ms("2027-03-28T02:00Z"), "clocks showed 02:00 when they were set to 03:00"
    assert summer.shown_after_ms == ms("2027-10-31T02:00Z"), "and will show 02:00 when they are set back from 03:00"


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Africa/Casablanca", "UTC", "Australia/Lord_Howe"])
def test_eras_follow_each_other_without_a_hole(zone: str) -> None:
    at, end = ms("2024-01-01T00:00Z"), ms("2032-01-01T00:00Z")
    while at < end:
        era = era_at(zone, at)
        assert era.start_ms <= at < era.end_ms
        at = era.end_ms


def test_the_first_instant_that_shows_a_time_lies_behind_a_gap_and_before_a_fold() -> None:
    from_ms = ms("2027-01-01T00:00Z")
    # Local times are written as if they were in UTC.
    assert first_showing("Europe/Berlin", ms("2027-03-28T02:30Z"), from_ms) == ms("2027-03-28T01:00Z")
    assert first_showing("Europe/Berlin", ms("2027-10-31T02:30Z"), from_ms) == ms("2027-10-31T00:30Z")
    behind = ms("2027-10-31T01:10Z")
    assert first_showing("Europe/Berlin", ms("2027-10-31T02:30Z"), behind) == ms("2027-10-31T01:30Z")


def test_names_come_from_the_package_whatever_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONTZPATH", "/nowhere")
    names = files("tzdata").joinpath("zones").read_text().split()
    for name in names[::20]:
        check_zone(name)
        assert zones.era_at(name, ms("2027-01-01T00:00Z")).offset_ms % 60_000 == 0
    assert tzdata_version()[:2] == "20"


@pytest.mark.parametrize("name", ["../UTC", "/etc/localtime", "Europe", "", "+02:00", "Europe/Berlin\0", "UTC/../UTC"])
def test_a_name_that_is_no_zone_is_refused(name: str) -> None:
    with pytest.raises(BadArgument, match="is not known to tzdata 20"):
        check_zone(name)


def test_a_name_that_is_nearly_one_is_refused_with_the_right_one() -> None:
    with pytest.raises(BadArgument, match="did you mean 'Europe/Berlin'"):
        check_zone("europe/berln")
