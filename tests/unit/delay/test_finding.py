"""Walks through pending messages: each pending row of the subject and the window is found once, wherever it stands."""

from __future__ import annotations

import pytest

from delayd.batch.columns import ProducerPart
from delayd.hours import INSTANT_MS_MAX, hour_of_ms
from delayd.log.hour import schedule_path
from delayd.outcome import MessageState
from delayd.testing.clock import START_MS
from delayd.wire.asked import AskedWindow, Content, Piece, Place, read_piece
from delayd.wire.requests import RequestType
from tests.batches import messages
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, World, wanted

HOUR_MS = 3_600_000
SUBJECT = b"orders.eu"
ALL = AskedWindow(SUBJECT, 0, INSTANT_MS_MAX)


def walk(world: World, window: AskedWindow) -> list[Piece]:
    """All pieces of a walk, while nothing else happens."""
    pieces: list[Piece] = []
    place: Place | None = window.place
    while place is not None:
        until = pieces[-1].until_sequence if pieces else window.until_sequence
        asked = window._replace(place=place, until_sequence=until).to_head(world.server.log_id)
        pieces.append(read_piece(*world.ask(RequestType.FIND, asked)))
        place = pieces[-1].place
        assert len(pieces) < 1_000, "the walk goes on for ever"
    return pieces


def found(world: World, window: AskedWindow) -> list[int]:
    return [sequence for piece in walk(world, window) for sequence in piece.rows["sequence"].tolist()]


@pytest.mark.parametrize("rows_max", [1, 3, 100])
def test_a_walk_finds_what_is_pending_wherever_it_stands_and_nothing_else(
    rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayd.delay.ending.finder.HOURS_MAX", 3)
    monkeypatch.setattr("delayd.delay.ending.finder.LOOK_ROWS", 4)
    world = World(load_ahead_ms=1_000)
    for step in range(3):
        for after_ms in (
            -2 * HOUR_MS,
            700,
            60_000,
            HOUR_MS - 1,
            HOUR_MS,
            *range(3 * HOUR_MS, 40 * HOUR_MS, 7 * HOUR_MS),
        ):
            world.send(
                [*wanted(2, after_ms, f"s{step}x{after_ms}"), *wanted(1, after_ms, f"o{step}x{after_ms}", b"mail")]
            )
            world.settle()
        if step == 1:
            world.outside.targets[0x7001].hangs = True
        world.cancel(world.receipts(f"s{step}x60000-1", f"s{step}x{10 * HOUR_MS}-0"))
        world.pass_ms(1_500)
        if step < 2:
            world.checkpoint()
    rows = {
        accepted.base_sequence + index: due
        for sent, accepted in world.outside.accepted.values()
        for index, (due, subject, _) in enumerate(sent.wanted)
        if subject == SUBJECT
    }
    asked = world.all_receipts()
    assert asked is not None
    for life in (world, world.after_crash()):
        states = dict(zip(asked.sequences.tolist(), life.states(asked), strict=True))
        pending = {sequence: due for sequence, due in rows.items() if states[sequence] is MessageState.PENDING}
        assert 30 < len(pending) < len(rows)
        for from_ms, to_ms in ((0, INSTANT_MS_MAX), (START_MS + HOUR_MS, START_MS + 20 * HOUR_MS)):
            window = ALL._replace(from_ms=from_ms, to_ms=to_ms, rows_max=rows_max)
            wanted_now = sorted(sequence for sequence, due in pending.items() if from_ms <= due < to_ms)
            assert sorted(found(life, window)) == wanted_now


@pytest.mark.parametrize(
    ("flipped", "window"),
    [(b"\x80\0\0\0", ALL), (b"eu", ALL._replace(tag="eu")), (b"h20", ALL._replace(content=Content.WHOLE))],
    ids=["columns", "tags", "bodies"],
)
def test_what_can_t_be_read_is_counted_and_the_rest_is_found(flipped: bytes, window: AskedWindow) -> None:
    world = World(load_ahead_ms=1_000)
    for hours in (20, 30):
        part = ProducerPart(1, hours, 0)
        due = [START_MS + hours * HOUR_MS] * 3
        world.ask(RequestType.SEND, body=messages([b"h%d" % hours] * 3, due=due, tags=[["eu"]] * 3, part=part))
    world.checkpoint()
    path = schedule_path(FOLDER, hour_of_ms(START_MS + 20 * HOUR_MS))
    whole = content(world.disk, path)
    at = 100 if window is ALL else whole.rindex(flipped)
    put(world.disk, path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    pieces = walk(world, window)
    assert sum(piece.unread for piece in pieces) == 1 and sum(len(piece.rows) for piece in pieces) == 3
    assert window is ALL or len(found(world, ALL)) == 6, "their instants are not damaged"
