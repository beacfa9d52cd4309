"""Runs ``delayd up`` as a process, with the real servers or with fakes in their place, and watches what it writes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from cli.child import Ready, parse_ready
from tests.waiting import DEADLINE_S, wait_until

_FAKE = Path(__file__).with_name("fake_server.py")
_WITH_FAKES = """
import sys
from cli.main import main
from cli.main import Programs
sys.exit(main(Programs({}, print, print, print, print, sys.argv[1:3]), sys.argv[3:]))
"""


class Up:
    """A running ``delayd up``; its stdout and stderr are files that the test reads."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self.process = process
        self.data = folder / "data"
        self._out = folder / "out"
        self._err = folder / "err"

    @property
    def lines(self) -> list[str]:
        """What it has written to stdout, whole lines."""
        return self._out.read_text().splitlines()

    @property
    def meta(self) -> str:
        """Where meta is, once all serve."""
        ready = self.until_ready().ready("meta")[-1]
        return str(ready.endpoint)

    @property
    def errors(self) -> str:
        """What it and its servers have written to stderr."""
        return self._err.read_text()

    def ready(self, role: str) -> list[Ready]:
        """Each ready line of a role."""
        found = [ready for line in self.lines if (ready := parse_ready(line)) is not None]
        return [ready for ready in found if ready.role == role]

    def until_ready(self) -> Self:
        """Wait until all serve."""
        self.until(lambda: "ready" in self.lines, "all servers are ready")
        return self

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds."""
        wait_until(holds, lambda: f"{what}\n{self.lines}\n{self.errors}")

    def kill(self, role: str) -> None:
        """End a server with SIGKILL, as the kernel would; one that an earlier test has killed serves again before."""
        self.until(lambda: is_running(self.ready(role)[-1].pid), f"the {role} server runs")
        os.kill(self.ready(role)[-1].pid, signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def up_command(folder: Path, *options: str, fakes: bool) -> list[str]:
    """The command line that starts it on ``folder/data``; without a gateway, unless the options ask for one."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    words = ["up", "--data", str(folder / "data"), "--no-gateway", *options]
    if fakes:
        return [sys.executable, "-c", _WITH_FAKES, sys.executable, str(_FAKE), *words]
    return [sys.executable, "-m", "delayd", *words]


@contextmanager
def up(folder: Path, *options: str, fakes: bool = False) -> Iterator[Up]:
    """Run it for the length of the block; whatever still runs at its end is killed."""
    with watched(up_command(folder, *options, fakes=fakes), folder) as running:
        yield running


@contextmanager
def watched(command: Sequence[str], folder: Path, cwd: Path | None = None) -> Iterator[Up]:
    """The same for a command line of the caller's."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        # An open stdin, as in a terminal: servers that inherited it would not notice the supervisor's end.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=cwd)
    running = Up(process, folder)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        for role in ("meta", "delay", "realtime", "gateway"):
            _kill([ready.pid for ready in running.ready(role)])


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
