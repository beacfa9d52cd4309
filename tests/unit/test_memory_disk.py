"""The fake disk: each way to lose power, and each fault."""

from __future__ import annotations

import pytest

from delayd.errors import DiskFull, SyncFailed
from delayd.machine.disk import File, SyncLatch
from delayd.testing.disk import Crash, Faults, MemoryDisk
from delayd.testing.tree import SECTOR_BYTES, PowerLoss

SEEDS = range(60)
OLD = b"old!" * 300  # 1,200 bytes: three sectors, the last one partial.
NEW = bytes(range(1, 251)) * 10


def content(disk: MemoryDisk, path: str) -> bytes:
    file = disk.open(path)
    data = file.pread(1 << 20, 0)
    file.close()
    return data


def durable_file(disk: MemoryDisk, data: bytes = OLD) -> File:
    disk.make_folder("/data")
    file = disk.open("/data/log", create=True)
    if data:
        file.pwritev([data], 0)
    file.sync()
    disk.sync_folder("/data")
    return file


def outcomes(disk: MemoryDisk, way: PowerLoss) -> set[bytes]:
    return {content(disk.after_crash(way, seed), "/data/log") for seed in SEEDS}


@pytest.mark.parametrize("way", PowerLoss)
def test_what_was_synced_survives_every_way(way: PowerLoss) -> None:
    disk = MemoryDisk()
    durable_file(disk)
    assert outcomes(disk, way) == {OLD}


def test_a_prefix_of_the_changes_survives_up_to_any_one() -> None:
    disk = MemoryDisk()
    file = durable_file(disk, b"")
    for number in range(3):
        file.pwritev([b"abc"[number : number + 1]], number)
    assert outcomes(disk, PowerLoss.PREFIX) == {b"", b"a", b"ab", b"abc"}


def test_the_last_write_is_torn_at_any_byte_and_those_before_it_are_whole() -> None:
    disk = MemoryDisk()
    file = durable_file(disk, b"")
    file.pwritev([b"whole"], 0)
    file.pwritev([b"to", b"rn"], 5)
    assert outcomes(disk, PowerLoss.TORN) == {b"wholet", b"wholeto", b"wholetor"}


