"""The histogram of lateness merges by sum and is off by half a step at most."""

import numpy as np
import pytest

from delayd.machine.histogram import BUCKETS, LOWER_BOUNDS, Histogram, count_values, quantile_of
from delayd.reading.findings import HourSummary, sum_up


@pytest.mark.parametrize("quantile", [0.5, 0.99, 0.999])
def test_a_quantile_is_within_half_a_step_of_the_exact_one(quantile: float) -> None:
    values = np.sort((np.random.default_rng(7).lognormal(4, 2, 50_000)).astype(np.int64))
    exact = int(values[int(np.ceil(quantile * len(values))) - 1])
    assert quantile_of(count_values(values), quantile) == pytest.approx(exact, rel=0.026)


def test_what_is_out_of_range_is_counted_at_the_ends() -> None:
    counts = count_values(np.array([-5, 1 << 60]))
    assert (counts[0], counts[BUCKETS - 1], counts.sum()) == (1, 1, 2)


@pytest.mark.parametrize("values", [[7] * 9, [0, 22], [-3, -1], [-4, 70_000], [65_535], [65_536, 3], [1 << 40, 40, 5]])
def test_each_way_to_count_finds_the_same(values: list[int]) -> None:
    steps = [max(int(np.searchsorted(LOWER_BOUNDS, value, side="right")) - 1, 0) for value in values]
    assert count_values(np.array(values)).tolist() == np.bincount(steps, minlength=BUCKETS).tolist()
    noted = Histogram()
    for repeated in (1, 1_000):  # A small column, and one that is counted at once.
        noted.late((100 - np.repeat(values, repeated)).astype(np.int64).tobytes(), 100)
    counts, total = noted.counted()
    assert counts.tolist() == (1_001 * np.bincount(steps, minlength=BUCKETS)).tolist()
    assert total == 1_001 * sum(max(value, 0) for value in values)


def test_a_sum_over_hours_adds_counts_and_keeps_the_latest() -> None:
    hours = [
        HourSummary(1, hour, scheduled=hour, late_ms_max=hour * 7, lateness=count_values(np.array([hour])))
        for hour in (1, 2, 3)
    ]
    total = sum_up(hours)
    assert (total.scheduled, total.late_ms_max, int(total.lateness.sum()), total.late_ms(0.5)) == (6, 21, 3, 2)
