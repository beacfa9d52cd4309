"""A short torture on each run of the tests, and the proof that its ledger notices each kind of broken promise."""

from pathlib import Path

import pytest

from delayd import CancelAnswer, MessageState

from .torture import ALL_KINDS, Plan, planted_plan, torture
from .torture_ledger import Delivered, Fate, Ledger, body_of
from .torture_planted import PLANTED

GROUP = ("orders", "billing")
OTHER = ("orders", "audit")
DUE_MS = 1_800_000_000_000
# A server tries again after half a minute to read what it could not; every other fault is over within seconds.
QUICK_KINDS = tuple(kind for kind in ALL_KINDS if kind != "disk")
LATER = 1_000.0  # On the monotonic clock, far behind the end of the first delivery's lease.


@pytest.fixture
def ledger() -> Ledger:
    """Knows of one message that is kept, and due at DUE_MS."""
    ledger = Ledger((GROUP, OTHER))
    number, _ = ledger.send("orders", DUE_MS, 10)
    ledger.kept(number, (1, 77))
    return ledger


def came(number: int = 0, sequence: int = 77, body: bytes = b"") -> Delivered:
    return Delivered(body or body_of(number, DUE_MS, 10), "orders", (1, sequence), DUE_MS)


def deliver(ledger: Ledger, *, delivered: Delivered | None = None, now_ms: int = DUE_MS, now: float = 0.0) -> None:
    ledger.deliver(GROUP, delivered or came(), now_ms=now_ms, now=now, lease_ends=now + 60)


@pytest.mark.serial
@pytest.mark.timeout(110)
def test_four_rounds_of_torture_break_no_promise(tmp_path: Path) -> None:
    lines: list[str] = []
    result = torture(tmp_path / "data", Plan(rounds=4, seed=17, kinds=QUICK_KINDS), lines.append)
    assert result.good, "\n".join([*lines, *result.ledger.violations])
    assert (result.rounds, len(result.keys.numbers)) == (4, 4 * Plan.keyed)
    assert any(line.strip().startswith("audit numpy=") and line.endswith(" agree") for line in lines)
    assert result.report is not None and result.report.total.dispatched > 0
    assert result.ledger.count(Fate.KEPT) <= result.report.total.scheduled


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_that_is_planted_in_a_delay_server_is_noticed(tmp_path: Path, bug: str) -> None:
    assert torture(tmp_path / "data", planted_plan(bug, 3), lambda _: None).ledger.violations


def test_a_message_that_comes_within_its_lease_is_noticed(ledger: Ledger) -> None:
    deliver(ledger)
    deliver(ledger, now=30.0)
    assert "before its lease ends" in ledger.violations[0]


def test_a_message_that_comes_after_it_was_acknowledged_is_noticed(ledger: Ledger) -> None:
    deliver(ledger)
    ledger.acknowledged(GROUP, [0])
    deliver(ledger, now=LATER)
    assert "after it was acknowledged" in ledger.violations[0]


def test_only_what_was_sent_before_a_clock_was_set_back_may_be_early_by_that_much(ledger: Ledger) -> None:
    ledger.clock_is_ahead(3_600_000)
    deliver(ledger, now_ms=DUE_MS - 3_600_000)
    ledger.clock_is_right(0)
    assert ledger.violations == []
    ledger.send("orders", DUE_MS, 10)
    deliver(ledger, delivered=came(number=1, sequence=78), now_ms=DUE_MS - 1)
    assert "early by 1 ms" in ledger.violations[0]


def test_after_a_clock_was_ahead_only_what_earlier_lives_took_may_stay_in_flight(ledger: Ledger) -> None:
    ledger.clock_is_ahead(3_600_000)
    ledger.clock_is_right(DUE_MS - 10_000)
    of_earlier_life, _ = ledger.send("orders", DUE_MS, 10)
    ledger.delay_server_started()
    of_this_life, _ = ledger.send("orders", DUE_MS, 10)
    later, _ = ledger.send("orders", DUE_MS + 3_600_000, 10)
    assert list(map(ledger.may_stay_in_flight, (of_earlier_life, of_this_life, later))) == [True, False, False]


def test_an_early_message_is_noticed(ledger: Ledger) -> None:
    deliver(ledger, now_ms=DUE_MS - 1)
    assert "early by 1 ms" in ledger.violations[0]


def test_a_message_with_two_sequences_is_noticed(ledger: Ledger) -> None:
    deliver(ledger)
    deliver(ledger, delivered=came(sequence=78), now=LATER)
    assert "kept twice" in ledger.violations[0]


def test_a_message_that_was_refused_and_comes_all_the_same_is_noticed(ledger: Ledger) -> None:
    ledger.send("orders", DUE_MS, 10)
    ledger.refused(1)
    deliver(ledger, delivered=came(number=1))
    assert "refused but there" in ledger.violations[0]


def test_a_changed_body_and_a_message_of_nobody_are_noticed(ledger: Ledger) -> None:
    deliver(ledger, delivered=came(body=body_of(0, DUE_MS, 9)))
    deliver(ledger, delivered=came(number=5))
    assert ["changed" in ledger.violations[0], "never sent" in ledger.violations[1]] == [True, True]


def test_a_cancelled_message_that_comes_is_noticed(ledger: Ledger) -> None:
    ledger.cancelling([0])
    assert ledger.missing(DUE_MS) == [], "it may be cancelled"
    ledger.cancel_answered(0, CancelAnswer.CANCELLED)
    assert (ledger.cancelled, ledger.violations) == (1, [])
    deliver(ledger)
    assert "cancelled but there" in ledger.violations[0]


def test_a_cancel_that_comes_too_late_and_says_otherwise_is_noticed(ledger: Ledger) -> None:
    deliver(ledger)
    ledger.cancelling([0])
    ledger.cancel_answered(0, CancelAnswer.CANCELLED)
    assert "cancelled after it was delivered" in ledger.violations[0]


def test_a_message_that_has_left_by_a_cancels_answer_is_missed(ledger: Ledger) -> None:
    ledger.cancelling([0])
    ledger.cancel_answered(0, CancelAnswer.IN_FLIGHT)
    assert ledger.missing(DUE_MS) == []
    ledger.cancel_answered(0, CancelAnswer.ALREADY_DISPATCHED)
    assert ledger.missing(DUE_MS) == [(GROUP, 0), (OTHER, 0)]
    ledger.cancel_answered(0, CancelAnswer.CANCELLED)
    assert "cancelled after it was dispatched" in ledger.violations[0]


@pytest.mark.parametrize("answer", [CancelAnswer.ALREADY_DISPATCHED, CancelAnswer.UNKNOWN])
def test_a_cancelled_message_stays_so(ledger: Ledger, answer: CancelAnswer) -> None:
    ledger.cancelling([0])
    ledger.cancel_answered(0, CancelAnswer.CANCELLED)
    ledger.cancel_answered(0, answer)
    assert f"a cancel says {answer.name}" in ledger.violations[0]


@pytest.mark.parametrize("state", list(MessageState))
@pytest.mark.parametrize("cancelled", [False, True])
def test_an_untrue_state_is_noticed(ledger: Ledger, state: MessageState, cancelled: bool) -> None:
    true = {MessageState.IN_FLIGHT, MessageState.PENDING, MessageState.DISPATCHED}
    if cancelled:
        true = {MessageState.IN_FLIGHT, MessageState.CANCELLED}
        ledger.cancelling([0])
        ledger.cancel_answered(0, CancelAnswer.CANCELLED)
    ledger.state_answered(0, state, cancelled_before=cancelled)
    assert bool(ledger.violations) == (state not in true)
