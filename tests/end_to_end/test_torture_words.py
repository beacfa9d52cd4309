"""A short torture of what consumers say, on each run of the tests; and its ledger notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from .torture_words import ATTEMPTS, MESSAGES, WordLedger, torture


@pytest.fixture
def ledger() -> WordLedger:
    """Knows of one message, whose receipt has the sequence 70, and which a handler got once."""
    ledger = WordLedger()
    ledger.sent(70)
    ledger.hand(0, 1, 70)
    return ledger


@pytest.mark.serial
@pytest.mark.timeout(200)
def test_two_rounds_of_every_word_break_no_promise(tmp_path: Path) -> None:
    lines: list[str] = []
    ledger = torture(tmp_path / "data", 2, 5, lines.append)
    assert not ledger.violations, "\n".join([*lines, *ledger.violations])
    assert len(ledger.fates) == 2 * MESSAGES and ledger.handed > 2 * MESSAGES


def test_what_is_as_it_should_be_is_no_violation(ledger: WordLedger) -> None:
    ledger.hand(0, 2, 70)
    ledger.rejected(0)
    ledger.redriven()
    ledger.hand(0, 1, 70)
    ledger.acked(0)
    assert ledger.violations == []


def test_a_message_that_comes_after_it_was_acknowledged_or_rejected_is_noticed(ledger: WordLedger) -> None:
    ledger.acked(0)
    ledger.hand(0, 2, 70)
    ledger.sent(71)
    ledger.rejected(1)
    ledger.hand(1, 1, 71)
    assert ledger.violations == ["0 comes after it was acknowledged", "1 comes after it was rejected"]


@pytest.mark.parametrize(
    ("attempt", "what"), [(1, "after attempt 1"), (0, "as attempt 0"), (ATTEMPTS + 1, "as attempt")]
)
def test_an_attempt_too_many_and_one_that_comes_twice_are_noticed(ledger: WordLedger, attempt: int, what: str) -> None:
    ledger.hand(0, attempt, 70)
    assert what in ledger.violations[0]


def test_a_life_of_another_message_is_noticed(ledger: WordLedger) -> None:
    ledger.hand(0, 2, 71)
    assert ledger.violations == ["0 is message 70, and this life names 71"]


def test_messages_are_at_rest_when_all_that_is_not_acknowledged_is_dead(ledger: WordLedger) -> None:
    assert not ledger.at_rest(0) and ledger.at_rest(1)
    ledger.fates[0].maybe = True
    assert ledger.at_rest(0) and ledger.at_rest(1)
    ledger.acked(0)
    assert ledger.at_rest(0) and not ledger.at_rest(1)
