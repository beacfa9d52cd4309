"""Held start: a server whose start met damage keeps running, answers STATUS, and starts as soon as the damage is
mended.

Invariant: while it waits, it keeps nothing of the directory open or locked, so that a file can be put back and `delayd
mend give-up` can do its work. It does not read a file that somebody may still be writing.

      start fails on damage ──▶ held ──the file changed, and then rested──▶ start again ──▶ serves
                                ▲└──or a while has passed───────────────────┘ │
                                └─────────────────fails again─────────────────┘
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from delayd.address import Endpoint
from delayd.errors import (
    DamagedData,
    DataError,
    DelaydError,
    DirectoryInUse,
    NotReady,
    Shortage,
    StateMissing,
    read_error,
)
from delayd.log.tail import end_of
from delayd.machine.operating import WaitKind
from delayd.net.admin import Measured
from delayd.net.connection import Connection
from delayd.net.server import Server
from delayd.net.trust import Guard
from delayd.secret import Secret
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import RequestType
from delayd.wire.status import Decision, Quarantined, list_head, status_head

LOOK_S = 1.0  # How often the files are looked at; that is one system call for each.
RESTED_S = 5.0  # A file that has not changed for this long is not being copied any more.
# A disk may read again what it did not: another try without a change, each twice as late as the one before.
AGAIN_S = 30.0
AGAIN_S_MAX = 600.0
RETRY_MS = 5_000  # The hint to clients that ask anything else meanwhile.

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldServer:
    """The facts of a server that could not start; numbers are 0 where its state can't be read."""

    role: str
    endpoint: Endpoint  # Where it would listen.
    secret: Secret
    log_id: int = 0
    epoch: int = 0
    cluster_id: int = 0


class Service(Measured, Protocol):
    """The service that a program runs."""

    def open(self) -> None:
        """Recover from the directory."""

    def abandon(self) -> HeldServer:
        """Close everything that a failed `open` has opened; return what is known of this server."""

    async def start(self) -> Endpoint:
        """Listen, and return the address at which requests are answered from now on."""

    async def registered(self) -> None:
        """Wait until clients are told of this server, which has started."""

    async def stop(self) -> None:
        """Take no more requests, make durable what is under way, let the answers leave, release the directory.

        Not called after a failure: then nothing in memory is trusted, and the next start recovers from the disk.
        """


async def open_when_whole(
    service: Service, role: str, folder: str | None, stop: asyncio.Event, tell_line: Callable[[str], None]
) -> bool:
    """Open a service as soon as its files allow it; False when ``stop`` is set before.

    ``tell_line`` is called with a line that says where the held server listens.
    """
    held: HeldStart | None = None
    try:
        while not stop.is_set():
            try:
                _open(service, folder)
                return True
            except DelaydError as error:
                # `delayd mend give-up` may be using the directory.
                if not may_be_mended(error) and not (held and isinstance(error, DirectoryInUse)):
                    raise
                known = service.abandon()
                begins = held is None
                held = held or HeldStart(known, error)
                held.tell(error)
                if begins:
                    tell_line(f"held {role} {await held.listen()} pid={os.getpid()}")
            await held.until_changed(stop)
    finally:
        if held is not None:
            await held.close()
    return False


