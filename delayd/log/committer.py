"""Committer: the group commit of each log. What arrives while the disk is busy becomes the next group.

::

    idle ── commit ──▶ closing ──▶ writing ── written ──▶ syncing ── fsynced ──▶ told, in the order of the log ──▶ idle
                                   ▲     │                    └── the fsync failed ──┐
                         after 1 s │     ├── no space ──▶ full: the same group waits (rule L8)
                                   └─────┼────────────────┘                          │
                                         └── a failed write could not be cut back ───┴──▶ failed: the server ends
                                                                                          (rules L1, L3)

An example, on a disk whose fsync takes 4 ms. Frame A arrives at 0 ms and is written at once, as a group of its own. B
and C arrive at 1 and 3 ms and wait. At 4 ms A is durable: first B and C are closed as one group and given to the
thread, then A is told, so that the disk and the loop work at the same time. At 8 ms B is told, then C. If the write of
B and C finds no space, the log is cut back to the end of A, neither of them is told anything, and D, which arrives
meanwhile, waits behind them. A second later the same group is written again.

A log whose fsync is a job of its own has two ends, a written one and a durable one. The thread writes a group, tells
the loop, and goes on to the fsync without waiting for the loop: in the example A is written at 0.1 ms, and durable at
4. Both ends run on the thread, so a disk on which a write takes long never stops the loop.

Invariants: one group is under way at a time; nothing is told before the fsync of its group has returned, but for what
`Committer._written` may say before (rules L1, L2). `Committer._durable` is the one place that says "durable".
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from delayd.errors import DataError, DiskFull, ServerStopped, Shortage
from delayd.machine.clock import Clock, stopwatch_ns
from delayd.machine.executor import Done, Executor
from delayd.machine.histogram import Histogram

G = TypeVar("G")
W = TypeVar("W")

log = logging.getLogger(__name__)


class Committer(ABC, Generic[G, W]):
    """The one writer of a log, and its own loop's: a subclass says what a group is, how it is written, and who is told.

    What waits for space was told to nobody, so a stop may leave it. The logs of sends and of handovers hold up no stop
    then; outcomes do, since a stop writes them all, until `delayd.net.home.CORE_STOP_MS` ends it. After a close of its
    executor nothing is told any more.
    """

    def __init__(self, name: str, executor: Executor, clock: Clock) -> None:
        self.on_failure: Callable[[BaseException], None] = _raise  # Called with the error that ends the server.
        self.name = name
        self._executor = executor
        self._clock = clock
        self._busy = False  # Whether a group is being closed or written, or waits for space.
        self._asked = False  # Whether something waits that `_close` has not seen.
        self._under_way: G | None = None
        self._unsynced: tuple[G, Done[W]] | None = None  # The group under way, once it is written.
        self._full = False  # Whether the last try found no space.
        self._untold: deque[tuple[G, W]] = deque()
        self._telling = False
        # How long each group took, in ns, from when the thread was given it until the loop heard of its fsync.
        self.took = Histogram()
        self._given_ns = 0

    @abstractmethod
    def _close(self) -> G | None:
        """Make a group of what waits; None: there is nothing to write now. For what does not fit call `commit`."""

    @abstractmethod
    def _jobs(self, group: G) -> tuple[Callable[[], W], Callable[[], object] | None]:
        """The job that appends a group, or leaves nothing of it in the log, and the one that fsyncs it; None: the first
        one does that, too.
        """

    def _written(self, group: G, written: W) -> None:
        """A group is written and not durable yet; called only where an fsync has a job of its own."""

    def _note(self, group: G, written: W) -> None:
        """Let a durable group take effect, as far as the next one must be closed with it."""

    @abstractmethod
    def _durable(self, group: G, written: W) -> None:
        """Tell everybody who waits for a group that it is durable; the next one may be under way already."""

    def _no_space(self, group: G, error: DiskFull) -> G | None:
        """Nothing of a group is in the log: return it and have `retry` called after a while, or refuse it."""
        raise error

    @property
    def idle(self) -> bool:
        """Whether no group is under way, and all who waited for one were told."""
        return not (self._busy or self._untold)

    def commit(self) -> None:
        """Begin to write what waits, or do so as soon as the group under way is durable."""
        self._asked = True
        if self._busy:
            return
        self._busy = True
        group = self._under_way  # One that found no space goes first.
        # Whoever is told something while a group is closed may bring more: that belongs to the next group.
        while self._asked and group is None:
            self._asked = False
            group = self._under_way = self._close()
        if group is None:
            self._busy = False
            return
        write, sync = self._jobs(group)
        self._given_ns = stopwatch_ns()
        if sync is None:
            self._executor.submit(write, partial(self._finished, group))
        else:
            self._executor.submit(write, partial(self._wrote, group))
            self._executor.submit(sync, self._synced)

    def retry(self) -> None:
        """Write the group again that found no space."""
        if self._under_way is not None:
            self._busy = False
            self.commit()

    def _wrote(self, group: G, done: Done[W]) -> None:
        try:
            written = done.result()
        except (ServerStopped, OSError, DataError):
            self._finished(group, done)
        else:
            self._unsynced = (group, done)
            self._written(group, written)

    def _synced(self, done: Done[object]) -> None:
        unsynced, self._unsynced = self._unsynced, None
        try:
            done.result()
        except (ServerStopped, OSError, DataError) as error:
            # Rule L1 knows no exception: the server ends also when the group found no space, and nobody waits for this.
            self._fail(error)
            return
        if unsynced is not None:
            self._finished(*unsynced)

    def _finished(self, group: G, done: Done[W]) -> None:
        try:
            written = done.result()
        except DiskFull as error:
            self._under_way, self._full = self._no_space(group, error), True
            self._busy = self._under_way is not None
            if self._asked and not self._busy:
                self.commit()
            return
        except (ServerStopped, OSError, DataError) as error:
            self._fail(error)
            return
        self.took.add(stopwatch_ns() - self._given_ns)
        self._note(group, written)
        self._busy = self._full = False
        self._under_way = None
        self._untold.append((group, written))
        # The thread gets the next group before this one is told, which takes about as long as a write.
        if self._asked:
            self.commit()
        if not self._telling:
            self._telling = True
            while self._untold:
                self._durable(*self._untold.popleft())
            self._telling = False

    def _fail(self, error: Exception) -> None:
        # After a shortage another start may find memory and descriptors.
        if isinstance(error, ServerStopped | Shortage):
            self.on_failure(error)
            return
        what = f"the {self.name} can't be written ({error}); check the disk, then restart"
        self.on_failure(ServerStopped(what))


def _raise(error: BaseException) -> None:
    raise error
