"""Mending: hours whose schedule log goes and comes back, whatever else happens meanwhile (rules P7, L10)."""

from __future__ import annotations

import pytest

from delayd.delay.quarantine import schedule_beside_path
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.reading.verify import verify_files
from delayd.testing.clock import START_MS
from tests.worlds.delay import FOLDER, World, wanted

FAR = hour_of_ms(START_MS) + 5
FAR_MS = 5 * HOUR_MS
PATH = schedule_path(FOLDER, FAR)
AWAY = f"{FOLDER}/away.log"


def filed(world: World, count: int, name: str) -> None:
    world.send(wanted(count, FAR_MS, name))
    world.settle()
    world.checkpoint()


def back(world: World) -> None:
    """The file is restored, and an operator says so."""
    world.disk.rename(AWAY, PATH)
    told: list[bool] = []
    world.core.release(f"schedule/{hour_name(FAR)}", lambda done, text: told.append(done))
    world.settle()
    assert told == [True] and not len(world.core.quarantine)


def load_far(world: World) -> None:
    world.clock.advance(FAR_MS - 10_000)
    world.pass_ms(2_000)
    assert world.core._hours.loaded_until >= FAR


def test_rule_P7_a_row_that_was_on_its_way_during_a_checkpoint_enters_the_wheel_once() -> None:
    world = World()
    filed(world, 2, "filed")
    world.send(wanted(1, FAR_MS, "durable"))
    world.settle()
    world.send(wanted(2, FAR_MS, "on-its-way"))
    commit, _, worker = world.executors()
    commit.run_one()
    world.core.checkpoint(lambda offset: None)
    worker.run_all()
    assert commit.ran == 1 and world.hours().get(FAR).rows == 3, "the checkpoint does not cover it"
    world.settle()
    world.disk.rename(PATH, AWAY)
    load_far(world)
    assert len(world.core._wheel) == 2
    filed(world, 1, "beside")
    assert world.disk.exists(schedule_beside_path(FOLDER, FAR))
    back(world)
    assert len(world.core._wheel) == 6
    world.drain()
    world.check_books()


def test_a_file_beside_an_hour_is_not_taken_for_an_earlier_one_that_joined_it() -> None:
    world = World()
    filed(world, 3, "filed")
    for name in ("first", "second"):
        world.disk.rename(PATH, AWAY)
        filed(world, 2, name)
        assert world.disk.exists(schedule_beside_path(FOLDER, FAR))
        if name == "first":
            back(world)
    load_far(world)
    world.pass_ms(10_000)
    assert world.missing() == {b"filed-0", b"filed-1", b"filed-2", b"first-0", b"first-1"}
    back(world)
    world.drain()
    world.check_books()


def test_rows_of_a_file_that_joined_are_found_when_another_one_stands_beside_the_hour() -> None:
    world = World()
    filed(world, 3, "filed")
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "first")
    load_far(world)
    back(world)
    world.disk.rename(PATH, AWAY)
    world.core._sources.forget_hour(FAR)
    filed(world, 2, "second")
    back(world)
    world.drain()
    world.check_books()


def test_rows_stay_in_filing_order_when_a_file_beside_their_hour_waits_for_its_dispatch_log() -> None:
    world = World()
    filed(world, 3, "filed")
    world.cancel(world.receipts("filed").take([0]))
    world.pass_ms(1_000)
    world.checkpoint()
    world.disk.rename(PATH, AWAY)
    filed(world, 2, "first")
    world.disk.rename(AWAY, PATH)
    outcomes = dispatch_path(FOLDER, FAR)
    world.disk.rename(outcomes, AWAY)
    world = world.after_crash()
    world.settle()
    assert [entry.id for entry in world.core.quarantine] == [f"dispatch/{hour_name(FAR)}"]
    filed(world, 2, "second")
    world.disk.rename(AWAY, outcomes)
    told: list[bool] = []
    world.core.release(f"dispatch/{hour_name(FAR)}", lambda done, text: told.append(done))
    world.settle()
    assert told == [True] and not world.disk.exists(schedule_beside_path(FOLDER, FAR))
    assert verify_files([PATH], disk=world.disk).sound
    world.drain(FAR_MS + HOUR_MS)
    world.check_books()


def test_rule_B2_files_are_looked_at_in_pieces_of_one_group_each(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for number in range(5):
        filed(world, 2, f"filed-{number}")
    world.disk.rename(PATH, AWAY)
    for number in range(7):
        filed(world, 2, f"beside-{number}")
    gave_way: list[int] = []
    monkeypatch.setattr(world.threads.worker, "give_way", lambda: gave_way.append(1))
    back(world)
    assert world.hours().get(FAR).rows == 24 and len(gave_way) >= 12, "between any two groups that are read"


def test_what_still_checks_of_a_given_up_file_is_kept_in_front_of_what_stands_beside_it() -> None:
    world = World()
    for number in range(5):
        filed(world, 2, f"filed-{number}")
    world.disk.rename(PATH, AWAY)
    for number in range(7):
        filed(world, 2, f"beside-{number}")
    world.disk.rename(AWAY, PATH)
    file = world.disk.open(PATH, write=True)
    file.pwritev([b"?"], file.size() - 1)
    told: list[bool] = []
    world.core.drop(f"schedule/{hour_name(FAR)}", lambda done, text: told.append(done))
    world.settle()
    assert told == [True] and world.hours().get(FAR).rows == 22
    assert verify_files([PATH], disk=world.disk).sound and not len(world.core.quarantine)
    world.drain(FAR_MS + HOUR_MS)
    assert world.missing() == {b"filed-4-0", b"filed-4-1"}
