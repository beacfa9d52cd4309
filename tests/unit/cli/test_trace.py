"""`delayd trace`: by sequence and by key, through moves and replacements."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from delayd.outcome import Outcome, Reason
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
