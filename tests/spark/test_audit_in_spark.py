"""An audit in Spark says what the audit without Spark says, figure by figure and finding by finding."""

import json
import pickle
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from freezegun import freeze_time

from bench.directory import DirectoryWriter, Shape
from delayd.errors import BadArgument, DamagedData, DelaydError
from delayd.machine.disk import RealDisk
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files.target_index import Chunk, LogPiece, split_piece
from delayd.reading.plan import plan_audit
from delayd.reading.seals import SealState
from spark.audit import audit_part, scan_in
from spark.session import audit
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books
from tests.trust import put_secrets
from tests.unit.cli.runner import Ran, run
from tests.unit.reading.archived import NOW_MS as ARCHIVED_NOW_MS
from tests.unit.reading.archived import audited_fleet, write_machines

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark and its libraries warn about each other; what they say is no fault of a test here.
# The first test also starts the JVM, which takes a minute on a machine that is busy with other things.
pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]

NOW_MS = START_MS + 3 * HOUR_MS


def test_the_figures_and_findings_equal_those_without_spark(faulty: Books) -> None:
    expected = audit_directory(faulty.root, now_ms=NOW_MS)
    found = audit(faulty.root, now_ms=NOW_MS, tasks=2)
    assert found == expected
    assert len(found.caused) >= 6 and len(found.total.subjects) == 3
    total = found.total
    assert (total.lost, total.duplicate, total.early, total.orphan, total.mismatch, total.late) == (1, 1, 1, 1, 1, 1)
    assert (total.scheduled, total.dispatched, total.dead, total.pending) == (81, 78, 1, 1)
    assert not found.balanced and found.findings_count == len(found.findings) == 6
    assert [hour.lateness.sum() for hour in found.hours] == [40, 38, 0]


