"""One server as a child process: started, watched, and started again when it dies.

Invariant: it is started by exec and never by a bare fork, in a process group of its own, so that Ctrl-C reaches the
supervisor alone; and its stdin is a pipe that only the supervisor holds, so that it ends when the supervisor does.

     starting ──held line──▶ held ──ready line──▶ serving
     starting ──ready line──▶ serving ──died──▶ waiting ──back-off──▶ starting
         │                       └──exit 3──▶ down for good
         └──exit 2 or 3, or died STARTS_MAX times──▶ down for good
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .exits import NOT_BALANCED, USAGE
from .lines import LineWriter, lines_of

RESTART_FIRST_S = 0.2  # A server that was killed is back before its clients give up.
RESTART_LAST_S = 5.0  # One that dies at once costs the machine little, and is back soon after its cause is mended.
SERVED_WELL_S = 10.0  # After so long a death is a new trouble, not the last one again.
STARTS_MAX = 5  # A server that has failed this often without ever serving will not come up: stop and tell the user why.
LAST_LINES_S = 5.0  # For what a dead child wrote to be read; only a child of its own could hold its pipes for longer.


class Ready(NamedTuple):
    """What a ready line says."""

    role: str
    host: str
    port: int
    pid: int


class Child:
    """Keeps one server running; ``command`` is asked anew for each start, with the port that it had before."""

    def __init__(
        self,
        role: str,
        command: Callable[[int | None], Sequence[str]],
        *,
        say: Callable[[str], None],
        on_line: Callable[[str], None],
        errors: LineWriter,
        on_ready: Callable[[Child], None],
        on_held: Callable[[Child], None],
        on_down: Callable[[Child, int], None],
    ) -> None:
        self.role = role
        self.ready: Ready | None = None  # What its first start said; the port stays.
        self.held = False  # It waits for damaged files to be mended, and serves as soon as they are.
        self._command = command
        self._say = say
        self._on_line = on_line
        self._errors = errors
        self._on_ready = on_ready
        self._on_held = on_held
        self._on_down = on_down
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._killed = False
        self._served_from: float | None = None

    async def keep(self) -> int:
        """Run until told to stop or down for good; returns the last exit code."""
        failures = 0
        while True:
            code = await self._run_once()
            if self._stopping.is_set():
                return code
            if self._served_from is not None and self._time() - self._served_from >= SERVED_WELL_S:
                failures = 0
            failures += 1
            if self._is_final(code, failures):
                self._on_down(self, code)
                return code
            wait_s = min(RESTART_LAST_S, RESTART_FIRST_S * 2 ** (failures - 1))
            self._say(f"the {self.role} server {_how_it_ended(code)}; it is started again in {wait_s:g} s")
            try:
                await asyncio.wait_for(self._stopping.wait(), wait_s)
                return code
            except TimeoutError:
                pass  # The wait is over, and nobody told it to stop.

    def stop(self) -> None:
        """Tell it to stop, now or as soon as it has started."""
        self._stopping.set()
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; what it acknowledged is on disk."""
        self._killed = True
        self._stopping.set()
        self._send(signal.SIGKILL)

    @property
    def runs(self) -> bool:
        """Whether its process has not ended yet, also where the news of its end has not come here."""
        if self._process is None:
            return False
        try:
            # The process stays for its waiter: only a look is taken.
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False  # Its waiter has the exit code, and is about to tell.

    def _send(self, number: signal.Signals) -> None:
        """Signal its process if it runs. `Process.send_signal` would take the exit code of one that has just ended."""
        if self._process is None or not self.runs:
            return
        try:
            os.kill(self._process.pid, number)
        except ProcessLookupError:
            pass  # It ended by itself a moment ago, which its waiter is about to hear.

    async def _run_once(self) -> int:
        self._served_from, self.held = None, False
        command = self._command(self.ready.port if self.ready else None)
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, process_group=0)
        self._process = process
        # The signal may have come while the process was being made.
        if self._killed:
            self.kill()
        elif self._stopping.is_set():
            self.stop()
        relays = [asyncio.create_task(self._relay(process)), asyncio.create_task(self._relay_errors(process))]
        code = await process.wait()
        self._process = None
        # What it wrote last is still in the pipes; whatever else may hold them open is not waited for.
        ended, open_ = await asyncio.wait(relays, timeout=LAST_LINES_S)
        for relay in ended:
            relay.result()
        for relay in open_:
            relay.cancel()
        if process.stdin is not None:
            process.stdin.close()
        return code

    async def _relay(self, process: Process) -> None:
        if process.stdout is None:
            raise AssertionError("its stdout is a pipe")
        async for data in lines_of(process.stdout):
            line = data.decode("utf-8", "replace")
            self._on_line(line)
            ready = parse_ready(line)
            if ready is not None and ready.role == self.role:
                self._served_from = self._time()
                self.ready, self.held = ready, False
                self._on_ready(self)
            elif line.startswith(f"held {self.role} "):
                self.held = True
                self._on_held(self)

    async def _relay_errors(self, process: Process) -> None:
        """Hand its log on, each line with the name of the server before it."""
        if process.stderr is None:
            raise AssertionError("its stderr is a pipe")
        prefix = f"{self.role}: ".encode()
        async for line in lines_of(process.stderr):
            self._errors.write(prefix + line + b"\n")
            await self._errors.room()

    def _is_final(self, code: int, failures: int) -> bool:
        if code == NOT_BALANCED:
            return True
        # Later its port or its directory may be taken for a moment only, so then it is tried again.
        return self.ready is None and (code == USAGE or failures >= STARTS_MAX)

    def _time(self) -> float:
        return asyncio.get_running_loop().time()


def parse_ready(line: str) -> Ready | None:
    """Read ``ready <role> <host>:<port> pid=<pid>``; None for any other line."""
    words = line.split()
    if len(words) != 4 or words[0] != "ready" or not words[3].startswith("pid="):
        return None
    host, _, port = words[2].rpartition(":")
    pid = words[3].removeprefix("pid=")
    if not (host and port.isdigit() and pid.isdigit()):
        return None
    return Ready(words[1], host, int(port), int(pid))


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "ended" if code == 0 else f"failed with exit code {code}, see its log above"
