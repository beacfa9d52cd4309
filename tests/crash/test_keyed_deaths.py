"""The delay server dies at each disk operation of keyed sends, replacements, moves and cancels (rules C1, C2, C3, P1).

After each death the verdicts are those of one dict of keys, a repeated batch gets the same ones, and each message is
delivered once, or never when somebody was told so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash import delay_deaths
from tests.crash.delay_deaths import explore
from tests.crash.harness import Report, ways
from tests.crash.keyed_deaths import SHOWN_BY, KeyedDeath
from tests.worlds import bugs
from tests.worlds.delay import small_slots

NEVER = 1_000  # There are fewer operations.


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_slots():
        yield


@pytest.mark.parametrize("recoveries_every", [NEVER, pytest.param(1, marks=pytest.mark.long)])
def test_the_delay_server_dies_at_each_operation_of_keyed_sends_moves_and_cancels(
    recoveries_every: int, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    if recoveries_every == NEVER:
        _shorten(monkeypatch)
    else:
        # The long form also dies at each operation of each recovery.
        monkeypatch.setattr(delay_deaths, "RECOVERIES_EVERY", recoveries_every)
    report = Report(names=["delay server with keys"], ways=len(ways(delay_deaths.SEEDS)))
    operations = len(KeyedDeath(None).operations)
    explore(report, range(1, operations + 1), KeyedDeath)
    reports.append(report)
    assert report.operations == operations > 50


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_rule_of_decisions_that_is_taken_out_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _shorten(monkeypatch)
    for bug in bugs.PLANTED_IN_CANCELS[name]:
        monkeypatch.setattr(*bug)
    with pytest.raises(AssertionError, match="died "):
        explore(Report(), range(1, len(KeyedDeath(None).operations) + 1), KeyedDeath)


def _shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Die at each operation, with fewer draws, and try the sealing of hours elsewhere."""
    monkeypatch.setattr(delay_deaths, "RECOVERIES_EVERY", NEVER)
    monkeypatch.setattr(delay_deaths, "SEALING_EVERY", NEVER)
    monkeypatch.setattr(delay_deaths, "SEEDS", 1)
