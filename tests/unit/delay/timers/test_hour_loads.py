"""Loading an hour, and starting: what is read and held of the logs, and what is found damaged when it is loaded."""

import tracemalloc

import numpy as np
import pytest

from delayd.delay.filing.hour_table import HourPart
from delayd.delay.timers import loader
from delayd.delay.timers.loader import LoadedHour, load_hour
from delayd.hours import hour_of_ms
from delayd.log.hour import schedule_path
from delayd.log.segment import FILE_HEADER_BYTES
from delayd.testing.clock import START_MS
from delayd.testing.disk import MemoryFile
from tests.worlds.delay import FOLDER, World, wanted

HOUR_MS = 3_600_000
FAR_MS = 2 * HOUR_MS
FAR = hour_of_ms(START_MS + FAR_MS)
PATH = schedule_path(FOLDER, FAR)


def filled(rows: int, body: str = "m" * 200, checkpoints: int = 1) -> World:
    world = World()
    for _ in range(checkpoints):
        world.send(wanted(rows, FAR_MS, body))
        world.settle()
        world.checkpoint()
    return world


def load(world: World) -> LoadedHour:
    return load_hour(world.disk, FOLDER, world.core.site.identity.log_id, FAR, [HourPart(FAR, world.hours().get(FAR))])


def flip(world: World, position: int) -> None:
    file = world.disk.open(PATH, write=True)
    file.pwritev([bytes([file.pread(1, position)[0] ^ 1])], position)


def test_a_load_reads_the_columns_and_not_the_bodies_in_one_read_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(12_000)
    reads: list[int] = []
    pread = MemoryFile.pread

    def counting(file: MemoryFile, size: int, position: int) -> bytes:
        data = pread(file, size, position)
        reads.append(len(data))
        return data

    monkeypatch.setattr(MemoryFile, "pread", counting)
    tracemalloc.start()
    loaded = load(world)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaded.prepared.rows) == 12_000 and loaded.damage is None
    assert sum(reads) <= 12_000 * 28 + 4 * 5_000 + 3 * 27_000, "28 bytes of columns a row, and little beyond them"
    assert len(reads) <= 8, "file and group header, three batches, and the first of them twice"
    assert most < 12_000 * 160 + 1_000_000, "less than the bodies alone"


def test_a_load_in_pieces_is_the_same_as_a_load_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(40, "m", checkpoints=5)
    whole = load(world).prepared.rows
    monkeypatch.setattr(loader, "PIECE_ROWS", 50)
    assert bool((load(world).prepared.rows == whole).all()) and len(whole) == 200
    assert np.array_equal(np.sort(whole["sequence"]), np.arange(1, 201))


def test_a_subject_table_longer_than_what_is_read_ahead_is_read_whole() -> None:
    world = World()
    names = [f"{index:03d}-{'s' * 200}".encode() for index in range(60)]
    world.send([wanted(1, FAR_MS, "m", name)[0] for name in names])
    world.settle()
    world.checkpoint()
    loaded = load(world)
    assert loaded.damage is None and sorted(loaded.names) == names


def test_each_byte_of_columns_headers_and_subjects_is_checked_and_none_of_a_body() -> None:
    world = filled(3, "x" * 24, checkpoints=2)
    file = world.disk.open(PATH)
    whole = file.pread(file.size(), 0)
    unnoticed = 0
    for position in range(FILE_HEADER_BYTES, len(whole)):
        flip(world, position)
        found = load(world)
        if found.damage is None:
            unnoticed += 1
            assert len(found.prepared.rows) == 6
        else:
            assert len(found.prepared.rows) <= 3, "what follows it is quarantined with it"
        flip(world, position)
    bodies, pads = 6 * 32, 2 * 4  # Nobody notices flips in bodies and in the padding of a group's table here.
    assert load(world).damage is None
    assert unnoticed == bodies + pads, "names of subjects are checked too: a flipped bit makes another name of one"


def test_rule_L5_a_rotten_body_is_found_before_it_is_handed_over_and_nothing_else_is_held_up() -> None:
    world = filled(3, "a", checkpoints=1)
    world.send(wanted(2, FAR_MS + 5_000, "b"))
    world.settle()
    world.checkpoint()
    file = world.disk.open(PATH)
    whole = file.pread(file.size(), 0)
    flip(world, whole.index(b"a-1"))
    world.drain(FAR_MS + 60_000)
    assert world.core.standing.counters()["quarantined_rows"] == 3
    arrived = [body for target in world.outside.targets.values() for kept in target.log for body in kept.bodies]
    assert sorted(arrived) == [b"b-0", b"b-1"]


def test_a_start_reads_what_is_above_the_checkpoint_once_and_a_checkpoint_reads_it_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(segment_bytes=256 << 10)
    for _ in range(40):
        world.send(wanted(100, FAR_MS, "m" * 200))
        world.settle()
    log_bytes = world.core.logs.intake.durable.offset
    reads: list[int] = []
    pread = MemoryFile.pread

    def counting(file: MemoryFile, size: int, position: int) -> bytes:
        data = pread(file, size, position)
        reads.append(len(data))
        return data

    world = world.after_crash(None)
    monkeypatch.setattr(MemoryFile, "pread", counting)
    again = world.after_crash(None)
    assert again.core.standing.counters()["pending_rows"] == 4_000
    assert log_bytes <= sum(reads) <= 1.1 * log_bytes
    reads.clear()
    again.checkpoint()
    assert 2 * log_bytes <= sum(reads) <= 2.1 * log_bytes, "for the columns of all rows, then for their bodies"
