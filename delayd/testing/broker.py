"""In-memory broker: the servers in a test, without files and sockets, and with a clock that the test moves.

The servers are the real ones, on a disk in memory: what a test sees of them is what a cluster does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import datetime
from typing import Any, Self, TypeVar

from delayd.batch.names import is_reserved
from delayd.client.admin import Letter
from delayd.client.asking.walking import PendingMessage
from delayd.client.instants import set_clock
from delayd.client.limits import check_subject
from delayd.embedded import Embedded
from delayd.errors import AlreadyClosed, BadRequest
from delayd.machine.clock import ClockEvidence, JudgedClock
from delayd.machine.executor import Done, Priority, Tell
from delayd.machine.state import StateCopy
from delayd.net.machine import Config
from delayd.reading.find import FileFinder, FoundRow, Search, WantedMessages
from delayd.secret import SECRET_BYTES, Secret
from delayd.testing.broker_clock import BrokerClock, ServersLoop
from delayd.testing.disk import MemoryDisk
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState

PATH = "/in-memory"  # On the disk in memory.
SEGMENT_BYTES = 4 << 20  # A log that a test writes is short.
PLACE = 1  # No directory is copied or moved here.

R = TypeVar("R")


class InMemoryBroker(Embedded):
    """Servers in memory. Use it with ``with``, or close it; its clients are made as those of `delayd.open`.

    Example::

        with InMemoryBroker() as broker:
            with broker.producer() as producer, broker.consumer("orders.cancel", "billing") as consumer:
                producer.send("orders.cancel", b"42", delay=timedelta(days=30))
                broker.clock.advance(timedelta(days=30))
                message, = consumer.pull()
                message.ack()

    Args:
        start: what the clock shows at first; without it this machine's time, or the time that freezegun has frozen.
        tick: whether the clock also goes on by itself, as fast as this machine's. By default it stands still until it
            is moved.
        settings: of the delay and the realtime server, by their names in docs/operations.md.
    """

    def __init__(self, *, start: datetime | None = None, tick: bool = False, **settings: Any) -> None:
        self.clock = BrokerClock(start, tick=tick)
        machine = self._in_memory = BrokerMachine(self.clock)
        super().__init__(PATH, {"segment_bytes": SEGMENT_BYTES, **settings}, machine)
        self._forget_clock = set_clock(self._host, self.clock)
        self.clock.begin(self._thread, self)

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(now={self.clock.now.isoformat()}{', closed' if self._closed else ''})"

    def close(self) -> None:
        """End the servers; what they hold is gone. A second close does nothing."""
        if not self._closed:
            self._forget_clock()
            self.clock.end()
        super().close()

    @property
    def secret(self) -> Secret:
        """What lets a caller decide what an operator does."""
        return self._secret

    def sent(self, subject: str | None = None) -> list[FoundRow]:
        """All messages that were sent so far, with what became of each; of one subject, or of all.

        Example::

            (message,) = broker.sent("orders.remind")
            assert (message.key, message.state) == ("order-42", "pending")

        They come hour by hour of the instant at which they are due. The body of a message is None when it was delivered
        before its hour was filed, because no server keeps it then.
        """
        name = None if subject is None else check_subject(subject)
        wanted = WantedMessages(None, None, name, None, None, (), None, ())
        rows = [
            row
            for found in FileFinder(self._in_memory.disk(), PATH, Search(wanted, True)).found()
            for row in found.rows
        ]
        # What servers made of a message, such as its retries, was not sent.
        return [row for row in rows if not row.origin_sequence and not is_reserved(row.subject)]

    def pending(self, subject: str) -> list[PendingMessage]:
        """The pending messages of a subject, with headers and bodies."""
        with self.producer() as producer:
            return [message for page in producer.pending(subject, contents=True) for message in page]

    def dead(self, subject: str, group: str) -> list[Letter]:
        """The dead letters of a group."""
        with self.admin() as admin:
            return [letter for page in admin.dead_letters(subject, group) for letter in page]

    # For the clock, on the servers' loop.

    def look(self, moved_ms: int) -> None:
        """Do what is due by now: the clock has been moved by so much."""
        for service in self._services:
            service.look(moved_ms)  # type: ignore[attr-defined]

    def next_stop_ms(self) -> int | None:
        """The next instant at which something may happen by itself; None when nothing is known of one."""
        if not self._services:
            raise AlreadyClosed(f"{self!r} was closed while its clock moved")
        _, realtime, delay = self._services
        due_ms, offer_ms = delay.next_stop_ms(), realtime.next_stop_ms()  # type: ignore[attr-defined]
        if offer_ms is not None:
            # The realtime server counts by the monotonic clock.
            offer_ms += self.clock.time.now_ms - self.clock.time.lease_ms
        return min((stop_ms for stop_ms in (due_ms, offer_ms) if stop_ms is not None), default=None)

    @property
    def recurs(self) -> bool:
        """Whether there may be recurring schedules."""
        if not self._services:
            return False
        _, _, delay = self._services
        return delay.recurs  # type: ignore[attr-defined,no-any-return]

    @property
    def writes(self) -> int:
        """How often the servers have written: a send, a hand-out or a word about a message is always written."""
        return self._in_memory.disk().writes


class BrokerMachine:
    """A `Machine` of delayd.net.machine: all of it runs on the loop of the servers, so nothing needs a lock."""

    def __init__(self, clock: BrokerClock) -> None:
        self._clock = clock
        self._disk = BrokerDisk()
        self._secret = Secret(os.urandom(SECRET_BYTES), "memory")

    def loop(self) -> ServersLoop:
        """See Machine."""
        return self._clock.loop

    def disk(self) -> BrokerDisk:
        """See Machine."""
        return self._disk

    def state(self, path: str) -> BrokerState:
        """See Machine."""
        return BrokerState()

    def clock(self, previous: ClockEvidence | None = None) -> JudgedClock:
        """See Machine."""
        return JudgedClock(self._clock.time.sources(), previous)

    def executor(self, name: str, tell: Tell) -> LoopExecutor:
        """See Machine."""
        return LoopExecutor()

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


class LoopExecutor(StepExecutor):
    """Runs jobs on the running loop, one a turn, the most urgent first."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()

    def submit(
        self, work: Callable[[], R], done: Callable[[Done[R]], None], priority: Priority = Priority.NORMAL
    ) -> None:
        """Queue ``work`` for the loop."""
        super().submit(work, done, priority)
        self._loop.call_soon(self.step)
