"""Machine: what a server has from the machine that it runs on: disk, state, clocks, threads, and its cluster's secret.

Invariant: a server asks its machine for these and nobody else, so that one machine in memory carries all of it
(`delayd.testing.InMemoryBroker`).
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import uvloop

from delayd.config import DelayConfig, MetaConfig, RealtimeConfig
from delayd.machine.clock import ClockEvidence, JudgedClock, SystemClock
from delayd.machine.disk import Disk, RealDisk
from delayd.machine.executor import Executor, Post, ThreadExecutor
from delayd.machine.identity import place_of
from delayd.machine.state import LmdbState, State, StateCopy
from delayd.secret import Secret, open_secret

REST_S = 0.02  # Pause between two parts of a checkpoint, so that group commits get their turn at the disk.

Config = DelayConfig | MetaConfig | RealtimeConfig


class OwnDisk(Disk, Protocol):
    """A disk that one server has opened."""

    def close(self) -> None:
        """End the use of it."""


class KeptState(State, Protocol):
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

    def state(self, path: str) -> KeptState:
        """The state that is kept at a path; raises what `LmdbState` raises."""

    def clock(self, previous: ClockEvidence | None = None) -> JudgedClock:
        """A clock, judged by the evidence that the last life left."""

    def executor(self, name: str, post: Post) -> OwnExecutor:
        """An executor whose results are given to ``post``."""

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

    def state(self, path: str) -> KeptState:
        """See Machine."""
        return LmdbState(path)

    def clock(self, previous: ClockEvidence | None = None) -> JudgedClock:
        """See Machine."""
        return SystemClock(previous)

    def executor(self, name: str, post: Post) -> OwnExecutor:
        """See Machine."""
        return ThreadExecutor(name, post)

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
