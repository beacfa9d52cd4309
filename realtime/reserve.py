"""Reserve: the free space that a realtime server does not fill with messages that are handed over (rule L8).

A frame that is refused for this reason was never appended (rule H6), so the delay server waits and sends it again.
"""

import logging

from delayd.errors import DiskReserve
from delayd.machine.clock import Clock
from delayd.machine.disk import Disk

PLENTY_BYTES = 1 << 30  # This much above the reserve is several times what all frames within PLENTY_MS can hold.
PLENTY_MS = 100  # For this long a disk with plenty of space is not asked again: each question is a system call.

log = logging.getLogger(__name__)


class Reserve:
    """Compares free space with the reserve at each frame, unless there was plenty a moment ago. A change is logged."""

    def __init__(self, disk: Disk, folder: str, reserve_bytes: int, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._plenty_until_ms = 0
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._reached = False

    @property
    def free_bytes(self) -> int:
        """What the disk has free now."""
        return self._disk.free_bytes(self._folder)

    @property
    def reached(self) -> bool:
        """Whether nothing is taken now."""
        return self.free_bytes < self._reserve_bytes

    def check(self, size_bytes: int) -> None:
        """Raise DiskReserve when ``size_bytes`` more do not fit above it."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._plenty_until_ms:
            return
        free_bytes = self._disk.free_bytes(self._folder)
        if free_bytes >= self._reserve_bytes + size_bytes + PLENTY_BYTES:
            self._plenty_until_ms = now_ms + PLENTY_MS
        reached = free_bytes < self._reserve_bytes + size_bytes
        if reached != self._reached:
            self._reached = reached
            level, taken = (logging.WARNING, "none") if reached else (logging.INFO, "all")
            log.log(level, "dispatch_taken which=%s free_bytes=%d", taken, free_bytes)
        if reached:
            raise DiskReserve(
                f"free space of {self._folder} is at its reserve of {self._reserve_bytes} bytes; "
                "free some or move the directory to a larger disk"
            )
