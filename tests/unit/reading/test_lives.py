"""What waits for a server that is or was just away is not lost, and what was forgotten while all were up is."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from delayd.holder import is_held
from delayd.log.checkpoint import CheckpointFile
from delayd.log.log import open_log
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.lives import State
from tests.books import HOUR_MS, START_MS, Books

# Rows are due at these instants after START_MS; the books are read a minute after it, the grace is 10 s.
DUE_MS = {"handed over": 0, "early": 1_000, "middle": 25_000, "late": 40_000}
NOW_MS = START_MS + 60_000
LONG_AGO_MS = START_MS - HOUR_MS


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    """Four messages, of which the first was handed over and the others have no outcome; all was up when it began."""
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


def missed(report: AuditReport) -> list[tuple[str, State]]:
    return [(life.role, life.state) for life in report.missed]


def test_a_held_lock_says_that_the_server_runs(books: Books) -> None:
    path = Path(f"{books.delay}/LOCK")
    path.touch()
    assert not is_held(path.stat())
    with running(books.delay):
        assert is_held(path.stat())
    assert not is_held(path.stat())


def test_one_forgotten_row_is_lost_while_everybody_is_up(books: Books) -> None:
    for sequence in (2, 4):
        books.hand_over([sequence])
    with running(books.delay, books.realtime):
        report = audit(books)
    assert lost(report) == [3] and report.total.waiting == 0 and not report.missed


@pytest.mark.parametrize(("quiet_s", "waits"), [(9, True), (11, False)])
@pytest.mark.parametrize("hours", [0, 1])
def test_while_what_has_gathered_leaves_the_rest_waits(books: Books, quiet_s: int, waits: bool, hours: int) -> None:
    """A row of the same hour, or of one that is over, comes long after it was due; then nothing more."""
    (gathered,) = books.send([START_MS + 500 - hours * 3_000], at_ms=START_MS - HOUR_MS)
    now_ms = NOW_MS + hours * 7_000_000
    came_ms = now_ms - quiet_s * 1_000
    books.hand_over([gathered], claimed_ms=came_ms - 1, delay_ms=1)
    forgotten = [2, 3, 4]
    with running(books.delay, books.realtime):
        report = audit_directory(books.root, now_ms=now_ms)
    assert [finding.sequence for finding in report.findings if finding.kind.name == "LOST"] == (
        [] if waits else forgotten
    )
    assert report.total.waiting == (3 if waits else 0)


def test_a_row_that_was_past_due_when_it_was_accepted_was_not_held_up(books: Books) -> None:
    books.hand_over(books.send([START_MS], at_ms=NOW_MS - 2_000))
    with running(books.delay, books.realtime):
        assert lost(audit(books)) == [2, 3, 4]


def test_what_came_due_since_the_realtime_server_is_away_waits(books: Books) -> None:
    books.see_realtime(START_MS + 20_000)
    with running(books.delay):
        report = audit(books)
    assert lost(report) == [2] and report.total.waiting == 2
    assert missed(report) == [("realtime", State.AWAY)]
    assert (
        report.missed[0].sentence == f"{books.realtime} is away, the last that it wrote is of 2026-11-20T16:00:20.000Z"
    )


@pytest.mark.parametrize(("back_s", "waits"), [(55, 3), (49, 0)])
def test_when_it_is_back_everything_waits_until_all_were_up_for_the_grace(
    books: Books, back_s: int, waits: int
) -> None:
    back_ms = START_MS + back_s * 1_000
    with running(books.delay), running(books.realtime, since_ms=back_ms):
        books.see_realtime(back_ms)
        report = audit(books)
    assert report.total.waiting == waits and len(lost(report)) == 3 - waits
    assert missed(report) == ([("realtime", State.UP)] if waits else [])


def test_it_waits_as_well_when_the_delay_server_is_just_back(books: Books) -> None:
    with running(books.realtime), running(books.delay, since_ms=NOW_MS - 9_000):
        books.messages.append([], NOW_MS - 8_000)
        books.see_all(NOW_MS - 8_000)
        report = audit(books)
    assert report.total.waiting == 3 and missed(report) == [("delay", State.UP)]


def test_a_server_that_reads_its_logs_is_starting_however_long_that_takes(books: Books) -> None:
    with running(books.realtime), running(books.delay, since_ms=START_MS + 30_000):
        assert missed(audit(books)) == [("delay", State.STARTING)]
        books.see_all(START_MS + 45_000)
        assert lost(audit(books)) == [2, 3, 4]


def test_a_new_greeting_starts_the_grace_anew(books: Books) -> None:
    books.hello(1, NOW_MS - 5_000)
    with running(books.delay, books.realtime):
        assert audit(books).total.waiting == 3
        assert lost(audit(books, NOW_MS + 6_000)) == [2, 3, 4]


def test_of_servers_that_stopped_together_what_was_forgotten_before_is_lost(books: Books) -> None:
    books.see_all(START_MS + 38_000)
    report = audit(books, NOW_MS + 48 * HOUR_MS)
    assert lost(report) == [2, 3] and report.total.waiting == 1
    assert missed(report) == [("realtime", State.AWAY), ("delay", State.AWAY)]


def test_a_copy_tells_what_the_directory_told(books: Books, tmp_path: Path) -> None:
    books.hello(1, START_MS + 20_000)
    books.see_all(START_MS + 38_000)
    with running(books.delay, books.realtime):
        expected = audit(books, START_MS + 38_000)
        copy = tmp_path / "copy"
        # The LOCK of a copy is as young as the copy.
        shutil.copytree(books.root, copy, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("copy"))
    found = audit_directory(str(copy), now_ms=START_MS + 38_000)
    assert lost(found) == lost(expected) == [2, 3] and found.total.pending == expected.total.pending == 1


def test_the_start_of_a_stopped_server_s_last_life_counts(books: Books) -> None:
    with running(books.delay, books.realtime, since_ms=START_MS + 35_000):
        books.see_all(START_MS + 44_000)
    assert audit(books).total.waiting == 3


def test_a_subject_waits_for_the_server_that_had_it_last(books: Books) -> None:
    """Another realtime server is away: what it never had does not wait for it, a new subject does."""
    books.send([START_MS + 2_000], subjects=("new",))
    other = f"{books.root}/realtime2"
    shutil.copytree(books.realtime, other)
    for path in Path(other).rglob("*.log"):
        path.unlink()
    place = books.target.place
    log = open_log(books.disk, type(place)(f"{other}/message", place.kind, 0x4EA2), START_MS - HOUR_MS)
    log.close()
    Path(f"{other}/checkpoint").unlink()
    file = CheckpointFile(books.disk, other, 0x4EA2)
    file.publish({"clock": ["boot", 0, START_MS - 1_000]}, START_MS)
    file.close()
    with running(books.delay, books.realtime):
        report = audit(books)
    assert lost(report) == [2, 3, 4] and report.total.waiting == 1
    assert [life.path for life in report.missed] == [other]


@pytest.mark.parametrize("met", [True, False])
def test_without_meta_a_subject_that_has_no_server_waits_and_others_if_their_servers_have_not_met(
    books: Books, met: bool
) -> None:
    books.send([START_MS + 2_000], subjects=("new",))
    if met:
        books.hello(1, START_MS + 41_000)
    with running(books.delay, books.realtime, since_ms=START_MS + 40_000):
        books.see_all(START_MS + 45_000)
        assert lost(audit(books)) == [2, 3, 4, 5]
        with running(f"{books.root}/meta"):
            assert lost(audit(books)) == [2, 3, 4, 5]
        report = audit(books)
    assert report.total.waiting == (1 if met else 4) and ("meta", State.AWAY) in missed(report)
