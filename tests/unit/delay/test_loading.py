"""Hours are loaded before they begin: what is damaged is named, and what has passed comes in its order."""

from __future__ import annotations

from collections.abc import Callable
from errno import ENOMEM

import pytest

from delayd.delay.filing.hour_table import HourPart
from delayd.delay.timers import loading
from delayd.delay.timers.loading import LoadedRun, load_hour
from delayd.errors import Shortage
from delayd.hours import HOUR_MS, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.testing.clock import START_MS
from delayd.testing.tree import PowerLoss
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, World, wanted

FAR_MS = 2 * HOUR_MS
FAR = hour_of_ms(START_MS + FAR_MS)
PATH = schedule_path(FOLDER, FAR)
LONG = 400  # Hours in which nothing happens.
HOURS = tuple(range(3, LONG - 3, 11))  # Hours with messages.


def filed(*names: str) -> World:
    """Three rows in a batch of its own for each name."""
    world = World()
    for name in names:
        world.send(wanted(3, FAR_MS, name))
        world.settle()
        world.checkpoint()
    return world


def test_each_byte_of_columns_headers_and_subjects_is_checked_and_none_of_a_body() -> None:
    world = filed("x" * 22, "y" * 22)
    whole, unnoticed = content(world.disk, PATH), 0
    parts = [HourPart(FAR, world.hours().get(FAR))]
    for at in range(FILE_HEADER_BYTES, len(whole)):
        put(world.disk, PATH, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found = load_hour(world.disk, FOLDER, world.server.log_id, FAR, parts)
        unnoticed += found.damage is None
        rows = len(found.prepared.rows)
        assert rows == 6 if found.damage is None else rows <= 3, "what follows it is set aside with it"
    bodies, pads = 6 * 24, 2 * 4  # Nobody notices flips in bodies and in the padding of a group's table here.
    assert unnoticed == bodies + pads, "names of subjects are checked too: a flipped bit makes another name of one"


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
def test_a_few_runs_load_what_was_due_in_a_long_silence_in_its_order(
    is_filed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, runs = silent(is_filed=is_filed), list[LoadedRun]()
    load_run: Callable[..., LoadedRun] = loading.load_run
    lacks = iter([True, False, True])

    def load(*args: object) -> LoadedRun:
        if next(lacks, False):
            raise Shortage(FOLDER, ENOMEM)
        runs.append(load_run(*args))
        return runs[-1]

    monkeypatch.setattr(loading, "load_run", load)
    world.pass_ms(10_000)
    assert len(runs) <= 4, "the hours around the beginning and the end are loaded one by one"
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
