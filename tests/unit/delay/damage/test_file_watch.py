"""Files of hours that go while the server runs, though nothing has them open: told by name, and taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from delayd.delay.damage.file_watch import LOOK_MS
from delayd.delay.damage.mending import RETRY_MS
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.log.schedule import dispatch_path, schedule_path
from delayd.wire.mend import Decision
from tests.memory_files import content, put
from tests.unit.delay.sealed import sealed_hour
from tests.worlds.delay import FOLDER, World
from tests.worlds.outside import wanted


@pytest.mark.parametrize("how", ["removed", "8 bytes short"])
def test_rule_L10_a_schedule_log_that_goes_under_the_server_is_told_before_its_hour_comes(how: str) -> None:
    world = World()
    world.send(wanted(3, 5 * HOUR_MS, "m"))
    world.settle()
    world.checkpoint()
    hour = hour_of_ms(world.clock.now_ms() + 5 * HOUR_MS)
    path = schedule_path(FOLDER, hour)
    whole = content(world.disk, path)
    world.disk.remove(path)
    if how != "removed":
        put(world.disk, path, whole[:-8])
    world.pass_ms(LOOK_MS + 2_000)
    (wait,) = world.core.waits()
    assert f"schedule/{hour_name(hour)}" in wait.what and path in wait.why
    # A checkpoint that files rows of this hour meanwhile writes them to a file beside it.
    world.send(wanted(2, 5 * HOUR_MS, "n"))
    world.settle()
    world.checkpoint()
    put(world.disk, path, whole)
    world.pass_ms(RETRY_MS + 2_000)
    world.settle()
    assert not len(world.core.quarantine)
    world.clock.advance(5 * HOUR_MS)
    world.pass_ms(2_000)
    world.drain()
    world.check_books()


@pytest.mark.parametrize("how", ["removed", "8 bytes short", "below the next life"])
@pytest.mark.parametrize("name", ["schedule", "dispatch"])
def test_rule_L10_a_file_of_a_sealed_hour_that_goes_is_told_until_it_is_back(name: str, how: str) -> None:
    world = World()
    hour = hour_of_ms(world.clock.now_ms())
    sealed_hour(world, "a")
    if how == "below the next life":
        world.checkpoint()
        world = world.after_crash()
    path = (schedule_path if name == "schedule" else dispatch_path)(FOLDER, hour)
    whole = content(world.disk, path)
    world.disk.remove(path)
    if how != "removed":
        put(world.disk, path, whole[:-8])
    world.pass_ms(LOOK_MS + 2_000)
    (entry,) = world.core.quarantine.listing()
    assert (entry.id, entry.path, list(entry.costs)) == (f"sealed/{hour_name(hour)}", path, [Decision.TAKE])
    told: list[tuple[bool, str]] = []
    put(world.disk, path, whole)
    world.core.release(entry.id, lambda done, text: told.append((done, text)))
    world.settle()
    assert told and not len(world.core.quarantine)


def swap(world: World, first: str, second: str) -> None:
    for source, target in ((first, f"{FOLDER}/between"), (second, first), (f"{FOLDER}/between", second)):
        world.disk.rename(source, target)


def test_rule_L10_a_schedule_log_that_is_swapped_with_its_neighbour_is_told_and_taken_back() -> None:
    world = World()
    world.pass_ms(LOOK_MS)
    for hours in (5, 6):
        world.send(wanted(3, hours * HOUR_MS, f"m{hours}"))
    world.settle()
    world.checkpoint()
    first, second = (hour_of_ms(world.clock.now_ms()) + hours for hours in (5, 6))
    paths = schedule_path(FOLDER, first), schedule_path(FOLDER, second)
    assert len(content(world.disk, paths[0])) == len(content(world.disk, paths[1]))
    world.pass_ms(LOOK_MS + 2_000)
    assert not len(world.core.quarantine)
    swap(world, *paths)
    world.pass_ms(LOOK_MS + 2_000)
    entries = world.core.quarantine.listing()
    assert [(entry.id, entry.path) for entry in entries] == [
        (f"schedule/{hour_name(hour)}", path) for hour, path in zip((first, second), paths, strict=True)
    ]
    assert f"it is of hour {hour_name(second)}" in entries[0].reason
    swap(world, *paths)
    world.pass_ms(RETRY_MS + 2_000)
    assert not len(world.core.quarantine)
    world.clock.advance(6 * HOUR_MS)
    world.pass_ms(2_000)
    world.drain()
    world.check_books()


@pytest.mark.parametrize("kind", [schedule_path, dispatch_path])
def test_rule_L10_files_of_sealed_hours_that_are_swapped_are_told(kind: Callable[[str, int], str]) -> None:
    world = World()
    hours = []
    for name in ("a", "b"):
        hours.append(hour_of_ms(world.clock.now_ms()))
        sealed_hour(world, name)
    paths = [kind(FOLDER, hour) for hour in hours]
    assert world.hours().get(hours[1]).sealed
    world.pass_ms(LOOK_MS + 2_000)
    assert not len(world.core.quarantine)
    swap(world, *paths)
    world.pass_ms(LOOK_MS + 2_000)
    assert [entry.id for entry in world.core.quarantine.listing()] == [f"sealed/{hour_name(hour)}" for hour in hours]
    swap(world, *paths)
    world.pass_ms(LOOK_MS + 2_000)
    assert not len(world.core.quarantine)


def test_an_hour_that_retention_removes_is_no_damage() -> None:
    world = World(retention_hours=2)
    hour = hour_of_ms(world.clock.now_ms())
    sealed_hour(world, "a")
    for _ in range(8):
        world.pass_ms(HOUR_MS)
        world.sweep()
    assert not world.disk.exists(schedule_path(FOLDER, hour))
    world.pass_ms(LOOK_MS + 2_000)
    assert not list(world.core.quarantine)
