"""Lives of recurring schedules, in a bounded form, and bugs that their account must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delayd.recurrence.deciding import RunDecision, decide
from tests.property.recurring_lives import Life, RecordLife, lives, wrong


def test_nothing_is_missing_and_nothing_doubled_in_lives_of_twenty_years() -> None:
    found = lives(range(60), 20)
    assert not wrong(found), found
    assert found["run"] > 5_000 and found["skipped"] > 1_000
    assert all(found[each] > 25 for each in ("kills", "outages", "pauses", "edits", "restores", "looks"))


def test_nor_is_anything_with_the_record_of_a_server() -> None:
    found = lives(range(100, 160), 20, RecordLife)
    assert not wrong(found), found
    assert found["run"] > 5_000 and found["skipped"] > 1_000
    assert all(found[each] > 25 for each in ("kills", "answers lost", "pauses", "edits", "restores"))
    assert found["asked again"], "a caller came while more was missed than fits into one decision"


def _decided_again(decision: RunDecision, decided_ms: int) -> RunDecision:
    return decision._replace(decided_ms=decided_ms)


def _one_left_out(decision: RunDecision, decided_ms: int) -> RunDecision:
    return decision._replace(run=decision.run[1:])


def _skips_not_told(decision: RunDecision, decided_ms: int) -> RunDecision:
    return decision._replace(skipped=decision.skipped[:-1])


def _sent_and_skipped(decision: RunDecision, decided_ms: int) -> RunDecision:
    return decision._replace(run=(*(skip.first_ms for skip in decision.skipped), *decision.run))


@pytest.mark.parametrize(
    ("bug", "shows"),
    [
        (_decided_again, "doubled"),
        (_one_left_out, "missing"),
        (_skips_not_told, "missing"),
        (_sent_and_skipped, "doubled"),
    ],
)
def test_the_account_finds_a_bug(bug: Callable[[RunDecision, int], RunDecision], shows: str) -> None:
    calls = 0

    def decides(recurrence: Any, policy: Any, decided_ms: int, at_ms: int, **more: Any) -> RunDecision:
        nonlocal calls
        calls += 1
        decision = decide(recurrence, policy, decided_ms, at_ms, **more)
        # Once in a while, or a life in which nothing is ever decided would not end.
        return bug(decision, decided_ms) if calls % 3 == 0 else decision

    found = [Life(seed, 10, decides).live() for seed in range(20)]
    assert sum(each[shows] for each in found) > 0
