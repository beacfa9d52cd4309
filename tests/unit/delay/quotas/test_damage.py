"""Quotas while files are damaged: what can't be read is not counted, and the server counts anew when it is whole."""

from __future__ import annotations

import pytest

from delayd.errors import DelaydError
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.control import QuotaLimits
from delayd.log.hour import dispatch_path, schedule_path
from delayd.testing.clock import START_MS
from tests.unit.delay.quotas.setting import SUBJECT, pending
from tests.worlds.delay import FOLDER, World, wanted

FAR = hour_of_ms(START_MS) + 5
PATH = schedule_path(FOLDER, FAR)


def far_and_near() -> World:
    """Five filed rows of a far hour, two of another, and three of the next minute that are not filed."""
    world = World()
    world.send([*wanted(5, 5 * HOUR_MS, "far"), *wanted(2, 9 * HOUR_MS, "later")])
    world.settle()
    world.checkpoint()
    world.send(wanted(3, 50_000, "near"))
    world.settle()
    return world


@pytest.mark.parametrize("path", [PATH, dispatch_path(FOLDER, FAR)])
@pytest.mark.parametrize("how", ["gone", "cut", "emptied", "rotten"])
def test_rule_B1_a_bad_file_of_a_far_hour_ends_no_server_that_counts(path: str, how: str) -> None:
    world = far_and_near()
    world.cancel(world.receipts("far-0"))
    world.pass_ms(1_000)
    file = world.disk.open(path, write=True)
    if how == "gone":
        world.disk.remove(path)
    elif how == "rotten":
        file.pwritev([b"rotten"], 0)
    else:
        file.truncate(20 if how == "cut" else 0)
    told: list[DelaydError | None] = []
    world.core.set_quota(SUBJECT, QuotaLimits(pending=100), told.append)
    world.settle()
    assert told == [None]
    # Without the schedule log nothing of the hour is counted, without the outcomes all of it.
    assert pending(world) == (5 if path == PATH else 10)
