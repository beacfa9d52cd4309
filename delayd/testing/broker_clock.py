"""Broker clock: the clock of an `InMemoryBroker`, which the test moves.

Time jumps when everything blocks, as that of trio's `MockClock` does: the servers' loop has nothing left to do, what
callers of consumers said is durable, and no caller has in hand what it got since the clock began to move. So a handler
sees the instant at which its message was due, and what it says or sends counts from there.

A handler may sleep, run threads and call other services, so no loop can tell whether it is at work. The core of its
consumer can (`FollowedCore`): a caller is at work from a hand-out until it waits for the next one.

Invariant: the clock never goes back, and never past an instant at which somebody waits for what is due then.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context, ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from delayd.client.engine import LoopThread
from delayd.client.instants import HomeClock, ServerClock, instant_ms, monotonic_s, utc, wall_ms
from delayd.client.limits import need_timedelta
from delayd.client.pulling.consume_options import ConsumerSettings
from delayd.client.pulling.consumer_core import ConsumerCore
from delayd.client.pulling.message import Pulled
from delayd.client.pulling.stock import Batch
from delayd.errors import AlreadyClosed, BadArgument, WrongLoop
from delayd.hours import INSTANT_MS_MAX, INSTANT_MS_MIN
from delayd.machine.clock import ClockSources
from delayd.wire.frame import Head
from delayd.worker.job import Job, current

if TYPE_CHECKING:
    from delayd.client.pulling.acks import Handles
    from delayd.testing.broker import InMemoryBroker

TURNS = 16  # Tasks that were made just before a move get so many turns of their loop to begin.
LOOK_S = 0.0005  # How often handlers at work are looked at.
FOLLOW_S = 0.005  # How often frozen time is looked at.
PATIENCE_S = 5.0  # Handlers that do nothing for so long are not waited for.
AFTERWARDS_S = 0.5  # What a handler does after its last word about a message is waited for this long.
KEEP_MS = 6 * 3_600_000  # Leases that a consumer keeps are extended for so long at once, half of what servers allow.
STUCK_S = 60.0  # Messages that go round for so long at one instant will do so for ever.
FREEZER = "freezegun.api"
LATEST_MS = INSTANT_MS_MAX - 3 * 365 * 86_400_000

_MS = timedelta(milliseconds=1)
_NS_PER_MS = 1_000_000

C = TypeVar("C")
Ts = TypeVarTuple("Ts")
Who = threading.Thread | asyncio.Task[Any] | Job

_handed_to: ContextVar[Who | None] = ContextVar("delayd.testing.handed_to", default=None)
"""Who got messages last in this context; tasks that it begins have its context, and so know whose work they do."""

log = logging.getLogger(__name__)


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


class ServersLoop(asyncio.SelectorEventLoop):
    """The loop of the servers. It knows when it has nothing left to do."""

    def __init__(self) -> None:
        self._idle = _IdleSelector()
        super().__init__(self._idle)

    def time(self) -> float:
        """Go on where a test freezes `time.monotonic`."""
        return monotonic_s()

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Spare the system call that wakes a loop, where the loop itself calls: connections between servers do."""
        if asyncio._get_running_loop() is self:
            return self.call_soon(callback, *args, context=context)
        return super().call_soon_threadsafe(callback, *args, context=context)

    async def idle(self) -> bool:
        """Wait until nothing is ready: no callback, no timer, no event, and nothing that another thread has posted; not
        longer than PATIENCE_S, and then it returns False. One caller at a time.
        """
        self._idle.until_s = monotonic_s() + PATIENCE_S
        self._idle.waiting = self.create_future()
        return await self._idle.waiting


