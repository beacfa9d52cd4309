"""Clock: the time by which servers fire and stamp: wall time, judged against the time since boot (rule T1).

Invariant: ``now_ms`` is never ahead of the last believed reading plus the time that has passed since. So a wall clock
that jumps ahead fires nothing early; it is believed when it is still ahead 30 s later, or when an operator says so.

An example: 100 s after boot the wall clock stood at 10:00:00 and was believed. 160 s after boot, one minute later, it
shows:

1. 10:01:00, as expected: it is believed.
2. 10:01:04, as after a small step of a time service: 4 s ahead are below JUMP_MS, so it is believed at once.
3. 11:01:00, an hour ahead: ``now_ms`` goes on with 10:01:00, and ``confirmed`` is False. If the clock is still an hour
   ahead at 190 s it is believed then. If it jumps by more than 5 s again before that, the 30 s begin anew.
4. 09:01:00, an hour behind: it is believed at once, because it fires nothing early.
5. The machine was rebooted in between: there is no expected time. ``now_ms`` is the wall clock, but ``confirmed`` is
   False until another machine's clock agrees within 5 s, 30 s have passed, or an operator confirms it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

JUMP_MS = 5_000  # Steps of time services are smaller than this; a larger one counts as a mistake until it has lasted.
GAPS_MAX = 100  # Gaps that are kept to explain late messages; each costs some 40 bytes of the checkpoint file.
STALL_MS = 1_000  # As late as a message has to be for an audit to name it; a shorter stall is not told.
BELIEVED_AFTER_MS = 30_000  # Long enough for a time service to take back a bad step.
# A boot id is a secret of its machine; this many digits of a hash are enough to tell two boots apart.
BOOT_MARK_DIGITS = 16
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

_NS_PER_MS = 1_000_000
stopwatch_ns = time.monotonic_ns
"""For measurements alone: nothing is decided by it, so it is no part of a `Clock`; its zero means nothing."""

log = logging.getLogger(__name__)


class Clock(Protocol):
    """The time as a core uses it."""

    def now_ms(self) -> int:
        """Judged wall time, UTC, ms since the epoch; it follows the wall clock back too."""

    def monotonic_ms(self) -> int:
        """For leases, back-off and timeouts (rule T3); its zero means nothing."""

    def stamp_ms(self) -> int:
        """An instant that may be stamped for good: `now_ms`, but after a reboot, until the clock is confirmed, never
        later than the last reading that was believed before the reboot (rule T4).
        """

    @property
    def confirmed(self) -> bool:
        """Whether the wall clock is believed; nothing irreversible may happen while it is not."""

    @property
    def earlier_until_ms(self) -> int | None:
        """The latest time that an earlier life of this server may have read. None: nobody knows, for the machine was
        rebooted, or its clock was set back while the server was down.
        """


@dataclass(frozen=True, slots=True)
class ClockSources:
    """The sources of the readings; each returns at once."""

    wall_ms: Callable[[], int]
    boottime_ms: Callable[[], int]  # Also counts the time while the machine is suspended, and nobody can set it.
    monotonic_ms: Callable[[], int]
    boot_id: Callable[[], str]


class ClockGap(NamedTuple):
    """A time in which a server did nothing, or doubted its clock, or which its clock showed twice: why a message may
    come late.
    """

    what: str  # STOOD_STILL, IN_DOUBT or SET_BACK.
    from_ms: int  # By the judged clock, as all instants of a server are.
    until_ms: int


STOOD_STILL, IN_DOUBT, SET_BACK = "stood still", "clock in doubt", "clock set back"


@dataclass(frozen=True, slots=True)
class ClockEvidence:
    """One believed reading, kept by a server across its restarts."""

    boot_id: str
    boottime_ms: int
    wall_ms: int
    latest_ms: int = 0  # The latest time that was ever read; later than wall_ms when the clock was set back.
    gaps: tuple[ClockGap, ...] = ()  # The newest GAPS_MAX.


@dataclass(frozen=True, slots=True)
class _Doubt:
    since_boottime_ms: int
    ahead_ms: int  # How far the wall clock was ahead of the anchor's time when the doubt began.
    since_ms: int  # By the judged clock.


class JudgedClock:
    """Judges any sources by rule T1.

    With evidence of the same boot, the clock is compared with it, so a jump while the server was down is noticed. After
    another boot there is nothing to compare with: the clock is used as it is, and stays unconfirmed until `reference`
    agrees or 30 s have passed. Without evidence, at a first start, it is believed.

    ``boot_mark`` tells this boot of this machine from all others, and reveals nothing else about it.
    """

    def __init__(self, sources: ClockSources, previous: ClockEvidence | None = None) -> None:
        self._sources = sources
        self._boot_id = sources.boot_id()
        wall_ms, boottime_ms = sources.wall_ms(), sources.boottime_ms()
        self._anchor = (wall_ms, boottime_ms)
        self._jump: _Doubt | None = None
        self._latest_ms = wall_ms if previous is None else max(previous.latest_ms, previous.wall_ms)
        self.boot_mark = hashlib.sha256(self._boot_id.encode()).hexdigest()[:BOOT_MARK_DIGITS]
        self._booted_at_ms: int | None = None  # Time since boot when this doubt began; None: there is none.
        self._previous: ClockEvidence | None = None  # The evidence from before this boot.
        self.earlier_until_ms: int | None = self._latest_ms
        self._gaps = deque(() if previous is None else previous.gaps, GAPS_MAX)
        if previous is not None:
            expected_ms = previous.wall_ms + boottime_ms - previous.boottime_ms
            same_boot = previous.boot_id == self._boot_id
            known = same_boot and wall_ms >= expected_ms - JUMP_MS
            self.earlier_until_ms = max(expected_ms, self._latest_ms) if known else None
            if previous.boot_id == self._boot_id and previous.boottime_ms <= boottime_ms:
                self._anchor = (previous.wall_ms, previous.boottime_ms)
            else:
                self._booted_at_ms, self._previous = boottime_ms, previous
                log.warning("clock_doubted reason='the machine was restarted' now_ms=%d", wall_ms)

    def now_ms(self) -> int:
        """Read and judge the wall clock."""
        boottime_ms = self._sources.boottime_ms()
        wall_ms = self._sources.wall_ms()
        anchor_wall_ms, anchor_boottime_ms = self._anchor
        expected_ms = anchor_wall_ms + boottime_ms - anchor_boottime_ms
        if wall_ms - expected_ms > JUMP_MS and not self._jump_lasted(wall_ms - expected_ms, boottime_ms):
            wall_ms = expected_ms
        else:
            if self._jump is not None:
                self._end_jump(self._jump, expected_ms, wall_ms)
            if expected_ms - wall_ms > JUMP_MS:
                self._gaps.append(ClockGap(SET_BACK, wall_ms, expected_ms))
                log.warning("clock_set_back by_ms=%d now_ms=%d", expected_ms - wall_ms, wall_ms)
            self._anchor = (wall_ms, boottime_ms)
        if self._booted_at_ms is not None and boottime_ms - self._booted_at_ms >= BELIEVED_AFTER_MS:
            self._believe_boot(wall_ms)
        if wall_ms > self._latest_ms:
            self._latest_ms = wall_ms
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

    def stood_still(self, ms: int) -> None:
        """Note that this server has done nothing for so long until now."""
        if ms >= STALL_MS:
            now_ms = self.now_ms()
            self._gaps.append(ClockGap(STOOD_STILL, now_ms - ms, now_ms))

    @property
    def in_boot_doubt(self) -> bool:
        """Whether the machine was rebooted, and nothing has confirmed the clock since."""
        return self._booted_at_ms is not None

    @property
    def confirmed(self) -> bool:
        """Whether it is believed, by a fresh reading."""
        self.now_ms()
        return self._jump is None and self._booted_at_ms is None

    def trust(self) -> None:
        """Believe the wall clock as it stands, because an operator says so."""
        expected_ms = self.now_ms()
        wall_ms = self._sources.wall_ms()
        self._anchor = (wall_ms, self._sources.boottime_ms())
        if self._jump is not None:
            self._end_jump(self._jump, expected_ms, wall_ms)
        self._believe_boot(wall_ms)

    def reference(self, ms: int, boot_mark: str = "") -> None:
        """Compare with another server's clock, of the boot ``boot_mark``; after a reboot, one within 5 s confirms this
        one.

        A server on this machine reads the same clock, so it agrees however wrong that clock is (rule T4).
        """
        if boot_mark == self.boot_mark:
            return
        wall_ms = self._sources.wall_ms()
        if abs(wall_ms - ms) <= JUMP_MS:
            self._believe_boot(wall_ms)

    def restart_evidence(self) -> ClockEvidence:
        """The evidence for the checkpoint file, to be given as ``previous`` at the next start."""
        # The anchor is kept, not the wall clock: a jump that is in doubt must be in doubt after a restart too.
        now_ms, boottime_ms = self.now_ms(), self._sources.boottime_ms()
        if self._booted_at_ms is not None and self._previous is not None:
            # Otherwise a restart would turn a doubtful reading into a believed one.
            return replace(self._previous, gaps=tuple(self._gaps))
        return ClockEvidence(self._boot_id, boottime_ms, now_ms, self._latest_ms, tuple(self._gaps))

    def _believe_boot(self, now_ms: int) -> None:
        if self._booted_at_ms is None:
            return
        doubted_ms = self._sources.boottime_ms() - self._booted_at_ms
        self._gaps.append(ClockGap(IN_DOUBT, now_ms - doubted_ms, now_ms))
        self._booted_at_ms = None
        log.info("clock_believed now_ms=%d", now_ms)

    def _end_jump(self, doubt: _Doubt, expected_ms: int, wall_ms: int) -> None:
        """The wall clock is believed, where it is now: it stayed there, it was set back, or an operator said so."""
        self._jump = None
        if wall_ms - expected_ms > JUMP_MS:
            # What was due before the clock was set back was handed over in time. What falls due within a jump is late.
            self._gaps.append(ClockGap(IN_DOUBT, doubt.since_ms, wall_ms))
        log.info("clock_believed now_ms=%d", wall_ms)

    def _jump_lasted(self, ahead_ms: int, boottime_ms: int) -> bool:
        doubt = self._jump
        if doubt is None or abs(ahead_ms - doubt.ahead_ms) > JUMP_MS:
            # A clock that jumps again while in doubt starts its 30 s anew.
            log.warning("clock_doubted reason='it was set ahead' by_ms=%d", ahead_ms)
            since_ms = self._sources.wall_ms() - ahead_ms if doubt is None else doubt.since_ms
            self._jump = _Doubt(boottime_ms, ahead_ms, since_ms)
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
