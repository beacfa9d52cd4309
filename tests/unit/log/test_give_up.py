"""The damaged end of a log is given up by an operator's word: its server starts with what is good."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from delayd.errors import DamagedData
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.segment import FileKind
from delayd.log.tail import find_damage, give_up
from delayd.testing.disk import Crash, MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.batches import messages
from tests.memory_files import content, files

PLACE = LogPlace("/data/message", FileKind.REALTIME, 7, segment_bytes=900)
ASIDE = "/data/quarantine"


def logged(groups: int, start_at: int) -> tuple[MemoryDisk, int, int, list[int]]:
    """A log of so many groups, each fsynced; where and with which checksum the checkpoint ends; where each begins."""
    disk = MemoryDisk()
    log = open_log(disk, PLACE, 5)
    start, crc32c, ends = 0, 0, []
    for number in range(groups):
        if number == start_at:
            start, crc32c = log.end, log.crc32c
        batch = messages([bytes([number]) * 200])
        (offset,) = log.append([NewGroup(GroupKind.DATA, [batch], 1, 100 + number, number, 1)], 5)
        ends.append(offset)
        log.flush()
    log.close()
    return disk, start, crc32c, ends


def numbers(log: Log, start: int) -> list[int]:
    return [group.header.base_sequence for group in log.scan(start, log.durable)]


def file_of(disk: MemoryDisk, offset: int) -> tuple[str, int]:
    """The file that holds an offset, and the byte in it."""
    names = [name for name in disk.list_folder(PLACE.folder) if int(name.removesuffix(".log")) <= offset]
    return f"{PLACE.folder}/{names[-1]}", offset - int(names[-1].removesuffix(".log")) + 64


def flip(disk: MemoryDisk, path: str, position: int) -> None:
    file = disk.open(path, write=True)
    byte = file.pread(1, position)
    file.pwritev([bytes([byte[0] ^ 1])], position)
    file.sync()


def cut(disk: MemoryDisk, path: str, position: int) -> None:
    file = disk.open(path, write=True)
    file.truncate(position)
    file.sync()


def gone(disk: MemoryDisk, path: str, position: int) -> None:
    disk.remove(path)
    disk.sync_folder(PLACE.folder)


def header(disk: MemoryDisk, path: str, position: int) -> None:
    flip(disk, path, 20)


@pytest.mark.parametrize("checkpoint", [0, 4, 9])
@pytest.mark.parametrize("at", [4, 7, 9])
@pytest.mark.parametrize("how", [flip, cut, gone, header])
def test_a_log_goes_on_behind_its_last_good_group(
    checkpoint: int, at: int, how: Callable[[MemoryDisk, str, int], None]
) -> None:
    disk, start, crc32c, offsets = logged(12, checkpoint)
    path, position = file_of(disk, offsets[at])
    how(disk, path, position + 70)
    try:
        open_log(disk.after_crash(), PLACE, 6, start, crc32c, leave_out=True).close()
    except DamagedData:
        pass
    else:
        assert find_damage(disk, PLACE, start, crc32c, 6) is None
        return
    damage = find_damage(disk, PLACE, start, crc32c, 6)
    assert damage is not None and start <= damage.good_until
    if how is header:
        assert damage.good_until > offsets[-1] and not damage.lost_bytes, "its groups say themselves where they belong"
    else:
        assert damage.good_until <= max(start, offsets[at])
    good = [number for number, offset in enumerate(offsets) if start <= offset < damage.good_until]
    assert damage.next_sequence == (good[-1] + 1 if good else 0)
    aside = give_up(disk, PLACE, damage, ASIDE, 6, [NewGroup(GroupKind.CONTROL, [], 2, 500, 9_000)])
    assert all(disk.exists(each) for each in aside)
    after = disk.after_crash()
    log = open_log(after, PLACE, 7, start, crc32c, leave_out=True)
    assert numbers(log, start) == [*good, 9_000]
    log.append([NewGroup(GroupKind.DATA, [messages([b"new"])], 2, 501, 9_001, 1)], 7)
    log.flush()
    again = open_log(after.after_crash(), PLACE, 8, start, crc32c, leave_out=True)
    assert numbers(again, start) == [*good, 9_000, 9_001]


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST, PowerLoss.REORDERED])
@pytest.mark.parametrize("checkpoint", [0, 4, 5])
@pytest.mark.parametrize("how", [flip, gone])
def test_a_crash_while_a_log_is_given_up_loses_no_good_group_and_no_word(
    how: Callable[[MemoryDisk, str, int], None], checkpoint: int, way: PowerLoss | None
) -> None:
    word = [NewGroup(GroupKind.CONTROL, [], 2, 500, 9_000)]
    for at in count(1):
        disk, start, crc32c, offsets = logged(12, checkpoint)
        path, position = file_of(disk, offsets[7])
        whole = content(disk, path)
        how(disk, path, position + 70)
        damage = find_damage(disk, PLACE, start, crc32c, 6)
        assert damage is not None
        good = [number for number, offset in enumerate(offsets) if start <= offset < damage.good_until]
        disk.faults.crash_at = len(disk.operations) + at
        try:
            give_up(disk, PLACE, damage, ASIDE, 6, word)
            return
        except Crash:
            found = disk.after_kill() if way is None else disk.after_crash(way, at)
        if (left := find_damage(found, PLACE, start, crc32c, 7)) is not None:
            give_up(found, PLACE, left, ASIDE, 7, word)
        found = found.after_crash()
        kept = numbers(open_log(found, PLACE, 8, start, crc32c, leave_out=True), start)
        assert kept[: len(good)] == good and set(kept[len(good) :]) == {9_000}, f"died {way} at {at}"
        if how is flip:
            # Nothing is removed: what was damaged is where it was, or aside.
            found.make_folder(ASIDE)
            names = [*files(found, ASIDE), *files(found, PLACE.folder)]
            tail = whole[position + 71 :]
            assert any(tail in content(found, name) for name in names), f"died {way} at {at}"
