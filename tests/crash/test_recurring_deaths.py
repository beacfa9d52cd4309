"""The delay server dies at each disk operation of recurring schedules (rule P1; docs/recurring.md).

After each death every occurrence was sent once or skipped for a reason, and what a caller repeats is done once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash import delay_deaths
from tests.crash.delay_deaths import explore
from tests.crash.harness import Report, ways
from tests.crash.recurring_deaths import RecurringDeath
from tests.worlds.delay import small_slots

NEVER = 1_000  # There are fewer operations.
PARTS = 3  # The operations are dealt out to this many tests, of which the long form has all.


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delay_deaths, "RECOVERIES_EVERY", NEVER)
    monkeypatch.setattr(delay_deaths, "SEEDS", 1)
    with small_slots():
        yield


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_the_delay_server_dies_at_each_operation_of_recurring_schedules(part: int, reports: list[Report]) -> None:
    report = Report(names=["delay server with recurring schedules"], ways=len(ways(delay_deaths.SEEDS)))
    operations = len(RecurringDeath(None).operations)
    explore(report, range(1 + part, operations + 1, PARTS), RecurringDeath)
    reports.append(report)
    assert report.operations > 30
