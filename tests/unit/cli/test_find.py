"""`delayd schedule find`: messages by their columns and by what their bodies and headers say."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli.file_commands
from delayd.outcome import Outcome
from delayd.reading import find as reading
from tests.books import HOUR_MS, START_MS, Books

from .runner import Ran, run

LATER_MS = START_MS + 2 * HOUR_MS


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Six messages of an hour, filed, two of them done; six of a later hour, filed; three are in the message log."""
    books = Books(str(tmp_path))
    books.send([START_MS + row * 1_000 for row in range(6)], subjects=("orders", "bills"))
    books.send([LATER_MS + row for row in range(6)], subjects=("orders",))
    books.checkpoint()
    books.send([LATER_MS + 7, LATER_MS + 8, START_MS + 9], subjects=("orders", "bills", "bills"))
    books.hand_over([1], delay_ms=5)
    books.decide([2], Outcome.DEAD)
    yield books
    books.close()


def _find(books: Books, *arguments: str, form: str = "json") -> Ran:
    return run("schedule", "find", "--data", books.root, "--format", form, *arguments)


def _found(books: Books, *arguments: str) -> list[int]:
    ran = _find(books, *arguments)
    assert ran.code == 0, ran.err
    return [row["sequence"] for row in json.loads(ran.out)]


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_pending_messages_are_found_and_with_all_the_others_too(books: Books) -> None:
    assert _found(books) == [13, 14, 15, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert _find(books, "--count", "--grep", "body 1", form="table").out == "6\n"
    ran = _find(books, "--all")
    states = {row["sequence"]: row["state"] for row in json.loads(ran.out)}
    assert sorted(states) == list(range(1, 16))
    assert states[1] == "dispatched" and states[2] == "dead"
    assert {states[sequence] for sequence in range(3, 16)} == {"pending"}


def test_a_sealed_hour_is_searched_with_all_only(books: Books) -> None:
    books.decide([3, 4, 5, 6, 15], Outcome.DISPATCHED)
    books.checkpoint()
    books.tick(START_MS + HOUR_MS)
    books.checkpoint()
    books.seal()
    assert _found(books) == list(range(7, 15))
    assert sorted(_found(books, "--all")) == list(range(1, 16))


def test_many_pieces_give_the_same_in_one_process_and_in_several(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        books.send([LATER_MS + row for row in range(50)])
        books.checkpoint()
    alone = _find(books, "--limit", "0").out
    assert alone.count("\n") == 2 + 13 + 250
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)
    monkeypatch.setattr(cli.file_commands, "ALONE_TASKS", 0)
    assert _find(books, "--limit", "0").out == alone
    ran = _find(books, "--limit", "2")
    assert len(json.loads(ran.out)) == 2


def test_damage_in_the_middle_hides_what_it_damages_and_nothing_else(books: Books) -> None:
    for _ in range(3):
        books.send([LATER_MS + row for row in range(4)])
        books.checkpoint()
    every = _found(books)
    path = books.path_of("schedule", START_MS // HOUR_MS + 2)
    data = path.read_bytes()
    _flip(path, data.index(b"body 17"))
    ran = _find(books)
    assert ran.code == 3
    assert f"delayd: left out: {path} is damaged at byte " in ran.err
    left = [row["sequence"] for row in json.loads(ran.out)]
    assert set(every) - set(left) == {16, 17, 18, 19}
    # A group whose header is damaged, too: the ones behind it are found by their own headers.
    _flip(path, 64 + 8)
    ran = _find(books)
    assert ran.code == 3
    left = [row["sequence"] for row in json.loads(ran.out)]
    assert {3, 4, 5, 6, 20, 21, 22, 23, 24, 25, 26, 27} <= set(left)
    assert not set(left) & {16, 17, 18, 19}


def test_damage_in_the_message_log_hides_no_filed_message(books: Books) -> None:
    books.send([LATER_MS + 9])
    books.send([LATER_MS + 10])
    (path,) = Path(books.messages.place.folder).iterdir()
    _flip(path, path.read_bytes().index(b"body 16"))
    ran = _find(books)
    assert ran.code == 3 and str(path) in ran.err
    assert [row["sequence"] for row in json.loads(ran.out)] == [13, 14, 15, 17, *range(3, 13)]


def test_a_group_that_is_being_written_is_no_damage(books: Books) -> None:
    (path,) = Path(books.messages.place.folder).iterdir()
    with path.open("ab") as file:
        file.write(b"GRUP" + bytes(60))
    assert 15 in _found(books)


def test_damaged_outcomes_leave_the_state_of_their_hour_unknown(books: Books) -> None:
    path = books.path_of("dispatch")
    books.checkpoint()
    _flip(path, path.stat().st_size // 2)
    ran = _find(books)
    states = {row["sequence"]: row["state"] for row in json.loads(ran.out)}
    assert ran.code == 3 and str(path) in ran.err
    assert states[3] == "unknown" and states[7] == "pending"


def test_a_checkpoint_meanwhile_loses_and_repeats_no_message(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    every = sorted(_found(books))
    plan = reading.unfiled_pieces
    moved: list[bool] = []

    def pieces(*arguments: object) -> Iterator[reading.FilePiece]:
        found = list(plan(*arguments))  # type: ignore[arg-type]
        if not moved:
            moved.append(True)
            yield from found[:1]
            books.checkpoint()
            yield found[0]._replace(path=found[0].path.replace("00.log", "01.log"))
        else:
            yield from found

    monkeypatch.setattr(reading, "unfiled_pieces", pieces)
    assert sorted(_found(books)) == every and moved


def test_keys_tags_and_headers_are_found(books: Books) -> None:
    books.send(
        [LATER_MS + row for row in range(4)],
        keys=["order-1", "", "order-10", "ü"],
        tags=[("night", "eu"), (), ("night",), ("nights",)],
        headers=[{"tenant": "acme"}, {}, {"tenant": "acme 2"}, {"name": "tenant"}],
    )
    for filed in (False, True):
        if filed:
            books.checkpoint()
        assert _found(books, "--key", "order-1") == [16]
        assert _found(books, "--key", "ü") == [19] and _found(books, "bills", "--key", "ü") == []
        assert _found(books, "--tag", "night") == [16, 18]
        assert _found(books, "--tag", "night", "--tag", "eu") == [16]
        assert _found(books, "--header", "tenant=acme") == [16, 18]
        assert _found(books, "--header", "tenant=^acme$") == [16]
        assert _found(books, "--header", "tenant=acme", "--header", "name=x") == []
        assert _found(books, "--grep", "acme") == [16, 18]
        (row,) = json.loads(_find(books, "--key", "order-1").out)
        assert (row["key"], row["tags"]) == ("order-1", ["night", "eu"])
    rows = list(csv.DictReader(io.StringIO(_find(books, "--tag", "eu", form="csv").out)))
    assert rows[0]["tags"] == "night, eu"


def test_a_key_finds_the_later_lives_of_its_messages(books: Books) -> None:
    books.send([LATER_MS], keys=["order-1"])
    books.send(
        [LATER_MS + row for row in range(4)],
        subjects=("%retry/00000000000000aa/1",),
        headers=[{"delayd.key": "order-1", "tenant": "acme"}, {"delayd.key": "order-10"}, {}, {"key": "order-1"}],
    )
    for filed in (False, True):
        if filed:
            books.checkpoint()
        assert _found(books, "--key", "order-1") == [16, 17]
        assert _found(books, "--key", "order-1", "--header", "tenant=acme") == [17]
        assert [row["key"] for row in json.loads(_find(books, "--key", "order-1").out)] == ["order-1"] * 2
        # Of what subject a later life was at first, no file of a delay server says.
        assert _found(books, "orders", "--key", "order-1") == [16]


@pytest.mark.parametrize("way", ["flipped", "cut"])
@pytest.mark.parametrize("log", ["schedule", "message"])
def test_at_whichever_byte_a_file_is_damaged_no_row_is_wrong_and_others_are_there(
    books: Books, log: str, way: str
) -> None:
    for part in range(2):
        books.send([LATER_MS + row for row in range(3)], keys=["a", "", f"b{part}"])
        books.checkpoint()
    books.send([LATER_MS + 100])
    books.send([LATER_MS + 101])
    hour = START_MS // HOUR_MS + 2
    path = books.path_of("schedule", hour) if log == "schedule" else next(Path(books.messages.place.folder).iterdir())
    whole = path.read_bytes()
    others = {3, 4, 5, 6, 15} if log == "schedule" else set(range(3, 22))
    every = {row["sequence"]: row for row in json.loads(_find(books).out)}
    first = 0 if log == "schedule" else books.replay_offset + 64
    for position in range(first, len(whole), 13):
        data = bytearray(whole)
        data[position] ^= 0x41
        path.write_bytes(data if way == "flipped" else whole[:position])
        ran = _find(books)
        assert ran.code in (0, 3), (position, ran.err)
        found = {row["sequence"]: row for row in json.loads(ran.out)}
        assert all(every[sequence] == row for sequence, row in found.items()), position
        assert others <= set(found), position
        assert ran.code == 3 or log == "message" or found.keys() == every.keys(), position
    path.write_bytes(whole)
