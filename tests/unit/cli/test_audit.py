"""The audit on the command line: figures, findings, verdict and exit code."""

import csv
import io
import json
from collections.abc import Container, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from freezegun import freeze_time

from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.proved import ProvedHours
from tests.books import HOUR, START_MS, Books

from .runner import Ran, run

_NOW = datetime.fromtimestamp(START_MS / 1000 + 1800, UTC)


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Four messages of one hour, of which three were handed over; the last is not yet due."""
    books = Books(str(tmp_path))
    books.send([START_MS, START_MS, START_MS, START_MS + 3_000_000])
    books.checkpoint()
    books.hand_over([1, 2, 3], delay_ms=4)
    books.settled_ms = START_MS + 1_800_000
    books.publish(START_MS + 1_800_000)
    books.see_realtime(START_MS + 1_800_000)
    yield books
    books.close()


def _audit(books: Books, *options: str) -> Ran:
    with freeze_time(_NOW):
        return run("audit", "--data", books.root, *options)


def test_balanced_books_exit_with_0_and_say_so(books: Books) -> None:
    ran = _audit(books)
    assert ran.code == 0, ran.out
    assert ran.out.endswith(
        "lateness: p50 4 ms, p99 4 ms, p99.9 4 ms, max 4 ms\n"
        "scheduled 4 = dispatched 3 + pending 1\n"
        "the books balance: lost 0, duplicate 0, early 0, orphan 0, mismatch 0, conservation 0\n"
    )
    assert ran.err == ""


def test_a_lost_message_is_named_and_exits_with_3(books: Books) -> None:
    books.send([START_MS + 1000])
    ran = _audit(books)
    assert ran.code == 3
    (line,) = [line for line in ran.out.splitlines() if "LOST" in line]
    assert line.split()[:4] == ["2026112016", "LOST", "5", "orders"]
    assert "the books do NOT balance: lost 1, duplicate 0" in ran.out


def test_what_waits_is_told_with_who_is_away_and_breaks_no_book(books: Books) -> None:
    books.send([START_MS + 1_799_000], at_ms=START_MS + 1_800_000)
    with freeze_time(datetime.fromtimestamp(START_MS / 1000 + 1900, UTC)):
        ran = run("audit", "--data", books.root)
        found = json.loads(run("audit", "--data", books.root, "--format", "json").out)
    assert ran.code == 0
    assert "scheduled 5 = dispatched 3 + pending 1 + waiting 1\n" in ran.out
    assert f"1 wait, and are not lost: {books.realtime} is away, the last that it wrote is of 2026-" in ran.out
    assert f"; {books.delay} is away" in ran.out
    assert found["total"]["waiting"] == 1 and [each["role"] for each in found["missed"]] == ["realtime", "delay"]


def test_json_holds_everything(books: Books) -> None:
    books.send([START_MS + 1000])
    found = json.loads(_audit(books, "--format", "json").out)
    assert found["balanced"] is False
    assert found["total"]["scheduled"] == 5
    assert found["total"]["late_p99_ms"] == 4
    assert [hour["hour"] for hour in found["hours"]] == ["2026112016"]
    assert found["findings"][0]["finding"] == "LOST"
    assert found["findings"][0]["sequence"] == 5
    assert found["findings"][0]["deliver_at"] == "2026-11-20T16:00:01.000Z"
    assert found["findings"][0]["subject"] == "orders"
    assert found["findings_count"] == 1


def test_csv_holds_the_hours(books: Books) -> None:
    (row,) = csv.DictReader(io.StringIO(_audit(books, "--format", "csv").out))
    assert row["hour"] == "2026112016"
    assert row["scheduled"] == "4"
    assert row["late_max_ms"] == "4"


def test_a_from_behind_its_to_is_refused(books: Books) -> None:
    for command in (["audit"], ["seals"], ["schedule", "hours"], ["dispatch", "show"], ["export", "--out", "none"]):
        ran = run(*command, "--data", books.root, "--from", "2026-11-20T17:00Z", "--to", "2026-11-20T16:00Z")
        assert (ran.code, ran.out) == (2, ""), command
        assert "--from 2026-11-20T17:00:00.000Z is after --to 2026-11-20T16:00:00.000Z" in ran.err


def test_damage_exits_with_3_and_names_path_and_position(books: Books) -> None:
    path = books.path_of("schedule")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    ran = _audit(books)
    assert ran.code == 3
    assert ran.out == ""
    assert f"{path} is damaged at byte 64" in ran.err
    assert ran.err.count("\n") == 1


def test_of_thousands_of_damaged_files_some_are_named_and_the_others_counted(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.hour_commands.NAMED_MAX", 0)
    for path in (books.path_of("schedule"), books.path_of("dispatch")):
        path.write_bytes(b"x" * 100)
    ran = _audit(books)
    assert ran.code == 3
    assert f"delayd: 1 more file is damaged; `delayd log verify --data {books.root}` names all\n" in ran.err


def test_the_audit_in_spark_gets_the_same_terms_and_shows_the_same_report(books: Books) -> None:
    asked: list[tuple[object, ...]] = []

    def audit(
        *places: str,
        hours: Container[int],
        late_ms_limit: int,
        lost_grace_ms: int,
        findings_limit: int,
        proved: ProvedHours,
    ) -> AuditReport:
        asked.append((*places, HOUR in hours, HOUR + 1 in hours, late_ms_limit, lost_grace_ms, findings_limit))
        return audit_directory(places[0], now_ms=START_MS + 1_800_000)

    books.send([START_MS + 1000])
    ran = run(
        *("spark-audit", "--data", books.root, "--to", "2026-11-20T17:00Z", "--late-limit", "2s", "--grace", "1m"),
        "--findings",
        "7",
        spark_audit=audit,
    )
    assert asked == [(books.root, True, False, 2000, 60_000, 7)]
    assert ran.code == 3
    assert ran.out == _audit(books).out