class _IdleSelector(selectors.DefaultSelector):
    """A loop lets its selector wait only when all that was ready has run."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: asyncio.Future[bool] | None = None
        self.until_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        waiting = self.waiting
        if waiting is None:
            return super().select(timeout)
        events = super().select(0)
        is_idle = not events and (timeout is None or timeout > 0)
        if is_idle or monotonic_s() > self.until_s:
            self.waiting = None
            if not waiting.done():
                waiting.set_result(is_idle)
        return events


class BrokerClock(HomeClock):
    """The clock of one broker, as ``broker.clock``. It stands still until it is moved.

    Where a test freezes time with freezegun, the clock shows the frozen time, and follows when that is moved.

    Example::

        broker.clock.advance(timedelta(days=30))
        broker.clock.move_to(datetime(2027, 1, 1, tzinfo=UTC))
    """

    def __init__(self, start: datetime | None, *, tick: bool) -> None:
        start_ms = (_frozen_ms() or wall_ms()) if start is None else instant_ms(start, "start")
        self.time = MovedTime(_within(start_ms), tick=tick)
        self.followed: set[FollowedCore[Any]] = set()  # Of consumers that are open.
        self.loop = ServersLoop()
        self._thread: LoopThread | None = None  # None before `begin` and after `end`.
        self._moving = asyncio.Lock()
        self._target_ms = start_ms  # Where the last move goes, or went.

    @property
    def now(self) -> datetime:
        """What the clock shows, in UTC."""
        return utc(self.time.now_ms)

    def advance(self, by: timedelta) -> None:
        """Let time pass; returns when everything that was due meanwhile was handed over and worked off.

        Consumers that wait get each message at its instant. Nobody waits: the messages wait, in the order in which they
        were due.

        Raises:
            BadArgument: no timedelta, a negative one, or one that ends behind the year 9996.
            WrongLoop: the caller runs on an event loop, which could not serve its consumers meanwhile; use
                `advance_async` there.
            TimeoutError: messages go round at one instant without an end.
        """
        self._call(self._go_by, _length_ms(by))

    def move_to(self, instant: datetime) -> None:
        """The same, until an instant; BadArgument when the clock is past it."""
        self._call(self._go_to, self._ahead(instant))

    async def advance_async(self, by: timedelta) -> None:
        """`advance`, for tests that run on an event loop."""
        await self._await(self._go_by, _length_ms(by))

    async def move_to_async(self, instant: datetime) -> None:
        """`move_to`, for tests that run on an event loop."""
        await self._await(self._go_to, self._ahead(instant))

    # For the broker.

    @property
    def is_moving(self) -> bool:
        """Whether the clock is on its way."""
        return self._moving.locked()

    def begin(self, thread: LoopThread, servers: InMemoryBroker) -> None:
        """Move these servers' time from now on; they run on ``loop``, in a thread."""
        self._thread, self._servers = thread, servers
        self._follower = asyncio.run_coroutine_threadsafe(self._follow(), thread.loop)

    def end(self) -> None:
        """Follow nothing any more."""
        self._thread = None
        self._follower.cancel()

    # A HomeClock of delayd.client.instants.

    def delay_us(self) -> int:
        """See HomeClock."""
        return self.wall_ms() * 1_000

    def wall_ms(self) -> int:
        """See HomeClock."""
        self._catch_up()
        # On a loop the clock may still be on its way to the frozen time, from which the caller counts.
        return max(self.time.now_ms, self._ahead_ms() or 0)

    def lease_s(self) -> float:
        """See HomeClock."""
        self._catch_up()
        return self.time.lease_ms / 1_000

    def server_clock(self, name: str) -> ServerClock:
        """See HomeClock."""
        return _SharedClock(name, self.time)

    def core_of(self, kind: type[C]) -> Callable[..., C]:
        """See HomeClock."""
        return partial(FollowedCore, self)  # type: ignore[return-value]

    # On the servers' loop.

    async def _go_by(self, ms: int) -> None:
        async with self._moving:
            await self._step_to(self.time.now_ms + ms)

    async def _go_to(self, target_ms: int) -> None:
        async with self._moving:
            await self._step_to(target_ms)

    async def _step_to(self, target_ms: int) -> None:
        self._target_ms = _within(target_ms)
        for core in list(self.followed):
            core.begin()
        await self._quiet()
        while (now_ms := self.time.now_ms) < target_ms:
            stop_ms = target_ms
            # Recurring schedules are decided at their instants, whether or not somebody waits for the messages.
            if self._servers.recurs or any(core.is_active for core in list(self.followed)):
                next_ms = self._servers.next_stop_ms()
                if next_ms is not None and next_ms > now_ms:
                    stop_ms = min(stop_ms, next_ms)
            moved_ms = await self._keep_leases(stop_ms - now_ms)
            self.time.move(moved_ms)
            self._servers.look(moved_ms)
            await self._quiet()

    async def _keep_leases(self, ahead_ms: int) -> int:
        """Have consumers extend the leases that they keep; returns by how much the clock may move now."""
        kept_ms = min(ahead_ms, KEEP_MS)
        keepers = [core for core in list(self.followed) if core.keeps_leases]
        kept = [await self._ask(core, partial(core.keep_for, kept_ms / 1_000)) for core in keepers]
        return kept_ms if any(kept) else ahead_ms

    async def _quiet(self) -> None:
        """Wait until everything blocks at this instant.

        An example: a handler sends a message that is due at once, and acknowledges its own. The servers have nothing to
        do while it works; its consumer says that it is at work (1st round). When it waits again the servers have
        written, so another consumer may have got that message after it was asked (2nd round). In the 3rd round nobody
        is at work and nothing is written meanwhile.
        """
        began = since = monotonic_s()
        last = self._servers.writes
        while True:
            is_idle = await self.loop.idle()
            before = self._servers.writes
            at_work = [await self._ask(core, core.is_at_work) for core in list(self.followed)]
            is_idle &= await self.loop.idle()
            after, now = self._servers.writes, monotonic_s()
            if is_idle and after == before and not any(at_work):
                return
            if after != last:
                last, since = after, now
                if now - began > STUCK_S:
                    raise TimeoutError(f"messages go round at {self.now.isoformat()} for ever: what sends them?")
            elif now - since > PATIENCE_S:
                log.warning("clock_goes_on at=%s reason='handlers were not done in time'", self.now.isoformat())
                for core in list(self.followed):
                    core.begin()
                return
            else:
                await asyncio.sleep(LOOK_S)

    async def _ask(self, core: FollowedCore[Any], what: Callable[[], Coroutine[object, object, bool]]) -> bool:
        """Ask a consumer on its own loop, behind what that has to do.

        A loop that does not run serves nobody, and one that a handler blocks is not waited for again and again.
        """
        if not core.loop.is_running() or not (core.asked is None or core.asked.done()):
            return False
        question = what()
        try:
            core.asked = asyncio.run_coroutine_threadsafe(question, core.loop)
        except RuntimeError:
            question.close()
            self.followed.discard(core)  # Its loop has ended.
            return False
        answer = asyncio.wrap_future(core.asked)
        await asyncio.wait([answer], timeout=PATIENCE_S)
        return answer.done() and not answer.cancelled() and answer.result()

    async def _follow(self) -> None:
        """Follow a frozen time that a test moves."""
        refused_ms = 0
        while True:
            await asyncio.sleep(FOLLOW_S)
            frozen_ms = _frozen_ms()
            if frozen_ms is None or frozen_ms <= self.time.now_ms or frozen_ms == refused_ms:
                continue
            try:
                await self._go_to(frozen_ms)
            except (BadArgument, TimeoutError) as error:
                refused_ms = frozen_ms
                log.warning("clock_stays at=%s frozen_ms=%d reason=%r", self.now.isoformat(), frozen_ms, str(error))

    def _ahead(self, instant: datetime) -> int:
        target_ms = instant_ms(instant, "instant")
        if target_ms < self.time.now_ms:
            raise BadArgument(f"the clock shows {self.now.isoformat()} and never goes back, so not to {instant}")
        return target_ms

    # From any thread.

    def _catch_up(self) -> None:
        """A caller that has moved a frozen time before its call is served by that time."""
        frozen_ms = self._ahead_ms()
        if frozen_ms is not None and not _is_on_a_loop():
            self._call(self._go_to, frozen_ms)

    def caught_up(self) -> Coroutine[Any, Any, None] | None:
        """What a caller on a loop awaits for the same; None when there is nothing to wait for."""
        frozen_ms = self._ahead_ms()
        return None if frozen_ms is None else self._await(self._go_to, frozen_ms)

    def _ahead_ms(self) -> int | None:
        """The frozen time to which the clock is to go before this caller is served."""
        frozen_ms = _frozen_ms()
        # The clock may be there already and its servers still at work on what is due.
        if frozen_ms is None or (frozen_ms <= self.time.now_ms and not self._moving.locked()):
            return None
        # On its way there it may wait for this caller; but it is there already when time was moved once more.
        is_there = self.time.now_ms >= self._target_ms < frozen_ms
        return None if self._moving.locked() and not is_there and self._waits_for_caller() else frozen_ms

    def _waits_for_caller(self) -> bool:
        who, begun_by = _who(), _handed_to.get()
        followed = list(self.followed)
        if _job() is not None or any(core.has_caller(who) for core in followed):
            return True
        return begun_by is not None and any(core.has_at_work(begun_by) for core in followed)

    def _call(self, go: Callable[[int], Coroutine[Any, Any, None]], ms: int) -> None:
        if _is_on_a_loop():
            raise WrongLoop("this loop could not serve its consumers meanwhile; await clock.advance_async(...) here")
        self._standing().call(go(ms))

    async def _await(self, go: Callable[[int], Coroutine[Any, Any, None]], ms: int) -> None:
        thread = self._standing()
        # Consumers that were begun just before are to wait when the clock begins to move.
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go(ms), thread.loop))

    def _standing(self) -> LoopThread:
        if self._thread is None:
            raise AlreadyClosed("this broker was closed")
        return self._thread


