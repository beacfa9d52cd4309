"""The delay server dies at each disk operation of what realtime servers send again: retries, dead letters, the redrive
and the end of these (rules I1, C1, Q2).

After each death a batch counts once however often it comes, a message that was to come again comes once, a dead letter
that was sent again leaves as its newest row only, and one that was ended never.
"""

from __future__ import annotations

import pytest

from tests.crash import delay_deaths
from tests.crash.again_deaths import AgainDeath
from tests.crash.delay_deaths import explore
from tests.crash.harness import Report, ways
from tests.worlds.delay import small_slots

NEVER = 1_000  # There are fewer operations.


@pytest.mark.parametrize("recoveries_every", [NEVER, pytest.param(1, marks=pytest.mark.long)])
def test_the_delay_server_dies_at_each_operation_of_retries_and_dead_letters(
    recoveries_every: int, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay_deaths, "SEALING_EVERY", NEVER)
    # The long form also dies at each operation of each recovery.
    monkeypatch.setattr(delay_deaths, "RECOVERIES_EVERY", recoveries_every)
    monkeypatch.setattr(delay_deaths, "SEEDS", 1)
    report = Report(names=["delay server with retries and dead letters"], ways=len(ways(delay_deaths.SEEDS)))
    with small_slots():
        operations = len(AgainDeath(None).operations)
        explore(report, range(1, operations + 1), AgainDeath)
    reports.append(report)
    assert report.operations == operations > 40
