"""The audit as SQL over an export says what delayd's audit says, row by row."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from delayd.hours import hour_name
from delayd.machine.disk import Disk
from delayd.reading import plan
from delayd.reading.books import AuditReport, audit_directory, report_plan
from delayd.reading.export import export_directory, export_plan
from delayd.reading.files.directory import Directory, ScheduleSnapshot, take_snapshot
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books, Row
from tests.simulation.audit import BOOKS
from tests.sql_audit import SCRIPT, audit_by_sql, differences
from tests.tamper.honest import honest
from tests.three_audits import audit_three_ways

NOW_MS = START_MS + HOUR_MS + 120_000


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(str(tmp_path / "data"))
    yield books
    books.close()


def compare(books: Books, folder: Path, now_ms: int = NOW_MS) -> AuditReport:
    report = audit_directory(books.root, now_ms=now_ms, findings_limit=None)
    export_directory(books.root, str(folder), now_ms=now_ms)
    assert differences(report, audit_by_sql(folder)) == []
    return report


def sound(books: Books) -> list[int]:
    """Two hours of sound books, filed and not, past due, of two subjects."""
    rows = books.send([START_MS + 10 * row for row in range(40)], subjects=("orders", "bills"))
    books.hand_over(rows, delay_ms=7)
    books.checkpoint()
    late = books.send([START_MS - 50_000, START_MS + HOUR_MS], at_ms=START_MS + 30_000)
    books.hand_over(late, delay_ms=400)
    books.send([START_MS + 5 * HOUR_MS])
    return rows


def test_what_waits(books: Books, tmp_path: Path) -> None:
    sound(books)
    books.send([NOW_MS - 5_000, NOW_MS - 15_000, NOW_MS - 30_000])
    books.send([NOW_MS - 30_000], subjects=("new",))
    books.see_all(NOW_MS - 25_000)
    total = compare(books, tmp_path / "out").total
    assert (total.waiting, total.undecided, total.lost) == (3, 1, 0)


def test_what_retention_removed_at_the_target(tmp_path: Path) -> None:
    books = Books(str(tmp_path / "data"), segment_bytes=2_000)
    for sequence in books.send([START_MS + row for row in range(40)]):
        books.hand_over([sequence])
    books.target.remove(books.target.detach_below(6_000))
    books.see_all(NOW_MS)
    assert 0 < compare(books, tmp_path / "out").total.unproven < 40
    books.close()


def test_what_comes_while_the_logs_are_read(books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take a row that came last for the proof of its outcome and for nothing else."""
    sound(books)
    waits, told = books.send([NOW_MS - 1, START_MS + 7_000])
    ((hour, part),) = books.hand_over([told], record=False)
    books.see_all(NOW_MS)

    def take_late(disk: Disk, directory: Directory) -> ScheduleSnapshot:
        if not came:
            came.append(books.store([books.rows[waits]], "orders", HOUR + 1, NOW_MS, NOW_MS))
            came.append(books.store([Row(9_999, START_MS, 0, "ghosts")], "ghosts", HOUR, NOW_MS, NOW_MS))
        return take_snapshot(disk, directory)

    came: list[object] = []
    monkeypatch.setattr(plan, "take_snapshot", take_late)
    audits = audit_three_ways(Path(books.root), NOW_MS, tmp_path / "out", spark=False)
    assert len(came) == 2 and audits.differences == [] and audits.report.balanced
    # By now they are not the newest, and the last one has a watermark that covers the others.
    books.record([(hour, part)])
    audits = audit_three_ways(Path(books.root), NOW_MS, tmp_path / "out", spark=False)
    assert audits.differences == [] and audits.report.total.orphan == 2


def test_tallies_and_consumption_are_views_of_what_realtime_servers_say(tmp_path: Path) -> None:
    disk, now_ms = honest()
    plan_, tails = plan.plan_audit(disk, BOOKS, now_ms)
    export_plan(disk, plan_, str(tmp_path / "out"), tails=tails)
    report = report_plan(disk, BOOKS, now_ms, plan_, tails, None)
    with duckdb.connect() as connection:
        connection.execute(f"set file_search_path = '{tmp_path / 'out'}'")
        connection.execute(SCRIPT.read_text())
        tallies = connection.execute("select hour, tallied, untallied, given, agree from tallies").fetchall()
        groups = connection.execute("select pulled, acknowledged, adds_up from consumption").fetchall()
    given = {hour_name(hour.hour): hour.dispatched for hour in report.hours if hour.dispatched}
    told = Counter[str]()
    for hour, _, _, count, _ in tallies:
        told[hour] += count or 0
    assert {hour: count for hour, count in told.items() if count} == given
    # Deleted hours, and what has no outcome yet, stand on one side alone; of all else both sides say the same.
    assert {agree for *_, count, agree in tallies if count is not None} == {True}
    assert {agree for *_, count, agree in tallies if count is None} == {None}
    assert any(tallied for _, tallied, *_ in tallies) and any(untallied for _, _, untallied, *_ in tallies)
    assert sorted(groups) == sorted((books.pulled, books.acknowledged, True) for books in report.groups)


@pytest.mark.parametrize(("differing", "messages", "agree"), [(0, 41, True), (0, 40, False), (1, 41, False)])
def test_a_tally_is_held_against_what_its_server_was_given(
    books: Books, tmp_path: Path, differing: int, messages: int, agree: bool
) -> None:
    sound(books)
    books.tally([(0, 1 << 40, DELAY_ID, HOUR, differing, messages, 0, 0, 1, 0)])
    books.see_all(NOW_MS)
    export_directory(books.root, str(tmp_path / "out"), now_ms=NOW_MS)
    with duckdb.connect() as connection:
        connection.execute(f"set file_search_path = '{tmp_path / 'out'}'")
        connection.execute(SCRIPT.read_text())
        found = connection.execute("select * exclude (log_id, origin) from tallies where hour = ?", [hour_name(HOUR)])
        assert found.fetchall() == [(hour_name(HOUR), messages, 0, differing, 41, agree)]
