"""The audit as SQL over an export says what delayd's audit says, row by row."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest

from delayd.hours import hour_name
from delayd.log.dispatch import NewPart, Outcome, Reason
from delayd.machine.disk import Disk
from delayd.reading import plan
from delayd.reading.books import AuditReport, audit_directory, report_plan
from delayd.reading.export import export_directory, export_plan
from delayd.reading.files.directory import Directory, ScheduleSnapshot, take_snapshot
from tests.books import DELAY_ID, HOUR, HOUR_MS, REALTIME_ID, START_MS, Books, Row
from tests.simulation.audit import BOOKS
from tests.sql_audit import SCRIPT, audit_by_sql, differences
from tests.tamper.honest import honest
from tests.three_audits import audit_three_ways

NOW_MS = START_MS + HOUR_MS + 120_000
NEVER_SENT = range(8_888, 10_000)


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


def test_sound_books(books: Books, tmp_path: Path) -> None:
    sound(books)
    books.see_all(NOW_MS)
    report = compare(books, tmp_path / "out")
    assert report.balanced and report.total.past_due == 1 and len(report.hours) == 3


def told_otherwise(lie: Callable[[NewPart], NewPart]) -> Callable[[Books], None]:
    def plant(books: Books) -> None:
        ((hour, part),) = books.hand_over(books.send([START_MS + 7_000]), record=False)
        books.record([(hour, lie(part))])

    return plant


def forgotten(books: Books) -> None:
    books.send([START_MS + 7_000])


def due_otherwise(books: Books) -> None:
    ((hour, part),) = books.hand_over(books.send([START_MS + 7_000]), due_ms=START_MS, record=False)
    books.record([(hour, part._replace(deliver_at_ms=np.array([START_MS + 7_000])))])


def twice_told(books: Books) -> None:
    books.record(books.hand_over(books.send([START_MS + 7_000])))


def twice_stored(books: Books) -> None:
    books.hand_over(rows := books.send([START_MS + 7_000, START_MS + 7_001]))
    books.hand_over(rows[:1], record=False)


def early(books: Books) -> None:
    books.hand_over(books.send([START_MS + 7_000]), claimed_ms=START_MS + 6_999)


def unscheduled(books: Books) -> None:
    books.store([Row(9_999, START_MS, 0, "ghosts")], "ghosts", HOUR, START_MS, START_MS)
    part = NewPart(np.array([8_888], np.uint64), np.array([START_MS]), Outcome.DEAD)
    books.record([(HOUR, part)])


def decided_without_outcome(books: Books) -> None:
    books.hand_over(books.send([START_MS + 7_000]), record=False)
    books.hand_over(books.send([START_MS + 7_000]))


def in_flight(books: Books) -> None:
    books.hand_over(books.send([START_MS + 7_000]), record=False, watermark=0)


def each_outcome(books: Books) -> None:
    for outcome in (Outcome.DEAD, Outcome.IN_DOUBT):
        books.decide(books.send([START_MS + 7_000]), outcome)


def unasked(books: Books) -> None:
    for outcome in (Outcome.CANCELLED, Outcome.EXPIRED):
        books.decide(books.send([START_MS + 7_000]), outcome)


def expired(books: Books) -> None:
    """Rows that expired, filed and not filed; one beside them never does."""
    for _ in range(2):
        due = [START_MS + 7_000, START_MS + 7_001, START_MS + 7_002]
        first, second, other = books.send(due, expires=[START_MS + 8_000, START_MS + 7_002, 0])
        books.decide([first], Outcome.EXPIRED, claimed_at_ms=START_MS + 8_000)
        books.decide([second], Outcome.EXPIRED, claimed_at_ms=START_MS + 9_000)
        books.hand_over([other])
        books.checkpoint()


def expired_too_early(books: Books) -> None:
    for expires_ms in (0, START_MS + 9_000):
        books.decide(
            books.send([START_MS + 7_000], expires=[expires_ms]), Outcome.EXPIRED, claimed_at_ms=START_MS + 8_999
        )


def cancelled(books: Books) -> None:
    books.decide(books.send([START_MS + 7_000]), Outcome.CANCELLED, Reason.CANCELLED)


def cancelled_by_nobody(books: Books) -> None:
    """Two rows that nobody ended, and one that another message replaced: the outcomes say that a caller did it."""
    sequences = books.send([START_MS + 7_000] * 3)
    books.decide(sequences[:2], Outcome.CANCELLED, Reason.CANCELLED, logged=0)
    books.decide(sequences[2:], Outcome.CANCELLED, Reason.CANCELLED, logged=Reason.REPLACED)


def cancelled_and_delivered(books: Books) -> None:
    rows = books.send([START_MS + 7_000])
    books.decide(rows, Outcome.CANCELLED, Reason.CANCELLED)
    books.hand_over(rows, record=False)


def other_subject(books: Books) -> None:
    (sequence,) = books.send([START_MS + 7_000])
    books.record([books.store([books.rows[sequence]], "ghosts", HOUR, START_MS + 7_000, START_MS + 7_005)])


def late(books: Books) -> None:
    books.hand_over(books.send([START_MS + 37_000]), delay_ms=1_001)
    books.hand_over(books.send([START_MS + 37_000]), claimed_ms=START_MS + 39_000, delay_ms=-1_500)


PLANTED: dict[str, tuple[Callable[[Books], None], dict[str, int]]] = {
    "forgotten": (forgotten, {"LOST": 1}),
    "not there": (lambda books: books.record([(HOUR, books.part(books.send([START_MS]), START_MS, 64))]), {"LOST": 1}),
    "no such target": (
        lambda books: books.record(
            [(HOUR, books.part(books.send([START_MS]), START_MS, 64)._replace(target_log_id=0xBAD))]
        ),
        {},
    ),
    "other batch": (told_otherwise(lambda part: part._replace(batch_id=7_777)), {"MISMATCH": 1}),
    "other epoch": (told_otherwise(lambda part: part._replace(epoch=2)), {"MISMATCH": 1}),
    "second attempt": (told_otherwise(lambda part: part._replace(attempt=2)), {"MISMATCH": 1}),
    "other subject": (other_subject, {"MISMATCH": 3}),  # The subject, and two content hashes.
    "twice told": (twice_told, {"DUPLICATE": 1}),
    "twice stored": (twice_stored, {"DUPLICATE": 1}),
    "early": (early, {"EARLY": 1}),
    "unscheduled": (unscheduled, {"ORPHAN": 2}),
    "decided": (decided_without_outcome, {"ORPHAN": 1}),
    "each outcome": (each_outcome, {}),
    "cancelled by a caller": (cancelled, {}),
    "cancelled by nobody, or otherwise": (cancelled_by_nobody, {"MISMATCH": 3}),
    "cancelled by a caller and delivered": (cancelled_and_delivered, {"MISMATCH": 1}),
    "outcomes that nobody asked for": (unasked, {"MISMATCH": 2}),
    "expired": (expired, {}),
    "expired before its time, or never to expire": (expired_too_early, {"MISMATCH": 2}),
    "late": (late, {"LATE": 2}),
    "other offset": (told_otherwise(lambda part: part._replace(target_offset=8)), {"MISMATCH": 1}),
    "other target": (told_otherwise(lambda part: part._replace(target_log_id=0xBAD)), {"MISMATCH": 1}),
    "other claim": (told_otherwise(lambda part: part._replace(claimed_at_ms=START_MS + 7_001)), {"MISMATCH": 1}),
    "other append": (
        told_otherwise(lambda part: part._replace(target_appended_at_ms=START_MS + 7_009)),
        {"MISMATCH": 1},
    ),
    "cancelled": (told_otherwise(lambda part: part._replace(outcome=Outcome.CANCELLED)), {"MISMATCH": 2}),
    "dead": (told_otherwise(lambda part: part._replace(outcome=Outcome.DEAD)), {"MISMATCH": 1}),
    "other due": (told_otherwise(lambda part: part._replace(deliver_at_ms=np.array([START_MS]))), {"MISMATCH": 1}),
    "other due there": (due_otherwise, {"MISMATCH": 1}),
    # The last one, for the watermark of a later batch would cover it.
    "in flight": (in_flight, {}),
}


def test_each_planted_fault_is_found_by_both_ways_and_nothing_else(books: Books, tmp_path: Path) -> None:
    sound(books)
    rows_of: dict[str, range] = {}
    for name, (plant, _) in PLANTED.items():
        first = len(books.rows) + 1
        plant(books)
        rows_of[name] = range(first, len(books.rows) + 1)
    books.see_all(NOW_MS)
    report = compare(books, tmp_path / "out")
    for name, (_, expected) in PLANTED.items():
        rows = rows_of[name] or NEVER_SENT
        found = Counter(finding.kind.name for finding in report.findings if finding.sequence in rows)
        assert found == Counter(expected), name
    assert report.findings_count == sum(sum(expected.values()) for _, expected in PLANTED.values())


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


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_faults(books: Books, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        due_ms = START_MS + draw.choice((0, 7, 9_000, HOUR_MS, HOUR_MS + 100_000, 5 * HOUR_MS))
        at_ms = draw.choice((START_MS - 1_000, START_MS + 60_000, due_ms))
        (sequence,) = books.send([due_ms], at_ms=at_ms, subjects=(draw.choice(("orders", "bills")),))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            act(books, sequence, draw)
    books.see_all(NOW_MS - draw.choice((0, 15_000, 100_000)))
    compare(books, tmp_path / "out")


def act(books: Books, sequence: int, draw: random.Random) -> None:
    """Something that happens to a message, or should not."""
    row = books.rows[sequence]
    claimed_ms = max(row.deliver_at_ms, row.appended_at_ms) + draw.choice((-1, 0, 5, 1_000, 1_001, 30_000))
    match draw.randrange(8):
        case 0:
            books.checkpoint()
        case 1:
            books.decide([sequence], draw.choice([each for each in Outcome if each != Outcome.DISPATCHED]))
        case 2:
            books.record([(row.hour, books.part([sequence], claimed_ms, 8))])
        case 3:
            books.hand_over([sequence], record=False, watermark=draw.choice((None, 0)))
        case 4:
            ((hour, part),) = books.hand_over([sequence], claimed_ms=claimed_ms, delay_ms=3, record=False)
            lie = draw.choice(
                (
                    part._replace(target_offset=8),
                    part._replace(target_log_id=0xBAD),
                    part._replace(claimed_at_ms=claimed_ms - 1),
                    part._replace(target_appended_at_ms=1),
                )
            )
            books.record([(hour, lie)])
        case _:
            books.hand_over([sequence], claimed_ms=claimed_ms, delay_ms=draw.choice((0, 3, 998, 2_000)))


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


def test_the_comparison_notices_a_difference(books: Books, tmp_path: Path) -> None:
    rows = sound(books)
    books.see_all(NOW_MS)
    report = audit_directory(books.root, now_ms=NOW_MS, findings_limit=None)
    books.record(books.hand_over(rows[:1]))
    export_directory(books.root, str(tmp_path / "out"), now_ms=NOW_MS)
    told = differences(report, audit_by_sql(tmp_path / "out"))
    assert any("duplicate is 0 by delayd, 1 by SQL" in line for line in told)
    assert any("only the SQL finds" in line and f"{rows[0]}, 'DUPLICATE'" in line for line in told)
    assert f"{REALTIME_ID:016x}" not in "".join(told)


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
