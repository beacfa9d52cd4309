"""Consumer core: the part that the asynchronous and the blocking consumer share: pulls, messages fetched ahead, and
acknowledgements.

Invariant: a message whose lease is over is not handed out, because the server gives it to another consumer. Messages
that were fetched and not handed out go back uncounted long before that: when the caller has stalled, when other
consumers wait for them, and at the close (rule Q4).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Generic

from delayd.batch import BatchKind, parse
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
from delayd.client.link import ServerLink
from delayd.client.loop_thread import Work
from delayd.client.meta import MetaView, ServerAddress
from delayd.client.own_loop import check_loop, own_loop
from delayd.client.pulling.acks import AckLane, Handles, raise_first
from delayd.client.pulling.message import Pulled, PulledPart
from delayd.client.pulling.pace import Pace
from delayd.client.pulling.pull_lane import PullLane
from delayd.client.pulling.stock import Batch, Stock
from delayd.client.retry import Backoff
from delayd.client.sending.arguments import TIMEOUT_MS
from delayd.errors import (
    AlreadyClosed,
    BadArgument,
    BadRequest,
    BadSetting,
    DelaydError,
    RequestFailed,
    RetryLater,
    ServerUnavailable,
)
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head
from delayd.wire.requests import PART_MOST, RequestType, need_instant, need_int, need_rows, need_u64

LEASE = timedelta(seconds=60)
# The most that one pull gets, unless the caller says otherwise: enough to make one round trip cheap for each message.
MESSAGES_MAX = 500
SHELVES = 2  # Up to two of the largest fetches are held ahead: one is worked off while the next one travels.
# Looking after each message would cost a fast handler more than the hand-out does; so once in this many.
LOOK_EVERY = 8
PULL_BYTES_MAX = 16 << 20  # One answer has at most this many bytes.
POLL_MS = 30_000  # The wait of a long poll: each costs both sides a frame. The close ends it with its connection.
ROUTE_LOOK_S = 600.0  # Between looks at the route while no message has come; meta keeps it for an hour.
# The wait of a fetch ahead: a caller that stalls for longer should not get messages that other consumers wait for.
AHEAD_POLL_MS = 1_000
SLACK_S = 0.05  # An answer at the end of a pull's time needs a while to arrive.
ANSWER_S = 0.5  # How long a server may take to answer a PULL that was ended; after that it counts as away.
SHARE_S = 0.02  # Messages that a caller works off within this are not worth giving to another consumer.
BUSY_S = 0.005  # When a thread is taking something out at this moment, the loop looks again after this.
WAIT = timedelta(seconds=5)

WHAT = "an AsyncConsumer"  # The blocking consumer makes its own loop, so it never has a wrong one.
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
    max_messages: int | None = None  # None: by the pace of the caller, at most MESSAGES_MAX.
    timeout_ms: float = TIMEOUT_MS

    def __post_init__(self) -> None:
        for name, value in (("subject", self.subject), ("group", self.group)):
            if value == "":
                raise BadArgument(
                    f"say which {name} is consumed, such as Consumer(subject='mail.send', group='mailer')"
                )
        check_subject(self.subject)
        check_group(self.group)
        if need_timedelta("lease", self.lease, BadSetting) < timedelta(seconds=0.1):
            raise BadSetting(f"lease is {self.lease} and must be at least 0.1 s")
        if self.max_messages is not None:
            need_whole("max_messages", self.max_messages, 1, BadSetting)
        need_ms("timeout_ms", self.timeout_ms, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX)

    @property
    def most(self) -> int:
        """How many messages one fetch ahead may bring."""
        return MESSAGES_MAX if self.max_messages is None else self.max_messages

    def pulled(self, max_messages: int | None) -> int | None:
        """How many messages a pull may return; None when nobody has named a number."""
        return self.max_messages if max_messages is None else need_whole("max_messages", max_messages, 1)


class ConsumerCore(Generic[Batch]):
    """Made inside the running loop and used on its thread; only `check`, `take_next`, `take` and `put_back` may be
    called elsewhere.

    ``make`` turns pulled messages into the consumer's batch; ``post`` runs work on the loop, from any thread.
    """

    def __init__(
        self, address: str, settings: ConsumerSettings, make: Callable[[Pulled], Batch], post: Callable[[Work], object]
    ) -> None:
        self.pid = os.getpid()
        self.closed = False
        self.subject = settings.subject
        self._settings = settings
        self._post = post
        self._loop = own_loop(WHAT)
        self._meta = MetaView(address)
        self._link: ServerLink | None = None
        self._routing = asyncio.Lock()
        self._routed_at_s = 0.0  # When meta was asked for the route last.
        self._had_messages = False  # Once messages have come the route is used, and meta keeps it.
        self._looking: asyncio.Task[None] | None = None
        lease_s = settings.lease / _SECOND
        self._stock: Stock[Batch] = Stock(make)
        self._pace = Pace(lease_s)
        self._iterates = False
        self._enough = -1  # When only this many messages are left, iteration checks whether to fetch more.
        self._looks = False
        self._watch: asyncio.TimerHandle | None = None  # Set while anything is in stock.
        self._too_late: Handles = []  # Messages that came while the consumer was closed.
        self._failure: DelaydError | None = None  # Why a PULL failed that nobody waited for; the next pull raises it.
        self._waiters: list[asyncio.Future[bool]] = []
        self._giving_back: set[asyncio.Task[None]] = set()
        self._away = False  # Iteration waits for a server, and has logged that.
        self._backoff = Backoff()
        group: Head = {"subject": settings.subject, "group": settings.group}
        names: Head = {
            **group,
            "max_bytes": PULL_BYTES_MAX,
            "lease_ms": settings.lease // _MS,
            "consumer": f"{socket.gethostname()}:{os.getpid()}",
        }
        self._pulls = PullLane(names, self._standing, self._connection, settings.timeout_ms, self._pulled)
        self._failures: deque[DelaydError] = deque()  # Why acknowledgements failed that nobody waited for.
        lane = partial(
            AckLane,
            connection=self._connection,
            timeout_ms=settings.timeout_ms,
            failures=self._failures,
            on_answer=self._heard,
        )
        self._acks, self._nacks = lane(RequestType.ACK, group), lane(RequestType.NACK, group)
        self._returns = lane(RequestType.NACK, {**group, "uncounted": True})

    def check(self) -> None:
        """Raise AlreadyClosed after the close, or what failed while nobody waited; from any thread."""
        if self.closed:
            raise AlreadyClosed("this consumer was closed")
        if self._failures:
            raise_first(self._failures)

    def check_loop(self) -> None:
        """WrongLoop outside of the loop that this core was made in."""
        check_loop(WHAT, self._loop)

    def take_next(self, given: list[tuple[Batch, int]]) -> bool:
        """Add the next message to ``given``; False when none is here. From any thread.

        A caller that can't hand the message on must put it back.
        """
        now = monotonic_s()
        left = self._stock.next(now, given)
        if left < 0:
            self._pace.came_back(now)
            return False
        self._pace.next(now)
        if left <= self._enough and (left < LOOK_EVERY or not left % LOOK_EVERY):
            self._look_soon()
        return True

    def put_back_next(self, given: list[tuple[Batch, int]]) -> None:
        """Take a message back that did not reach its caller: it is the next one again. From any thread."""
        for batch, row in given:
            self._stock.put_back(batch.pulled.cut(row)[1].cut(1)[0], monotonic_s())

    def take(self, most: int | None, given: list[Pulled]) -> bool:
        """As `take_next`, for up to ``most`` messages; None: as many as the pace allows."""
        now = monotonic_s()
        self._pace.came_back(now)
        most = self._size(most)
        if not self._stock.take(most, now, given):
            return False
        self._pace.handed_out(now, given[0].message_count)
        if not self._pulls.under_way:
            target, size = self._ahead_of(most)
            if target >= size:
                self._post(partial(self._fetch_ahead, target, size))
        return True

    def put_back(self, given: list[Pulled]) -> None:
        """As `put_back_next`."""
        for pulled in given:
            self._stock.put_back(pulled, monotonic_s())

    async def more(self, most: int | None, until: float) -> bool:
        """Wait until a message is in stock; False when none came until the instant ``until`` on `monotonic_s`.

        If a caller is cancelled here, messages that arrive go to the next call.
        """
        self.check()
        asked = False
        while not self._stock.count:
            self._raise_failed_pull()
            left_s = until - monotonic_s()
            if not self._pulls.under_way:
                # A pull with no time to wait still gets the messages that the server has now.
                if asked and left_s < 0:
                    return False
                self._pulls.start(self._wanted(most), min(max(int(left_s * 1000), 0), POLL_MS), 0)
            asked = True
            if not self._settings.prefetch:
                # Without prefetch no message may arrive when nobody waits for it, so only the server's own wait counts.
                await self._wait_for_pull(None)
            elif not await self._wait_for_pull(max(left_s, 0) + SLACK_S):
                self._pulls.withdraw()
                if not await self._wait_for_pull(ANSWER_S):
                    return False
            self.check()
        return True

    async def more_to_iterate(self) -> bool:
        """Wait until a message is in stock, however long servers are away; False after the close."""
        self._iterates = True
        while not self.closed:
            try:
                while not self._stock.count and not self.closed:
                    self._raise_failed_pull()
                    if not self._pulls.under_way:
                        self._pulls.start(self._wanted(self._least()), POLL_MS, 0)
                    await self._wait_for_pull(None)
            except AlreadyClosed:
                break
            except (RequestFailed, RetryLater) as error:
                if not self._away:
                    names = (self._settings.subject, self._settings.group)
                    log.warning(
                        "consumer_waits subject=%s group=%s code=%s reason=%r", *names, error.code, error.message
                    )
                self._away = True
                await asyncio.sleep(self._backoff.next_ms() / 1000)
                continue
            return not self.closed
        return False

    def settle(self, handles: Handles, *, back: bool) -> None:
        """Acknowledge, or give back, soon; a later call raises the error if this fails."""
        (self._nacks if back else self._acks).give(handles)

    def settle_and_wait(self, handles: Handles, *, back: bool) -> asyncio.Future[None]:
        """Acknowledge, or give back, durably."""
        self.check()
        return (self._nacks if back else self._acks).give_and_wait(handles)

    async def flush(self) -> None:
        """Wait until all acknowledgements and give-backs are durable; raises errors since the last call."""
        await self._acks.flush()
        await self._nacks.flush()
        if self._failures:
            raise_first(self._failures)

    def leave(self) -> Handles:
        """Hand out nothing more; return the handles that `close` is to give back. From any thread."""
        self.closed = True
        return self._stock.close()

    async def close(self, left: Handles) -> None:
        """Flush, give back messages that were not handed out, and disconnect; raises errors since the last call."""
        if self._watch is not None:
            self._watch.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._wake(AlreadyClosed("this consumer was closed meanwhile"))
        try:
            if await self._pulls.end() and self._link is not None:
                await self._link.disconnect()
            # An answer may have been put in stock while `leave` emptied it.
            self._give_back([*left, *self._too_late, *(self._stock.give_back_older(math.inf) or ())])
            await self._acks.flush()
            await self._nacks.flush()
            if self._giving_back:
                await asyncio.wait(self._giving_back)
        finally:
            if self._link is not None:
                await self._link.close()
            await self._meta.close()
        if self._failures:
            raise_first(self._failures)

    def _size(self, most: int | None) -> int:
        return self._pace.batch(self._settings.most) if most is None else most

    def _ahead_of(self, most: int) -> tuple[int, int]:
        """How many messages may be held ahead of a caller that takes ``most`` at once, and the size of one fetch."""
        if not self._settings.prefetch:
            return -1, most
        target = self._pace.ahead(SHELVES * self._settings.most)
        # At least as much as the caller asks for: a smaller fetch would cut stored batches in two.
        size = max(most, min(self._settings.most, target // SHELVES))
        return (max(target, size) if self._pace.is_back_soon(size) else target), size

    def _least(self) -> int:
        """The least that iteration asks for; without prefetch it is as many as the caller works off soon."""
        return 1 if self._settings.prefetch else max(1, self._pace.ahead(self._settings.most))

    def _wanted(self, most: int | None) -> int:
        """How many messages to ask for when somebody waits: those to be held ahead come with them."""
        return max(self._ahead_of(self._size(most))[1], len(self._waiters))

    def _look_soon(self) -> None:
        """Check soon whether to fetch more: little is left of the first answer in stock, though others may be behind
        it. From any thread.
        """
        if not self._looks and not self._pulls.under_way and self._stock.count <= self._enough:
            try:
                self._looks = True
                self._post(self._look)
            except BaseException:
                # A Ctrl-C came in between: the next message looks again.
                self._looks = False
                raise

    def _look(self) -> None:
        self._looks = False
        target, size = self._ahead_of(1)
        self._enough = target - size
        self._fetch_ahead(target, size)

    def _fetch_ahead(self, target: int, size: int) -> None:
        """Ask for more while a caller works, if few of the messages are left that may be held ahead of it."""
        count = self._stock.count
        if count <= target - size and not self._pulls.under_way and not self.closed:
            # On the server a busy caller comes behind waiting ones, even if it has nothing left.
            self._pulls.start(size, AHEAD_POLL_MS, max(count, 1))

    def _pulled(self, answer: Frame | DelaydError, asked_us: int) -> None:
        """Take the end of the PULL under way."""
        failure = answer if isinstance(answer, DelaydError) else self._received(answer, asked_us)
        if failure is not None and not self._waiters:
            self._failure = failure
        self._wake(failure)

    def _received(self, answer: Frame, asked_us: int) -> DelaydError | None:
        """Take an answer in; return the error if it can't be read."""
        try:
            pulled = self._read(answer, asked_us)
            wanted = _wanted(answer.head)
        except DelaydError as error:
            return error
        self._served()
        self._had_messages = self._had_messages or pulled is not None
        if pulled is None:
            self._keep_route()
        elif self.closed:
            self._too_late += pulled.handles
        else:
            self._pace.fetched()
            self._stock.put(pulled, monotonic_s())
            if self._iterates:
                target, size = self._ahead_of(1)
                self._enough = target - size
            if self._watch is None:
                self._watch = self._loop.call_later(self._pace.hold_s, self._look_after)
        self._spare(wanted)
        return None

    def _keep_route(self) -> None:
        """Nothing came: ask for the route again, because meta forgets a subject without messages that nobody asks for,
        and may route it elsewhere later.
        """
        if self._had_messages or self.closed or monotonic_s() - self._routed_at_s < ROUTE_LOOK_S:
            return
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._look_at_route())

    async def _look_at_route(self) -> None:
        async with self._routing:
            try:
                server = await self._meta.route(self._settings.subject)
            except DelaydError as error:
                log.debug("route_unknown subject=%s code=%s", self._settings.subject, error.code)
                return
            self._routed_at_s = monotonic_s()
            # Once messages have come, some may not be acknowledged yet, and only their server can take that.
            if not self._had_messages:
                await self._go_to(server)

    def _served(self) -> None:
        if self._away:
            log.info("consumer_goes_on subject=%s group=%s", self._settings.subject, self._settings.group)
        self._away = False
        self._backoff.reset()

    def _heard(self, head: Head) -> None:
        self._spare(_wanted(head))

    def _spare(self, wanted: int) -> None:
        """Give back some of the stock when other consumers wait with empty hands while this caller is busy."""
        if not wanted or self._waiters:
            return
        count = self._stock.count
        if not self._pace.takes_less(count, SHARE_S):
            self._give_back(self._stock.give_back_last(min(wanted, -(-count // 2))) or [])

    def _look_after(self) -> None:
        """Give back messages that no caller has come for."""
        self._watch = None
        now = monotonic_s()
        handles = self._stock.give_back_older(now - self._pace.hold_s)
        if handles:
            self._pace.stalled()
            self._give_back(handles)
        oldest = self._stock.oldest
        if oldest is not None and not self.closed:
            wait_s = BUSY_S if handles is None else max(oldest + self._pace.hold_s - now, BUSY_S)
            self._watch = self._loop.call_later(wait_s, self._look_after)

    def _give_back(self, handles: Handles) -> None:
        if handles:
            task = self._loop.create_task(self._return(handles))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    async def _return(self, handles: Handles) -> None:
        try:
            await self._returns.give_and_wait(handles)
        except DelaydError as error:
            # Nobody can do anything about it; the server gives the messages to other consumers when their lease ends.
            log.warning("not_given_back subject=%s code=%s", self._settings.subject, error.code)

    def _wake(self, failure: DelaydError | None) -> None:
        """Wake everybody who waits for the PULL under way, or raise the failure there."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(True)
            else:
                waiter.set_exception(failure)

    async def _wait_for_pull(self, limit_s: float | None) -> bool:
        """Wait for the PULL under way; return whether it has ended in time. Raises its failure."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.append(waiter)
        limit = None if limit_s is None else self._loop.call_later(limit_s, _give_up, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if self._waiters in ([], [waiter]):
                # The PULL would get messages for nobody, and keep them from other consumers for a while.
                self._pulls.withdraw()
            raise
        finally:
            if limit is not None:
                limit.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _raise_failed_pull(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _read(self, answer: Frame, asked_us: int) -> Pulled | None:
        """The messages in an answer; None when there is none."""
        assert self._link is not None, "an answer came without a connection"
        # The likely time may be wrong by up to half a round trip, but the answer was not received before it was given.
        answered_at_ms = need_instant(answer.head, "now_ms")
        now_us = monotonic_us()
        on_the_way_ms = max(0, self._link.clock.likely_ms(now_us) - answered_at_ms)
        # The answer cannot have travelled for longer than we waited. If it seems so, the server's clock was set back.
        on_the_way_ms = min(on_the_way_ms, (now_us - asked_us) // 1000)
        received_at_ms = answered_at_ms + on_the_way_ms
        lease_ends = monotonic_s() + self._settings.lease / _SECOND - on_the_way_ms / 1000
        parts: list[PulledPart] = []
        position = 0
        for pull_first, _, count, attempt in need_rows(answer.head, "parts", 4, PART_MOST):
            batch = parse(answer.body, position)
            batch.verify()
            position += batch.total_bytes
            if batch.kind != BatchKind.DISPATCH or batch.count != count:
                raise BadRequest(f"a part of {count} messages came with a batch of {batch.count}, kind {batch.kind}")
            parts.append(PulledPart(batch, range(count), pull_first, attempt))
        if not parts:
            return None
        incarnation = need_u64(answer.head, "incarnation")
        return Pulled(self._settings.subject, incarnation, tuple(parts), received_at_ms, lease_ends)

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
                    # Without meta, the server that is known is tried again.
                    log.debug("route_unknown subject=%s code=%s", self._settings.subject, error.code)
                raise unavailable

    async def _route(self) -> None:
        server = await self._meta.route(self._settings.subject)
        self._routed_at_s = monotonic_s()
        await self._go_to(server)

    async def _go_to(self, server: ServerAddress) -> None:
        if self._link is None:
            self._link = ServerLink(server.host, server.port, server.log_id)
        elif self._link.log_id == server.log_id:
            self._link.move(server.host, server.port)
        else:
            await self._link.close()
            self._link = ServerLink(server.host, server.port, server.log_id)


def _wanted(head: Head) -> int:
    """How many messages other consumers wait for with empty hands, as an answer says it."""
    return need_int(head, "wanted") if "wanted" in head else 0


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
