"""A cluster on one seed and one virtual clock: a delay server, two realtime servers, producers, consumers, a network.

Invariant: nothing happens by itself, and the same calls in the same order give the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from delayd.errors import DiskFull
from delayd.testing.clock import START_MS, SimMachine
from delayd.testing.disk import CAPACITY_BYTES, Crash
from delayd.testing.tree import PowerLoss
from tests.delay_harness import TARGET_IDS, Remains, new_world
from tests.simulation.consumer import Consumer, GroupBooks
from tests.simulation.delay_side import NAME, DelayLife, Router, remains_after
from tests.simulation.moves import Move
from tests.simulation.network import Network
from tests.simulation.realtime_side import RealtimeSide, settings_of

SUBJECTS = (b"orders.eu", b"orders.us", b"mail")
CONSUMERS_A_GROUP = 2
HOUR_MS = 3_600_000
BEFORE_HOUR_MS = 5_000  # A run begins so long before the end of an hour, so that most runs pass it.
START_TRIES = 50
DRAIN_MS = 240_000  # A clock that was set ahead is believed after half a minute, one that was set back makes rows wait.
DRAIN_STEP_MS = 500
DEATHS = (None, None, None, *PowerLoss)  # SIGKILL is the commonest one.


class Cluster:
    """All servers and whoever uses them; `tell` takes lines for the trace."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self.random = random
        self.network = Network(Random(random.randrange(1 << 30)))
        self.router = Router()
        self._tell = tell
        remains = new_world(TARGET_IDS, START_MS + HOUR_MS - BEFORE_HOUR_MS)
        self.machine: SimMachine = remains.outside.machine
        self._delay_settings = {
            "frame_rows_max": random.choice((1, 3, 8_000)),
            "frames_in_flight_max": random.choice((1, 2, 4)),
            "checkpoint_every_ms": random.choice((300, 2_000, 60_000)),
            "segment_bytes": random.choice((4_096, 65_536)),
            "load_ahead_ms": random.choice((500, 4_000)),
            "tail_bytes": random.choice((0, 65_536)),
            "target_silence_ms_max": random.choice((500, 2_000, 10_000)),  # Lines stand still at times.
        }
        self.sides = [RealtimeSide(log_id, self.machine, self.network, settings_of(random)) for log_id in TARGET_IDS]
        for side in self.sides:
            side.start()
        self.tell_router()
        self.router.routes = {subject: random.choice(TARGET_IDS) for subject in SUBJECTS}
        self.held: set[str] = set()  # Beginnings of what moves are called that do not happen now.
        self.delay_up = True
        self.delay_filled = False
        self.world = self._delay_life(remains)
        self.books: list[GroupBooks] = []
        self.consumers: list[Consumer] = []
        for side in self.sides:
            for subject in SUBJECTS:
                self._add_group(side, subject.decode())

    # Time and steps.

    def moves(self) -> list[Move]:
        """Everything that could happen next without time passing."""
        found = self.world.own_moves() if self.delay_up else []
        for side in self.sides:
            found.extend(side.moves())
        found.extend(self.network.moves())
        if self.held:
            found = [move for move in found if not move.what.startswith(tuple(self.held))]
        return found

    def hold(self) -> str:
        """Let a thread or one direction of a line stand still until `held` is emptied."""
        threads = [f"{NAME} runs a {job}" for job in ("commit", "outcomes", "worker")]
        for side in self.sides:
            threads.extend(f"{side.name} runs a {job}" for job in ("commit", "pull", "work"))
        ways = [f"{line.name} {way}" for line in self.network.lines for way in ("up", "down")]
        self.held.add(self.random.choice(ways if ways and self.random.random() < 0.5 else threads))
        return ", ".join(sorted(self.held))

    def calm(self, ms: int) -> None:
        """Let time pass with everything done at each instant."""
        if self.delay_up:
            self.world.pass_ms(ms)
            return
        self._rest()
        self.machine.advance(ms)
        self._rest()

    def advance(self, ms: int) -> None:
        """Let time pass; only the delay server notices."""
        self.machine.advance(ms)
        if self.delay_up:
            self.world.look_around()
            self.world.core.wake()

    def _rest(self) -> None:
        while moves := self.moves():
            moves[0].do()

    def tell_router(self) -> None:
        """The router learns where everybody listens."""
        self.router.told = {side.log_id: side.place for side in self.sides}

    # Lives.

    def delay_dies(self, way: PowerLoss | None) -> None:
        """The delay server is gone; what it sent may arrive all the same."""
        self.network.process_died(self.world)
        self._remains = self.world.next_remains(way, self.random.randrange(1 << 16))
        self.delay_up = False

    def delay_stops(self, way: PowerLoss | None) -> bool:
        """Stop it cleanly, then lose power; whether it called back."""
        try:
            stopped = self.world.stop()
        except Crash:
            # A realtime server may die meanwhile, and nobody goes on with a server that was told to stop.
            self.delay_dies(way)
            raise
        if stopped:
            self.world.core.close()
        self.delay_dies(way)
        return stopped

    def delay_starts(self, *, faults: bool) -> None:
        """The next life; with ``faults`` it may die while it recovers, and is started again."""
        remains = self._remains
        for _ in range(START_TRIES):
            if faults and self.random.random() < 0.3:
                remains.disk.faults.crash_at = self.random.randint(1, 12)
            try:
                self.world = self._delay_life(remains)
            except Crash as crash:
                self._tell(f"{NAME} dies in its start: {crash}")
                remains = remains_after(remains, self.random.choice(DEATHS), self.random.randrange(1 << 16))
            except DiskFull as full:
                self._tell(f"{NAME} does not start: {full}")
                remains = remains_after(remains, None, 0)
                remains.disk.capacity_bytes = CAPACITY_BYTES
            else:
                self.delay_up = True
                self._tell(f"{NAME} starts: epoch {self.world.core.identity.epoch}")
                return
        raise AssertionError(f"{NAME} does not start in {START_TRIES} tries")

    def side_starts(self, side: RealtimeSide, *, faults: bool) -> None:
        """The next life of a realtime server."""
        for _ in range(START_TRIES):
            if faults and self.random.random() < 0.3:
                side.disk.faults.crash_at = self.random.randint(1, 12)
            try:
                side.start()
            except Crash as crash:
                self._tell(f"{side.name} dies in its start: {crash}")
                side.die(self.random.choice(DEATHS), self.random.randrange(1 << 16))
            except DiskFull as full:
                self._tell(f"{side.name} does not start: {full}")
                side.die(None, 0)
                side.disk.capacity_bytes = CAPACITY_BYTES
            else:
                assert side.life is not None
                self._tell(f"{side.name} starts: epoch {side.life.core.epoch}")
                return
        raise AssertionError(f"{side.name} does not start in {START_TRIES} tries")

    def bury(self) -> None:
        """Whoever's disk has crashed, or who stopped by itself, is dead."""
        if self.delay_up and self.world.disk.crashed:
            self.delay_dies(self.random.choice(DEATHS))
        for side in self.sides:
            if side.life is not None and (side.disk.crashed or side.life.failure is not None):
                side.die(self.random.choice(DEATHS), self.random.randrange(1 << 16))

    def _delay_life(self, remains: Remains) -> DelayLife:
        seed = self.random.randrange(1 << 16)
        return DelayLife(
            remains, self.network, self.router, lambda: [move.do for move in self.moves()], seed, self._delay_settings
        )

    def _add_group(self, side: RealtimeSide, subject: str) -> None:
        books = GroupBooks()
        self.books.append(books)
        for number in range(CONSUMERS_A_GROUP):
            name = f"{side.name}-{subject}-{number}"
            self.consumers.append(Consumer(name, side, subject, books, self.network, self.random))

    # The end.

    def drain(self) -> None:
        """No more faults: start who is down, and let time pass until everything due has been delivered."""
        self.held.clear()
        for side in self.sides:
            side.disk.faults.crash_at, side.disk.capacity_bytes = None, CAPACITY_BYTES
            if side.life is None:
                self.side_starts(side, faults=False)
        if not self.delay_up:
            self.delay_starts(faults=False)
        world = self.world
        world.disk.faults.crash_at, world.disk.capacity_bytes = None, CAPACITY_BYTES
        if self.delay_filled:
            # A file that could not be created was closed and removed as it was.
            world.disk.closed_unsynced.clear()
        self.router.up = True
        self.tell_router()
        world._repeat_sends()
        end = self.machine.monotonic_ms + DRAIN_MS
        while (missing := self.missing()) and self.machine.monotonic_ms < end:
            # A clock that was set back an hour makes rows wait as long: nobody has to live through it step by step.
            due_ms = world.core.next_due_ms()
            if due_ms is None:
                # Perhaps it is in an hour that is not loaded yet.
                sent = [sent for sent, _ in world.outside.accepted.values()]
                due_ms = min(due for batch in sent for due, _, body in batch.wanted if body in missing)
            idle_ms = max(0, due_ms - world.clock.now_ms() - 3_000)
            self.machine.advance(idle_ms)
            end += idle_ms
            self.calm(DRAIN_STEP_MS)
        end = self.machine.monotonic_ms + DRAIN_MS
        while (self.undelivered() or self.unacknowledged()) and self.machine.monotonic_ms < end:
            for consumer in self.consumers:
                consumer.drain()
            self.calm(DRAIN_STEP_MS)
        self.calm(2 * DRAIN_STEP_MS)

    # Books.

    def missing(self) -> set[bytes]:
        """Bodies of accepted messages that no realtime server's files have."""
        self.read_logs()
        return self.world.missing()

    def undelivered(self) -> set[bytes]:
        """Bodies that are in a realtime server's files and were never given to a consumer of their group."""
        self.read_logs()
        held = {body for target in self.world.outside.targets.values() for kept in target.log for body in kept.bodies}
        return held - {body for books in self.books for body in books.given.values()}

    def unacknowledged(self) -> list[str]:
        """Groups that have not got everything acknowledged."""
        return [
            f"{side.name} {group.subject.name}: {group.oldest} of {group.subject.end}"
            for side in self.sides
            if side.life is not None
            for group in side.life.core._pulls.groups.values()
            if group.oldest < group.subject.end
        ]

    def read_logs(self) -> None:
        """Take the realtime servers' files as they are into the books."""
        for side in self.sides:
            if not side.disk.crashed:
                self.world.outside.targets[side.log_id].log = side.log()

    def check(self) -> None:
        """What holds at every instant."""
        self.read_logs()
        self.world.check_logs()
        if self.delay_up and not any(side.disk.crashed for side in self.sides):
            self._check_outcomes()

    def check_end(self) -> None:
        """What holds when all is quiet and everything has been delivered."""
        self.read_logs()
        self.world.check_books()
        undelivered = self.undelivered()
        assert not undelivered, f"never given to a consumer: {sorted(undelivered)}"
        unacknowledged = self.unacknowledged()
        assert not unacknowledged, f"groups with messages that nobody can acknowledge: {unacknowledged}"

    def _check_outcomes(self) -> None:
        """Each outcome that is told names a row that its target's files have, exactly there."""
        held = {
            sequence: (kept.part.hour, log_id, kept.offset, kept.part.batch_id)
            for log_id, target in self.world.outside.targets.items()
            for kept in target.log
            for sequence in kept.sequences
        }
        for sequence, told in self.world.outcomes().items():
            assert held.get(sequence) == told, (
                f"the dispatch log has {sequence} at {told}, it is at {held.get(sequence)}"
            )
