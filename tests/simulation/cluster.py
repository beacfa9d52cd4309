"""A cluster on one seed and one virtual clock: a delay server, two realtime servers, producers, consumers, a network.

Invariant: nothing happens by itself, and the same calls in the same order give the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from delayd.config import YEAR_MS
from delayd.errors import DamagedData, DiskFull, ServerStopped, SyncFailed
from delayd.testing.clock import START_MS, SimClock, SimMachine
from delayd.testing.disk import CAPACITY_BYTES, READ_FAILED, Crash, Faults, MemoryDisk
from delayd.testing.tree import PowerLoss
from tests.simulation.books import DelayBooks
from tests.simulation.callers import Callers
from tests.simulation.checks import Checks
from tests.simulation.consumer import Consumer, GroupBooks
from tests.simulation.damage import Damages
from tests.simulation.delay_side import NAME, DelayLife, Router, remains_after
from tests.simulation.delay_side import THREADS as DELAY_THREADS
from tests.simulation.moves import Move, Threads
from tests.simulation.network import Network
from tests.simulation.realtime_side import THREADS as REALTIME_THREADS
from tests.simulation.realtime_side import RealtimeSide
from tests.simulation.wall import WallBound
from tests.worlds.delay import TARGET_IDS, Remains, new_world
from tests.worlds.delay_adapter import HourTable, hours_of

SUBJECTS = (b"orders.eu", b"orders.us", b"mail")
CONSUMERS_A_GROUP = 2
HOUR_MS = 3_600_000
BEFORE_HOUR_MS = 5_000  # A run begins this long before the end of an hour, so that most runs pass it.
START_TRIES = 50
NAMES_LOST = (PowerLoss.ALL_LOST, PowerLoss.ENTRIES_LOST)
LOSSES = tuple(way for way in PowerLoss if way is not PowerLoss.ALL_KEPT)
DEATHS: tuple[PowerLoss | None, ...] = (None, None, None, *PowerLoss)  # SIGKILL is the commonest one.


class Cluster:
    """All servers and whoever uses them; `tell` takes lines for the trace."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self.random = random
        self.network = Network(Random(random.randrange(1 << 30)))
        self.router = Router()
        self._tell = tell
        remains = new_world(TARGET_IDS, START_MS + HOUR_MS - BEFORE_HOUR_MS)
        self.machine: SimMachine = remains.outside.machine
        self.wall = WallBound(self.machine)
        self._delay_settings = {
            "frame_rows_max": random.choice((1, 3, 8_000, 8_000)),
            "frames_in_flight_max": random.choice((1, 2, 4)),
            "checkpoint_every_ms": random.choice((500, 2_000, 60_000)),
            "segment_bytes": random.choice((4_096, 65_536)),
            "load_ahead_ms": random.choice((500, 4_000)),
            "tail_bytes": random.choice((0, 65_536)),
            "target_silence_ms_max": random.choice((500, 2_000, 10_000)),  # Lines stand still at times.
            "retention_hours": random.choice((1, 72)),
            "group_bytes_max": 1 << 14,
            "intake_queue_bytes_max": 1 << 16,
            "producer_keep_ms": YEAR_MS,  # This producer goes on with a batch for days.
        }
        self.sides = [RealtimeSide(log_id, self.machine, self.network, random) for log_id in TARGET_IDS]
        for side in self.sides:
            side.start()
        self.tell_router()
        self.held: set[str] = set()  # Beginnings of what moves are called that do not happen now.
        self.damaged = False  # Whether some file ever read as other than what was written.
        self.mixed = False  # Whether what happens in calm times does so in any order.
        self.delay_up = True
        self.delay_damages = Damages()
        self.delay_filled = False
        self.delay_books: DelayBooks | None = None
        self.world = self._delay_life(remains)
        self.books: list[GroupBooks] = []
        self.consumers: list[Consumer] = []
        self.subjects: list[bytes] = []
        for subject in SUBJECTS:
            self.add_subject(subject)
        self.checks = Checks(self)
        self.callers = Callers(self)

    # Time and steps.

    def moves(self) -> list[Move]:
        """Everything that could happen next without time passing."""
        held = tuple(self.held)
        return [move for move in self._all_moves() if not (held and move.what.startswith(held))]

    def next_move(self) -> Move | None:
        """The first of all moves, or any one while they are mixed."""
        if self.mixed and (moves := self.moves()):
            return self.random.choice(moves)
        if not self.held:
            return next(self._all_moves(), None)
        held = tuple(self.held)
        for move in self._all_moves():
            if not move.what.startswith(held):
                return move
        return None

    def _all_moves(self) -> Iterator[Move]:
        """Those of what stands still among them."""
        if self.delay_up:
            yield from self.world.own_moves()
        for side in self.sides:
            if side.life is not None:
                yield from side.life.moves()
        yield from self.network.moves()

    def hold(self, *what: str) -> None:
        """Let a thread or one direction of a line stand still until `held` is emptied."""
        self.held.update(what)

    def threads(self) -> list[str]:
        """Beginnings of what the work of each thread is called."""
        found = [f"{NAME} runs a {job}" for job in DELAY_THREADS]
        for side in self.sides:
            found.extend(f"{side.name} runs a {job}" for job in REALTIME_THREADS)
        return found

    def lives(self) -> list[Threads]:
        """The threads of each server that is up."""
        found = [self.world.own] if self.delay_up else []
        return found + [side.life.own for side in self.sides if side.life is not None]

    def calm(self, ms: int) -> None:
        """Let time pass with everything done at each instant."""
        if self.delay_up:
            self.world.pass_ms(ms)
            self.wall.look(heard=True)
            return
        self.rest()
        self.machine.advance(ms)
        self.rest()

    def advance(self, ms: int) -> None:
        """Let time pass; only the delay server notices."""
        self.machine.advance(ms)
        if self.delay_up:
            self.world.look_around()
            self.world.server.wake()
            self.wall.look(heard=True)

    def rest(self) -> None:
        """Do all that happens without time passing, and without the delay server's clock being looked at."""
        while move := self.next_move():
            move.do()

    def step_wall(self, ms: int) -> None:
        """Set the wall clock of everybody."""
        self.wall.look()
        self.machine.step_wall(ms)
        self.wall.look()

    def tell_router(self) -> None:
        """The router learns where everybody listens."""
        self.router.told = {side.log_id: side.place for side in self.sides}

    def add_subject(self, subject: bytes) -> None:
        """Have a subject, whose realtime server is drawn, and groups of it at both of them."""
        self.subjects.append(subject)
        self.router.routes[subject] = self.random.choice(TARGET_IDS)
        for side in self.sides:
            self.add_group(side, subject, "group")

    def add_group(self, side: RealtimeSide, subject: bytes, group: str) -> list[Consumer]:
        """Have consumers of one more group, which begins when one of them pulls."""
        books = GroupBooks(side.log_id, subject, group)
        self.books.append(books)
        name = f"{side.name}-{subject.decode()}-{group}"
        names = [f"{name}-{number}" for number in range(CONSUMERS_A_GROUP)]
        new = [Consumer(name, side, books, self.network, self.random) for name in names]
        self.consumers.extend(new)
        return new

    # Damage.

    def delay_hours(self) -> HourTable:
        """The hours that the delay server's state names."""
        return hours_of((self.world if self.delay_up else self.remains).state)

    def hidden_hours(self) -> frozenset[int]:
        """The hours whose logs at the delay server could not be read as they were written, at some time so far."""
        return self.delay_damages.hidden_hours(self._delay_disk)

    def mend(self) -> None:
        """Put all files back as they were."""
        self.delay_damages.mend(self._delay_disk)
        for side in self.sides:
            side.damages.mend(side.disk)

    @property
    def _delay_disk(self) -> MemoryDisk:
        return self.world.disk if self.delay_up else self.remains.disk

    # Lives.

    def delay_dies(self, way: PowerLoss | None) -> None:
        """The delay server is gone; what it sent may arrive all the same."""
        self.network.process_died(self.world)
        self.remains = self.world.next_remains(way, self.random.randrange(1 << 16))
        self.delay_up = False

    def delay_stops(self, way: PowerLoss | None) -> bool:
        """Stop it cleanly, then lose power; whether it called back."""
        try:
            stopped = self.world.stop()
        except Crash:
            # A realtime server may die meanwhile, and nobody goes on with a server that was told to stop.
            self.delay_dies(self.death_after(self.world.failure, (way,)))
            raise
        if stopped:
            self.world.server.close()
        self.delay_dies(way)
        return stopped

    def delay_starts(self, *, faults: bool) -> None:
        """The next life; with ``faults`` it may die while it recovers, and is started again."""
        remains = self.remains
        for _ in range(START_TRIES):
            if faults:
                self._plan_faults(remains.disk)
            try:
                self.world = self._delay_life(remains)
            except (Crash, ServerStopped, OSError) as death:
                self._tell(f"{NAME} dies in its start: {death}")
                remains = remains_after(remains, self.death_after(death), self.random.randrange(1 << 16))
            except DamagedData as damage:
                assert self.damaged, f"{NAME} finds damage that nobody did: {damage}"
                self._tell(f"{NAME} does not start: {damage}")
                remains = remains_after(remains, None, 0)
                self.delay_damages.mend(remains.disk)
            except DiskFull as full:
                self._tell(f"{NAME} does not start: {full}")
                remains = remains_after(remains, None, 0)
                remains.disk.capacity_bytes = CAPACITY_BYTES
            else:
                self.delay_up = True
                self._tell(f"{NAME} starts: epoch {self.world.server.epoch}")
                return
        raise AssertionError(f"{NAME} does not start in {START_TRIES} tries")

    def boot(self, way: PowerLoss, ahead_ms: int) -> None:
        """The machine loses power and is on again, with a wall clock that is so far ahead; all servers start."""
        for side in self.sides:
            side.die(way, self.random.randrange(1 << 16))
        self.delay_dies(way)
        known = [side.clock.restart_evidence() for side in self.sides]
        delay_known = self.remains.clock.restart_evidence()
        self.machine.boots += 1
        self.step_wall(ahead_ms)
        for side, evidence in zip(self.sides, known, strict=True):
            side.clock = SimClock(machine=self.machine, previous=evidence)
            self.side_starts(side, faults=False)
        self.remains = replace(self.remains, clock=SimClock(machine=self.machine, previous=delay_known))
        self.delay_starts(faults=False)

    def delay_backup(self) -> Remains:
        """A copy of the delay server's directory and state, as they are now."""
        world = self.world
        disk, state = (world.disk, world.state) if self.delay_up else (self.remains.disk, self.remains.state)
        copied = disk.copied()
        return Remains(copied, state.after_crash(copied), world.outside, world.clock)

    def delay_copy(self, backup: Remains) -> DelayLife:
        """Start a server on a copy, which is on a disk with space; nothing of it goes on by itself."""
        backup.disk.capacity_bytes = CAPACITY_BYTES
        clock = SimClock(machine=self.machine, previous=backup.clock.restart_evidence())
        return self._delay_life(Remains(backup.disk, backup.state, backup.outside, clock))

    def side_starts(self, side: RealtimeSide, *, faults: bool) -> None:
        """The next life of a realtime server."""
        for _ in range(START_TRIES):
            if faults:
                self._plan_faults(side.disk)
            try:
                side.start()
            except (Crash, ServerStopped, OSError) as death:
                self._tell(f"{side.name} dies in its start: {death}")
                side.die(self.death_after(death), self.random.randrange(1 << 16))
            except DamagedData as damage:
                # It names what an operator has to restore.
                assert self.damaged, f"{side.name} finds damage that nobody did: {damage}"
                self._tell(f"{side.name} does not start: {damage}")
                side.die(None, 0)
                self.mend()
            except DiskFull as full:
                self._tell(f"{side.name} does not start: {full}")
                side.die(None, 0)
                side.disk.capacity_bytes = CAPACITY_BYTES
            else:
                assert side.life is not None
                self._tell(f"{side.name} starts: epoch {side.life.server.epoch}")
                if side.lost_power:
                    self._lose_what_was_given(side, side.life.server.epoch)
                return
        raise AssertionError(f"{side.name} does not start in {START_TRIES} tries")

    def _lose_what_was_given(self, side: RealtimeSide, life: int) -> None:
        """Others get the consume sequences of what consumers had before its fsync (rule L2)."""
        side.lost_power = False
        ends: Counter[bytes] = Counter()
        for kept in side.log():
            ends[kept.subject] += len(kept.bodies)
        for books in self.books:
            if books.log_id == side.log_id:
                books.lose(ends[books.subject], life)

    def bury(self) -> None:
        """Whoever's disk has crashed, or who stopped by itself, is dead: before anybody else ends it in another way.

        No read ends a server (rule L10).
        """
        failures = [self.world.failure, *(side.life.failure for side in self.sides if side.life is not None)]
        for failure in failures:
            assert READ_FAILED not in str(failure), f"a read ended a server: {failure}"
        if self.delay_up and (self.world.disk.crashed or self.world.failure is not None):
            self.delay_dies(self.death_after(self.world.failure))
        for side in self.sides:
            if side.life is not None and (side.disk.crashed or side.life.failure is not None):
                side.die(self.death_after(side.life.failure), self.random.randrange(1 << 16))

    def death_after(self, failure: BaseException | None, ways: Sequence[PowerLoss | None] = DEATHS) -> PowerLoss | None:
        """How a server dies that stopped by itself: with its machine, when its file system could not write a folder.

        A journal that can't be written takes the file system with it, so the names are lost before anybody may start
        a server there again.
        """
        while failure is not None:
            if isinstance(failure, SyncFailed) and not failure.path.endswith((".log", "checkpoint", "state")):
                return self.random.choice(NAMES_LOST)
            failure = failure.__cause__
        return self.random.choice(ways)

    def delay_lives(self) -> bool:
        """Whether the delay server is still up, once who stopped by itself is dead."""
        self.bury()
        return self.delay_up

    def _plan_faults(self, disk: MemoryDisk) -> None:
        """Some starts meet a power loss or a failing sync."""
        kind = self.random.random()
        if kind < 0.3:
            disk.faults.crash_at = self.random.randint(1, 12)
        elif kind < 0.35:
            disk.faults.fail_sync_at = self.random.randint(1, 6)

    def _delay_life(self, remains: Remains) -> DelayLife:
        return DelayLife(remains, self, self.random.randrange(1 << 16), self._delay_settings)

    def heal(self) -> None:
        """No more faults from now on: whoever is down, or hears now that a sync failed, starts."""
        self.held.clear()
        self.mend()
        self.mixed = False
        self.router.up = True
        self.tell_router()
        self._end_faults()
        try:
            self.rest()
        except Crash as crash:
            self._tell(f"     dies at {crash}")
        # Strangers may have told the server to give its keys up, and a release that was under way has ended now.
        self.router.slots_given += 1
        self.bury()
        self._end_faults()
        for side in self.sides:
            if side.life is None:
                self.side_starts(side, faults=False)
        if not self.delay_up:
            self.delay_starts(faults=False)
        if self.delay_filled:
            # A file that could not be created was closed and removed as it was.
            self.world.disk.closed_unsynced.clear()

    def _end_faults(self) -> None:
        disks = [self.world.disk if self.delay_up else self.remains.disk, *(side.disk for side in self.sides)]
        for disk in disks:
            disk.faults, disk.capacity_bytes = Faults(), CAPACITY_BYTES
