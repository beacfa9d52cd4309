"""Planted bugs: the simulation catches each of these within few seeds.

All of them, and how many seeds each takes: ``python -m tests.simulation --planted``.
"""

from __future__ import annotations

import pytest

from tests.delay_harness import small_slots
from tests.simulation.planted import PLANTED, planted, seeds_to_catch
from tests.simulation.run import Run

SEEDS_MAX = 300  # Most take a few; which seeds they are changes with every change of the servers.


@pytest.mark.timeout(300)  # What SEEDS_MAX take on a busy machine.
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    with small_slots():
        assert seeds_to_catch(name, SEEDS_MAX) is not None, f"{name} is not caught by {SEEDS_MAX} seeds"


def test_nothing_stays_planted() -> None:
    with small_slots():
        with planted(next(iter(PLANTED))):
            pass
        Run(0).run()
