"""Hours and their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayd.errors import BadArgument
from delayd.hours import HOUR_MS, hour_from_name, hour_name, hour_of_ms

MS = st.integers(min_value=-1_000 * HOUR_MS, max_value=4_000_000_000_000)


@given(MS)
def test_a_name_leads_back_to_its_hour(ms: int) -> None:
    hour = hour_of_ms(ms)
    assert hour_from_name(hour_name(hour)) == hour


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
