"""Walks through pending messages: each pending row of the subject and the window is found once, wherever it stands."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.delay.ending import finder
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.ledger.wanted import Wanted
from delayd.hours import INSTANT_MS_MAX, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.outcome import MessageState
from delayd.testing.clock import START_MS
from delayd.testing.executor import StepExecutor
from delayd.wire.asked import AskedWindow, Content, Piece, Place
from tests.batches import messages
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, World, wanted
from tests.worlds.pieces import hear

HOUR_MS = 3_600_000
SUBJECT = b"orders.eu"


def walk(world: World, window: AskedWindow) -> list[Piece]:
    """All pieces of a walk, while nothing else happens."""
    pieces: list[Piece] = []
    place: Place | None = window.place
    while place is not None:
        until = pieces[-1].until_sequence if pieces else window.until_sequence
        told: list[Piece] = []
        world.core.asked.endings.find(window._replace(place=place, until_sequence=until), hear(told))
        world.settle()
        (piece,) = told
        pieces.append(piece)
        place = piece.place
        assert len(pieces) < 10_000, "the walk goes on for ever"
    return pieces


def all_of(subject: bytes = SUBJECT, rows_max: int = 65_536) -> AskedWindow:
    return AskedWindow(subject, 0, INSTANT_MS_MAX, rows_max=rows_max)


def sequences(pieces: list[Piece]) -> list[int]:
    return [sequence for piece in pieces for sequence in piece.rows["sequence"].tolist()]


def pending(world: World, window: AskedWindow) -> set[int]:
    """The pending rows of all that was ever accepted, as GET tells them one by one."""
    rows = [
        (accepted.base_sequence + index, due)
        for sent, accepted in world.outside.accepted.values()
        for index, (due, subject, _) in enumerate(sent.wanted)
        if subject == window.subject and window.from_ms <= due < window.to_ms
    ]
    asked = world.receipts(
        *{body.decode() for sent, _ in world.outside.accepted.values() for _, _, body in sent.wanted}
    )
    states = dict(zip(asked.sequences.tolist(), world.states(asked), strict=True))
    return {sequence for sequence, _ in rows if states[sequence] is MessageState.PENDING}


@pytest.mark.parametrize("seed", range(12))
def test_a_walk_finds_what_is_pending_and_nothing_else(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "HOURS_MAX", 3)
    monkeypatch.setattr(finder, "LOOK_ROWS", 4)
    random = Random(seed)
    world = World(seed=seed, load_ahead_ms=1_000)
    for step in range(30):
        kind = random.choice(["send", "send", "send", "pass", "checkpoint", "cancel", "hang", "crash"])
        if kind == "send":
            delays = [0, 700, 60_000, HOUR_MS - 1, HOUR_MS, 3 * HOUR_MS, 40 * HOUR_MS, -5_000, -2 * HOUR_MS]
            world.send(
                row
                for number in range(random.randrange(1, 4))
                for row in wanted(
                    random.randrange(1, 6),
                    random.choice(delays),
                    f"s{step}x{number}",
                    random.choice([b"orders", b"mails"]),
                )
            )
        elif kind == "pass":
            world.pass_ms(random.choice([100, 5_000, HOUR_MS // 2]))
        elif kind == "checkpoint":
            world.checkpoint()
        elif kind == "cancel":
            asked = world.some_receipts(random)
            if asked is not None:
                world.cancel(asked)
        elif kind == "hang":
            target = random.choice(list(world.outside.targets.values()))
            target.hangs = not target.hangs
        else:
            world = world.after_crash()
        world.settle()
        if step % 5 == 4 and world.outside.accepted:
            subjects = {subject for sent, _ in world.outside.accepted.values() for _, subject, _ in sent.wanted}
            now_ms = world.clock.now_ms()
            for subject in sorted(subjects):
                for window in (
                    all_of(subject, random.choice([1, 3, 100])),
                    AskedWindow(subject, now_ms, now_ms + HOUR_MS),
                ):
                    found = sequences(walk(world, window))
                    assert len(found) == len(set(found)), "a row is found twice"
                    assert set(found) == pending(world, window)


def test_the_loop_is_not_held_by_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "LOOK_ROWS", 10)
    looked: list[int] = []

    def spied(look: Any) -> Any:
        def spy(own: Ledger, found: Wanted, *others: Any) -> Any:
            looked.append(len(found))
            return look(own, found, *others)

        return spy

    world = World(load_ahead_ms=HOUR_MS)
    for due_ms in (10_000, 20_000, 50 * HOUR_MS):
        world.send(wanted(35, due_ms, f"m{due_ms}"))
    world.settle()
    for name in ("places", "_places_standing"):
        monkeypatch.setattr(Ledger, name, spied(getattr(Ledger, name)))
    worker = world.threads.worker
    assert isinstance(worker, StepExecutor)
    told: list[Piece] = []
    world.core.asked.endings.find(all_of(), hear(told))
    turns = 0
    while not told:
        worker.run_one()
        worker.complete_one()
        turns += 1
        assert sum(looked) <= 10 * (turns - 1), "the loop asked about more rows than belong to a turn"
    assert len(told[0].rows) == sum(looked) == 105


def test_a_damaged_hour_is_told_and_the_others_are_found() -> None:
    world = World(load_ahead_ms=1_000)
    for hours in (20, 30):
        world.send(wanted(3, hours * HOUR_MS, f"h{hours}"))
    world.settle()
    world.checkpoint()
    file = world.disk.open(schedule_path(FOLDER, (START_MS + 20 * HOUR_MS) // HOUR_MS), write=True)
    file.pwritev([b"\xff" * 64], 100)
    file.close()
    pieces = walk(world, all_of(SUBJECT))
    assert sum(piece.unread for piece in pieces) == 1
    assert len(sequences(pieces)) == 3


def test_a_file_that_can_t_be_read_for_its_tags_is_counted() -> None:
    world = World(load_ahead_ms=1_000)
    due = [START_MS + 40 * HOUR_MS]
    data = messages([b"x"], due=due, tags=[["eu"]], subjects=[SUBJECT], part=ProducerPart(1, 1, 0))
    world.core.send(parse(data), _ignore)
    world.settle()
    world.checkpoint()
    path = schedule_path(FOLDER, hour_of_ms(START_MS + 40 * HOUR_MS))
    whole = content(world.disk, path)
    at = whole.rindex(b"eu")  # A tag.
    put(world.disk, path, whole[:at] + b"E" + whole[at + 1 :])
    (piece,) = walk(world, all_of()._replace(tag="eu"))
    assert piece.unread == 1 and not len(piece.rows)
    (piece,) = walk(world, all_of())
    assert len(piece.rows) == 1, "its instant is not damaged"


def test_what_can_t_be_read_for_its_content_is_counted_and_the_rest_is_found() -> None:
    world = World(load_ahead_ms=1_000)
    for hours in (20, 30):
        world.send(wanted(3, hours * HOUR_MS, f"h{hours}"))
    world.settle()
    world.checkpoint()
    path = schedule_path(FOLDER, hour_of_ms(START_MS + 20 * HOUR_MS))
    whole = content(world.disk, path)
    at = whole.rindex(b"h20")  # A body.
    put(world.disk, path, whole[:at] + b"H" + whole[at + 1 :])
    pieces = walk(world, all_of()._replace(content=Content.WHOLE))
    assert sum(piece.unread for piece in pieces) == 1
    assert len(sequences(pieces)) == 3


def _ignore(*_: object) -> None:
    """Nobody waits for the answer."""
