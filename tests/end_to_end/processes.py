"""Servers as processes of their own, which a test can kill, stop and start again on the same directory and port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from delayd.config import Value
from tests.trust import put_secret

EXIT_DEADLINE_S = 30.0  # Far above what anything takes, on a machine that is busy with other things.
HOST = "127.0.0.1"

_ERROR_LINE = re.compile(r"^\S+ (ERROR|CRITICAL) |^Traceback|^Exception ignored", re.MULTILINE)


class ServerProcess:
    """One server; leaves nothing behind when its `with` block ends, and shows its log if it could not start."""

    def __init__(
        self,
        role: str,
        data: Path,
        settings: Mapping[str, Value] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.role = role
        self.port = 0
        self._data = data
        self.settings = dict(settings or {})  # Of the next life.
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether this life has not ended; one that is stopped by SIGSTOP runs too."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All that its lives have written to stderr."""
        return self._log_path.read_text()

    def elsewhere(self, data: Path) -> ServerProcess:
        """The same server on another directory, and on any free port."""
        return ServerProcess(self.role, data, self.settings, self._environment)

    def start(self) -> None:
        """Start and wait for the ready line; the port is the same in each life."""
        self.spawn()
        self.until_ready()

    def start_held(self) -> None:
        """Start and wait for the line which says that a damaged file holds the start."""
        self.spawn()
        assert self._process is not None and self._process.stdout is not None
        words = self._process.stdout.readline().split()
        assert words[:2] == ["held", self.role], self.log

    def until_ready(self) -> None:
        """Wait for the ready line of a server that was spawned, or whose start was held."""
        assert self._process is not None and self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if words[:2] != ["ready", self.role]:
            self.end()
            raise AssertionError(f"{self.role} did not start: {self.log}")
        self.port = int(words[2].rpartition(":")[2])

    def spawn(self) -> None:
        """Start, and wait for nothing."""
        assert self._process is None or self._process.poll() is not None
        self._data.mkdir(parents=True, exist_ok=True)
        # Servers of one test may have a directory each, and are of one cluster all the same.
        put_secret(self._data)
        config = self._data / f"{self.role}-{id(self)}.toml"
        settings = {"data": str(self._data), "host": HOST, **self.settings, "port": self.port}
        config.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in settings.items()))
        command = [sys.executable, "-m", "tests.end_to_end.serve", self.role, str(config)]
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self._environment},
            )

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit code. A clean stop logs no error, whatever the server is doing at that moment."""
        before = len(self.log)
        self.signal(signal.SIGTERM)
        code = self.wait()
        told = self.log[before:]
        assert code or not _ERROR_LINE.search(told), f"{self.role} stopped with an error in its log:\n{told}"
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this life."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        assert self._process is not None and self._process.stdout is not None
        code = self._process.wait(EXIT_DEADLINE_S)
        self._process.stdout.close()
        return code

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Leave no process and no open file, whatever its state."""
        if self._process is not None:
            # A stopped process takes no SIGTERM, and a test that has failed is in no hurry to be polite.
            self._process.kill()
            self.wait()

    @property
    def _log_path(self) -> Path:
        return self._data / f"{self.role}-{id(self)}.log"


@contextmanager
def started(*servers: ServerProcess) -> Iterator[None]:
    """Start servers beside each other; leave none of them behind."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.end)
            server.spawn()
        for server in servers:
            server.until_ready()
        yield


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else f'"{value}"'
