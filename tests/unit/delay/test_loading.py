"""Hours are loaded before they begin: what is damaged is named, and what has passed comes in its order."""

from __future__ import annotations

from collections.abc import Callable
from errno import ENOMEM

import pytest

from delayd.errors import Shortage
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.machine.executor import Done
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.worlds.delay import FOLDER, World, wanted

FAR_MS = 2 * HOUR_MS
LONG = 400  # Hours in which nothing happens.
HOURS = tuple(range(3, LONG - 3, 11))  # Hours with messages.


def test_a_subject_table_longer_than_what_is_read_ahead_is_read_whole() -> None:
    world = World()
    world.send([wanted(1, FAR_MS, f"m{n}", f"{n:03d}-{'s' * 200}".encode())[0] for n in range(60)])
    world.settle()
    world.checkpoint()
    world = world.after_crash(PowerLoss.ALL_LOST)
    world.drain(10_000)
    world.check_books()


def silent(*, is_filed: bool) -> World:
    """A server that was asleep while messages of many hours fell due."""
    world = World(load_ahead_ms=20_000, checkpoint_every_ms=HOUR_MS)
    for hour in HOURS:
        world.send(wanted(2, hour * HOUR_MS + 7, f"hour {hour}"))
    world.settle()
    if is_filed:
        world.checkpoint()
    world.clock.advance(LONG * HOUR_MS)
    return world


@pytest.mark.parametrize("is_filed", [False, True])
def test_a_few_jobs_load_what_was_due_in_a_long_silence_in_its_order_also_when_memory_is_short(is_filed: bool) -> None:
    world = silent(is_filed=is_filed)
    worker, jobs, lacks = world.threads.worker, list[int](), iter([True, False, True])
    submit = worker.submit

    def counted(work: Callable[[], object], done: Callable[[Done[object]], None], *priority: object) -> None:
        jobs.append(1)
        short = next(lacks, False)
        submit((lambda: (_ for _ in ()).throw(Shortage(FOLDER, ENOMEM))) if short else work, done, *priority)  # type: ignore[arg-type]

    worker.submit = counted  # type: ignore[assignment, method-assign]
    world.pass_ms(10_000)
    assert len(jobs) <= 20, "the hours around the beginning and the end are loaded one by one"
    assert world.bodies() == [f"hour {hour}-{row}".encode() for hour in HOURS for row in range(2)]
    world.drain()
    world.check_books()
    world.checkpoint()
    for _ in range(2):
        world.sweep()
    world.check_sealing()


def test_damage_of_one_file_concerns_its_hour_alone() -> None:
    world, bad = silent(is_filed=True), HOURS[3]
    file = world.disk.open(schedule_path(FOLDER, hour_of_ms(START_MS) + bad), write=True)
    file.pwritev([b"\xff" * 40], 0)
    world.pass_ms(5_000)
    assert world.missing() == {f"hour {bad}-{row}".encode() for row in range(2)}
    assert [entry.hour for entry in world.server.set_aside] == [hour_of_ms(START_MS) + bad]
