"""The data source: tables of directories and archives in Spark, what is refused, what is left out, and streams."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType

from delayd.errors import BadArgument
from pyspark_delayd import DefaultSource
from tests.books import DELAY_ID, HOUR, HOUR_MS, START_MS, Books
from tests.unit.cli.runner import run
from tests.unit.reading.archived import write_books

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The first test also starts the JVM, which takes a minute on a machine that is busy with other things.
pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]

LOGS = ("dispatch", "schedule")
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A directory with three sealed hours of 16 messages, and an archive of it."""
    folder = tmp_path_factory.mktemp("sealed")
    books = write_books(folder / "data")
    books.close()
    archive = str(folder / "archive")
    assert run("archive", "--data", books.root, "--to", archive).code == 0
    return books.root, archive


def read(view: str, *places: str, **options: str) -> pa.Table:
    """A view as Spark's tasks give it: Spark starts two Pythons for each query, so the source is called as these do."""
    quoted = ", ".join(f'"{place}"' for place in places)
    source = DefaultSource({"view": view, "tasks": "2", "paths": f"[{quoted}]", **options})
    schema = source.schema()
    assert isinstance(schema, StructType)
    reader = source.reader(schema)
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    expected = to_arrow_schema(schema, timezone="UTC")
    # Spark refuses a batch of any other schema.
    assert all(isinstance(batch, pa.RecordBatch) and batch.schema == expected for batch in batches)
    return pa.Table.from_batches(batches, expected)


def in_order(table: pa.Table) -> list[dict[str, object]]:
    keys = [(name, "ascending") for name in ("hour", "sequence", "number") if name in table.column_names]
    return list(table.sort_by(keys).to_pylist())


VIEW_ROWS = {
    "accepted": 40,
    "decision": 0,
    "schedule": 81,
    "dispatch": 80,
    "message": 79,
    "lifecycle": 81,
    "hours": 3,
    "findings": 6,
    "seals": 0,
    "consumption": 1,
}


@pytest.mark.parametrize("tasks", ["1", "5"])
@pytest.mark.parametrize(("view", "rows"), VIEW_ROWS.items())
def test_each_view_has_its_rows_in_any_number_of_tasks(faulty: Books, view: str, rows: int, tasks: str) -> None:
    assert read(view, faulty.root, tasks=tasks).num_rows == rows


def test_a_view_in_spark_has_what_the_audit_says_of_hours_and_findings(session: SparkSession, faulty: Books) -> None:
    hours = session.read.format("delayd").option("view", "hours").load(faulty.root)
    figures = hours.select("hour", "state", "scheduled", "dispatched", "lost", "balanced").collect()
    assert [tuple(row) for row in sorted(figures)] == [
        ("2026112016", "OPEN", 40, 40, 0, True),
        ("2026112017", "OPEN", 40, 38, 1, False),
        ("2026112218", "OPEN", 1, 0, 0, True),
    ]
    kinds = {each["kind"] for each in read("findings", faulty.root).to_pylist()}
    assert kinds == {"LOST", "DUPLICATE", "EARLY", "ORPHAN", "MISMATCH", "LATE"}


def test_the_sums_of_a_realtime_server_are_tables(faulty: Books) -> None:
    (group,) = read("consumption", faulty.root).to_pylist()
    assert (group["subject"], group["consumers"], group["pulled"], group["outstanding"]) == ("orders", "g", 2, 2)


def test_lifecycle_says_of_each_message_what_became_of_it_and_how_late(session: SparkSession, faulty: Books) -> None:
    frame = session.read.format("delayd").load(faulty.root)
    rows = {row["sequence"]: row for row in frame.collect()}
    assert (rows[2]["subject"], rows[2]["outcome"], rows[2]["hour"]) == ("bills", "DISPATCHED", "2026112016")
    assert rows[41]["outcome"] is None and rows[41]["late_ms"] is None
    assert rows[42]["late_ms"] == timedelta(seconds=5) // timedelta(milliseconds=1)
    assert rows[46]["outcome"] == "DEAD" and rows[46]["target"] is None


def test_a_query_that_names_two_columns_and_one_hour_reads_no_more(session: SparkSession, faulty: Books) -> None:
    source = session.read.format("delayd").option("from", "2026112017").option("to", "2026112017")
    frame = source.schema("sequence long, subject string").load(faulty.root)
    assert frame.columns == ["sequence", "subject"] and frame.count() == 40


@pytest.mark.parametrize("view", ["schedule", "dispatch", "message", "lifecycle", "hours", "findings", "seals"])
def test_an_archive_has_the_rows_of_its_directory(sealed: tuple[str, str], view: str) -> None:
    own, archived = (in_order(read(view, place).drop_columns(_of_logs(view))) for place in sealed)
    assert own == archived and own


