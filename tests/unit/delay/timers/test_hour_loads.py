"""Loading an hour, and starting: what is read and held of the logs, and what is found damaged when it is loaded."""

import tracemalloc

import pytest

from delayd.delay.filing.hour_table import HourPart
from delayd.delay.timers.loading import LoadedHour, load_hour
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
