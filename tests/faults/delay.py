"""The delay server under read faults and damaged files: what a life does, and what must hold (rules L5, L9, L10).

The first life leaves all kinds of files: hours that are sealed, filed, half delivered, far; the message log above the
checkpoint. The second one is started and lives under the fault; nothing is restarted after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from delayd.errors import DamagedData, DelaydError, Shortage
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.machine.alarms import LOOK_MS
from delayd.testing.clock import START_MS
from delayd.testing.disk import MemoryDisk
from tests.faults.harness import (
    FileFault,
    ReadFault,
    Reads,
    damage,
    files_of,
    flip_value,
    watched,
)
from tests.memory_files import content
from tests.worlds.delay import FOLDER, Remains, World, small_slots
from tests.worlds.outside import wanted

HOUR = hour_of_ms(START_MS)
MESSAGE = f"{FOLDER}/message/"
SEGMENT_BYTES = 4_096


class Violation(AssertionError):
    """A fault after which a promise did not hold."""


def first_life() -> Remains:
    """What the life leaves that is started under the faults."""
    with small_slots():
        world = FaultWorld()
        world.send([*wanted(3, 500, "a"), *wanted(3, 500, "m", b"mails")])
        world.pass_ms(2_000)
        world.send([*wanted(3, HOUR_MS + 1_000, "b"), *wanted(2, 3 * HOUR_MS + 2_000, "d")])
        world.settle()
        world.checkpoint()
        world.clock.advance(HOUR_MS)
        world.pass_ms(3_000)
        world.checkpoint()
        world.sweep()
        assert world.hours().get(HOUR).sealed
        world.send(
            [*wanted(3, HOUR_MS + 90_000, "c"), *wanted(2, 2 * HOUR_MS + 1_000, "e"), *wanted(2, 50 * HOUR_MS, "f")]
        )
        world.settle()
        world.checkpoint()
        # The message log has two segments above the checkpoint.
        world.send([(START_MS + 2 * HOUR_MS + 1_200, b"mails", b"long".ljust(SEGMENT_BYTES, b"."))])
        world.settle()
        world.send([*wanted(2, HOUR_MS + 91_000, "g"), *wanted(2, 2 * HOUR_MS + 1_500, "h", b"new")])
        world.settle()
        return world.remains()


def live(world: FaultWorld) -> None:
    """What the second life does: deliveries, loads, checkpoints, seals, sends."""
    world.pass_ms(2_000)
    world.send([*wanted(2, 2 * HOUR_MS + 2_000, "i"), *wanted(2, 50 * HOUR_MS + 1_000, "j")])
    world.pass_ms(1_000)
    world.checkpoint_if_it_can()
    world.clock.advance(max(0, START_MS + 2 * HOUR_MS - 30_000 - world.clock.now_ms()))
    world.pass_ms(40_000)
    world.checkpoint_if_it_can()
    world.sweep()
    world.send(wanted(2, 3 * HOUR_MS + 5_000, "k"))
    world.clock.advance(max(0, START_MS + 3 * HOUR_MS - 30_000 - world.clock.now_ms()))
    world.pass_ms(40_000)


class FaultWorld(World):
    """A world whose bodies are read from the disk, and whose checkpoints may be put off."""

    def __init__(self, remains: Remains | None = None) -> None:
        super().__init__(
            remains, segment_bytes=SEGMENT_BYTES, load_ahead_ms=60_000, tail_bytes=0, source_cache_bytes=1 << 20
        )

    def checkpoint_if_it_can(self) -> None:
        """Ask for a checkpoint, and wait a while for it."""
        answers: list[int] = []
        self.core.checkpoint(answers.append)
        self.pass_ms(1_000)


@dataclass(slots=True)
class Report:
    """Counts of what was tried."""

    reads: int = 0
    read_faults: int = 0
    file_faults: int = 0
    values: int = 0
    refused: int = 0

    def __str__(self) -> str:
        return (
            f"delay server: {self.reads} reads, {self.read_faults} read faults, {self.file_faults} damaged files, "
            f"{self.values} damaged values, {self.refused} starts refused by name: all green"
        )


def count_reads(remains: Remains) -> Reads:
    """The reads of the whole second life."""
    reads = Reads([])
    with small_slots(), watched(reads):
        world = FaultWorld(remains.after_crash(None))
        live(world)
        reads.active = False
        finish(world)
    return reads


def fail_read(remains: Remains, at: int, fault: ReadFault, report: Report) -> None:
    """Fail one read: the life goes on, and in the end all is delivered, once, and nothing is set aside."""
    reads = Reads([], at, fault)
    name = f"read {at} {fault.name}"
    with small_slots(), watched(reads):
        try:
            world = FaultWorld(remains.after_crash(None))
        except (DamagedData, Shortage) as error:
            # Only the message log above the checkpoint has nothing beside it.
            if isinstance(error, DamagedData) and not error.path.startswith(MESSAGE):
                raise Violation(f"{name} of {reads.path()}: the start was refused: {error}") from error
            report.refused += 1
            world = FaultWorld(remains.after_crash(None))
        try:
            live(world)
            reads.active = False
            finish(world)
        except (AssertionError, DelaydError, OSError) as error:
            raise Violation(f"{name} of {reads.path()}: {error!r}") from error
    report.read_faults += 1


def damage_files(remains: Remains, faults: Mapping[str, FileFault], report: Report, *, below: bool = False) -> None:
    """Damage files at once, before the start or ``below`` the live server; then restore them without a restart.

    A start that refuses a message log is held, as its program holds it, until the files are restored.
    """
    name = f"{', '.join(f'{path} {fault.value}' for path, fault in faults.items())}{' below the server' * below}"
    copy = remains.after_crash(None)
    last = _last_segment(remains.disk)
    # Nothing tells the end of the message log from one that a crash has torn: a start goes on without it.
    lost = {
        body
        for sent, _ in remains.outside.accepted.values()
        for _, _, body in sent.wanted
        if last in faults and not below and body in content(remains.disk, last)
    }
    with small_slots():
        try:
            restore = None if below else _damage(copy.disk, faults)
            if not below and restore is None:
                return
            world = _begun(copy)
            if world is None:
                assert restore is not None, "nothing was damaged before the start"
                restore(cut=True)
                report.refused += 1
                lost = set()
                world = FaultWorld(copy.after_crash(None))
            elif below:
                world.pass_ms(500)
                restore = _damage(world.disk, faults)
                if restore is None:
                    return
                _check_told(world, faults, remains.disk)
            live(world)
            world.check_logs()
            _check_the_rest(world, faults, lost)
            _check_named(world, faults)
            assert restore is not None, "it was damaged"
            restore(cut=below)
            finish(world, lost, books=not below)
        except (AssertionError, DelaydError, OSError) as error:
            raise Violation(f"{name}: {error!r}") from error
    report.file_faults += 1


def _begun(copy: Remains) -> FaultWorld | None:
    """The life under the faults; None where the start is refused: its program holds it until the files are whole."""
    try:
        return FaultWorld(copy)
    except DamagedData as error:
        # Only the message log above the checkpoint has nothing beside it.
        assert error.path.startswith(MESSAGE.rstrip("/")), f"the start was refused: {error}"
        return None


class Restore(Protocol):
    """Puts files back; with ``cut`` also the last segment of the message log.

    Once a start has gone on without it, as after a crash, the file of before is another one.
    """

    def __call__(self, *, cut: bool) -> None: ...


def _damage(disk: MemoryDisk, faults: Mapping[str, FileFault]) -> Restore | None:
    """Damage all of them; what restores them. None when one of them can't be damaged so."""
    restores: list[tuple[bool, Callable[[], None]]] = []
    for path, fault in faults.items():
        restore = damage(disk, path, fault)
        if restore is None:
            return None
        if not path.endswith("/checkpoint"):  # The server writes it anew.
            restores.append((path == _last_segment(disk), restore))

    def restore_all(*, cut: bool) -> None:
        for of_cut, each in reversed(restores):
            if cut or not of_cut:
                each()

    return restore_all


