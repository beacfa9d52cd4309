"""Files and connections: a server takes what its user may have, and says so when that is too little."""

import os
import re
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import delayd
from delayd.machine.operating import LINES_A_MINUTE
from delayd.net.budget import FILES_MIN, connections_for
from delayd.wire.frame import encode_frame
from delayd.wire.requests import RequestType
from tests.end_to_end.cluster import cluster
from tests.waiting import wait_until

STOP_DEADLINE_S = 30.0
LOW = 700  # Files: a checkpoint and the logs need most of them.
VERY_LOW = 200  # Files for a server with endings in more hours than that.
HOURS = 300


@pytest.mark.parametrize("hard", [1_000, FILES_MIN])
def test_a_server_raises_its_soft_limit_of_files_and_warns_of_a_low_hard_one(tmp_path: Path, hard: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"this user may not have {hard} files")
    command = [sys.executable, "-m", "delayd", "meta", "--data", str(tmp_path), "--port", "0", "--exit-with-stdin"]
    limited = ["sh", "-c", f'ulimit -Sn 256 && ulimit -Hn {hard} && exec "$@"', "sh", *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(limited, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        pid = int(process.stdout.readline().rpartition("pid=")[2])
        limits = Path(f"/proc/{pid}/limits").read_text()
        _, log = process.communicate(timeout=STOP_DEADLINE_S)
    found = re.search(r"^Max open files +(\d+) +(\d+)", limits, re.MULTILINE)
    assert found is not None and found.groups() == (str(hard), str(hard))
    assert (f"few_files limit={hard} wanted={FILES_MIN} connections_max=" in log) == (hard < FILES_MIN)
    assert process.returncode == 0


def test_rule_B1_idle_connections_at_a_low_limit_never_end_a_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "delayd", "meta", "--data", str(tmp_path), "--port", "0", "--exit-with-stdin"]
    limited = ["sh", "-c", f'ulimit -Sn 256 && ulimit -Hn {LOW} && exec "$@"', "sh", *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(limited, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process, ExitStack() as idle:
        assert process.stdout is not None and process.stdin is not None
        port = int(process.stdout.readline().split()[2].rpartition(":")[2])
        for _ in range(2 * LOW):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=STOP_DEADLINE_S))
        with socket.create_connection(("127.0.0.1", port), timeout=STOP_DEADLINE_S) as late:
            late.settimeout(STOP_DEADLINE_S)
            assert b"too_many_connections" in late.recv(4096)
        assert process.poll() is None
        idle.close()
        wait_until(lambda: _answers(port), "a place comes free")
        _, log = process.communicate(timeout=STOP_DEADLINE_S)
    assert process.returncode == 0
    assert f"connections_max={connections_for(LOW)}" in log
    assert log.count("connection_refused") <= 3 * LINES_A_MINUTE


def test_messages_that_are_cancelled_in_more_hours_than_files_may_be_open_stop_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path) as servers:
        _allow_files(servers.delay.pid, VERY_LOW)
        now_ms = time.time_ns() // 1_000_000
        with delayd.Producer(servers.meta.address) as producer:
            due = [now_ms + (number + 2) * 3_600_000 for number in range(HOURS)]
            receipt = producer.send_batch("s", [b"far"] * HOURS, due)
            assert (producer.cancel_batch("s", receipt=receipt) == delayd.CancelAnswer.CANCELLED).all()
            wait_until(lambda: len(list(tmp_path.glob("delay/dispatch/*/*.log"))) == HOURS, "each hour has its outcome")
            assert _files_of(servers.delay.pid) < VERY_LOW
            servers.send("before")
            assert servers.consumed(1) == ["before"]
            servers.delay.kill()
            servers.delay.start()
            _allow_files(servers.delay.pid, VERY_LOW)
            assert (producer.cancel_batch("s", receipt=receipt) == delayd.CancelAnswer.CANCELLED).all()
        servers.send("after")
        assert servers.consumed(1) == ["after"]
        assert "full" not in servers.delay.log


def _allow_files(pid: int, files: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, files))


def _files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _answers(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=STOP_DEADLINE_S) as client:
        try:
            client.sendall(b"".join(bytes(piece) for piece in encode_frame(RequestType.PING, 1, {})))
            return b"now_ms" in client.recv(4096)
        except ConnectionError:
            return False
