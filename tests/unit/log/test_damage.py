"""A flipped bit anywhere in a small log: either it is named, or it was in the undurable tail and is cut.

Each byte of the file and one bit of it at a time; what each byte is, the group's own lengths tell.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from delayd.errors import DamagedData, DataError
from delayd.log.group import GroupKind, NewGroup
from delayd.log.log import LogPlace, open_log
from delayd.log.segment import FILE_HEADER_BYTES, FileKind
from delayd.testing.disk import MemoryDisk, Misread
from tests.batches import messages

PLACE = LogPlace("/data", FileKind.MESSAGE, 77)
PATH = f"/data/{0:020}.log"


@dataclass(frozen=True)
class Small:
    """A log of four groups; all but the last are named durable by the last."""

    disk: MemoryDisk
    ends: list[int]
    size: int

    @property
    def durable(self) -> int:
        return self.ends[-2]


def group(number: int, batches: int) -> NewGroup:
    data = [messages([b"body %d" % number, b"x"]) for _ in range(batches)]
    kind = GroupKind.DATA if batches else GroupKind.TICK
    return NewGroup(kind, data, 3, 1_000 + number, number, 2 * batches)


@pytest.fixture(scope="module")
def small() -> Small:
    disk = MemoryDisk()
    log = open_log(disk, PLACE, 5)
    ends = []
    for number, batches in enumerate((1, 3, 0, 2)):
        log.append([group(number, batches)], 5)
        log.flush()
        ends.append(log.end)
    log.close()
    return Small(disk.after_crash(), ends, FILE_HEADER_BYTES + ends[-1])


def with_flip(small: Small, position: int, bit: int) -> MemoryDisk:
    disk = small.disk.after_crash()
    file = disk.open(PATH, write=True)
    file.pwritev([bytes([file.pread(1, position)[0] ^ (1 << bit)])], position)
    file.sync()
    file.close()
    return disk


def is_padding(small: Small, position: int) -> bool:
    """Whether the byte is one of the zeros behind a group's table, which no checksum covers."""
    file = small.disk.open(PATH)
    start = FILE_HEADER_BYTES
    for end in small.ends:
        batch_count = int.from_bytes(file.pread(4, start + 12), "little")
        table_end = start + 80 + 4 * batch_count
        if table_end <= position < start + 80 + (4 * batch_count + 7) // 8 * 8:
            return True
        start = FILE_HEADER_BYTES + end
    return False


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_rule_L5_a_flipped_bit_is_damage_below_the_durable_offset_and_a_torn_tail_above(
    small: Small, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = {"damage": 0, "torn": 0, "padding": 0}
    for position in range(FILE_HEADER_BYTES, small.size):
        disk = with_flip(small, position, bit)
        offset = position - FILE_HEADER_BYTES
        group_start = max([0, *(end for end in small.ends if end <= offset)])
        try:
            log = open_log(disk, PLACE, 5)
        except DamagedData as error:
            assert offset < small.durable, f"byte {position} was not durable"
            assert (error.path, error.position) == (PATH, FILE_HEADER_BYTES + group_start)
            found["damage"] += 1
            continue
        if is_padding(small, position):
            assert log.end == small.ends[-1]
            found["padding"] += 1
        else:
            assert offset >= small.durable, f"byte {position} was durable and nothing was said"
            assert log.end == small.durable
            assert f"tail_recovered path={PATH} cut_bytes={small.ends[-1] - small.durable} " in caplog.text
            caplog.clear()
            found["torn"] += 1
        log.close()
    # Four bytes behind each table with an odd number of batches: the first group's and the second's.
    assert found["padding"] == 8
    assert found["damage"] == small.durable - 8
    assert found["torn"] == small.ends[-1] - small.durable


@pytest.mark.parametrize("reads", range(1, 9))
def test_rule_L5_a_read_that_is_wrong_once_makes_no_torn_tail_of_a_damaged_group(small: Small, reads: int) -> None:
    # In the last group but one: only the header of the last one names it as durable.
    disk, damaged = with_flip(small, FILE_HEADER_BYTES + small.ends[1] + 8, 3), 0
    for bit in range(0, 8 * small.size, 61):
        disk.faults.misreads[PATH] = Misread(reads, bit)
        with pytest.raises(DamagedData):
            open_log(disk, PLACE, 5)
        damaged += PATH not in disk.faults.misreads
        assert disk.open(PATH).size() == small.size
    assert damaged or reads > 6, "the read happens"


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_in_the_file_header_is_named(small: Small, bit: int) -> None:
    for position in range(FILE_HEADER_BYTES):
        with pytest.raises(DataError) as caught:
            open_log(with_flip(small, position, bit), PLACE, 5)
        assert caught.value.path == PATH


def test_rule_L5_every_byte_is_damage_for_a_caller_that_knows_the_end_was_durable(small: Small) -> None:
    for position in range(FILE_HEADER_BYTES + small.ends[1], small.size):
        disk = with_flip(small, position, 1)
        log = open_log(small.disk.after_crash(), PLACE, 5)
        groups = list(log.scan(0, log.end))
        if is_padding(small, position):
            continue
        with pytest.raises(DamagedData):
            scanned = open_log(disk, PLACE, 5, groups[1].end, groups[1].header.header_crc32c)
            list(scanned.scan(groups[1].end, small.ends[-1], groups[1].header.header_crc32c))


def test_a_log_cut_anywhere_below_its_checkpoint_is_damage(small: Small) -> None:
    log = open_log(small.disk.after_crash(), PLACE, 5)
    crc32c = log.crc32c
    for size in range(FILE_HEADER_BYTES, small.size):
        disk = small.disk.after_crash()
        file = disk.open(PATH, write=True)
        file.truncate(size)
        with pytest.raises(DamagedData, match="bytes early"):
            open_log(disk, PLACE, 5, small.ends[-1], crc32c)
