"""``delayd sql``: views of directories and archives, of one machine and of several, in DuckDB."""

import importlib.util
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.books import HOUR_MS, START_MS, Books
from tests.unit.reading.archived import write_books

from .runner import Ran, run


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """A machine with the delay server, one with the realtime server, and an archive: three sealed hours."""
    folder = tmp_path_factory.mktemp("machines")
    books = write_books(folder / "data")
    books.close()
    archive = str(folder / "archive")
    assert run("archive", "--data", books.root, "--to", archive).code == 0
    for machine, server in (("a", "delay"), ("b", "realtime")):
        shutil.copytree(folder / "data" / server, folder / machine / server)
    yield str(folder / "a"), str(folder / "b"), archive


def asked(query: str, *words: str) -> list[dict[str, Any]]:
    ran = run("sql", query, *words, "--format", "json", "--limit", "100000")
    assert ran.code == 0, ran.err
    rows: list[dict[str, Any]] = json.loads(ran.out)
    return rows


def refused(query: str, *words: str) -> Ran:
    ran = run("sql", query, *words)
    assert (ran.code, ran.out) == (2, ""), ran.out
    return ran


STATES = "select state, count(*) as messages from lifecycle group by state order by state"


def test_two_machines_are_one_set_of_tables(machines: tuple[str, str, str]) -> None:
    a, b, archive = machines
    states = {"CANCELLED": 12, "DELIVERED": 30, "IN_DOUBT": 6}
    for places in ((a, b), (b, a), (archive,), (a, b, archive)):
        assert {row["state"]: row["messages"] for row in asked(STATES, *places)} == states
    assert {row["state"]: row["messages"] for row in asked(STATES, "--data", a)} == {
        "CANCELLED": 12,
        "UNPROVEN": 30,
        "IN_DOUBT": 6,
    }


def test_views_are_joined_with_themselves_and_with_each_other(machines: tuple[str, str, str]) -> None:
    query = """
        with late as (select max(late_ms) as most, hour from lifecycle group by hour)
        select
            hour, most, scheduled, (select count(*) from dispatch) as outcomes, (select count(*) from message) as held
        from late join hours using (hour) join (select distinct hour from schedule) using (hour) order by hour
    """
    rows = asked(query, *machines[:2])
    assert [row["hour"] for row in rows] == ["2026112016", "2026112017", "2026112018"]
    assert [row["most"] for row in rows] == [8_005, 8_005, 8_005]
    assert {(row["scheduled"], row["outcomes"], row["held"]) for row in rows} == {(16, 48, 30)}


def test_hours_that_are_not_asked_for_are_left_out(machines: tuple[str, str, str]) -> None:
    words = ("--from", "2026-11-20T17:00Z", "--to", "2026-11-20T18:00Z")
    assert [row["hour"] for row in asked("select distinct hour from schedule", machines[0], *words)] == ["2026112017"]
    # Nothing of the other hours is read.
    damaged = Path(machines[0], "copy")
    shutil.copytree(Path(machines[0], "delay"), damaged / "delay", dirs_exist_ok=True)
    (damaged / "delay" / "schedule").rename(damaged / "delay" / "gone")
    (hours,) = asked("select count(*) as damaged from hours where state = 'DAMAGED'", str(damaged))
    assert hours["damaged"] == 3


def test_keys_tags_headers_and_bodies_are_columns_when_the_query_names_them(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    due = [START_MS, START_MS + HOUR_MS]
    books.send(due, keys=["order-41", "order-42"], tags=[["a", "b"], []], headers=[{}, {"tenant": "acme"}])
    books.checkpoint()
    books.send([START_MS + 2], keys=["order-43"])
    books.close()
    (row,) = asked("select sequence, key, tags, headers, body from schedule where key = 'order-42'", books.root)
    assert (row["sequence"], row["key"], row["tags"], row["body"]) == (2, "order-42", [], "body 2")
    assert "acme" in json.dumps(row["headers"])
    keys = [row["key"] for row in asked("select key from lifecycle order by key", books.root)]
    assert keys == ["order-41", "order-42", "order-43"]
    assert "key" not in asked("select * from schedule", books.root)[0]


def test_instants_and_sums_are_shown_as_people_write_them(machines: tuple[str, str, str]) -> None:
    query = "select sequence, deliver_at, deliver_at_ms, sum(1) over () as messages from schedule order by 1 limit 1"
    (row,) = asked(query, machines[2])
    assert (row["sequence"], row["deliver_at"], row["deliver_at_ms"]) == (1, "2026-11-20T16:00:00Z", START_MS)
    shown = run("sql", query, machines[2]).out
    assert "2026-11-20 16:00:00" in shown or "2026-11-20T16:00:00" in shown
    assert run("sql", "select hour from hours", machines[2], "--format", "csv").out.splitlines()[0] == "hour"


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("selec 1", "syntax error"),
        ("select nothing from hours", "nothing"),
        ("select * from orders", "orders"),
        ("drop table hours", "one SELECT"),
        ("copy hours to '/dev/null'", "one SELECT"),
        ("select 1; select 2", "one SELECT"),
        ("", "one SELECT"),
    ],
)
def test_what_is_no_query_is_refused_before_anything_is_read(
    machines: tuple[str, str, str], query: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: object) -> None:
        raise AssertionError("it is read")

    monkeypatch.setattr("delayd.reading.sql.plan_view", plan)
    assert what in refused(query, machines[0]).err


def test_a_query_that_fails_while_it_runs_is_told_in_one_sentence(machines: tuple[str, str, str]) -> None:
    ran = refused("select error('no ' || hour) from hours", machines[2])
    assert "no 2026112016" in ran.err


def test_a_place_that_holds_nothing_is_named(machines: tuple[str, str, str], tmp_path: Path) -> None:
    assert str(tmp_path) in refused("select * from hours", machines[0], str(tmp_path)).err


def test_without_duckdb_one_sentence_says_what_to_install(
    machines: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "delayd.reading.tables.find_spec", lambda name: None if name == "duckdb" else found(name), raising=True
    )
    ran = run("sql", "select 1", machines[0])
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "delayd: `delayd sql` needs duckdb: pip install 'delayd[sql]'\n"


def test_the_queries_of_the_page_are_answered(machines: tuple[str, str, str]) -> None:
    page = (Path(__file__).parents[3] / "docs/fleet.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("delayd sql ")]
    places = {"A": machines[0], "B": machines[1], "s3://books/delayd": machines[2]}
    answers: list[list[dict[str, Any]]] = []
    for line in lines:
        words = [places.get(word, word) for word in shlex.split(line) if not word.startswith("-")]
        answers.append(asked(*[word for word in words[2:] if word != "48h"]))
    assert len(answers) == 2 and answers[0] == []
    assert [(row["subject"], row["scheduled"], row["moved"], row["cancelled"]) for row in answers[1][:2]] == [
        ("bills", 8, 2, 2),
        ("orders", 8, 0, 2),
    ]
