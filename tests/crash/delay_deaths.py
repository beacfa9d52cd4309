"""A workload of the delay server, and what must hold after a death at each of its operations.

Sends near and far, checkpoints, dispatch, acknowledgements, hours that end, seal and are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from delayd.errors import BadArgument, DamagedData
from delayd.reading.data import NONE, HourState, schedules
from delayd.reading.find import FileFinder, Search, WantedMessages
from delayd.reading.seals import verify_seals
from delayd.testing.clock import START_MS
from delayd.testing.disk import Crash
from delayd.testing.tree import PowerLoss
from tests.crash.harness import Report, Way, look_of, ways
from tests.worlds.delay import DATA, Remains, World, new_world, wanted

HOUR_MS = 3_600_000
BEFORE_HOUR_MS = 3_000  # The workload passes the end of an hour, so that one seals.
SEEDS = 2
PARTS = 2  # The operations are dealt out to this many tests, which may run beside each other.
RECOVERIES_EVERY = (
    5  # After every fifth operation of the workload the server also dies at each operation of its recovery.
)
SEALING_EVERY = 3  # Deaths after which it is tried that each hour seals, which takes as long as all else.
SETTINGS = {
    "segment_bytes": 4_096,
    "frame_rows_max": 2,
    "tail_bytes": 0,
    "load_ahead_ms": 1_000,
    "retention_hours": 1,
    "checkpoint_every_ms": HOUR_MS,
}


def new_life(remains: Remains) -> World:
    return World(remains, seed=1, **SETTINGS)  # type: ignore[arg-type]


def work(world: World) -> None:
    """The workload; 50 messages in all, some of which somebody cancels or moves."""
    begin = HOUR_MS - BEFORE_HOUR_MS
    world.send([*wanted(3, begin + 500, "near"), *wanted(2, begin + 2 * HOUR_MS, "far"), *wanted(1, 0, "late")])
    world.settle()
    world.send(wanted(3, begin + 700, "mail", b"mail", every_ms=300))
    world.cancel(world.receipts("far-0", "near-0"))
    world.pass_ms(800)
    world.cancel(world.receipts("mail-2", "near-1"))
    world.reschedule(world.receipts("far-1", "mail-1"), START_MS + begin + 1_900, START_MS + begin + 2 * HOUR_MS)
    world.checkpoint()
    world.send([*wanted(2, begin + 1_500, "more"), *wanted(2, begin + BEFORE_HOUR_MS + 500, "next hour")])
    world.pass_ms(1_000)
    world.send_again(1)
    world.reschedule(world.receipts("mail-1"), START_MS + begin + BEFORE_HOUR_MS + 900)
    world.cancel(world.receipts("far-1", "next hour-0"))
    world.settle()
    world.checkpoint()
    world.send(wanted(30, begin + 3_700, "roll" * 20))
    world.pass_ms(2_500)
    world.checkpoint()
    world.core.sweep()
    world.settle()
    world.send(wanted(6, begin + 4_500, "last"))
    world.pass_ms(600)
    world.clock.advance(HOUR_MS)
    world.pass_ms(1_500)
    world.checkpoint()
    world.sweep()
    world.send(wanted(1, begin + HOUR_MS, "after an hour"))
    world.pass_ms(200)
    world.checkpoint()
    # The first hour goes, the second one seals.
    world.sweep()


class Death:
    """One death at an operation; `remains` is what each way leaves of it."""

    def __init__(self, at: int | None) -> None:
        self._before = new_world(now_ms=START_MS + HOUR_MS - BEFORE_HOUR_MS)
        self._before.disk.faults.crash_at = at
        self._world: World | None = None
        try:
            self._world = new_life(self._before)
            self.work(self._world)
        except Crash:
            pass
        self.operations = self._before.disk.operations

    def work(self, world: World) -> None:
        """The workload."""
        work(world)

    def finish(self, world: World, *, sealing: bool) -> None:
        """Go on in the next life, and compare the books."""
        finish(world, sealing=sealing)

    def remains(self, way: Way, *, late: bool) -> Remains:
        """What the next start finds."""
        if self._world is None:
            return self._before.after_crash(way.loss, way.seed)
        return self._world.remains(way.loss, way.seed, late=late)


class LaterDeath:
    """A death at an operation of a workload, in a world in which others have worked before."""

    def __init__(
        self,
        at: int | None,
        settings: Mapping[str, int],
        work: Callable[[World], None],
        before: Callable[[World], None] = World.settle,
    ) -> None:
        self._world = World(new_world(), seed=1, **settings)  # type: ignore[arg-type]
        before(self._world)
        disk = self._world.disk
        first = len(disk.operations)
        disk.faults.crash_at = None if at is None else first + at
        try:
            work(self._world)
        except Crash:
            pass
        self.operations = disk.operations[first:]

    def each_next(self) -> Iterator[tuple[str, Remains]]:
        """How it died, and what that leaves; each of what many ways leave once."""
        seen: set[object] = set()
        for way in ways(seeds=1):
            remains = self._world.remains(way.loss, way.seed)
            look = look_of(remains.disk), tuple(remains.state.all_keys())
            if look not in seen:
                seen.add(look)
                yield f"died {way} at {(self.operations or ['the first'])[-1]}", remains


def finish(world: World, *, sealing: bool) -> None:
    """Go on as if nothing had happened, and compare the books."""
    world.send(wanted(2, world.clock.now_ms() - START_MS + 100, "after"))
    world.drain(3 * HOUR_MS)
    world.check_books()
    if sealing:
        world.check_sealing()


def look_at(remains: Remains) -> None:
    """Check what another process reads before the next life: no error, no broken seal, no hour that is half gone."""
    disk = remains.disk.after_kill()
    damage: list[DamagedData] = []
    try:
        found = schedules(disk, DATA, damage)
    except BadArgument:
        return  # It died before its message log was there.
    assert not damage, f"its files can't be read: {damage}"
    for each in found:
        assert each.tail_damage is None, f"messages that are not filed yet can't be read: {each.tail_damage}"
        for hour in each.hours():
            read = each.read(hour)
            assert (read.outcome_of != NONE).all() or read.state is not HourState.SEALED, f"hour {hour} is half gone"
    every = list(FileFinder(disk, DATA, Search(WantedMessages(), ended=True, with_bodies=False)).found())
    assert not any(each.damage for each in every), "what is there can't be searched"
    sequences = [row.sequence for each in every for row in each.rows]
    assert len(sequences) == len(set(sequences)), "a message is found twice"
    broken = verify_seals(DATA, disk=disk).broken
    assert not broken, f"seals that the files contradict: {broken}"


class Explored:
    """What was tried. Many deaths leave the same: of these, one is recovered from."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._seen: set[object] = set()

    def is_new(self, remains: Remains, *, sealing: bool = False) -> bool:
        """Whether nothing that is equal in all that a next life can meet was tried before."""
        looks = (look_of(remains.disk), tuple(remains.state.scan(b"")), remains.outside.look(), sealing)
        before = len(self._seen)
        self._seen.add(looks)
        return len(self._seen) > before


