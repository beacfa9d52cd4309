"""Machine: what a server has from the machine that it runs on: disk, state, clocks, threads, and its cluster's secret.

Invariant: a server asks its machine for these and nobody else, so that one machine in memory carries all of it
(`delayd.testing.InMemoryBroker`).

A server begins in no folder that is that of a server of another role. The check writes nothing, and knows a folder by
what its server has written there.

The C allocator gives memory back as `bound_heap` and `give_back` say. glibc gives large blocks mappings of their own,
which go back to the system when they are freed; then each touch of a page of the next one costs a fault, a tenth of the
work of a herd. Smaller blocks stay in the heaps of its threads, and one small block that is kept holds all that was
freed before it: a server that filed a million messages would keep a hundred megabytes for nobody. So frames and their
arrays are in the heaps, and once a minute all pages of free blocks go back.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from typing import Protocol

import uvloop

from delayd.config import DelayConfig, MetaConfig, RealtimeConfig
from delayd.errors import BadSetting, DataError
from delayd.log.segment import FILE_HEADER_BYTES, FileKind, kind_of_file
from delayd.machine.clock import ClockEvidence, JudgedClock, SystemClock
from delayd.machine.disk import Disk, RealDisk, list_named, open_named
from delayd.machine.executor import Executor, Tell, ThreadExecutor
from delayd.machine.identity import place_of
from delayd.machine.state import LmdbState, State, StateCopy
from delayd.secret import Secret, open_secret

REST_S = 0.02  # Pause between two parts of a checkpoint, so that group commits get their turn at the disk.

Config = DelayConfig | MetaConfig | RealtimeConfig


class OwnDisk(Disk, Protocol):
    """A disk that one server has opened."""

    def close(self) -> None:
        """End the use of it."""


class WatchedState(State, Protocol):
    """A state whose file is looked after."""

    def look(self) -> None:
        """Check that the file is there."""

    def begin_copy(self) -> StateCopy:
        """Fix what a copy of the state is to hold."""


class OwnExecutor(Executor, Protocol):
    """An executor of one server."""

    def close(self) -> None:
        """Drop the queued jobs, have the one that runs end at its next piece, and take no more."""


class Machine(Protocol):
    """What a server asks for, once each while it starts."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """A loop for servers that share one thread of a program."""

    def disk(self) -> OwnDisk:
        """The disk with the server's folder."""

    def state(self, path: str) -> WatchedState:
        """The state that is kept at a path; raises what `LmdbState` raises."""

    def clock(self, previous: ClockEvidence | None = None) -> JudgedClock:
        """A clock, judged by the evidence that the last life left."""

    def executor(self, name: str, tell: Tell) -> OwnExecutor:
        """An executor whose results are given to ``tell``, on the running loop."""

    def secret(self, config: Config) -> Secret:
        """The cluster's secret; raises what `open_secret` raises."""

    def place(self, folder: str) -> int:
        """See delayd.machine.identity."""

    def rest(self) -> None:
        """Leave the disk to others for a moment; called by jobs of an executor."""


class RealMachine:
    """The machine that this process runs on."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """See Machine."""
        return uvloop.new_event_loop()

    def disk(self) -> OwnDisk:
        """See Machine."""
        return RealDisk()

    def state(self, path: str) -> WatchedState:
        """See Machine."""
        return LmdbState(path)

    def clock(self, previous: ClockEvidence | None = None) -> JudgedClock:
        """See Machine."""
        return SystemClock(previous)

    def executor(self, name: str, tell: Tell) -> OwnExecutor:
        """See Machine."""
        return ThreadExecutor(name, asyncio.get_running_loop(), tell)

    def secret(self, config: Config) -> Secret:
        """See Machine."""
        return open_secret(config.data, config.secret_file)

    def place(self, folder: str) -> int:
        """See Machine."""
        return place_of(folder)

    def rest(self) -> None:
        """See Machine."""
        time.sleep(REST_S)


REAL_MACHINE = RealMachine()


ROLES = {FileKind.MESSAGE: "delay", FileKind.REALTIME: "realtime"}
"""Whose message log the files of a kind are."""
SERVER_PREFIX = b"server/"  # `<role>/<u64 log_id>` {host, port, epoch, pid, place} of a server that has registered.


def check_role(disk: Disk, folder: str, role: str) -> None:
    """Raise BadSetting when a folder is that of a server of another role, by the first file of its message log."""
    try:
        path = next((f"{folder}/message/{name}" for name in list_named(disk, f"{folder}/message")), "")
        file = open_named(disk, path) if path else None
    except (DataError, FileNotFoundError):
        return  # What is wrong with the log is said when it is opened.
    if file is None:
        return
    try:
        kind = kind_of_file(file.pread(FILE_HEADER_BYTES, 0))
    except DataError:
        return
    finally:
        file.close()
    owner = next((owner for own, owner in ROLES.items() if own == kind), role)
    if owner != role:
        raise _put_here(folder, owner, role)


def check_not_metas(state: State, folder: str, role: str) -> None:
    """Raise BadSetting when a folder is meta's, which has no logs, by what its state holds."""
    if state.scan(SERVER_PREFIX):
        raise _put_here(folder, "meta", role)


def _put_here(folder: str, owner: str, role: str) -> BadSetting:
    return BadSetting(
        f"{folder} is the folder of a {owner} server, and this is a {role} server: somebody has put it here; put"
        " each folder back in its place before you start a server",
        setting="data",
    )


M_TRIM_THRESHOLD = -1  # Numbers of mallopt(3).
M_MMAP_THRESHOLD = -3

MMAP_BYTES = 4 << 20  # A frame of 8,000 rows has 2 MB.
# Free memory that stays at the end of a heap: enough for some frames, or each of them would grow the heap anew.
TRIM_BYTES = 16 << 20


def bound_heap() -> None:
    """Fix the limits, for the whole process; nothing happens where the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def give_back() -> None:
    """Give the pages of all free blocks back to the system, for the whole process. It takes a millisecond or two."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
