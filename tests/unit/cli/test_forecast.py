"""The forecast: what falls due in each period ahead, and the fullest second."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli.schedule
from cli.schedule import together
from delayd.hours import hour_name
from delayd.log.control import QuotaLimits, encode_limits, quota_key
from delayd.machine.state import LmdbState
from delayd.outcome import Outcome
from tests.books import HOUR, HOUR_MS, START_MS, Books

from .runner import Ran, run

DAY_MS = 24 * HOUR_MS
FROM = "2026-11-20T16:00:00Z"


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Hour 16: six messages, three of them done; the next day: 5 of one second, filed, and one in the message log."""
    books = Books(str(tmp_path))
    books.send([START_MS + row * 1_000 for row in range(6)], subjects=("orders",))
    books.send([START_MS + DAY_MS + 7_000 + row for row in range(5)], subjects=("bills",))
    books.checkpoint()
    books.send([START_MS + DAY_MS + 9_000], subjects=("orders",))
    books.hand_over([1, 3], delay_ms=5)
    books.decide([2], Outcome.DEAD)
    yield books
    books.close()


def _forecast(books: Books, *arguments: str, form: str = "json") -> Ran:
    return run("schedule", "forecast", "--data", books.root, "--from", FROM, "--format", form, *arguments)


def _listed(books: Books, *arguments: str) -> list[dict[str, object]]:
    ran = _forecast(books, *arguments)
    assert ran.code == 0, ran.err
    rows: list[dict[str, object]] = json.loads(ran.out)
    return rows


def test_days_count_what_is_pending_in_files_and_in_the_message_log(books: Books) -> None:
    assert [(row["period"], row["messages"]) for row in _listed(books)] == [("2026-11-20", 3), ("2026-11-21", 6)]
    assert _listed(books)[1]["fullest_second_messages"] == 5
    assert _listed(books)[1]["fullest_second_ms"] == START_MS + DAY_MS + 7_000


def test_the_fullest_second_is_told_with_what_it_exceeds(books: Books) -> None:
    ran = _forecast(books, "--quota", "4", "--capacity", "5")
    assert "fullest second: 2026-11-21T16:00:07.000Z with 5 messages, above the quota" in ran.err
    assert [row["above"] for row in json.loads(ran.out)] == ["", "quota"]
    assert "above" not in _forecast(books, "--quota", "5").err


def _store_quota(books: Books, subject: bytes, limits: QuotaLimits) -> Path:
    folder = Path(books.root, "delay", "state.lmdb")
    folder.mkdir(exist_ok=True)
    state = LmdbState(str(folder))
    state.commit([(quota_key(subject), encode_limits(limits))])
    state.close()
    return folder / "data.mdb"


def test_the_forecast_of_a_subject_is_held_against_its_stored_quota(books: Books) -> None:
    _store_quota(books, b"bills", QuotaLimits(per_second=4, pending=9))
    ran = _forecast(books, "--subject", "bills")
    assert ran.code == 0
    assert "bills may have per_second 4, pending 9\n" in ran.err and "5 messages, above the quota" in ran.err
    assert [row["above"] for row in json.loads(ran.out)] == ["quota"]
    # An option takes its place, and other subjects have none.
    assert "may have" not in (given := _forecast(books, "--subject", "bills", "--quota", "5").err)
    assert "above" not in given
    assert "orders has no quota" in _forecast(books, "--subject", "orders").err
    assert "quota" not in _forecast(books).err


def test_a_quota_that_is_not_known_is_not_taken_for_none(books: Books) -> None:
    ran = _forecast(books, "--subject", "bills")
    assert ran.code == 0 and "the quota of bills is not known" in ran.err and "data.mdb is missing" in ran.err
    path = _store_quota(books, b"bills", QuotaLimits(per_second=4))
    path.write_bytes(path.read_bytes().replace(b"quota/bills", b"quota/bilks"))
    ran = _forecast(books, "--subject", "bilks")
    assert ran.code == 3 and "the quota of bilks is not known" in ran.err
    assert "left out: the value of quota/bilks" in ran.err
    assert [row["messages"] for row in json.loads(_forecast(books).out)] == [3, 6]


def test_quotas_of_several_servers_are_added_and_one_without_a_limit_leaves_none() -> None:
    assert together([QuotaLimits(3, None, 0), QuotaLimits(4, 8, 0)]) == QuotaLimits(7, None, 0)
    assert together([QuotaLimits(None, 1, 2)]) == QuotaLimits(None, 1, 2)


def test_hours_that_were_not_read_are_bounded_not_guessed(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.schedule, "HOURS_READ_MAX", 0)
    ran = _forecast(books)
    assert json.loads(ran.out)[1]["fullest_second_ms"] is None
    assert "hours that were not read have at most 6 messages each" in ran.err


def test_a_damaged_hour_is_left_out_by_name_and_the_others_are_shown(books: Books) -> None:
    path = Path(books.root, f"delay/schedule/20261120/{HOUR_NAME}.log")
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)
    ran = _forecast(books)
    assert ran.code == 3
    assert HOUR_NAME in ran.err
    assert [(row["period"], row["messages"]) for row in json.loads(ran.out)] == [("2026-11-21", 6)]


HOUR_NAME = hour_name(HOUR)


def test_the_chart_as_a_picture(books: Books, tmp_path: Path) -> None:
    target = tmp_path / "forecast.png"
    assert _forecast(books, "--png", str(target)).code == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    refused = _forecast(books, "--png", str(tmp_path / "missing" / "forecast.png"))
    assert refused.code == 2
    assert "can't be written" in refused.err
