"""Rows of a frame become messages, each once, also when Spark runs a task twice; what can't be a message is refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from delayd import Consumer, Producer, Receipt
from delayd.errors import BadArgument, LogId
from delayd.outcome import MessageState
from delayd.reading.books import audit_directory
from pyspark_delayd import DefaultSource
from spark.sink import (
    CHUNK_ROWS,
    RECEIPT,
    Chunk,
    DelaydWriter,
    ReceiptFile,
    SinkOptions,
    Written,
    check_columns,
    gathered,
)
from tests.end_to_end.up_process import Up, up
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]

DAY_MS = 86_400_000
NOW_MS = 1_800_000_000_000
PLAIN = "subject string, body binary, deliver_at timestamp, id bigint"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with up(tmp_path_factory.mktemp("sink"), "--port", "0") as running:
        yield running.until_ready()


def write(frame: DataFrame, servers: Up, **options: str) -> None:
    writer = frame.write.format("delayd").option("meta", servers.meta).mode("append")
    for name, value in options.items():
        writer = writer.option(name, value)
    writer.save()


def test_each_column_arrives_and_receipts_stand_for_the_messages(
    session: SparkSession, servers: Up, tmp_path: Path
) -> None:
    frame = session.range(3).selectExpr(
        "concat('whole.', id) as subject",
        "concat('body ', id) as body",
        "timestamp_millis(unix_millis(now()) - 1000) as deliver_at",
        "concat('k', id) as key",
        "map('trace', concat('t', id)) as headers",
        "array('eu', 'vip') as tags",
        "make_dt_interval(0, 1, 0, 0) as ttl",
        "'one' as ordering_key",
    )
    write(frame, servers, receipts=str(tmp_path / "receipts"))
    with Consumer(servers.meta, "whole.1", group="g") as consumer:
        message = next(iter(consumer))
        said = message.body, message.key, message.headers, sorted(message.tags)
        assert said == (b"body 1", "k1", {"trace": "t1"}, ["eu", "vip"])
        message.ack()
    rows = session.read.parquet(str(tmp_path / "receipts"))
    assert rows.columns == RECEIPT.names
    assert {(row["subject"], row["key"], row["verdict"]) for row in rows.collect()} == {
        (f"whole.{number}", f"k{number}", "ACCEPTED") for number in range(3)
    }


def test_a_task_that_fails_after_it_has_sent_is_run_again_and_doubles_no_row(
    session: SparkSession, servers: Up, tmp_path: Path
) -> None:
    """Half of the rows have been delivered when the task runs again, the others wait for a day."""
    meta, failed, count = servers.meta, tmp_path / "failed", CHUNK_ROWS + 20_000  # The first chunk of them is sent.
    now_ms = time.time_ns() // 1_000_000

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        ids = list(range(count))
        yield _rows("twice", ids, now_ms)
        if not failed.exists():
            failed.touch()
            with Producer(meta) as producer:
                wait_until(lambda: producer.get("twice", key="plan:0").state is MessageState.DISPATCHED, "sent")
            raise RuntimeError("the executor is gone")
        yield _rows("twice", [count], now_ms)

    plan = (
        session.range(1)
        .repartition(1)
        .mapInArrow(fail_once, "subject string, body binary, deliver_at_ms long, id long")
    )
    before = counted(servers)
    write(plan, servers, origin="plan", receipts=str(tmp_path / "receipts"))
    assert failed.exists()
    write(plan, servers, origin="plan")  # The whole query again.
    due = count // 2 + 1
    wait_until(lambda: counted(servers)[0] - before[0] >= due, lambda: str(counted(servers)))
    dispatched, pending = counted(servers)
    assert (dispatched - before[0], pending - before[1]) == (due, count // 2)
    receipts = session.read.parquet(str(tmp_path / "receipts")).collect()
    verdicts = Counter(row["verdict"] for row in receipts)
    assert verdicts["SENT_BEFORE"] >= 1 and verdicts["KEPT"] >= 1 and sum(verdicts.values()) == count + 1
    row = next(row for row in receipts if row["key"] == "plan:1")
    instants = row["deliver_at_ms"], row["accepted_at_ms"]
    receipt = Receipt(LogId(int(row["log_id"], 16)), row["sequence"], *instants, was_due=False, duplicate=False)
    with Producer(servers.meta) as producer:
        assert producer.get("twice", receipt=receipt).state is MessageState.PENDING


def counted(servers: Up) -> tuple[int, int]:
    """How many messages were dispatched, and how many are pending, by the audit."""
    total = audit_directory(str(servers.data), now_ms=time.time_ns() // 1_000_000).total
    return total.dispatched, total.pending


def test_what_is_wrong_with_a_row_is_told_with_row_and_column_and_nothing_of_it_is_sent(
    session: SparkSession, servers: Up
) -> None:
    frame = session.range(0, 5, 1, 1).selectExpr(
        "if(id = 3, 'no blank', 'bad') as subject",
        "'x' as body",
        "now() + interval 1 day as deliver_at",
        "id",
    )
    for options in ({}, {"dry_run": "true"}):
        with pytest.raises(
            Exception, match="row 3 of partition 0, column 'subject': subject 'no blank' is not 1 to 255"
        ):
            write(frame, servers, origin="bad", **options)
    write(frame.where("id < 3"), servers, origin="bad", dry_run="true")
    with Producer(servers.meta) as producer:
        for number in range(5):
            assert producer.get("bad", key=f"bad:{number}").state is MessageState.UNKNOWN
    with pytest.raises(Exception, match="messages can't be overwritten"):
        frame.write.format("delayd").option("origin", "x").mode("overwrite").save()


def _rows(subject: str, ids: list[int], now_ms: int) -> pa.RecordBatch:
    """Even ids are due at once, odd ones in a day."""
    due = [now_ms + (number % 2) * DAY_MS for number in ids]
    return pa.record_batch(
        [pa.array([subject] * len(ids)), pa.array([b"x"] * len(ids)), pa.array(due), pa.array(ids)],
        ["subject", "body", "deliver_at_ms", "id"],
    )


@pytest.mark.parametrize(
    ("columns", "origin", "words"),
    [
        ("body binary, deliver_at timestamp, id bigint", "o", "no column 'subject'"),
        ("subject string, deliver_at timestamp, id bigint", "o", "no column 'body'"),
        ("subject string, body binary, id bigint", "o", "no column 'deliver_at' or 'deliver_at_ms'"),
        ("subject string, body binary, deliver_at timestamp", None, "no column 'key' or 'id': without it a task"),
        (f"{PLAIN}, key string", "o", "both columns 'key' and 'id'"),
        (f"{PLAIN}, deliver_at_ms bigint", "o", "both columns 'deliver_at' and 'deliver_at_ms'"),
        (PLAIN, None, "option 'origin' and column 'id' belong together"),
        (f"{PLAIN}, ttl bigint", "o", "column 'ttl' is bigint; it must be interval"),
        ("subject string, body binary, deliver_at string, id bigint", "o", "'deliver_at' is string"),
        ("subject string, body binary, deliver_at timestamp_ntz, id bigint", "o", "'deliver_at' is timestamp_ntz"),
        (f"{PLAIN}, priority int", "o", "column 'priority' is not one of subject, body"),
    ],
)
def test_a_frame_that_can_not_be_messages_is_refused_before_a_task_runs(
    columns: str, origin: str | None, words: str
) -> None:
    options = {"origin": origin} if origin is not None else {}
    schema = StructType.fromDDL(columns)
    assert isinstance(schema, StructType)
    with pytest.raises(BadArgument, match=words):
        DefaultSource(options).writer(schema, overwrite=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"view": "schedule"}, "option 'view' of a write is not one of meta, origin"),
        ({"on_conflict": "reject"}, "on_conflict 'reject' is not one of keep, replace"),
        ({"dry_run": "perhaps"}, "dry_run 'perhaps' is not true or false"),
        ({"meta": "here"}, "here"),
    ],
)
def test_an_option_of_a_write_is_refused_by_name(options: dict[str, str], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        SinkOptions.of(options)


SOUND: dict[str, list[Any]] = {
    "subject": ["a", "b"],
    "body": [b"x", b"y"],
    "deliver_at": [datetime.now(UTC) + timedelta(days=day) for day in (1, 2)],
    "key": ["k", "l"],
}


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("subject", None, "it is null"),
        ("subject", "%retry/x", "are the servers' own"),
        ("body", None, "it is null"),
        ("body", b"x" * ((4 << 20) + 1), "over the limit"),
        ("deliver_at", None, "it is null"),
        ("deliver_at", datetime(1999, 1, 1, tzinfo=UTC), "before 2001-09-09"),
        ("deliver_at", datetime.now(UTC) + timedelta(days=800), "past the horizon"),
        ("key", None, "it is null"),
        ("key", "k" * 201, "key"),
        ("headers", [("delayd.x", "1")], "are the servers' own"),
        ("tags", ["t"] * 17, "tags"),
        ("ttl", timedelta(0), "ttl is 0:00:00"),
        ("expires_at", datetime(1999, 1, 1, tzinfo=UTC), "before 2001-09-09"),
        ("ordering_key", "", "key"),
    ],
)
def test_a_value_past_a_limit_is_refused_before_its_chunk_is_sent(column: str, value: object, words: str) -> None:
    types = {
        "deliver_at": pa.timestamp("us", "UTC"),
        "expires_at": pa.timestamp("us", "UTC"),
        "headers": pa.map_(pa.string(), pa.string()),
        "ttl": pa.duration("us"),
    }
    columns = {**SOUND, column: [SOUND.get(column, [None])[0], value]}
    table = pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()})
    options = SinkOptions.of({})
    Chunk.of(table.slice(0, 1), 0, 0, options)
    with pytest.raises(BadArgument, match=f"row 8 of partition 2, column '{column}': .*{words}"):
        Chunk.of(table, 7, 2, options)


def test_rows_of_mixed_subjects_keep_their_values_and_their_order() -> None:
    rows, subjects = range(7), ["b", "a", "b", "c", "a", "b", "a"]
    table = pa.table(
        {
            "id": rows,
            "subject": subjects,
            "body": [f"body {row}" for row in rows],
            # A microsecond past a millisecond is the next one: no message may be early.
            "deliver_at": pa.array([NOW_MS * 1_000 + row for row in rows], pa.timestamp("us", "UTC")),
            "headers": pa.array([[("n", str(row))] for row in rows], pa.map_(pa.string(), pa.string())),
        }
    )
    found = list(Chunk.of(table, 0, 0, SinkOptions.of({"origin": "o"})).by_subject())
    assert [chunk.columns["subject"] for chunk in found] == [["b"] * 3, ["a"] * 3, ["c"]]
    for chunk, own in zip(found, ([0, 2, 5], [1, 4, 6], [3]), strict=True):
        assert chunk.columns["key"] == [b"o:%d" % row for row in own]
        assert chunk.columns["body"] == [b"body %d" % row for row in own]
        assert chunk.columns["due"] == [NOW_MS + (row > 0) for row in own]
        assert chunk.columns["headers"] == [{"n": str(row)} for row in own]


def test_small_batches_are_sent_together_and_rows_keep_their_numbers() -> None:
    batches = pa.table({"id": range(300_000)}).to_batches(10_000)
    found = [(first, table.num_rows, table["id"][0].as_py()) for first, table in gathered(batches)]
    assert found == [(0, 140_000, 0), (140_000, 140_000, 140_000), (280_000, 20_000, 280_000)]
    check_columns(StructType.fromDDL(PLAIN), SinkOptions.of({"origin": "o"}))  # type: ignore[arg-type]


def test_receipts_are_of_whole_jobs_only(tmp_path: Path) -> None:
    writer = DelaydWriter(SinkOptions.of({}))
    folder = str(tmp_path / "receipts")

    def written(name: str) -> Written:
        with ReceiptFile(folder, name) as file:
            file.add([pa.RecordBatch.from_pylist([dict.fromkeys(RECEIPT.names)], RECEIPT)])
        return Written(file.path)

    with pytest.raises(RuntimeError), ReceiptFile(folder, "_failed"):
        raise RuntimeError("the task ends")
    writer.abort([written("_first"), None])
    assert list(Path(folder).iterdir()) == []
    writer.commit([written("_second"), Written(None), written("_third")])
    names = sorted(path.name for path in Path(folder).iterdir())
    assert [name.rpartition("-")[2] for name in names] == ["00000.parquet", "00001.parquet"]
    assert all(name.startswith("receipts-") for name in names)