def explore(report: Report, operations: Iterable[int], workload: type[Death] = Death) -> None:
    """Die at each of these operations of a workload; AssertionError names the place."""
    explored = Explored(report)
    for at in operations:
        report.operations += 1
        death = workload(at)
        sealing = at % SEALING_EVERY == 0
        disks: set[object] = set()
        for number, way in enumerate(ways(SEEDS)):
            report.crashes += 1
            remains = death.remains(way, late=(at + number) % 2 == 0)
            where = f"died {way} at operation {at} ({death.operations[-1]})"
            try:
                # Requests under way arrive late after every other way to die, and one way is enough for each disk.
                disk = look_of(remains.disk)
                if disk not in disks and explored.is_new(remains, sealing=sealing):
                    look_at(remains)
                    report.recoveries += 1
                    death.finish(new_life(remains), sealing=sealing)
                disks.add(disk)
                if at % RECOVERIES_EVERY == 0 and number in (0, 1 + at % 5):
                    die_again(death, way, explored)
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error


def die_again(death: Death, way: Way, explored: Explored) -> None:
    """Die at each operation of the recovery that follows, and recover from that."""
    at = 0
    while True:
        at += 1
        remains = death.remains(way, late=False)
        remains.disk.faults.crash_at = at
        try:
            new_life(remains)
            return
        except Crash:
            explored.report.recovery_operations += 1
        loss = (None, PowerLoss.ALL_LOST, PowerLoss.REORDERED)[at % 3]
        again = remains.after_crash(loss, at)
        if not explored.is_new(again):
            continue
        try:
            explored.report.recoveries += 1
            death.finish(new_life(again), sealing=False)
        except Exception as error:
            operation = remains.disk.operations[-1]
            raise AssertionError(f"died again {loss} at operation {at} of recovery ({operation}): {error}") from error
