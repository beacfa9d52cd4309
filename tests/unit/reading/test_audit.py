"""The audit finds each planted fault, by count and by name, and nothing in sound books."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from delayd.batch.labels import DEAD_KEPT_MS
from delayd.batch.names import RETRY_PREFIX
from delayd.errors import DamagedData
from delayd.outcome import Outcome, Reason
from delayd.reading import plan
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files import origins
from delayd.reading.findings import HourSummary
from delayd.reading.seals import SealState
from delayd.reading.subject_figures import CLASSES, PARTS
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books
from tests.three_audits import audit_three_ways

LATER_MS = START_MS + 60_000


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(str(tmp_path))
    yield books
    books.close()


def audit(books: Books, now_ms: int = LATER_MS) -> AuditReport:
    books.see_all(max(now_ms, START_MS))
    report = audit_directory(books.root, now_ms=now_ms)
    with pytest.MonkeyPatch.context() as patch:
        # A large hour is audited in parts, and nobody can tell.
        patch.setattr(plan, "PART_ROWS_MAX", 4)
        patch.setattr(origins, "SAMPLE_ROWS", 2)
        assert audit_directory(books.root, now_ms=now_ms) == report
    for hour in report.hours:
        # An audit of one hour skips the others, and the report of this hour stays the same.
        alone = audit_directory(books.root, now_ms=now_ms, hours=[hour.hour])
        assert alone.hours == (hour,)
        # So an hour that was accepted by itself is accepted in an audit of all hours.
        assert alone.findings_sha256.get((DELAY_ID, hour.hour)) == report.findings_sha256.get((DELAY_ID, hour.hour))
        assert bool(alone.findings_sha256) == (not hour.balanced)
        assert hour.scheduled == sum(getattr(hour, name) for name in CLASSES)
    return report


def due(count: int, step_ms: int = 10, start_ms: int = START_MS) -> list[int]:
    return [start_ms + step_ms * row for row in range(count)]


def test_rule_P3_a_row_counts_once_whether_in_the_schedule_log_or_the_message_log(books: Books) -> None:
    first = books.send(due(50, 1))
    books.checkpoint()
    second = books.send([*due(50, 1), START_MS + HOUR_MS])
    books.hand_over(first + second[:50])
    report = audit(books)
    figures = [(hour.hour, hour.scheduled, hour.dispatched) for hour in report.hours]
    assert figures == [(HOUR, 100, 100), (HOUR + 1, 1, 0)]
    assert report.balanced and report.total.pending == 1


def test_rule_P3_batches_of_a_checkpoint_that_did_not_finish_are_left_out(books: Books) -> None:
    first = books.send(due(20, 1))
    books.checkpoint()
    second = books.send(due(30, 1))
    books.checkpoint(publish=False)
    books.hand_over(first + second)
    report = audit(books)
    assert report.balanced and report.total.scheduled == report.total.dispatched == 50


def test_rule_P5_a_past_due_row_is_filed_in_the_hour_of_its_append_and_counted_apart(books: Books) -> None:
    rows = books.send([START_MS - HOUR_MS * 5, START_MS + 100], at_ms=START_MS + 50)
    books.checkpoint()
    books.hand_over(rows[:1], claimed_ms=START_MS + 52)
    books.hand_over(rows[1:])
    report = audit(books)
    (hour,) = report.hours
    assert report.balanced and not report.findings
    assert (hour.hour, hour.dispatched, hour.past_due) == (HOUR, 2, 1)
    assert int(hour.lateness.sum()) == 1 and int(hour.past_due_lateness.sum()) == 1
    assert hour.late_ms_max == 5


@pytest.mark.parametrize("filed", [True, False])
def test_rule_P5_a_row_that_is_accepted_in_the_millisecond_in_which_it_is_due_is_not_past_due(
    books: Books, filed: bool
) -> None:
    rows = books.send([START_MS, START_MS - 1], at_ms=START_MS)
    if filed:
        books.checkpoint()
    books.hand_over(rows)
    assert audit(books).total.past_due == 1


def test_rule_P3_rows_at_the_target_above_the_watermark_are_undecided_and_not_orphans(books: Books) -> None:
    rows = books.send(due(3, 1))
    books.hand_over(rows[:1], watermark=0)
    books.hand_over(rows[1:], watermark=1, record=False)
    report = audit(books)
    assert report.balanced and (report.total.dispatched, report.total.undecided) == (1, 2)


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("older", [True, False])
def test_hours_that_the_delay_servers_retention_removed_are_not_orphans(
    books: Books, published: bool, older: bool
) -> None:
    if older:  # Hours with dead messages are kept, so the hours that remain need not be the youngest.
        books.decide(books.send([START_MS - HOUR_MS], at_ms=START_MS - 2 * HOUR_MS), Outcome.DEAD)
    books.hand_over(books.send(due(10, 1)))
    books.checkpoint()
    books.hand_over(books.send([START_MS + HOUR_MS]))
    books.removed.add(HOUR)
    books.seal()
    books.checkpoint()
    for log in ("schedule", "dispatch"):
        books.path_of(log).unlink()
    if published:
        del books.hours[HOUR]
        books.publish()
    report = audit(books, START_MS + HOUR_MS + 60_000)
    assert report.balanced and report.deleted_rows == 10
    assert [seal.state for seal in report.seals] == [SealState.DELETED]
    assert [hour.hour for hour in report.hours] == [HOUR - 1, HOUR + 1][not older :]


@pytest.mark.parametrize("sealed", [False, True])
def test_an_hour_that_is_gone_and_was_not_removed_by_retention_is_damage(books: Books, sealed: bool) -> None:
    books.hand_over(books.send(due(10, 1)))
    books.checkpoint()
    if sealed:
        books.seal()
    books.path_of("schedule").unlink()
    with pytest.raises(DamagedData, match="the file is gone, and the checkpoint counts 10 messages in it"):
        audit(books)


def test_rule_P3_schedule_batches_above_the_published_offset_are_left_out(books: Books) -> None:
    rows = books.send(due(3, 1))
    books.checkpoint()
    books.replay_offset, books.hours = 0, {}
    books.publish()
    books.hand_over(rows)
    report = audit(books)
    assert report.balanced and report.total.scheduled == 3


def test_what_people_read_of_the_books_names_every_class_that_has_rows() -> None:
    summary = HourSummary(scheduled=4_000, dispatched=3_991, cancelled=1, in_doubt=2, pending=3, waiting=1, missing=2)
    assert summary.equation == (
        "scheduled 4,000 = dispatched 3,991 + cancelled 1 + in doubt 2 + pending 3 + waiting 1 + missing 2"
    )
    assert HourSummary().equation == "scheduled 0 = 0"


def test_moved_rows_are_among_the_cancelled_and_dead_letters_sent_again_among_the_moved(
    books: Books, tmp_path: Path
) -> None:
    after, retry = START_MS + DEAD_KEPT_MS, f"{RETRY_PREFIX}{REALTIME_ID:016x}/1"
    again, elsewhere, purged, drained = books.send([after, after + 1, after + 2, after + 3], subjects=(retry,))
    moved, cancelled = books.send([after, after], subjects=("orders",))
    for sequence, reason, other_due_ms in (
        (elsewhere, Reason.MOVED, START_MS),
        (purged, Reason.CANCELLED, 0),
        (drained, Reason.DRAINED, START_MS + 3),
        (cancelled, Reason.CANCELLED, 0),
    ):
        books.decide([sequence], Outcome.CANCELLED, reason, other=9, other_due_ms=other_due_ms)
    books.redrive([again, moved])
    report = audit(books)
    assert report.balanced
    assert (report.total.cancelled, report.total.moved, report.total.redriven) == (6, 4, 1)
    of_subject = {
        name: [int(report.total.subjects.of(figure)[at]) for figure in ("cancelled", *PARTS)]
        for at, name in enumerate(report.total.subjects.names)
    }
    assert of_subject == {retry: [4, 3, 1], "orders": [2, 1, 0]}
    assert "4 of the cancelled messages moved" in " ".join(report.remarks)
    assert audit_three_ways(tmp_path, LATER_MS, tmp_path / "out", spark=False).differences == []


def test_a_row_in_the_place_of_another_is_known_when_an_hour_is_read_in_parts(books: Books, tmp_path: Path) -> None:
    sequences = books.send(due(20))
    books.decide(sequences, Outcome.CANCELLED, Reason.REPLACED, other=101, other_due_ms=START_MS)
    assert audit(books).balanced  # Read whole, and in parts of four rows.
    books.checkpoint()
    books.seal()
    assert [seal.state for seal in audit(books, START_MS + 2 * HOUR_MS).seals] == [SealState.VERIFIED]
    assert audit_three_ways(tmp_path, LATER_MS, tmp_path / "out", spark=False).differences == []


def test_a_message_that_never_expires_or_not_yet_has_not_expired(books: Books) -> None:
    first, second, third = books.send([START_MS] * 3, expires=[0, START_MS + 9_000, START_MS + 8_000])
    books.decide([first, second, third], Outcome.EXPIRED, claimed_at_ms=START_MS + 8_999)
    report = audit(books)
    assert [finding.sequence for finding in report.findings] == [first, second]
    assert (report.total.expired, report.total.mismatch) == (3, 2)


def test_lateness_is_what_the_target_says(books: Books) -> None:
    ((hour, part),) = books.hand_over(books.send([START_MS]), delay_ms=700, record=False)
    books.record([(hour, part._replace(target_appended_at_ms=START_MS + 3))])
    assert audit(books).total.late_ms_max == 700
