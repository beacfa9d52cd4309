"""The crash tests of the delay server go red when a rule of sealing or deleting is taken out: so they can fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash import delay_deaths
from tests.crash.harness import Report
from tests.crash.planted import PLANTED
from tests.worlds.delay import small_slots

MATTERS = ("/seal/", "remove ", "commit")  # What seals or deletes an hour does an operation with one of these words.


@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_that_is_taken_out_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in PLANTED[name]:
        monkeypatch.setattr(*bug)
    monkeypatch.setattr(delay_deaths, "RECOVERIES_EVERY", 1_000)
    # Only some operations lie between what a bug turned around, and their numbers change with the code before them.
    monkeypatch.setattr(delay_deaths, "SEALING_EVERY", 1)
    with small_slots(), pytest.raises(AssertionError, match="died "):
        delay_deaths.explore(Report(), deaths_that_may_show_it())


def deaths_that_may_show_it() -> Iterator[int]:
    """At each operation that matters and right after it, the last ones first: hours go at the end of the workload."""
    operations = delay_deaths.Death(None).operations
    for at in range(len(operations), 1, -1):
        if any(word in operation for operation in operations[at - 2 : at] for word in MATTERS):
            yield at
