"""Walks through pending messages: each pending row of the subject and the window is found once, wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from delayd.batch.batch import parse
from delayd.batch.columns import ProducerPart
from delayd.client.asking.walking import page_of
from delayd.delay.ending import copies, finder
from delayd.delay.filing.schedule_log import scan_fronts
from delayd.delay.ledger.ledger import Ledger
from delayd.delay.ledger.wanted import Wanted
from delayd.delay.stored import Stored
from delayd.errors import CallerError, SlowDown
from delayd.hours import INSTANT_MS_MAX, hour_of_ms
from delayd.log.schedule import schedule_path
from delayd.testing.clock import START_MS
from delayd.testing.executor import StepExecutor
from delayd.wire.ending import CancelAnswer, MessageState
from delayd.wire.finding import Content, Piece, Place, Window, read_piece
from tests.batches import messages
from tests.memory_files import content, put
from tests.worlds.delay import FOLDER, World, wanted
from tests.worlds.pieces import hear

HOUR_MS = 3_600_000
SUBJECT = b"orders.eu"


def walk(world: World, window: Window) -> list[Piece]:
    """All pieces of a walk, while nothing else happens."""
    pieces: list[Piece] = []
    place: Place | None = window.place
    while place is not None:
        until = pieces[-1].until_sequence if pieces else window.until_sequence
        told: list[Piece] = []
        world.core.endings.find(window._replace(place=place, until_sequence=until), hear(told))
        world.settle()
        (piece,) = told
        pieces.append(piece)
        place = piece.place
        assert len(pieces) < 10_000, "the walk goes on for ever"
    return pieces


def all_of(subject: bytes = SUBJECT, rows_max: int = 65_536) -> Window:
    return Window(subject, 0, INSTANT_MS_MAX, rows_max=rows_max)


def sequences(pieces: list[Piece]) -> list[int]:
    return [sequence for piece in pieces for sequence in piece.rows["sequence"].tolist()]


def pending(world: World, window: Window) -> set[int]:
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
                for window in (all_of(subject, random.choice([1, 3, 100])), Window(subject, now_ms, now_ms + HOUR_MS)):
                    found = sequences(walk(world, window))
                    assert len(found) == len(set(found)), "a row is found twice"
                    assert set(found) == pending(world, window)


def test_what_is_found_can_be_cancelled_as_it_is_named() -> None:
    world = World(load_ahead_ms=1_000)
    for due_ms in (5_000, 2 * HOUR_MS, 40 * HOUR_MS):
        world.send(wanted(5, due_ms, f"m{due_ms}"))
    world.settle()
    world.checkpoint()
    world.send(wanted(5, 41 * HOUR_MS, "above"))
    world.settle()
    for piece in walk(world, all_of(SUBJECT, rows_max=7)):
        answers = world.cancel(piece.asked())
        world.settle()
        assert set(answers[0]) <= {CancelAnswer.CANCELLED}
    assert sequences(walk(world, all_of(SUBJECT))) == []
    world.drain(50 * HOUR_MS)
    world.check_books()


def test_rows_that_come_during_a_walk_are_left_out() -> None:
    world = World()
    world.send(wanted(4, HOUR_MS, "before"))
    world.settle()
    told: list[Piece] = []
    world.core.endings.find(all_of(SUBJECT, rows_max=2), hear(told))
    world.settle()
    world.send(wanted(4, HOUR_MS, "after"))
    world.settle()
    first = told[0]
    assert first.place is not None
    rest = walk(world, all_of(SUBJECT)._replace(place=first.place, until_sequence=first.until_sequence))
    assert len(sequences([first, *rest])) == 4
    assert len(sequences(walk(world, all_of(SUBJECT)))) == 8


def test_rows_that_leave_or_end_during_a_piece_are_left_out() -> None:
    world = World(load_ahead_ms=60_000)
    world.send(wanted(1, 0, "first"))
    world.settle()
    for due_ms in (5_000, 50_000, 51_000):
        world.send(wanted(3, due_ms, f"m{due_ms}"))
    world.settle()
    told: list[Piece] = []
    world.core.endings.find(all_of(), hear(told))
    world.cancel(world.receipts("m51000"))
    world.clock.advance(6_000)
    world.core.wake()
    world.settle()
    (piece,) = told
    assert piece.rows["sequence"].tolist() == world.receipts("m50000").sequences.tolist()
    world.drain(60_000)
    world.check_books()


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
    world.core.endings.find(all_of(), hear(told))
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


def test_a_file_is_read_once_for_all_pieces_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[int] = []

    def scan(*arguments: Any) -> Iterator[Stored]:
        scanned.append(arguments[3])
        return scan_fronts(*arguments)

    world = World(load_ahead_ms=1_000)
    for hours in (20, 30):
        world.send(wanted(9, hours * HOUR_MS, f"h{hours}"))
    world.settle()
    world.checkpoint()
    monkeypatch.setattr(finder, "scan_fronts", scan)
    assert len(sequences(walk(world, all_of(SUBJECT, rows_max=2)))) == 18
    first = (START_MS + 20 * HOUR_MS) // HOUR_MS
    assert [hour - first for hour in scanned] == [0, 10]
    # Another walk, or a file of which more counts, is read anew.
    world.send(wanted(3, 20 * HOUR_MS, "more"))
    world.settle()
    world.checkpoint()
    assert len(sequences(walk(world, all_of(SUBJECT, rows_max=5)))) == 21


def test_pieces_under_way_are_bounded() -> None:
    world = World()
    told: list[Piece] = []
    for _ in range(finder.PIECES_UNDER_WAY_MAX):
        world.core.endings.find(all_of(), hear(told))
    with pytest.raises(SlowDown):
        world.core.endings.find(all_of(), hear(told))
    world.settle()
    assert len(told) == finder.PIECES_UNDER_WAY_MAX
    assert len(walk(world, all_of())) == 1
    assert np.array_equal(told[0].rows, told[-1].rows)


def test_messages_with_a_tag_are_found_wherever_they_stand() -> None:
    world = World(load_ahead_ms=1_000)
    tagged: set[int] = set()
    many = [f"other-{number}" for number in range(40)]  # Their bits together are those of any tag.

    def send(due_ms: int, rows: int) -> None:
        """Some of the rows have the tag, some others, some none; some batches have no tags at all."""
        number = world.core.intake.next_sequence
        kinds = [["eu"], ["eu", "urgent"], many[:16], many[16:32], [], ["käse"]]
        tags = [kinds[(row + number) % len(kinds)] for row in range(rows)]
        due = [START_MS + due_ms + row for row in range(rows)]
        bodies = [b"%d-%d" % (number, row) for row in range(rows)]
        for batch_number, given in ((number, tags), (number + 10_000, None)):
            part = ProducerPart(1, batch_number, 0)
            data = messages(bodies, due=due, tags=given, subjects=[SUBJECT], part=part)
            world.core.send(parse(data), _ignore)
        world.settle()
        tagged.update(number + row for row, own in enumerate(tags) if "eu" in own)

    for due_ms in (5_000, HOUR_MS, 2 * HOUR_MS, 40 * HOUR_MS):
        for rows in (1, 50):
            send(due_ms, rows)
    world.checkpoint()
    for due_ms in (6_000, HOUR_MS, 40 * HOUR_MS + 7):
        send(due_ms, 20)
    for again in (world, world.after_crash()):
        again.settle()
        for rows_max in (7, 65_536):
            found = sequences(walk(again, all_of(rows_max=rows_max)._replace(tag="eu")))
            assert len(found) == len(tagged) and set(found) == tagged
        assert len(sequences(walk(again, all_of()))) > 2 * len(tagged)
        assert not sequences(walk(again, all_of()._replace(tag="never")))


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


@pytest.mark.parametrize("piece_bytes", [1, 300, 4 << 20])
@pytest.mark.parametrize("content", [Content.LABELS, Content.WHOLE])
def test_a_piece_has_what_its_messages_hold(
    content: Content, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "CONTENT_BYTES_MAX", piece_bytes)
    world = World(load_ahead_ms=1_000)
    sent: dict[int, tuple[bytes, str, tuple[str, ...]]] = {}

    def send(due_ms: int, rows: int, *, labels: bool) -> None:
        first = world.core.intake.next_sequence
        bodies = [b"x" * row + b"of %d" % (first + row) for row in range(rows)]
        keys = [b"k%d" % (first + row) if labels and row % 3 else b"" for row in range(rows)]
        tags = [["eu"] if labels and row % 2 else [] for row in range(rows)]
        data = messages(
            bodies,
            due=[START_MS + due_ms + row for row in range(rows)],
            keys=keys if labels else None,
            tags=tags if labels else None,
            subjects=[SUBJECT],
            part=ProducerPart(1, first, 0),
        )
        world.core.send(parse(data), _ignore)
        world.settle()
        for row in range(rows):
            sent[first + row] = (bodies[row], keys[row].decode(), tuple(tags[row]))

    for due_ms in (5_000, HOUR_MS, 40 * HOUR_MS):
        send(due_ms, 1, labels=True)
        send(due_ms, 20, labels=False)
    world.checkpoint()
    for due_ms in (6_000, 40 * HOUR_MS + 7):
        send(due_ms, 12, labels=True)
    for again in (world, world.after_crash()):
        again.settle()
        pieces = walk(again, all_of()._replace(content=content))
        told = {sequence: row for piece in pieces for sequence, row in rows_of(piece)}
        assert sum(len(piece.rows) for piece in pieces) == len(told) == len(sent)
        for sequence, (body, key, tags) in sent.items():
            told_body = body if content is Content.WHOLE else b""
            assert told[sequence] == (told_body, len(body), key, tags)
        assert len(pieces) > 10 or piece_bytes > 300


def rows_of(piece: Piece) -> Iterator[tuple[int, tuple[bytes, int, str, tuple[str, ...]]]]:
    """Body, size, key and tags of each message of a piece, as a client reads the answer."""
    head = {**piece.to_head()}
    read = read_piece(head, b"".join(piece.to_body()))
    page = page_of(7, read, whole=True)
    for message in page:
        assert message.body is not None
        yield message.receipt.sequence, (message.body, message.size, message.key or "", message.tags)


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


@pytest.mark.parametrize("change", ["another sequence", "fewer rows", "cut", "another kind"])
def test_a_client_takes_no_batch_of_other_messages(change: str) -> None:
    world = World(load_ahead_ms=1_000)
    world.send(wanted(3, 20 * HOUR_MS, "a"))
    world.settle()
    (piece,) = walk(world, all_of()._replace(content=Content.WHOLE))
    assert piece.batch is not None
    body = b"".join(piece.to_body())
    head = {**piece.to_head()}
    if change == "another sequence":
        body = bytes([body[0] ^ 1]) + body[1:]
    elif change == "fewer rows":
        head["rows"] = 2
        body = body[:48] + body[72:]
    elif change == "cut":
        body = body[:-8]
    else:
        body = body[:72] + messages([b"1", b"2", b"3"], subjects=[SUBJECT], part=ProducerPart(1, 1, 0))
    with pytest.raises(CallerError):
        read_piece(head, body)


def _ignore(*_: object) -> None:
    """Nobody waits for the answer."""
