"""Program: what every server process does around its service: signals, the ready line, logging, and how it exits.

Invariant: from the first SIGTERM the process is gone within STOP_MS_MAX, whatever the service does, and a second one
ends it at once. That is safe at any moment, because everything that was acknowledged is durable already.

     starting ──▶ ready ──SIGTERM, SIGINT, stdin closed──▶ stopping ──▶ exit 0
      │    ▲│       └──── a fault that it can't survive ─────────────▶ exit 1 or 3
      │    │└── a damaged file ──▶ held ──mended──┐
      │    └──────────────────────────────────────┘
      └── can't start: a bad setting, a directory in use ──▶ exit 2

Python's garbage collector runs when nobody waits (`QuietCollector`). Invariant: no collection starts by itself inside a
request. Memory in cycles is still bounded: above a hard limit of new objects a collection runs at the next tick, quiet
or not. What the walk through everything has freed, and what bursts have left, goes back to the system behind it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from delayd.address import Endpoint
from delayd.errors import (
    CallerError,
    DamagedData,
    DataError,
    DelaydError,
    ServerStopped,
    Shortage,
)
from delayd.machine.identity import LOCK, leaving, mark_stopping
from delayd.net.admin import AdminServer
from delayd.net.budget import FILES_MIN, connections_max, raise_file_limit
from delayd.net.held_start import Service, open_when_whole
from delayd.net.machine import bound_heap, give_back
from delayd.net.server import run
from delayd.net.timer import Ticks

EXIT_OK = 0
EXIT_BUG = 1  # The log has the traceback; the supervisor may start it again.
EXIT_USAGE = 2  # A setting or the state of the directory is wrong; starting again does not help.
EXIT_STOPPED = 3  # It stopped itself on a failed sync or on damage: somebody must look before it is started again.

STOP_MS_MAX = 5_000
LEAVE_MS_MAX = 15_000  # A stop takes STOP_MS_MAX; on a machine under load its beginning and its end are noticed late.
LEAVE_LOOK_S = 0.05

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STDIN = 0

Fail = Callable[[BaseException], None]  # Ends the program because of an error; callable from the loop's thread only.

log = logging.getLogger(__name__)


class Program:
    """One process with one service."""

    def __init__(
        self,
        role: str,
        build: Callable[[Fail], Service],
        folder: str | None,
        *,
        exit_with_stdin: bool = False,
        admin: Endpoint | None = None,
    ) -> None:
        self._role = role
        self._folder = folder
        self._lock = None if folder is None else f"{folder}/{LOCK}"
        self._build = build
        self._exit_with_stdin = exit_with_stdin
        self._admin = None if admin is None else AdminServer(admin)
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()

    def run(self) -> int:
        """Run until told to stop; returns the exit code."""
        configure_logging()
        _take_files()
        bound_heap()
        return run(self._main)

    async def _main(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if self._exit_with_stdin:
            loop.add_reader(_STDIN, self._on_stdin)
        await self._until_left()
        try:
            if self._admin is not None:
                await self._admin.listen(self._role)
            service = self._build(self._fail)
            if not await open_when_whole(service, self._role, self._folder, self._stop, self._tell_held):
                return EXIT_OK
            endpoint = await service.start()
            if self._admin is not None:
                self._admin.serve(service)
        except DelaydError as error:
            log.critical("start_failed role=%s code=%s reason=%r", self._role, error.code, error.message)
            return _exit_code(error, starting=True)
        collector = QuietCollector(loop)
        if not self._stop.is_set():
            _tell_line(f"ready {self._role} {endpoint} pid={os.getpid()}")
            log.info("ready role=%s host=%s port=%d", self._role, endpoint.host, endpoint.port)
        await self._stop.wait()
        if self._admin is not None:
            self._admin.serve(None, "it is stopping")
        try:
            if self._failure is None:
                await service.stop()
        except DelaydError as error:
            self._fail(error)
        collector.close()
        if self._admin is not None:
            self._admin.close()
        log.info("stopped role=%s", self._role)
        return EXIT_OK if self._failure is None else _exit_code(self._failure, starting=False)

    async def _until_left(self) -> None:
        """Wait for a server that is about to leave the directory, such as a child of a supervisor that was killed."""
        if self._lock is None or not (holder := leaving(self._lock)):
            return
        log.info("lock_awaited role=%s holder=%r limit_ms=%d", self._role, holder, LEAVE_MS_MAX)
        deadline = time.monotonic() + LEAVE_MS_MAX / 1000
        while leaving(self._lock) and time.monotonic() < deadline and not self._stop.is_set():
            try:
                await asyncio.wait_for(self._stop.wait(), LEAVE_LOOK_S)
            except TimeoutError:
                pass  # Nobody asked it to stop, so it looks again.

    def _tell_held(self, line: str) -> None:
        if self._admin is not None:
            self._admin.serve(None, "a damaged file holds its start: see `delayd mend list`")
        _tell_line(line)

    def _begin_stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            _exit_within(STOP_MS_MAX)
            self._tell_stopping()

    def _tell_stopping(self) -> None:
        """Mark the lock, so that the next server knows that the directory comes free soon."""
        if self._lock is None:
            return
        try:
            mark_stopping(self._lock)
        except FileNotFoundError:
            pass  # The service has not taken the directory yet.
        except OSError as error:
            log.warning("lock_not_marked path=%s reason=%r", self._lock, str(error))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            log.critical("failed role=%s", self._role, exc_info=error)
        self._begin_stop()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self._fail(error if isinstance(error, BaseException) else RuntimeError(str(context.get("message"))))

    def _on_signal(self, number: int) -> None:
        log.info("stopping role=%s signal=%s", self._role, signal.Signals(number).name)
        # From here on the next signal ends the process by the kernel's default action, even if the loop hangs.
        for other in _STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(other)
            signal.signal(other, signal.SIG_DFL)
        self._begin_stop()

    def _on_stdin(self) -> None:
        if os.read(_STDIN, 4096):
            return
        asyncio.get_running_loop().remove_reader(_STDIN)
        log.info("stopping role=%s stdin=closed", self._role)
        self._begin_stop()


def run_program(
    role: str,
    build: Callable[[Fail], Service],
    *,
    folder: str | None = None,
    exit_with_stdin: bool = False,
    admin: Endpoint | None = None,
) -> int:
    """Run a service as a process and return its exit code; with `exit_with_stdin` it stops when its stdin pipe closes.

    A server that is about to leave ``folder`` is waited for. At ``admin`` the process can be measured, from its start
    on. `build` is called inside the running loop, with what the service calls when it can't go on.
    """
    return Program(role, build, folder, exit_with_stdin=exit_with_stdin, admin=admin).run()


def configure_logging(level: int = logging.INFO) -> None:
    """Log to stderr: time in UTC, level, module, then the event and its `key=value` pairs."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Its jobs only post requests; a run of one is no change of state.
    logging.getLogger("apscheduler").setLevel(logging.WARNING)


