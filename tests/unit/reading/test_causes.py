"""Findings by what explains them, and the messages of each subject by what became of them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from delayd.outcome import Outcome
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.explanations import APPENDED_LATE, CLAIMED_LATE, CONNECTED, RESTARTED, Explanation, explain
from delayd.reading.findings import Cause, CausedFindings, FindingKind
from delayd.reading.subject_figures import FIGURES, SubjectSums
from tests.books import DELAY_ID, HOUR_MS, REALTIME_ID, START_MS, Books

NOW_MS = START_MS + 3 * HOUR_MS
STALL_MS = START_MS + 10_000


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Twelve messages, due at seconds 10 to 21; a session has begun before."""
    books = Books(str(tmp_path))
    books.hello(0, START_MS - HOUR_MS)
    books.send([STALL_MS + 1_000 * row for row in range(12)])
    yield books
    books.close()


def audit(books: Books) -> AuditReport:
    books.see_all(START_MS + 2 * HOUR_MS)
    return audit_directory(books.root, now_ms=NOW_MS, findings_limit=0)


def only(report: AuditReport) -> CausedFindings:
    (found,) = report.caused
    assert found.rows == report.findings_count
    return found


def test_a_stall_explains_what_was_due_in_it_and_the_latest_messages_are_its_examples(books: Books) -> None:
    books.gaps = [["stood still", STALL_MS, STALL_MS + 12_000]]
    books.hand_over(range(1, 13), claimed_ms=STALL_MS + 12_000)
    found = only(audit(books))
    assert found.why == Explanation("stood still", "delay", DELAY_ID, STALL_MS, STALL_MS + 12_000)
    assert (found.kind, found.cause, found.rows) == (FindingKind.LATE, Cause.LATE, 12)
    assert (found.first_due_ms, found.last_due_ms) == (STALL_MS, STALL_MS + 11_000)
    assert [each.sequence for each in found.examples] == [1, 2, 3]
    assert found.examples[0].detail == "12005 ms late"


@pytest.mark.parametrize(("epoch", "what"), [(1, CONNECTED), (2, RESTARTED)])
def test_a_hello_after_the_due_instant_and_before_the_handover_explains_it(books: Books, epoch: int, what: str) -> None:
    books.hand_over([1])
    books.hello(1, STALL_MS + 20_000, epoch)
    books.hand_over(range(2, 13), claimed_ms=STALL_MS + 20_500)
    found = only(audit(books))
    assert found.rows == 11
    assert found.why == Explanation(what, "delay", DELAY_ID, STALL_MS + 5, STALL_MS + 20_000, REALTIME_ID)


def test_the_first_session_of_a_log_explains_nothing(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([STALL_MS])
    books.hello(0, STALL_MS + 20_000)
    assert audit_directory(books.root, now_ms=NOW_MS).caused == ()
    books.hand_over([1], claimed_ms=STALL_MS + 20_500)
    assert only(audit(books)).why == CLAIMED_LATE
    books.close()


def test_a_stalled_target_explains_what_went_to_it(books: Books) -> None:
    books.hand_over(range(1, 13), claimed_ms=STALL_MS + 11_000, delay_ms=15_000)
    books.settle(START_MS + HOUR_MS)
    books.see_realtime(START_MS + HOUR_MS, [["stood still", STALL_MS, STALL_MS + 26_000]])
    found = only(audit_directory(books.root, now_ms=NOW_MS))
    assert found.why is not None and (found.why.role, found.why.target_log_id) == ("realtime", REALTIME_ID)


def test_what_nothing_explains_names_the_late_step(books: Books) -> None:
    books.hand_over(range(1, 6), claimed_ms=STALL_MS + 30_000)
    for sequence in range(6, 13):
        books.hand_over([sequence], delay_ms=8_000)
    found = {each.why: each for each in audit(books).caused}
    assert {why: each.rows for why, each in found.items()} == {CLAIMED_LATE: 5, APPENDED_LATE: 7}
    assert not CLAIMED_LATE.is_known and not APPENDED_LATE.is_known


def test_a_clock_that_was_set_back_and_a_short_stall_explain_no_lateness(books: Books) -> None:
    books.gaps = [["clock set back", STALL_MS, STALL_MS + 12_000], ["stood still", STALL_MS, STALL_MS + 14_000]]
    books.hand_over(range(1, 13), claimed_ms=STALL_MS + 30_000)
    assert only(audit(books)).why == CLAIMED_LATE


def test_of_two_explanations_the_one_that_covers_more_counts_and_each_for_its_target_only() -> None:
    short = Explanation("stood still", "delay", DELAY_ID, 0, 60)
    long = Explanation("stood still", "realtime", 7, 0, 90, target_log_id=7)
    due, until = np.zeros(3, np.int64), np.full(3, 100, np.int64)
    to, in_time = np.array([7, 8, 7], np.uint64), np.array([False, True, True])
    assert explain([short, long], due, until, in_time, to).tolist() == [3, 2, 3]
    assert explain([long, short], due, until, in_time, to).tolist() == [2, 3, 2]
    assert explain([long], due, until, in_time, to).tolist() == [2, 1, 2]
    assert explain([], due, until, in_time, to).tolist() == [0, 1, 1]


def test_other_findings_stand_by_how_they_show(books: Books) -> None:
    for sequence in range(1, 9):
        books.hand_over([sequence])
    books.record(books.hand_over([9]))
    found = {each.cause: each for each in audit(books).caused}
    assert {cause: each.rows for cause, each in found.items()} == {Cause.NO_OUTCOME: 3, Cause.OUTCOMES: 1}
    lost = found[Cause.NO_OUTCOME]
    assert (lost.kind, lost.why, [each.sequence for each in lost.examples]) == (FindingKind.LOST, None, [10, 11, 12])


def test_each_subject_has_its_figures_over_all_hours(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.hand_over(books.send([START_MS] * 4, subjects=("orders", "bills")))
    late, lost, dead, pending = books.send([START_MS + HOUR_MS] * 3 + [START_MS + 9 * HOUR_MS], subjects=("bills",))
    books.hand_over([late], delay_ms=5_000)
    books.decide([dead], Outcome.DEAD)
    del lost, pending
    report = audit(books)
    books.close()
    found = report.total.subjects
    shown = {
        name: {figure: count for figure, count in zip(FIGURES, counts, strict=True) if count}
        for name, counts in zip(found.names, found.counts.tolist(), strict=True)
    }
    assert shown == {
        "bills": {"scheduled": 6, "dispatched": 3, "dead": 1, "pending": 1, "missing": 1, "faults": 1, "late": 1},
        "orders": {"scheduled": 2, "dispatched": 2},
    }
    assert not any(len(hour.subjects) for hour in report.hours)
    assert [int(found.of("scheduled").sum())] == [report.total.scheduled]


def test_figures_add_up_whatever_the_order_and_a_name_may_stand_twice() -> None:
    one, other = SubjectSums(), SubjectSums()
    counts = np.arange(3 * len(FIGURES)).reshape(3, -1)
    one.add(("b", "a", "b"), counts)
    one.add(("c", "nothing"), np.stack((counts[0], 0 * counts[0])))
    other.add(("c", "b", "a"), counts[[0, 0, 1]])
    other.add(("b",), counts[2:])
    assert one.figures() == other.figures() and one.figures().names == ("a", "b", "c")
    other.add(("d",), counts[:1] + 1)
    assert one.figures() != other.figures()
