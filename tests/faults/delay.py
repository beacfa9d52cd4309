"""The delay server under read faults and damaged files: what a life does, and what must hold (rules L5, L9, L10).

The first life leaves all kinds of files: hours that are sealed, filed, half delivered, far; the message log above the
checkpoint. The second one is started and lives under the fault; nothing is restarted after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from delayd.errors import DamagedData, DelaydError, Shortage
from delayd.hours import HOUR_MS, hour_name, hour_of_ms
from delayd.testing.clock import START_MS
from tests.delay_harness import FOLDER, Remains, World, small_slots
from tests.delay_outside import wanted
from tests.faults.harness import (
    FileFault,
    ReadFault,
    Reads,
    damage,
    files_of,
    flip_value,
    watched,
)

HOUR = hour_of_ms(START_MS)
MESSAGE = f"{FOLDER}/message/"


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
        super().__init__(remains, load_ahead_ms=60_000, tail_bytes=0, source_cache_bytes=1 << 20)

    def checkpoint_if_it_can(self) -> None:
        """Ask for a checkpoint, and wait a while for it."""
        answers: list[int] = []
        self.core.checkpoint(answers.append)
        self.pass_ms(1_000)


@dataclass(slots=True)
class Report:
    """What was tried."""

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


def damage_file(remains: Remains, path: str, fault: FileFault, report: Report, *, live_first: bool = False) -> None:
    """Damage a file before the start, or below the live server; then restore it below the live server."""
    name = f"{path} {fault.value}{' under a live server' if live_first else ''}"
    copy = remains.after_crash(None)
    with small_slots():
        restore: Callable[[], None] | None = None
        if not live_first:
            restore = damage(copy.disk, path, fault)
            if restore is None:
                return
        try:
            world = FaultWorld(copy)
        except DamagedData as error:
            if not error.path.startswith(MESSAGE.rstrip("/")):
                raise Violation(f"{name}: the start was refused: {error}") from error
            report.refused += 1
            report.file_faults += 1
            return
        try:
            if live_first:
                world.pass_ms(500)
                restore = damage(world.disk, path, fault)
                if restore is None:
                    return
            live(world)
            world.check_logs()
            _check_the_rest(world, path, fault)
            assert restore is not None, "it was damaged"
            _check_named(world, path, fault)
            # A message log that lost its end goes on from there, as after a crash: the file of before is another one.
            cut = path.startswith(MESSAGE) and fault in (FileFault.SHORT, FileFault.HALF)
            if not path.endswith("/checkpoint") and not cut:
                restore()
            finish(world, books=not live_first)
        except (AssertionError, DelaydError, OSError) as error:
            raise Violation(f"{name}: {error!r}") from error
    report.file_faults += 1


def _check_the_rest(world: World, path: str, fault: FileFault) -> None:
    """Everything that the damaged file does not concern was delivered on time."""
    hours = {path.rsplit("/", 1)[1].removesuffix(".log")} if "/schedule/" in path or "/dispatch/" in path else set()
    if fault is FileFault.SWAPPED:
        hours |= {hour_name(HOUR + index) for index in range(60)}
    due = {
        body: at
        for sent, _ in world.outside.accepted.values()
        for at, _, body in sent.wanted
        if at <= world.clock.now_ms() - 1_000
    }
    missing = {body for body in world.missing() & due.keys() if hour_name(hour_of_ms(due[body])) not in hours}
    assert not missing, f"not delivered: {sorted(missing)}"


def _check_named(world: World, path: str, fault: FileFault) -> None:
    """What is still set aside is named by its file."""
    for entry in world.core.quarantine.listing():
        concerned = path.rsplit("/", 1)[1] if "/" in path else path
        swapped = fault is FileFault.SWAPPED
        assert swapped or concerned in entry.path, f"{entry.path} is named"


def flip(remains: Remains, key: bytes, report: Report) -> None:
    """Turn a bit of a value over before the start: the life goes on, and all that it does not concern is delivered."""
    copy = remains.after_crash(None)
    flip_value(copy.state, key)
    with small_slots():
        try:
            world = FaultWorld(copy)
            live(world)
            for entry in world.core.quarantine.listing():
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

    world.core.release(id_, hear)
    world.settle()
    assert told == [True]


def finish(world: World, *, books: bool = True) -> None:
    """All is delivered once, and nothing is set aside any more, without a restart."""
    world.pass_ms(65_000)
    world.clock.advance(max(0, START_MS + 50 * HOUR_MS - 1_000 - world.clock.now_ms()))
    world.pass_ms(10_000)
    world.drain(70_000)
    left = [(entry.id, entry.reason) for entry in world.core.quarantine.listing()]
    if books:
        assert not left, f"still set aside: {left}"
        world.check_books()
        world.check_sealing()
    else:
        world.check_logs()
        assert not world.missing(), f"never delivered: {sorted(world.missing())}"


def delay_files(remains: Remains) -> list[str]:
    """The files that the second life finds."""
    return [path for path in files_of(remains.disk, FOLDER) if not path.endswith("LOCK")]
