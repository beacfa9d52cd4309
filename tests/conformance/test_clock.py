"""What every clock does: the machine's and the simulated one."""

from __future__ import annotations

import time

import pytest

from delayd.machine.clock import JudgedClock, SystemClock
from delayd.testing.clock import SimClock


@pytest.fixture(params=["system", "simulated"])
def clock(request: pytest.FixtureRequest) -> JudgedClock:
    return SystemClock() if request.param == "system" else SimClock(now_ms=time.time_ns() // 1_000_000)


def test_a_first_start_is_confirmed_and_reads_the_wall_clock(clock: JudgedClock) -> None:
    assert clock.confirmed
    assert abs(clock.now_ms() - time.time_ns() // 1_000_000) < 5_000


def test_monotonic_time_does_not_go_back(clock: JudgedClock) -> None:
    readings = [clock.monotonic_ms() for _ in range(100)]
    assert readings == sorted(readings)


def test_the_evidence_says_the_time_and_the_boot(clock: JudgedClock) -> None:
    first, second = clock.restart_evidence(), clock.restart_evidence()
    assert first.boot_id == second.boot_id != ""
    assert second.boottime_ms >= first.boottime_ms > 0
    assert abs(first.wall_ms - clock.now_ms()) < 5_000


def test_a_word_of_trust_leaves_it_confirmed(clock: JudgedClock) -> None:
    clock.trust()
    assert clock.confirmed


def test_a_restart_of_the_system_clock_in_the_same_boot_is_confirmed() -> None:
    assert SystemClock(SystemClock().restart_evidence()).confirmed
