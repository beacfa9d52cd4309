"""Hours that have passed are loaded many at a time: what a run holds, where it ends, and what may happen meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from errno import ENOMEM

import pytest

from delayd.delay.timers import loading
from delayd.delay.timers.loading import LoadedRun
from delayd.errors import Shortage
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.testing.clock import START_MS
from tests.worlds.delay import FOLDER, World, wanted

HOUR = hour_of_ms(START_MS)
LONG = 400  # Hours in which nothing happens.
FAR = tuple(range(3, LONG - 3, 11))  # Hours with messages.


def filled(*, filed: bool, rows: int = 2, seed: int = 0) -> World:
    world = World(seed=seed, load_ahead_ms=20_000, checkpoint_every_ms=HOUR_MS)
    for hour in FAR:
        world.send(wanted(rows, hour * HOUR_MS + 7, f"hour {hour}"))
    world.settle()
    if filed:
        world.checkpoint()
    return world


def watched(monkeypatch: pytest.MonkeyPatch) -> list[LoadedRun]:
    """The runs that are read from now on."""
    runs: list[LoadedRun] = []
    load_run = loading.load_run

    def load(*args: object) -> LoadedRun:
        runs.append(load_run(*args))  # type: ignore[arg-type]
        return runs[-1]

    monkeypatch.setattr(loading, "load_run", load)
    return runs


def sleep_long(world: World) -> None:
    world.clock.advance(LONG * HOUR_MS)
    world.pass_ms(5_000)


def finish(world: World) -> None:
    world.drain()
    world.check_books()


def bodies(world: World) -> list[bytes]:
    return [body for target in world.outside.targets.values() for kept in target.log for body in kept.bodies]


@pytest.mark.parametrize("filed", [False, True])
def test_a_few_runs_load_what_was_due_in_a_long_silence_in_its_order(
    monkeypatch: pytest.MonkeyPatch, filed: bool
) -> None:
    world, runs = filled(filed=filed), watched(monkeypatch)
    sleep_long(world)
    assert len(runs) <= 4, "the hours around the beginning and the end are loaded one by one"
    assert bodies(world) == [f"hour {hour}-{row}".encode() for hour in FAR for row in range(2)]
    assert sorted(hour - HOUR for run in runs for each in run.loaded if len(run.hours) > 1 for hour in [each.hour]) == (
        list(FAR) if filed else []
    )
    finish(world)
    world.checkpoint()
    for _ in range(2):
        world.sweep()
    world.check_sealing()


def test_where_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(filed=False)
    of_world = world.core.upkeep.loading
    read: list[range] = []
    monkeypatch.setattr(of_world, "_read", read.append)
    hours = world.core.memory.hours
    first = hours.loaded_until + 1

    def begun(passed: int = LONG, put_off: set[int] | None = None, withheld: set[int] | None = None) -> range | None:
        of_world.running, hours.loaded = False, range(first, first)
        read.clear()
        hours.withheld.clear()
        hours.withheld.update(first + hour for hour in withheld or ())
        later = {first + hour for hour in put_off or ()}
        of_world.step((first + LONG) * HOUR_MS, first + passed, lambda: later)
        return range(read[0].start - first, read[0].stop - first) if read else None

    assert begun() == range(LONG)
    assert begun(passed=7) == range(7), "rows may still be filed in the eighth"
    assert begun(passed=1) == begun(passed=0) == begun(passed=-50) == range(1)
    assert begun(put_off={9, 5, -1}) == range(5), "rows of it are being claimed, or it is being mended"
    assert begun(put_off={0, 5}) is None
    assert begun(withheld={4, 8}) == range(4)
    assert begun(withheld={0}) is None and hours.loaded_until == first and hours.loading == range(first + 1, first + 2)
    monkeypatch.setattr(loading, "RUN_HOURS", 16)
    assert begun() == range(16)


def test_damage_of_one_file_concerns_its_hour_alone() -> None:
    world = filled(filed=True)
    path = schedule_path(FOLDER, HOUR + FAR[3])
    file = world.disk.open(path, write=True)
    file.pwritev([b"\xff" * 40], 0)
    sleep_long(world)
    assert {body.rpartition(b"-")[0] for body in bodies(world)} == {f"hour {hour}".encode() for hour in FAR} - {
        f"hour {FAR[3]}".encode()
    }
    assert [entry.hour for entry in world.core.memory.quarantine] == [HOUR + FAR[3]]


def test_a_run_that_lacks_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(filed=True)
    failures = iter([True, True, True, False, True])
    load_run: Callable[..., LoadedRun] = loading.load_run

    def load(*args: object) -> LoadedRun:
        if next(failures, False):
            raise Shortage(FOLDER, ENOMEM)
        return load_run(*args)

    monkeypatch.setattr(loading, "load_run", load)
    sleep_long(world)
    assert len(bodies(world)) == 2 * len(FAR)
    finish(world)
