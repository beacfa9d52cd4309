"""Crash harness: run a workload, die at each of its disk operations in each way, recover, and die again in recovery.

Invariant: what it reports is exhaustive over operations. Ways that draw from a seed are repeated with several seeds,
and disks that look alike are recovered once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from delayd.errors import ServerStopped
from delayd.testing.disk import Crash, Faults, MemoryDisk
from delayd.testing.tree import Folder, Inode, PowerLoss

SEEDED = (PowerLoss.PREFIX, PowerLoss.TORN, PowerLoss.TORN_SECTOR, PowerLoss.REORDERED)
SEEDS_FIRST = 5
SEEDS_SECOND = 2

Facts = TypeVar("Facts")
FactsOut = TypeVar("FactsOut", contravariant=True)


class Workload(Protocol[Facts]):
    """The steps that run, and the check of what must hold after a crash."""

    def new(self) -> Facts:
        """Nothing attempted, nothing acknowledged."""

    def run(self, disk: MemoryDisk, facts: Facts) -> None:
        """Do all of it, and note in ``facts`` what is attempted before it is and acknowledged after it was."""

    def recover(self, disk: MemoryDisk, facts: Facts) -> object:
        """What a server does at its start: what it finds, to be compared."""

    def check(self, found: object, facts: Facts) -> None:
        """AssertionError when something acknowledged is missing, or something is there that can't be."""

    def go_on(self, disk: MemoryDisk, facts: Facts) -> None:
        """Recover, do one more step, lose power, and check that the step is there."""


class Violation(AssertionError):
    """A crash after which a promise did not hold; says where to look."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to die."""

    loss: PowerLoss | None  # None: SIGKILL, which leaves the page cache as it is.
    seed: int = 0

    def die(self, disk: MemoryDisk) -> MemoryDisk:
        """The disk that the next start finds."""
        if self.loss is None:
            return disk.after_kill()
        # Another draw at each operation, so that few seeds come to meet every case somewhere.
        return disk.after_crash(self.loss, self.seed * 1_009 + len(disk.operations))

    def __str__(self) -> str:
        return f"{self.loss.name if self.loss else 'KILLED'}/{self.seed}"


