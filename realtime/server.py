"""The realtime server's shell: frames between connections and the core, and one timer.

The core is called on the loop's thread only, and its next wake-up is set again after every call. What an
ephemeral group left at delay servers is ended by `Farewell`, which asks them until nothing of it is pending.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol

from delayd.address import Endpoint
from delayd.client.producer import AsyncProducer
from delayd.config import RealtimeConfig, describe
from delayd.errors import DelaydError, NotReady
from delayd.machine.alarms import NEVER_MS
from delayd.machine.identity import draw_id
from delayd.machine.operating import LogLimit, WaitKind
from delayd.net.connection import Connection
from delayd.net.courier import Courier, CourierTerms
from delayd.net.cut import Cuts
from delayd.net.held_start import HeldServer, Lives
from delayd.net.home import Home, abandon
from delayd.net.machine import REAL_MACHINE, Machine
from delayd.net.program import Fail, run_program
from delayd.net.registration import Orders, Registration
from delayd.net.server import Server
from delayd.net.timer import Timer
from delayd.net.tokens import TokenBook
from delayd.net.trust import Guard, Membership
from delayd.wire.exposition import Family
from delayd.wire.frame import Frame
from delayd.wire.meta import Registered
from delayd.wire.requests import REALTIME_LIMITS, RequestType

from .core import Core, Executors, Surroundings
from .groups import Group
from .recovery import recover
from .retries import Undone

RETAIN_EVERY_S = 600
# A copy of a directory must not take messages, or give them to consumers.
FENCED = frozenset(kind for kind in RequestType if kind.terms.fenced)
LETTERS = CourierTerms(RequestType.SEND_AGAIN, WaitKind.RETRIES_AWAY)

TIMEOUT_MS = 5_000
AGAIN_S = 10.0  # A delay server that is away, or was handing messages over, is asked again after this.

log = logging.getLogger(__name__)
limited = LogLimit(log)


class RealtimeServer:
    """One realtime server on real files and sockets; a Service of delayd.net.program and the Handler of its Server."""

    def __init__(self, config: RealtimeConfig, fail: Fail, machine: Machine = REAL_MACHINE) -> None:
        self._config = config
        self._machine = machine
        self._fail = fail
        self._listens = config.listens  # A life after this one listens at the port that this one was given.
        self._lives = Lives(self, config.role, config.folder, self._end, fail)
        self._forget()

    def _forget(self) -> None:
        """Have nothing of a life; the next one may begin."""
        self._home: Home | None = None
        self._core: Core | None = None
        self._timer: Timer | None = None
        self._wake_set_ms: int | None = None
        self._server: Server | None = None
        self._registration: Registration | None = None
        self._guard: Guard | None = None
        self._cuts: Cuts | None = None
        self._courier: Courier[Undone] | None = None
        self._farewell: Farewell | None = None

    def open(self) -> None:
        """Recover from the directory."""
        config = self._config
        log.info("starting %s", describe(config))
        home = self._home = Home(config, self._machine, ("commit", "pull", "work"), self._rearm)
        recovered = recover(config, home.disk, home.state, home.clock, draw_id, home.state_path)
        around = Surroundings(home.disk, home.state, home.clock, Executors(*home.executors), self._lives.begin_anew)
        self._core = Core(config, around, recovered, self._fail)

    def abandon(self) -> HeldServer:
        """See delayd.net.held_start.Service."""
        home, self._home = self._home, None
        return abandon(self._config, self._listens, self._machine, home)

    async def registered(self) -> None:
        """Wait until meta has taken a registration of this server, which has started."""
        assert self._registration is not None
        await self._registration.registered()

    async def start(self) -> Endpoint:
        """Listen and register; recovers first if `open` was not called."""
        if self._core is None:
            self.open()
        config, home, core = self._config, self._home, self._core
        assert home is not None and core is not None, "it was opened"
        secret, place = self._machine.secret(config), self._machine.place(config.folder)
        membership = Membership(secret, home.state, home.state_path, place, core.fence, core.may_be_a_copy)
        membership.tokens.required = config.require_token
        membership.begin(fresh=core.epoch == 1)
        self._guard = membership.guard(config.role, core.log_id)
        core.cluster_id = lambda: membership.cluster_id
        self._cuts = Cuts(config.folder, core.log_id, home.state, home.executors[-1])
        core.serve_too(self._cuts.handlers)
        self._timer = Timer(asyncio.get_running_loop(), self._on_timer)
        self._server = Server(self, limits=REALTIME_LIMITS, unheard=core.unheard, book=membership.tokens)
        core.shell_status = self._server.status
        self._listens = await self._server.listen(self._listens)
        self._rearm()
        endpoint = config.advertised(self._listens)
        registered = Registered(config.role, core.log_id, endpoint, core.epoch, os.getpid(), place)
        self._registration = Registration(
            config.meta_endpoint,
            lambda: registered,
            membership,
            on_now_ms=home.clock.reference,
            orders=Orders(core.retries.hear),
        )
        self._registration.start()
        self._courier = Courier(core.retries, LETTERS, self._registration, membership, self._rearm)
        core.shell_waits = self._courier.waits
        self._courier.start()
        mine = config.meta_endpoint
        as_server = mine._replace(access=mine.access._replace(secret=secret.path))
        self._farewell = Farewell(core.groups, as_server.url, self._rearm)
        self._farewell.start()
        home.every(RETAIN_EVERY_S, core.retain)
        return self._listens

    async def stop(self) -> None:
        """See the port: a checkpoint is taken, so that the next start has nothing to replay, unless that takes long."""
        await self._lives.close()
        if self._core is not None:
            await self._end()

    async def _end(self) -> None:
        home, core, server, registration = self._home, self._core, self._server, self._registration
        assert home is not None and core is not None and server is not None and registration is not None
        server.stop_accepting()
        lines = [each.close() for each in (self._courier, self._farewell, registration) if each is not None]
        # The other servers may hang, and then each of these takes as long as it may.
        await asyncio.gather(*lines, home.stop(core))
        await server.close()
        if self._timer is not None:
            self._timer.close()
        home.close(core)
        self._forget()

    # Handler of the connections.

    def connected(self, connection: Connection) -> None:
        """Do nothing: the server knows nothing of a client before its first request."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Give a request to the core."""
        if self._core is None or self._guard is None or self._server is None:
            raise NotReady("this realtime server is starting; ask again in a moment")
        self._server.look()
        if self._guard.serves(connection, frame):
            return
        if self._core.fence.is_up and frame.type in FENCED:
            self._core.fence.check()
        try:
            self._core.received(connection, frame)
        finally:
            self._rearm()

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Tell the core."""
        if self._core is not None and self._cuts is not None and self._server is not None:
            self._server.look()
            self._core.disconnected(connection)
            self._cuts.disconnected(connection)

    def crashed(self, error: Exception) -> None:
        """Stop: the error is a bug."""
        self._fail(error)

    # Measured.

    @property
    def tokens(self) -> TokenBook | None:
        """See delayd.net.admin.Measured."""
        return None if self._server is None else self._server.book

    def not_ready(self) -> str:
        """See delayd.net.admin.Measured."""
        core = self._core
        if core is None or self._server is None:
            return "it begins anew"
        return core.fence.error().message if core.fence.is_up else ""

    def families(self) -> Iterable[Family]:
        """See delayd.net.admin.Measured."""
        return () if self._core is None else self._core.families()

    def families_by_subject(self, pattern: str) -> Iterable[Family]:
        """See delayd.net.admin.Measured."""
        return () if self._core is None else self._core.families_by_subject(pattern)

    def look(self, moved_ms: int) -> None:
        """Do what is due by now: the clock has been moved by so much, and nobody could say anything meanwhile."""
        if self._core is not None:
            self._core.stood_still(moved_ms)
            self._on_timer()

    def next_stop_ms(self) -> int | None:
        """The next instant, by the monotonic clock, at which a message may be offered again by itself."""
        return None if self._core is None else self._core.next_offer_ms()

    def _on_timer(self) -> None:
        assert self._core is not None
        self._wake_set_ms = None
        if self._server is not None:
            self._server.look()
        self._core.wake()
        self._rearm()

    def _rearm(self) -> None:
        if self._home is None or self._core is None or self._timer is None:
            return
        set_ms = NEVER_MS if self._wake_set_ms is None else self._wake_set_ms
        wake_ms = self._core.next_wake_ms(set_ms)
        # A later time is set only when the earlier one has come: with each pull the time moves, and setting it is a
        # system call.
        if wake_ms < set_ms:
            self._wake_set_ms = wake_ms
            self._timer.set_after_ms(wake_ms - self._home.clock.monotonic_ms())


def run(config: RealtimeConfig) -> int:
    """Serve until told to stop; returns the exit code of the process."""
    return run_program(
        config.role,
        partial(RealtimeServer, config),
        folder=config.folder,
        exit_with_stdin=config.exit_with_stdin,
        admin=config.admin,
    )


class Left(Protocol):
    """What is to be ended: `realtime.group_records.GroupRecords`."""

    on_left: Callable[[], None]

    @property
    def left(self) -> Collection[Group]:
        """The groups of retry subjects whose own groups have ended."""

    def delete(self, group: Group) -> None:
        """Delete one of them."""


class Farewell:
    """Ends what is left; belongs to the loop. ``after`` is called when something was told to the core."""

    def __init__(self, groups: Left, meta: str, after: Callable[[], None]) -> None:
        self._groups = groups
        self._meta = meta
        self._after = after
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with what was left before."""
        self._groups.on_left = self._new
        self._new()

    async def close(self) -> None:
        """Stop; the next life goes on."""
        self._groups.on_left = lambda: None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _new(self) -> None:
        if self._groups.left and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._serve())
            self._task.add_done_callback(_ended)

    async def _serve(self) -> None:
        while self._groups.left:
            try:
                async with AsyncProducer(self._meta, timeout_ms=TIMEOUT_MS) as producer:
                    for group in list(self._groups.left):
                        await self._end(producer, group)
            except DelaydError as error:
                limited.warning(
                    "farewell_waits", "farewell_waits groups=%d reason=%r", len(self._groups.left), str(error)
                )
            if self._groups.left:
                await asyncio.sleep(AGAIN_S)

    async def _end(self, producer: AsyncProducer, group: Group) -> None:
        walked = await producer.cancel_where(group.subject.name, dry_run=False)
        if walked.done:
            log.info("group_left_nothing group=%s ended=%d", group.name, walked.done)
        # What was being handed over, or could not be read, is found by the next walk.
        if not walked.in_flight and not walked.unread and group in self._groups.left:
            self._groups.delete(group)
            self._after()


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "a bug in the farewell", "exception": error})
