"""The real disk where things go wrong: partial writes, full disks, failed syncs, other processes."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from delayd.errors import DiskFull, Shortage, SyncFailed
from delayd.machine.disk import Buffer, File, RealDisk, create_whole, replace_whole


@pytest.fixture
def disk() -> Iterator[RealDisk]:
    made = RealDisk()
    yield made
    made.close()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _fails(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_descriptors() -> set[int]:
    # Listing needs a descriptor of its own, which is closed again by now.
    return {number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")}


def folders_synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return synced


def test_a_write_that_the_kernel_splits_anywhere_is_continued(
    disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev
    column = np.arange(40, dtype="<i8")

    def seven_bytes(descriptor: int, buffers: Sequence[Buffer], position: int) -> int:
        return pwritev(descriptor, [b"".join(memoryview(buffer).tobytes() for buffer in buffers)[:7]], position)

    monkeypatch.setattr(os, "pwritev", seven_bytes)
    file = disk.open(str(folder_on_disk / "a"), create=True)
    file.pwritev([b"head", b"", column.data, b"tail"], 2)
    assert file.pread(1_000, 2) == b"head" + column.tobytes() + b"tail"
    file.close()


def test_a_short_read_before_the_end_is_continued(
    disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder_on_disk / "a").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, position: pread(descriptor, min(size, 7), position))
    file = disk.open(str(folder_on_disk / "a"))
    assert file.pread(90, 5) == bytes(range(5, 95))
    assert file.pread(90, 50) == bytes(range(50, 100))
    preadv, buffer = os.preadv, bytearray(90)
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: preadv(descriptor, [buffers[0][:7]], at))
    assert file.pread_into(memoryview(buffer), 5) == 90 and buffer == bytes(range(5, 95))
    assert file.pread_into(memoryview(buffer), 50) == 50 and buffer[:50] == bytes(range(50, 100))
    file.close()


def test_rule_L3_a_write_past_a_limit_raises_and_leaves_a_part(disk: RealDisk, folder_on_disk: Path) -> None:
    file = disk.open(str(folder_on_disk / "a"), create=True)
    file.pwritev([b"kept"], 0)
    with file_size_limit(10_000), pytest.raises(OSError) as refused:
        file.pwritev([bytes(20_000)], 4)
    assert refused.value.errno == errno.EFBIG
    assert file.size() == 10_000
    file.truncate(4)
    assert file.pread(10, 0) == b"kept"
    file.close()


def test_a_full_disk_is_named(disk: RealDisk) -> None:
    file = disk.open("/dev/full", write=True)
    with pytest.raises(DiskFull, match="/dev/full"):
        file.pwritev([b"x"], 0)
    file.close()


def test_a_used_up_quota_is_a_full_disk(disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over_quota(descriptor: int, size: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "ftruncate", over_quota)
    file = disk.open(str(folder_on_disk / "a"), create=True)
    with pytest.raises(DiskFull):
        file.truncate(10)
    file.close()


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_failed_sync_says_that_the_server_must_stop(
    disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = disk.open(str(folder_on_disk / "a"), create=True)
    monkeypatch.setattr(os, call, _fails)
    with pytest.raises(SyncFailed, match="Input/output error") as failed:
        if call == "fdatasync":
            file.sync()
        else:
            disk.sync_folder(str(folder_on_disk))
    assert failed.value.path.startswith(str(folder_on_disk))
    file.close()


def test_rule_L1_no_sync_counts_after_one_that_failed(
    disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk.open(f"{folder_on_disk}/kept", create=True)
    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", _fails)
        with pytest.raises(SyncFailed):
            disk.sync_folder(str(folder_on_disk))
    syncs: list[Callable[[], None]] = [
        lambda: disk.sync_folder(str(folder_on_disk)),
        file.sync,
        lambda: disk.sync_filesystem(str(folder_on_disk)),
    ]
    for sync in syncs:
        with pytest.raises(SyncFailed, match=f"a sync of {folder_on_disk} failed before"):
            sync()
    file.close()


def test_rule_L1_of_two_folder_syncs_at_a_time_both_fail(
    disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel tells one of them of the error; the other would say that its new file is durable.
    under_way, go_on = threading.Event(), threading.Event()
    errors = [OSError(errno.EIO, "the first hears of it")]

    def told_once(descriptor: int) -> None:
        if errors:
            error = errors.pop()
            under_way.set()
            go_on.wait(10)
            raise error

    monkeypatch.setattr(os, "fsync", told_once)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(disk.sync_folder, str(folder_on_disk))
        assert under_way.wait(10)
        second = pool.submit(disk.sync_folder, str(folder_on_disk))
        assert not wait([second], timeout=0.05).done
        go_on.set()
        assert isinstance(first.exception(10), SyncFailed)
        assert isinstance(second.exception(10), SyncFailed)


@pytest.mark.parametrize(
    ("release", "reports"),
    [("5.7.19-generic", False), ("4.19", False), ("5.8.0", True), ("6.18.44-x", True), ("5.10+", True)],
)
def test_before_linux_5_8_the_file_system_reports_no_sync_errors(
    monkeypatch: pytest.MonkeyPatch, release: str, reports: bool
) -> None:
    system = os.uname()
    named = os.uname_result((system.sysname, system.nodename, release, system.version, system.machine))
    monkeypatch.setattr(os, "uname", lambda: named)
    assert RealDisk().reports_sync_errors is reports


def test_rule_L4_each_new_parent_is_synced_and_a_known_folder_costs_nothing(
    disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = folders_synced(monkeypatch)
    disk.make_folder(str(folder_on_disk / "a" / "b" / "c"))
    assert synced[-3:] == [str(folder_on_disk), str(folder_on_disk / "a"), str(folder_on_disk / "a" / "b")]
    synced.clear()
    disk.make_folder(str(folder_on_disk / "a" / "b" / "c"))
    assert synced == []


def test_rule_L4_a_folder_left_by_a_process_that_died_is_made_durable(
    disk: RealDisk, folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder_on_disk / "a").mkdir()
    synced = folders_synced(monkeypatch)
    disk.make_folder(str(folder_on_disk / "a"))
    assert synced == [str(folder_on_disk)]


def test_a_file_that_is_made_whole_is_there_with_all_bytes_or_not_at_all(
    folder_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder_on_disk / "whole"
    seen: list[str] = []

    def look(name: str) -> None:
        assert not path.exists() or path.read_bytes() == b"data"
        seen.append(name)

    for name in ("write", "fsync", "link", "close", "unlink"):
        call: Callable[..., object] = getattr(os, name)

        def watched(*words: object, name: str = name, call: Callable[..., object] = call) -> object:
            look(name)
            return call(*words)

        monkeypatch.setattr(os, name, watched)
    create_whole(str(path), b"data", 0o600)
    # Durable before it has its name; and the name is durable on return.
    assert seen == ["write", "fsync", "close", "link", "unlink", "fsync", "close"]
    assert path.read_bytes() == b"data" and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create_whole(str(path), b"other", 0o600)
    assert path.read_bytes() == b"data" and os.listdir(folder_on_disk) == ["whole"]


def test_threads_that_make_one_file_whole_have_one_winner(folder_on_disk: Path) -> None:
    def make(number: int) -> int:
        with suppress(FileExistsError):
            create_whole(str(folder_on_disk / "one"), b"%d" % number, 0o600)
            return number
        return -1

    with ThreadPoolExecutor(8) as threads:
        winners = [number for number in threads.map(make, range(8)) if number >= 0]
    assert [b"%d" % number for number in winners] == [(folder_on_disk / "one").read_bytes()]


def test_rule_L7_no_child_inherits_a_descriptor(disk: RealDisk, folder_on_disk: Path) -> None:
    before = open_descriptors()
    file = disk.open(str(folder_on_disk / "a"), create=True)
    lock = disk.lock(str(folder_on_disk / "LOCK"), "delay")
    opened = open_descriptors() - before
    assert len(opened) == 3
    for descriptor in opened:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    lock.release()
    file.close()


def test_rule_L10_a_file_that_no_descriptor_is_left_for_is_a_shortage_and_no_bug(tmp_path: Path) -> None:
    disk, before = RealDisk(), resource.getrlimit(resource.RLIMIT_NOFILE)
    disk.make_folder(str(tmp_path))
    disk.open(str(tmp_path / "first"), create=True).close()
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    held: list[File] = []
    try:
        with pytest.raises(Shortage, match="open files"):
            for number in range(highest + 2):
                held.append(disk.open(str(tmp_path / f"{number}"), create=True))
                held[-1].pwritev([b"not synced, so its descriptor is needed"], 0)
        with pytest.raises(Shortage, match="open files"):
            disk.sync_folder(str(tmp_path))
        with pytest.raises(Shortage, match="open files"):
            disk.list_folder(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in held:
            file.close()


def test_a_file_that_takes_the_place_of_another_is_whole_and_alone(folder_on_disk: Path) -> None:
    path = folder_on_disk / "number"
    for data in (b"1", b"22", b""):
        replace_whole(str(path), data, 0o640)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (data, 0o640)
    assert [each.name for each in folder_on_disk.iterdir()] == ["number"]
    with pytest.raises(FileNotFoundError):
        replace_whole(str(folder_on_disk / "none" / "number"), b"1", 0o640)
