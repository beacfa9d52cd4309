"""Quotas while files are damaged: what can't be read is not counted, and the server counts anew when it is whole."""

from __future__ import annotations

import pytest

from delayd.errors import DelaydError
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.control import Limits
from delayd.log.hour import dispatch_path, schedule_path
from delayd.testing.clock import START_MS
from tests.unit.delay.quotas.setting import SUBJECT, pending, set_quota
from tests.worlds.delay import FOLDER, World, wanted

FAR = hour_of_ms(START_MS) + 5
PATH = schedule_path(FOLDER, FAR)
AWAY = f"{FOLDER}/away.log"


def far_and_near() -> World:
    """Five filed rows of a far hour, two of another, and three of the next minute that are not filed."""
    world = World()
    world.send([*wanted(5, 5 * HOUR_MS, "far"), *wanted(2, 9 * HOUR_MS, "later")])
    world.settle()
    world.checkpoint()
    world.send(wanted(3, 50_000, "near"))
    world.settle()
    return world


def decide(world: World, *, drop: bool) -> None:
    told: list[bool] = []
    decide = world.core.drop if drop else world.core.release
    decide(f"schedule/{hour_name(FAR)}", lambda done, text: told.append(done))
    world.settle()
    assert told == [True]
    world.pass_ms(1_100)


def test_an_hour_that_is_given_up_is_counted_no_more() -> None:
    world = far_and_near()
    assert set_quota(world, Limits(pending=100)) is None
    assert pending(world) == 10
    world.disk.rename(PATH, AWAY)
    world.clock.advance(5 * HOUR_MS - 60_000 - 40_000)
    world.pass_ms(80_000)
    assert pending(world) == 7, "as far as anybody knows, they are pending"
    decide(world, drop=True)
    assert pending(world) == 2


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
    world.core.set_quota(SUBJECT, Limits(pending=100), told.append)
    world.settle()
    assert told == [None]
    # Without the schedule log nothing of the hour is counted, without the outcomes all of it.
    assert pending(world) == (5 if path == PATH else 10)
