"""A delay server dies at each disk operation of a walk that cancels or moves messages in bulk, and the caller goes on.

The caller remembers what a client does: the bound of the walk that moves (`Walked.resume`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from delayd.hours import INSTANT_MS_MAX
from delayd.outcome import MessageState
from delayd.wire.asked import Asked, AskedWindow, Piece, Place, read_piece
from delayd.wire.requests import RequestType
from tests.crash.delay_deaths import LaterDeath
from tests.worlds.delay import Remains, World, wanted

HOUR_MS = 3_600_000
SHIFT_MS = HOUR_MS + 7
PARTS = 2
DRAIN_EVERY = 10  # Deaths after which all messages fall due, which takes as long as all else.
CANCELLED, MOVED = b"mails", b"orders"
NAMES = ("near", "far", "above")
SETTINGS = {"segment_bytes": 4_096, "tail_bytes": 0, "load_ahead_ms": 1_000, "checkpoint_every_ms": HOUR_MS}


@dataclass
class Caller:
    """What outlives the server: the bound of the walk that moves."""

    until: int = 0


def fill(world: World) -> None:
    """Messages in the wheel, in schedule logs, and above the checkpoint."""
    for name, due_ms in zip(NAMES, (600_000, 5 * HOUR_MS, 5 * HOUR_MS + 1), strict=True):
        if name == "above":
            world.checkpoint()
        for subject in (CANCELLED, MOVED):
            world.send(wanted(3, due_ms, f"{name}-{subject.decode()}", subject))
        world.settle()


def walk(world: World, subject: bytes, until: int, bound: Callable[[int], None], act: Callable[[Piece], None]) -> None:
    place: Place | None = Place()
    while place is not None:
        window = AskedWindow(subject, 0, INSTANT_MS_MAX, place, until, rows_max=4)
        piece = read_piece(*world.ask(RequestType.FIND, window.to_head(world.server.log_id)))
        place, until = piece.place, piece.until_sequence
        bound(until)
        if len(piece.rows):
            act(piece)
        world.settle()


def work(world: World, caller: Caller) -> None:
    """Move all messages of one subject, and cancel all of the other, with a checkpoint in between."""

    def cancel(piece: Piece) -> None:
        world.cancel(piece.asked())

    def move(piece: Piece) -> None:
        asked: Asked = piece.asked()
        world.reschedule(asked, *(asked.deliver_at_ms + SHIFT_MS).tolist())

    def bound(until: int) -> None:
        caller.until = until

    walk(world, MOVED, caller.until, bound, move)
    world.checkpoint()
    walk(world, CANCELLED, 0, lambda until: None, cancel)


def check(remains: Remains, caller: Caller, *, drain: bool) -> None:
    world = World(remains, seed=2, **SETTINGS)  # type: ignore[arg-type]
    world.settle()
    work(world, Caller(caller.until))
    cancelled = world.receipts(*(f"{name}-{CANCELLED.decode()}" for name in NAMES))
    assert set(world.states(cancelled)) == {MessageState.CANCELLED}
    moved = world.receipts(*(f"{name}-{MOVED.decode()}" for name in NAMES))
    for sequence, due_ms in zip(moved.sequences.tolist(), moved.deliver_at_ms.tolist(), strict=True):
        newer, newer_due_ms, _ = world.outside.moved_rows[sequence]
        assert newer_due_ms == due_ms + SHIFT_MS
        assert newer not in world.outside.moved_rows, f"message {sequence} was moved twice"
    if drain:
        world.drain(10 * HOUR_MS)
        world.check_books()


@pytest.mark.parametrize("part", range(PARTS))
def test_a_walk_goes_on_after_a_death_at_each_operation_and_does_nothing_twice(part: int) -> None:
    def death_at(at: int | None) -> tuple[LaterDeath, Caller]:
        caller = Caller()
        return LaterDeath(at, SETTINGS, lambda world: work(world, caller), fill), caller

    operations = death_at(None)[0].operations
    assert len(operations) > 20
    for at in range(1 + part, len(operations) + 2, PARTS):
        death, caller = death_at(at)
        for number, (how, remains) in enumerate(death.each_next()):
            try:
                check(remains, caller, drain=not number and at % DRAIN_EVERY < PARTS)
            except AssertionError as error:
                raise AssertionError(f"{how}, operation {at}: {error}") from error