def _of_logs(view: str) -> list[str]:
    """Columns about the logs themselves, which are not archived."""
    return {"dispatch": ["place"], "message": ["place", "decided"]}.get(view, [])


def test_places_are_one_table_and_an_hour_of_two_of_them_is_there_once(
    session: SparkSession, sealed: tuple[str, str], tmp_path: Path
) -> None:
    frame = session.read.format("delayd").option("view", "schedule").load(list(sealed))
    assert frame.count() == 48 and frame.select("log_id").distinct().count() == 1
    copy = shutil.copytree(sealed[0], tmp_path / "copy")
    assert read("schedule", sealed[0], str(copy)).num_rows == 48


def test_servers_whose_directories_lie_apart_are_read_together(sealed: tuple[str, str], tmp_path: Path) -> None:
    for role in ("delay", "realtime"):
        shutil.copytree(Path(sealed[0], role), tmp_path / role / role)
    apart = read("lifecycle", str(tmp_path / "delay"), str(tmp_path / "realtime"))
    assert in_order(apart) == in_order(read("lifecycle", sealed[0]))
    alone = {row["state"] for row in read("lifecycle", str(tmp_path / "delay")).to_pylist()}
    assert "UNPROVEN" in alone and "DELIVERED" not in alone


def test_a_damaged_hour_is_a_row_and_the_others_are_read(sealed: tuple[str, str], tmp_path: Path) -> None:
    copy = shutil.copytree(sealed[0], tmp_path / "copy")
    gone, flipped = (sorted((copy / "delay" / log).rglob("*.log"))[hour] for hour, log in enumerate(LOGS))
    gone.unlink()
    data = bytearray(flipped.read_bytes())
    data[200] ^= 1
    flipped.write_bytes(data)
    hours = in_order(read("hours", str(copy)))
    assert [(row["hour"], row["state"]) for row in hours] == [
        ("2026112016", "DAMAGED"),
        ("2026112017", "DAMAGED"),
        ("2026112018", "SEALED"),
    ]
    assert gone.name in str(hours[0]["detail"]) and flipped.name in str(hours[1]["detail"])
    assert hours[0]["scheduled"] is None and hours[2]["scheduled"] == 16
    assert {row["hour"] for row in read("dispatch", str(copy)).to_pylist()} == {"2026112018"}
    # The archive has the rows of the hour whose file is gone.
    assert {row["hour"] for row in read("dispatch", str(copy), sealed[1]).to_pylist()} == {"2026112016", "2026112018"}


def test_keys_tags_headers_and_bodies_are_columns_on_request(session: SparkSession, tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    own = {"keys": ["order-1", ""], "tags": [["eu", "vip"], []], "headers": [{"trace": "a1"}, {}]}
    for _ in range(2):  # The second batch is not filed.
        books.send([START_MS, START_MS + 1], **own)  # type: ignore[arg-type]
        if not books.replay_offset:
            books.checkpoint()
    books.close()
    frame = session.read.format("delayd").option("view", "schedule").option("with", "key, tags, headers, body")
    rows = sorted(frame.load(books.root).selectExpr("sequence", "key", "tags", "headers", "body").collect())
    assert [(row["key"], row["tags"], row["headers"]) for row in rows] == 2 * [
        ("order-1", ["eu", "vip"], {"trace": bytearray(b"a1")}),
        (None, [], {}),
    ]
    assert [row["body"] for row in rows] == [b"body %d" % sequence for sequence in range(1, 5)]
    bodies = session.read.format("delayd").option("subject", "bills").schema("body binary").load(books.root)
    assert bodies.count() == 0


def test_conditions_of_a_query_reach_the_tasks_where_spark_hands_them_on(
    session: SparkSession, sealed: tuple[str, str]
) -> None:
    at = datetime(2026, 11, 20, 17, 0, 5, tzinfo=UTC)

    def ask(**options: str) -> DataFrame:
        frame = session.read.format("delayd").options(**options).load(list(sealed[:1]))
        return frame.where(
            (frame.subject == "bills") & (frame.deliver_at >= at) & frame.outcome.isin("DISPATCHED", "DEAD")
        ).where(~frame.reason.isNotNull() & (frame.hour < "2026112018"))

    expected = sorted(row["sequence"] for row in ask().collect())
    session.conf.set(PUSHDOWN, "true")
    try:
        pushed = ask(pushdown="true")
        assert sorted(row["sequence"] for row in pushed.collect()) == expected and len(expected) > 1
        # One of three hours is left, so one task.
        assert pushed.rdd.getNumPartitions() == 1
    finally:
        session.conf.unset(PUSHDOWN)
    with pytest.raises(Exception, match=PUSHDOWN):
        ask(pushdown="true").collect()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": "0"}, "tasks '0' is no number of tasks"),
        ({"tasks": "-1"}, "tasks '-1' is no number of tasks"),
        ({"tasks": "many"}, "tasks 'many' is no number of tasks"),
        ({"form": "2026112016"}, "option 'form' is not one of view, from, to, subject, with, tasks, pushdown"),
        ({"from": "2026-11-20"}, "'2026-11-20' is no hour"),
        ({"from": "2026112017", "to": "2026112016"}, "from 2026112017 is after to 2026112016"),
        ({"view": "consumption", "limit": "3"}, "option 'limit' is not one of"),
        ({"view": "bodies"}, "view 'bodies' is not one of accepted, decision, schedule, dispatch, message, lifecycle,"),
        ({"view": "hours", "subject": "a"}, "view 'hours' has no subjects"),
        ({"with": "bodies"}, "with 'bodies' is not one of key, tags, headers, body"),
        ({"view": "dispatch", "with": "body"}, "view 'dispatch' has no body; schedule and lifecycle have"),
        ({"pushdown": "yes"}, "pushdown 'yes' is neither true nor false"),
    ],
)
def test_an_option_that_would_read_nothing_or_be_ignored_is_refused_by_name(
    faulty: Books, options: dict[str, str], words: str
) -> None:
    with pytest.raises(BadArgument, match=words):
        DefaultSource({**options, "path": faulty.root}).reader(StructType())


