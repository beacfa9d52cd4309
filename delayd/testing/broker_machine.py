"""Broker machine: a machine in memory for the servers of one process, with a clock that a test moves.

Invariant: everything runs on the loop of the servers, so nothing needs a lock, and the loop knows when nothing is left
to do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from delayd.clock import ClockEvidence, ClockSources, JudgedClock
from delayd.errors import BadRequest
from delayd.executor import Done, Post, Priority, Waiting, run
from delayd.net.machine import Config
from delayd.secret import SECRET_BYTES, Secret
from delayd.state import StateCopy
from delayd.testing.disk import MemoryDisk
from delayd.testing.state import MemoryState

PLACE = 1  # No directory is copied or moved here.

_NS_PER_MS = 1_000_000

R = TypeVar("R")


class MovedTime:
    """The time of one broker: it stands still, or ticks on as this machine's does, and goes on when it is moved.

    Only due instants stand still: waits and leases are counted by this machine's monotonic clock, and by the moves.
    """

    def __init__(self, start_ms: int, *, tick: bool) -> None:
        self._start_ms = start_ms
        self._tick = tick
        self._moved_ms = 0
        self._began_ms = self._monotonic_ms()

    @property
    def now_ms(self) -> int:
        """The wall clock, in ms since the epoch."""
        ticked_ms = self._monotonic_ms() - self._began_ms if self._tick else 0
        return self._start_ms + self._moved_ms + ticked_ms

    @property
    def lease_ms(self) -> int:
        """The monotonic clock."""
        return self._monotonic_ms() + self._moved_ms

    def move(self, ms: int) -> None:
        """Let so much time pass."""
        self._moved_ms += ms

    def sources(self) -> ClockSources:
        """These clocks, for a server."""
        return ClockSources(
            wall_ms=lambda: self.now_ms,
            boottime_ms=lambda: self.now_ms,
            monotonic_ms=lambda: self.lease_ms,
            boot_id=lambda: "in-memory",
        )

    def _monotonic_ms(self) -> int:
        # By `clock_gettime`, which a test that freezes time does not freeze: waits must end.
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // _NS_PER_MS


class BrokerMachine:
    """A `Machine` of delayd.net.machine, for servers on one loop."""

    def __init__(self, moved: MovedTime) -> None:
        self.executors: list[LoopExecutor] = []
        self._time = moved
        self._disk = BrokerDisk()
        self._secret = Secret(os.urandom(SECRET_BYTES), "memory")

    def disk(self) -> BrokerDisk:
        """See Machine."""
        return self._disk

    def state(self, path: str) -> BrokerState:
        """See Machine."""
        return BrokerState()

    def clock(self, previous: ClockEvidence | None = None) -> JudgedClock:
        """See Machine."""
        return JudgedClock(self._time.sources(), previous)

    def executor(self, name: str, post: Post) -> LoopExecutor:
        """See Machine."""
        made = LoopExecutor(post)
        self.executors.append(made)
        return made

    def secret(self, config: Config) -> Secret:
        """See Machine."""
        return self._secret

    def place(self, folder: str) -> int:
        """See Machine."""
        return PLACE

    def rest(self) -> None:
        """See Machine."""


class BrokerDisk(MemoryDisk):
    """A memory disk without faults, which keeps no list of what was done."""

    def count(self, operation: str) -> None:
        """Nothing is replayed."""


class BrokerState(MemoryState):
    """A state that nobody can remove or copy."""

    def look(self) -> None:
        """There is no file."""

    def begin_copy(self) -> StateCopy:
        """BadRequest: a backup copies files."""
        raise BadRequest("messages in memory can't be backed up; open a directory with delayd.open")


class LoopExecutor:
    """Runs jobs on the running loop, one a turn, the most urgent first."""

    def __init__(self, post: Post) -> None:
        self.jobs_done = 0
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._waiting = Waiting()

    @property
    def is_idle(self) -> bool:
        """Whether no job waits."""
        return not len(self._waiting)

    def submit(
        self, work: Callable[[], R], done: Callable[[Done[R]], None], priority: Priority = Priority.NORMAL
    ) -> None:
        """Queue ``work`` for the loop."""
        self._waiting.jobs[priority].append(partial(_finish, work, done))
        self._loop.call_soon(self._run_one)

    def give_way(self) -> None:
        """Run the waiting jobs that are more urgent than the one under way."""
        while self._waiting.run_one(self._post):
            pass

    def close(self) -> None:
        """Drop the queued jobs."""
        self._waiting.drop()

    def _run_one(self) -> None:
        # The job of this call may have run inside another one.
        self._waiting.run_one(self._post)
        self.jobs_done += 1


def _finish(work: Callable[[], R], done: Callable[[Done[R]], None]) -> Callable[[], None]:
    return partial(done, run(work, BaseException))
