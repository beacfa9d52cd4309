"""Rows of the delay server: where they fire, where they are filed and where they rest."""

from __future__ import annotations

import numpy as np
import pytest

from delayd.delay.rows import (
    COARSE_FROM_MS,
    COARSE_MAX,
    COARSE_MS,
    ROW,
    decode_due,
    due_at_ms,
    due_by,
    due_within,
    encode_due,
    filing_hours,
    new_rows,
)
from delayd.hours import HOUR_MS, hour_start_ms

NOW_MS = hour_start_ms(490_000) + 1_234


def test_a_row_is_32_bytes_without_padding() -> None:
    assert ROW.itemsize == 32
    assert sum(ROW[name].itemsize for name in ROW.names or ()) == 32


def test_a_row_fires_at_its_hour_plus_its_due_time() -> None:
    rows = new_rows(2)
    rows["hour"], rows["due_ms"] = [490_000, 17_000_000 // 35], [1_234, HOUR_MS - 1]
    assert due_at_ms(rows).tolist() == [NOW_MS, hour_start_ms(17_000_000 // 35 + 1) - 1]


def test_rule_P5_a_row_is_filed_in_the_hour_of_the_later_of_due_and_appended() -> None:
    deliver_at = np.array([NOW_MS - HOUR_MS, NOW_MS, NOW_MS + HOUR_MS], np.int64)
    hours = filing_hours(deliver_at, NOW_MS)
    assert hours.tolist() == [490_000, 490_000, 490_001]
    assert due_within(deliver_at, hours).tolist() == [1_234 - HOUR_MS, 1_234, 1_234]


AFTER_MS = [
    *(HOUR_MS - 1, 0, -1, -COARSE_FROM_MS + 1, -COARSE_FROM_MS, -COARSE_FROM_MS - 1),
    *(-COARSE_FROM_MS - 999, -COARSE_FROM_MS - 1_000, -COARSE_FROM_MS - 1_001, -60 * 24 * HOUR_MS, -730 * 24 * HOUR_MS),
    -COARSE_FROM_MS - COARSE_MAX * COARSE_MS,
]


@pytest.mark.parametrize("after_ms", AFTER_MS)
def test_rule_T4_a_row_fires_at_its_due_instant_however_long_before_its_hour(after_ms: int) -> None:
    due_ms = encode_due(after_ms)
    late_ms = decode_due(due_ms) - after_ms
    assert 0 <= late_ms < (COARSE_MS if after_ms < -COARSE_FROM_MS else 1)
    instants = np.array([hour_start_ms(490_000) + after_ms], np.int64)
    rows = new_rows(1)
    rows["hour"], rows["due_ms"] = 490_000, due_within(instants, np.array([490_000], np.uint32))
    assert rows["due_ms"].tolist() == [due_ms]
    assert due_at_ms(rows).tolist() == [hour_start_ms(490_000) + decode_due(due_ms)]


@pytest.mark.parametrize("due_ms", [encode_due(after_ms) for after_ms in AFTER_MS])
def test_rule_T1_what_is_due_by_an_instant_fires_no_later(due_ms: int) -> None:
    fires_ms = decode_due(due_ms)
    assert due_by(fires_ms) >= due_ms > due_by(fires_ms - 1)


def test_a_row_that_is_due_before_all_that_can_be_told_fires_late_and_never_early() -> None:
    long_ago = -(1 << 50)
    assert decode_due(encode_due(long_ago)) > long_ago and encode_due(long_ago) >= -(1 << 31)


def test_a_row_filed_before_its_hour_is_refused() -> None:
    with pytest.raises(AssertionError, match="no earlier"):
        due_within(np.array([NOW_MS], np.int64), np.array([489_999], np.uint32))
