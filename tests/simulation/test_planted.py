"""Planted bugs: the simulation catches each of these within few seeds.

All of them: ``python -m tests.simulation --planted``.
"""

from __future__ import annotations

import pytest

from tests.delay_harness import small_slots
from tests.simulation.planted import QUICK, planted, seeds_to_catch
from tests.simulation.run import Run

SEEDS_MAX = 60


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_caught(name: str) -> None:
    with small_slots():
        assert seeds_to_catch(name, SEEDS_MAX) is not None, f"{name} is not caught by {SEEDS_MAX} seeds"


def test_nothing_stays_planted() -> None:
    with small_slots():
        with planted(QUICK[0]):
            pass
        Run(0).run()
