"""Any number of files is in use with a bounded number of descriptors, and nobody can tell, except by what is open."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from delayd.errors import DamagedData
from delayd.machine import open_files
from delayd.machine.disk import File, RealDisk, open_named
from delayd.machine.open_files import REMOVED, REPLACED

MOST = 4
FILES = 50


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealDisk]:
    monkeypatch.setattr(open_files, "OPEN_FILES_MAX", MOST)
    made = RealDisk()
    yield made
    made.close()


@pytest.fixture
def files(disk: RealDisk, tmp_path: Path) -> Iterator[list[File]]:
    """More files than may be open, each with its number in it, synced."""
    made: list[File] = []
    for number in range(FILES):
        made.append(disk.open(str(tmp_path / f"{number}"), create=True))
        made[-1].pwritev([b"%04d" % number], 0)
        made[-1].sync()
    yield made
    for file in made:
        file.close()


def opened(folder: Path) -> set[str]:
    """The names of the files in a folder that this process has open."""
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    paths = [Path(os.readlink(link)) for link in links if os.path.exists(link)]
    return {path.name for path in paths if path.parent == folder}


def test_any_number_of_files_is_read_and_written_with_a_few_descriptors(files: list[File], tmp_path: Path) -> None:
    for turn in range(2):
        for number, file in enumerate(files):
            assert file.pread(4, 0) == b"%04d" % number
            file.pwritev([b"+"], 4 + turn)
            file.sync()
            assert file.size() == 5 + turn
            assert len(opened(tmp_path)) <= MOST
    assert all(file.pread(9, 0) == b"%04d++" % number for number, file in enumerate(files))


def test_rule_L4_a_file_with_unsynced_writes_stays_open_until_it_is_synced(files: list[File], tmp_path: Path) -> None:
    for number in range(10):
        files[number].pwritev([b"!"], 4)
    files[10].truncate(2)
    for file in files[11:]:
        file.pread(1, 0)
    unsynced = {str(number) for number in range(11)}
    assert unsynced <= opened(tmp_path) and len(opened(tmp_path)) <= len(unsynced) + MOST
    for file in files[:11]:
        file.sync()
    assert len(opened(tmp_path)) <= MOST


def test_a_closed_file_that_was_removed_or_replaced_is_told_and_nothing_is_written(
    files: list[File], tmp_path: Path
) -> None:
    removed, by_rename, in_place = tmp_path / "0", tmp_path / "1", tmp_path / "2"
    removed.unlink()
    (tmp_path / "new").write_bytes(b"0001")
    os.rename(tmp_path / "new", by_rename)
    in_place.write_bytes(b"0002 and more")
    for file, what in ((files[0], REMOVED), (files[1], REPLACED), (files[2], REPLACED)):
        uses: tuple[Callable[[], object], ...] = (
            partial(file.pread, 4, 0),
            partial(file.pread_into, memoryview(bytearray(4)), 0),
            partial(file.pwritev, [b"lost"], 0),
            partial(file.truncate, 0),
            file.size,
            file.sync,
        )
        for use in uses:
            with pytest.raises(DamagedData, match=what):
                use()
    assert not removed.exists()
    assert (by_rename.read_bytes(), in_place.read_bytes()) == (b"0001", b"0002 and more")


def test_threads_that_use_more_files_than_may_be_open_read_each_its_own(files: list[File], tmp_path: Path) -> None:
    wrong: list[tuple[int, bytes]] = []

    def read_all(step: int) -> None:
        for turn in range(40):
            for number in range(turn % 3, FILES, step):
                data = files[number].pread(4, 0)
                if data != b"%04d" % number:
                    wrong.append((number, data))

    threads = [threading.Thread(target=read_all, args=(step,)) for step in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(opened(tmp_path)) <= MOST


def test_rule_L10_files_that_are_not_in_use_give_their_descriptors_where_none_is_left(
    files: list[File], disk: RealDisk, tmp_path: Path
) -> None:
    for file in files[:MOST]:
        file.pread(1, 0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, before[1]))
    taken: list[int] = []
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        disk.sync_folder(str(tmp_path))
        assert "0" in disk.list_folder(str(tmp_path))
        assert open_named(disk, str(tmp_path / "9")).pread(4, 0) == b"0009"
        assert files[20].pread(4, 0) == b"0020"
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
