"""What the realtime server keeps in memory for messages in flight (docs/operations.md, Sizing)."""

from __future__ import annotations

import tracemalloc

import pytest

from delayd.log.pull import PullEntry, PullOp
from realtime.alarms import Alarms
from realtime.groups import Group
from realtime.index import Subject
from realtime.pulls import Lease

RUNS = 5_000
RUN_BYTES_MAX = 512


@pytest.mark.parametrize(("each", "bytes_max"), [(1, 512), (10, 64), (20, 32), (100, 6)])
def test_a_message_in_flight_takes_no_more_than_the_page_says(each: int, bytes_max: float) -> None:
    group = Group(1, Subject("orders"), "g", 0)
    leases: Alarms[Lease] = Alarms(lambda at_ms, lease: True)
    first, incarnation = 10_000_000, 1 << 60
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for at in range(0, RUNS * each, each):
            group.apply(PullEntry(PullOp.PULL, 1, 1, incarnation, first + at, first + at, each, 0, 60_000))
            leases.add(first + at, Lease(group, incarnation, first + at, each))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert group.outstanding == RUNS * each
    assert after - before <= RUNS * RUN_BYTES_MAX
    assert (after - before) / group.outstanding <= bytes_max
