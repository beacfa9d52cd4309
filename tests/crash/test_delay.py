"""The delay server dies at each of its disk operations, in each way, and again while it recovers; nobody notices.

Sends near and far, checkpoints, dispatch, acknowledgements, hours that end, seal and are deleted: after each death the
next life must deliver what was accepted exactly once, to the same target, and both sides' books must agree. Before it
starts, another process that reads what the death left finds each hour whole or removed, and no seal broken.
"""

from __future__ import annotations

import pytest

from tests.crash.delay_deaths import PARTS, SEEDS, Death, explore
from tests.crash.harness import Report, ways
from tests.worlds.delay import small_slots


@pytest.mark.parametrize("part", range(PARTS))
def test_the_delay_server_dies_at_each_operation_in_each_way_and_again_in_recovery(
    part: int, reports: list[Report]
) -> None:
    report = Report(names=[f"delay server, part {part + 1} of {PARTS}"], ways=len(ways(SEEDS)))
    with small_slots():
        explore(report, range(1 + part, len(Death(None).operations) + 1, PARTS))
    reports.append(report)
    assert report.operations > 20 and report.recovery_operations > 20
