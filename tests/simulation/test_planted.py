"""Planted bugs: the simulation catches each of these within few seeds.

All of them, and how many seeds each takes: ``python -m tests.simulation --planted``.
"""

from __future__ import annotations

import pytest

from tests.delay_harness import small_slots
from tests.simulation.planted import PLANTED, planted, seeds_to_catch
from tests.simulation.run import Run

SEEDS_MAX = 100
FIRST = {  # Where to begin with those that take more than twenty seeds from the first one.
    "H4: rows that never arrived are not sent again": 20,
    "H3: T hears a hello that comes late": 29,
    "H2: T's retention passes batches that are in doubt": 27,
    "Q3: retention passes what a group has not acknowledged": 44,
    "Q3: a new group begins at messages that are being removed": 23,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    with small_slots():
        assert seeds_to_catch(name, SEEDS_MAX, FIRST.get(name, 0)) is not None, (
            f"{name} is not caught by {SEEDS_MAX} seeds"
        )


def test_nothing_stays_planted() -> None:
    with small_slots():
        with planted(next(iter(PLANTED))):
            pass
        Run(0).run()