@dataclass(slots=True)
class Report:
    """Counts of what an exploration tried."""

    operations: int = 0
    recovery_operations: int = 0
    ways: int = 0
    crashes: int = 0
    recoveries: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Sum up two workloads."""
        self.operations += other.operations
        self.recovery_operations += other.recovery_operations
        self.ways = max(self.ways, other.ways)
        self.crashes += other.crashes
        self.recoveries += other.recoveries
        self.names += other.names

    def __str__(self) -> str:
        return (
            f"{', '.join(self.names)}: {self.operations} disk operations, {self.ways} ways, {self.crashes} crashes "
            f"({self.recovery_operations} points in recoveries), {self.recoveries} runs of recovery: all green"
        )


def ways(seeds: int) -> tuple[Way, ...]:
    """All ways to die, those that draw from a seed with so many of them."""
    exact = (None, *(loss for loss in PowerLoss if loss not in SEEDED))
    return (*(Way(loss) for loss in exact), *(Way(loss, seed) for loss in SEEDED for seed in range(seeds)))


class Explorer(Generic[Facts]):
    """Dies everywhere in one workload; ``faults`` go wrong in the workload itself, beside the crash.

    A recovery is died in as well, unless ``recoveries`` is False: then each crash is followed by whole recoveries only.
    """

    def __init__(
        self,
        name: str,
        workload: Workload[Facts],
        faults: Callable[[], Faults] = Faults,
        *,
        recoveries: bool = True,
    ) -> None:
        self.report = Report(names=[name])
        self._workload = workload
        self._faults = faults
        self._die_in_recoveries = recoveries

    def explore(self, first: int = 1) -> Report:
        """Die at each operation from ``first`` on, and at each of each recovery; Violation where a promise breaks."""
        whole = MemoryDisk(self._faults())
        facts = self._workload.new()
        self._workload.run(whole, facts)
        self.report.operations = len(whole.operations)
        self.report.ways = len(ways(SEEDS_FIRST))
        # One more than there are operations: dying after the last one.
        for at in range(first, len(whole.operations) + 2):
            self._die_at(at)
        return self.report

    def explore_failed_syncs(self) -> Report:
        """Let each sync fail, after which the workload must stop by itself, and die there."""
        whole = MemoryDisk(self._faults())
        self._workload.run(whole, self._workload.new())
        self.report.operations = whole.syncs
        self.report.ways = len(ways(SEEDS_FIRST))
        for at in range(1, whole.syncs + 1):
            faults = self._faults()
            faults.fail_sync_at = at
            disk = MemoryDisk(faults)
            facts = self._workload.new()
            try:
                self._workload.run(disk, facts)
            except ServerStopped:
                # Names can't be written back as data can: where a folder's sync fails, Linux's file systems become
                # read-only, so that the next process finds what a power loss leaves.
                of_folder = disk.operations[-1].startswith("sync_folder")
                self._die(disk, facts, f"the failed sync {at}", of_folder)
            else:
                raise Violation(f"went on after the failed sync {at}")
        return self.report

    def _die_at(self, at: int) -> None:
        faults = self._faults()
        faults.crash_at = at
        disk = MemoryDisk(faults)
        facts = self._workload.new()
        try:
            self._workload.run(disk, facts)
        except Crash:
            pass
        self._die(disk, facts, f"operation {at}")

    def _die(self, disk: MemoryDisk, facts: Facts, when: str, power_loss: bool = False) -> None:
        seen: set[object] = set()
        for way in ways(SEEDS_FIRST):
            if power_loss and way.loss is None:
                continue
            self.report.crashes += 1
            found = way.die(disk)
            look = look_of(found)
            if look not in seen:
                seen.add(look)
                where = f"died {way} at {when} ({disk.operations[-1]})"
                self._recover_from(partial(way.die, disk), facts, where)

    def _recover_from(self, start: Callable[[], MemoryDisk], facts: Facts, where: str) -> None:
        disk = start()
        first = self._recover(disk, facts, where)
        operations = len(disk.operations)
        # Recovery has made durable what it found, so the next recovery finds the same.
        for loss in (PowerLoss.ALL_LOST, None):
            again = self._recover(Way(loss).die(disk), facts, f"{where}, recovered, died again {loss}")
            if again != first:
                raise Violation(f"{where}: recovery found {first}, and then {again}")
        self._go_on(start(), facts, where)
        seen: set[object] = set()
        for at in range(1, operations + 1) if self._die_in_recoveries else ():
            self.report.recovery_operations += 1
            for second in self._second_deaths(start, facts, at):
                self.report.crashes += 1
                look = look_of(second)
                if look not in seen:
                    seen.add(look)
                    self._recover(second, facts, f"{where}, died again at operation {at} of recovery")

    def _second_deaths(self, start: Callable[[], MemoryDisk], facts: Facts, at: int) -> Iterator[MemoryDisk]:
        disk = start()
        disk.faults.crash_at = at
        try:
            self._workload.recover(disk, facts)
        except Crash:
            pass
        for way in ways(SEEDS_SECOND):
            yield way.die(disk)

    def _recover(self, disk: MemoryDisk, facts: Facts, where: str) -> object:
        self.report.recoveries += 1
        try:
            found = self._workload.recover(disk, facts)
            self._workload.check(found, facts)
        except Exception as error:
            raise Violation(f"{where}: {type(error).__name__}: {error}") from error
        # A dead process may have left a file dirty that recovery only looks at and removes.
        for path in disk.closed_unsynced:
            if any(operation.startswith((f"write {path} ", f"truncate {path} ")) for operation in disk.operations):
                raise Violation(f"{where}: {path} was closed with unsynced writes")
        return found

    def _go_on(self, disk: MemoryDisk, facts: Facts, where: str) -> None:
        self.report.recoveries += 2
        try:
            self._workload.go_on(disk, facts)
        except Exception as error:
            raise Violation(f"{where}, went on: {type(error).__name__}: {error}") from error


def look_of(disk: MemoryDisk) -> object:
    """Everything that a start can find on a disk, now or after another crash; equal for disks that look alike."""
    return _look_of(disk._root, {})


def _look_of(node: Inode | Folder, known: dict[int, object]) -> object:
    # What is synced stands in both tables of names, and so do all folders above it.
    if id(node) not in known:
        known[id(node)] = _look_of_folder(node, known) if isinstance(node, Folder) else _look_of_file(node)
    return known[id(node)]


def _look_of_folder(folder: Folder, known: dict[int, object]) -> object:
    names = [
        tuple(sorted((name, _look_of(node, known)) for name, node in entries.items()))
        for entries in (folder.cached, folder.durable)
    ]
    pending = tuple((name, node is None) for change in folder.pending for name, node in change)
    return (*names, pending)


def _look_of_file(file: Inode) -> object:
    return (bytes(file.cached), bytes(file.durable), tuple(map(repr, file.pending)))
