"""What waits is not lost, whoever is away, and what the delay server has forgotten is, whoever starts or stops (S7)."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.plan import LifeState
from tests.books import HOUR_MS, REALTIME_ID, START_MS, Books

# Rows are due at these instants after START_MS; the books are read a minute after it, the grace is 10 s.
DUE_MS = {"handed over": 0, "early": 1_000, "middle": 25_000, "late": 40_000}
NOW_MS = START_MS + 60_000
LONG_AGO_MS = START_MS - HOUR_MS
OTHER_ID = 0x4EA2


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Four messages, of which the first was handed over and the others have no outcome."""
    books = Books(str(tmp_path))
    books.hello(0, LONG_AGO_MS)
    books.send([START_MS + after_ms for after_ms in DUE_MS.values()])
    books.hand_over([1])
    books.see_all(START_MS + 1)
    yield books
    books.close()


@contextmanager
def running(*folders: str, since_ms: int = LONG_AGO_MS) -> Iterator[None]:
    """Hold the locks of some servers, as they do from when they start."""
    with ExitStack() as stack:
        for folder in folders:
            Path(folder).mkdir(exist_ok=True)
            lock = stack.enter_context(Path(f"{folder}/LOCK").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.utime(f"{folder}/LOCK", ns=(0, since_ms * 1_000_000))
        yield


def audit(books: Books, now_ms: int = NOW_MS) -> AuditReport:
    report = audit_directory(books.root, now_ms=now_ms)
    total = report.total
    assert total.scheduled == total.dispatched + total.pending + total.undecided + total.waiting + total.missing
    assert report.balanced == (not total.missing)
    return report


def lost(report: AuditReport) -> list[int]:
    assert {finding.kind.name for finding in report.findings} <= {"LOST"}
    return [finding.sequence for finding in report.findings]


def missed(report: AuditReport) -> list[tuple[str, LifeState]]:
    return [(life.role, life.state) for life in report.missed]


def test_one_forgotten_row_is_lost_once_the_delay_server_says_that_it_holds_nothing(books: Books) -> None:
    for sequence in (2, 4):
        books.hand_over([sequence])
    with running(books.delay, books.realtime):
        assert lost(audit(books)) == [] and audit(books).total.waiting == 1
        books.see_all(START_MS + 35_000)
        assert lost(audit(books)) == [], "the grace has not passed"
        books.see_all(START_MS + 35_001)
        report = audit(books)
    assert lost(report) == [3] and report.total.waiting == 0 and not report.missed


@pytest.mark.parametrize("since_ms", [LONG_AGO_MS, NOW_MS, NOW_MS + HOUR_MS])
@pytest.mark.parametrize("held", [True, False])
def test_rule_S7_neither_the_locks_nor_a_new_greeting_hide_a_loss(books: Books, since_ms: int, held: bool) -> None:
    books.see_all(NOW_MS)
    books.hello(1, NOW_MS + 1)
    with running(books.delay, books.realtime, since_ms=since_ms):
        if held:
            assert lost(audit(books)) == [2, 3, 4]
    assert lost(audit(books)) == [2, 3, 4]


def test_rule_S7_what_a_target_holds_up_waits_and_the_report_says_why(books: Books) -> None:
    """It is away, full, or refuses this delay server: what is due for it is held, however long that lasts."""
    books.waits = {REALTIME_ID: (START_MS + 20_000, "this server's disk is full")}
    books.see_all(NOW_MS + 48 * HOUR_MS)
    with running(books.delay, books.realtime):
        report = audit(books, NOW_MS + 48 * HOUR_MS)
    assert lost(report) == [2] and report.total.waiting == 2
    assert report.holds_up == (f"realtime server {REALTIME_ID:016x}: this server's disk is full",)


def test_rule_S7_a_subject_waits_for_the_server_that_had_it_last(books: Books) -> None:
    """Another realtime server is away: what it never had does not wait for it, a new subject does."""
    books.send([START_MS + 2_000], subjects=("new",))
    books.waits = {REALTIME_ID: (NOW_MS, ""), OTHER_ID: (0, "connection refused")}
    books.see_all(NOW_MS)
    report = audit(books)
    assert lost(report) == [2, 3, 4] and report.total.waiting == 1


def test_rule_S7_what_may_be_at_a_target_that_is_not_here_waits(books: Books) -> None:
    books.waits = {REALTIME_ID: (NOW_MS, ""), OTHER_ID: (NOW_MS, "")}
    books.send([START_MS + 2_000], subjects=("new",))
    books.see_all(NOW_MS)
    assert lost(audit(books)) == [2, 3, 4] and audit(books).total.waiting == 1
    shutil.rmtree(books.realtime)
    report = audit(books)
    assert lost(report) == [] and (report.total.waiting, report.total.unproven) == (4, 1)


def test_a_delay_server_that_hangs_or_is_away_says_nothing_new_and_what_came_due_since_waits(books: Books) -> None:
    books.see_all(START_MS + 20_000)
    with running(books.delay, books.realtime):
        report = audit(books, NOW_MS + HOUR_MS)
    assert lost(report) == [2] and report.total.waiting == 2 and missed(report) == []
    report = audit(books, NOW_MS + 48 * HOUR_MS)
    assert lost(report) == [2] and missed(report) == [("realtime", LifeState.AWAY), ("delay", LifeState.AWAY)]
    assert (
        report.missed[0].sentence == f"{books.realtime} is away, the last that it wrote is of 2026-11-20T16:00:20.000Z"
    )
