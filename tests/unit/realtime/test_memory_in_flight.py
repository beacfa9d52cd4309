"""What the realtime server keeps in memory for messages in flight (docs/operations.md, Sizing)."""

from __future__ import annotations

import tracemalloc

import pytest

from delayd.log.pull import PullEntry, PullOp
from realtime.groups import Group
from realtime.subject_index import Subject

RUNS = 65_536
RUN_BYTES_MAX = 70


@pytest.mark.parametrize("each", [1, 10, 100])
@pytest.mark.parametrize("op", [None, PullOp.NACK], ids=["held", "given back"])
def test_a_message_in_flight_takes_no_more_than_the_page_says(each: int, op: PullOp | None) -> None:
    group = Group(1, Subject("orders"), "g", 10_000_000)
    first, incarnation, now_ms = 10_000_000, 1 << 60, 5_000_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for at in range(0, RUNS * each, each):
            group.apply(PullEntry(PullOp.PULL, 1, 1, incarnation + at, first + at, first + at, each, 0, 60_000), now_ms)
        if op is not None:
            for at in range(0, RUNS * each, 20 * each):
                group.apply(PullEntry(op, 0, 1, incarnation + at, first + at, 0, each, 0), now_ms)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert group.outstanding == RUNS * each - (group.window.offered if op else 0)
    assert (after - before) / group.outstanding <= RUN_BYTES_MAX / each
