"""Rule T1, clause by clause."""

from __future__ import annotations

import logging

import pytest

from delayd.machine.clock import BELIEVED_AFTER_MS, GAPS_MAX, JUMP_MS
from delayd.testing.clock import START_MS, SimClock, SimMachine

HOUR_MS = 3_600_000


def test_rule_T1_a_jump_ahead_moves_nothing_while_it_is_in_doubt() -> None:
    clock = SimClock()
    clock.step_wall(HOUR_MS)
    assert clock.now_ms() == START_MS
    assert not clock.confirmed
    clock.advance(BELIEVED_AFTER_MS - 1)
    assert clock.now_ms() == START_MS + BELIEVED_AFTER_MS - 1
    assert not clock.confirmed


def test_rule_T1_a_jump_ahead_is_believed_after_30_s() -> None:
    clock = SimClock()
    clock.step_wall(HOUR_MS)
    clock.now_ms()
    clock.advance(BELIEVED_AFTER_MS)
    assert clock.now_ms() == START_MS + HOUR_MS + BELIEVED_AFTER_MS
    assert clock.confirmed
    clock.advance(10)
    assert clock.now_ms() == START_MS + HOUR_MS + BELIEVED_AFTER_MS + 10


def test_rule_T1_a_jump_ahead_is_believed_by_an_operators_word() -> None:
    clock = SimClock()
    clock.step_wall(HOUR_MS)
    assert clock.now_ms() == START_MS
    clock.trust()
    assert clock.confirmed
    assert clock.now_ms() == START_MS + HOUR_MS


def test_rule_T1_a_second_jump_while_in_doubt_starts_the_30_s_anew() -> None:
    clock = SimClock()
    clock.step_wall(10_000)
    clock.now_ms()
    clock.advance(BELIEVED_AFTER_MS - 1)
    clock.step_wall(365 * 24 * HOUR_MS)
    assert clock.now_ms() == START_MS + BELIEVED_AFTER_MS - 1
    clock.advance(1)
    assert clock.now_ms() == START_MS + BELIEVED_AFTER_MS
    assert not clock.confirmed


@pytest.mark.parametrize("step_ms", [1, 4_999, JUMP_MS])
def test_rule_T1_a_smaller_step_ahead_re_anchors_at_once(step_ms: int) -> None:
    clock = SimClock()
    clock.step_wall(step_ms)
    assert clock.now_ms() == START_MS + step_ms
    assert clock.confirmed
    clock.step_wall(step_ms)
    assert clock.now_ms() == START_MS + 2 * step_ms


def test_rule_T1_one_more_than_5_s_is_a_jump() -> None:
    clock = SimClock()
    clock.step_wall(JUMP_MS + 1)
    assert clock.now_ms() == START_MS


@pytest.mark.parametrize("step_ms", [1, HOUR_MS, 365 * 24 * HOUR_MS])
def test_rule_T1_a_clock_that_falls_back_is_followed_at_once(step_ms: int) -> None:
    clock = SimClock()
    clock.step_wall(-step_ms)
    assert clock.now_ms() == START_MS - step_ms
    assert clock.confirmed
    clock.advance(100)
    assert clock.now_ms() == START_MS - step_ms + 100


def test_rule_T1_time_asleep_is_time_passed() -> None:
    clock = SimClock()
    clock.machine.suspend(HOUR_MS)
    assert clock.now_ms() == START_MS + HOUR_MS
    assert clock.confirmed
    assert clock.monotonic_ms() == SimMachine().monotonic_ms


def test_rule_T1_a_restart_in_the_same_boot_notices_a_jump_made_while_it_was_down() -> None:
    clock = SimClock()
    evidence = clock.restart_evidence()
    clock.advance(60_000)
    clock.step_wall(HOUR_MS)
    restarted = SimClock(machine=clock.machine, previous=evidence)
    assert restarted.now_ms() == START_MS + 60_000
    assert not restarted.confirmed
    clock.advance(BELIEVED_AFTER_MS)
    assert restarted.now_ms() == START_MS + 60_000 + HOUR_MS + BELIEVED_AFTER_MS
    assert restarted.confirmed


def test_rule_T1_a_jump_in_doubt_is_still_in_doubt_after_a_restart() -> None:
    clock = SimClock()
    clock.step_wall(HOUR_MS)
    assert not clock.confirmed
    restarted = clock.restarted()
    assert restarted.now_ms() == START_MS
    assert not restarted.confirmed


def test_rule_T1_after_another_boot_the_clock_is_unconfirmed_for_30_s() -> None:
    clock = SimClock().reboot(off_ms=HOUR_MS)
    assert clock.now_ms() == START_MS + HOUR_MS
    assert not clock.confirmed
    clock.advance(BELIEVED_AFTER_MS - 1)
    assert not clock.confirmed
    clock.advance(1)
    assert clock.confirmed


