"""`delayd trace`: by sequence and by key, through moves and replacements."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import delayd
from delayd.log.dispatch import Outcome, Reason
from tests.books import HOUR_MS, START_MS, Books

from .runner import run


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Sequences 1 and 2 have one key, 3 another one; 2 took the place of 1, and 4 has no key."""
    books = Books(str(tmp_path))
    books.send([START_MS], keys=["order-42"])
    books.checkpoint()
    books.send([START_MS + HOUR_MS, START_MS + 5, START_MS + 6], keys=["order-42", "17", ""])
    yield books
    books.close()


def _steps(books: Books, *arguments: str) -> list[tuple[str, str]]:
    ran = run("trace", *arguments, "--data", books.root, "--format", "json")
    assert ran.code == 0, ran.err
    return [(row["step"], row["detail"]) for row in json.loads(ran.out)]


def test_a_key_follows_the_newest_message_and_says_how_many_had_it_before(books: Books) -> None:
    books.decide([1], Outcome.CANCELLED, Reason.REPLACED, other=2)
    ran = run("trace", "orders", "order-42", "--data", books.root, "--format", "json")
    assert (ran.code, "1 earlier messages had this key" in ran.err) == (0, True)
    assert [row["step"] for row in json.loads(ran.out)] == ["accepted", "next"]
    assert "earlier" not in run("trace", "orders", "17", "--key", "--data", books.root).err


@pytest.mark.parametrize(("reason", "step"), [(Reason.MOVED, "moved"), (Reason.REPLACED, "replaced")])
def test_a_message_that_another_one_took_the_place_of_is_followed(books: Books, reason: Reason, step: str) -> None:
    books.decide([1], Outcome.CANCELLED, reason, other=2)
    steps = _steps(books, "orders", "1")
    assert [name for name, _ in steps] == ["accepted", "filed", step, "accepted", "next"]
    assert "to sequence 2" in steps[2][1] and "2026-11-20T17:00:00.000Z" in steps[4][1]


def test_a_rejected_message_never_took_the_key(books: Books) -> None:
    books.decide([2], Outcome.CANCELLED, Reason.REJECTED, other=1)
    assert [name for name, _ in _steps(books, "orders", "order-42")] == ["accepted", "filed", "next"]
    steps = _steps(books, "orders", "2")
    assert steps[1][0] == "rejected" and "because of sequence 1" in steps[1][1]


def test_digits_are_a_sequence_unless_they_are_called_a_key(books: Books) -> None:
    assert run("trace", "orders", "17", "--data", books.root).code == 2
    assert _steps(books, "orders", "17", "--key")[0][0] == "accepted"
    assert delayd.open_data(books.root).trace("orders", "17")["step"].tolist() == ["accepted", "next"]


@pytest.mark.parametrize("which", ["order-43", "99"])
def test_what_is_not_there_is_named(books: Books, which: str) -> None:
    ran = run("trace", "orders", which, "--data", books.root)
    assert ran.code == 2 and "no message of that subject and" in ran.err


def test_the_key_of_another_subject_is_not_meant(books: Books) -> None:
    assert run("trace", "bills", "order-42", "--data", books.root).code == 2


@pytest.mark.parametrize("width", [80, 40])
def test_a_trace_fits_the_terminal_and_csv_is_exact(books: Books, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("LINES", raising=False)
    shown = run("trace", "orders", "1", "--data", books.root).out
    assert max(map(len, shown.splitlines())) <= width and "accepted" in shown
    rows = list(csv.DictReader(io.StringIO(run("trace", "orders", "1", "--data", books.root, "--format", "csv").out)))
    assert [row["step"] for row in rows] == ["accepted", "filed", "next"] and int(rows[0]["byte"]) > 0
