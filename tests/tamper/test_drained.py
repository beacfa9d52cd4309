"""Drained rows: every reader of a directory counts them and names them alike, and lies about them are found."""

import json
from collections import Counter
from pathlib import Path

import pytest

from delayd import Receipt
from delayd.errors import LogId
from delayd.hours import hour_name
from delayd.machine.disk import RealDisk
from delayd.reading.books import audit_directory
from delayd.reading.data import open_data
from delayd.reading.trace import trace
from delayd.testing.clock import START_MS
from examples.reference_reader import verify
from tests.simulation.audit import BOOKS
from tests.tamper.drained import Drained, drained
from tests.tamper.in_spark import write_tree
from tests.tamper.liar import Liar
from tests.tamper.lies.drained import SEALED, TO_COME, drained_lies
from tests.tamper.lies.lie import Lie
from tests.tamper.three_ways import sql_differences
from tests.tamper.verdict import verdict
from tests.three_audits import audit_three_ways
from tests.unit.cli.runner import run


@pytest.fixture
def pair() -> Drained:
    return drained()


@pytest.fixture
def data(pair: Drained, tmp_path: Path) -> str:
    return write_tree(pair.disk, tmp_path / "data")


@pytest.mark.parametrize("lie", drained_lies(), ids=lambda lie: lie.name.replace(" ", "_"))
def test_a_lie_about_a_drained_row_is_found_with_numpy_and_in_sql(lie: Lie, pair: Drained, tmp_path: Path) -> None:
    liar = Liar(pair.disk)
    lie.tell(liar)
    assert verdict(liar.disk, pair.now_ms) & lie.names
    assert sql_differences(liar.disk, pair.now_ms, tmp_path / "export") == []


def test_nothing_is_wrong_with_drained_rows_and_they_balance(pair: Drained) -> None:
    assert verdict(pair.disk, pair.now_ms) == set()
    report = audit_directory(BOOKS, now_ms=pair.now_ms, findings_limit=None, disk=pair.disk)
    own = [hour for hour in report.hours if hour.log_id == pair.source]
    assert [(hour.scheduled, hour.dispatched, hour.cancelled) for hour in own] == [(9, 6, 3), (4, 0, 4), (2, 0, 2)]
    sealed = {(seal.log_id, seal.hour): seal.state.value for seal in report.seals}
    assert sealed == {(pair.source, SEALED): "verified", (pair.taker, SEALED): "verified"}


def test_tables_say_where_a_drained_row_went(pair: Drained, data: str) -> None:
    names = ("sequence", "outcome", "reason", "other_sequence", "target", "target_appended_at_ms", "target_offset")
    opened, taker = open_data(data), f"{pair.taker:016x}"

    def told(hour: int) -> list[tuple[object, ...]]:
        table = opened.dispatch(hour_name(hour))
        rows = zip(table["log_id"].tolist(), *(table[name].tolist() for name in names), strict=True)
        return [row[1:] for row in rows if row[0] == f"{pair.source:016x}" and row[3] == "DRAINED"]

    assert told(SEALED) == [
        (sequence, "CANCELLED", "DRAINED", sequence - 4, taker, START_MS + 5_000, None) for sequence in (7, 8, 9)
    ]
    # Those on their way have no outcome yet, and nobody knows their sequences at the taker.
    assert told(TO_COME + 4) == [(sequence, "CANCELLED", "DRAINED", None, taker, None, None) for sequence in (14, 15)]


def test_commands_that_read_files_call_drained_rows_drained(pair: Drained, data: str) -> None:
    taker = f"{pair.taker:016x}"
    times = ("--from", "2027-01-15T00:00:00Z", "--limit", "0", "--format", "json", "--data", data)
    shown = json.loads(run("dispatch", "show", *times).out)
    there = [row["target_log_id"] for row in shown if row["reason"] == "drained"]
    assert there == [taker] * 9
    for words in (("schedule", "show", "--all"), ("schedule", "find", "orders.eu", "--all")):
        rows = json.loads(run(*words, *times).out)
        states = Counter(row["state"] for row in rows if row["delay_log_id"] == f"{pair.source:016x}")
        assert states["drained"] == 9 and states["pending"] == 0, words


def test_a_trace_goes_on_at_the_server_that_took_the_message(pair: Drained, data: str) -> None:
    (found,) = trace(RealDisk(), data, "orders.eu", 10, pair.source)
    assert [(step.what, step.log_id) for step in found.steps] == [
        ("accepted", 0),
        ("filed", 0),
        ("drained", 0),
        ("accepted", pair.taker),
        ("filed", pair.taker),
    ]
    assert (
        f"to delay server {pair.taker:016x}, sequence 6" in found.steps[2].detail and "its instant" in found.waits_for
    )
    (leaving,) = trace(RealDisk(), data, "orders.eu", 14, pair.source)
    assert leaving.steps[-1].what == "drained" and f"delay server {pair.taker:016x} to take it" in leaving.waits_for
    (away,) = trace(RealDisk(), f"{data}/delay", "orders.eu", 10, pair.source)
    assert away.steps[-1].what == "drained" and "directory is not here" in away.unseen[0]


def test_a_dump_names_the_taker_and_the_row_there(pair: Drained, data: str) -> None:
    def dumped(path: str) -> str:
        return run("log", "dump", f"{data}/delay/{path}", "--level", "messages", "--limit", "0", "--format", "csv").out

    name = hour_name(TO_COME)
    outcomes = dumped(f"dispatch/{name[:8]}/{name}.log")
    assert f"reason=drained decided_at_ms={START_MS + 5_000} taker={pair.taker:016x} other=6 " in outcomes
    assert "other=9 " in outcomes, "each row has a row of its own there"
    assert f"taker={pair.taker:016x} batch=" in dumped("message/00000000000000000000.log")


def test_the_reference_reader_finds_nothing_wrong_and_counts_drained_rows(pair: Drained, data: str) -> None:
    figures, wrong = verify(Path(data))
    assert wrong == []
    # What is on its way has no outcome in the files that this reader knows.
    assert (figures["scheduled"], figures["cancelled"], figures["without outcome"]) == (24, 7, 8)


def test_numpy_and_sql_agree_on_drained_rows(pair: Drained, data: str, tmp_path: Path) -> None:
    audits = audit_three_ways(Path(data), pair.now_ms, tmp_path / "out", spark=False)
    assert audits.differences == [] and audits.report.balanced


def test_get_from_files_says_what_became_of_a_drained_message_where_it_is_now(pair: Drained, data: str) -> None:
    def state(sequence: int, folder: str) -> str:
        receipt = Receipt(LogId(pair.source), sequence, START_MS, START_MS, False, False)
        ran = run("get", "orders.eu", "--receipt", receipt.token, "--data", folder, "--format", "json")
        return str(json.loads(ran.out)[0]["state"])

    # The sealed hour's rows were dispatched by the taker; others are pending there, or on their way.
    assert [state(sequence, data) for sequence in (1, 7, 10, 14)] == ["dispatched", "dispatched", "pending", "drained"]
    assert [state(sequence, f"{data}/delay") for sequence in (7, 10)] == ["drained", "drained"]
