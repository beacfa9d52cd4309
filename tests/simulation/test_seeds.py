"""Whole clusters, seed by seed: whatever happens, what was accepted is delivered once and the books agree."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.delay_harness import small_slots
from tests.simulation.run import Run

SEEDS = 240
PARTS = 6  # Seeds are shared out among so many tests, which may run beside each other.


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_to_a_cluster_its_promises_hold(part: int) -> None:
    taken: Counter[str] = Counter()
    with small_slots():
        for seed in range(part, SEEDS, PARTS):
            taken += Run(seed).run()
    # Nothing that can happen was left out by chance.
    assert min(taken.values()) > SEEDS // PARTS // 4, taken


def test_a_seed_repeats_its_run() -> None:
    with small_slots():
        first, second = Run(3), Run(3)
        first.run()
        second.run()
    assert first.trace == second.trace


def test_a_broken_promise_is_told_with_the_seed_and_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> None:
        raise AssertionError("broken on purpose")

    monkeypatch.setattr("tests.simulation.cluster.Cluster.check_end", broken)
    with small_slots(), pytest.raises(AssertionError, match="seed 5: AssertionError: broken on purpose") as caught:
        Run(5).run()
    assert "delay runs a commit job" in str(caught.value)


def test_a_checkpoint_that_is_counted_and_not_published_leaves_no_hole_in_a_consume_log() -> None:
    with small_slots():
        Run(50084).run()
