"""When the rows of a batch are due: what Python, numpy and pandas call an instant or a length of time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pandas as pd
import pytest

from delayd.client.instants import HORIZON_MS, monotonic_us, wish_column
from delayd.errors import BadArgument, BadInstant, NaiveDatetime, PastHorizon

MS = 1_798_790_400_000  # 2027-01-01 08:00 UTC
AT = datetime(2027, 1, 1, 9, tzinfo=timezone(timedelta(hours=1)))
NAIVE = np.datetime64("2027-01-01T08:00", "ns")

COLUMNS: dict[str, Any] = {
    "a datetime": AT,
    "a list": [AT, AT],
    "a tuple of UTC": (AT.astimezone(UTC),) * 2,
    "datetime64[ns]": np.array([NAIVE, NAIVE]),
    "datetime64[s]": np.array([NAIVE, NAIVE], "datetime64[s]"),
    "datetime64[h]": np.array([NAIVE, NAIVE], "datetime64[h]"),
    "one datetime64": NAIVE,
    "an index": pd.DatetimeIndex([AT, AT]),
    "a series": pd.Series(pd.to_datetime([AT, AT], utc=True)),
    "a series with an index": pd.Series(pd.to_datetime([AT, AT], utc=True), index=[7, 9]),
    "a series in seconds": pd.Series(pd.to_datetime([AT, AT], utc=True)).dt.as_unit("s"),
    "a series elsewhere": pd.Series(pd.to_datetime([AT, AT], utc=True)).dt.tz_convert("Asia/Tokyo"),
    "timestamps": [pd.Timestamp(AT), pd.Timestamp(AT)],
    "objects": pd.Series([AT, AT], dtype=object),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_each_kind_of_column_names_the_same_instant(name: str) -> None:
    column, relative = wish_column(None, COLUMNS[name], None, 2)
    assert column.tolist() == [MS, MS] and column.dtype == np.int64 and not relative


@pytest.mark.parametrize("part", [1, 999_999])
def test_what_is_finer_than_a_millisecond_is_rounded_up(part: int) -> None:
    nanos = np.array([NAIVE, NAIVE + np.timedelta64(part, "ns")])
    for column in (nanos, pd.Series(nanos).dt.tz_localize("UTC")):
        assert wish_column(None, column, None, 2)[0].tolist() == [MS, MS + 1]
    assert wish_column(None, [AT, AT + timedelta(microseconds=1)], None, 2)[0].tolist() == [MS, MS + 1]


@pytest.mark.parametrize(
    "column",
    [
        timedelta(seconds=2),
        [timedelta(seconds=2)] * 2,
        np.array([2, 2], "timedelta64[s]"),
        np.array([1_999_999_001, 2_000_000_000], "timedelta64[ns]"),
        np.timedelta64(2, "s"),
        pd.Series(pd.to_timedelta([2, 2], unit="s")),
        pd.to_timedelta([2, 2], unit="s"),
    ],
)
def test_delays_count_from_the_call_and_are_never_shorter(column: Any) -> None:
    before_us = monotonic_us()
    wanted, relative = wish_column(column, None, None, 2)
    assert relative and len(wanted) == 2
    assert all(before_us + 2_000_000 <= each <= monotonic_us() + 2_000_000 for each in wanted.tolist())


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: wish_column(None, None, None, 2), BadArgument, "say once"),
        (lambda: wish_column(timedelta(0), AT, None, 2), BadArgument, "say once"),
        (lambda: wish_column(None, AT, [MS], 2), BadArgument, "say once"),
        (lambda: wish_column(None, [AT], None, 2), BadArgument, "1 instants were given for 2 bodies"),
        (lambda: wish_column([timedelta(0)] * 3, None, None, 2), BadArgument, "3 delays were given for 2 bodies"),
        (lambda: wish_column(None, np.full((2, 2), NAIVE), None, 2), BadArgument, "2 dimensions"),
        (lambda: wish_column(None, None, wrong([AT, AT]), 2), BadArgument, "give it as deliver_at="),
        (lambda: wish_column(None, None, wrong(COLUMNS["datetime64[ns]"]), 2), BadArgument, "give it as deliver_at="),
        (lambda: wish_column(None, None, wrong([1.5, 2.5]), 2), BadArgument, "whole milliseconds .* not float64"),
        (lambda: wish_column(None, None, np.full(2, 2**63, np.uint64), 2), PastHorizon, "9223372036854775808"),
        (lambda: wish_column(None, wrong(MS), None, 2), BadArgument, "must be a datetime, or a column .* not int"),
        (lambda: wish_column(None, wrong("2027-01-01"), None, 2), BadArgument, "or a column of them, not str"),
        (lambda: wish_column(None, wrong([MS, MS]), None, 2), BadArgument, "must be a datetime, not int"),
        (lambda: wish_column(wrong(2), None, None, 2), BadArgument, "must be a timedelta, or a column .* not int"),
        (lambda: wish_column(None, pd.Series([NAIVE, NAIVE]), None, 2), NaiveDatetime, "tz_localize"),
        (lambda: wish_column(None, [datetime(2027, 1, 1)] * 2, None, 2), NaiveDatetime, "has no time zone"),  # noqa: DTZ001
        (lambda: wish_column(None, np.array([NAIVE, "NaT"], "M8[ns]"), None, 2), BadInstant, "row 1 is NaT"),
        (lambda: wish_column(None, pd.Series([pd.NaT, AT], dtype="M8[ns, UTC]"), None, 2), BadInstant, "row 0 is NaT"),
        (lambda: wish_column(np.array([1, "NaT"], "m8[s]"), None, None, 2), BadArgument, "row 1 is NaT"),
        (lambda: wish_column(np.array([1, -1], "m8[s]"), None, None, 2), BadArgument, "negative"),
        (lambda: wish_column([timedelta(0), -timedelta(1)], None, None, 2), BadArgument, "negative"),
        (lambda: wish_column(np.array([1, 800], "m8[D]"), None, None, 2), PastHorizon, "800 days"),
        (lambda: wish_column(None, np.array(["1999-01-01"] * 2, "M8[D]"), None, 2), BadInstant, "2001"),
        (lambda: wish_column(None, np.array(["2199-01-01"] * 2, "M8[D]"), None, 2), PastHorizon, "horizon"),
    ],
)
def test_a_column_that_names_no_instants_is_refused_by_name(
    make: Callable[[], object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        make()


def test_no_rows_are_no_fault() -> None:
    columns: list[Any] = [[], np.empty(0, "M8[ns]"), pd.Series([], dtype="M8[ns, UTC]")]
    for column in columns:
        assert wish_column(None, column, None, 0)[0].tolist() == []
    assert wish_column(np.empty(0, "m8[ns]"), None, None, 0)[0].tolist() == []
    assert HORIZON_MS == 732 * 86_400_000


def wrong(value: object) -> Any:
    """What a checker of types would not let through."""
    return value