def _last_segment(disk: MemoryDisk) -> str:
    return max(path for path in files_of(disk, MESSAGE.rstrip("/")))


def _check_told(world: FaultWorld, faults: Mapping[str, FileFault], whole: MemoryDisk) -> None:
    """What was damaged below the server is told at its next look, file by file, where a look can see it.

    A look asks for sizes and headers of schedule and dispatch logs: a bit that flips in a row shows when the hour is
    loaded or sealed. A dispatch log that is open is written again by the server itself; a checkpoint is written anew,
    and read by nobody but a start.
    """
    world.pass_ms(LOOK_MS + 1_000)
    told = " ".join(f"{wait.what} {wait.why}" for wait in world.core.standing.waits())
    for path, fault in faults.items():
        there = world.disk.exists(path) and content(world.disk, path).startswith(content(whole, path))
        seen = "/message/" in path or fault is not FileFault.FLIP
        if seen and not there and not path.endswith("/checkpoint"):
            assert _name(path) in told, f"{path} is not named: {told}"


def _check_the_rest(world: World, faults: Mapping[str, FileFault], lost: set[bytes]) -> None:
    """Everything that the damaged files do not concern was delivered on time."""
    hours = {_name(path) for path in faults if "/schedule/" in path or "/dispatch/" in path}
    if FileFault.SWAPPED in faults.values():
        hours |= {hour_name(HOUR + index) for index in range(60)}
    due = {
        body: at
        for sent, _ in world.outside.accepted.values()
        for at, _, body in sent.wanted
        if at <= world.clock.now_ms() - 1_000
    }
    missing = {body for body in (world.missing() - lost) & due.keys() if hour_name(hour_of_ms(due[body])) not in hours}
    assert not missing, f"not delivered: {sorted(missing)}"