def test_seals_are_held_against_the_hours_in_spark_as_without(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    for hour in range(3):
        books.hand_over(books.send([START_MS + hour * HOUR_MS]))
    books.checkpoint()
    for hour in range(3):
        books.seal(HOUR + hour)
    false = books.seals[1]._replace(facts=books.seals[1].facts._replace(rows=2))
    books.write_seals([books.seals[0], false, books.seals[2]])
    books.close()
    expected = audit_directory(books.root, now_ms=NOW_MS)
    found = audit(books.root, now_ms=NOW_MS, tasks=2)
    assert found == expected and not found.balanced
    assert [seal.state for seal in found.seals] == [SealState.VERIFIED, SealState.BROKEN, SealState.BROKEN]


def test_findings_that_are_accepted_are_so_in_spark_too(faulty: Books, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    shutil.copytree(faulty.root, data)
    put_secrets(tmp_path / "data" / "cluster.secret", b"k" * 32)
    now = datetime.fromtimestamp(NOW_MS / 1000, UTC)

    def say(command: str, *options: str) -> Ran:
        with freeze_time(now, ignore=["pyspark", "py4j"]):
            return run(command, "--data", data, *options, spark_audit=audit)

    assert say("audit", "--accept", "2026112017", "--by", "ann", "--reason", "why", "--yes").code == 0
    for options in ((), ("--format", "json"), ("--from", "2026-11-20T17:00Z")):
        numpy, spark = say("audit", *options), say("spark-audit", *options)
        assert numpy == spark and numpy.code == 0 and "ann" in numpy.out
    report = audit(data, now_ms=NOW_MS, tasks=2)
    assert report == audit_directory(data, now_ms=NOW_MS)
    assert list(report.findings_sha256) == [(DELAY_ID, HOUR + 1)]
    path = Path(report.acceptances[0].path)
    path.write_text(path.read_text().replace('"ann"', '"bob"'))
    numpy, spark = say("audit"), say("spark-audit")
    assert numpy == spark and numpy.code == 3 and "is damaged at byte 0" in numpy.out
    assert say("audit", "--accept", "2026112017", "--by", "ann", "--reason", "why", "--yes").code == 0
    elsewhere = ("--secret-file", str(tmp_path / "none"))
    numpy, spark = say("audit", *elsewhere), say("spark-audit", *elsewhere)
    assert numpy == spark and numpy.code == 3 and "can't be verified" in numpy.out


def test_hours_that_an_earlier_audit_proved_are_left_out_in_spark_too(tmp_path: Path) -> None:
    write_machines(tmp_path)
    places = [str(tmp_path / place) for place in ("a", "b")]
    now = datetime.fromtimestamp(ARCHIVED_NOW_MS / 1000, UTC)
    files = {command: str(tmp_path / command) for command in ("audit", "spark-audit")}

    def say(command: str) -> Ran:
        with freeze_time(now, ignore=["pyspark", "py4j"]):
            words = *places, "--format", "json", "--proved", files[command]
            return run(command, *words, spark_audit=audit)

    for left_out in (0, 3):
        numpy, spark = say("audit"), say("spark-audit")
        assert numpy == spark and json.loads(spark.out)["proved_before"] == left_out
        assert Path(files["audit"]).read_text() == Path(files["spark-audit"]).read_text()


def test_only_the_wanted_hours_are_audited_in_spark(faulty: Books) -> None:
    hour = START_MS // HOUR_MS
    assert audit(faulty.root, now_ms=NOW_MS, hours=range(hour, hour + 1)).balanced
    assert audit(faulty.root, now_ms=NOW_MS, hours=range(3)) == _nothing(faulty)


def test_damage_that_a_task_meets_is_the_same_sentence_as_without_spark(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    books.checkpoint()
    books.close()
    path = books.path_of("schedule")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData) as expected:
        audit_directory(books.root, now_ms=NOW_MS)
    with pytest.raises(DelaydError) as found:
        audit(books.root, now_ms=NOW_MS)
    assert found.value.message == expected.value.message and found.value.code == expected.value.code


def test_a_body_that_does_not_check_is_found_by_the_task_of_its_hour(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    books.send([START_MS])
    books.checkpoint()
    books.close()
    path = next((tmp_path / "delay" / "message").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData) as expected:
        audit_directory(books.root, now_ms=NOW_MS)
    with pytest.raises(DamagedData) as found:
        audit(books.root, now_ms=NOW_MS, tasks=1)
    assert (found.value.path, found.value.what) == (expected.value.path, expected.value.what)


def test_tasks_scan_the_realtime_logs_by_segments_and_say_what_one_process_says(
    session: "SparkSession", tmp_path: Path
) -> None:
    DirectoryWriter(str(tmp_path), Shape(4_000, hours=2, segment_bytes=256 << 10)).write()
    asked: list[int] = []

    def scan(pieces: Sequence[LogPiece]) -> Iterator[Chunk]:
        asked.append(sum(len(split_piece(RealDisk(), piece, 1)) for piece in pieces))
        return iter(scan_in(session, 1)(pieces))

    plan, _ = plan_audit(RealDisk(), (str(tmp_path),), NOW_MS, scan=scan)
    expected, _ = plan_audit(RealDisk(), (str(tmp_path),), NOW_MS)
    assert asked[0] == 3
    assert (plan.index.batches == expected.index.batches).all()
    assert plan.index.subjects == expected.index.subjects
    segments = sorted((tmp_path / "realtime" / "message").iterdir())
    data = bytearray(segments[1].read_bytes())
    data[-1] ^= 1
    segments[1].write_bytes(data)
    with pytest.raises(DamagedData) as damage:
        plan_audit(RealDisk(), (str(tmp_path),), NOW_MS, scan=scan_in(session, 1))
    with pytest.raises(DamagedData) as known:
        plan_audit(RealDisk(), (str(tmp_path),), NOW_MS)
    assert damage.value.message == known.value.message


def test_a_frozen_clock_decides_what_is_pending(faulty: Books) -> None:
    with freeze_time("2026-11-20T16:30:00Z", ignore=["pyspark", "py4j"]):
        assert audit(faulty.root).total.pending == 2


def test_an_audit_by_no_tasks_is_refused_by_name(faulty: Books) -> None:
    for tasks in (0, -3):
        with pytest.raises(BadArgument, match=f"tasks {tasks} is no number of tasks"):
            audit(faulty.root, tasks=tasks)


def test_an_hour_sends_the_driver_only_the_steps_of_lateness_that_it_has(faulty: Books) -> None:
    plan, _ = plan_audit(RealDisk(), (faulty.root,), NOW_MS)
    for row in (row for batch in audit_part(0, plan, 0) for row in batch.to_pylist()):
        steps = [*row["lateness"], *row["past_due_lateness"]]
        assert sum(each["count"] for each in steps) <= row["dispatched"]
        assert all(each["count"] for each in steps)
        assert sum(each["scheduled"] for each in row["subjects"]) == row["scheduled"]
        assert len(pickle.dumps({**row, "subjects": [], "caused": []})) < 2_000


def test_a_directory_without_books_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="holds no messages of delayd"):
        audit(str(tmp_path))


def _nothing(books: Books) -> AuditReport:
    return audit_directory(books.root, now_ms=NOW_MS, hours=range(3))


@pytest.mark.parametrize("places", [("a", "b", "copy", "archive"), ("archive",)])
def test_a_fleet_in_spark_is_what_it_is_without_spark(tmp_path: Path, places: tuple[str, ...]) -> None:
    write_machines(tmp_path)
    named = [str(tmp_path / place) for place in places]
    expected = audited_fleet(*named)
    found = audit(*named, now_ms=ARCHIVED_NOW_MS, tasks=2, findings_limit=None)
    assert found == expected
    assert (expected.total.scheduled, expected.balanced) == (48, "archive" not in places)
    assert bool(expected.missing) is ("b" not in places) and bool(expected.doubled) is ("copy" in places)
