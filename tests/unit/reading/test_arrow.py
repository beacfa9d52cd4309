"""An audit's report as tables of Arrow and frames of pandas."""

from datetime import UTC, datetime
from pathlib import Path

from delayd.log.pull import PullEntry, PullOp
from delayd.reading.arrow import findings_table, groups_table, hours_table
from delayd.reading.books import audit_directory
from tests.books import DELAY_ID, HOUR_MS, START_MS, Books


def test_hours_and_findings_are_tables_with_instants(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    rows = books.send([START_MS, START_MS + HOUR_MS], subjects=("orders", "mail"))
    books.checkpoint()
    books.hand_over(rows[:1])
    books.hand_over(rows[1:], claimed_ms=START_MS)
    books.see_all(START_MS + 2 * HOUR_MS)
    books.close()
    report = audit_directory(books.root, now_ms=START_MS + 2 * HOUR_MS)
    hours = hours_table(report).to_pylist()
    assert [(hour["hour"], hour["dispatched"], hour["balanced"]) for hour in hours] == [
        ("2026112016", 1, True),
        ("2026112017", 1, False),
    ]
    assert hours[0]["begins_at"] == datetime(2026, 11, 20, 16, tzinfo=UTC) and hours[0]["late_p99_ms"] == 5
    frame = findings_table(report).to_pandas()
    early = frame[frame["kind"] == "EARLY"].iloc[0]
    assert (early["log_id"], early["subject"], early["sequence"]) == (f"{DELAY_ID:016x}", "mail", rows[1])
    assert early["deliver_at"] == datetime(2026, 11, 20, 17, tzinfo=UTC)


def test_groups_of_consumers_are_a_table(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    given = PullEntry(PullOp.PULL, 2, 1, 77, 0, 0, 3, START_MS)
    books.consume("orders", "billing", [given, given._replace(op=PullOp.NACK, pull_first=1, covered=1)])
    books.close()
    (row,) = groups_table(audit_directory(books.root, now_ms=START_MS - 1)).to_pylist()
    assert (row["subject"], row["consumers"], row["group_id"]) == ("orders", "billing", "00000001")
    assert (row["pulled"], row["redelivered"], row["given_back"], row["outstanding"]) == (3, 3, 1, 2)
    report = audit_directory(books.root, now_ms=START_MS - 1, consumption=False)
    assert groups_table(report).num_rows == 0 and "gaps" in groups_table(report).schema.names
