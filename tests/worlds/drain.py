"""Two delay servers, of which one is drained into the other: the parts that the command and the courier play.

Invariant: nothing comes to the other server but what the first one makes for it (docs/drain.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from delayd.batch.batch import parse
from delayd.errors import DelaydError
from delayd.wire.asked import DrainOrder, DrainProgress
from delayd.wire.meta import SlotSet
from tests.worlds.delay import World
from tests.worlds.delay_adapter import AcceptedBatch


def two() -> tuple[World, World]:
    """A server that is drained, and one that takes its messages."""
    return World(load_ahead_ms=1_000), World(load_ahead_ms=1_000, seed=7)


def ask(world: World, order: DrainOrder) -> list[DrainProgress | DelaydError]:
    """Ask for a piece; the list holds the answer once it is there."""
    told: list[DrainProgress | DelaydError] = []
    world.core.asked.endings.let_leave(order, told.append)
    return told


def piece(world: World, to: int, slots: SlotSet | None = None) -> DrainProgress:
    """Let a piece of a walk that begins leave."""
    told = ask(world, DrainOrder(to, slots))
    world.settle()
    (progress,) = told
    assert isinstance(progress, DrainProgress), progress
    return progress


def log_id(world: World) -> int:
    """The log_id of a server."""
    return world.core.site.identity.log_id


def carry_one(world: World, other: World) -> Iterator[None]:
    """Take the first batch that leaves to the other server, and its answer back; yields in between."""
    drain = world.core.asked.endings.drain
    leaving = next(drain.waiting(log_id(other)))
    taken: list[AcceptedBatch | DelaydError] = []
    other.core.send_drained(parse(memoryview(drain.batch_of(leaving))), lambda what, duplicate: taken.append(what))
    other.settle()
    yield
    (what,) = taken
    assert isinstance(what, AcceptedBatch), what
    drain.accepted(leaving, {"base_sequence": what.base_sequence, "appended_at_ms": what.appended_at_ms})


def carry(world: World, other: World) -> None:
    """Take everything that leaves to the other server."""
    world.pass_ms(2_000)  # A start makes its batches again.
    while next(world.core.asked.endings.drain.waiting(log_id(other)), None) is not None:
        list(carry_one(world, other))
        world.pass_ms(100)
