"""Listings of a data directory: what waits, what became of messages, hour by hour."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from delayd.errors import DamagedData
from delayd.machine.disk import RealDisk
from delayd.outcome import Outcome
from delayd.reading.data import Hour, Schedule, schedules
from tests.books import HOUR, HOUR_MS, START_MS, Books

from .runner import run

_LATER_MS = START_MS + 2 * HOUR_MS


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Six messages of two subjects in one hour, filed; one past-due and two of a later hour, in the message log."""
    books = Books(str(tmp_path))
    books.send([START_MS + row * 1000 for row in range(6)], subjects=("orders", "bills"))
    books.checkpoint()
    books.send([START_MS - 5000], subjects=("bills",))
    books.send([_LATER_MS + 7, _LATER_MS], subjects=("orders",))
    books.hand_over([1, 3], delay_ms=5)
    books.decide([2], Outcome.DEAD)
    yield books
    books.close()


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _listed(books: Books, *arguments: str) -> list[dict[str, object]]:
    ran = run(*arguments, "--data", books.root, "--format", "json")
    assert ran.code == 0, ran.err
    rows: list[dict[str, object]] = json.loads(ran.out)
    return rows


def test_hours_count_what_is_filed_and_what_is_still_in_the_message_log(books: Books) -> None:
    rows = _listed(books, "schedule", "hours")
    counted = [(row["hour"], row["messages"], row["pending"], row["dispatched"], row["other_outcomes"]) for row in rows]
    assert counted == [("2026112015", 1, 1, 0, 0), ("2026112016", 6, 3, 2, 1), ("2026112018", 2, 2, 0, 0)]
    assert {row["delay_log_id"] for row in rows} == {"000000000000de1a"}


def test_pending_messages_are_listed_the_next_due_first(books: Books) -> None:
    rows = _listed(books, "schedule", "show")
    assert [row["sequence"] for row in rows] == [7, 4, 5, 6, 9, 8]
    assert {row["state"] for row in rows} == {"pending"}


def test_bodies_come_from_the_schedule_log_and_from_the_message_log(books: Books) -> None:
    rows = _listed(books, "schedule", "show", "--all", "--body")
    assert {row["sequence"]: row["body"] for row in rows} == {number: f"body {number}" for number in range(1, 10)}


def test_outcomes_say_where_a_message_went_and_how_late(books: Books) -> None:
    rows = _listed(books, "dispatch", "show")
    assert [(row["sequence"], row["outcome"]) for row in rows] == [(1, "dispatched"), (3, "dispatched"), (2, "dead")]
    assert rows[0]["late_ms"] == 2005
    assert rows[1] | {"target_offset": 0} == {
        "sequence": 3,
        "subject": "orders",
        "deliver_at_ms": START_MS + 2000,
        "outcome": "dispatched",
        "reason": None,
        "late_ms": 5,
        "claimed_at_ms": START_MS + 2000,
        "appended_at_ms": START_MS + 2005,
        "attempt": 1,
        "epoch": 1,
        "batch_id": 1,
        "target_log_id": "0000000000004ea1",
        "target_offset": 0,
        "delay_log_id": "000000000000de1a",
    }
    assert rows[2]["late_ms"] is None
    assert rows[2]["target_log_id"] is None


def test_an_outcome_that_nothing_was_scheduled_for_is_listed_without_a_subject(books: Books) -> None:
    part = books.part([1])._replace(sequences=np.array([99], np.uint64))
    books.record([(HOUR, part)])
    assert [(row["sequence"], row["subject"]) for row in _listed(books, "dispatch", "show")][-1] == (99, None)


def test_an_hour_is_read_again_when_its_server_moves_on_meanwhile(tmp_path: Path) -> None:
    books = Books(str(tmp_path), segment_bytes=1)
    books.send([START_MS])
    books.send([START_MS + 1])
    (schedule,) = schedules(RealDisk(), books.root, [])
    before = schedule.read(HOUR)
    books.checkpoint()
    books.tick(START_MS)
    books.messages.remove(books.messages.detach_below(books.replay_offset))
    assert [schedule.body(before, row) for row in (0, 1)] == [b"body 1", b"body 2"]
    assert schedule.read(HOUR).rows.sequence.tolist() == [1, 2]
    books.close()


