"""An audit in Spark says what the audit without Spark says, figure by figure and finding by finding."""

import pickle
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from freezegun import freeze_time
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from bench.directory import DirectoryWriter, Shape
from delayd.errors import BadArgument, DamagedData, DelaydError
from delayd.log.pull import PullEntry, PullOp
from delayd.machine.disk import RealDisk
from delayd.outcome import Outcome
from delayd.reading.books import AuditReport, audit_directory
from delayd.reading.files.target_index import Chunk, LogPiece, split_piece
from delayd.reading.plan import plan_audit
from delayd.reading.seals import SealState
from pyspark_delayd import DefaultSource
from spark.audit import audit_part, scan_in
from spark.session import audit
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books, Row
from tests.trust import put_secrets
from tests.unit.cli.runner import Ran, run

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


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Books:
    """Three hours with one of each fault in the second, an hour that is pending, rows filed and rows not filed."""
    books = Books(str(tmp_path_factory.mktemp("books")))
    first = books.send([START_MS + row for row in range(40)], subjects=("orders", "bills"))
    books.hand_over(first)
    books.checkpoint()
    rows = books.send([START_MS + HOUR_MS + row for row in range(40)])
    lost, late, early, twice, told_otherwise, dead, *sound = rows
    del lost
    books.hand_over([late], delay_ms=5_000)
    books.hand_over([early], claimed_ms=START_MS)
    books.record(books.hand_over([twice]))
    ((hour, part),) = books.hand_over([told_otherwise], record=False)
    books.record([(hour, part._replace(target_offset=8))])
    books.decide([dead], Outcome.DEAD)
    books.hand_over(sound)
    books.store([Row(9_999, START_MS + HOUR_MS, 0, "ghosts")], "ghosts", hour, START_MS + HOUR_MS, START_MS + HOUR_MS)
    books.send([START_MS + 50 * HOUR_MS])
    books.see_all(NOW_MS)
    books.consume("orders", "g", [PullEntry(PullOp.PULL, 1, 1, 77, 0, 0, 2, START_MS)])
    books.tally([(0, 1, DELAY_ID, HOUR - 33, 0, 7, 3, 5, 2, 0)])
    books.close()
    return books


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

    plan, _ = plan_audit(RealDisk(), str(tmp_path), NOW_MS, scan=scan)
    expected, _ = plan_audit(RealDisk(), str(tmp_path), NOW_MS)
    assert asked[0] == 3
    assert (plan.index.batches == expected.index.batches).all()
    assert plan.index.subjects == expected.index.subjects
    segments = sorted((tmp_path / "realtime" / "message").iterdir())
    data = bytearray(segments[1].read_bytes())
    data[-1] ^= 1
    segments[1].write_bytes(data)
    with pytest.raises(DamagedData) as damage:
        plan_audit(RealDisk(), str(tmp_path), NOW_MS, scan=scan_in(session, 1))
    with pytest.raises(DamagedData) as known:
        plan_audit(RealDisk(), str(tmp_path), NOW_MS)
    assert damage.value.message == known.value.message


def test_a_frozen_clock_decides_what_is_pending(faulty: Books) -> None:
    with freeze_time("2026-11-20T16:30:00Z", ignore=["pyspark", "py4j"]):
        assert audit(faulty.root).total.pending == 2


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        ("accepted", 40),
        ("schedule", 81),
        ("dispatch", 80),
        ("message", 79),
        ("lifecycle", 81),
        ("consumption", 1),
        ("tally", 1),
    ],
)
@pytest.mark.parametrize("tasks", [1, 5])
def test_the_data_source_has_a_table_for_each_log(faulty: Books, view: str, rows: int, tasks: int) -> None:
    # Spark starts two Pythons for each query, so here the source is called as those call it.
    source = DefaultSource({"view": view, "tasks": str(tasks), "path": faulty.root})
    schema = StructType.fromDDL(source.schema())
    assert isinstance(schema, StructType)
    reader = source.reader(schema)
    read = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    batches = [batch for batch in read if isinstance(batch, pa.RecordBatch)]
    assert sum(batch.num_rows for batch in batches) == rows
    # Spark refuses a batch of any other schema.
    assert {batch.schema for batch in batches} == {to_arrow_schema(schema, timezone="UTC")}


