"""The histogram of lateness merges by sum and is off by half a step at most."""

import numpy as np
import pytest

from delayd.machine.histogram import BUCKETS, count_values, quantile_of
from delayd.reading.findings import HourSummary, sum_up


@pytest.mark.parametrize("quantile", [0.5, 0.99, 0.999])
def test_a_quantile_is_within_half_a_step_of_the_exact_one(quantile: float) -> None:
    values = np.sort((np.random.default_rng(7).lognormal(4, 2, 50_000)).astype(np.int64))
    exact = int(values[int(np.ceil(quantile * len(values))) - 1])
    assert quantile_of(count_values(values), quantile) == pytest.approx(exact, rel=0.026)


def test_what_is_out_of_range_is_counted_at_the_ends() -> None:
    counts = count_values(np.array([-5, 1 << 60]))
    assert (counts[0], counts[BUCKETS - 1], counts.sum()) == (1, 1, 2)


def test_a_sum_over_hours_adds_counts_and_keeps_the_latest() -> None:
    hours = [
        HourSummary(1, hour, scheduled=hour, late_ms_max=hour * 7, lateness=count_values(np.array([hour])))
        for hour in (1, 2, 3)
    ]
    total = sum_up(hours)
    assert (total.scheduled, total.late_ms_max, int(total.lateness.sum()), total.late_ms(0.5)) == (6, 21, 3, 2)