def test_earlier_sectors_go_missing_while_later_ones_are_kept() -> None:
    disk = MemoryDisk()
    durable_file(disk).pwritev([NEW], len(OLD))
    found = outcomes(disk, PowerLoss.REORDERED)
    assert len(found) > 5
    for data in found:
        assert data[: len(OLD)] == OLD
        assert len(data) == len(OLD) + len(NEW)
        assert data != OLD + NEW
        assert bytes(SECTOR_BYTES // 2) in data


def test_an_earlier_write_goes_missing_while_a_later_one_is_kept() -> None:
    disk = MemoryDisk()
    file = durable_file(disk, b"")
    file.pwritev([b"one"], 0)
    file.pwritev([b"two"], 3)
    assert outcomes(disk, PowerLoss.REORDERED) == {b"\0\0\0two"}


def test_a_synced_file_without_its_folders_sync_may_be_missing() -> None:
    disk = MemoryDisk()
    disk.make_folder("/data")
    file = disk.open("/data/log", create=True)
    file.pwritev([OLD], 0)
    file.sync()
    assert disk.after_crash(PowerLoss.ENTRIES_LOST).list_folder("/data") == []
    assert disk.after_crash(PowerLoss.ALL_LOST).list_folder("/data") == []
    assert content(disk.after_crash(PowerLoss.DATA_LOST), "/data/log") == OLD
    disk.sync_folder("/data")
    assert content(disk.after_crash(PowerLoss.ENTRIES_LOST), "/data/log") == OLD


def test_a_rename_is_undone_or_done_but_never_half() -> None:
    disk = MemoryDisk()
    durable_file(disk)
    new = disk.open("/data/new", create=True)
    new.pwritev([NEW], 0)
    new.sync()
    disk.sync_folder("/data")
    disk.rename("/data/new", "/data/log")
    for way in PowerLoss:
        for seed in SEEDS:
            found = disk.after_crash(way, seed)
            assert (found.list_folder("/data"), content(found, "/data/log")) in (
                (["log", "new"], OLD),
                (["log"], NEW),
            )
    assert disk.after_crash(PowerLoss.ENTRIES_LOST).list_folder("/data") == ["log", "new"]
    disk.sync_folder("/data")
    assert disk.after_crash(PowerLoss.ALL_LOST).list_folder("/data") == ["log"]


def test_unsynced_entries_are_lost_one_by_one() -> None:
    disk = MemoryDisk()
    disk.make_folder("/data")
    for name in "abc":
        disk.open(f"/data/{name}", create=True)
    prefixes = {"".join(disk.after_crash(PowerLoss.PREFIX, seed).list_folder("/data")) for seed in SEEDS}
    assert prefixes == {"", "a", "ab", "abc"}
    subsets = {"".join(disk.after_crash(PowerLoss.REORDERED, seed).list_folder("/data")) for seed in SEEDS}
    assert subsets == {"", "a", "b", "c", "ab", "ac", "bc", "abc"}


def test_a_folder_that_need_not_last_yet_goes_with_the_power_until_the_file_system_is_synced() -> None:
    disk = MemoryDisk()
    disk.make_folder("/a/b", durable=False)
    assert not disk.after_crash(PowerLoss.ALL_LOST).exists("/a")
    disk.sync_filesystem("/")
    assert disk.after_crash(PowerLoss.ALL_LOST).exists("/a/b")


def workload(disk: MemoryDisk) -> None:
    file = durable_file(disk)
    file.pwritev([b"x"], 0)
    file.truncate(100)
    file.sync()
    disk.rename("/data/log", "/data/moved")
    disk.remove("/data/moved")
    disk.sync_filesystem("/data")
    file.close()


def test_a_crash_comes_at_each_operation_and_ends_everything() -> None:
    whole = MemoryDisk()
    workload(whole)
    count = len(whole.operations)
    assert count == 12
    for crash_at in range(1, count + 1):
        disk = MemoryDisk(Faults(crash_at=crash_at))
        with pytest.raises(Crash):
            workload(disk)
        assert disk.operations == whole.operations[:crash_at]
        with pytest.raises(Crash):
            disk.list_folder("/")
        with pytest.raises(Crash):
            disk.make_folder("/data")
        assert not disk.after_crash().crashed
    disk = MemoryDisk(Faults(crash_at=count + 1))
    workload(disk)
    assert not disk.crashed


def test_the_operation_that_crashes_is_in_the_page_cache_and_a_sync_is_not_done() -> None:
    disk = MemoryDisk()
    file = durable_file(disk, b"")
    disk.faults.crash_at = len(disk.operations) + 1
    with pytest.raises(Crash):
        file.pwritev([b"new"], 0)
    assert content(disk.after_crash(PowerLoss.ALL_KEPT), "/data/log") == b"new"
    assert content(disk.after_crash(PowerLoss.ALL_LOST), "/data/log") == b""

    disk = MemoryDisk()
    file = durable_file(disk, b"")
    file.pwritev([b"new"], 0)
    disk.faults.crash_at = len(disk.operations) + 1
    with pytest.raises(Crash):
        file.sync()
    assert content(disk.after_crash(PowerLoss.ALL_LOST), "/data/log") == b""


def test_a_failed_sync_loses_the_dirty_pages_for_good_while_reads_still_show_them() -> None:
    disk = MemoryDisk()
    file = durable_file(disk)
    file.pwritev([NEW], len(OLD))
    disk.faults.fail_sync_at = disk.syncs + 1
    with pytest.raises(SyncFailed, match="/data/log"):
        file.sync()
    disk.latch = SyncLatch()  # As the next process has it.
    file.sync()
    assert content(disk, "/data/log") == OLD + NEW
    assert content(disk.after_crash(PowerLoss.ALL_KEPT), "/data/log") == OLD


def test_a_skipped_sync_reports_success_and_does_nothing() -> None:
    disk = MemoryDisk()
    file = durable_file(disk)
    file.pwritev([NEW], len(OLD))
    disk.faults.skip_sync_at = disk.syncs + 1
    file.sync()
    assert content(disk.after_crash(PowerLoss.ALL_LOST), "/data/log") == OLD
    file.sync()
    assert content(disk.after_crash(PowerLoss.ALL_LOST), "/data/log") == OLD + NEW


def test_a_full_disk_takes_what_fits_and_recovers_when_space_returns() -> None:
    disk = MemoryDisk(capacity_bytes=10)
    disk.make_folder("/data")
    file = disk.open("/data/log", create=True)
    file.pwritev([b"1234567"], 0)
    assert disk.free_bytes("/data") == 3
    with pytest.raises(DiskFull, match="/data/log"):
        file.pwritev([b"89", b"abc"], 7)
    assert content(disk, "/data/log") == b"123456789a"
    assert disk.free_bytes("/data") == 0
    file.pwritev([b"over"], 0)
    file.truncate(7)
    disk.capacity_bytes = 12
    file.pwritev([b"89abc"], 7)
    file.close()
    disk.remove("/data/log")
    assert disk.free_bytes("/data") == 12


def test_rule_L4_a_file_closed_with_unsynced_writes_is_noted() -> None:
    disk = MemoryDisk()
    file = durable_file(disk)
    file.close()
    assert disk.closed_unsynced == []
    file = disk.open("/data/log", write=True)
    file.pwritev([b"x"], 0)
    file.close()
    assert disk.closed_unsynced == ["/data/log"]


def test_a_sync_that_failed_has_dropped_what_others_made_and_no_later_one_counts() -> None:
    disk = MemoryDisk(Faults(fail_sync_at=1))
    disk.open("/made", create=True).close()
    for _ in range(2):
        with pytest.raises(SyncFailed):
            disk.sync_folder("/")
    assert not disk.after_crash().exists("/made")
