"""A flipped bit or a cut in a log is named, or was in the undurable tail; an operator gives up the rest (rule L5)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import pytest

from delayd.errors import DamagedData, DataError
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import Log, LogPlace, open_log
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.log.tail import find_damage, give_up
from delayd.testing.disk import Crash, MemoryDisk, Misread
from delayd.testing.tree import PowerLoss
from tests.batches import messages
from tests.memory_files import content, files, put

PLACE = LogPlace("/data", FileKind.MESSAGE, 77)
PATH = f"/data/{0:020}.log"
BITS = pytest.mark.parametrize("bit", [0, 3, 7])


class Small(NamedTuple):
    """A log of four groups; all but the last are named durable by the last. Bytes that no checksum covers."""

    disk: MemoryDisk
    ends: list[int]
    whole: bytes
    padding: set[int]


@pytest.fixture(scope="module")
def small() -> Small:
    disk, ends, padding = MemoryDisk(), list[int](), set[int]()
    log = open_log(disk, PLACE, 5)
    for number, batches in enumerate((1, 3, 0, 2)):
        data = [messages([b"body %d" % number, b"x"]) for _ in range(batches)]
        kind = GroupKind.DATA if batches else GroupKind.TICK
        table = FILE_HEADER_BYTES + log.end + 80 + 4 * batches
        padding |= {*range(table, (table + 7) // 8 * 8)}
        log.append([NewGroup(kind, data, 3, 1_000 + number, number, 2 * batches)], 5)
        log.flush()
        ends.append(log.end)
    log.close()
    return Small(disk.after_crash(), ends, content(disk, PATH), padding)


def with_flip(small: Small, position: int, bit: int) -> MemoryDisk:
    disk = small.disk.after_crash()
    put(disk, PATH, small.whole[:position] + bytes([small.whole[position] ^ (1 << bit)]) + small.whole[position + 1 :])
    return disk


@BITS
def test_rule_L5_a_flipped_bit_is_damage_below_the_durable_offset_and_a_torn_tail_above(
    small: Small, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    durable, end = small.ends[-2:]
    assert len(small.padding) == 8, "behind each table with an odd number of batches: the first's and the second's"
    for position in range(len(small.whole)):
        disk, offset = with_flip(small, position, bit), position - FILE_HEADER_BYTES
        start = max([0, *(end for end in small.ends if end <= offset)])
        if position in small.padding:
            assert open_log(disk, PLACE, 5).end == end
        elif offset >= durable:
            assert open_log(disk, PLACE, 5).end == durable
            assert f"tail_recovered path={PATH} cut_bytes={end - durable} " in caplog.text
            caplog.clear()
        else:
            with pytest.raises(DataError) as caught:
                open_log(disk, PLACE, 5)
            assert caught.value.path == PATH
            assert offset < 0 or getattr(caught.value, "position", 0) == FILE_HEADER_BYTES + start


def test_rule_L5_every_byte_and_every_cut_is_damage_for_a_caller_that_knows_the_end_was_durable(small: Small) -> None:
    log = open_log(small.disk.after_crash(), PLACE, 5)
    second = list(log.scan(0, log.end))[1]
    for position in range(FILE_HEADER_BYTES + small.ends[1], len(small.whole)):
        if position not in small.padding:
            with pytest.raises(DamagedData):
                again = open_log(with_flip(small, position, 1), PLACE, 5, second.end, second.header.header_crc32c)
                list(again.scan(second.end, small.ends[-1], second.header.header_crc32c))
    for size in range(FILE_HEADER_BYTES, len(small.whole)):
        disk = small.disk.after_crash()
        put(disk, PATH, small.whole[:size])
        with pytest.raises(DamagedData, match="bytes early"):
            open_log(disk, PLACE, 5, small.ends[-1], log.crc32c)


@pytest.mark.parametrize("reads", range(1, 9))
def test_rule_L5_a_read_that_is_wrong_once_makes_no_torn_tail_of_a_damaged_group(small: Small, reads: int) -> None:
    # In the last group but one: only the header of the last one names it as durable.
    disk, damaged = with_flip(small, FILE_HEADER_BYTES + small.ends[1] + 8, 3), 0
    for bit in range(0, 8 * len(small.whole), 61):
        disk.faults.misreads[PATH] = Misread(reads, bit)
        with pytest.raises(DamagedData):
            open_log(disk, PLACE, 5)
        damaged += PATH not in disk.faults.misreads
        assert disk.open(PATH).size() == len(small.whole)
    assert damaged or reads > 6, "the read happens"


# The damaged end of a log is given up by an operator's word: its server starts with what is good.

LONG = LogPlace("/data/message", FileKind.REALTIME, 7, segment_bytes=900)
ASIDE = "/data/quarantine"
WORD = [NewGroup(GroupKind.CONTROL, [], 2, 500, 9_000)]
Harm = Callable[[MemoryDisk, str, int], None]


def logged(start_at: int) -> tuple[MemoryDisk, int, int, list[int]]:
    """A log of twelve groups; where and with which checksum the checkpoint ends, and where each group begins."""
    disk = MemoryDisk()
    log = open_log(disk, LONG, 5)
    start, crc32c, offsets = 0, 0, []
    for number in range(12):
        if number == start_at:
            start, crc32c = log.end, log.crc32c
        batch = messages([bytes([number]) * 200])
        offsets += log.append([NewGroup(GroupKind.DATA, [batch], 1, 100 + number, number, 1)], 5)
        log.flush()
    log.close()
    return disk, start, crc32c, offsets


def numbers(log: Log, start: int) -> list[int]:
    return [group.header.base_sequence for group in log.scan(start, log.durable)]


def place_of(disk: MemoryDisk, offset: int) -> tuple[str, int]:
    """The file that holds a group, and a byte of the group."""
    path = [path for path in files(disk, LONG.folder) if int(path[-24:-4]) <= offset][-1]
    return path, offset - int(path[-24:-4]) + 64 + 70


def flip(disk: MemoryDisk, path: str, position: int) -> None:
    whole = content(disk, path)
    put(disk, path, whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])


def cut(disk: MemoryDisk, path: str, position: int) -> None:
    put(disk, path, content(disk, path)[:position])


def gone(disk: MemoryDisk, path: str, position: int) -> None:
    disk.remove(path)
    disk.sync_folder(LONG.folder)


def header(disk: MemoryDisk, path: str, position: int) -> None:
    flip(disk, path, 20)


@pytest.mark.parametrize("checkpoint", [0, 4, 9])
@pytest.mark.parametrize("at", [4, 7, 9])
@pytest.mark.parametrize("harm", [flip, cut, gone, header])
def test_a_log_goes_on_behind_its_last_good_group(checkpoint: int, at: int, harm: Harm) -> None:
    disk, start, crc32c, offsets = logged(checkpoint)
    harm(disk, *place_of(disk, offsets[at]))
    damage = find_damage(disk, LONG, start, crc32c, 6)
    if damage is None:
        open_log(disk.after_crash(), LONG, 6, start, crc32c, leave_out=True).close()
        return
    with pytest.raises(DamagedData):
        open_log(disk.after_crash(), LONG, 6, start, crc32c, leave_out=True)
    if harm is header:
        assert damage.good_until > offsets[-1] and not damage.lost_bytes, "its groups say themselves where they belong"
    else:
        assert start <= damage.good_until <= max(start, offsets[at])
    good = [number for number, offset in enumerate(offsets) if start <= offset < damage.good_until]
    assert damage.next_sequence == (good[-1] + 1 if good else 0)
    assert all(disk.exists(each) for each in give_up(disk, LONG, damage, ASIDE, 6, WORD))
    after = disk.after_crash()
    log = open_log(after, LONG, 7, start, crc32c, leave_out=True)
    assert numbers(log, start) == [*good, 9_000]
    log.append([NewGroup(GroupKind.DATA, [messages([b"new"])], 2, 501, 9_001, 1)], 7)
    log.flush()
    assert numbers(open_log(after.after_crash(), LONG, 8, start, crc32c, leave_out=True), start)[-2:] == [9_000, 9_001]


@pytest.mark.parametrize("way", [None, PowerLoss.ALL_LOST, PowerLoss.REORDERED])
@pytest.mark.parametrize("checkpoint", [0, 4, 5])
@pytest.mark.parametrize("harm", [flip, gone])
def test_a_crash_while_a_log_is_given_up_loses_no_good_group_and_no_word(
    harm: Harm, checkpoint: int, way: PowerLoss | None
) -> None:
    for at in count(1):
        disk, start, crc32c, offsets = logged(checkpoint)
        path, position = place_of(disk, offsets[7])
        tail = content(disk, path)[position + 1 :]
        harm(disk, path, position)
        damage = find_damage(disk, LONG, start, crc32c, 6)
        assert damage is not None
        good = [number for number, offset in enumerate(offsets) if start <= offset < damage.good_until]
        disk.faults.crash_at = len(disk.operations) + at
        try:
            give_up(disk, LONG, damage, ASIDE, 6, WORD)
            return
        except Crash:
            found = disk.after_kill() if way is None else disk.after_crash(way, at)
        if (left := find_damage(found, LONG, start, crc32c, 7)) is not None:
            give_up(found, LONG, left, ASIDE, 7, WORD)
        found = found.after_crash()
        kept = numbers(open_log(found, LONG, 8, start, crc32c, leave_out=True), start)
        assert kept[: len(good)] == good and set(kept[len(good) :]) == {9_000}, f"died {way} at {at}"
        if harm is flip:
            # Nothing is removed: what was damaged is where it was, or aside.
            found.make_folder(ASIDE)
            paths = [*files(found, ASIDE), *files(found, LONG.folder)]
            assert any(tail in content(found, path) for path in paths), f"died {way} at {at}"
