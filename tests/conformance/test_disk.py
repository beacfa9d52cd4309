"""What every disk does: the operating system's and the one in memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from delayd.errors import DirectoryInUse
from delayd.machine.disk import Disk, RealDisk
from delayd.testing.disk import MemoryDisk


@pytest.fixture(params=["real", "memory"])
def disk(request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = RealDisk() if request.param == "real" else MemoryDisk()
    yield made
    made.close()


@pytest.fixture
def root(disk: Disk, folder_on_disk: Path) -> str:
    path = str(folder_on_disk / "data")
    disk.make_folder(path)
    return path


def test_what_is_written_is_read_back_at_its_position(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    file.pwritev([b"hello ", bytearray(b"wide "), memoryview(b"world")], 0)
    assert file.pread(100, 0) == b"hello wide world"
    assert file.pread(4, 6) == b"wide"
    file.pwritev([b"WIDE"], 6)
    assert file.pread(16, 0) == b"hello WIDE world"
    file.sync()
    file.close()


def test_a_read_is_short_only_at_the_end_of_the_file(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    file.pwritev([b"abc"], 0)
    assert file.pread(10, 1) == b"bc"
    assert file.pread(10, 3) == b""
    assert file.pread(10, 99) == b""
    assert file.pread(0, 0) == b""
    buffer = bytearray(b"....")
    assert file.pread_into(memoryview(buffer)[:2], 1) == 2 and buffer == b"bc.."
    assert file.pread_into(memoryview(buffer), 2) == 1 and buffer == b"cc.."
    assert file.pread_into(memoryview(buffer), 99) == 0
    file.sync()
    file.close()


def test_more_buffers_than_one_call_takes_are_all_written_in_order(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    buffers = [f"{number:05d}".encode() for number in range(2_500)]
    file.pwritev(buffers, 3)
    assert file.pread(20_000, 3) == b"".join(buffers)
    file.sync()
    file.close()


def test_arrays_and_empty_buffers_are_written_as_their_bytes(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    column = np.arange(5, dtype="<i8")
    row = np.zeros(2, dtype=[("a", "<u4"), ("b", "<u8")])
    file.pwritev([b"", column.data, b"", row.data], 0)
    assert file.pread(1_000, 0) == column.tobytes() + row.tobytes()
    file.pwritev([], 0)
    file.pwritev([b""], 0)
    assert file.size() == 64
    file.sync()
    file.close()


def test_a_write_past_the_end_leaves_zeros_between(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    file.pwritev([b"end"], 8)
    assert file.pread(20, 0) == bytes(8) + b"end"
    file.sync()
    file.close()


def test_truncate_cuts_and_extends_with_zeros(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    file.pwritev([b"abcdef"], 0)
    file.truncate(2)
    assert (file.size(), file.pread(9, 0)) == (2, b"ab")
    file.truncate(5)
    assert (file.size(), file.pread(9, 0)) == (5, b"ab\0\0\0")
    file.sync()
    file.close()


def test_create_refuses_an_existing_file_and_open_a_missing_one(disk: Disk, root: str) -> None:
    disk.open(f"{root}/a", create=True).close()
    with pytest.raises(FileExistsError):
        disk.open(f"{root}/a", create=True)
    with pytest.raises(FileNotFoundError):
        disk.open(f"{root}/b")
    with pytest.raises(FileNotFoundError):
        disk.open(f"{root}/b", write=True)
    with pytest.raises(FileNotFoundError):
        disk.open(f"{root}/no/b", create=True)


def test_a_file_opened_for_reading_refuses_writes(disk: Disk, root: str) -> None:
    disk.open(f"{root}/a", create=True).close()
    file = disk.open(f"{root}/a")
    with pytest.raises(OSError):
        file.pwritev([b"x"], 0)
    with pytest.raises(OSError):
        file.truncate(0)
    file.close()


def test_a_closed_file_is_refused_and_may_be_closed_again(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    file.close()
    file.close()
    with pytest.raises(OSError) as refused:
        file.pread(1, 0)
    assert refused.value.errno == errno.EBADF


def test_folders_are_made_with_their_parents_and_again_without_harm(disk: Disk, root: str) -> None:
    disk.make_folder(f"{root}/x/y/z")
    disk.make_folder(f"{root}/x/y/z")
    disk.make_folder(f"{root}/x/w/")
    assert disk.list_folder(f"{root}/x") == ["w", "y"]
    assert disk.exists(f"{root}/x/y/z")


def test_a_folder_that_was_removed_is_made_again(disk: Disk, root: str) -> None:
    disk.make_folder(f"{root}/x")
    disk.remove(f"{root}/x")
    assert not disk.exists(f"{root}/x")
    disk.make_folder(f"{root}/x")
    assert disk.exists(f"{root}/x")


def test_a_folder_that_need_not_last_yet_is_there_all_the_same_and_can_be_made_durable(disk: Disk, root: str) -> None:
    for durable in (False, False, True):
        disk.make_folder(f"{root}/x/y", durable=durable)
        assert disk.list_folder(f"{root}/x") == ["y"]
    disk.sync_filesystem(root)


def test_a_folder_can_not_be_made_where_a_file_is(disk: Disk, root: str) -> None:
    disk.open(f"{root}/x", create=True).close()
    with pytest.raises(FileExistsError):
        disk.make_folder(f"{root}/x")


def test_a_missing_folder_lists_nothing_and_a_present_one_sorted_names(disk: Disk, root: str) -> None:
    assert disk.list_folder(f"{root}/none") == []
    for name in ("b", "a", "c"):
        disk.open(f"{root}/{name}", create=True).close()
    assert disk.list_folder(root) == ["a", "b", "c"]
    assert not disk.exists(f"{root}/a/below-a-file")
    assert disk.list_folder(f"{root}/a/below-a-file") == []


def test_rename_replaces_the_target(disk: Disk, root: str) -> None:
    for name in ("new", "old"):
        file = disk.open(f"{root}/{name}", create=True)
        file.pwritev([name.encode()], 0)
        file.sync()
        file.close()
    disk.rename(f"{root}/new", f"{root}/old")
    disk.sync_folder(root)
    assert disk.list_folder(root) == ["old"]
    file = disk.open(f"{root}/old")
    assert file.pread(9, 0) == b"new"
    file.close()
    with pytest.raises(FileNotFoundError):
        disk.rename(f"{root}/new", f"{root}/other")


def test_a_removed_file_is_readable_by_who_has_it_open(disk: Disk, root: str) -> None:
    file = disk.open(f"{root}/a", create=True)
    file.pwritev([b"still"], 0)
    disk.remove(f"{root}/a")
    assert not disk.exists(f"{root}/a")
    assert file.pread(9, 0) == b"still"
    file.sync()
    file.close()
    with pytest.raises(FileNotFoundError):
        disk.remove(f"{root}/a")


def test_only_an_empty_folder_is_removed(disk: Disk, root: str) -> None:
    disk.make_folder(f"{root}/x/y")
    with pytest.raises(OSError) as refused:
        disk.remove(f"{root}/x")
    assert refused.value.errno == errno.ENOTEMPTY
    disk.remove(f"{root}/x/y")
    disk.remove(f"{root}/x")
    assert disk.list_folder(root) == []


def test_a_missing_folder_can_not_be_synced(disk: Disk, root: str) -> None:
    with pytest.raises(FileNotFoundError):
        disk.sync_folder(f"{root}/none")


def test_the_file_system_syncs_and_has_free_bytes(disk: Disk, root: str) -> None:
    disk.sync_filesystem(root)
    assert disk.reports_sync_errors
    assert disk.free_bytes(root) > 0
    with pytest.raises(FileNotFoundError):
        disk.free_bytes(f"{root}/none")


def test_rule_L7_a_second_lock_names_the_holder_and_a_released_one_is_free(disk: Disk, root: str) -> None:
    first = disk.lock(f"{root}/LOCK", "delay")
    with pytest.raises(DirectoryInUse) as refused:
        disk.lock(f"{root}/LOCK", "realtime")
    assert refused.value.path == root
    assert refused.value.holder.startswith("pid ")
    assert refused.value.holder.endswith(" delay")
    first.release()
    first.release()
    second = disk.lock(f"{root}/LOCK", "realtime")
    first.release()
    with pytest.raises(DirectoryInUse, match="realtime"):
        disk.lock(f"{root}/LOCK")
    second.release()
    assert disk.list_folder(root) == ["LOCK"]
