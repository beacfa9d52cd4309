"""What is around a delay server and survives it: the machine, the targets, the producer and what it was promised.

Invariant: all of it can be copied, so that one death can be gone on from in many ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from delayd.batch.columns import ProducerPart
from delayd.errors import DelaydError
from delayd.testing.clock import START_MS, SimClock, SimMachine
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState
from delayd.testing.tree import PowerLoss
from tests.batches import messages
from tests.worlds.delay_adapter import AcceptedBatch
from tests.worlds.target import Cable, FakeTarget

TARGET_IDS = (0x7001, 0x7002)

Wanted = tuple[int, bytes, bytes]
"""A message: deliver_at_ms, subject, body. Its body tells it from all others."""


@dataclass(slots=True)
class Sent:
    """A batch of the producer, as it is sent again and again until it is accepted."""

    number: int
    data: bytes
    wanted: list[Wanted]
    keyed: bool = False
    again: bool = False  # A realtime server sends it: messages that come again, or dead letters.


@dataclass(slots=True)
class Outside:
    """What survives a crash of the delay server, apart from its disk and state."""

    machine: SimMachine
    targets: dict[int, FakeTarget]
    unanswered: dict[int, Sent] = field(default_factory=dict)
    accepted: dict[int, tuple[Sent, AcceptedBatch]] = field(default_factory=dict)
    refused: list[tuple[int, DelaydError]] = field(default_factory=list)
    last_number: int = 0
    moved: dict[int, int] = field(default_factory=dict)  # Who listens at the address of a target, if not itself.
    cancel_asked: set[int] = field(default_factory=set)  # Sequences that somebody has wanted to cancel.
    cancelled: set[int] = field(default_factory=set)  # Those of them that were answered CANCELLED.
    # By sequence: sequence, due instant and filing instant of the row that took its place; and instants asked for.
    moved_rows: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    moves_asked: dict[int, set[int]] = field(default_factory=dict)
    expiries: dict[bytes, int] = field(default_factory=dict)  # By body: from when on a message is worth nothing.
    late: list[Cable] = field(default_factory=list)  # Connections of earlier lives with requests that may yet arrive.

    def copy(self) -> Outside:
        """Twins of everything, for another way to go on."""
        kept = self.machine
        machine = SimMachine(kept.wall_ms, kept.boottime_ms, kept.monotonic_ms, kept.boots)
        targets = {id: target.copy(partial(_wall_ms, machine)) for id, target in self.targets.items()}
        twin = Outside(machine, targets, dict(self.unanswered), dict(self.accepted), list(self.refused))
        twin.last_number, twin.moved = self.last_number, dict(self.moved)
        twin.cancel_asked, twin.cancelled = set(self.cancel_asked), set(self.cancelled)
        twin.moved_rows = dict(self.moved_rows)
        twin.moves_asked = {sequence: set(instants) for sequence, instants in self.moves_asked.items()}
        twin.expiries = dict(self.expiries)
        for cable in self.late:
            other = Cable(targets[cable.target.log_id], nobody)
            other.up.extend(cable.up)
            other.ended = True
            twin.late.append(other)
        return twin

    def look(self) -> object:
        """Everything here that the next life of the delay server meets; equal where it goes on in the same way."""
        machine = self.machine
        return (
            (machine.wall_ms, machine.boottime_ms, machine.monotonic_ms, machine.boots),
            tuple(target.look() for target in self.targets.values()),
            (tuple(self.unanswered), tuple(self.accepted), self.last_number),
            (frozenset(self.cancel_asked), frozenset(self.cancelled)),
            (tuple(self.moved_rows.items()), tuple((row, *sorted(to)) for row, to in self.moves_asked.items())),
            tuple((cable.target.log_id, tuple(call.asked.look() for call in cable.up)) for cable in self.late),
        )

    def newest(self, sequence: int, due_ms: int, filed_ms: int = 0) -> tuple[int, int, int]:
        """The newest row of a message, its due instant, and the instant that says in which hour it is filed."""
        while sequence in self.moved_rows:
            sequence, due_ms, filed_ms = self.moved_rows[sequence]
        return sequence, due_ms, filed_ms

    def followers(self, sequence: int) -> list[int]:
        """A row, and those that took its place when it was moved."""
        found = [sequence]
        while found[-1] in self.moved_rows:
            found.append(self.moved_rows[found[-1]][0])
        return found


@dataclass(frozen=True, slots=True)
class Remains:
    """What a life of the delay server leaves, and the next one starts with."""

    disk: MemoryDisk
    state: MemoryState
    outside: Outside
    clock: SimClock

    def after_crash(self, way: PowerLoss | None, seed: int = 0) -> Remains:
        """What another death leaves, such as one during the start; None is a SIGKILL. This one stays as it is."""
        disk = self.disk.after_kill() if way is None else self.disk.after_crash(way, seed)
        outside = self.outside.copy()
        clock = SimClock(machine=outside.machine, previous=self.clock.restart_evidence())
        return Remains(disk, self.state.after_crash(disk), outside, clock)


def new_world(targets: Sequence[int] = TARGET_IDS[:1], now_ms: int = START_MS) -> Remains:
    """An empty disk, and targets that have heard of nobody."""
    disk, machine = MemoryDisk(), SimMachine(wall_ms=now_ms)
    wall_ms = partial(_wall_ms, machine)
    outside = Outside(machine, {log_id: FakeTarget(log_id, wall_ms) for log_id in targets})
    return Remains(disk, MemoryState(disk), outside, SimClock(machine=machine))


def encode_wanted(
    rows: Sequence[Wanted],
    part: ProducerPart,
    keys: Sequence[bytes] | None = None,
    flags: Sequence[int] | None = None,
    expires: Sequence[int] | None = None,
) -> bytes:
    """A PRODUCER batch of these messages."""
    subjects = sorted({subject for _, subject, _ in rows})
    return messages(
        [body for _, _, body in rows],
        due=[due for due, _, _ in rows],
        subjects=subjects,
        subject_of=[subjects.index(subject) for _, subject, _ in rows] if len(subjects) > 1 else None,
        keys=keys,
        flags=flags,
        expires=expires,
        part=part,
    )


def wanted(count: int, due_ms: int, name: str, subject: bytes = b"orders.eu", every_ms: int = 0) -> list[Wanted]:
    """Messages ``name-0`` and so on, due at START_MS + ``due_ms`` and then ``every_ms`` apart."""
    return [(START_MS + due_ms + index * every_ms, subject, f"{name}-{index}".encode()) for index in range(count)]


def _wall_ms(machine: SimMachine) -> int:
    return machine.wall_ms


def nobody(error: DelaydError) -> None:
    """The life that waited for this connection is over."""