def test_a_column_that_a_view_does_not_have_is_refused_by_name(faulty: Books) -> None:
    with pytest.raises(BadArgument, match="view 'schedule' has no column 'late'; it has hour, log_id, sequence"):
        DefaultSource({"view": "schedule", "path": faulty.root}).reader(StructType([StructField("late", LongType())]))


def test_a_query_with_a_refused_option_ends_with_the_words(session: SparkSession, faulty: Books) -> None:
    with pytest.raises(Exception, match="option 'form' is not one of view, from, to, subject"):
        session.read.format("delayd").option("form", "2026112016").load(faulty.root).count()
    with pytest.raises(BadArgument, match="nothing says where the data is"):
        DefaultSource({}).reader(StructType())


def test_a_stream_reads_each_hour_once_after_it_was_sealed_also_from_its_checkpoint(
    session: SparkSession, tmp_path: Path
) -> None:
    books = Books(str(tmp_path / "data"))
    out = str(tmp_path / "out")

    def fill(hour: int) -> None:
        books.hand_over(books.send([START_MS + hour * HOUR_MS + row for row in range(4)]))
        books.checkpoint()

    def go_on() -> list[tuple[str, int]]:
        frame = session.readStream.format("delayd").option("view", "dispatch").option("tasks", "1").load(books.root)
        stream = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = stream.trigger(availableNow=True).start(out)
        query.awaitTermination()
        rows = session.read.parquet(out).groupBy("hour").count().collect()
        return sorted((row["hour"], row["count"]) for row in rows)

    for hour in range(3):
        fill(hour)
    books.seal(HOUR)
    assert go_on() == [("2026112016", 4)]
    books.seal(HOUR + 1)
    books.seal(HOUR + 2)
    fill(3)
    books.close()
    assert go_on() == [("2026112016", 4), ("2026112017", 4), ("2026112018", 4)]


def test_a_stream_says_which_hour_was_removed_before_it_has_read_it(tmp_path: Path) -> None:
    books = Books(str(tmp_path))
    for hour in range(3):
        books.hand_over(books.send([START_MS + hour * HOUR_MS]))
    books.checkpoint()
    books.seal(HOUR)
    books.see_realtime(START_MS + 4 * HOUR_MS)
    source = DefaultSource({"view": "dispatch", "path": books.root})
    schema = source.schema()
    assert isinstance(schema, StructType)
    stream = source.streamReader(schema)
    server = f"{DELAY_ID:016x}"
    first = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert first == {server: {"next": 1, "begun": 1}}
    books.seal(HOUR + 1)
    second = stream.latestOffset(first, ReadAllAvailable())
    assert second == {server: {"next": 2, "begun": 1}} and len(stream.partitions(first, second)) == 1
    for hour in (HOUR, HOUR + 1):
        books.removed.add(hour)
        books.path_of("schedule", hour).unlink()
    books.publish()
    books.close()
    # What was removed before the stream began is missing, and that is known.
    assert list(stream.partitions({}, first)) == []
    with pytest.raises(BadArgument, match=r"hour 2026112017, seal 1 of delay server 000000000000de1a was removed"):
        stream.partitions(first, second)


def test_a_view_without_rows_of_hours_is_no_stream(faulty: Books) -> None:
    with pytest.raises(BadArgument, match="view 'seals' is no stream"):
        DefaultSource({"view": "seals", "path": faulty.root}).streamReader(StructType())
