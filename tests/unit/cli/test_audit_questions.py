"""The questions with which docs/audit.md begins are answered by the commands and queries that stand there."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from freezegun import freeze_time

from tests.books import Books

from .runner import run

PAGE = Path(__file__).parents[3] / "docs/audit.md"
SECTION = PAGE.read_text().split("## Three questions")[1].split("\n## ")[0]
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", SECTION, re.DOTALL) for line in block.splitlines()]
MARCH_MS = 1_803_900_000_000  # 2027-03-01 15:00 UTC
JULY_MS = 1_814_000_000_000  # 2027-06-26
DAY_MS = 24 * 3_600_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Message 4711 left in March, 60 ms late; 4712 of the same hour is lost; 3 messages are due in July."""
    books = Books(str(tmp_path_factory.mktemp("books")))
    books.send([MARCH_MS - DAY_MS + row for row in range(4710)], at_ms=MARCH_MS - 2 * DAY_MS)
    books.hand_over(range(1, 4711))
    left, lost = books.send([MARCH_MS, MARCH_MS + 1], subjects=("orders.cancel", "orders.bill"))
    books.hand_over([left], delay_ms=60)
    assert (left, lost) == (4711, 4712)
    books.send([JULY_MS + 10 * DAY_MS, JULY_MS + 10 * DAY_MS + 1, JULY_MS + 11 * DAY_MS])
    books.checkpoint()
    books.see_all(MARCH_MS + DAY_MS)
    books.close()
    # What DuckDB loads does not like a frozen clock, so it is loaded before.
    assert run("sql", "select 1", books.root).code == 0
    yield books.root


def answered(line: str, data: str) -> tuple[int, str]:
    words = [data if word == "DIR" else word for word in shlex.split(line)]
    assert words.pop(0) == "delayd"
    with freeze_time("2027-04-02T12:00:00Z"):
        ran = run(*words)
    return ran.code, ran.out


def test_there_are_three_questions_with_a_command_and_a_query_each() -> None:
    assert len(COMMANDS) == 6 and [line.split()[1] for line in COMMANDS[1::2]] == ["sql"] * 3


def test_did_the_message_leave_on_time(data: str) -> None:
    code, out = answered(COMMANDS[0], data)
    assert code == 0 and "60 ms" in out
    code, out = answered(COMMANDS[1], data)
    assert code == 0 and "DELIVERED" in out and re.search(r"\b60\b", out)


def test_what_was_lost_in_march(data: str) -> None:
    code, out = answered(COMMANDS[2], data)
    assert code == 3 and "lost 1, duplicate 0" in out and "4712" in out
    code, out = answered(COMMANDS[3], data)
    assert code == 0 and "4712" in out and "orders.bill" in out and "4711" not in out


def test_what_is_due_next_quarter(data: str) -> None:
    code, out = answered(COMMANDS[4], data)
    days = [line.split()[:2] for line in out.splitlines() if line.startswith("2027-")]
    assert code == 0 and [each for each in days if each[1] != "0"] == [["2027-07-06", "2"], ["2027-07-07", "1"]]
    code, out = answered(COMMANDS[5], data)
    rows = [line.split() for line in out.splitlines() if line.startswith("2027-")]
    assert code == 0 and rows == [["2027-07-06", "2"], ["2027-07-07", "1"]]
