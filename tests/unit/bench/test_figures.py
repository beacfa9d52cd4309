"""Medians, spreads and quotients of runs."""

import pytest

from bench.figures import ratio, spread, spreads


def test_a_spread_is_the_median_with_the_least_and_the_most() -> None:
    assert spread([5, 1, 9]) == {"median": 5, "min": 1, "max": 9}
    assert spread([1, 2]) == {"median": 1.5, "min": 1, "max": 2}


def test_a_figure_that_one_run_lacks_is_not_told_of_all() -> None:
    told = spreads([{"a": 1, "b": 2}, {"a": 3}])
    assert told == {"a": {"median": 2, "min": 1, "max": 3}}


def test_a_figure_that_only_a_later_run_has_is_not_told_either() -> None:
    assert set(spreads([{"a": 1}, {"a": 3, "b": 2}])) == {"a"}


@pytest.mark.parametrize("value", ["text", [1.0, 2.0], None, True])
def test_what_is_no_number_has_no_spread(value: object) -> None:
    assert spreads([{"a": value}, {"a": value}]) == {}


def test_no_runs_have_no_figures() -> None:
    assert spreads([]) == {}


def test_a_quotient_is_that_of_the_medians_and_lies_between_those_of_neighbouring_runs() -> None:
    assert ratio([100, 200, 600], [50, 50, 100]) == {"median": 4, "min": 2, "max": 6}


def test_a_side_that_ran_less_often_is_compared_as_far_as_it_goes() -> None:
    assert ratio([100, 300], [50]) == {"median": 4, "min": 2, "max": 2}


def test_large_figures_are_whole_and_small_ones_keep_four_digits() -> None:
    assert spread([123456.78, 123456.78])["median"] == 123457
    assert spread([1.23456])["median"] == 1.235
