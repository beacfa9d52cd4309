"""A short torture of what consumers say, on each run of the tests; and its ledger notices what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from .torture_words import ATTEMPTS, KEYS, LATE_MS, MESSAGES, WordLedger, torture


@pytest.fixture
def ledger() -> WordLedger:
    """Knows of one message, whose receipt has the sequence 70, and which a handler got once."""
    ledger = WordLedger()
    ledger.sent(70)
    ledger.hand(0, 1, 70, now_ms=0)
    return ledger


@pytest.mark.serial
@pytest.mark.timeout(200)
def test_two_rounds_of_every_word_break_no_promise(tmp_path: Path) -> None:
    lines: list[str] = []
    everything, some, ordered = torture(tmp_path / "data", 2, 5, lines.append).values()
    broken = [*everything.violations, *some.violations, *ordered.violations]
    assert not broken, "\n".join([*lines, *broken])
    assert len(everything.fates) == 2 * MESSAGES and everything.handed > some.handed > 0
    assert ordered.words["in order"]


@pytest.mark.parametrize("returns_within", [True, False])
def test_what_is_rejected_while_dead_letters_are_sent_again_may_come_with_them(
    ledger: WordLedger, returns_within: bool
) -> None:
    with ledger.redriving():
        ledger.rejecting(0)
        if returns_within:
            ledger.rejected(0)
    if not returns_within:
        ledger.rejected(0)
    ledger.hand(0, 1, 70, now_ms=0)
    assert ledger.violations == []
    ledger.rejecting(0)
    ledger.rejected(0)
    ledger.hand(0, 2, 70, now_ms=0)
    assert ledger.violations == ["0 comes after it was rejected"]


def test_a_message_that_comes_after_it_was_acknowledged_or_rejected_is_noticed(ledger: WordLedger) -> None:
    ledger.acked(0)
    ledger.hand(0, 2, 70, now_ms=0)
    ledger.sent(71)
    ledger.rejected(1)
    ledger.hand(1, 1, 71, now_ms=0)
    assert ledger.violations == ["0 comes after it was acknowledged", "1 comes after it was rejected"]


@pytest.mark.parametrize(
    ("attempt", "what"), [(1, "after attempt 1"), (0, "as attempt 0"), (ATTEMPTS + 1, "as attempt")]
)
def test_an_attempt_too_many_and_one_that_comes_twice_are_noticed(ledger: WordLedger, attempt: int, what: str) -> None:
    ledger.hand(0, attempt, 70, now_ms=0)
    assert what in ledger.violations[0]


def test_a_life_of_another_message_is_noticed(ledger: WordLedger) -> None:
    ledger.hand(0, 2, 71, now_ms=0)
    assert ledger.violations == ["0 is message 70, and this life names 71"]


def test_a_message_that_the_group_does_not_want_is_noticed_and_not_waited_for(ledger: WordLedger) -> None:
    ledger.acked(0)
    ledger.sent(71, wanted=False)
    assert ledger.at_rest(0, 0) and not ledger.at_rest(1, 0)
    ledger.hand(1, 1, 71, now_ms=0)
    assert ledger.violations == ["1 comes, and its group does not want its tags"]


def test_an_expiry_that_has_passed_or_changed_is_noticed(ledger: WordLedger) -> None:
    ledger.sent(71, 500)
    ledger.hand(1, 1, 71, 500, now_ms=500 + LATE_MS)
    assert ledger.violations == []
    ledger.hand(1, 2, 71, 500, now_ms=501 + LATE_MS)
    ledger.hand(1, 3, 71, None, now_ms=0)
    assert [what.split(" ", 1)[1][:14] for what in ledger.violations] == ["expired at 500", "expires at 500"]


def test_a_message_that_passes_another_one_of_its_key_is_noticed() -> None:
    ledger = WordLedger(ordered=True)
    for number in range(2 * KEYS + 1):
        ledger.sent(number)
    ledger.hand(0, 1, 0, now_ms=0)
    ledger.hand(1, 1, 1, now_ms=0)
    ledger.hand(0, 2, 0, now_ms=0)
    assert ledger.violations == []
    ledger.hand(KEYS, 1, KEYS, now_ms=0)
    assert ledger.violations == [f"{KEYS} comes, though the group has not done with [0] of its key"]
    ledger.acked(0)
    ledger.rejected(KEYS)
    ledger.hand(2 * KEYS, 1, 2 * KEYS, now_ms=0)
    assert len(ledger.violations) == 1
