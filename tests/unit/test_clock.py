"""Rules T1 and T4, clause by clause: what a judged clock says while the wall clock is set, and after a boot."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from delayd.machine.clock import BELIEVED_AFTER_MS, GAPS_MAX, IN_DOUBT, JUMP_MS
from delayd.testing.clock import START_MS, SimClock, SimMachine

HOUR_MS = 3_600_000
DAY_MS, YEAR_MS = 24 * HOUR_MS, 365 * 24 * HOUR_MS
Step = tuple[
    str, int
]  # The name of a step, and by how much or what it sees: ms after START_MS, negative while in doubt.


def step(ms: int) -> Step:
    return "step", ms


def wait(ms: int) -> Step:
    return "wait", ms


def says(ms: int) -> Step:
    """The clock shows so long after START_MS, and is confirmed."""
    return "says", ms


def doubts(ms: int) -> Step:
    """The clock shows so long after START_MS, and is in doubt."""
    return "doubts", ms


TRUST: Step = ("trust", 0)
SCRIPTS: dict[str, list[Step]] = {
    "a jump ahead moves nothing until it is believed after 30 s": [
        *(step(HOUR_MS), doubts(0), wait(BELIEVED_AFTER_MS - 1), doubts(BELIEVED_AFTER_MS - 1)),
        *(wait(1), says(HOUR_MS + BELIEVED_AFTER_MS), wait(10), says(HOUR_MS + BELIEVED_AFTER_MS + 10)),
    ],
    "a jump ahead is believed by an operator's word": [step(HOUR_MS), doubts(0), TRUST, says(HOUR_MS)],
    "a second jump while in doubt starts the 30 s anew": [
        *(step(10_000), doubts(0), wait(BELIEVED_AFTER_MS - 1), step(YEAR_MS), doubts(BELIEVED_AFTER_MS - 1)),
        *(wait(1), doubts(BELIEVED_AFTER_MS)),
    ],
    "one more than 5 s is a jump": [step(JUMP_MS + 1), doubts(0)],
    "time asleep is time passed": [("suspend", HOUR_MS), says(HOUR_MS)],
    **{
        f"a smaller step of {ms} ms counts at once": [step(ms), says(ms), step(ms), says(2 * ms)] for ms in (1, JUMP_MS)
    },
    **{
        f"a clock that falls back by {ms} ms is followed at once": [step(-ms), says(-ms), wait(100), says(100 - ms)]
        for ms in (1, HOUR_MS, YEAR_MS)
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_rule_T1_clause_by_clause(name: str) -> None:
    clock = SimClock()
    do: dict[str, Callable[[int], object]] = {
        "step": clock.step_wall,
        "wait": clock.advance,
        "suspend": clock.machine.suspend,
        "trust": lambda _: clock.trust(),
    }
    for what, ms in SCRIPTS[name]:
        if what in do:
            do[what](ms)
        else:
            assert (clock.now_ms() - START_MS, clock.confirmed) == (ms, what == "says")
    assert "asleep" not in name or clock.monotonic_ms() == SimMachine().monotonic_ms


def test_rule_T1_a_restart_in_the_same_boot_notices_a_jump_made_while_it_was_down_and_forgets_no_doubt() -> None:
    clock = SimClock()
    evidence = clock.restart_evidence()
    clock.advance(60_000)
    clock.step_wall(HOUR_MS)
    restarted = SimClock(machine=clock.machine, previous=evidence)
    for each in (restarted, restarted.restarted()):
        assert (each.now_ms(), each.confirmed) == (START_MS + 60_000, False)
    clock.advance(BELIEVED_AFTER_MS)
    assert (restarted.now_ms(), restarted.confirmed) == (START_MS + 60_000 + HOUR_MS + BELIEVED_AFTER_MS, True)


def test_rule_T1_after_another_boot_the_clock_is_unconfirmed_for_30_s() -> None:
    clock = SimClock().reboot(off_ms=HOUR_MS)
    assert clock.now_ms() == START_MS + HOUR_MS and not clock.confirmed
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
    booted.step_wall(60 * DAY_MS)
    assert booted.stamp_ms() == START_MS + 5_000
    again = booted.restarted()
    assert not again.confirmed and again.stamp_ms() == START_MS + 5_000, "a restart makes nothing believed"
    booted.step_wall(-61 * DAY_MS)
    assert booted.stamp_ms() == booted.now_ms() < START_MS
    booted.advance(BELIEVED_AFTER_MS)
    assert booted.confirmed and booted.stamp_ms() == booted.now_ms()


def test_each_step_of_the_clock_that_is_not_small_is_told_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = SimClock()

    def told() -> list[str]:
        for _ in range(3):
            clock.now_ms()
        lines = caplog.messages.copy()
        caplog.clear()
        return lines

    for ms, by_ms in ((JUMP_MS, 0), (HOUR_MS, HOUR_MS), (2 * HOUR_MS, 3 * HOUR_MS)):
        clock.step_wall(ms)
        assert told() == ([f"clock_doubted reason='it was set ahead' by_ms={by_ms}"] if by_ms else [])
    clock.advance(BELIEVED_AFTER_MS)
    assert told() == [f"clock_believed now_ms={clock.now_ms()}"]
    clock.step_wall(-HOUR_MS)
    assert told() == [f"clock_set_back by_ms={HOUR_MS} now_ms={clock.now_ms()}"]
    clock.step_wall(HOUR_MS)
    told()
    clock.trust()
    assert told() == [f"clock_believed now_ms={clock.now_ms()}"]
    clock.step_wall(HOUR_MS)
    told()
    clock.step_wall(-3 * HOUR_MS)
    now_ms = clock.now_ms()
    assert told() == [f"clock_believed now_ms={now_ms}", f"clock_set_back by_ms={2 * HOUR_MS} now_ms={now_ms}"]
    booted = clock.reboot()
    booted.now_ms()
    booted.reference(booted.now_ms())
    assert [line.split()[0] for line in caplog.messages] == ["clock_doubted", "clock_believed"]


def test_a_stall_of_a_second_and_a_doubt_are_kept_over_restarts_to_explain_late_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = SimClock()
    clock.stood_still(999)
    assert not clock.restart_evidence().gaps
    clock.advance(5_000)
    clock.stood_still(1_000)
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


@pytest.mark.parametrize("back_ms", [HOUR_MS, 2 * HOUR_MS])
def test_a_doubt_that_ends_because_the_clock_was_set_back_kept_nothing_from_being_handed_over(back_ms: int) -> None:
    clock = SimClock()
    clock.step_wall(HOUR_MS)
    clock.now_ms()
    clock.advance(10_000)
    clock.step_wall(-back_ms)
    assert clock.confirmed
    now_ms, was_ms = START_MS + HOUR_MS + 10_000 - back_ms, START_MS + 10_000
    set_back = [("clock set back", now_ms, was_ms)] if back_ms > HOUR_MS else []
    assert list(clock.restart_evidence().gaps) == set_back


@pytest.mark.parametrize("ended_by", ["time", "another machine", "an operator"])
def test_a_doubt_after_a_boot_is_kept_too_for_nothing_is_handed_over_meanwhile(ended_by: str) -> None:
    clock = SimClock().reboot(off_ms=HOUR_MS)
    clock.step_wall(-60_000)  # Its first reading of this boot was wrong.
    clock.advance(BELIEVED_AFTER_MS)
    until_ms = START_MS + HOUR_MS - 60_000 + BELIEVED_AFTER_MS
    if ended_by == "another machine":
        clock.reference(until_ms)
    elif ended_by == "an operator":
        clock.trust()
    for _ in range(2):
        assert clock.confirmed
        doubts = [gap for gap in clock.restart_evidence().gaps if gap.what == IN_DOUBT]
        assert doubts == [("clock in doubt", until_ms - BELIEVED_AFTER_MS, until_ms)]
