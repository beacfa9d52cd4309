"""Hours and their names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.errors import BadArgument
from delayd.hours import HOUR_MS, hour_from_name, hour_name, hour_of_ms, hour_start_ms, hours_of

MS = st.integers(min_value=-1_000 * HOUR_MS, max_value=4_000_000_000_000)


def test_an_hour_is_named_by_its_utc_date_and_hour() -> None:
    assert hour_name(0) == "1970010100"
    assert hour_name(hour_of_ms(1_795_190_399_999)) == "2026112015"
    assert hour_name(hour_of_ms(1_795_190_400_000)) == "2026112016"


@given(MS)
def test_an_instant_lies_within_its_hour(ms: int) -> None:
    hour = hour_of_ms(ms)
    assert hour_start_ms(hour) <= ms < hour_start_ms(hour + 1)


@given(MS)
def test_a_name_leads_back_to_its_hour(ms: int) -> None:
    hour = hour_of_ms(ms)
    assert hour_from_name(hour_name(hour)) == hour


@given(MS, MS)
def test_names_sort_as_hours_do(one: int, other: int) -> None:
    hours = (hour_of_ms(one), hour_of_ms(other))
    assert (hour_name(hours[0]) < hour_name(hours[1])) == (hours[0] < hours[1])


@given(st.lists(MS, max_size=50))
def test_the_hours_of_an_array_are_those_of_its_items(instants: list[int]) -> None:
    hours = hours_of(np.array(instants, dtype=np.int64))
    assert hours.dtype == np.int64
    assert hours.tolist() == [hour_of_ms(ms) for ms in instants]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "2026",
        "20261120",
        "202611201",
        "20261120160",
        "2026112024",
        "2026023000",
        "2026-11-20",
        "２０２６１１２０１６",
    ],
)
def test_anything_else_is_no_name_of_an_hour(name: str) -> None:
    with pytest.raises(BadArgument, match="YYYYMMDDHH"):
        hour_from_name(name)
