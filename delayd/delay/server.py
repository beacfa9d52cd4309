"""The delay server's shell: real files, sockets, threads and one timer around the core.

The core is called on the loop's thread only, and its next wake-up is set again after every call.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from delayd.address import Endpoint
from delayd.batch.columns import Buffer
from delayd.config import DelayConfig, describe
from delayd.delay.core import DelayCore, Surroundings, Threads
from delayd.delay.handoff.wire import OnAnswer, Wire
from delayd.delay.ledger.owed import Leaving
from delayd.delay.requests import Requests
from delayd.delay.seal_hook import SealHook
from delayd.errors import BadArgument, ConnectionLost, DelaydError, NotReady
from delayd.log.control import QuotaLimits
from delayd.machine.identity import draw_id
from delayd.machine.operating import WaitKind
from delayd.net.connection import Connection
from delayd.net.courier import Courier, CourierTerms
from delayd.net.cut import Cuts, Hold
from delayd.net.entry import connect
from delayd.net.held_start import HeldServer, Lives
from delayd.net.home import Home, abandon
from delayd.net.machine import REAL_MACHINE, Machine
from delayd.net.program import Fail
from delayd.net.registration import Orders, Registration
from delayd.net.server import Server
from delayd.net.timer import Timer, next_tick_s
from delayd.net.tokens import TokenBook
from delayd.net.trust import Guard, Membership
from delayd.wire.exposition import Family
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.meta import Registered, Routes, SlotOwners, SlotSet
from delayd.wire.metrics import Asked, families_of, family_of_logs
from delayd.wire.requests import DELAY_LIMITS, RequestType
from delayd.wire.scheduling import read_quotas
from delayd.wire.status import status_head

SLEEP_MS_MAX = 500  # A cap on every sleep: the server notices within it when the wall clock is set ahead.
PLACES_MS = 500  # How often to ask meta where realtime servers listen, while one that is needed is away.
LEARN_MS = 500  # How often a new server asks the others for quotas, while none of them answers.
QUOTAS = "quotas"  # Who puts the fence up meanwhile.
SWEEP_S = 30
CONNECT_MS = 2_000

LETTERS = CourierTerms(RequestType.SEND_DRAINED, WaitKind.DRAINED_AWAY)

log = logging.getLogger(__name__)


class DelayServer:
    """One delay server; a Service of delayd.net.held_start and the Handler of its Server."""

    def __init__(self, config: DelayConfig, fail: Fail, machine: Machine = REAL_MACHINE) -> None:
        self._config = config
        self._machine = machine
        self._fail = fail
        self._listens = config.listens  # A life after this one listens at the port that this one was given.
        self._lives = Lives(self, config.role, config.folder, self._end, fail)
        self._forget()

    def _forget(self) -> None:
        """Have nothing of a life; the next one may begin."""
        self._started_at_ms = 0
        self._rearming = False
        self._armed_for: tuple[int, int | None] = (0, None)
        self._dials: set[asyncio.Task[None]] = set()
        self._home: Home | None = None
        self._core: DelayCore | None = None
        self._requests: Requests | None = None
        self._timer: Timer | None = None
        self._server: Server | None = None
        self._registration: Registration | None = None
        self._membership: Membership | None = None
        self._guard: Guard | None = None
        self._courier: Courier[Leaving] | None = None
        self._places: asyncio.Task[None] | None = None
        self._hook: SealHook | None = None
        self._telling: asyncio.Task[None] | None = None
        self._learning: asyncio.Task[None] | None = None  # A new server takes the quotas of the others.
        self._hold = Hold(lambda seconds, end: asyncio.get_running_loop().call_later(seconds, end))
        self._cuts: Cuts | None = None

    def open(self) -> None:
        """Recover from the directory."""
        config, loop = self._config, asyncio.get_running_loop()
        log.info("starting %s", describe(config))
        home = self._home = Home(config, self._machine, ("commit", "outcomes", "worker"), self._rearm_soon)
        self._started_at_ms = home.clock.now_ms()
        self._timer = Timer(loop, self._wake)
        self._core = DelayCore(
            home.disk,
            home.state,
            config,
            Threads(*home.executors),
            Surroundings(
                clock=home.clock,
                dial=self._dial,
                ask_routes=self._ask_routes,
                ask_slots=self._ask_slots,
                random_id=draw_id,
                evidence=home.clock.restart_evidence,
                rest=self._machine.rest,
                begin_anew=self._lives.begin_anew,
            ),
        )

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
        config, home, core, loop = self._config, self._home, self._core, asyncio.get_running_loop()
        assert home is not None and core is not None, "it was opened"
        secret, place = self._machine.secret(config), self._machine.place(config.folder)
        membership = self._membership = Membership(
            secret, home.state, home.state_path, place, core.fence, core.ask_targets_first
        )
        membership.tokens.required = config.require_token
        membership.begin(fresh=core.site.identity.epoch == 1)
        self._registration = Registration(
            config.meta_endpoint,
            self._registered,
            membership,
            on_now_ms=home.clock.reference,
            orders=Orders(
                lambda cordons: core.cordon(core.site.identity.log_id in cordons.closed),
                core.handoff.moves,
                core.asked.endings.owned_slots,
            ),
        )
        self._courier = Courier(core.asked.endings.drain, LETTERS, self._registration, membership, self._rearm_soon)
        self._guard = membership.guard(config.role, core.site.identity.log_id)
        cut_terms = (config.folder, core.site.identity.log_id, home.state, home.executors[-1])
        self._cuts = Cuts(*cut_terms, self._hold.begin, self._hold.end)
        self._requests = Requests(core, home.clock, self._status, self._soon, self._cuts.handlers, self._hold.leave)
        self._server = Server(self, limits=DELAY_LIMITS, unheard=home.clock.stood_still, book=membership.tokens)
        self._listens = await self._server.listen(self._listens)
        self._registration.start()
        self._courier.start()
        self._places = loop.create_task(self._find_places(self._registration, core))
        self._places.add_done_callback(self._lives.surface)
        if core.site.identity.epoch == 1:
            self._learning = loop.create_task(self._learn_quotas(self._registration, core))
            self._learning.add_done_callback(self._lives.surface)
        self._begin_hook(core)
        home.every(SWEEP_S, self._sweep)
        self._wake()
        return self._listens

    async def stop(self) -> None:
        """See delayd.net.held_start.Service; a last checkpoint is written, if it takes no longer than a stop may."""
        await self._lives.close()
        if self._core is not None:
            await self._end()

    async def _end(self) -> None:
        home, core, server, registration = self._home, self._core, self._server, self._registration
        assert home is not None and core is not None and server is not None and registration is not None
        if self._courier is not None:
            await self._courier.close()
        server.stop_accepting()
        for task in (self._places, self._learning, self._telling, *self._dials):
            if task is not None:
                task.cancel()
        if self._telling is not None:
            await asyncio.wait((self._telling,))  # It ends the command that is under way.
        await home.stop(core)
        # Answers that a cut has held back leave now; whoever cuts hears that this server kept nothing to itself.
        self._hold.end()
        await asyncio.gather(server.close(), registration.close())
        if self._timer is not None:
            self._timer.close()
        home.close(core)
        self._forget()

    # Handler of the connections.

    def connected(self, connection: Connection) -> None:
        """Do nothing: the server knows nothing of a client before its first request."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Give a request to the core."""
        if self._requests is None or self._guard is None:
            raise NotReady("this delay server is starting; ask again in a moment")
        if self._guard.serves(connection, frame):
            return
        self._requests.received(connection, frame)
        # Nothing of a SEND is due before its commit, after which the timer is set again.
        if frame.type != RequestType.SEND:
            self._rearm_soon()

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Forget the connection. Messages that the client sent are kept; only their answers can't be delivered."""
        if self._requests is not None and self._cuts is not None:
            self._requests.disconnected(connection)
            self._cuts.disconnected(connection)

    def crashed(self, error: Exception) -> None:
        """Stop: the error is a bug."""
        self._fail(error)

    def _soon(self, call: Callable[[], None]) -> None:
        """Call back at the next turn of the loop, and set the timer again after it."""

        def called() -> None:
            call()
            self._rearm_soon()

        asyncio.get_running_loop().call_soon(called)

    # Time.

    def look(self, moved_ms: int) -> None:
        """Do what is due by now: the clock has been moved by so much, and nothing else could happen meanwhile."""
        if self._core is not None:
            self._core.stood_still(moved_ms)
            self._wake()

    def next_stop_ms(self) -> int | None:
        """The next instant at which a message may be due, while nothing is due now; None while nothing is known."""
        return None if self._core is None else self._core.next_stop_ms()

    @property
    def recurs(self) -> bool:
        """Whether there may be recurring schedules."""
        return self._core is not None and self._core.handoff.dispatcher.recurs

    def _wake(self) -> None:
        if self._core is not None:
            self._core.wake()
            self._rearm_soon()

    def _rearm_soon(self) -> None:
        """Set the timer again, once, after everything that came in this turn of the loop has been served."""
        if not self._rearming:
            self._rearming = True
            asyncio.get_running_loop().call_soon(self._rearm)

    def _rearm(self) -> None:
        self._rearming = False
        home, core, timer = self._home, self._core, self._timer
        if home is None or core is None or timer is None:
            return
        clock, wake_ms, due_ms = home.clock, core.next_wake_ms(), core.next_due_ms()
        if timer.is_set:
            # A timer that fires early costs a look at what is due. Setting it again costs a system call, mostly for
            # nothing: each answer puts off the instant at which a target would count as silent.
            armed_wake_ms, armed_due_ms = self._armed_for
            if wake_ms >= armed_wake_ms and (due_ms is None or (armed_due_ms is not None and due_ms >= armed_due_ms)):
                return
        self._armed_for = (wake_ms, due_ms)
        now_ms = clock.monotonic_ms()
        # It wakes up at multiples of the cap, as all that goes by ticks does.
        delay_ms = float(min(SLEEP_MS_MAX - now_ms % SLEEP_MS_MAX, wake_ms - now_ms))
        if due_ms is not None:
            # The clock counts whole ms: without the fraction the timer would fire up to 1 ms late.
            fraction_ms = time.time_ns() % 1_000_000 / 1_000_000
            delay_ms = min(delay_ms, due_ms - clock.now_ms() - fraction_ms)
        timer.set_after_ms(max(0.0, delay_ms))

    # Calls of the core that need the network.

    def _dial(self, endpoint: Endpoint, connected: Callable[[Wire], None], lost: Callable[[DelaydError], None]) -> None:
        async def dial() -> None:
            try:
                connection = await self._connect(endpoint)
            except DelaydError as error:
                lost(error)
                self._rearm_soon()
                return
            ended = ConnectionLost(f"the connection to {endpoint} ended", sent=True)
            connection.closed.add_done_callback(lambda closed: self._after(lost, ended))
            connected(_Wire(connection, self._rearm_soon, self._hold))
            self._rearm_soon()

        task = asyncio.get_running_loop().create_task(dial())
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        task.add_done_callback(self._lives.surface)

    async def _connect(self, endpoint: Endpoint) -> Connection:
        """Connect to a server of this cluster, and prove that this server belongs to it too (rule H8)."""
        assert self._membership is not None
        connection = await connect(endpoint, timeout_ms=CONNECT_MS)
        try:
            await self._membership.prove(connection, CONNECT_MS)
        except BaseException:
            connection.abort()
            raise
        return connection

    def _after(self, call: Callable[[DelaydError], None], error: DelaydError) -> None:
        call(error)
        self._rearm_soon()

    def _ask_routes(self, subjects: list[bytes]) -> None:
        assert self._registration is not None
        names = [subject.decode("ascii") for subject in subjects]
        self._registration.ask_routes(names, partial(self._routed, subjects))

    def _routed(self, subjects: list[bytes], answer: Routes | DelaydError) -> None:
        core = self._core
        assert core is not None
        if isinstance(answer, DelaydError):
            core.handoff.dispatcher.routed({}, subjects)
        else:
            for info in answer.servers:
                if info.heard:
                    core.handoff.dispatcher.place(info.server.log_id, info.server.endpoint)
            # Only the subjects that were asked for count: meta may name anything.
            found = [(subject, answer.routes.get(subject.decode("ascii"))) for subject in subjects]
            routes = {subject: target for subject, target in found if target is not None}
            core.handoff.dispatcher.routed(routes, [subject for subject in subjects if subject not in routes])
        self._rearm_soon()

    def _ask_slots(self, wanted: SlotSet, answer: Callable[[SlotOwners | DelaydError], None]) -> None:
        if self._registration is None:
            answer(NotReady("this delay server is starting; ask again in a moment"))
            return

        def answered(owners: SlotOwners | DelaydError) -> None:
            answer(owners)
            self._rearm_soon()

        self._registration.ask_slots(wanted, answered)

    async def _find_places(self, registration: Registration, core: DelayCore) -> None:
        """Keep the addresses of targets up to date: a realtime server may listen elsewhere after a restart."""
        loop = asyncio.get_running_loop()
        await registration.registered()
        while True:
            if core.handoff.dispatcher.wants_places:
                try:
                    for info in await registration.servers("realtime"):
                        # An address that meta only remembers may belong to another server by now (rule H8).
                        if info.alive and info.heard:
                            core.handoff.dispatcher.place(info.server.log_id, info.server.endpoint)
                    self._rearm_soon()
                except DelaydError as error:
                    log.debug("places_unknown reason=%r", str(error))
            now_s = loop.time()
            await asyncio.sleep(next_tick_s(now_s, PLACES_MS / 1000) - now_s)

    async def _learn_quotas(self, registration: Registration, core: DelayCore) -> None:
        """Take the quotas that an operator set before this server was made, from any other one that serves; until then
        this server takes no sends, because it could not judge them (docs/quotas.md).
        """
        await registration.registered()
        while True:
            try:
                others = [info for info in await registration.servers("delay") if info.alive and info.heard]
                others = [info for info in others if info.server.log_id != core.site.identity.log_id]
                if not others:
                    break
                why = NotReady("this delay server is new, and asks the others for the quotas of subjects")
                core.fence.put_up(QUOTAS, why, WaitKind.QUOTAS_NOT_KNOWN)
                for info in others:
                    if await self._learn_from(info.server.endpoint, core):
                        break
                else:
                    await asyncio.sleep(LEARN_MS / 1000)
                    continue
                break
            except DelaydError as error:
                log.debug("quotas_unknown reason=%r", str(error))
                await asyncio.sleep(LEARN_MS / 1000)
        core.fence.take_down(QUOTAS)
        self._rearm_soon()

    async def _learn_from(self, endpoint: Endpoint, core: DelayCore) -> bool:
        """Set the quotas that another delay server has; whether all of them are set."""
        loop, after, more = asyncio.get_running_loop(), "", True
        try:
            connection = await self._connect(endpoint)
        except DelaydError as error:
            log.debug("quotas_unknown reason=%r", str(error))
            return False
        try:
            while more:
                head: Head = {"after": after, "prefix": ""}
                page, more = read_quotas((await connection.request(RequestType.QUOTAS, head, (), CONNECT_MS)).head)
                for info in page:
                    done: asyncio.Future[DelaydError | None] = loop.create_future()
                    limits = QuotaLimits(info.per_second, info.pending, info.pending_bytes)
                    core.asked.quotas.set(info.subject.encode(), limits, done.set_result)
                    self._rearm_soon()
                    if (refused := await done) is not None:
                        raise refused
                more = more and bool(page)
                after = page[-1].subject if page else after
        except DelaydError as error:
            log.warning("quotas_not_learned from=%s reason=%r", endpoint, str(error))
            return False
        finally:
            connection.close()
        return True

    def _begin_hook(self, core: DelayCore) -> None:
        if self._config.seal_hook:
            self._hook = SealHook(self._config, core.upkeep.retention)
            self._telling = asyncio.get_running_loop().create_task(self._hook.run())
            self._telling.add_done_callback(self._lives.surface)

    # Housekeeping: jobs only post requests to the core (rule T3).

    def _sweep(self) -> None:
        if self._core is not None:
            self._core.sweep()
            self._rearm_soon()

    def _registered(self) -> Registered:
        assert self._core is not None and self._membership is not None
        identity, place = self._core.site.identity, self._membership.place
        endpoint = self._config.advertised(self._listens)
        return Registered("delay", identity.log_id, endpoint, identity.epoch, os.getpid(), place)

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

    def families(self) -> Iterator[Family]:
        """See delayd.net.admin.Measured."""
        core = self._core
        if core is None or self._server is None:
            return
        name = f"{core.site.identity.log_id:016x}"
        yield from families_of([Asked("delay", name, self._status())])
        logs = core.logs.intake, core.logs.outcomes
        yield family_of_logs("delay", name, [(each.name, each.took.counted()) for each in logs])

    def families_by_subject(self, pattern: str) -> Iterator[Family]:
        """See delayd.net.admin.Measured."""
        raise BadArgument("a delay server counts nothing by subject; ask a realtime server, or `delayd pending`")

    def _status(self) -> Head:
        assert self._core is not None and self._home is not None and self._server is not None
        core, clock = self._core, self._home.clock
        return status_head(
            role="delay",
            log_id=core.site.identity.log_id,
            epoch=core.site.identity.epoch,
            cluster_id=self._membership.cluster_id if self._membership is not None else 0,
            pid=os.getpid(),
            started_at_ms=self._started_at_ms,
            now_ms=clock.now_ms(),
            counters=core.standing.counters(),
            waits=[
                *core.standing.waits(),
                *(self._courier.waits() if self._courier is not None else ()),
                *(self._hook.waits() if self._hook is not None else ()),
            ],
            refuses=core.standing.refuses(),
            own={
                **self._server.status(),
                "clock_confirmed": clock.confirmed,
                "clock_in_doubt": clock.in_boot_doubt,
                "fenced": core.fence.is_up,
                "cordoned": core.logs.intake.cordoned,
            },
        )


class _Wire:
    """A connection to a target, as the core uses it: after each answer the timer is set again."""

    def __init__(self, connection: Connection, rearm: Callable[[], None], hold: Hold) -> None:
        self._connection = connection
        self._rearm = rearm
        self._hold = hold

    def call(self, frame_type: int, head: Mapping[str, HeadValue], body: Sequence[Buffer], on_answer: OnAnswer) -> None:
        def answered(answer: Frame | DelaydError) -> None:
            on_answer(answer)
            self._rearm()

        # Few bytes are sent only when nothing is under way; then there is nothing to gather them with (decision 0008).
        self._hold.leave(lambda: self._connection.call(frame_type, head, body, answered, now=True))

    def close(self) -> None:
        self._connection.close()
