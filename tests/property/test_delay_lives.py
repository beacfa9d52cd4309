"""Random lives of a delay server: whatever happens in them, each message is delivered once and the books agree.

The same lives go wrong when a rule is taken out of the server, which shows that they can.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.worlds.bugs import PLANTED, PLANTED_IN_CANCELS, PLANTED_IN_CLOCKS
from tests.worlds.chaos import Chaos
from tests.worlds.delay import small_slots

BUGS = PLANTED | PLANTED_IN_CANCELS | PLANTED_IN_CLOCKS
SEEDS = 100
PARTS = 2  # The seeds are dealt out to this many tests, which may run beside each other.
SEEDS_PLANTED = 250  # A planted bug must show within this many seeds.


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_each_message_is_delivered_once_and_the_books_agree(part: int) -> None:
    taken: Counter[str] = Counter()
    with small_slots():
        for seed in range(part, SEEDS, PARTS):
            taken += Chaos(seed).run()
    # Nothing that can happen was left out by chance.
    assert min(taken.values()) > SEEDS // PARTS // 4, taken


@pytest.mark.parametrize("name", BUGS)
def test_a_rule_that_is_taken_out_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in BUGS[name]:
        monkeypatch.setattr(*bug)
    with small_slots(), pytest.raises(AssertionError, match="seed "):
        for seed in range(SEEDS_PLANTED):
            Chaos(seed).run()
