"""The benchmarks as a user runs them, in sizes that measure nothing: each line is there, and the report tells them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.results import read_results
from tests.waiting import wait_until

Line = dict[str, object]


def bench(*words: str, path: str = os.environ["PATH"]) -> list[Line]:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--tiny", "--runs", "1", *words],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_cases_run_against_both_and_the_report_tells_them(tmp_path: Path) -> None:
    lines = bench("batches", "far", "restart-5000")
    runs = [line for line in lines if "run" in line]
    assert [(line["case"], line["side"]) for line in runs] == [
        *(("batches", side) for side in ("delayd", "redis", "redis_py")),
        *(("far", side) for side in ("delayd", "redis")),
        *(("restart-5000", side) for side in ("delayd", "redis")),
    ]
    for line in lines:
        assert {"cpu", "cores", "kernel", "commit", "date"} <= line.keys()
    for line in runs:
        assert {"steal_s", "fsync_ms_p50", "fsync_ms_p99", "repeated"} <= line.keys()
    # It imports what draws the plots, which takes longer than most tests.
    from bench.report import BEGIN, END, report

    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    report(read_results(map(json.dumps, lines)), tmp_path)
    assert "| schedule, batches of 500 |" in (tmp_path / "README.md").read_text()


def test_the_report_tells_cases_whose_figures_are_no_rates(tmp_path: Path) -> None:
    lines = bench("again-lease", "years")
    from bench.report import BEGIN, END, report

    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "performance.md").write_text(f"{BEGIN}\n{END}\n")
    report(read_results(map(json.dumps, lines)), tmp_path)
    told = (tmp_path / "docs" / "performance.md").read_text()
    assert re.search(r"\| how late messages come again[^|]*\| [0-9.]+ / [0-9.]+ / [0-9.]+ ms", told)
    assert re.search(r"\| two years in memory[^|]*\| [0-9.]+ s ", told)


def test_without_redis_delayd_is_measured_and_the_line_says_what_to_install(tmp_path: Path) -> None:
    lines = bench("batches", "work", path=str(tmp_path))
    for case in ("batches", "work"):
        ours, *others, summary = [line for line in lines if line["case"] == case]
        assert ours["side"] == "delayd" and "messages_s" in ours
        assert len(others) == 2 and all(re.search("apt-get|delayd.bench", str(line["skipped"])) for line in others)
        of = summary["of"]
        assert isinstance(of, dict) and set(of) == {"delayd", "ratio"} and not of["ratio"]


def test_a_steady_run_tells_the_processor_time_of_a_message_in_each_process(tmp_path: Path) -> None:
    run, *_ = bench("steady-250", path=str(tmp_path))
    for name in ("delay_cpu_us", "realtime_cpu_us", "consumer_cpu_us"):
        figure = run[name]
        assert isinstance(figure, float) and 0 < figure < 1_000_000, name


def test_a_case_that_is_not_there_is_named() -> None:
    done = subprocess.run([sys.executable, "-m", "bench", "heard"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no case 'heard'; choose of batches, singles" in done.stderr


def test_a_benchmark_that_is_ended_ends_its_servers(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "bench", "--tiny", "steady-250"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        try:
            wait_until(lambda: len(servers_of(tmp_path)) == 3)
        finally:
            running.terminate()
        running.communicate()
    assert running.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not servers_of(tmp_path))


def servers_of(folder: Path) -> list[str]:
    """Command lines of servers whose data is below a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "delayd" in words and any(word.startswith(str(folder)) for word in words):
            found.append(" ".join(words))
    return found


def test_two_states_of_the_code_are_compared_by_the_processor_time_of_each_process() -> None:
    words = ["--against", str(Path(__file__).parents[2]), "--turns", "1", "steady", "batches"]
    done = subprocess.run([sys.executable, "-m", "bench.cpu", *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    steady, batches = (json.loads(line) for line in done.stdout.splitlines())
    assert {"delay", "realtime", "client"} <= steady.keys()
    assert {"delay", "client"} <= batches.keys()
    assert all(steady[process]["now_ms"] > 0 and steady[process]["least"] > 0 for process in ("delay", "realtime"))
