"""Medians, spreads and quotients of runs."""

from bench.figures import ratio, spread, spreads


def test_a_spread_is_the_median_with_the_least_and_the_most() -> None:
    assert spread([5, 1, 9]) == {"median": 5, "min": 1, "max": 9}
    assert spread([1, 2]) == {"median": 1.5, "min": 1, "max": 2}


def test_a_figure_that_one_run_lacks_is_not_told_of_all() -> None:
    told = spreads([{"a": 1, "b": 2}, {"a": 3}])
    assert told == {"a": {"median": 2, "min": 1, "max": 3}}


def test_a_quotient_is_that_of_the_medians_and_lies_between_those_of_neighbouring_runs() -> None:
    assert ratio([100, 200, 600], [50, 50, 100]) == {"median": 4, "min": 2, "max": 6}


def test_large_figures_are_whole_and_small_ones_keep_four_digits() -> None:
    assert spread([123456.78, 123456.78])["median"] == 123457
    assert spread([1.23456])["median"] == 1.235
