"""The clock that servers fire and stamp by: wall time, judged against the time since boot (rule T1).

Invariant: ``now_ms`` is never ahead of the last believed reading plus the time that has passed since, so a wall clock
that jumps ahead fires nothing early; it is believed when it is still there 30 s later or when an operator says so.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

JUMP_MS = 5_000  # Steps of time services stay below this; a larger one is a mistake until it has lasted.
BELIEVED_AFTER_MS = 30_000  # Long enough for a time service to take back a bad step.
BOOT_MARK_DIGITS = 16  # A boot id is a secret of its machine; so much of a hash tells two of them apart.
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

_NS_PER_MS = 1_000_000


class Clock(Protocol):
    """What a core needs of time."""

    def now_ms(self) -> int:
        """Judged wall time, UTC, ms since the epoch; it follows the wall clock back too."""

    def monotonic_ms(self) -> int:
        """For leases, back-off and timeouts (rule T3); its zero means nothing."""

    def stamp_ms(self) -> int:
        """What may be stamped for good: `now_ms`, but after a boot, until the clock is confirmed, never ahead of the
        last reading that was believed before it (rule T4)."""

    @property
    def confirmed(self) -> bool:
        """False while the wall clock is not yet believed; nothing irreversible rests on it until it is."""


@dataclass(frozen=True, slots=True)
class ClockSources:
    """Where the readings come from; each returns at once."""

    wall_ms: Callable[[], int]
    boottime_ms: Callable[[], int]  # Counts suspended time too, and no one can set it.
    monotonic_ms: Callable[[], int]
    boot_id: Callable[[], str]


@dataclass(frozen=True, slots=True)
class ClockEvidence:
    """One believed reading, kept by a server across its restarts."""

    boot_id: str
    boottime_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class _Doubt:
    since_boottime_ms: int
    ahead_ms: int  # How far the wall clock was ahead of the anchor's time when the doubt began.


class JudgedClock:
    """Rule T1 over any sources.

    With evidence of the same boot the clock is held against it, so a jump while the server was down is noticed. After
    another boot there is nothing to hold it against: it is read as it is and stays unconfirmed until `reference`
    agrees or 30 s have passed. Without evidence, a first start, it is believed.

    ``boot_mark`` tells this boot of this machine from all others, and nothing else of it.
    """

    def __init__(self, sources: ClockSources, previous: ClockEvidence | None = None) -> None:
        self._sources = sources
        self._boot_id = sources.boot_id()
        wall_ms, boottime_ms = sources.wall_ms(), sources.boottime_ms()
        self._anchor = (wall_ms, boottime_ms)
        self._jump: _Doubt | None = None
        self.boot_mark = hashlib.sha256(self._boot_id.encode()).hexdigest()[:BOOT_MARK_DIGITS]
        self._booted_at_ms: int | None = None
        self._previous: ClockEvidence | None = None  # What an earlier boot of this machine left.
        self.in_boot_doubt = False  # Nothing has confirmed the clock since the machine was started.
        if previous is not None:
            if previous.boot_id == self._boot_id and previous.boottime_ms <= boottime_ms:
                self._anchor = (previous.wall_ms, previous.boottime_ms)
            else:
                self._booted_at_ms, self._previous, self.in_boot_doubt = boottime_ms, previous, True

    def now_ms(self) -> int:
        """Read and judge the wall clock."""
        boottime_ms = self._sources.boottime_ms()
        wall_ms = self._sources.wall_ms()
        anchor_wall_ms, anchor_boottime_ms = self._anchor
        expected_ms = anchor_wall_ms + boottime_ms - anchor_boottime_ms
        if self._booted_at_ms is not None and boottime_ms - self._booted_at_ms >= BELIEVED_AFTER_MS:
            self._believe_boot()
        if wall_ms - expected_ms > JUMP_MS and not self._jump_lasted(wall_ms - expected_ms, boottime_ms):
            return expected_ms
        self._jump = None
        self._anchor = (wall_ms, boottime_ms)
        return wall_ms

    def stamp_ms(self) -> int:
        """A reading of `now_ms` that may be stamped."""
        now_ms = self.now_ms()
        if self._booted_at_ms is None or self._previous is None:
            return now_ms
        return min(now_ms, self._previous.wall_ms)

    def monotonic_ms(self) -> int:
        """The sources' monotonic time."""
        return self._sources.monotonic_ms()

    @property
    def confirmed(self) -> bool:
        """Judged by a fresh reading."""
        self.now_ms()
        return self._jump is None and self._booted_at_ms is None

    def trust(self) -> None:
        """Believe the wall clock as it stands: an operator's word."""
        self._anchor = (self._sources.wall_ms(), self._sources.boottime_ms())
        self._jump = None
        self._believe_boot()

    def reference(self, ms: int, boot_mark: str = "") -> None:
        """Hear another server's clock, of the boot ``boot_mark``; after a boot, one within 5 s confirms this one.

        A server on this machine reads the same clock, so it agrees however wrong that is (rule T4).
        """
        if boot_mark == self.boot_mark:
            return
        if self._booted_at_ms is not None and abs(self._sources.wall_ms() - ms) <= JUMP_MS:
            self._believe_boot()

    def restart_evidence(self) -> ClockEvidence:
        """What to keep in the checkpoint file, to be given as ``previous`` at the next start."""
        # The anchor, not the wall clock: a jump that is still in doubt must be in doubt after a restart too.
        now_ms, boottime_ms = self.now_ms(), self._sources.boottime_ms()
        if self._booted_at_ms is not None and self._previous is not None:
            # Or a restart would make a doubtful reading one that was believed.
            return self._previous
        return ClockEvidence(self._boot_id, boottime_ms, now_ms)

    def _believe_boot(self) -> None:
        self._booted_at_ms, self.in_boot_doubt = None, False

    def _jump_lasted(self, ahead_ms: int, boottime_ms: int) -> bool:
        doubt = self._jump
        if doubt is None or abs(ahead_ms - doubt.ahead_ms) > JUMP_MS:
            # A clock that jumps again while in doubt starts its 30 s anew.
            self._jump = _Doubt(boottime_ms, ahead_ms)
            return False
        return boottime_ms - doubt.since_boottime_ms >= BELIEVED_AFTER_MS


class SystemClock(JudgedClock):
    """This machine's clocks, judged."""

    def __init__(self, previous: ClockEvidence | None = None) -> None:
        super().__init__(ClockSources(_wall_ms, _boottime_ms, _monotonic_ms, _boot_id), previous)


def _wall_ms() -> int:
    return time.time_ns() // _NS_PER_MS


def _boottime_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _NS_PER_MS


def _monotonic_ms() -> int:
    return time.monotonic_ns() // _NS_PER_MS


def _boot_id() -> str:
    with open(BOOT_ID_PATH, encoding="ascii") as file:
        return file.read().strip()