class Lives:
    """The lives of a service that begins anew in place, because only a start reads files into memory.

    ``end`` ends the present life. ``fail`` is called with the error after which the process must end.
    """

    def __init__(
        self,
        service: Service,
        role: str,
        folder: str,
        end: Callable[[], Coroutine[object, object, None]],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._service, self._role, self._folder = service, role, folder
        self._end, self._fail = end, fail
        self._over = asyncio.Event()  # No further life begins.
        self._change: asyncio.Task[None] | None = None
        self._why = ""  # Why the present life is to end; empty: it is not.

    def begin_anew(self, why: str) -> None:
        """End the present life, and begin the next one at the same address. A life may ask for it while it begins."""
        self._why = self._why or why
        if self._change is None and not self._over.is_set():
            self._change = asyncio.get_running_loop().create_task(self._live_again())
            self._change.add_done_callback(self.surface)

    async def close(self) -> None:
        """Begin no further life, after the one that begins now."""
        self._over.set()
        if self._change is not None:
            await self._change

    def surface(self, task: asyncio.Task[None]) -> None:
        """Let an error of a task end the process: nobody would see it until the task is collected."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _live_again(self) -> None:
        while self._why and not self._over.is_set():
            log.warning("begins_anew reason=%r", self._why)
            await self._end()
            self._why = ""
            if await open_when_whole(self._service, self._role, self._folder, self._over, log.critical):
                await self._service.start()
        self._change = None


def _open(service: Service, folder: str | None) -> None:
    """Open a service; Unreadable names the path that the system refuses, such as a folder in the place of a file, and
    Shortage says that a limit leaves this process too little memory.
    """
    try:
        service.open()
    except MemoryError as error:
        raise Shortage(folder or "", errno.ENOMEM) from error
    except OSError as error:
        # If the directory itself is missing nothing below it can be mended: the setting names a wrong place.
        has_place = folder is None or os.path.isdir(folder)
        if not (has_place and isinstance(error.filename, str)):
            raise
        raise read_error(error.filename, 0, error) from error


def may_be_mended(error: DelaydError) -> bool:
    """Whether this failure of a start may be mended, so that another start in this process is worth it once the files
    change.
    """
    return isinstance(error, DamagedData | StateMissing)


class HeldStart:
    """Stands in for a server that can't start yet; a Handler of its Server. Belongs to the loop."""

    def __init__(self, held: HeldServer, error: DelaydError) -> None:
        self._held = held
        self._error = error
        self._seen: object = None  # What the files looked like when the start failed last.
        self._again_s = AGAIN_S
        self._started_at_ms = time.time_ns() // 1_000_000
        self._guard = Guard(held.secret, held.role, held.log_id, lambda: held.cluster_id)
        self._server = Server(self)

    async def listen(self) -> Endpoint:
        """Listen where the server would, and return where that is."""
        return await self._server.listen(self._held.endpoint)

    async def close(self) -> None:
        """Leave the address to the server."""
        await self._server.close()

    def tell(self, error: DelaydError) -> None:
        """Note that a start has failed, or failed again."""
        if not isinstance(error, DirectoryInUse):
            self._error = error
            # Before anybody hears of it: what is put back from now on is a change.
            self._seen = self._look()
            log.critical("start_held role=%s code=%s reason=%r", self._held.role, error.code, error.message)

    async def until_changed(self, stop: asyncio.Event) -> None:
        """Wait until another start may succeed, or ``stop`` is set."""
        began, changed_at, seen = time.monotonic(), None, self._seen
        while not stop.is_set():
            try:
                await asyncio.wait_for(stop.wait(), LOOK_S)
                return
            except TimeoutError:
                now, found = time.monotonic(), self._look()
            if found != seen:
                seen, changed_at = found, now
            if changed_at is not None and now - changed_at >= RESTED_S:
                self._again_s = AGAIN_S
                return
            if changed_at is None and now - began >= self._again_s:
                self._again_s = min(2 * self._again_s, AGAIN_S_MAX)
                return

    # Handler of the connections.

    def connected(self, connection: Connection) -> None:
        """Do nothing: nothing is known of a client before its first request."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Answer what is wrong; nothing else can be served."""
        if self._guard.serves(connection, frame):
            return
        answer: Callable[[Head], object] = partial(connection.answer, frame.request_id)
        if frame.type == RequestType.PING:
            answer({"now_ms": time.time_ns() // 1_000_000})
        elif frame.type == RequestType.STATUS:
            answer(self._status())
        elif frame.type == RequestType.MEND_LIST:
            answer(list_head([self._entry()], "", 1))
        else:
            raise NotReady(
                f"this {self._held.role} server can't start yet: {self._error.message}", retry_after_ms=RETRY_MS
            )

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Do nothing: nothing is kept for a connection."""

    def crashed(self, error: Exception) -> None:
        """Stop: the error is a bug."""
        raise error

    def _status(self) -> Head:
        return status_head(
            role=self._held.role,
            log_id=self._held.log_id,
            epoch=self._held.epoch,
            cluster_id=self._held.cluster_id,
            pid=os.getpid(),
            started_at_ms=self._started_at_ms,
            now_ms=time.time_ns() // 1_000_000,
            counters={},
            waits=[WaitKind.HELD.wait(self._error.message, role=self._held.role)],
            own={**self._server.status(), "clock_confirmed": False, "fenced": False, "held": True},
        )

    def _entry(self) -> Quarantined:
        """The damage as `delayd mend list` shows it; the id of the end of a log is its folder."""
        error = self._error
        path = os.path.abspath(error.path) if isinstance(error, DataError) else ""
        id_, position, costs = path, 0, dict[Decision, str]()
        if isinstance(error, DamagedData):
            position, end = error.position, end_of(error.end_of)
            if end is not None:
                id_, costs = os.path.abspath(error.end_of), {Decision.GIVE_UP: end.cost}
        return Quarantined(id_, path, position, error.message, 0, self._started_at_ms, costs=costs)

    def _look(self) -> list[tuple[int, ...] | None]:
        """What the system says of the damaged file, its folder, and the files beside it."""
        path = self._error.path if isinstance(self._error, DataError) else ""
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        try:
            beside = sorted(os.path.join(folder, name) for name in os.listdir(folder))
        except OSError:
            beside = []
        return [_stat(each) for each in (path, folder, os.path.dirname(folder), *beside)]


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
