"""A shell completes command lines by the script that ``delayd completion`` prints: quickly, and silently."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.completion import WAIT_S

from .runner import run

COMPLETED = "_DELAYD_COMPLETE"


def offered(words: str, tmp_path: Path, *, index: int | None = None) -> list[str]:
    """What bash is offered for the last of some words, by a process as the script starts it."""
    places = words.split(" ")
    environment = {
        COMPLETED: "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(places) - 1 if index is None else index),
        "PATH": "/usr/bin:/bin",
    }
    command = [sys.executable, "-m", "delayd"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    assert ran.stderr == "", "a line would be written across what somebody types"
    return [line.partition(",")[2] for line in ran.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_one_that_its_shell_reads(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(run("completion", shell).out)
    ran = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_commands_options_and_choices_are_offered(tmp_path: Path) -> None:
    names = {"send", "get", "cancel", "reschedule", "slots", "trace", "status", "completion"}
    assert names <= set(offered("delayd ", tmp_path))
    assert "--findings" in offered("delayd audit --fi", tmp_path)
    assert offered("delayd audit --format j", tmp_path) == ["json"]
    assert offered("delayd send orders --on-conflict ", tmp_path) == ["reject", "keep", "replace"]


def test_a_meta_server_that_is_away_or_silent_offers_nothing(tmp_path: Path, unused_port: int) -> None:
    assert offered(f"delayd consume --meta 127.0.0.1:{unused_port} ord", tmp_path) == []
    assert WAIT_S < 0.5


def test_hours_that_have_a_schedule_log_are_offered(tmp_path: Path) -> None:
    day = tmp_path / "data" / "delay" / "schedule" / "20270101"
    day.mkdir(parents=True)
    for name in ("2027010108.log", "2027010109.log", "2027010109.log.new", "9999999999.log", "x.log"):
        (day / name).touch()
    words = f"delayd audit --data {tmp_path / 'data'} --from"
    assert offered(f"{words} 2027", tmp_path) == ["2027-01-01T08Z", "2027-01-01T09Z"]
    assert offered(f"{words} n", tmp_path) == ["now"]
    # A directory that is not there is no error while somebody types.
    assert offered("delayd audit --data /nowhere --from 2", tmp_path) == []
