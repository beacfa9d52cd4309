"""Jobs say of real logs what was sent, consumed and given back; their columns are those of the page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import pyspark_delayd
from cli.spark_commands import COLUMNS
from delayd import Consumer, Producer
from delayd.reading.books import audit_directory
from spark.pipelines.anomalies import anomalies
from spark.pipelines.consumers import READS, consumers
from spark.pipelines.run import JOBS, make
from spark.pipelines.run import run as run_job
from spark.session import audit
from tests.end_to_end.up_process import up
from tests.small_spark import environment
from tests.unit.cli.runner import Ran, run
from tests.unit.reading.archived import write_books
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(400),
]

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
DAY_MS = 86_400_000
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "lateness": {"late_limit_ms": 1_000},
    "forecast": {"capacity": 5, "quotas": {"orders": 3}},
    "hot-instants": {"top": 3},
    "anomalies": {"days": 28, "factor": 3.0},
    "what-if": {"rate": 1.0, "servers": 1, "per_server": 10},
    "consumers": {},
}


class Fleet(NamedTuple):
    """A data directory that servers wrote."""

    data: str
    due: Sequence[tuple[str, int]]  # Subject and due instant of what is pending.


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """1,000 delivered orders, of which a group worked on 100; 50 bills; 900 messages that are due over three days; and
    calls of the last ten days: ten a day, but 50 on the day before yesterday and none yesterday.
    """
    folder = tmp_path_factory.mktemp("jobs")
    midnight = int(time.time() * 1000) // DAY_MS * DAY_MS
    due = [("orders", midnight + (1 + row % 3) * DAY_MS + row // 30 * 1_000) for row in range(600)]
    due += [("bills", midnight + DAY_MS + row % 3 * 1_000) for row in range(300)]
    with up(folder, "--port", "0") as running:
        meta = running.meta
        with Producer(meta) as producer:
            producer.send_batch("orders", [b"body"] * 1_000, delay=timedelta(0))
            producer.send_batch("bills", [b"body"] * 50, delay=timedelta(0))
            calls = [midnight - day * DAY_MS for day in range(2, 11) for _ in range(50 if day == 2 else 10)]
            producer.send_batch("calls", [b"body"] * len(calls), calls)
            producer.send_batch("mails", [b"body"], midnight - DAY_MS)  # Else yesterday is not there.
            for subject in ("orders", "bills"):
                instants = [instant for name, instant in due if name == subject]
                producer.send_batch(subject, [b"body"] * len(instants), instants)
        with Consumer(meta, "orders", group="g") as consumer:
            for number, message in enumerate(consumer, 1):
                if number % 10 == 1:
                    message.nack(timedelta(days=9))  # On no day on which others are due.
                elif number % 10 == 2:
                    message.reject("bad")
                else:
                    message.ack()
                if number == 100:
                    break
        wait_until(lambda: _total(running.data) == (1_050 + len(calls) + 1, len(due) + 20))
    return Fleet(str(running.data), due)


def _total(data: Path) -> tuple[int, int]:
    total = audit_directory(str(data), now_ms=time.time_ns() // 1_000_000).total
    return total.dispatched, total.scheduled - total.dispatched


def listed(fleet: Fleet, job: str, **changed: str) -> list[dict[str, Any]]:
    """Run the command of the page on the fleet; its rows."""
    ran = command(fleet, job, "--format", "json", **changed)
    assert ran.code == 0, ran.err
    found: list[dict[str, Any]] = json.loads(ran.out)
    return found


def command(fleet: Fleet, job: str, *more: str, **changed: str) -> Ran:
    (line,) = re.findall(rf"^\$ delayd (spark {job} .*)$", PAGE, re.MULTILINE)
    words = shlex.split(line)
    for name, value in {"data": fleet.data, **changed}.items():
        words[words.index(f"--{name}") + 1] = value
    return run(*words, *more, spark_job=run_job)


def test_lateness_is_by_day_and_subject_and_fits_the_audit(fleet: Fleet) -> None:
    rows = listed(fleet, "lateness")
    total = audit_directory(fleet.data, now_ms=time.time_ns() // 1_000_000).total
    for name in ("scheduled", "dispatched", "dead", "cancelled", "expired", "lost", "late"):
        assert sum(row[name] for row in rows) == getattr(total, name), name
    # The audit has a histogram of its own for what was past due when it was accepted.
    assert max(row["late_max_ms"] or 0 for row in rows) >= total.late_ms_max
    assert sum(row["pending"] for row in rows) == total.scheduled - total.dispatched
    found = Counter[tuple[str, str]]()
    for row in rows:
        found[row["day"], row["subject"]] += row["pending"]
        assert row["body_bytes"] == 4 * row["scheduled"]
        assert (row["late_p50_ms"] is None) is (row["dispatched"] == 0)
    expected = Counter((_day(instant), subject) for subject, instant in fleet.due)
    assert {key: found[key] for key in expected} == expected


def test_a_forecast_counts_what_is_over_the_capacity_and_a_quota(fleet: Fleet) -> None:
    rows = listed(fleet, "forecast", capacity="35", quota="orders=3")
    seconds: dict[tuple[str, str | None], Counter[int]] = {}
    for subject, instant in fleet.due:
        for name in (None, subject):
            seconds.setdefault((_day(instant), name), Counter())[instant // 1_000] += 1
    found = {(row["day"], row["subject"]): row for row in rows}
    for (day, name), counts in seconds.items():
        if name == "bills":
            assert (day, name) not in found  # It has no quota.
            continue
        row, limit = found[day, name], 35 if name is None else 3
        over = [count - limit for count in counts.values() if count > limit]
        assert (row["limit_per_s"], row["messages"], row["busiest_messages"]) == (
            limit,
            sum(counts.values()),
            max(counts.values()),
        )
        assert (row["seconds_over"], row["messages_over"]) == (len(over), sum(over))
        assert counts[int(datetime.fromisoformat(row["busiest_at"]).timestamp())] == max(counts.values())
    # Ten messages come again in nine days. Dead letters are not work to come.
    assert sum(row["messages"] for row in rows if row["subject"] is None) == len(fleet.due) + 10


def test_hot_instants_are_the_fullest_seconds(fleet: Fleet) -> None:
    rows = listed(fleet, "hot-instants", top="3")
    seconds = Counter(instant // 1_000 for _, instant in fleet.due)
    expected = sorted(seconds.items(), key=lambda each: (-each[1], each[0]))[:3]
    found = [(int(datetime.fromisoformat(row["second"]).timestamp()), row["messages"]) for row in rows]
    assert found == expected
    assert [(row["subjects"], row["top_subject"], row["top_messages"]) for row in rows] == [(2, "bills", 100)] * 3


def test_anomalies_are_days_that_left_the_range_of_the_days_before(session: SparkSession, fleet: Fleet) -> None:
    found = [(row["subject"], row["figure"], row["value"], row["usual_high"]) for row in listed(fleet, "anomalies")]
    assert found == [("calls", "messages", 50.0, 13.0), ("calls", "messages", 0.0, 13.0)]
    rows = [
        ("a", datetime.now(UTC) - timedelta(days=day), "EXPIRED" if day == 1 and row < 3 else "DELIVERED", late_ms)
        for day in range(1, 9)
        for row in range(10)
        for late_ms in (900 if day == 2 else 10,)
    ]
    frame = session.createDataFrame(rows, "subject string, deliver_at timestamp, state string, late_ms long")
    days = anomalies(frame, days=7, factor=3.0).collect()
    assert [(row["figure"], row["value"]) for row in days] == [("late_p99_ms", 900.0), ("failed_share", 0.3)]


def test_what_if_lets_messages_wait_for_fewer_servers_or_at_another_rate(fleet: Fleet) -> None:
    fewer = {"rate": "2", "servers": "2"}
    rows = {row["day"]: row for row in listed(fleet, "what-if", **fewer, **{"per-server": "10"})}
    seconds = Counter(instant // 1_000 for _, instant in fleet.due)
    for day in {_day(instant) for _, instant in fleet.due}:
        queue = longest = total = 0
        own = sorted(second for second in seconds if _day(second * 1_000) == day)
        for second in range(own[0], own[-1] + 1):
            total += 2 * seconds[second]
            queue = max(queue + 2 * seconds[second] - 20, 0)
            longest = max(longest, queue)
        row = rows[day]
        assert (row["messages"], row["capacity_per_s"], row["queue_max"]) == (total, 20, longest)
        assert row["wait_ms_max"] == longest * 50


def test_consumers_says_what_a_group_gave_back_and_how_long_it_took(
    session: SparkSession, fleet: Fleet, tmp_path: Path
) -> None:
    ran = command(fleet, "consumers", out=str(tmp_path / "out"))
    assert (ran.code, ran.out) == (0, "")
    (row,) = session.read.parquet(str(tmp_path / "out")).collect()
    assert (row["subject"], row["group"]) == ("orders", "g")
    assert (row["acknowledged"], row["sent_back"], row["retries"], row["dead_waiting"]) == (80, 20, 10, 10)
    assert row["pulled"] == 100 + row["given_back"] and row["outstanding"] == 0
    assert 0 <= row["ack_ms_mean"] <= row["ack_ms_max"] < 600_000
    again = command(fleet, "consumers", out=str(tmp_path / "out"))
    assert again.code == 2 and "out is there already: name a new folder" in again.err


def test_consumers_keeps_two_groups_apart_to_which_an_earlier_version_gave_one_id(session: SparkSession) -> None:
    log_id, figures = f"{7:016x}", (0, 0, 0, 0, 0, 0, 0, 0, 0)
    again = f"%retry/{log_id}/"
    groups = [
        (log_id, "00000002", "alpha", "ga", 5, *figures),
        (log_id, "00000002", "beta", "gb", 3, *figures),
        (log_id, "00000004", "gamma", "gc", 20, *figures),
        (log_id, "00000005", again + "4", "gc", 1, *figures),
        (log_id, "00000006", again + "2", "gb", 2, *figures),
        (log_id, "00000009", None, None, 7, *figures),
    ]
    rows = [(f"{again}{number}", "PENDING", None, ["%dead"]) for number in (2, 4, 4, 8)]
    frames = [
        session.createDataFrame(of_view, READS[view].columns)
        for view, of_view in (("consumption", groups), ("lifecycle", rows))
    ]
    found = [tuple(row[name] for name in ("subject", "pulled", "dead_waiting")) for row in consumers(*frames).collect()]
    assert found == [(None, 9, 1), ("alpha", 5, 0), ("beta", 3, 0), ("gamma", 21, 2)]


def test_each_night_is_archived_audited_and_written_as_a_partition_and_once_more_changes_nothing(
    session: SparkSession, tmp_path: Path
) -> None:
    write_books(tmp_path / "data").close()
    (script,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    first, *lines = script.replace("s3://books/delayd", str(tmp_path / "books")).splitlines()
    hours = "--from 2026-11-20T00:00Z --to 2026-11-21T00:00Z"
    known = {"$books": f"{tmp_path}/books", "$day": "2026-11-20", "$hours": hours, "/lake": f"{tmp_path}/lake"}
    known |= {name: f" {tmp_path}/{name[1:]}" for name in (" proved.", " audit-")}
    known["/var/lib/delayd"] = f"{tmp_path}/data"
    assert re.findall(r"(?:^| )(\w+)=", first) == ["day", "books", "hours"]
    found: list[list[list[str]]] = []
    for _ in range(2):
        for line in lines:
            words = line.removeprefix("delayd ")
            for name, value in known.items():
                words = words.replace(name, value)
            ran = run(*shlex.split(words), spark_audit=audit, spark_job=run_job)
            assert ran.code == 0, (line, ran.out, ran.err)
        tables = [session.read.parquet(f"{tmp_path}/lake/{job}") for job in ("lateness", "consumers")]
        assert all("date" in table.columns for table in tables)
        found.append([sorted(map(str, table.collect())) for table in tables])
    assert found[0] == found[1] and len(found[0][0]) > 1
    assert "proved by an earlier audit" in (tmp_path / "audit-2026-11-20.html").read_text()


def test_spark_submit_runs_a_job_on_the_master_that_it_was_given(fleet: Fleet, tmp_path: Path) -> None:
    settings = {"enabled": "true", "compress": "false", "dir": f"file:{tmp_path}"}
    events = [word for name, value in settings.items() for word in ("--conf", f"spark.eventLog.{name}={value}")]
    submit = [str(Path(sys.executable).parent / "spark-submit"), "--master", "local[1]", *events]
    words = [
        *submit,
        pyspark_delayd.__file__,
        *shlex.split("spark hot-instants --top 3 --format csv --data"),
        fleet.data,
    ]
    ran = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2_000:]
    lines = ran.stdout.splitlines()
    begin = lines.index("second,messages,body_bytes,subjects,top_subject,top_messages")
    assert [line.split(",")[3:] for line in lines[begin + 1 :]] == [["2", "bills", "100"]] * 3
    (told,) = (path.read_bytes() for path in tmp_path.rglob("*events*") if path.is_file())
    assert b'"spark.master":"local[1]"' in told


@pytest.mark.parametrize("job", JOBS)
def test_the_columns_of_a_job_are_those_of_its_command_and_of_the_page(
    session: SparkSession, fleet: Fleet, job: str
) -> None:
    frame = make(session, job, [fleet.data], {}, SETTINGS[job])
    assert [column.name for column in COLUMNS[job]] == frame.columns
    part = PAGE.split(f"**`{job}`**")[1].split("\n**")[0]
    told: list[tuple[str, str]] = []
    for names, types in re.findall(r"^\| (`.*?) \| (\w+(?:, \w+)*) \|", part, re.MULTILINE):
        each, kinds = re.findall(r"`(\w+)`", names), types.split(", ")
        told += zip(each, kinds if len(kinds) > 1 else kinds * len(each), strict=True)
    assert told == frame.dtypes


def test_a_quota_that_is_none_is_refused_before_spark_starts() -> None:
    ran = run("spark", "forecast", "--data", "/", "--capacity", "1", "--quota", "orders")
    assert ran.code == 2 and "orders is not SUBJECT=N" in ran.err


def _day(instant_ms: int) -> str:
    return datetime.fromtimestamp(instant_ms / 1000, UTC).date().isoformat()
