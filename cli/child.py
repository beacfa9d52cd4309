"""One server or worker as a child process: started, watched, started again when it dies, and its lines passed on.

Invariant: it is started by exec and never by a bare fork, in a process group of its own, so that Ctrl-C reaches the
supervisor alone; and its stdin is a pipe that only the supervisor holds, so that it ends when the supervisor does.

     starting ──held line──▶ held ──ready line──▶ serving
     starting ──ready line──▶ serving ──died──▶ waiting ──back-off──▶ starting
         │                       └──exit 3──▶ down for good
         └──exit 2 or 3, or died STARTS_MAX times──▶ down for good

Lines leave whole, in their order, and who gives one never waits for a reader that stands still.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from delayd.address import Endpoint, read_address

from .main import NOT_BALANCED, USAGE

GATEWAY = "gateway"  # The child that is no server: it keeps nothing.
RESTART_FIRST_S = 0.2  # A server that was killed is back before its clients give up.
RESTART_LAST_S = (
    5.0  # The longest pause: a server that dies again and again costs little, and is back soon once mended.
)
SERVED_WELL_S = 10.0  # A server that dies after it served this long has a new trouble, not the last one again.
STARTS_MAX = 5  # A server that has failed this often without ever serving will not come up: stop and tell the user why.
LAST_LINES_S = (
    5.0  # Time to read what a dead child wrote. Its pipes stay open longer only if a child of its own holds them.
)


class Ready(NamedTuple):
    """What a ready line says."""

    role: str
    endpoint: Endpoint
    pid: int


@dataclass(frozen=True, slots=True)
class OnChild:
    """What the supervisor does when a child prints a line, serves, is held, or is down for good with an exit code."""

    line: Callable[[str], None]
    ready: Callable[[Child], None]
    held: Callable[[Child], None]
    down: Callable[[Child, int], None]


class KeptProcess:
    """A process that is started by exec in a group of its own, and told to stop or killed whenever it may run."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._killed = False

    def stop(self) -> None:
        """Tell the process to stop, now or as soon as it has started."""
        self._stopping.set()
        self.terminate()

    def kill(self) -> None:
        """Kill the process. What a server has acknowledged is on disk."""
        self._killed = True
        self._stopping.set()
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Have the process end; it may be started again."""
        self._send(signal.SIGTERM)

    @property
    def runs(self) -> bool:
        """Whether the process runs. Asks the system, because this process may not have heard yet that it ended."""
        if self._process is None:
            return False
        try:
            # Only look (WNOWAIT): `Process.wait` must still get the exit code.
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False  # `Process.wait` already has the exit code.

    def _send(self, number: signal.Signals) -> None:
        """Signal the process if it runs. `Process.send_signal` would take the exit code from `Process.wait`."""
        if self._process is None or not self.runs:
            return
        try:
            os.kill(self._process.pid, number)
        except ProcessLookupError:
            pass  # It ended by itself a moment ago; `Process.wait` is about to say so.

    async def _start(self, command: Sequence[str], output: int | None) -> Process:
        """Start the process; ``output`` is where it writes, as subprocesses take it."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=output, stderr=output, process_group=0
        )
        self._process = process
        # The signal may have come while the process was being made.
        if self._killed:
            self.kill()
        elif self._stopping.is_set():
            self.stop()
        return process

    async def _pause(self, code: int, failures: int) -> bool:
        """Wait before the next start, the longer the more often it failed; whether there is to be one."""
        wait_s = min(RESTART_LAST_S, RESTART_FIRST_S * 2 ** (failures - 1))
        self._say(f"{self._name} {how_it_ended(code)}; it is started again in {wait_s:g} s")
        try:
            await asyncio.wait_for(self._stopping.wait(), wait_s)
            return False
        except TimeoutError:
            return True  # The pause is over, and nobody has told it to stop.


