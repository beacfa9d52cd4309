"""Scenarios of disks and time: deaths in a row, failed syncs, outages, hours that end, messages that get old.

Invariant: each is a chain that the rules of docs/rules.md name; it heals no more than it needs to begin.
"""

from __future__ import annotations

from delayd.testing.disk import Crash, MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.simulation.cluster import DEATHS, HOUR_MS, LOSSES
from tests.simulation.delay_side import NAME
from tests.simulation.lies import lie
from tests.simulation.parts import Parts
from tests.simulation.steps import DAY_MS, Kinds

GROUPS_MAX = 14
LONG_BYTES = 1_200  # A few such messages fill a small segment.


class DiskScenarios(Parts):
    """Two deaths, a failed sync and a power loss, an outage of minutes or days, an hour's end."""

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        kinds: Kinds = [(6, self.realtime_dies_twice), (5, self.old_messages), (4, self.realtime_sync_fails_then_power)]
        if not self.cluster.delay_up:
            return [*kinds, (4, self.delay_is_off)]
        return [
            *kinds,
            (8, self.delay_dies_twice),
            (4, self.delay_sync_fails_then_power),
            (3, self.long_outage),
            (5, self.hour_passes),
            (4, self.hour_passes_late_outcomes),
            (6, self.job_stands_still),
            (2, self.delay_goes_off),
        ]

    def delay_dies_twice(self) -> None:
        """The delay server dies, and again soon after, each time with one of its threads behind (rules H1, H4, L1)."""
        cluster = self.cluster
        for _ in range(2):
            stalled = self.stall(NAME)
            self.some_work()
            if not cluster.delay_up:
                return
            self.moves(self.random.choice((0, 4, 12)))
            cluster.held.discard(stalled)
            self.delay_dies_and_starts()
        self.some_work()

    def realtime_dies_twice(self) -> None:
        """A realtime server dies, and again soon after, each time with one of its threads behind (rules H3, L1, Q1)."""
        cluster, side = self.cluster, self.steps.side()
        for _ in range(2):
            stalled = self.stall(side.name)
            self.some_work()
            for _ in range(self.random.choice((0, 2, 5))):
                self.steps.consume()
                self.moves(4)
            if self.chance(0.5):
                side.checkpoint()
            cluster.calm(self.random.choice((1, 60, 400)))
            cluster.held.discard(stalled)
            self.realtime_dies_and_starts(side)
        cluster.calm(400)

    def delay_sync_fails_then_power(self) -> None:
        """The delay server stops at a failed fsync, is started again, and then loses power (rule L1)."""
        cluster = self.cluster
        disk = cluster.world.disk
        disk.faults.fail_sync_at = disk.syncs + self.random.randint(1, 4)
        try:
            self.some_work()
        except Crash as crash:
            self.tell(f"     dies at {crash}")
        failure = cluster.world.failure
        if failure is None:
            return
        cluster.delay_dies(cluster.death_after(failure, (None,)))
        self._fail_in_the_start(cluster.remains.disk)
        cluster.delay_starts(faults=False)
        cluster.calm(self.random.choice((1, 60)))
        cluster.delay_dies(PowerLoss.ALL_LOST)
        cluster.delay_starts(faults=False)
        cluster.calm(60)

    def realtime_sync_fails_then_power(self) -> None:
        """A realtime server stops at a failed fsync, is started again, and then loses power (rule L1)."""
        cluster, side = self.cluster, self.steps.side()
        side.disk.faults.fail_sync_at = side.disk.syncs + self.random.randint(1, 4)
        self.some_work()
        self.steps.consume()
        cluster.calm(60)
        if side.life is None or side.life.failure is None:
            return
        side.die(cluster.death_after(side.life.failure, (None,)), 0)
        self._fail_in_the_start(side.disk)
        cluster.side_starts(side, faults=False)
        cluster.calm(self.random.choice((60, 400)))
        side.die(PowerLoss.ALL_LOST, 0)
        cluster.side_starts(side, faults=False)
        cluster.calm(60)

    def _fail_in_the_start(self, disk: MemoryDisk) -> None:
        """Mostly have the disk fail while what was found is written back: then the start fails, and is tried again."""
        if self.chance(0.3):
            disk.faults.fail_write_at = disk.writes + self.random.randint(1, 4)
        elif self.chance(0.5):
            disk.faults.fail_sync_at = disk.syncs + self.random.randint(1, 4)

    def long_outage(self) -> None:
        """The realtime servers are away for minutes, and meanwhile segments would be old enough to go (rule P6)."""
        cluster = self.cluster
        cluster.bury()
        up = [side for side in cluster.sides if side.life is not None]
        for side in up:
            side.die(None, 0)
        for _ in range(3):
            self.steps.send_rows((-1_000, 400_000), more_bytes=LONG_BYTES)
            cluster.calm(1)
        self.steps.checkpoint_delay()
        cluster.calm(60)
        cluster.advance(310_000)
        for _ in range(2):
            self.steps.checkpoint_delay()
            cluster.calm(60)
            cluster.world.sweep()
        cluster.calm(60)
        for side in up:
            cluster.side_starts(side, faults=False)
        cluster.calm(2_500)

    def old_messages(self) -> None:
        """Messages get old enough to go, acknowledged or not, and groups begin meanwhile (rule Q3)."""
        cluster, side = self.cluster, self.steps.side()
        stalled = f"{NAME} runs a outcomes"
        if self.chance(0.4):
            cluster.hold(stalled)
        if side.life is None:
            cluster.side_starts(side, faults=False)
        cluster.tell_router()
        for _ in range(4):
            if cluster.delay_up:
                self.steps.send_rows((-1_000,), more_bytes=LONG_BYTES)
            cluster.calm(self.random.choice((60, 1_200)))
            self.steps.consume()
        consumers = [each for each in cluster.consumers if each.books.log_id == side.log_id]
        for _ in range(self.random.choice((0, 1, 3, 3))):
            for consumer in consumers:
                consumer.drain()
            cluster.calm(60)
        if len(cluster.books) < GROUPS_MAX:
            subject = self.random.choice([kept.subject for kept in side.log()] or cluster.subjects)
            consumers = cluster.add_group(side, subject, f"late-{len(cluster.books)}")
            for consumer in consumers:
                consumer.pull_if_connected()
        cluster.advance(12_000)
        cluster.calm(1)
        side.retain()
        for _ in range(6):
            self.moves(2)
            self.random.choice(consumers).pull_if_connected()
        cluster.calm(60)
        if self.chance(0.3):
            self.realtime_dies_and_starts(side)
        cluster.held.discard(stalled)
        cluster.calm(60)

    def hour_passes(self) -> None:
        """Hours end, and are sealed and removed (rules P5, S1)."""
        cluster = self.cluster
        self.steps.send()
        cluster.calm(400)
        for _ in range(self.random.choice((1, 2))):
            into_ms = cluster.machine.wall_ms % HOUR_MS
            cluster.advance(max(0, HOUR_MS - into_ms + self.random.choice((-200, 0, 100, 2_000))))
            self.some_work()
            cluster.calm(1_200)
            if not cluster.delay_up:
                return
            # A seal, a mark and a removal each need a sweep, and a mark is published before files go.
            for _ in range(self.random.choice((1, 3))):
                self.steps.checkpoint_delay()
                cluster.calm(60)
                if self.chance(0.5):
                    lie(cluster)
                self.steps.sweep()
                self.moves(self.random.choice((2, 12)))
        if self.chance(0.3):
            cluster.calm(1)
            cluster.step_wall(-HOUR_MS)
            self.steps.send()
            cluster.calm(60)

    def hour_passes_late_outcomes(self) -> None:
        """Rows of an hour that ended are delivered while it is compared, and power is lost meanwhile (rule S1)."""
        cluster = self.cluster
        self.steps.send_due()
        cluster.calm(60)
        cluster.bury()
        for side in cluster.sides:
            if side.life is not None:
                side.die(None, 0)
        self.steps.send_due()
        cluster.calm(60)
        cluster.advance(HOUR_MS - cluster.machine.wall_ms % HOUR_MS + 1_000)
        cluster.calm(60)
        if not cluster.delay_up:
            return
        self.steps.checkpoint_delay()
        cluster.calm(60)
        for side in cluster.sides:
            cluster.side_starts(side, faults=False)
        cluster.tell_router()
        cluster.hold(f"{NAME} runs a worker")
        cluster.world.server.sweep()
        cluster.rest()
        cluster.advance(self.random.choice((60, 2_500)))
        stalled = f"{NAME} runs a outcomes"
        self.stop_within(cluster.world, stalled, "write /data/delay/dispatch")
        cluster.held.discard(f"{NAME} runs a worker")
        cluster.world.swept = True
        if self.chance(0.3):
            cluster.calm(1)
        else:
            # A checkpoint behind the comparison would sync the whole file system.
            self.moves(self.random.choice((3, 12)))
        if self.chance(0.7):
            cluster.held.discard(stalled)
            cluster.delay_dies(self.random.choice(LOSSES))
            cluster.delay_starts(faults=False)
        cluster.held.discard(stalled)
        cluster.calm(60)

    def job_stands_still(self) -> None:
        """A thread of some server stands still within a job while all else goes on, and mostly dies there."""
        cluster = self.cluster
        side = self.steps.side()
        if self.chance(0.7):
            self.steps.send_due()
        if self.chance(0.4):
            self.steps.checkpoint_delay()
        if self.chance(0.4):
            side.checkpoint()
        if self.chance(0.3):
            cluster.world.server.sweep()
            cluster.world.swept = True
        life = cluster.world if side.life is None or self.chance(0.6) else side.life
        owner = NAME if life is cluster.world else side.name
        stalled = self.random.choice([each for each in cluster.threads() if each.startswith(owner)])
        self.stop_within(life, stalled)
        for _ in range(self.random.choice((1, 3))):
            self.some_work()
            self.steps.consume()
            self.moves(12)
        if not cluster.delay_up:
            return
        if self.chance(0.6):
            cluster.held.discard(stalled)
            if owner == NAME:
                self.delay_dies_and_starts()
            else:
                self.realtime_dies_and_starts(side)
        cluster.held.discard(stalled)
        cluster.calm(self.random.choice((1, 60)))

    def delay_goes_off(self) -> None:
        """The delay server is off for hours or days, and messages become due meanwhile."""
        self.steps.send_rows((4_000, HOUR_MS, 3 * HOUR_MS, DAY_MS))
        self.moves(12)
        if self.chance(0.5):
            self.cluster.delay_stops(self.random.choice(DEATHS))
        else:
            self.cluster.delay_dies(self.random.choice(DEATHS))
        self.delay_is_off()

    def delay_is_off(self) -> None:
        """Time passes while it is down."""
        off_ms = self.random.choice((10_000, HOUR_MS, 3 * HOUR_MS, 3 * DAY_MS))
        self.tell(f"     for {off_ms} ms")
        self.cluster.calm(off_ms)
        self.cluster.delay_starts(faults=True)
        self.cluster.calm(self.random.choice((1, 400)))