def _tell_line(line: str) -> None:
    # The line is one write: a supervisor or a script that reads the pipe gets all of it or nothing.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _exit_code(error: BaseException, *, starting: bool) -> int:
    if isinstance(error, Shortage):
        return EXIT_BUG  # Another try may find memory and files.
    if isinstance(error, ServerStopped | DamagedData):
        return EXIT_STOPPED
    if starting and isinstance(error, CallerError | DataError):
        return EXIT_USAGE
    return EXIT_BUG


def _exit_within(limit_ms: int) -> None:
    # A thread does this, because a hanging loop can't end itself.
    def overdue() -> None:
        log.critical("stop_overdue limit_ms=%d", limit_ms)
        # It tells where each thread stands, on stderr.
        faulthandler.dump_traceback()
        os._exit(EXIT_BUG)

    # Half a second is left for the interpreter's own end.
    deadline = threading.Timer((limit_ms - 500) / 1000, overdue)
    deadline.daemon = True
    deadline.start()


def _take_files() -> None:
    limit = raise_file_limit()
    if limit < FILES_MIN:
        log.warning("few_files limit=%d wanted=%d connections_max=%d", limit, FILES_MIN, connections_max())


TICK_S = 0.1
YOUNG_OBJECTS_MIN = 2_000  # Fewer new containers than this are not worth a pass, which takes some 10 us for each 1,000.
YOUNG_OBJECTS_MAX = 200_000  # About 20 MB of small containers: these are collected even if it is never quiet.
OLD_TICKS_MIN = 600  # At least a minute passes between walks through everything except the objects of the start.
OLD_TICKS_MAX = 6_000  # After this the walk is done even if it is never quiet.


def always() -> bool:
    """Every moment is quiet."""
    return True


class QuietCollector:
    """Freezes the objects that exist now, and collects later ones at ticks of the loop at which `quiet()` holds."""

    __slots__ = ("_beat", "_quiet", "_ticks")

    def __init__(self, loop: asyncio.AbstractEventLoop, quiet: Callable[[], bool] = always) -> None:
        self._quiet = quiet
        self._ticks = 0
        gc.collect()
        gc.freeze()
        gc.disable()
        self._beat = Ticks(loop, TICK_S, self._tick)

    def close(self) -> None:
        """End the ticks, because the process ends; nothing is collected any more. Python's own last walk through all
        objects would take a tenth of a second of a processor.
        """
        self._beat.close()
        gc.freeze()

    def _tick(self) -> None:
        self._ticks += 1
        young = gc.get_count()[0]
        quiet = self._quiet()
        if self._ticks >= (OLD_TICKS_MIN if quiet else OLD_TICKS_MAX):
            self._ticks = 0
            gc.collect()
            give_back()
        elif young >= (YOUNG_OBJECTS_MIN if quiet else YOUNG_OBJECTS_MAX):
            gc.collect(1)
