"""Quotas while files are damaged: what can't be read is not counted, and the server counts anew when it is whole."""

from __future__ import annotations

import pytest

from delayd.errors import DelaydError, DiskFull
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.quota import Limits, quota_key
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.unit.delay.damage.dispatch_logs import damaged_dispatch_log, flip
from tests.unit.delay.quotas.setting import SUBJECT, pending, set_quota, use
from tests.worlds.delay import FOLDER, Remains, World, wanted

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


@pytest.mark.parametrize("drop", [False, True])
def test_rows_of_a_damaged_hour_are_counted_when_it_is_whole_and_never_when_it_is_given_up(drop: bool) -> None:
    world = far_and_near()
    world.disk.rename(PATH, AWAY)
    assert set_quota(world, Limits(pending=100)) is None
    assert pending(world) == 5
    world.clock.advance(5 * HOUR_MS - 60_000 - 40_000)
    world.pass_ms(80_000)
    assert len(world.core.quarantine) == 1
    assert pending(world) == 2, "those of the next minute have left"
    world.send(wanted(1, 9 * HOUR_MS, "more"))
    world.settle()
    if not drop:
        world.disk.rename(AWAY, PATH)
    decide(world, drop=drop)
    assert pending(world) == (3 if drop else 8)


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


def test_an_hour_that_is_given_up_before_it_was_tried_again_is_counted_no_more() -> None:
    world = far_and_near()
    assert set_quota(world, Limits(pending=10)) is None
    world.disk.rename(PATH, AWAY)
    name = f"schedule/{hour_name(FAR)}"
    for _ in range(700):
        if world.core.quarantine.find(name) is not None:
            break
        world.pass_ms(1_000)
    before = pending(world)
    decide(world, drop=True)
    assert pending(world) == before - 5
    number = world.send(wanted(5, 9 * HOUR_MS, "room again"))
    world.settle()
    assert number in world.outside.accepted


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


def test_rows_of_an_hour_whose_dispatch_log_is_damaged_count_until_it_is_restored() -> None:
    remains = damaged_dispatch_log(-1)
    world = World(remains)
    assert set_quota(world, Limits(pending=100)) is None
    assert pending(world) == 5, "three that were delivered, as nobody can tell, and two of the next hour"
    flip(Remains(world.disk, world.state, world.outside, world.clock), -1)
    told: list[bool] = []
    world.core.release(f"dispatch/{hour_name(hour_of_ms(START_MS))}", lambda done, text: told.append(done))
    world.settle()
    assert told == [True]
    world.pass_ms(1_100)
    assert pending(world) == 2


def test_a_damaged_quota_is_named_and_lifted(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    assert set_quota(world, Limits(pending=1)) is None
    assert set_quota(world, Limits(pending=5), b"other") is None
    world.state.flip(quota_key(SUBJECT))
    world = world.after_crash(PowerLoss.ALL_LOST)
    assert "quota_lost subject=orders.eu" in caplog.text
    world.send(wanted(3, 5_000, "free"))
    world.settle()
    world.pass_ms(1_000)
    assert not world.outside.refused
    assert [each.subject for each in world.core.quotas.listing()] == [b"other"]
    assert set_quota(world, Limits(pending=3)) is None
    assert use(world).rows == 3


def test_a_quota_that_the_full_disk_does_not_take_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    told: list[DelaydError | None] = []
    monkeypatch.setattr(world.state, "commit", _full)
    world.core.set_quota(SUBJECT, Limits(pending=1), told.append)
    world.threads.worker.run_all()  # type: ignore[attr-defined]
    assert [error.code for error in told if error is not None] == ["disk_reserve"]
    assert world.core.quotas.listing() == []


def _full(puts: object, removes: object = ()) -> None:
    raise DiskFull("state")
