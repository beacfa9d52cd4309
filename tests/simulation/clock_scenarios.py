"""Scenarios of a machine that boots with a wrong clock, which is put right before anybody has confirmed it (rule T4).

Invariant: in the end the clock shows what it would have shown without the scenario.
"""

from __future__ import annotations

from tests.simulation.cluster import HOUR_MS, LOSSES
from tests.simulation.parts import Parts
from tests.simulation.steps import DAY_MS, Kinds
from tests.simulation.wall import JUMP_MS

WRONG_MS = (-60 * DAY_MS, -2 * HOUR_MS, 2 * HOUR_MS, 60 * DAY_MS)
DOUBTED_MS = 25_000  # A clock is believed half a minute after a boot.


class ClockScenarios(Parts):
    """All servers of a cluster are on one machine here."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        return [(4, self.clock_is_wrong_at_boot)] if self.cluster.delay_up else []

    def clock_is_wrong_at_boot(self) -> None:
        """The machine loses power, and its clock is wrong when it is on again; messages come meanwhile."""
        cluster = self.cluster
        self.steps.send()
        self.moves(12)
        wrong_ms = self.random.choice(WRONG_MS)
        self.tell(f"     the machine boots with a clock that is {wrong_ms} ms ahead")
        cluster.boot(self.random.choice(LOSSES), wrong_ms)
        hours = self._hours()
        appended_at_ms = cluster.world.server.appended_at_ms
        try:
            for _ in range(self.random.choice((1, 3))):
                # By the right time: they are sent by programs that know it.
                self.steps.send_rows(tuple(ahead_ms - wrong_ms for ahead_ms in (-1_000, 4_000, 9_000)))
                cluster.calm(self.random.choice((60, 1_200)))
                cluster.world.sweep()
                cluster.calm(60)
            assert self._hours() == hours, "hours are sealed or removed by a clock that nobody has confirmed"
            cluster.advance(self.random.choice((60, DOUBTED_MS // 2)))
            right_ms = max(appended_at_ms, cluster.machine.wall_ms - wrong_ms)
            ahead_ms = cluster.world.server.appended_at_ms - right_ms
            assert ahead_ms <= JUMP_MS, f"a clock that nobody has confirmed stamps messages {ahead_ms} ms ahead"
        finally:
            cluster.step_wall(-wrong_ms)
        self.steps.send_rows((-1_000, 4_000, 9_000))
        cluster.calm(self.random.choice((400, 2_500)))
        if self.chance(0.7):
            # What was filed is found where it was filed.
            self.steps.checkpoint_delay()
            cluster.calm(400)
            self.delay_dies_and_starts()
            self.steps.send_rows((-1_000, 4_000, 9_000))
            self.steps.checkpoint_delay()
            cluster.calm(400)
            self.delay_dies_and_starts()

    def _hours(self) -> list[tuple[int, int]]:
        """Hours that are sealed or removed, with their flags."""
        rows = self.cluster.delay_hours().rows
        return [(int(row["hour"]), int(row["flags"])) for row in rows if row["flags"]]
