"""Single steps of a run: what producers, consumers, time and faults do, one thing each, drawn by weight.

Invariant: a step draws everything from the run's own chance, and leaves the healing to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from delayd.testing.disk import CAPACITY_BYTES
from tests.simulation.cluster import DEATHS, HOUR_MS, Cluster
from tests.simulation.realtime_side import RealtimeSide
from tests.worlds.delay import Wanted
from tests.worlds.delay_adapter import RequestWish

DAY_MS = 24 * HOUR_MS
KEPT_MS = (0, 1, 400, 3_000, HOUR_MS)  # For so long after it is due a message is worth something; 0: for ever.
Kinds = list[tuple[int, Callable[[], None]]]
"""Steps with their weights."""


class Steps:
    """The steps of one run."""

    def __init__(
        self, cluster: Cluster, random: Random, tell: Callable[[str], None], expiries: Random | None = None
    ) -> None:
        """``expiries`` draws when messages expire, apart from all else; without it none does."""
        self._expiries = expiries
        self._cluster = cluster
        self._random = random
        self._tell = tell
        self._messages = 0

    def kinds(self) -> Kinds:
        """What may be drawn now."""
        kinds: Kinds = [
            (30, self.consume),
            (12, self.advance),
            (25, self.calm),
            (4, self.step_wall),
            (5, self.checkpoint_realtime),
            (3, self.retain_realtime),
            (6, self.cut),
            (5, self.realtime_down_or_up),
            (3, self.realtime_dies_soon),
            (2, self.realtime_stops),
            (2, self.realtime_sync_fails),
            (3, self.fill_realtime_disk),
            (3, self.consumer_dies),
            (3, self.router_down_or_up),
            (3, self.move_realtime),
            (6, self.router_learns),
            (4, self.reroute),
            (8, self.hold),
            (12, self.release),
            (4, self.stall_and_cut),
        ]
        if not self._cluster.delay_up:
            return [*kinds, (30, self.delay_starts)]
        return [
            *kinds,
            (30, self.send),
            (6, self.send_again),
            (6, self.cancel),
            (12, self.wake),
            (5, self.checkpoint_delay),
            (4, self.sweep),
            (4, self.delay_dies),
            (4, self.delay_dies_soon),
            (2, self.delay_stops),
            (2, self.delay_sync_fails),
            (3, self.fill_delay_disk),
        ]

    # Producers and consumers.

    def send(self) -> None:
        """Send some messages, due about now or soon."""
        self.send_rows((-HOUR_MS, -500, 0, 300, 1_500, 4_000, 9_000))

    def send_due(self) -> None:
        """Send some messages that are due already."""
        self.send_rows((-1_000,))

    def send_rows(self, ahead_ms: tuple[int, ...], subjects: list[bytes] | None = None, more_bytes: int = 0) -> None:
        """Send messages so far ahead, whose bodies may be long; from then on every one of them counts."""
        rows = [self.message(ahead_ms, subjects, more_bytes) for _ in range(self._random.choice((1, 1, 3, 6)))]
        expires = None
        if self._expiries is not None and self._expiries.random() < 0.5:
            kept_ms = self._expiries.choices(KEPT_MS, k=len(rows))
            expires = [row[0] + kept if kept else 0 for row, kept in zip(rows, kept_ms, strict=True)]
        self._cluster.world.send(rows, expires=expires)

    def message(self, ahead_ms: tuple[int, ...], subjects: list[bytes] | None = None, more_bytes: int = 0) -> Wanted:
        """A message that is due so far ahead."""
        self._messages += 1
        due = self._cluster.world.clock.now_ms() + self._random.choice(ahead_ms) + self._random.randint(0, 400)
        subject = self._random.choice(subjects or self._cluster.subjects)
        return due, subject, b"message %d" % self._messages + b"." * more_bytes

    def send_each(self, dues_ms: list[int]) -> None:
        """Send one batch with a message for each of these instants."""
        rows: list[Wanted] = []
        for due_ms in dues_ms:
            self._messages += 1
            rows.append((due_ms, self._random.choice(self._cluster.subjects), b"message %d" % self._messages))
        self._cluster.world.send(rows)

    def send_again(self) -> None:
        """Send a batch as it was sent before."""
        known = [*self._cluster.world.outside.unanswered, *self._cluster.world.outside.accepted]
        if known:
            self._cluster.world.send_again(self._random.choice(known))

    def cancel(self) -> None:
        """Want some messages cancelled by their receipts."""
        asked = self._cluster.world.some_receipts(self._random)
        if asked is not None:
            self._cluster.callers.ask(RequestWish.CANCEL, asked)

    def consume(self) -> None:
        """A step of some consumer."""
        self._random.choice(self._cluster.consumers).step()

    def consumer_dies(self) -> None:
        """Lose a consumer with what it holds: only the lease gives that back."""
        self._random.choice(self._cluster.consumers).die()

    # Time.

    def wake(self) -> None:
        """Wake the delay server."""
        self._cluster.world.server.wake()

    def advance(self) -> None:
        """Let time pass at once."""
        self._cluster.advance(self._random.choice((1, 60, 500, 1_500)))

    def calm(self) -> None:
        """Let time pass, with everything done."""
        self._cluster.calm(self._random.choice((30, 300, 1_200)))

    def step_wall(self) -> None:
        """Set the wall clock."""
        kind = self._random.random()
        if kind < 0.85:
            choices: tuple[int, ...] = (-3_000, -1_000, -400, 400, 1_000, 3_000, 60_000)
        else:
            choices = (-HOUR_MS, HOUR_MS) if kind < 0.95 else (-DAY_MS, DAY_MS)
        self._cluster.step_wall(self._random.choice(choices))

    # Housekeeping.

    def checkpoint_delay(self) -> None:
        """Ask for a checkpoint."""
        self._cluster.world.server.checkpoint(_nothing)

    def checkpoint_realtime(self) -> None:
        """Ask for a checkpoint."""
        self.side().checkpoint()

    def retain_realtime(self) -> None:
        """Ask for the removal of what is old."""
        self.side().retain()

    def sweep(self) -> None:
        """Seal hours, and remove old ones."""
        self._cluster.world.sweep()

    # Faults of the network.

    def cut(self) -> None:
        """Break the lines to a server; what is under way on some of them is late."""
        for line in self._cluster.network.cut(self.side().life):
            if self._random.random() < 0.5:
                self._cluster.hold(f"{line.name} up")

    def stall_and_cut(self) -> None:
        """A realtime server's disk stands still, and later its connections break, or at once."""
        side = self.side()
        stalled = f"{side.name} runs a commit"
        if stalled in self._cluster.held or self._random.random() < 0.3:
            self._cluster.network.cut(side.life)
        self._cluster.hold(stalled)

    def hold(self) -> None:
        """Let something stand still."""
        ways = [f"{line.name} {way}" for line in self._cluster.network.lines for way in ("up", "down")]
        self._cluster.hold(
            self._random.choice(ways if ways and self._random.random() < 0.5 else self._cluster.threads())
        )
        self._tell(f"     {', '.join(sorted(self._cluster.held))}")

    def release(self) -> None:
        """Let something go on that stands still."""
        if self._cluster.held:
            self._cluster.held.remove(self._random.choice(sorted(self._cluster.held)))

    def router_down_or_up(self) -> None:
        """Meta answers, or has nobody to name."""
        self._cluster.router.up = not self._cluster.router.up

    def router_learns(self) -> None:
        """Meta hears where everybody listens."""
        self._cluster.tell_router()

    def reroute(self) -> None:
        """Meta gives a subject to any of the realtime servers; who has noted its target stays with it."""
        self._cluster.router.routes[self._random.choice(self._cluster.subjects)] = self.side().log_id

    def move_realtime(self) -> None:
        """The realtime servers change places, or one moves to a new one; the router hears of it later."""
        if self._random.random() < 0.5:
            self.swap()
        else:
            self.side().move(f"place-{self._random.randrange(1 << 16)}")

    def swap(self) -> None:
        """The realtime servers change places."""
        first, second = self._cluster.sides
        places = second.place, first.place
        for side, place in zip((first, second), places, strict=True):
            side.move(place)

    # Deaths and disks.

    def delay_dies(self) -> None:
        """Kill it."""
        self._cluster.delay_dies(self._random.choice(DEATHS))

    def delay_dies_soon(self) -> None:
        """Kill it at one of its next operations."""
        disk = self._cluster.world.disk
        disk.faults.crash_at = len(disk.operations) + self._random.randint(1, 12)

    def delay_stops(self) -> None:
        """Stop it cleanly."""
        stopped = self._cluster.delay_stops(self._random.choice(DEATHS))
        self._tell(f"     {'stopped' if stopped else 'did not stop in time'}")

    def delay_sync_fails(self) -> None:
        """Have a sync or a write of it fail soon: it stops by itself."""
        faults, disk = self._cluster.world.disk.faults, self._cluster.world.disk
        if self._random.random() < 0.7:
            faults.fail_sync_at = disk.syncs + self._random.randint(1, 6)
        else:
            faults.fail_write_at = disk.writes + self._random.randint(1, 6)

    def delay_starts(self) -> None:
        """Start it; it may die again meanwhile."""
        self._cluster.delay_starts(faults=True)

    def realtime_down_or_up(self) -> None:
        """Kill a realtime server, or start it."""
        side = self.side()
        if side.life is None:
            self._cluster.side_starts(side, faults=True)
        else:
            self._tell(f"     {side.name} dies")
            side.die(self._random.choice(DEATHS), self._random.randrange(1 << 16))

    def realtime_dies_soon(self) -> None:
        """Kill one at one of its next operations."""
        side = self.side()
        if side.life is not None:
            side.disk.faults.crash_at = len(side.disk.operations) + self._random.randint(1, 12)

    def realtime_stops(self) -> None:
        """Stop one cleanly."""
        side = self.side()
        stopped = side.stop(self._random.choice(DEATHS), self._random.randrange(1 << 16))
        self._tell(f"     {side.name} {'stopped' if stopped else 'is down'}")

    def realtime_sync_fails(self) -> None:
        """Have a sync or a write of one fail soon: it stops by itself."""
        disk = self.side().disk
        if self._random.random() < 0.7:
            disk.faults.fail_sync_at = disk.syncs + self._random.randint(1, 6)
        else:
            disk.faults.fail_write_at = disk.writes + self._random.randint(1, 6)

    def fill_delay_disk(self) -> None:
        """Its disk is full soon, or has space again."""
        disk = self._cluster.world.disk
        self._cluster.delay_filled = True
        full = disk.capacity_bytes < CAPACITY_BYTES
        disk.capacity_bytes = CAPACITY_BYTES if full else disk.used_bytes + self._random.randint(0, 3_000)

    def fill_realtime_disk(self) -> None:
        """The disk of one is full soon, or has space again."""
        disk = self.side().disk
        full = disk.capacity_bytes < CAPACITY_BYTES
        disk.capacity_bytes = CAPACITY_BYTES if full else disk.used_bytes + self._random.randint(0, 3_000)

    def side(self) -> RealtimeSide:
        """One of the realtime servers."""
        return self._random.choice(self._cluster.sides)


def _nothing(offset: int) -> None:
    """Nobody waits for this checkpoint."""
