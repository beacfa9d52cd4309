"""LOCK says who holds a directory, and a server that is about to leave it is told from one that stays."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from delayd.errors import DirectoryInUse, NotWritable
from delayd.machine.disk import RealDisk
from delayd.machine.identity import leaving

HOLD = """
import sys, time
from delayd.machine.disk import RealDisk
from delayd.machine.identity import holder_name, mark_stopping
lock = RealDisk().lock(sys.argv[1], holder_name("delay", supervised="supervised" in sys.argv))
if "stopping" in sys.argv: mark_stopping(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""
SUPERVISE = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {HOLD!r}, *sys.argv[1:]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def holder(path: Path, *how: str) -> Iterator[int]:
    """Another process that holds the lock; its pid."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), *how], stdout=subprocess.PIPE)
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"held\n"
            yield process.pid
        finally:
            process.kill()


def test_a_holder_that_stops_is_leaving_and_one_that_serves_is_not(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    assert leaving(str(path)) == ""
    for how, expected in (((), False), (("supervised",), False), (("stopping",), True)):
        with holder(path, *how) as pid:
            assert bool(leaving(str(path))) is expected
            with pytest.raises(DirectoryInUse) as caught:
                RealDisk().lock(str(path), "delay")
            assert caught.value.holder.startswith(f"pid {pid} delay") and "\n" not in caught.value.holder
        # A LOCK that a kill left behind says nothing, for nobody holds it.
        assert leaving(str(path)) == ""


def test_a_child_whose_supervisor_was_killed_is_leaving(tmp_path: Path) -> None:
    path = str(tmp_path / "LOCK")
    process = subprocess.Popen([sys.executable, "-c", SUPERVISE, path, "supervised"], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            assert leaving(path) == ""
            process.kill()
            process.wait()
            assert leaving(path).startswith(f"pid {pid} delay of pid {process.pid}")
        finally:
            os.kill(pid, 9)


def test_a_lock_that_is_no_file_is_nobody_s_and_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert leaving(str(tmp_path / "folder")) == leaving(str(tmp_path / "pipe")) == ""
    with pytest.raises(NotWritable, match="pipe can't be written"):
        RealDisk().lock(str(tmp_path / "pipe"), "delay")
