"""The shell of a server program, as a process: its ready line, its signals, and the code with which it exits."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from delayd.net.program import STOP_MS_MAX

EXIT_DEADLINE_S = 30.0  # For what must end by itself; the limit of a stop is measured where it matters.


@contextmanager
def program(behaviour: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.unit.net.sample_program", behaviour, *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    return process.communicate(timeout=EXIT_DEADLINE_S)


@pytest.mark.parametrize("behaviour", ["hangs_in_await", "hangs_in_loop"])
def test_a_second_sigterm_ends_it_at_once_whatever_hangs(behaviour: str) -> None:
    with program(behaviour) as process:
        next_line(process)
        process.terminate()
        assert next_line(process) == "stopping"
        process.terminate()
        process.wait(timeout=EXIT_DEADLINE_S)
        # A stop that takes until its limit ends with 1.
        assert process.returncode == -signal.SIGTERM


def test_a_stop_that_hangs_is_over_within_its_limit() -> None:
    with program("hangs_in_loop") as process:
        next_line(process)
        process.terminate()
        _, log = rest(process)
        assert process.returncode == 1
        assert f"stop_overdue limit_ms={STOP_MS_MAX}" in log
        assert "most recent call first" in log and "in hang" in log, "it says what took so long"


def test_it_stops_when_its_stdin_closes_if_it_was_told_to() -> None:
    with program("works", "stdin") as process:
        next_line(process)
        assert process.stdin is not None
        process.stdin.write("noise is ignored\n")
        process.stdin.flush()
        process.stdin.close()
        process.wait(timeout=EXIT_DEADLINE_S)
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        ("bad_setting", 2, "code=bad_setting"),
        ("in_use", 2, "is in use by pid 7, delay"),
        ("memory", 1, "code=shortage"),
    ],
)
def test_what_can_not_start_says_why_prints_no_ready_line_and_exits_by_who_must_act(
    behaviour: str, code: int, said: str
) -> None:
    with program(behaviour) as process:
        out, log = rest(process)
        assert (out, process.returncode) == ("", code)
        assert said in log
        assert "Traceback" not in log


def test_a_signal_ends_a_server_whose_start_is_held(tmp_path: Path) -> None:
    with program(str(tmp_path / "gone")) as process:
        assert next_line(process).startswith("held sample ")
        process.terminate()
        rest(process)
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("behaviour", "code", "said"),
    [
        ("sync_fails", 3, "SyncFailed"),
        ("damage", 3, "DamagedData"),
        ("bug", 1, "ZeroDivisionError"),
        ("bug_in_callback", 1, "ZeroDivisionError"),
    ],
)
def test_rule_L1_a_failure_while_serving_ends_it_without_a_stop_and_tells_the_supervisor(
    behaviour: str, code: int, said: str
) -> None:
    with program(behaviour) as process:
        assert next_line(process).startswith("ready")
        out, log = rest(process)
        assert process.returncode == code
        assert "stopping" not in out
        assert said in log