@pytest.mark.parametrize(
    ("off_by_ms", "confirmed"), [(JUMP_MS, True), (-JUMP_MS, True), (5_001, False), (-5_001, False)]
)
def test_rule_T1_after_another_boot_a_reference_within_5_s_confirms(off_by_ms: int, confirmed: bool) -> None:
    clock = SimClock().reboot(off_ms=HOUR_MS)
    clock.reference(START_MS + HOUR_MS + off_by_ms)
    assert clock.confirmed is confirmed


def test_rule_T4_a_witness_of_the_same_boot_is_no_witness() -> None:
    clock = SimClock().reboot(off_ms=HOUR_MS)
    beside = SimClock(machine=clock.machine)
    clock.reference(beside.now_ms(), beside.boot_mark)
    assert not clock.confirmed
    clock.reference(START_MS + HOUR_MS, SimClock().boot_mark)
    assert clock.confirmed


def test_rule_T4_a_stamp_is_never_ahead_of_what_was_believed_before_the_boot() -> None:
    clock = SimClock()
    clock.advance(5_000)
    booted = clock.reboot()
    booted.step_wall(60 * 24 * HOUR_MS)
    assert booted.stamp_ms() == START_MS + 5_000
    booted.step_wall(-61 * 24 * HOUR_MS)
    assert booted.stamp_ms() == booted.now_ms() < START_MS
    booted.advance(BELIEVED_AFTER_MS)
    assert booted.confirmed and booted.stamp_ms() == booted.now_ms()


def test_rule_T4_a_restart_while_the_boot_is_in_doubt_makes_nothing_believed() -> None:
    booted = SimClock().reboot()
    booted.step_wall(60 * 24 * HOUR_MS)
    booted.advance(10_000)
    again = booted.restarted()
    assert not again.confirmed and again.stamp_ms() == START_MS
    again.advance(BELIEVED_AFTER_MS)
    assert again.confirmed


def test_each_step_of_the_clock_that_is_not_small_is_told_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = SimClock()

    def told() -> list[str]:
        for _ in range(3):
            clock.now_ms()
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    clock.step_wall(JUMP_MS)
    assert told() == []
    clock.step_wall(HOUR_MS)
    assert told() == [f"clock_doubted reason='it was set ahead' by_ms={HOUR_MS}"]
    clock.step_wall(2 * HOUR_MS)
    assert told() == [f"clock_doubted reason='it was set ahead' by_ms={3 * HOUR_MS}"]
    clock.advance(BELIEVED_AFTER_MS)
    assert told() == [f"clock_believed now_ms={clock.now_ms()}"]
    clock.step_wall(-HOUR_MS)
    assert told() == [f"clock_set_back by_ms={HOUR_MS} now_ms={clock.now_ms()}"]
    clock.step_wall(HOUR_MS)
    told()
    clock.trust()
    assert told() == [f"clock_believed now_ms={clock.now_ms()}"]


def test_a_restart_of_the_machine_is_told_in_the_log_until_the_clock_is_believed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = SimClock().reboot()
    clock.now_ms()
    clock.reference(clock.now_ms())
    assert [record.getMessage().split()[0] for record in caplog.records] == ["clock_doubted", "clock_believed"]


def test_a_stall_of_a_second_and_a_doubt_are_kept_over_restarts_to_explain_late_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = SimClock()
    clock.stood_still(999)
    assert not caplog.messages and not clock.restart_evidence().gaps
    clock.advance(5_000)
    clock.stood_still(1_000)
    assert caplog.messages == ["stood_still ms=1000"]
    clock.step_wall(HOUR_MS)
    clock.now_ms()
    clock.advance(10_000)
    clock.step_wall(HOUR_MS)
    clock.now_ms()
    clock.advance(BELIEVED_AFTER_MS)
    believed_ms = clock.now_ms()
    gaps = [
        ("stood still", START_MS + 4_000, START_MS + 5_000),
        ("clock in doubt", START_MS + 5_000, believed_ms),
    ]
    assert list(clock.restart_evidence().gaps) == gaps
    again = SimClock(machine=clock.machine, previous=clock.restart_evidence())
    assert list(again.restart_evidence().gaps) == gaps
    booted = again.reboot()
    booted.advance(2_000)
    booted.stood_still(2_000)
    evidence = booted.restart_evidence()
    assert not booted.confirmed and len(evidence.gaps) == 3
    for _ in range(2 * GAPS_MAX):
        again.stood_still(1_000)
    assert len(again.restart_evidence().gaps) == GAPS_MAX
