"""How often a target is asked, and when it is left alone (docs/push.md, Limits)."""

from __future__ import annotations

import pytest

from delayd.gateway.pacing import Breaker, Pace


@pytest.mark.parametrize("rate", [0.1, 1.0, 7.0, 50.0, 1_000.0])
def test_in_any_time_at_most_so_many_go_and_nearly_as_many(rate: float) -> None:
    pace, now, gone = Pace(rate), 100.0, list[float]()
    while now < 100.0 + 200 / rate:
        room = pace.room(now, 10)
        assert bool(room) == (pace.wait_s(now) == 0.0)
        pace.take(now, room)
        gone += [now] * room
        now += pace.wait_s(now) + 1e-9
    for first in range(0, len(gone), 7):
        for length in (1 / rate, 10 / rate):
            inside = sum(gone[first] <= at < gone[first] + length for at in gone)
            assert inside <= 1 + rate * (length + 0.1)
    assert len(gone) >= 199


def test_without_a_rate_all_go() -> None:
    pace = Pace(0.0)
    assert (pace.room(0.0, 500), pace.wait_s(0.0), pace.is_rested(0.0)) == (500, 0.0, True)


def test_after_five_failures_a_server_rests_longer_and_longer_until_it_takes_one() -> None:
    breaker, now = Breaker(), 10.0
    assert [breaker.failed(now) for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert breaker.failed(now + 0.5) == 0.0, "what was under way already says nothing new"
    assert (breaker.wait_s(now + 0.5), breaker.is_trying) == (0.5, True)
    pauses = []
    for _ in range(8):
        now += 100.0
        assert breaker.wait_s(now) == 0.0
        pauses.append(breaker.failed(now))
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert breaker.took() and not breaker.is_trying
    assert [breaker.failed(now) for _ in range(4)] == [0.0] * 4
    assert not breaker.took()
    assert [breaker.failed(now) for _ in range(4)] == [0.0] * 4


def test_a_server_rests_as_long_as_it_says() -> None:
    breaker = Breaker()
    breaker.rest(50.0)
    breaker.rest(20.0)
    assert breaker.wait_s(30.0) == 20.0
