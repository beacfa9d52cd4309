"""In-memory broker: the servers in a test, without files and sockets, and with a clock that the test moves.

The servers are the real ones, on a disk in memory: what a test sees of them is what a cluster does.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from delayd.client.admin.letters import Letter
from delayd.client.home_clock import set_clock
from delayd.client.limits import check_subject
from delayd.client.sending.pending import PendingMessage
from delayd.embedded import Embedded
from delayd.errors import AlreadyClosed
from delayd.net import inside
from delayd.reading.find import Finder, FoundRow, Search
from delayd.reading.matching import Wanted
from delayd.retry_subject import is_reserved
from delayd.testing.broker_clock import BrokerClock
from delayd.testing.broker_machine import BrokerMachine

if TYPE_CHECKING:
    from delayd.delay.server import DelayServer
    from realtime.server import RealtimeServer

PATH = "/in-memory"  # On the disk in memory.
SEGMENT_BYTES = 4 << 20  # A log that a test writes is short.


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
        machine = self._in_memory = BrokerMachine(self.clock.time)
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

    def sent(self, subject: str | None = None) -> list[FoundRow]:
        """All messages that were sent so far, with what became of each; of one subject, or of all.

        Example::

            (message,) = broker.sent("orders.remind")
            assert (message.key, message.state) == ("order-42", "pending")

        They come hour by hour of the instant at which they are due. The body of a message is None when it was delivered
        before its hour was filed, because no server keeps it then.
        """
        name = None if subject is None else check_subject(subject)
        wanted = Wanted(None, None, name, None, None, (), None, ())
        rows = [
            row for found in Finder(self._in_memory.disk(), PATH, Search(wanted, True)).found() for row in found.rows
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
        """See Stepped of delayd.testing.broker_clock."""
        for service in self._services:
            service.look(moved_ms)  # type: ignore[attr-defined]

    def next_stop_ms(self) -> int | None:
        """See Stepped."""
        delay, realtime = self._both
        due_ms, offer_ms = delay.next_stop_ms(), realtime.next_stop_ms()
        if offer_ms is None:
            return due_ms
        # The realtime server counts by the monotonic clock.
        offer_ms += self.clock.time.now_ms - self.clock.time.lease_ms
        return offer_ms if due_ms is None else min(due_ms, offer_ms)

    def work(self) -> tuple[int, int]:
        """See Stepped."""
        written, unread = inside.traffic(self._host)
        executors = self._in_memory.executors
        done = sum(executor.jobs_done for executor in executors)
        left = sum(not executor.is_idle for executor in executors)
        _, realtime = self._both
        return written + done, left + unread + (not realtime.is_settled)

    def words(self) -> int:
        """See Stepped."""
        delay, realtime = self._both
        return delay.words + realtime.words

    @property
    def _both(self) -> tuple[DelayServer, RealtimeServer]:
        if not self._services:
            raise AlreadyClosed(f"{self!r} was closed while its clock moved")
        _, realtime, delay = self._services
        return delay, realtime  # type: ignore[return-value]
