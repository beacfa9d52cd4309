"""Broker clock: the clock of an `InMemoryBroker`, which the test moves.

Between two instants the clock waits until everything is quiet: the servers have nothing left to do, and what consumers
that wait were given has been worked off. So a handler sees the instant at which its message was due, and what it says
or sends counts from there.

Invariant: the clock never goes back, and never past an instant at which somebody waits for what is due then.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from delayd.client.blocking import LoopThread
from delayd.client.home_clock import Watched, handles_messages
from delayd.client.instants import ServerClock, instant_ms, monotonic_s, utc, wall_ms
from delayd.client.limits import need_timedelta
from delayd.errors import AlreadyClosed, BadArgument, WrongLoop
from delayd.hours import INSTANT_MS_MAX, INSTANT_MS_MIN
from delayd.testing.broker_machine import MovedTime
from delayd.wire.frame import Head

if TYPE_CHECKING:
    from delayd.client.pulling.acks import Handles

TURNS = 16  # So many turns of the servers' loop without work mean that nothing is left.
LOOK_S = 0.0005  # How often handlers at work are looked at.
FOLLOW_S = 0.005  # How often frozen time is looked at.
PATIENCE_S = 5.0  # Handlers that do nothing for so long are not waited for.
AFTERWARDS_S = 0.5  # What a handler does after its last word about a message is waited for this long.
KEEP_MS = 6 * 3_600_000  # Leases that a consumer keeps are extended for so long at once, half of what servers allow.
STUCK_S = 60.0  # Messages that go round for so long at one instant will do so for ever.
FREEZER = "freezegun.api"
LATEST_MS = INSTANT_MS_MAX - 3 * 365 * 86_400_000

_MS = timedelta(milliseconds=1)

log = logging.getLogger(__name__)


class Stepped(Protocol):
    """The servers, for their clock; called on their loop."""

    def look(self, moved_ms: int) -> None:
        """Do what is due by now: the clock has been moved by so much."""

    def next_stop_ms(self) -> int | None:
        """The next instant at which something may happen by itself; None when nothing is known of one."""

    def work(self) -> tuple[int, int]:
        """How much work was done so far, and whether some is left: 0, or more."""

    def words(self) -> int:
        """How much of it was about messages: servers and idle connections do something, too."""


class BrokerClock:
    """The clock of one broker, as ``broker.clock``. It stands still until it is moved.

    Where a test freezes time with freezegun, the clock shows the frozen time, and follows when that is moved.

    Example::

        broker.clock.advance(timedelta(days=30))
        broker.clock.move_to(datetime(2027, 1, 1, tzinfo=UTC))
    """

    def __init__(self, start: datetime | None, *, tick: bool) -> None:
        start_ms = (_frozen_ms() or wall_ms()) if start is None else instant_ms(start, "start")
        self.time = MovedTime(_within(start_ms), tick=tick)
        self._thread: LoopThread | None = None
        self._servers: Stepped | None = None
        self._watchers: set[_Watcher] = set()
        self._moving = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None

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
        self._call(partial(self._go_by, _length_ms(by)))

    def move_to(self, instant: datetime) -> None:
        """The same, until an instant; BadArgument when the clock is past it."""
        self._call(partial(self._go_to, self._ahead(instant)))

    async def advance_async(self, by: timedelta) -> None:
        """`advance`, for tests that run on an event loop."""
        await self._await(partial(self._go_by, _length_ms(by)))

    async def move_to_async(self, instant: datetime) -> None:
        """`move_to`, for tests that run on an event loop."""
        await self._await(partial(self._go_to, self._ahead(instant)))

    # For the broker.

    def begin(self, thread: LoopThread, servers: Stepped) -> None:
        """Move these servers' time from now on."""
        self._thread, self._servers = thread, servers

        async def follow() -> None:
            self._follower = asyncio.get_running_loop().create_task(self._follow())

        thread.call(follow())

    def end(self) -> None:
        """Follow nothing any more."""
        thread, self._thread = self._thread, None

        async def end() -> None:
            if self._follower is not None:
                self._follower.cancel()

        if thread is not None:
            thread.call(end())

    # A HomeClock of delayd.client.home_clock.

    def delay_us(self) -> int:
        """See HomeClock."""
        self._catch_up()
        return self.time.now_ms * 1_000

    def wall_ms(self) -> int:
        """See HomeClock."""
        self._catch_up()
        return self.time.now_ms

    def lease_s(self) -> float:
        """See HomeClock."""
        self._catch_up()
        return self.time.lease_ms / 1_000

    def server_clock(self, name: str) -> ServerClock:
        """See HomeClock."""
        return _SharedClock(name, self.time)

    def watcher(self, watched: Watched) -> _Watcher:
        """See HomeClock."""
        made = _Watcher(watched, self)
        self._watchers.add(made)
        return made

    # On the servers' loop.

    async def _go_by(self, ms: int) -> None:
        async with self._moving:
            await self._step_to(_within(self.time.now_ms + ms))

    async def _go_to(self, target_ms: int) -> None:
        async with self._moving:
            await self._step_to(_within(target_ms))

    async def _step_to(self, target_ms: int) -> None:
        servers = self._servers
        assert servers is not None, "the broker has begun"
        for watcher in list(self._watchers):
            watcher.begin()
        await self._quiet(servers)
        while (now_ms := self.time.now_ms) < target_ms:
            stop_ms = target_ms
            if keepers := [watcher for watcher in list(self._watchers) if watcher.keeps_leases]:
                stop_ms = min(stop_ms, now_ms + KEEP_MS)
                for watcher in keepers:
                    watcher.keep((stop_ms - now_ms) / 1_000)
                await self._quiet(servers)
            if any(watcher.is_active for watcher in list(self._watchers)):
                next_ms = servers.next_stop_ms()
                if next_ms is not None and next_ms > now_ms:
                    stop_ms = min(stop_ms, next_ms)
            moved_ms = stop_ms - now_ms
            self.time.move(moved_ms)
            servers.look(moved_ms)
            await self._quiet(servers)

    async def _quiet(self, servers: Stepped) -> None:
        """Wait until nothing is left to do at this instant."""
        loop = asyncio.get_running_loop()
        began = since = loop.time()
        before, words = servers.work(), servers.words()
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            is_at_work = await self._are_at_work()
            after, now = servers.work(), loop.time()
            if words != (said := servers.words()):
                words, since = said, now
            if after[0] == before[0] and not (after[1] or is_at_work):
                return
            if now - since > PATIENCE_S:
                log.warning("clock_goes_on at=%s reason='handlers were not done in time'", self.now.isoformat())
                for watcher in list(self._watchers):
                    watcher.begin()
                return
            if after[0] != before[0]:
                if now - began > STUCK_S:
                    raise TimeoutError(f"messages go round at {self.now.isoformat()} for ever: what sends them?")
            else:
                await asyncio.sleep(LOOK_S)
            before = after

    async def _are_at_work(self) -> bool:
        """Whether a consumer has something to work off; asked on the loop of each, behind what it has to do."""
        at_work = [await watcher.ask() for watcher in list(self._watchers)]
        return any(at_work)

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
        frozen_ms = _frozen_ms()
        if frozen_ms is None or _is_on_a_loop():
            return
        # The clock may be there already and its servers still at work on what is due.
        if frozen_ms <= self.time.now_ms and not self._moving.locked():
            return
        if self._moving.locked() and (handles_messages.get() or self._waits_for_caller()):
            return  # The clock is on its way there, and waits for this caller.
        self._call(partial(self._go_to, frozen_ms))

    @property
    def is_moving(self) -> bool:
        """Whether the clock is on its way."""
        return self._moving.locked()

    def forget(self, watcher: _Watcher) -> None:
        """A consumer was closed."""
        self._watchers.discard(watcher)

    def _waits_for_caller(self) -> bool:
        who = threading.current_thread()
        return any(watcher.has_caller(who) for watcher in list(self._watchers))

    def _call(self, make: Callable[[], Coroutine[object, object, None]]) -> None:
        if _is_on_a_loop():
            raise WrongLoop("this loop could not serve its consumers meanwhile; await clock.advance_async(...) here")
        if self._thread is None:
            raise AlreadyClosed("this broker was closed")
        self._thread.call(make())

    async def _await(self, make: Callable[[], Coroutine[object, object, None]]) -> None:
        if self._thread is None:
            raise AlreadyClosed("this broker was closed")
        # Consumers that were begun just before are to wait when the clock begins to move.
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_run(make()), self._thread.loop))


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
    """A thread or task that a consumer gave messages to, until it comes back for the next one."""

    def __init__(self, who: threading.Thread | asyncio.Task[Any]) -> None:
        self.who = who
        self.in_hand: set[tuple[int, ...]] = set()
        self.settled_s = 0.0  # When the last of these was settled.

    @property
    def has_ended(self) -> bool:
        """Whether nobody goes on with what it got."""
        return self.who.done() if isinstance(self.who, asyncio.Task) else not self.who.is_alive()

    def is_at_work(self) -> bool:
        """Whether it may still do something because of what it got."""
        return bool(self.in_hand) or monotonic_s() - self.settled_s < AFTERWARDS_S