class _SharedClock(ServerClock):
    """The clock of servers whose time the client reads itself."""

    def __init__(self, name: str, shown: MovedTime) -> None:
        super().__init__(name)
        self._time = shown
        self._offset_us = self._error_us = 0

    def hear(self, asked_us: int, answered_us: int, head: Head) -> None:
        """No answer says more."""

    def likely_ms(self, instant_us: int) -> int:
        """What it shows now."""
        return self._time.now_ms


class _Caller:
    """A thread or task that asked a consumer for messages."""

    def __init__(self) -> None:
        self.waits = False  # It asked and got nothing yet.
        self.in_hand: set[tuple[int, ...]] = set()  # Not settled; when it waits, with other threads and tasks.
        self.settled_s = 0.0  # When the last of these was settled.

    def is_at_work(self, who: Who) -> bool:
        """Whether something may still be done because of what it got."""
        if not self.waits and _has_ended(who):
            return False
        return bool(self.in_hand) or monotonic_s() - self.settled_s < AFTERWARDS_S


class FollowedCore(ConsumerCore[Batch]):
    """The core of a consumer of a home in memory: it follows what callers have in hand, for the clock of that home.

    Only what they get while the clock moves counts: nobody knows what a caller does with what it had before. A caller
    is at work until it waits for its next message, ends, or has done nothing for a while after its last word. Messages
    that it has not settled when it waits again may be with other threads and tasks, as those of a worker are.
    """

    def __init__(
        self,
        clock: BrokerClock,
        address: str,
        settings: ConsumerSettings,
        make: Callable[[Pulled], Batch],
        thread: LoopThread | None = None,
    ) -> None:
        super().__init__(address, settings, make, thread)
        self.asked: Future[bool] | None = None  # What the clock asked last, on this consumer's loop.
        self._is_tracked = True
        self._callers: dict[Who, _Caller] = {}
        self._clock = clock
        clock.followed.add(self)

    # For the clock.

    @property
    def is_active(self) -> bool:
        """Whether a caller waits for messages, or has got some since the clock began to move."""
        return bool(self._callers)

    def has_caller(self, who: Who) -> bool:
        """Whether a caller waits for messages, or is at work on some."""
        caller = self._callers.get(who)
        return caller is not None and (caller.waits or caller.is_at_work(who))

    def has_at_work(self, who: Who) -> bool:
        """Whether a caller is at work on messages, which tasks that it has begun may have."""
        caller = self._callers.get(who)
        return caller is not None and caller.is_at_work(who)

    def begin(self) -> None:
        """Follow what callers get from now on."""
        for who, caller in list(self._callers.items()):
            caller.in_hand.clear()
            if not caller.waits:
                self._callers.pop(who, None)

    @property
    def keeps_leases(self) -> bool:
        """Whether it extends leases."""
        return self._keeper is not None

    async def keep_for(self, ahead_s: float) -> bool:
        """Extend leases so that they last while the clock is moved by so much; returns whether there are any."""
        kept = self._keeper is not None and self._keeper.keep(ahead_s)
        await self._source.flush()
        return kept

    async def is_at_work(self) -> bool:
        """Wait until what callers said is durable; returns whether a caller is at work, or gets something now."""
        await self._source.flush()
        waiting, at_work = 0, False
        for who, caller in list(self._callers.items()):
            waiting += caller.waits
            if caller.is_at_work(who):
                at_work = True
            elif not caller.waits:
                self._callers.pop(who, None)
        # A caller that waits is on its way here or from here, but for those that wait for a PULL, for room, or for a
        # server that refuses now.
        waits = len(self._waiters) + (0 if self._in_flight is None else self._in_flight.waiting)
        asks = self._waiters and self._source.under_way and not self._source.is_asking
        return bool(at_work or (waiting > waits and not self._away) or asks)

    # What callers do.

    def more(self, most: int | None, until: float) -> Coroutine[Any, Any, bool]:
        """See ConsumerCore; the caller waits from this call on."""
        wait = partial(self._wait, partial(super().more, most, until))
        caught_up = self._clock.caught_up() if self._thread is None else None
        return wait() if caught_up is None else _one_by_one(caught_up, wait)

    def more_to_iterate(self) -> Coroutine[Any, Any, bool]:
        """See ConsumerCore."""
        return self._wait(super().more_to_iterate)

    async def close(self) -> None:
        """See ConsumerCore."""
        try:
            await super().close()
        finally:
            self._clock.followed.discard(self)

    def _wait(self, more: Callable[[], Coroutine[Any, Any, bool]]) -> Coroutine[Any, Any, bool]:
        caller = self._callers.setdefault(_who(), _Caller())
        caller.waits, caller.settled_s = True, 0.0

        async def waited() -> bool:
            found = False
            try:
                found = await more()
            finally:
                caller.waits = found
            return found

        return waited()

    def _handed_out(self, handles: Handles, lease_ends: float) -> bool:
        if not super()._handed_out(handles, lease_ends):
            return False
        who = _who()
        _handed_to.set(who)
        if self._clock.is_moving:
            caller = self._callers.setdefault(who, _Caller())
            caller.in_hand.update(_keys(handles))
            caller.waits = False
        else:
            self._callers.pop(who, None)
        return True

    def _let_go(self, handles: Handles) -> None:
        super()._let_go(handles)
        if not self._callers:
            return
        keys = _keys(handles)
        for caller in list(self._callers.values()):
            if not caller.in_hand.isdisjoint(keys):
                caller.in_hand.difference_update(keys)
                caller.settled_s = 0.0 if caller.waits else monotonic_s()
                if (job := _job()) is not None:
                    # A worker's handler says it itself, and goes on.
                    self._callers.setdefault(job, _Caller()).in_hand.update(keys)