def test_the_sums_of_a_realtime_server_are_tables(session: "SparkSession", faulty: Books) -> None:
    (group,) = session.read.format("delayd").option("view", "consumption").load(faulty.root).collect()
    assert (group["subject"], group["consumers"], group["pulled"], group["outstanding"]) == ("orders", "g", 2, 2)
    tallies = session.read.format("delayd").option("view", "tally").load(faulty.root)
    assert [tuple(row) for row in tallies.select("hour", "messages").collect()] == [("2026111907", 7)]


def test_lifecycle_says_of_each_message_what_became_of_it_and_how_late(session: "SparkSession", faulty: Books) -> None:
    frame = session.read.format("delayd").load(faulty.root)
    rows = {row["sequence"]: row for row in frame.collect()}
    assert (rows[2]["subject"], rows[2]["outcome"], rows[2]["hour"]) == ("bills", "DISPATCHED", "2026112016")
    assert rows[41]["outcome"] is None and rows[41]["late_ms"] is None
    assert rows[42]["late_ms"] == timedelta(seconds=5) // timedelta(milliseconds=1)
    assert rows[46]["outcome"] == "DEAD" and rows[46]["target"] is None


def test_a_query_that_names_two_columns_and_one_hour_reads_no_more(session: "SparkSession", faulty: Books) -> None:
    source = session.read.format("delayd").option("from", "2026112017").option("to", "2026112017")
    frame = source.schema("sequence long, subject string").load(faulty.root)
    assert frame.columns == ["sequence", "subject"] and frame.count() == 40


def test_an_unknown_view_is_refused_by_name(session: "SparkSession", faulty: Books) -> None:
    with pytest.raises(
        Exception,
        match="view 'bodies' is not one of accepted, decision, schedule, dispatch, message, lifecycle, consumption",
    ):
        session.read.format("delayd").option("view", "bodies").load(faulty.root).count()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": "0"}, "tasks '0' is no number of tasks"),
        ({"tasks": "-1"}, "tasks '-1' is no number of tasks"),
        ({"tasks": "many"}, "tasks 'many' is no number of tasks"),
        ({"form": "2026112016"}, "option 'form' is not one of view, from, to, tasks"),
        ({"from": "2026-11-20"}, "'2026-11-20' is no hour"),
        ({"from": "2026112017", "to": "2026112016"}, "from 2026112017 is after to 2026112016"),
        ({"view": "tally", "limit": "3"}, "option 'limit' is not one of"),
    ],
)
def test_an_option_that_would_read_nothing_or_be_ignored_is_refused_by_name(
    faulty: Books, options: dict[str, str], words: str
) -> None:
    with pytest.raises(BadArgument, match=words):
        DefaultSource({**options, "path": faulty.root}).reader(StructType())


def test_a_query_with_a_refused_option_ends_with_the_words(session: "SparkSession", faulty: Books) -> None:
    with pytest.raises(Exception, match="option 'form' is not one of view, from, to, tasks"):
        session.read.format("delayd").option("form", "2026112016").load(faulty.root).count()


def test_an_audit_by_no_tasks_is_refused_by_name(faulty: Books) -> None:
    for tasks in (0, -3):
        with pytest.raises(BadArgument, match=f"tasks {tasks} is no number of tasks"):
            audit(faulty.root, tasks=tasks)


def test_an_hour_sends_the_driver_only_the_steps_of_lateness_that_it_has(faulty: Books) -> None:
    plan, _ = plan_audit(RealDisk(), faulty.root, NOW_MS)
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
