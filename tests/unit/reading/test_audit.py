"""The audit finds each planted fault, by count and by name, and nothing in sound books."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from delayd.errors import DamagedData
from delayd.log.dispatch import PART, NewPart, Outcome, OutcomeRows, decode_outcomes
from delayd.reading import plan
from delayd.reading.audit import SAID_BY_BOTH, AuditTerms, Span, Spans, agree, audit_hour
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files import origins
from delayd.reading.files.rows import BATCH, NO_INT64S, NO_UINT64S, ScheduleRows, Target, TargetRows
from delayd.reading.findings import CLASSES, Finding, FindingKind, HourSummary
from delayd.reading.seals import SealState
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books, Row

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


def kinds(report: AuditReport) -> dict[str, int]:
    return dict(Counter(finding.kind.name for finding in report.findings))


def only(report: AuditReport) -> Finding:
    (finding,) = report.findings
    return finding


def part_of(rows: Sequence[Row], **facts: int) -> NewPart:
    sequences = np.array([row.sequence for row in rows], np.uint64)
    due = np.array([row.deliver_at_ms for row in rows], np.int64)
    hashes = np.array([row.content_hash for row in rows], np.uint64)
    return NewPart(sequences, due, Outcome.DISPATCHED, hashes=hashes, **facts)


def due(count: int, step_ms: int = 10, start_ms: int = START_MS) -> list[int]:
    return [start_ms + step_ms * row for row in range(count)]


def test_sound_books_balance_and_have_no_findings(books: Books) -> None:
    books.hand_over(books.send(due(100, 1), subjects=("orders", "bills")))
    report = audit(books)
    assert report.balanced and not report.findings and report.findings_count == 0
    (hour,) = report.hours
    assert (hour.log_id, hour.hour, hour.scheduled, hour.dispatched) == (DELAY_ID, HOUR, 100, 100)


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


def test_rule_P3_without_any_checkpoint_the_message_log_is_the_schedule_side(books: Books) -> None:
    rows = books.send(due(20, 1))
    books.checkpoint(publish=False)
    books.hand_over(rows)
    assert audit(books).total.scheduled == 20


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


def test_a_row_without_an_outcome_is_lost_once_its_grace_is_over(books: Books) -> None:
    rows = books.send(due(10, 1), subjects=("orders",))
    books.hand_over(rows[:-1])
    report = audit(books)
    assert not report.balanced and report.total.lost == report.total.missing == 1
    assert only(report)[:5] == (HOUR, FindingKind.LOST, rows[-1], START_MS + 9, "orders")
    assert "without an outcome" in only(report).detail


def test_a_due_row_within_its_grace_is_undecided_and_one_not_due_is_pending(books: Books) -> None:
    books.send([START_MS, START_MS + 5_000, START_MS + 30_000])
    report = audit(books, START_MS + 6_000)
    assert report.balanced and (report.total.undecided, report.total.pending) == (2, 1)


def test_what_came_due_after_a_server_stopped_waits_for_it_and_is_not_lost(books: Books) -> None:
    books.send([START_MS, START_MS + 30_000])
    books.see_all(START_MS + 20_000)
    report = audit_directory(books.root, now_ms=START_MS + HOUR_MS * 48)
    assert (report.total.lost, report.total.waiting) == (1, 1)


def test_a_stopped_server_had_settled_what_its_last_checkpoint_says(books: Books) -> None:
    books.send([START_MS])
    books.checkpoint()
    books.settle(START_MS + 20_000)
    assert audit_directory(books.root, now_ms=LATER_MS).total.lost == 1


def test_a_dispatch_log_that_lies_is_found_in_the_target_log(books: Books) -> None:
    rows = books.send(due(10, 1))
    books.hand_over(rows[:9])
    lie = part_of([books.rows[rows[9]]], target_log_id=REALTIME_ID, target_offset=64, claimed_at_ms=START_MS + 9)
    books.record([(HOUR, lie)])
    report = audit(books)
    assert (report.total.lost, report.total.dispatched, report.total.missing) == (1, 9, 1)
    assert only(report).detail.endswith(f"the log of target {REALTIME_ID:016x} does not hold it")


def test_rule_S7_a_dispatch_to_a_target_that_has_no_log_here_is_unproven(books: Books) -> None:
    rows = books.send(due(1))
    lie = part_of([books.rows[rows[0]]], target_log_id=0xBAD, claimed_at_ms=START_MS)
    books.record([(HOUR, lie)])
    report = audit(books)
    assert report.balanced and (report.total.dispatched, report.total.unproven) == (1, 1)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (lambda part: part._replace(target_offset=8), "says offset 8"),
        (lambda part: part._replace(target_log_id=0xBAD), "says target 0000000000000bad"),
        (lambda part: part._replace(claimed_at_ms=START_MS + 3), f"says claimed at {START_MS + 3}"),
        (lambda part: part._replace(target_appended_at_ms=START_MS + 7), f"says appended at {START_MS + 7}"),
        (lambda part: part._replace(outcome=Outcome.DEAD), "has outcome 3"),
        (lambda part: part._replace(batch_id=9), "says batch 9"),
        (lambda part: part._replace(epoch=9), "or another epoch"),
        (lambda part: part._replace(attempt=2), "says attempt 2"),
        (lambda part: part._replace(deliver_at_ms=np.array([START_MS + 1])), "another log says"),
    ],
)
def test_what_the_dispatch_log_and_the_target_tell_differently_is_a_mismatch(
    books: Books, lie: Callable[[NewPart], NewPart], said: str
) -> None:
    rows = books.send(due(1))
    ((hour, part),) = books.hand_over(rows, record=False)
    books.record([(hour, lie(part))])
    report = audit(books)
    assert not report.balanced and report.total.mismatch == 1
    assert only(report).kind == FindingKind.MISMATCH and said in only(report).detail


def test_a_target_that_holds_another_due_instant_is_a_mismatch(books: Books) -> None:
    books.hand_over(books.send(due(1)), due_ms=START_MS - 1)
    assert "another log says" in audit(books).findings[0].detail


def test_two_outcomes_of_one_row_are_a_duplicate(books: Books) -> None:
    rows = books.send(due(5, 1))
    books.record(books.hand_over(rows))
    report = audit(books)
    assert (report.total.duplicate, report.total.dispatched) == (5, 5)
    assert {finding.detail for finding in report.findings} == {"the dispatch log has 2 outcomes"}


def test_a_row_twice_in_the_target_log_is_a_duplicate_whatever_the_dispatch_log_says(books: Books) -> None:
    rows = books.send(due(5, 1))
    books.hand_over(rows)
    books.hand_over(rows[:2], record=False)
    report = audit(books)
    assert report.total.duplicate == 2 and not report.balanced
    assert {finding.detail for finding in report.findings} == {"the realtime logs hold it 2 times"}


def test_rule_T2_a_claim_before_due_is_early(books: Books) -> None:
    rows = books.send(due(3, 1))
    books.hand_over(rows, claimed_ms=START_MS + 1)
    report = audit(books)
    assert report.total.early == 1 and only(report).sequence == rows[2]
    assert only(report).detail == f"claimed at {START_MS + 1}, 1 ms before it was due"


def test_a_lie_about_the_claim_does_not_hide_that_it_was_early(books: Books) -> None:
    ((hour, part),) = books.hand_over(books.send(due(1)), claimed_ms=START_MS - 40, record=False)
    books.record([(hour, part._replace(claimed_at_ms=START_MS))])
    assert kinds(audit(books)) == {"EARLY": 1, "MISMATCH": 1}


def test_an_outcome_that_nothing_scheduled_is_an_orphan(books: Books) -> None:
    books.send(due(1))
    books.decide([1], Outcome.DEAD)
    books.record([(HOUR, part_of([Row(77, START_MS, 0, "orders")], target_log_id=REALTIME_ID))])
    report = audit(books)
    assert only(report)[:4] == (HOUR, FindingKind.ORPHAN, 77, START_MS)


def test_a_row_at_the_target_that_nothing_scheduled_is_an_orphan_with_its_subject(books: Books) -> None:
    books.send(due(1))
    books.decide([1], Outcome.DEAD)
    books.store([Row(77, START_MS, 0, "ghosts")], "ghosts", HOUR, START_MS, START_MS)
    assert only(audit(books))[:5] == (HOUR, FindingKind.ORPHAN, 77, START_MS, "ghosts")


def test_rule_P3_rows_at_the_target_above_the_watermark_are_undecided_and_not_orphans(books: Books) -> None:
    rows = books.send(due(3, 1))
    books.hand_over(rows[:1], watermark=0)
    books.hand_over(rows[1:], watermark=1, record=False)
    report = audit(books)
    assert report.balanced and (report.total.dispatched, report.total.undecided) == (1, 2)


@pytest.mark.parametrize("by", ["batch", "hello"])
def test_rows_at_the_target_below_the_watermark_need_an_outcome(books: Books, by: str) -> None:
    rows = books.send(due(3, 1))
    books.hand_over(rows[:1], record=False)
    if by == "hello":
        books.hello(watermark=1)
    else:
        books.hand_over(rows[1:], watermark=1)
    report = audit(books)
    (orphan,) = [finding for finding in report.findings if finding.kind == FindingKind.ORPHAN]
    assert orphan.sequence == rows[0] and "decided, without an outcome" in orphan.detail
    assert report.total.undecided == 1 and not report.balanced


def test_late_rows_are_shown_and_do_not_unbalance(books: Books) -> None:
    rows = books.send(due(4, 1))
    books.hand_over(rows[:1], delay_ms=1_001)
    books.hand_over(rows[1:2], claimed_ms=START_MS + 5_000, delay_ms=-4_900)
    books.hand_over(rows[2:], delay_ms=900)
    report = audit(books)
    assert report.balanced and report.total.late == 2 and kinds(report) == {"LATE": 2}
    assert [finding.sequence for finding in report.findings] == rows[:2]
    assert report.total.late_ms_max == 1_001


def test_each_outcome_has_its_own_count(books: Books) -> None:
    rows = books.send(due(7, 1))
    for sequence, outcome in zip(rows, (Outcome.DEAD, Outcome.DEAD, *Outcome), strict=True):
        if outcome != Outcome.DISPATCHED:
            books.decide([sequence], outcome)
    books.hand_over([rows[2]])
    total = audit(books).total
    assert (total.dead, total.cancelled, total.expired, total.in_doubt, total.dispatched) == (3, 1, 1, 1, 1)


def test_one_row_can_have_several_findings_and_is_counted_once_for_each_kind(books: Books) -> None:
    rows = books.send(due(1))
    again = books.hand_over(rows, claimed_ms=START_MS - 5)
    books.record(again)
    books.hand_over(rows, claimed_ms=START_MS - 5, record=False)
    report = audit(books)
    assert (report.total.duplicate, report.total.early, report.findings_count) == (1, 1, 3)


def test_only_the_wanted_hours_are_audited(books: Books) -> None:
    books.send([START_MS, START_MS + HOUR_MS, START_MS + 2 * HOUR_MS])
    report = audit_directory(books.root, now_ms=START_MS, hours=range(HOUR + 1, HOUR + 2))
    assert [hour.hour for hour in report.hours] == [HOUR + 1]


def test_findings_are_limited_and_counted_and_late_ones_give_way(books: Books) -> None:
    rows = books.send(due(20, 1))
    books.hand_over(rows[:15], delay_ms=3_000)
    books.see_all(LATER_MS)
    report = audit_directory(books.root, now_ms=LATER_MS, findings_limit=6)
    assert kinds(report) == {"LATE": 1, "LOST": 5} and report.findings_count == 20


def test_lateness_figures_come_from_the_target_log(books: Books) -> None:
    rows = books.send(due(100, 0))
    for late_ms, sequence in enumerate(rows):
        books.hand_over([sequence], delay_ms=late_ms)
    total = audit(books).total
    assert total.late_ms(0.5) == pytest.approx(49, rel=0.03) and total.late_ms_max == 99
    assert total.late_ms(0.99) == pytest.approx(98, rel=0.03)


def test_what_retention_removed_at_the_target_is_unproven_and_not_lost(tmp_path: Path) -> None:
    books = Books(str(tmp_path), segment_bytes=2_000)
    for sequence in books.send(due(40, 1)):
        books.hand_over([sequence])
    books.target.remove(books.target.detach_below(6_000))
    total = audit(books).total
    books.close()
    assert total.lost == 0 and total.dispatched == 40 and 0 < total.unproven < 40


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


def test_progress_names_hours_done_and_all_hours(books: Books) -> None:
    books.send([START_MS, START_MS + HOUR_MS])
    seen: list[tuple[int, int]] = []
    audit_directory(books.root, now_ms=START_MS, progress=lambda done, count: seen.append((done, count)))
    assert seen == [(1, 2), (2, 2)]


def test_rule_P3_schedule_batches_above_the_published_offset_are_left_out(books: Books) -> None:
    rows = books.send(due(3, 1))
    books.checkpoint()
    books.replay_offset, books.hours = 0, {}
    books.publish()
    books.hand_over(rows)
    report = audit(books)
    assert report.balanced and report.total.scheduled == 3


def test_a_row_that_the_schedule_side_holds_twice_is_a_duplicate() -> None:
    sequence = np.array([1, 2, 2], np.uint64)
    subject = body_bytes = np.zeros(3, np.uint32)
    due_ms, appended_ms = np.full(3, START_MS), np.zeros(3, np.int64)
    rows = ScheduleRows(sequence, due_ms, appended_ms, subject, body_bytes, sequence, ["orders"])
    stored = TargetRows(NO_UINT64S, NO_INT64S, NO_INT64S, np.empty(0, BATCH), (), ())
    terms = AuditTerms(START_MS - 1, Spans(Span(0, START_MS - 1)))
    found, summary = audit_hour(1, HOUR, rows, decode_outcomes([]), stored, terms)
    assert [finding.detail for finding in found] == ["the schedule side holds it 2 times"]
    assert (summary.duplicate, summary.pending, summary.scheduled) == (1, 3, 3)


@pytest.mark.parametrize("field", ["outcome", "target_log_id", *SAID_BY_BOTH])
def test_two_logs_agree_only_where_each_batch_says_the_same(field: str) -> None:
    sequences, due = np.arange(1, 7, dtype=np.uint64), np.full(6, START_MS)
    batches = np.zeros(3, BATCH)
    parts = np.zeros(4, PART)  # The third one has no row, and may say anything.
    used = np.array([0, 1, 3])
    parts["outcome"][used], parts["target_log_id"][used] = Outcome.DISPATCHED, REALTIME_ID
    for number, (own, theirs) in enumerate(SAID_BY_BOTH.items()):
        parts[own][used] = batches[theirs] = 10 * number + np.arange(3)
    batch_of = np.array([0, 2, 1, 1, 0, 2])
    told = OutcomeRows(sequences, due, parts, used[batch_of], sequences)
    targets = (Target("", REALTIME_ID, 0),)
    stored = TargetRows(sequences, due, batch_of, batches, targets, ())
    assert agree(told, stored)
    assert not agree(told._replace(sequences=sequences + np.uint64(1)), stored)
    assert not agree(told._replace(part_of=used[batch_of[::-1]]), stored)
    parts[field][3] += 1
    assert not agree(told, stored)


def test_what_people_read_of_the_books_names_every_class_that_has_rows() -> None:
    summary = HourSummary(scheduled=4_000, dispatched=3_991, cancelled=1, in_doubt=2, pending=3, waiting=1, missing=2)
    assert summary.equation == (
        "scheduled 4,000 = dispatched 3,991 + cancelled 1 + in doubt 2 + pending 3 + waiting 1 + missing 2"
    )
    assert HourSummary().equation == "scheduled 0 = 0"
