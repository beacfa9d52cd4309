"""`delayd schedule find` as a process: other processes search, and none of them stays behind."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import delayd
from tests.books import HOUR_MS, START_MS, Books, Row
from tests.end_to_end.cluster import cluster
from tests.unit.cli.runner import run
from tests.waiting import wait_until

BODY_BYTES = 100_000
ROWS = 400  # 40 MB: more than one process searches alone.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four hours of messages with large bodies, filed in ten commits."""
    path = tmp_path_factory.mktemp("find")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Row, "body", property(lambda row: b"message %d;" % row.sequence + b"\xff" * BODY_BYTES))
        books = Books(str(path))
        for part in range(10):
            books.send([START_MS + row % 4 * HOUR_MS + part for row in range(ROWS // 10)])
        books.checkpoint()
        books.close()
    yield path


def _start(data: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", "delayd", "schedule", "find", "--data", str(data), *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def _is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_several_processes_find_each_message_once(data: Path) -> None:
    with _start(data, "--grep", "message [0-9]*7;", "--format", "csv", "--no-body") as found:
        out, err = found.communicate(timeout=120)
    rows = list(csv.DictReader(io.StringIO(out.decode())))
    assert (found.returncode, err) == (0, b"")
    assert sorted(int(row["sequence"]) for row in rows) == list(range(7, ROWS + 1, 10))


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_ends_a_search_at_once_and_leaves_no_process(data: Path) -> None:
    with _start(data, "--format", "csv", "--limit", "0", "--body", "hex") as found:
        assert found.stdout is not None and found.stderr is not None
        # The pipe is full now, and the other processes have searched ahead.
        assert found.stdout.read(1 << 20)
        os.killpg(found.pid, signal.SIGINT)
        found.stdout.close()
        assert found.wait(30) == 130
        assert b"Traceback" not in found.stderr.read()
    wait_until(lambda: _is_gone(found.pid), "no process is left")


def test_a_reader_that_goes_away_ends_the_search_without_a_word(data: Path) -> None:
    with _start(data, "--format", "csv", "--limit", "0", "--body", "hex") as found:
        assert found.stdout is not None and found.stderr is not None
        assert found.stdout.readline().startswith(b"sequence,")
        found.stdout.close()
        assert (found.stderr.read(), found.wait(30)) == (b"", 141)
    wait_until(lambda: _is_gone(found.pid), "no process is left")


def test_a_key_finds_what_comes_again_and_what_is_dead(tmp_path: Path) -> None:
    def lives() -> list[dict[str, str]]:
        found = run("schedule", "find", "--key", "order-1", "--all", "--data", str(tmp_path), "--format", "json")
        rows: list[dict[str, str]] = json.loads(found.out)
        return [row for row in rows if row["subject"].startswith("%retry/") and row["state"] == "pending"]

    with cluster(tmp_path) as production, delayd.Producer(production.meta.address) as producer:
        producer.send("s", b"1", delay=timedelta(0), key="order-1")
        with delayd.Consumer(production.meta.address, "s", group="again") as again:
            next(again).nack(timedelta(hours=1))
        with delayd.Consumer(production.meta.address, "s", group="never") as never:
            next(never).reject("it is no order")
        wait_until(lambda: len(lives()) == 2, lambda: str(lives()), every_s=0.1)
        assert [row["key"] for row in lives()] == ["order-1"] * 2
        # The message itself was delivered, so its key is free for another one.
        producer.send("s", b"2", delay=timedelta(hours=1), key="order-1")
        assert len(lives()) == 2
