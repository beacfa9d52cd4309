"""A run of keys: what it holds is found, and nothing that is damaged is believed (docs/formats/keys.md)."""

from __future__ import annotations

import pytest

from delayd.batch.content import Hasher
from delayd.delay.keys.run import AskedNames, Newest, OpenRun, merge, open_run, write_run
from delayd.errors import DamagedData, Shortage, Unreadable
from delayd.log.key_run import BLOCK_ENTRIES, RunName, run_path
from delayd.log.segment import FileHeader, FileKind
from delayd.testing.disk import MemoryDisk
from tests.worlds.keys import DUE_MS, FOLDER, HOUR, LOG_ID, SEED, KeyRow, Name, entries_of, facts, names_of

LONG = b"k" * 200


def nothing() -> None:
    """Nobody waits."""


def rows_of(count: int, subject: bytes = b"orders") -> list[KeyRow]:
    """Rows whose keys have many lengths, in hours of their own."""
    return [KeyRow((subject, LONG[: n % 200] + b"%d" % n), n + 1, DUE_MS + n, HOUR + n) for n in range(count)]


def written(rows: list[KeyRow], disk: MemoryDisk | None = None) -> tuple[MemoryDisk, RunName]:
    """A run on a disk."""
    disk = disk or MemoryDisk()
    disk.make_folder(FOLDER)
    header = FileHeader(FileKind.KEYS, LOG_ID, 0, 3, DUE_MS)
    return disk, write_run(disk, FOLDER, header, SEED, merge([entries_of(rows)]), nothing)


def opened(disk: MemoryDisk, name: RunName) -> OpenRun:
    """Opened as the state names it."""
    return open_run(disk, FOLDER, LOG_ID, SEED, name)


def look(run: OpenRun, names: list[Name]) -> list[tuple[int, int, int]]:
    """Look names up."""
    asked, found = names_of(names), Newest(len(names))
    run.find(AskedNames(asked, Hasher(SEED).hashes(asked)), found, nothing)
    return facts(found)


@pytest.mark.parametrize("count", [1, 2, BLOCK_ENTRIES - 1, BLOCK_ENTRIES, BLOCK_ENTRIES + 1, 5_000])
def test_each_name_is_found_and_no_other(count: int) -> None:
    rows = rows_of(count)
    run = opened(*written(rows))
    assert len(run) == count
    assert look(run, [row.name for row in rows]) == [tuple(row[1:]) for row in rows]
    others = [(b"orders2", row.name[1]) for row in rows] + [(b"orders", row.name[1][:-1] + b"x") for row in rows]
    assert look(run, others) == [(0, 0, 0)] * len(others)


def test_a_key_takes_so_many_bytes() -> None:
    rows = [KeyRow((b"orders", b"order-%07d" % n), n + 1) for n in range(20_000)]
    disk, name = written(rows)
    assert name.total_bytes / len(rows) < 47
    assert opened(disk, name)._tables.nbytes / len(rows) < 2.5


def test_each_flipped_byte_is_damage_with_a_name_or_changes_nothing() -> None:
    rows = rows_of(70)
    disk, name = written(rows)
    whole = look(opened(disk, name), [row.name for row in rows])
    path = run_path(FOLDER, name.number)
    file = disk.open(path, write=True)
    for position in range(name.total_bytes):
        (byte,) = file.pread(1, position)
        file.pwritev([bytes([byte ^ 0x10])], position)
        with pytest.raises(DamagedData) as raised:
            run = opened(disk, name)
            assert look(run, [row.name for row in rows]) == whole
            run.read(0, run.blocks, Hasher(SEED))
            raise AssertionError(f"byte {position} is believed")
        assert path in str(raised.value)
        file.pwritev([bytes([byte])], position)
    assert look(opened(disk, name), [row.name for row in rows]) == whole


@pytest.mark.parametrize("size", [0, 10, 64, 127, 128, 1_000])
def test_a_file_that_was_cut_is_damage(size: int) -> None:
    disk, name = written(rows_of(70))
    disk.open(run_path(FOLDER, name.number), write=True).truncate(size)
    with pytest.raises(DamagedData):
        opened(disk, name)


def test_a_run_of_another_directory_number_seed_or_time_is_not_opened() -> None:
    disk, name = written(rows_of(70))
    with pytest.raises(DamagedData, match="log_id"):
        open_run(disk, FOLDER, LOG_ID + 1, SEED, name)
    with pytest.raises(DamagedData, match="seed"):
        open_run(disk, FOLDER, LOG_ID, SEED + 1, name)
    with pytest.raises(DamagedData, match="another run"):
        opened(disk, name._replace(tables_crc32c=1))
    disk.rename(run_path(FOLDER, 3), run_path(FOLDER, 4))
    with pytest.raises(DamagedData, match="run 3"):
        opened(disk, name._replace(number=4))


def test_a_block_that_cannot_be_read_is_damage() -> None:
    disk, name = written(rows_of(70))
    run = opened(disk, name)
    disk.faults.fail_reads["/keys/"] = 1
    with pytest.raises(Unreadable):
        look(run, [(b"orders", b"0")])
    assert look(run, [(b"orders", b"0")]) == [(1, DUE_MS, HOUR)]


def test_a_run_is_durable_before_it_has_a_name() -> None:
    disk, name = written(rows_of(70))
    assert not disk.closed_unsynced
    assert look(opened(disk.after_crash(), name), [(b"orders", b"0")]) == [(1, DUE_MS, HOUR)]


def test_a_shortage_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, name = written(rows_of(70))
    run = opened(disk, name)

    def short(size: int, position: int) -> bytes:
        raise Shortage("x", 12)

    monkeypatch.setattr(run._file.file, "_file", type("F", (), {"pread": staticmethod(short)})())
    with pytest.raises(Shortage):
        look(run, [(b"orders", b"0")])