@pytest.mark.parametrize("command", [("schedule", "hours"), ("schedule", "show"), ("dispatch", "show")])
def test_a_damaged_hour_is_named_and_blanks_none_of_the_others(books: Books, command: tuple[str, ...]) -> None:
    books.hand_over([7], delay_ms=5)  # In another hour than the damaged one, for `dispatch show`.
    books.checkpoint()
    whole = run(*command, "--data", books.root, "--format", "json")
    path = books.path_of("schedule")
    _flip(path, path.stat().st_size - 9)
    ran = run(*command, "--data", books.root, "--format", "json")
    assert ran.code == 3
    assert f"delayd: left out: {path} is damaged at byte " in ran.err and "delayd log verify" in ran.err
    before, after = json.loads(whole.out), json.loads(ran.out)
    if command[1] == "hours":
        assert [row["hour"] for row in after] == [row["hour"] for row in before]
        assert [row["state"] for row in after] == ["open", "damaged", "open"]
        assert after[1]["messages"] is None and after[0::2] == before[0::2]
    else:
        assert after and after == [row for row in before if not 1 <= row["sequence"] <= 6]


def test_a_body_that_is_damaged_is_named_and_the_rest_of_its_hour_is_shown(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Schedule.body

    def body(each: Schedule, hour: Hour, row: int) -> bytes:
        if hour.rows.sequence[row] == 5:
            raise DamagedData("DATA/hour.log", 7, "the body does not check")
        return whole(each, hour, row)

    monkeypatch.setattr(Schedule, "body", body)
    ran = run("schedule", "show", "--body", "--data", books.root, "--format", "json")
    bodies = {row["sequence"]: row["body"] for row in json.loads(ran.out)}
    assert ran.code == 3 and "delayd: left out: DATA/hour.log is damaged at byte 7" in ran.err
    assert bodies == {4: "body 4", 5: "(damaged)", 6: "body 6", 7: "body 7", 8: "body 8", 9: "body 9"}


def test_a_damaged_message_log_leaves_out_what_is_not_filed_yet(books: Books) -> None:
    (path,) = Path(books.messages.place.folder).iterdir()
    _flip(path, path.read_bytes().index(b"body 7") - 24)
    ran = run("schedule", "hours", "--data", books.root, "--format", "json")
    assert ran.code == 3
    assert [(row["hour"], row["messages"]) for row in json.loads(ran.out)] == [("2026112016", 6)]
    assert f"delayd: left out: {path} is damaged" in ran.err


def test_an_hour_is_open_until_no_message_can_be_filed_in_it_and_closed_until_it_is_sealed(books: Books) -> None:
    books.decide([4, 5, 6], Outcome.DISPATCHED)
    books.checkpoint()
    assert {row["state"] for row in _listed(books, "schedule", "hours")} == {"open"}
    books.tick(START_MS + HOUR_MS)
    books.checkpoint()
    states = [row["state"] for row in _listed(books, "schedule", "hours")]
    assert states == ["closed", "closed", "open"]
    books.seal()
    states = [row["state"] for row in _listed(books, "schedule", "hours")]
    assert states == ["closed", "sealed", "open"]


def test_rule_P3_an_hour_that_retention_is_removing_is_listed_or_left_out_and_no_error(books: Books) -> None:
    books.decide([4, 5, 6], Outcome.DISPATCHED)
    books.checkpoint()
    books.removed.add(HOUR)
    books.seal()
    assert len(_listed(books, "schedule", "hours")) == 3
    (each,) = schedules(RealDisk(), books.root, [])
    books.path_of("schedule").unlink()
    assert not len(each.read(HOUR).rows), "its files went after the table was read"
    assert len(_listed(books, "schedule", "hours")) == 2
    books.path_of("dispatch").unlink()
    assert len(_listed(books, "schedule", "hours")) == 2
    assert not len(each.read(HOUR).rows)
