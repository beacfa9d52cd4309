"""Planted bugs: the simulation catches each of these within few seeds.

All of them from seed 0, and how many seeds each takes: ``python -m tests.simulation --planted``.
"""

from __future__ import annotations

import pytest

from tests.simulation.planted import (
    CAUGHT_BY,
    FAVOURED,
    PLANTED,
    is_caught_by_known,
    planted,
    seeds_to_catch,
)
from tests.simulation.run import Run
from tests.worlds.delay import small_slots

SEEDS_MAX = 300  # Most take a few; which seeds they are changes with every change of the servers.


@pytest.mark.timeout(300)  # What SEEDS_MAX take on a busy machine.
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    with small_slots():
        if is_caught_by_known(name):
            return
        assert seeds_to_catch(name, SEEDS_MAX) is not None, f"{name} is not caught by {SEEDS_MAX} seeds"


def test_what_is_known_of_planted_bugs_is_of_those_there_are() -> None:
    assert CAUGHT_BY.keys() | FAVOURED.keys() <= PLANTED.keys()


def test_nothing_stays_planted() -> None:
    with small_slots():
        with planted(next(iter(PLANTED))):
            pass
        Run(0).run()
