"""Pace: how much is fetched ahead of callers of any speed (rule Q4)."""

from __future__ import annotations

import pytest

from delayd.client.pulling.stock import AHEAD_S, BATCH_S, HOLD_S, ONE_AHEAD_S, Pace

MOST = 1_000


def paced(each_s: float, lease_s: float = 60.0, messages: int = 50) -> Pace:
    """The pace of a caller that has taken so many messages, one at a time."""
    pace, now = Pace(lease_s), 100.0
    for _ in range(messages):
        pace.came_back(now)
        pace.handed_out(now, 1)
        pace.fetched()
        now += each_s
    pace.came_back(now)
    return pace


def test_rule_Q4_nothing_is_fetched_ahead_before_a_pace_is_known() -> None:
    pace = Pace(60.0)
    assert (pace.ahead(MOST), pace.batch(MOST), pace.is_back_soon(1)) == (0, 1, False)
    pace.came_back(1.0)
    pace.handed_out(1.0, 1)
    pace.fetched()
    assert (pace.ahead(MOST), pace.batch(MOST)) == (0, 1)


@pytest.mark.parametrize(
    ("each_s", "ahead", "batch"),
    [(1e-6, MOST, MOST), (0.001, 250, MOST), (0.01, 25, 100), (0.3, 1, 3), (0.45, 1, 2), (0.6, 0, 1), (10.0, 0, 1)],
)
def test_rule_Q4_what_is_held_ahead_is_a_time_and_no_number(each_s: float, ahead: int, batch: int) -> None:
    pace = paced(each_s)
    assert abs(pace.ahead(MOST) - ahead) <= 1 and abs(pace.batch(MOST) - batch) <= 1
    assert pace.ahead(5) == min(5, ahead) and pace.batch(5) == min(5, batch)


@pytest.mark.parametrize("lease_s", [0.1, 0.5, 2.0, 60.0, 43_200.0])
@pytest.mark.parametrize("each_s", [0.0, 0.0001, 0.01, 0.04, 0.3, 2.0])
def test_rule_Q4_what_is_fetched_ahead_leaves_most_of_its_lease(lease_s: float, each_s: float) -> None:
    pace = paced(each_s, lease_s)
    assert pace.hold_s <= min(HOLD_S, lease_s / 4)
    assert pace.ahead(MOST) * each_s <= min(ONE_AHEAD_S, lease_s / 8)
    assert pace.batch(MOST) == 1 or pace.batch(MOST) * each_s <= min(BATCH_S, lease_s / 8)
    assert pace.ahead(MOST) <= 1 or pace.ahead(MOST) * each_s <= min(AHEAD_S, lease_s / 16)


def test_fetches_of_a_fast_caller_grow_by_a_factor_and_begin_anew_after_a_stall() -> None:
    pace, sizes = Pace(60.0), []
    for now in range(5):
        pace.came_back(now * 1e-5)
        sizes.append(pace.batch(MOST))
        pace.handed_out(now * 1e-5, sizes[-1])
        pace.fetched()
    assert sizes == [1, 8, 64, 512, MOST]
    pace.stalled()
    assert pace.batch(MOST) == 1


def test_the_pace_follows_a_caller_that_becomes_slow_or_fast_within_a_few_messages() -> None:
    pace, now = paced(0.001), 1_000.0
    pace.handed_out(now, 1)
    pace.came_back(now + 10)
    assert pace.ahead(MOST) == 0
    for _ in range(12):
        pace.next(now)
        now += 0.001
    pace.came_back(now)
    assert pace.ahead(MOST) > 50


def test_threads_that_share_a_consumer_have_one_pace() -> None:
    pace, now = Pace(60.0), 0.0
    for _ in range(20):
        # Each of ten threads takes 0.1 s; they come back one after the other.
        pace.came_back(now)
        pace.handed_out(now, 1)
        pace.fetched()
        now += 0.01
    assert pace.ahead(MOST) == pytest.approx(25, abs=1)


def test_waiting_for_messages_is_no_work() -> None:
    pace = paced(0.001)
    pace.handed_out(500.0, 1)
    pace.came_back(500.001)
    pace.came_back(900.0)
    assert pace.ahead(MOST) > 200
