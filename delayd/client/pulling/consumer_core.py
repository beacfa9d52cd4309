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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Generic

from delayd.client.engine import Inbox, LoopThread, OnLoop, Work
from delayd.client.instants import monotonic_s
from delayd.client.pulling.acks import ACK, Failures, Handles, Word, WordKind, extended
from delayd.client.pulling.consume_options import ConsumerSettings
from delayd.client.pulling.many_source import ManySource
from delayd.client.pulling.message import MessageColumns, Pulled, divide, handle_at
from delayd.client.pulling.source import Callbacks, OneSource
from delayd.client.pulling.stock import Batch, Borrowed, LeaseKeeper, Pace, Stock
from delayd.client.routing import MetaView, RetryWaits
from delayd.errors import AlreadyClosed, DelaydError, RequestFailed, RetryLater, ServerUnavailable, SlowDown

SHELVES = 2  # Up to two of the largest fetches are held ahead: one is worked off while the next one travels.
# Looking after each message would cost a fast handler more than the hand-out does; so once in this many.
LOOK_EVERY = 8
POLL_MS = 30_000  # The wait of a long poll: each costs both sides a frame. The close ends it with its connection.
# The wait of a fetch ahead: a caller that stalls for longer should not get messages that other consumers wait for.
AHEAD_POLL_MS = 1_000
SLACK_S = 0.5  # An answer at the end of a pull's time needs a while to arrive, and the first one a connection.
ANSWER_S = 0.5  # How long a server may take to answer a PULL that was ended; after that it counts as away.
SHARE_S = 0.02  # Messages that a caller works off within this are not worth giving to another consumer.
BUSY_S = 0.005  # When a thread is taking something out at this moment, the loop looks again after this.
LOOK_S_MAX = 5.0  # How long a pull without a wait lets a server look for messages among those that nobody gets.
WAIT = timedelta(seconds=5)

WHAT = "an AsyncConsumer"  # The blocking consumer makes its own loop, so it never has a wrong one.
_SECOND = timedelta(seconds=1)

log = logging.getLogger(__name__)


