"""Real servers in a directory of their own, for one benchmark; they end with it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from delayd.config import parse_address
from delayd.net.entry import connect
from delayd.net.trust import prove
from delayd.secret import SECRET_FILE, read_secret
from delayd.wire.requests import RequestType

STOP_S = 10
CHECKPOINT_MS_MAX = 120_000  # Enough for millions of messages over all hours of two years, on a busy machine.


@dataclass(slots=True)
class Servers:
    """Where the servers are: meta's address, the data directory, addresses and processes by role."""

    data: Path
    stack: contextlib.ExitStack
    options: dict[str, list[str]]
    environment: dict[str, str]
    meta: str = ""
    addresses: dict[str, str] = field(default_factory=dict)
    children: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)

    def start(self, role: str) -> None:
        """Start a server, again if the one before was killed, and wait until it is ready."""
        further = FURTHER.get()
        words = [role, "--data", str(self.data), "--port", "0", *self.options.get(role, []), *further[0]]
        if self.meta:
            words += ["--meta", self.meta]
        with (self.data / f"{role}.err").open("a") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "delayd", *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self.environment,
            )
        self.stack.callback(_stop, child)
        assert child.stdout is not None
        ready = child.stdout.readline().split()
        if ready[:1] != ["ready"]:
            raise RuntimeError(f"{role} did not start: {(self.data / f'{role}.err').read_text()}")
        self.children[role] = child
        self.addresses[role] = ready[2]
        self.meta = self.meta or ready[2]

    def pid(self, role: str) -> int:
        """The process of a server."""
        return self.children[role].pid

    def kill(self, role: str) -> None:
        """End a server as a crash would."""
        self.children[role].send_signal(signal.SIGKILL)
        self.children[role].wait()

    def stop(self, role: str) -> None:
        """End a server as an operator would."""
        _stop(self.children[role])

    async def checkpoint(self, role: str) -> None:
        """Ask for a checkpoint that covers all that is durable now, and wait until it is published."""
        connection = await connect(parse_address(self.addresses[role]))
        try:
            await prove(connection, read_secret(str(self.data / SECRET_FILE)), 0, CHECKPOINT_MS_MAX)
            await connection.request(RequestType.CHECKPOINT, {}, timeout_ms=CHECKPOINT_MS_MAX)
        finally:
            connection.close()
            await connection.closed


# Options of all servers that a benchmark starts, and what is done when they serve; `bench.secured` has some.
FURTHER: ContextVar[tuple[Sequence[str], Callable[[Servers], None]]] = ContextVar(
    "further", default=((), lambda running: None)
)


@contextlib.contextmanager
def servers(*roles: str, delay: tuple[str, ...] = ()) -> Iterator[Servers]:
    """Start meta and the given roles as processes, each on a free port; ``delay`` are options of the delay server."""
    with tempfile.TemporaryDirectory(prefix="delayd-bench-") as folder, contextlib.ExitStack() as stack:
        running = Servers(Path(folder), stack, {"delay": list(delay)}, _with_bytecode())
        for role in ("meta", *roles):
            running.start(role)
        FURTHER.get()[1](running)
        yield running


def _with_bytecode() -> dict[str, str]:
    """The environment, but modules stay compiled for the next start, as those of an installed delayd are.

    Where the environment forbids that, a server that starts again would compile a hundred modules before it reads its
    log, and a restart would measure the compiler.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
