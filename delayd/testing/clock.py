"""A clock that a test moves: the same judging as the real one (rule T1), over times that stand still by themselves.

Invariant: nothing moves but by a call of this object, so a test that uses it can't depend on the machine's speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from delayd.machine.clock import ClockEvidence, ClockSources, JudgedClock

START_MS = 1_800_000_000_000  # 2027-01-15 08:00 UTC, the start of an hour.
BOOTTIME_START_MS = 100_000  # Not zero, so that a mix-up of the clocks shows.
MONOTONIC_START_MS = 7_000


@dataclass(slots=True)
class SimMachine:
    """The clocks of one machine; they outlive the servers on it and their `SimClock`s."""

    wall_ms: int = START_MS
    boottime_ms: int = BOOTTIME_START_MS
    monotonic_ms: int = MONOTONIC_START_MS
    boots: int = 1

    def sources(self) -> ClockSources:
        """Read this machine's clocks."""
        return ClockSources(
            wall_ms=lambda: self.wall_ms,
            boottime_ms=lambda: self.boottime_ms,
            monotonic_ms=lambda: self.monotonic_ms,
            boot_id=lambda: f"boot-{self.boots}",
        )

    def advance(self, ms: int) -> None:
        """Let time pass."""
        if ms < 0:
            raise ValueError("time does not pass backwards; use step_wall")
        self.wall_ms += ms
        self.boottime_ms += ms
        self.monotonic_ms += ms

    def suspend(self, ms: int) -> None:
        """Sleep as a laptop does: the monotonic clock stands still meanwhile."""
        self.wall_ms += ms
        self.boottime_ms += ms

    def step_wall(self, ms: int) -> None:
        """Set the wall clock ahead or back."""
        self.wall_ms += ms

    def reboot(self, off_ms: int = 0) -> None:
        """Turn off for ``off_ms`` and on again: another boot id, and times since boot begin anew."""
        self.wall_ms += off_ms
        self.boottime_ms = BOOTTIME_START_MS
        self.monotonic_ms = MONOTONIC_START_MS
        self.boots += 1


class SimClock(JudgedClock):
    """One server's clock on a simulated machine; several may share the machine."""

    def __init__(
        self,
        now_ms: int = START_MS,
        *,
        machine: SimMachine | None = None,
        previous: ClockEvidence | None = None,
    ) -> None:
        self.machine = SimMachine(wall_ms=now_ms) if machine is None else machine
        super().__init__(self.machine.sources(), previous)

    def advance(self, ms: int) -> None:
        """Let time pass, for everyone on the machine."""
        self.machine.advance(ms)

    def step_wall(self, ms: int) -> None:
        """Set the machine's wall clock ahead or back."""
        self.machine.step_wall(ms)

    def restarted(self) -> SimClock:
        """The clock of the same server after a restart, judged by this one's evidence."""
        return SimClock(machine=self.machine, previous=self.restart_evidence())

    def reboot(self, off_ms: int = 0) -> SimClock:
        """Restart the machine; returns the clock that the server then starts with."""
        previous = self.restart_evidence()
        self.machine.reboot(off_ms)
        return SimClock(machine=self.machine, previous=previous)
