"""`delayd.open_data`: hours, messages, outcomes and traces as columns, and what is damaged beside them."""

import importlib.util
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

import delayd
from delayd.hours import hour_name
from delayd.outcome import Outcome
from delayd.reading.tables import Table
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books

LATER = HOUR + 2
HOUR_NAME = hour_name(HOUR)
SHOWN = ("sequence", "subject", "deliver_at_ms", "outcome")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Six messages of an hour, filed: one handed over, one dead. Two of a later hour are in the message log."""
    books = Books(str(tmp_path / "data"))
    books.send([START_MS + row * 1_000 for row in range(6)], subjects=("orders", "bills"))
    books.checkpoint()
    books.send([LATER * HOUR_MS + 7, LATER * HOUR_MS])
    books.hand_over([3], delay_ms=5)
    books.decide([2], Outcome.DEAD)
    yield books
    books.close()


def _listed(table: Table, *names: str) -> list[tuple[object, ...]]:
    return list(zip(*(table[name].tolist() for name in names), strict=True))


def test_hours_count_what_waits_and_what_became_of_the_others(books: Books) -> None:
    hours = delayd.open_data(books.root).hours()
    assert _listed(hours, "hour", "messages", "pending", "dispatched", "other_outcomes", "state") == [
        (HOUR_NAME, 6, 4, 1, 1, "open"),
        (hour_name(LATER), 2, 2, 0, 0, "open"),
    ]
    assert hours["messages"].dtype == np.int64 and hours["begins_at"][0] == np.datetime64(START_MS, "ms")
    assert hours["log_id"].tolist() == [f"{DELAY_ID:016x}"] * 2
    assert (hours["stored_bytes"] > 0).all()


def test_an_hour_has_its_messages_and_what_became_of_each(books: Books) -> None:
    table = delayd.open_data(books.root).schedule(HOUR_NAME)
    assert len(table) == 6
    assert _listed(table, "sequence", "subject", "outcome", "late_ms") == [
        (1, "orders", None, None),
        (2, "bills", "DEAD", None),
        (3, "orders", "DISPATCHED", 5),
        (4, "bills", None, None),
        (5, "orders", None, None),
        (6, "bills", None, None),
    ]
    pending = table["sequence"][np.ma.getmaskarray(table["outcome"])]
    assert pending.tolist() == [1, 4, 5, 6]


def test_an_hour_is_named_by_digits_by_a_datetime_or_by_its_number(books: Books) -> None:
    data = delayd.open_data(books.root)
    for hour in (HOUR_NAME, HOUR, datetime.fromtimestamp(START_MS / 1_000 + 1_800, UTC)):
        assert len(data.schedule(hour)) == 6
    assert len(data.schedule(LATER)) == 2
    nothing = data.schedule(HOUR + 999)
    assert len(nothing) == 0 and nothing["subject"].tolist() == [] and nothing["sequence"].dtype == np.int64
    for wrong in ("2026", "2026112099", -1, 1 << 40, True):
        with pytest.raises(delayd.BadArgument, match="no hour"):
            data.schedule(wrong)
    with pytest.raises(delayd.NaiveDatetime, match="no time zone"):
        data.schedule(datetime(2026, 11, 20, 16))  # noqa: DTZ001 - it must be refused.


def test_a_trace_has_each_step_with_its_file_and_byte(books: Books) -> None:
    data = delayd.open_data(books.root)
    table = data.trace("orders", 1)
    assert table["step"].tolist() == ["accepted", "filed", "next"]
    assert table["at_ms"].tolist() == [START_MS - 1_000, None, START_MS]
    assert str(table["path"][1]).endswith(f"{HOUR_NAME}.log") and table["position"][1] > 0
    assert "claimed" in data.trace("orders", 3)["step"]
    with pytest.raises(delayd.BadArgument, match="no message of that subject and sequence"):
        data.trace("orders", 99)


def test_arrow_and_pandas_have_the_same_values(books: Books) -> None:
    table = delayd.open_data(books.root).schedule(HOUR)
    arrow = table.to_arrow()
    assert arrow.column_names == list(table.names) == list(table.to_pandas().columns)
    assert arrow.column("outcome").to_pylist() == table["outcome"].tolist()
    assert arrow.column("deliver_at_ms").to_pylist() == table["deliver_at_ms"].tolist()
    assert arrow.column("deliver_at").to_pylist()[0] == datetime.fromtimestamp(START_MS / 1_000, UTC)
    assert delayd.open_data(books.root).schedule(HOUR + 999).to_arrow().schema == arrow.schema
    assert list(dict(table)) == list(table.names)


@pytest.mark.parametrize(("package", "method"), [("pyarrow", "to_arrow"), ("pandas", "to_pandas")])
def test_without_an_optional_package_the_error_says_what_to_install(
    books: Books, package: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = delayd.open_data(books.root).hours()
    find = importlib.util.find_spec
    monkeypatch.setattr("delayd.reading.tables.find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(delayd.BadSetting, match=rf"needs {package}: pip install 'delayd\[spark\]'"):
        getattr(table, method)()
    assert table["pending"].tolist() == [4, 2]


def test_an_hour_is_read_where_its_rows_stand_after_a_checkpoint(books: Books) -> None:
    data = delayd.open_data(books.root)
    books.checkpoint()
    books.hand_over([7], delay_ms=5)
    assert data.schedule(LATER)["sequence"].tolist() == [7, 8]


@pytest.mark.parametrize("what", ["no checkpoint", "no message log"])
def test_a_half_copied_server_blanks_no_other_one(books: Books, what: str) -> None:
    other = Path(books.root, "delay-2")
    shutil.copytree(books.delay, other)
    if what == "no message log":
        shutil.rmtree(other / "message")
    else:
        (other / "checkpoint").write_bytes(bytes((other / "checkpoint").stat().st_size + (4 << 20)))
    data = delayd.open_data(books.root)
    assert data.hours()["messages"].tolist() == [6, 2]
    assert [Path(damage.path).is_relative_to(other) for damage in data.damage] == [True]


@pytest.mark.parametrize("name", ["schedule", "dispatch", "message", "checkpoint"])
@pytest.mark.parametrize("way", ["flipped", "cut"])
def test_at_whichever_byte_a_file_is_damaged_nothing_wrong_is_shown(books: Books, name: str, way: str) -> None:
    paths = {
        "message": next(Path(books.messages.place.folder).iterdir()),
        "checkpoint": Path(books.delay, "checkpoint"),
    }
    path = paths.get(name) or books.path_of(name)
    whole = path.read_bytes()
    before = {hour: _listed(delayd.open_data(books.root).schedule(hour), *SHOWN) for hour in (HOUR, LATER)}
    for position in [*range(0, min(len(whole), 200), 7), *range(200, len(whole), 1 + len(whole) // 60)]:
        data = bytearray(whole)
        data[position] ^= 0x41
        path.write_bytes(data if way == "flipped" else whole[:position])
        try:
            opened = delayd.open_data(books.root)
        except delayd.BadArgument:
            # It looks like a directory whose server has not begun.
            assert name == "message" and position < 64
            continue
        except delayd.NewerFormat:
            continue
        opened.hours()
        for hour, rows in before.items():
            try:
                found = _listed(opened.schedule(hour), *SHOWN)
            except delayd.DamagedData as damage:
                assert damage.path in {each.path for each in opened.damage}
            else:
                # The last group of the message log may be an append that is under way, and outcomes and checkpoint may
                # be older than the rest.
                is_last = name == "message" and position >= books.replay_offset
                assert found == rows or opened.damage or is_last or name in ("checkpoint", "dispatch"), position
                assert set(found) <= set(rows) or name in ("checkpoint", "dispatch"), position
    path.write_bytes(whole)
