"""Hours that have passed are loaded many at a time: what a run holds, where it ends, and what may happen meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from errno import ENOMEM
from functools import partialmethod
from random import Random

import pytest

from delayd.delay.core import DelayCore
from delayd.delay.handoff.waiting import lowest_offset
from delayd.delay.rows import Rows
from delayd.delay.timers import loader, loading
from delayd.delay.timers.loader import LoadedRun
from delayd.delay.timers.wheel import Wheel
from delayd.errors import Shortage
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.testing.clock import START_MS
from delayd.wire.asked import CancelAnswer
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
    load_run = loader.load_run

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


@pytest.mark.parametrize("filed", [False, True])
def test_rule_B2_a_run_has_so_many_rows_and_filled_hours_only(monkeypatch: pytest.MonkeyPatch, filed: bool) -> None:
    monkeypatch.setattr(loader, "RUN_FILLED", 3)
    monkeypatch.setattr(loader, "RUN_ROWS", 8)
    world = World(load_ahead_ms=20_000, checkpoint_every_ms=HOUR_MS)
    for hour, rows in zip(FAR, [1, 1, 1, 1, 4, 9, 20, 4, 4, 4, 8, 1, 1, 7] + [2] * len(FAR), strict=False):
        world.send(wanted(rows, hour * HOUR_MS + 7, f"hour {hour}"))
    world.settle()
    if filed:
        world.checkpoint()
    runs = watched(monkeypatch)
    sleep_long(world)
    filling = [[hour for hour in run.hours if hour - HOUR in FAR] for run in runs]
    assert [hour - HOUR for hours in filling for hour in hours] == list(FAR), "each hour is in one run"
    sizes = [len(hours) for hours in filling if hours]
    assert sizes[:9] == [3, 2, 1, 1, 2, 1, 1, 2, 1]
    finish(world)


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


class DuringACheckpoint:
    """A long silence that ends while a checkpoint is under way, at one of its pieces. From then on, by chance, the loop
    hears what the worker has done.
    """

    def __init__(self, begin: int, seed: int) -> None:
        self.world = filled(filed=True, seed=seed)
        for hour in FAR:
            self.world.send(wanted(1, hour * HOUR_MS + 9, f"later {hour}"))
        self.world.settle()
        self.commit, _, self.worker = self.world.executors()
        self._begin, self._draw = begin, Random(seed)
        self.pieces = 0

    def run(self) -> None:
        """Let the checkpoint run, and everything that comes of it."""
        worker, give_way = self.worker, self.worker.give_way

        def giving_way() -> None:
            if self.pieces == self._begin:
                self._wake_up()
            self.pieces += 1
            give_way()
            self._by_chance()

        worker.give_way = giving_way  # type: ignore[method-assign]
        self.world.core.checkpoint(lambda offset: None)
        worker.run_one()
        worker.give_way = give_way  # type: ignore[method-assign]
        while worker.waiting or worker.ran:
            if worker.waiting and self._draw.random() < 0.5:
                worker.run_one()
            self._by_chance()
        self.world.settle()

    def _wake_up(self) -> None:
        self.world.clock.advance(LONG * HOUR_MS)
        self.world.core.wake()
        self.commit.run_all()
        self.world.clock.advance(1_000)
        self.world.core.wake()

    def _by_chance(self) -> None:
        if self.worker.ran and self._draw.random() < 0.5:
            self.worker.complete_one()


def test_rule_P7_a_checkpoint_that_is_counted_while_a_run_is_loaded_leaves_each_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add_closed(wheel: Wheel, core: DelayCore, rows: Rows) -> None:
        offset = lowest_offset([rows])
        assert offset is None or offset >= core.upkeep.checkpointer.replay.offset, (
            "the log may be removed below it (rule P6)"
        )
        plain(wheel, rows)

    plain = Wheel.add_closed
    again, first = 0, DuringACheckpoint(-1, 0)
    first.run()
    for seed in range(16):
        made = DuringACheckpoint(first.pieces - 1 - seed % 8, seed)
        runs = watched(monkeypatch)
        monkeypatch.setattr(Wheel, "add_closed", partialmethod(add_closed, made.world.core))
        made.run()
        many = [run.hours for run in runs if len(run.hours) > 1]
        again += len(many) - len(set(many))
        finish(made.world)
        monkeypatch.undo()
    assert again >= 3, "then the run is read again"


@pytest.mark.parametrize("filed", [False, True])
def test_rows_that_were_cancelled_before_their_run_is_loaded_do_not_leave(filed: bool) -> None:
    world = filled(filed=filed)
    told = world.cancel(world.receipts(*(f"hour {hour}" for hour in FAR[::2])))
    world.settle()
    assert told == [[CancelAnswer.CANCELLED] * 2 * len(FAR[::2])]
    sleep_long(world)
    assert len(bodies(world)) == 2 * len(FAR[1::2])
    finish(world)


@pytest.mark.parametrize("jobs", [0, 1, 2])
@pytest.mark.parametrize("filed", [False, True])
def test_rule_C1_what_is_cancelled_while_its_run_is_loaded_leaves_or_is_cancelled(filed: bool, jobs: int) -> None:
    world = filled(filed=filed)
    world.clock.advance(LONG * HOUR_MS)
    commit, _, worker = world.executors()
    world.core.wake()
    commit.run_all()
    while not worker.waiting or len(world.core.memory.hours.loading) < 2:
        if not worker.step():
            world.clock.advance(1_000)
            world.core.wake()
    for _ in range(jobs):
        worker.step()
    assert (world.core.memory.hours.loaded_until >= HOUR + FAR[-1]) == (jobs == 2)
    told = world.cancel(world.receipts(f"hour {FAR[1]}", f"hour {FAR[-1]}"))
    world.settle()
    world.pass_ms(5_000)
    (answers,) = told
    assert len(answers) == 4
    finish(world)
    assert len(bodies(world)) == 2 * len(FAR) - answers.count(CancelAnswer.CANCELLED)


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


def test_each_hour_of_a_run_has_subjects_of_its_own() -> None:
    world = World(load_ahead_ms=20_000)
    subjects = (b"orders.eu", b"orders.us", b"users")
    for index, hour in enumerate(FAR):
        for subject in subjects[index % 3 :]:
            world.send(wanted(1, hour * HOUR_MS, f"{hour} {subject.decode()}", subject))
    world.settle()
    world.checkpoint()
    sleep_long(world)
    finish(world)


def test_a_run_that_lacks_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(filed=True)
    failures = iter([True, True, True, False, True])
    load_run: Callable[..., LoadedRun] = loader.load_run

    def load(*args: object) -> LoadedRun:
        if next(failures, False):
            raise Shortage(FOLDER, ENOMEM)
        return load_run(*args)

    monkeypatch.setattr(loading, "load_run", load)
    sleep_long(world)
    assert len(bodies(world)) == 2 * len(FAR)
    finish(world)
