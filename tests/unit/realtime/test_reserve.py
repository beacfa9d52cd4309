"""The reserve of free space: how often the disk is asked for it."""

import pytest

from delayd.errors import DiskReserve
from delayd.testing.clock import SimClock
from delayd.testing.disk import MemoryDisk
from realtime.reserve import PLENTY_BYTES, PLENTY_MS, Reserve

RESERVE_BYTES = 1 << 20


class Counting(MemoryDisk):
    """Counts how often it is asked."""

    asked = 0

    def free_bytes(self, path: str) -> int:
        self.asked += 1
        return super().free_bytes(path)


def test_a_disk_with_plenty_of_space_is_asked_again_after_a_moment_only() -> None:
    disk, clock = Counting(), SimClock()
    disk.capacity_bytes = disk.used_bytes + RESERVE_BYTES + PLENTY_BYTES + 100
    reserve = Reserve(disk, "/", RESERVE_BYTES, clock)
    for _ in range(3):
        reserve.check(100)
    assert disk.asked == 1
    clock.advance(PLENTY_MS)
    disk.capacity_bytes = disk.used_bytes
    with pytest.raises(DiskReserve):
        reserve.check(100)


def test_rule_L8_a_disk_near_its_reserve_is_asked_at_each_frame() -> None:
    disk, clock = Counting(), SimClock()
    disk.capacity_bytes = disk.used_bytes + RESERVE_BYTES + PLENTY_BYTES - 1
    reserve = Reserve(disk, "/", RESERVE_BYTES, clock)
    reserve.check(100)
    reserve.check(100)
    assert disk.asked == 2
    disk.capacity_bytes = disk.used_bytes
    with pytest.raises(DiskReserve):
        reserve.check(100)