class Child(KeptProcess):
    """Keeps one server running. Each start calls ``command`` again, with the port that the server had before."""

    def __init__(
        self,
        role: str,
        command: Callable[[int | None], Sequence[str]],
        say: Callable[[str], None],
        errors: LineWriter,
        on_child: OnChild,
    ) -> None:
        super().__init__(called(role), say)
        self.role = role
        self.ready: Ready | None = None  # The ready line of its first start; later starts keep the port.
        self.held = False  # A damaged file keeps it from serving; it serves as soon as the file is mended.
        self._command = command
        self._errors = errors
        self._on = on_child
        self._served_from: float | None = None

    async def keep(self) -> int:
        """Run the server until it is told to stop or is down for good. Returns the last exit code."""
        failures = 0
        while True:
            code = await self._run_once()
            if self._stopping.is_set():
                return code
            if self._served_from is not None and self._time() - self._served_from >= SERVED_WELL_S:
                failures = 0
            failures += 1
            if self._is_final(code, failures):
                self._on.down(self, code)
                return code
            if not await self._pause(code, failures):
                return code

    async def _run_once(self) -> int:
        self._served_from, self.held = None, False
        command = self._command(self.ready.endpoint.port if self.ready else None)
        process = await self._start(command, PIPE)
        relays = [asyncio.create_task(self._relay(process)), asyncio.create_task(self._relay_errors(process))]
        code = await process.wait()
        self._process = None
        # The pipes still hold its last lines. Wait no longer than this: another process may hold the pipes open.
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
            self._on.line(line)
            ready = parse_ready(line)
            if ready is not None and ready.role == self.role:
                self._served_from = self._time()
                self.ready, self.held = ready, False
                self._on.ready(self)
            elif line.startswith(f"held {self.role} "):
                self.held = True
                self._on.held(self)

    async def _relay_errors(self, process: Process) -> None:
        """Pass its log lines on, each behind the name of the server."""
        if process.stderr is None:
            raise AssertionError("its stderr is a pipe")
        prefix = f"{self.role}: ".encode()
        async for line in lines_of(process.stderr):
            self._errors.write(prefix + line + b"\n")
            await self._errors.room()

    def _is_final(self, code: int, failures: int) -> bool:
        if code == NOT_BALANCED:
            return True
        # A server that has served may find its port or directory taken for a moment only, so it is started again.
        return self.ready is None and (code == USAGE or failures >= STARTS_MAX)

    def _time(self) -> float:
        return asyncio.get_running_loop().time()


def parse_ready(line: str) -> Ready | None:
    """Read ``ready <role> <host>:<port> pid=<pid>``; None for any other line."""
    words = line.split()
    if len(words) != 4 or words[0] != "ready" or not words[3].startswith("pid="):
        return None
    endpoint, pid = read_address(words[2]), words[3].removeprefix("pid=")
    if isinstance(endpoint, str) or not pid.isdigit():
        return None
    return Ready(words[1], endpoint, int(pid))


def called(role: str) -> str:
    """What a child is called in a sentence."""
    return "the gateway" if role == GATEWAY else f"the {role} server"


def how_it_ended(code: int) -> str:
    """How a process ended, for people."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return "ended" if code == 0 else f"failed with exit code {code}, see its log above"


LINE_BYTES_MAX = 1 << 20  # A longer line is handed on in pieces, so that a process that writes none fills no memory.
CHUNK_BYTES = 1 << 16
WAITING_BYTES_MAX = 4 << 20  # What waits for a slow reader; then the processes that write wait as well.


class LineWriter:
    """Writes lines to a descriptor on a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._waiters: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"lines-{descriptor}", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Give a line, which ends with a line feed."""
        with self._changed:
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify()

    async def room(self) -> None:
        """Wait while as much waits for the reader as may."""
        while self._waiting_bytes > WAITING_BYTES_MAX:
            room = asyncio.Event()
            tell = partial(asyncio.get_running_loop().call_soon_threadsafe, room.set)
            with self._changed:
                if self._waiting_bytes > WAITING_BYTES_MAX:
                    self._waiters.append(tell)
                else:
                    room.set()
            await room.wait()

    def close(self, limit_s: float) -> None:
        """Write what is left, for as long as the reader takes it."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line = self._lines.popleft()
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                # Nobody reads any more, or the disk under the file is full: what runs goes on without its lines.
                pass
            with self._changed:
                self._waiting_bytes -= len(line)
                waiters: list[Callable[[], object]] = []
                if self._waiting_bytes <= WAITING_BYTES_MAX:
                    waiters, self._waiters = self._waiters, waiters
            for tell in waiters:
                tell()


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each line of a stream, without its line feed; what it ends with counts as a line, too."""
    rest = b""
    while chunk := await stream.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_BYTES_MAX:
            yield rest
            rest = b""
    if rest:
        yield rest