class _Watcher:
    """Follows what the callers of one consumer have in hand; see Watcher of delayd.client.home_clock.

    Only what they get while the clock moves counts: nobody knows what a caller does with what it had before. A caller
    is at work until it asks for its next message, ends, or has done nothing for a while after its last word. Messages
    that it has not settled when it comes back may be with other threads and tasks, as those of a worker are.
    """

    def __init__(self, watched: Watched, clock: BrokerClock) -> None:
        self.is_active = False  # A caller has waited for messages since the clock began to move.
        self._watched = watched
        self._clock = clock
        self._waiting = 0
        self._callers: dict[object, _Caller] = {}
        self._elsewhere: set[tuple[int, ...]] = set()  # Not settled, of callers that came back.
        self._asked: asyncio.Future[bool] | None = None  # Its loop has not answered yet.

    @property
    def keeps_leases(self) -> bool:
        """Whether the consumer extends leases."""
        return self._watched.keeps_leases and self._watched.loop.is_running()

    def keep(self, ahead_s: float) -> None:
        """Let the consumer extend them, soon: the next `ask` comes behind that."""
        try:
            self._watched.loop.call_soon_threadsafe(self._watched.keep, ahead_s)
        except RuntimeError:
            self.close()  # Its loop has ended.

    def begin(self) -> None:
        """The clock begins to move."""
        self._callers.clear()
        self._elsewhere.clear()
        self.is_active = self._waiting > 0

    def has_caller(self, who: threading.Thread) -> bool:
        """Whether a thread has got messages and has not come back."""
        return who in self._callers

    def lease_s(self) -> float:
        """See Watcher."""
        # While the clock moves it waits for callers of this consumer to take what they waited for.
        if self.is_active and self._clock.is_moving:
            return self._clock.time.lease_ms / 1_000
        return self._clock.lease_s()

    def came_back(self) -> None:
        """See Watcher."""
        if self._callers and (caller := self._callers.pop(_who(), None)) is not None:
            self._elsewhere.update(caller.in_hand)

    def waits(self) -> None:
        """See Watcher."""
        self._waiting += 1
        self.is_active = True

    def leaves(self) -> None:
        """See Watcher."""
        self._waiting = max(self._waiting - 1, 0)
        if not self._waiting and not self._callers:
            self.is_active = False  # Its next call waits until the clock is there.

    def handed_out(self, handles: Handles) -> None:
        """See Watcher."""
        if self._clock.is_moving:
            who = _who()
            caller = self._callers.get(who)
            if caller is None:
                caller = self._callers[who] = _Caller(who)
            caller.in_hand.update(_keys(handles))
        self.leaves()

    def let_go(self, handles: Handles) -> None:
        """See Watcher."""
        if not self._callers and not self._elsewhere:
            return
        keys = _keys(handles)
        self._elsewhere.difference_update(keys)
        for caller in list(self._callers.values()):
            if caller.in_hand and not caller.in_hand.isdisjoint(keys):
                caller.in_hand.difference_update(keys)
                caller.settled_s = monotonic_s()

    def close(self) -> None:
        """See Watcher."""
        self._clock.forget(self)

    @property
    def _is_at_work(self) -> bool:
        for who, caller in list(self._callers.items()):
            if caller.has_ended or not caller.is_at_work():
                self._callers.pop(who, None)
        return bool(self._callers or self._elsewhere)

    async def ask(self) -> bool:
        """Whether something is at work here, as the consumer's own loop sees it.

        A loop that does not run serves nobody, and one that a handler blocks is not waited for again and again.
        """
        if not self._watched.loop.is_running() or not (self._asked is None or self._asked.done()):
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        loop = answer.get_loop()

        def tell() -> None:
            watched = self._watched
            in_hand = self._is_at_work
            at_work = in_hand or not watched.is_settled or (self.is_active and watched.has_next)
            if at_work:
                watched.hurry()
            # Requests leave at the end of the turn in which they were made: the servers have them before this answer.
            watched.loop.call_soon(loop.call_soon_threadsafe, _set, answer, at_work)

        try:
            # Twice around, so that what the first turn has begun is seen.
            self._watched.loop.call_soon_threadsafe(lambda: self._watched.loop.call_soon(tell))
        except RuntimeError:
            self.close()  # Its loop has ended.
            return False
        self._asked = answer
        await asyncio.wait([answer], timeout=PATIENCE_S)
        return answer.done() and answer.result()


async def _run(coroutine: Coroutine[object, object, None]) -> None:
    await coroutine


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _who() -> threading.Thread | asyncio.Task[Any]:
    """The task that calls, or the thread where it is no task."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:
        return threading.current_thread()


def _set(answer: asyncio.Future[bool], value: bool) -> None:
    if not answer.done():
        answer.set_result(value)


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