def _check_named(world: World, faults: Mapping[str, FileFault]) -> None:
    """What is still set aside is named by its file."""
    concerned = [path.rsplit("/", 1)[1] for path in faults]
    for entry in world.core.memory.quarantine.listing():
        swapped = FileFault.SWAPPED in faults.values()
        assert swapped or any(name in entry.path for name in concerned), f"{entry.path} is named"


def _name(path: str) -> str:
    return path.rsplit("/", 1)[1].removesuffix(".log")


def flip(remains: Remains, key: bytes, report: Report) -> None:
    """Turn a bit of a value over before the start: the life goes on, and all that it does not concern is delivered."""
    copy = remains.after_crash(None)
    flip_value(copy.state, key)
    with small_slots():
        try:
            world = FaultWorld(copy)
            live(world)
            for entry in world.core.memory.quarantine.listing():
                assert entry.path == "state" and entry.id.startswith(("producer/", "target/")), entry
                _release(world, entry.id)
            finish(world)
        except (AssertionError, DelaydError, OSError) as error:
            raise Violation(f"a bit of {key!r}: {error!r}") from error
    report.values += 1


def _release(world: World, id_: str) -> None:
    told: list[bool] = []

    def hear(done: bool, text: str) -> None:
        told.append(done)

    world.core.repair.words.release(id_, hear)
    world.settle()
    assert told == [True]


def finish(world: World, lost: Collection[bytes] = (), *, books: bool = True) -> None:
    """All that is not ``lost`` is delivered once, and nothing is set aside any more, without a restart."""
    world.pass_ms(65_000)
    world.clock.advance(max(0, START_MS + 50 * HOUR_MS - 1_000 - world.clock.now_ms()))
    world.pass_ms(10_000)
    world.drain(70_000)
    left = [(entry.id, entry.reason) for entry in world.core.memory.quarantine.listing()]
    if books and not world.missing() & set(lost):
        assert not left, f"still set aside: {left}"
        world.check_books()
        world.check_sealing()
    else:
        world.check_logs()
        missing = world.missing() - set(lost)
        assert not missing, f"never delivered: {sorted(missing)}"


def neighbours(remains: Remains) -> list[tuple[str, str]]:
    """Files that stand beside each other in a folder, or are of one hour."""
    files = delay_files(remains)
    beside = [pair for pair in pairwise(files) if len({path.rpartition("/")[0] for path in pair}) == 1]
    of_hours = [(path, path.replace("/dispatch/", "/schedule/")) for path in files if "/dispatch/" in path]
    return [*beside, *(pair for pair in of_hours if pair[1] in files), (files[-1], files[0])]


def delay_files(remains: Remains) -> list[str]:
    """The files that the second life finds."""
    return [path for path in files_of(remains.disk, FOLDER) if not path.endswith("LOCK")]
