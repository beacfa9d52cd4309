"""One run of a simulated cluster from one seed: steps by chance, faults among them, then a healing and the books.

Invariant: the seed decides everything, so a failing seed fails again, with the same trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from delayd.testing.clock import START_MS
from delayd.testing.disk import CAPACITY_BYTES, Crash
from tests.delay_harness import Wanted
from tests.simulation.cluster import DEATHS, HOUR_MS, SUBJECTS, Cluster
from tests.simulation.realtime_side import RealtimeSide

STEPS = 160
CHECK_EVERY = 16  # Steps between two readings of all files.
TRACE_LINES = 400


class Run:
    """One seed; `run` raises AssertionError with the trace when a promise is broken."""

    def __init__(self, seed: int, steps: int = STEPS) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self._random = Random(seed)
        self._steps = steps
        self._messages = 0
        self.cluster = Cluster(self._random, self.tell)

    def tell(self, line: str) -> None:
        """Add a line to the trace."""
        self.trace.append(line)

    def run(self) -> Counter[str]:
        """Take all steps, heal, and compare the books; the steps by kind."""
        try:
            for number in range(self._steps):
                self._step(number)
                if number % CHECK_EVERY == 0:
                    self.cluster.check()
            self.tell("no more faults")
            self.cluster.drain()
            self.cluster.check_end()
        except Exception as error:
            shown = "\n".join(self.trace[-TRACE_LINES:])
            raise AssertionError(f"seed {self.seed}: {type(error).__name__}: {error}\n{shown}") from error
        return self.counts

    def _step(self, number: int) -> None:
        moves = self.cluster.moves()
        self.cluster.network.forget_ended()
        at_ms = self.cluster.machine.wall_ms - START_MS
        if moves and self._random.random() < 0.75:
            move = self._random.choice(moves)
            self._do("move", f"{number:4} {at_ms:8} {move.what}", move.do)
            return
        kinds = self._kinds()
        kind = self._random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        name = kind.__name__.removeprefix("_")
        self._do(name, f"{number:4} {at_ms:8} {name}", kind)

    def _do(self, kind: str, line: str, step: Callable[[], None]) -> None:
        self.counts[kind] += 1
        self.tell(line)
        try:
            step()
        except Crash as crash:
            self.tell(f"     dies at {crash}")
        self.cluster.bury()

    def _kinds(self) -> list[tuple[int, Callable[[], None]]]:
        kinds: list[tuple[int, Callable[[], None]]] = [
            (30, self._consume),
            (12, self._advance),
            (25, self._calm),
            (4, self._step_wall),
            (5, self._checkpoint_realtime),
            (6, self._cut),
            (5, self._realtime_down_or_up),
            (3, self._realtime_dies_soon),
            (2, self._realtime_stops),
            (3, self._fill_realtime_disk),
            (3, self._router_down_or_up),
            (3, self._move_realtime),
            (6, self._router_learns),
            (4, self._reroute),
            (8, self._hold),
            (12, self._release),
            (4, self._stall_and_cut),
        ]
        if not self.cluster.delay_up:
            return [*kinds, (30, self._delay_starts)]
        return [
            *kinds,
            (30, self._send),
            (6, self._send_again),
            (12, self._wake),
            (5, self._checkpoint_delay),
            (4, self._sweep),
            (4, self._delay_dies),
            (4, self._delay_dies_soon),
            (2, self._delay_stops),
            (3, self._fill_delay_disk),
        ]

    # Producers and consumers.

    def _send(self) -> None:
        world = self.cluster.world
        rows: list[Wanted] = []
        for _ in range(self._random.choice((1, 1, 3, 7))):
            self._messages += 1
            ahead = self._random.choice((-HOUR_MS, -500, 0, 300, 1_500, 4_000, 9_000))
            due = world.clock.now_ms() + ahead + self._random.randint(0, 400)
            rows.append((due, self._random.choice(SUBJECTS), b"message %d" % self._messages))
        world.send(rows)

    def _send_again(self) -> None:
        known = [*self.cluster.world.outside.unanswered, *self.cluster.world.outside.accepted]
        if known:
            self.cluster.world.send_again(self._random.choice(known))

    def _consume(self) -> None:
        self._random.choice(self.cluster.consumers).step()

    # Time.

    def _wake(self) -> None:
        self.cluster.world.core.wake()

    def _advance(self) -> None:
        self.cluster.advance(self._random.choice((1, 60, 500, 1_500)))

    def _calm(self) -> None:
        self.cluster.calm(self._random.choice((30, 300, 1_200)))

    def _step_wall(self) -> None:
        hours = (-HOUR_MS, HOUR_MS) if self._random.random() < 0.1 else ()
        self.cluster.machine.step_wall(self._random.choice((-3_000, -400, 400, 3_000, 60_000, *hours)))

    # Housekeeping.

    def _checkpoint_delay(self) -> None:
        self.cluster.world.core.checkpoint(_nothing)

    def _checkpoint_realtime(self) -> None:
        self._side().checkpoint()

    def _sweep(self) -> None:
        self.cluster.world.core.sweep()

    # Faults.

    def _cut(self) -> None:
        """Break the lines to a server; what is under way on some of them is late."""
        for line in self.cluster.network.cut(self._side().life):
            if self._random.random() < 0.5:
                self.cluster.held.add(f"{line.name} up")

    def _stall_and_cut(self) -> None:
        """A realtime server's disk stands still, and later its connections break, or at once."""
        side = self._side()
        stalled = f"{side.name} runs a commit"
        if stalled in self.cluster.held or self._random.random() < 0.3:
            self.cluster.network.cut(side.life)
        self.cluster.held.add(stalled)

    def _delay_dies(self) -> None:
        self.cluster.delay_dies(self._random.choice(DEATHS))

    def _delay_dies_soon(self) -> None:
        disk = self.cluster.world.disk
        disk.faults.crash_at = len(disk.operations) + self._random.randint(1, 12)

    def _delay_stops(self) -> None:
        stopped = self.cluster.delay_stops(self._random.choice(DEATHS))
        self.tell(f"     {'stopped' if stopped else 'did not stop in time'}")

    def _delay_starts(self) -> None:
        self.cluster.delay_starts(faults=True)

    def _realtime_down_or_up(self) -> None:
        side = self._side()
        if side.life is None:
            self.cluster.side_starts(side, faults=True)
        else:
            self.tell(f"     {side.name} dies")
            side.die(self._random.choice(DEATHS), self._random.randrange(1 << 16))

    def _realtime_dies_soon(self) -> None:
        side = self._side()
        if side.life is not None:
            side.disk.faults.crash_at = len(side.disk.operations) + self._random.randint(1, 12)

    def _realtime_stops(self) -> None:
        side = self._side()
        stopped = side.stop(self._random.choice(DEATHS), self._random.randrange(1 << 16))
        self.tell(f"     {side.name} {'stopped' if stopped else 'is down'}")

    def _fill_delay_disk(self) -> None:
        disk = self.cluster.world.disk
        self.cluster.delay_filled = True
        full = disk.capacity_bytes < CAPACITY_BYTES
        disk.capacity_bytes = CAPACITY_BYTES if full else disk.used_bytes + self._random.randint(0, 3_000)

    def _fill_realtime_disk(self) -> None:
        disk = self._side().disk
        full = disk.capacity_bytes < CAPACITY_BYTES
        disk.capacity_bytes = CAPACITY_BYTES if full else disk.used_bytes + self._random.randint(0, 3_000)

    def _hold(self) -> None:
        self.tell(f"     {self.cluster.hold()}")

    def _release(self) -> None:
        if self.cluster.held:
            self.cluster.held.remove(self._random.choice(sorted(self.cluster.held)))

    def _router_down_or_up(self) -> None:
        self.cluster.router.up = not self.cluster.router.up

    def _router_learns(self) -> None:
        self.cluster.tell_router()

    def _reroute(self) -> None:
        """Meta gives a subject to any of the realtime servers; who has noted its target stays with it."""
        subject = self._random.choice(SUBJECTS)
        self.cluster.router.routes[subject] = self._side().log_id

    def _move_realtime(self) -> None:
        """The realtime servers change places, or one moves to a new one; the router hears of it later."""
        first, second = self.cluster.sides
        self.cluster.network.listeners.clear()
        if self._random.random() < 0.5:
            first.place, second.place = second.place, first.place
        else:
            self._side().place = f"place-{self._random.randrange(1 << 16)}"
        first.listen()
        second.listen()

    def _side(self) -> RealtimeSide:
        return self._random.choice(self.cluster.sides)


def _nothing(offset: int) -> None:
    """Nobody waits for this checkpoint."""
