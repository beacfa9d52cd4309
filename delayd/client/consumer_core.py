"""What the asynchronous and the blocking consumer share: pulls, what was pulled ahead, and acknowledgements.

Invariant: a message whose lease is over is not handed out, for the server gives it to somebody else; what was pulled
and not handed out is given back at the close.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

from delayd.batch import BatchKind, parse
from delayd.client.acks import AckLane, Handles, raise_first
from delayd.client.arguments import TIMEOUT_MS
from delayd.client.instants import monotonic_s, monotonic_us
from delayd.client.limits import (
    TIMEOUT_MS_MAX,
    TIMEOUT_MS_MIN,
    check_group,
    check_subject,
    need_ms,
    need_timedelta,
    need_whole,
)
from delayd.client.link import Link
from delayd.client.message import Part, Pulled
from delayd.client.meta import MetaView
from delayd.client.pull_lane import PullLane
from delayd.errors import (
    AlreadyClosed,
    BadRequest,
    BadSetting,
    DelaydError,
    ServerUnavailable,
)
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import PART_MOST, RequestType, need_instant, need_rows, need_u64

LEASE = timedelta(seconds=60)
MESSAGES_MAX = 500  # Pulled at once, unless the caller says otherwise: enough to make the way to the server cheap.
PULL_BYTES_MAX = 16 << 20  # Of one answer.
POLL_MS = 30_000  # A long poll, for each costs both sides a frame; the close ends it with its connection.
WAIT = timedelta(seconds=5)

_MS = timedelta(milliseconds=1)
_SECOND = timedelta(seconds=1)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """How a consumer behaves; a named error when a value is wrong."""

    subject: str
    group: str
    lease: timedelta = LEASE
    prefetch: bool = True
    max_messages: int = MESSAGES_MAX
    timeout_ms: float = TIMEOUT_MS

    def __post_init__(self) -> None:
        check_subject(self.subject)
        check_group(self.group)
        if need_timedelta("lease", self.lease, BadSetting) < timedelta(seconds=0.1):
            raise BadSetting(f"lease is {self.lease} and must be at least 0.1 s")
        need_whole("max_messages", self.max_messages, 1, BadSetting)
        need_ms("timeout_ms", self.timeout_ms, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)

    def most(self, max_messages: int | None) -> int:
        """How many messages one pull may return."""
        if max_messages is None:
            return self.max_messages
        return need_whole("max_messages", max_messages, 1)


class ConsumerCore:
    """Made inside the running loop, all of it belongs to that loop's thread."""

    def __init__(self, address: str, settings: ConsumerSettings) -> None:
        self.pid = os.getpid()
        self.closed = False
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._meta = MetaView(address)
        self._link: Link | None = None
        self._routing = asyncio.Lock()
        self._ready: deque[Pulled] = deque()
        self._failure: DelaydError | None = None  # Of a PULL that nobody waited for; the next pull raises it.
        self._waiters: list[asyncio.Future[bool]] = []
        names: Head = {
            "subject": settings.subject,
            "group": settings.group,
            "max_bytes": PULL_BYTES_MAX,
            "lease_ms": settings.lease // _MS,
            "consumer": f"{socket.gethostname()}:{os.getpid()}",
        }
        self._pulls = PullLane(names, self._standing, self._connection, settings.timeout_ms, self._pulled)
        self._failures: deque[DelaydError] = deque()  # Of acknowledgements that nobody waited for.
        self._acks, self._nacks = (
            AckLane(kind, settings.subject, settings.group, self._connection, settings.timeout_ms, self._failures)
            for kind in (RequestType.ACK, RequestType.NACK)
        )

    def check(self) -> None:
        """AlreadyClosed after the close, and what failed while nobody waited; from any thread."""
        if self.closed:
            raise AlreadyClosed("this consumer was closed")
        if self._failures:
            raise_first(self._failures)

    async def pull(self, most: int, wait: timedelta) -> Pulled | None:
        """The next messages, or None when none came in time; see AsyncConsumer."""
        self.check()
        until = self._loop.time() + max(need_timedelta("wait", wait) / _SECOND, 0)
        while True:
            pulled = self._take(most)
            if pulled is not None:
                if self._settings.prefetch and not self._ready:
                    # Who asks for more than the setting gets as much ahead, too, or stored batches would be cut.
                    self._start_pull(max(most, self._settings.max_messages), POLL_MS)
                return pulled
            self._raise_failed_pull()
            left_s = until - self._loop.time()
            if not self._pulls.under_way:
                if left_s < 0:
                    return None
                self._start_pull(most, POLL_MS if self._settings.prefetch else min(int(left_s * 1000), POLL_MS))
            # Without prefetch nothing may come when nobody waits for it, so the server's own wait decides.
            if not await self._wait_for_pull(max(left_s, 0) if self._settings.prefetch else None):
                return None
            self.check()

    def settle(self, handles: Handles, *, back: bool) -> None:
        """Acknowledge, or give back, soon; what fails is raised by a later call."""
        (self._nacks if back else self._acks).give(handles)

    def settle_and_wait(self, handles: Handles, *, back: bool) -> asyncio.Future[None]:
        """Acknowledge, or give back, durably."""
        self.check()
        return (self._nacks if back else self._acks).give_and_wait(handles)

    async def flush(self) -> None:
        """Wait until what was acknowledged or given back is durable; raises what failed since the last call."""
        await self._acks.flush()
        await self._nacks.flush()
        if self._failures:
            raise_first(self._failures)

    async def close(self, not_handled: Handles) -> None:
        """Flush, give back what was not handed out, and disconnect; raises what failed since the last call."""
        if self.closed:
            return
        self.closed = True
        try:
            await self._acks.flush()
            await self._end_pull()
            back = [*not_handled, *(handle for pulled in self._ready for handle in pulled.handles)]
            self._ready.clear()
            await self._nacks.flush()
            if back:
                await self._give_back(back)
        finally:
            if self._link is not None:
                await self._link.close()
            await self._meta.close()
        if self._failures:
            raise_first(self._failures)

    async def _give_back(self, handles: Handles) -> None:
        try:
            await self._nacks.give_and_wait(handles)
        except DelaydError as error:
            # Nobody can do anything about it, and the server gives them to others when their lease ends.
            log.warning("not_given_back subject=%s code=%s", self._settings.subject, error.code)

    def _take(self, most: int) -> Pulled | None:
        while self._ready:
            pulled = self._ready.popleft()
            if monotonic_s() < pulled.lease_ends:
                if pulled.message_count <= most:
                    return pulled
                first, rest = pulled.cut(most)
                self._ready.appendleft(rest)
                return first
            log.warning("lease_ended_unused subject=%s messages=%d", pulled.subject, pulled.message_count)
        return None

    def _start_pull(self, most: int, wait_ms: int) -> None:
        if not self._pulls.under_way:
            self._pulls.start(most, wait_ms)

    async def _end_pull(self) -> None:
        """End the pull under way: what is given back after that must not be its answer."""
        self._wake(AlreadyClosed("this consumer was closed meanwhile"))
        if await self._pulls.end() and self._link is not None:
            await self._link.disconnect()

    def _pulled(self, answer: Frame | DelaydError, asked_us: int) -> None:
        """The PULL under way has ended."""
        failure = answer if isinstance(answer, DelaydError) else self._received(answer, asked_us)
        if failure is not None and not self._waiters:
            self._failure = failure
        self._wake(failure)

    def _received(self, answer: Frame, asked_us: int) -> DelaydError | None:
        """Take an answer in; what is wrong with it."""
        try:
            self._receive(answer, asked_us)
        except DelaydError as error:
            return error
        return None

    def _wake(self, failure: DelaydError | None) -> None:
        """Whoever waits for the PULL under way looks again, or raises."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(True)
            else:
                waiter.set_exception(failure)

    async def _wait_for_pull(self, left_s: float | None) -> bool:
        """Wait for the PULL under way; whether it has ended in time. Raises why it failed."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.append(waiter)
        limit = None if left_s is None else self._loop.call_later(left_s, _give_up, waiter)
        try:
            return await waiter
        finally:
            if limit is not None:
                limit.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _raise_failed_pull(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _receive(self, answer: Frame, asked_us: int) -> None:
        assert self._link is not None, "an answer came without a connection"
        # The likely reading is off by up to half a round trip; the answer was not received before it was given.
        answered_at_ms = need_instant(answer.head, "now_ms")
        now_us = monotonic_us()
        on_the_way_ms = max(0, self._link.clock.likely_ms(now_us) - answered_at_ms)
        # Nor was it on the way for longer than it was waited for: then the server's clock was set back meanwhile.
        on_the_way_ms = min(on_the_way_ms, (now_us - asked_us) // 1000)
        received_at_ms = answered_at_ms + on_the_way_ms
        lease_ends = monotonic_s() + self._settings.lease / _SECOND - on_the_way_ms / 1000
        parts: list[Part] = []
        position = 0
        for pull_first, _, count, attempt in need_rows(answer.head, "parts", 4, PART_MOST):
            batch = parse(answer.body, position)
            batch.verify()
            position += batch.total_bytes
            if batch.kind != BatchKind.DISPATCH or batch.count != count:
                raise BadRequest(f"a part of {count} messages came with a batch of {batch.count}, kind {batch.kind}")
            parts.append(Part(batch, range(count), pull_first, attempt))
        if parts:
            incarnation = need_u64(answer.head, "incarnation")
            self._ready.append(Pulled(self._settings.subject, incarnation, tuple(parts), received_at_ms, lease_ends))

    def _standing(self) -> Connection | None:
        return None if self._link is None else self._link.standing

    async def _connection(self) -> Connection:
        standing = self._standing()
        if standing is not None:
            return standing
        async with self._routing:
            if self._link is None:
                await self._route()
            assert self._link is not None, "a route gives a link or raises"
            try:
                return await self._link.connection()
            except ServerUnavailable as unavailable:
                try:
                    await self._route()
                except DelaydError as error:
                    # Without meta the server that is known is tried again.
                    log.debug("route_unknown subject=%s code=%s", self._settings.subject, error.code)
                raise unavailable

    async def _route(self) -> None:
        server = await self._meta.route(self._settings.subject)
        if self._link is None:
            self._link = Link(server.host, server.port, server.log_id)
        elif self._link.log_id == server.log_id:
            self._link.move(server.host, server.port)
        else:
            await self._link.close()
            self._link = Link(server.host, server.port, server.log_id)


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
