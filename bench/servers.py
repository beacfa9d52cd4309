"""Three real servers in a directory of their own, for one benchmark; they end with it."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STOP_S = 10


@dataclass(slots=True)
class Servers:
    """Where they are: meta's address, the data directory, process ids by role."""

    data: Path
    stack: contextlib.ExitStack
    meta: str = ""
    pids: dict[str, int] = field(default_factory=dict)

    def start(self, role: str) -> None:
        """Start a server, again if the one before was killed, and wait until it is ready."""
        known = ["--meta", self.meta] if self.meta else []
        with (self.data / f"{role}.err").open("a") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "delayd", role, "--data", str(self.data), "--port", "0", *known],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.stack.callback(_stop, child)
        assert child.stdout is not None
        words = child.stdout.readline().split()
        if words[:1] != ["ready"]:
            raise RuntimeError(f"{role} did not start: {(self.data / f'{role}.err').read_text()}")
        self.meta = self.meta or words[2]
        self.pids[role] = child.pid


@contextlib.contextmanager
def servers(*roles: str) -> Iterator[Servers]:
    """Start meta and the given roles as processes, each on a free port."""
    with tempfile.TemporaryDirectory(prefix="delayd-bench-") as folder, contextlib.ExitStack() as stack:
        running = Servers(Path(folder), stack)
        for role in ("meta", *roles):
            running.start(role)
        yield running


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