async def _one_by_one(first: Coroutine[Any, Any, None], then: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
    await first
    return await then()


def _who() -> Who:
    """The task that calls, or the thread where it is no task."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:
        return threading.current_thread()


def _job() -> Job | None:
    """What a worker's handler that calls is at work on."""
    job = current.get()
    return None if job is None or job.is_settled else job


def _has_ended(who: Who) -> bool:
    if isinstance(who, Job):
        return who.is_settled
    return who.done() if isinstance(who, asyncio.Task) else not who.is_alive()


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _keys(handles: Handles) -> list[tuple[int, ...]]:
    return [
        (incarnation, sequence, *place)
        for incarnation, first, count, *place in handles
        for sequence in range(first, first + count)
    ]


def _length_ms(by: timedelta) -> int:
    if need_timedelta("by", by) < timedelta(0):
        raise BadArgument(f"by is {by}, and the clock never goes back")
    ms, rest = divmod(by, _MS)
    return ms + bool(rest)


def _within(at_ms: int) -> int:
    """An instant at which servers can work, with all that may be due two years later."""
    if not INSTANT_MS_MIN <= at_ms <= LATEST_MS:
        raise BadArgument("the clock goes from 2001-09-09 to the end of the year 9996, and this instant lies outside")
    return at_ms


def _frozen_ms() -> int | None:
    """The frozen time, while freezegun freezes it."""
    # freezegun hides the frozen time from threads, and a time that ticks at each look must not tick for this one.
    factories = getattr(sys.modules.get(FREEZER), "freeze_factories", None)
    if not factories:
        return None
    factory = factories[-1]
    shown: datetime = factory() if hasattr(factory, "start") else factory.time_to_freeze
    return instant_ms(shown.replace(tzinfo=UTC))