class ConsumerCore(OnLoop, Generic[Batch]):
    """Made inside the running loop and used on its thread; only `check`, `take_next`, `take`, `put_back`, `settle_soon`
    and `leave` may be called elsewhere.

    ``make`` turns pulled messages into the consumer's batch; ``thread`` runs the loop, where callers are on others.
    """

    def __init__(
        self,
        address: str,
        settings: ConsumerSettings,
        make: Callable[[Pulled], Batch],
        thread: LoopThread | None = None,
    ) -> None:
        super().__init__(WHAT)
        self.closed = False
        self.make = make
        self.subject = settings.subject
        self._settings = settings
        self._loop = self.loop
        self._thread = thread
        self.settle_soon: Callable[[Handles, Word], None] = self.settle  # From any thread.
        if thread is not None:
            said = Inbox[Handles, Word](thread, self._take_said)
            self.settle_soon = lambda handles, word: said.put((handles, word))
        self._left: Handles = []  # What `close` is to give back.
        self._meta = MetaView(address)
        self._lease_now = self._meta.clock.lease_s
        lease_s = settings.lease / _SECOND
        self._stock: Stock[Batch] = Stock(make)
        self._pace = Pace(lease_s)
        self._iterates = False
        self._asked = 0  # How many messages callers with empty hands asked for last.
        self._enough = -1  # When only this many messages are left, iteration checks whether to fetch more.
        self._looks = False
        self._watch: asyncio.TimerHandle | None = None  # Set while anything is in stock.
        self._too_late: Handles = []  # Messages that came while the consumer was closed.
        self._failure: DelaydError | None = None  # Why a PULL failed that nobody waited for; the next pull raises it.
        self._waiters: list[asyncio.Future[bool]] = []
        self._ended = 0  # PULLs that have ended.
        self._giving_back: set[asyncio.Task[None]] = set()
        self.outage: DelaydError | None = None  # Why the last pull that got nothing has reached no server.
        self._is_silent = False  # No server has answered the last pull that got nothing.
        self._away = False  # Iteration waits for a server, and has logged that.
        self._backoff = RetryWaits()
        self._failures = Failures((settings.subject, settings.group))
        callbacks = Callbacks(self._pulled, self._spare, self._failures)
        self._source: OneSource | ManySource = (ManySource if settings.subjects.are_many else OneSource)(
            self._meta, settings, callbacks
        )
        self._keeper: LeaseKeeper | None = None
        if settings.auto_extend is not None:
            names = (settings.subject, settings.group)
            self._keeper = LeaseKeeper(names, lease_s, settings.auto_extend / _SECOND, self._lease_now, self._keep)
        most = settings.max_in_flight
        self._in_flight = None if most is None else Borrowed(most, self._lease_now)
        # Somebody follows which messages handlers have.
        self._is_tracked = self._keeper is not None or self._in_flight is not None

    def check(self) -> None:
        """Raise AlreadyClosed after the close; from any thread."""
        if self.closed:
            raise AlreadyClosed("this consumer was closed")

    def take_next(self, given: list[tuple[Batch, int]]) -> bool:
        """Add the next message to ``given``; False when none is here. From any thread.

        A caller that can't hand the message on must put it back.
        """
        if self._in_flight is not None and not self._in_flight.room:
            return False
        now = self._lease_now()
        left = self._stock.next(now, given)
        if left < 0:
            self._pace.came_back(now)
            return False
        self._pace.next(now)
        if self._is_tracked and not self._handed_out(_handles_of(*given[-1]), given[-1][0].pulled.lease_ends):
            self.put_back_next(given)
            given.clear()
            return False
        if left <= self._enough and (left < LOOK_EVERY or not left % LOOK_EVERY):
            self._look_soon()
        return True

    def put_back_next(self, given: list[tuple[Batch, int]]) -> None:
        """Take a message back that did not reach its caller: it is the next one again. From any thread."""
        for batch, row in given:
            if self._is_tracked:
                self._let_go(_handles_of(batch, row))
            self._stock.put_back(batch.pulled.cut(row)[1].cut(1)[0], self._lease_now())

    def take(self, most: int | None, given: list[Pulled]) -> bool:
        """As `take_next`, for up to ``most`` messages; None: as many as the pace allows."""
        now = self._lease_now()
        self._pace.came_back(now)
        if self._in_flight is not None and not self._in_flight.room:
            return False
        most = self._size(most)
        if not self._stock.take(most, now, given):
            return False
        if self._is_tracked and not self._handed_out(given[0].handles, given[0].lease_ends):
            self.put_back(given)
            given.clear()
            return False
        self._pace.handed_out(now, given[0].message_count)
        if not self._source.under_way:
            target, size = self._ahead_of(most)
            if target >= size:
                self._post(partial(self._fetch_ahead, target, size))
        return True

    def put_back(self, given: list[Pulled]) -> None:
        """As `put_back_next`."""
        for pulled in given:
            if self._is_tracked:
                self._let_go(pulled.handles)
            self._stock.put_back(pulled, self._lease_now())

    async def more(self, most: int | None, until: float) -> bool:
        """Wait until a message is in stock; False when none came until the instant ``until`` on `monotonic_s`.

        If a caller is cancelled here, messages that arrive go to the next call.
        """
        found = await self._more(most, until)
        self.outage = None if found else self._why_nobody_is_asked()
        return found

    async def more_to_iterate(self) -> bool:
        """Wait until a message is in stock, however long servers are away; False after the close."""
        self._iterates = True
        while not self.closed:
            try:
                if self._in_flight is not None and not await self._in_flight.wait(None):
                    break
                while not self._stock.count and not self.closed:
                    self._raise_failed_pull()
                    if not self._source.under_way:
                        self._ask(self._wanted(self._least()), POLL_MS)
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

    def _why_nobody_is_asked(self) -> DelaydError | None:
        """Why no server has served a pull that is under way; None when one has it in its time, or has answered it."""
        if not self._source.under_way:
            return None
        if self._source.is_asking:
            what = f"no realtime server of {self._settings.subject} answered in the time of this pull"
            return ServerUnavailable(f"{what}; it hangs, or the network is gone") if self._is_silent else None
        return self._source.trouble or ServerUnavailable(
            f"no realtime server of {self._settings.subject} was reached in the time of this pull"
        )

    async def _more(self, most: int | None, until: float) -> bool:
        self.check()
        if self._in_flight is not None and not await self._in_flight.wait(until):
            self.check()
            return False
        asked = self._is_silent = False
        while not self._stock.count:
            self._raise_failed_pull()
            left_s = until - monotonic_s()
            if not self._source.under_way:
                # A pull with no time to wait still gets the messages that the server has now.
                if asked and left_s < 0 and not self._source.is_unfinished:
                    # One of several servers may have answered that it has nothing before another one could answer.
                    if not self._source.is_asking or not await self._wait_for_pull(ANSWER_S):
                        return False
                    continue
                if asked and left_s < -LOOK_S_MAX:
                    raise SlowDown(f"the server did not look at all messages of {self.subject} in {LOOK_S_MAX:g} s")
                self._ask(self._wanted(most), min(max(math.ceil(left_s * 1000), 0), POLL_MS))
            asked = True
            if not await self._wait_for_pull(max(left_s, 0) + SLACK_S):
                self._source.withdraw()
                if not await self._wait_for_pull(ANSWER_S):
                    self._is_silent = True
                    return False
            self.check()
        return True

    def _ask(self, most: int, wait_ms: int) -> None:
        self._asked = most
        self._source.start(most, wait_ms, 0)

    def settle(self, handles: Handles, word: Word) -> None:
        """Say something of messages, soon; a later call raises the error if this fails."""
        if self._is_tracked:
            self._let_go(handles)
        self._source.settle(handles, word)

    def _take_said(self, said: deque[tuple[Handles, Word]]) -> None:
        """Say what callers on threads have said; acknowledgements of single messages in a row are one word."""
        while said:
            handles, word = said.popleft()
            if word is ACK and len(handles) == 1:
                # A word is about one subject only: a server may refuse it because of its subject.
                place = handles[0][-1]
                while said and said[0][1] is ACK and len(said[0][0]) == 1 and said[0][0][0][-1] == place:
                    handles += said.popleft()[0]
            self.settle(handles, word)

    async def settled(self, handles: Handles, word: Word) -> None:
        """Say something of messages, durably."""
        await self.settle_and_wait(handles, word)

    def settle_and_wait(self, handles: Handles, word: Word) -> asyncio.Future[None]:
        """Say something of messages, durably."""
        self.check()
        if word.kind is WordKind.EXTEND:
            return self._extend(handles, word)
        if self._is_tracked:
            self._let_go(handles)
        return self._source.settle_and_wait(handles, word)

    def _extend(self, handles: Handles, word: Word) -> asyncio.Future[None]:
        extended = self._source.settle_and_wait(handles, word)
        if self._in_flight is not None:
            self._in_flight.extend(handles, self._lease_now() + word.delay_ms / 1000, extended)
        return extended

    def _handed_out(self, handles: Handles, lease_ends: float) -> bool:
        """A handler gets these messages; False if it must not, because as many as may be are in flight."""
        if self._in_flight is not None and not self._in_flight.hand_out(handles, lease_ends):
            return False
        if self._keeper is not None:
            self._keeper.handed_out(handles)
        return True

    def _let_go(self, handles: Handles) -> None:
        """Something was said of these messages, or no handler has got them."""
        if self._keeper is not None:
            self._keeper.settled(handles)
        if self._in_flight is not None:
            self._in_flight.let_go(handles)

    def _keep(self, handles: Handles, lease_s: float) -> None:
        """Extend leases; a server that is away, or has taken messages back, tells their handler when it settles."""
        self._extend(handles, extended(timedelta(seconds=lease_s))).add_done_callback(_heard)

    def give_back(self, handles: Handles) -> None:
        """Give messages back uncounted, because no work was done on them."""
        if handles:
            if self._is_tracked:
                self._let_go(handles)
            task = self._loop.create_task(self._return(handles))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    async def flush(self) -> None:
        """Wait until all acknowledgements and give-backs are durable; raises errors since the last call."""
        await self._source.flush()
        self._failures.raise_first()

    async def disconnect(self) -> None:
        """End the connections to realtime servers; the next request makes others."""
        await self._source.disconnect()

    def leave(self) -> None:
        """See OnLoop: `close` gives back what is in stock."""
        self.closed = True
        self._left += self._stock.close()

    async def close(self) -> None:
        """Flush, give back messages that were not handed out, and disconnect; raises errors since the last call."""
        self.leave()
        if self._watch is not None:
            self._watch.cancel()
        if self._keeper is not None:
            self._keeper.close()
        if self._in_flight is not None:
            self._in_flight.close()
        self._wake(AlreadyClosed("this consumer was closed meanwhile"))
        try:
            await self._source.end()
            # An answer may have been put in stock while `leave` emptied it.
            self.give_back([*self._left, *self._too_late, *(self._stock.give_back_older(math.inf) or ())])
            await self._source.flush()
            if self._giving_back:
                await asyncio.wait(self._giving_back)
        finally:
            await self._source.close()
            await self._meta.close()
        self._failures.raise_first()

    async def flush_at_end(self) -> None:
        await self.close()

    def tell_at_end(self, *, flushed: bool) -> None:
        if not flushed:
            log.warning("ended_before_flushed subject=%s", self.subject)

    def _post(self, work: Work) -> None:
        if self._thread is None:
            work()
        else:
            # When the thread has ended nothing needs to be fetched any more.
            with suppress(AlreadyClosed):
                self._thread.post(work)

    def _size(self, most: int | None) -> int:
        most = self._pace.batch(self._settings.most) if most is None else most
        return most if self._in_flight is None else max(1, min(most, self._in_flight.room))

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
        waiting = len(self._waiters)
        return max(self._ahead_of(self._size(most))[1], waiting if self._in_flight is None else self._size(waiting))

    def _look_soon(self) -> None:
        """Check soon whether to fetch more: little is left of the first answer in stock, though others may be behind
        it. From any thread.
        """
        if not self._looks and not self._source.under_way and self._stock.count <= self._enough:
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
        if self._in_flight is not None and not self._in_flight.room:
            return  # Whoever waits for room asks when there is some.
        if count <= target - size and not self._source.under_way and not self.closed:
            # On the server a busy caller comes behind waiting ones, even if it has nothing left.
            self._source.start(size, AHEAD_POLL_MS, max(count, 1))

    def _pulled(self, pulled: Pulled | DelaydError | None, wanted: int) -> None:
        """Take the end of a PULL."""
        if isinstance(pulled, DelaydError):
            if all(waiter.done() for waiter in self._waiters):
                self._failure = pulled
            self._wake(pulled)
            return
        self._served()
        most = self._settings.max_attempts
        if pulled is not None and most is not None:
            pulled, dead = divide(pulled, most)
            for handles, word in dead:
                self._source.settle(handles, word)
        if pulled is not None:
            self._received(pulled)
        self._spare(wanted)
        self._wake(None)

    def _received(self, pulled: Pulled) -> None:
        if self.closed:
            self._too_late += pulled.handles
            return
        now = self._lease_now()
        is_behind = self._pace.is_behind(now, self._stock.oldest)
        self._pace.fetched()
        self._stock.put(pulled, now)
        self._give_back_surplus()
        target, size = self._ahead_of(1)
        if self._iterates:
            self._enough = target - size
        if is_behind or target < size:
            # The caller is busy with these for a while, so no server gives or keeps more messages for it.
            self._source.withdraw()
        if self._watch is None:
            self._watch = self._loop.call_later(self._pace.hold_s, self._look_after)

    def _give_back_surplus(self) -> None:
        """Without prefetch nothing waits here beyond what callers asked for; several servers may answer at once."""
        if self._settings.prefetch:
            return
        most = self._asked if self._in_flight is None else min(self._asked, self._in_flight.room)
        surplus = self._stock.count - most
        if surplus > 0:
            self.give_back(self._stock.give_back_last(surplus) or [])

    def _served(self) -> None:
        if self._away:
            log.info("consumer_goes_on subject=%s group=%s", self._settings.subject, self._settings.group)
        self._away = False
        self._backoff.reset()

    def _spare(self, wanted: int) -> None:
        """Give back some of the stock when other consumers wait with empty hands while this caller is busy."""
        if not wanted or self._waiters:
            return
        count = self._stock.count
        if not self._pace.takes_less(count, SHARE_S):
            self.give_back(self._stock.give_back_last(min(wanted, -(-count // 2))) or [])

    def _look_after(self) -> None:
        """Give back messages that no caller has come for."""
        self._watch = None
        now = self._lease_now()
        handles = self._stock.give_back_older(now - self._pace.hold_s)
        if handles:
            self._pace.stalled()
            self.give_back(handles)
        oldest = self._stock.oldest
        if oldest is not None and not self.closed:
            wait_s = BUSY_S if handles is None else max(oldest + self._pace.hold_s - now, BUSY_S)
            self._watch = self._loop.call_later(wait_s, self._look_after)

    async def _return(self, handles: Handles) -> None:
        try:
            await self._source.give_back(handles)
        except DelaydError as error:
            # Nobody can do anything about it; the server gives the messages to other consumers when their lease ends.
            log.warning("not_given_back subject=%s code=%s", self._settings.subject, error.code)

    def _wake(self, failure: DelaydError | None) -> None:
        """Wake everybody who waits for the PULL under way, or raise the failure there."""
        self._ended += 1
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
        ended = self._ended
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.append(waiter)
        limit = None if limit_s is None else self._loop.call_later(limit_s, _give_up, waiter)
        try:
            # The answer may come between the end of the wait and the moment at which this goes on.
            return await waiter or self._ended > ended
        except asyncio.CancelledError:
            if self._waiters in ([], [waiter]):
                # The PULL would get messages for nobody, and keep them from other consumers for a while.
                self._source.withdraw()
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


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


def _handles_of(batch: MessageColumns, row: int) -> Handles:
    return [handle_at(batch, row)]


def _heard(extended_until: asyncio.Future[None]) -> None:
    if not extended_until.cancelled() and (error := extended_until.exception()) is not None:
        log.debug("lease_not_extended reason=%r", str(error))
