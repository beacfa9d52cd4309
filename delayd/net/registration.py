"""Registration: a server's connection to meta. The server registers, again with every heartbeat, and asks for routes
and servers.

Invariant: nothing here ends or holds up a server. While meta is away this tries to connect again, with back-off and
jitter, and each question fails at once with ServerUnavailable. The log has one line for each change of state, however
long it lasts.

     AWAY ──connect, prove──▶ register ──answer──▶ REGISTERED ──after heartbeat_ms──▶ register …
      ▲                  │    └──error by name──▶ REFUSED ──after back-off──▶ register …
      └──lost, no answer─┘       └──it is a copy──▶ FENCED, for the rest of this life
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from delayd.address import Endpoint
from delayd.errors import DelaydError, FencedInstance, RequestFailed, ServerStopped, ServerUnavailable, Stopping
from delayd.net.connection import Connection
from delayd.net.entry import connect
from delayd.net.trust import Membership
from delayd.wire.frame import Frame, HeadValue
from delayd.wire.heads import (
    need_instant,
    need_int,
    need_str,
    need_u64,
)
from delayd.wire.meta import (
    SUBJECTS_MAX,
    Cordons,
    Move,
    Registered,
    Routes,
    ServerInfo,
    SlotClaims,
    SlotOwners,
    SlotSet,
    need_members,
    need_slots,
    read_cordons,
    read_moves,
    read_routes,
    read_servers,
    read_slot_owners,
    slots_bytes,
)
from delayd.wire.requests import RequestType
from delayd.wire.tokens import TokenPage, TokenRecord, read_page

BACK_OFF_MS_MIN = 50  # Meta restarts within a second; a first try this soon finds it early.
BACK_OFF_MS_MAX = 2_000  # Below a lease, so that a server that was away is alive again soon after meta is back.
BACK_OFF_DOUBLINGS_MAX = 10  # More doublings than BACK_OFF_MS_MAX needs.
REQUEST_MS_MAX = 2_000  # Meta answers after one sync; without an answer the connection counts as dead.
HEARTBEAT_MS_MIN = 10  # Bounds for the interval that meta names.
HEARTBEAT_MS_MAX = 3_600_000

R = TypeVar("R")

log = logging.getLogger(__name__)


class RegistrationState(Enum):
    """How this server stands with meta."""

    AWAY = "away"  # Not reached since the last change.
    REGISTERED = "registered"
    REFUSED = "refused"  # Meta answered and refused by name, for example because of a newer life of this directory.
    FENCED = "fenced"  # Meta says that this is a copy; this life does not ask again.


class Moves(Protocol):
    """How a delay server takes the moves of subjects by operators."""

    @property
    def seen(self) -> int:
        """The number of the last move that is done, durably; 0 for none."""

    def take(self, moves: Sequence[Move]) -> None:
        """Take the moves after that one; called with every registration until they are done."""


class HeldSlots(Protocol):
    """The slots of keys that a delay server owns (rule I4)."""

    @property
    def claims(self) -> SlotClaims:
        """What it keeps durably about them."""

    def lost(self, slots: SlotSet) -> None:
        """Hear that these are not its own at meta."""

    def met(self, peers: frozenset[int]) -> None:
        """Hear which delay servers may own slots, and which may soon."""


class Orders(NamedTuple):
    """What operators decide at meta for a server; a realtime server hears of cordons only."""

    on_cordons: Callable[[Cordons], None]
    moves: Moves | None = None
    slots: HeldSlots | None = None


class Registration:
    """One connection to meta, kept for the life of a server; all methods belong to the loop's thread.

    `describe` is called for each registration. `on_now_ms` is called with meta's clock and boot; it may be
    `JudgedClock.reference` (rule T1). `on_refused` is called with the reason when meta refuses, once for each reason.
    """

    def __init__(
        self,
        meta: Endpoint,
        describe: Callable[[], Registered],
        membership: Membership,
        *,
        on_now_ms: Callable[[int, str], None] | None = None,
        on_refused: Callable[[DelaydError], None] | None = None,
        orders: Orders | None = None,
    ) -> None:
        self.state = RegistrationState.AWAY
        self._endpoint = meta
        self._describe = describe
        self._membership = membership
        self._on_now_ms = on_now_ms
        self._on_refused = on_refused
        self._orders = orders
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._registered = asyncio.Event()
        self._refusal = ""  # The code of the last refusal, so that one reason is logged once; "-" while meta is away.
        self._questions: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to connect to meta; call it when this server answers requests."""
        assert self._task is None, "a registration is started once"
        self._task = asyncio.get_running_loop().create_task(self._run(), name="registration")
        self._task.add_done_callback(_surface)

    async def registered(self) -> None:
        """Wait until meta has taken a registration of this server; for ever if it never does."""
        await self._registered.wait()

    async def close(self) -> None:
        """End the connection; meta counts this server as alive until its lease ends."""
        tasks = self._questions if self._task is None else {self._task, *self._questions}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed

    async def routes(self, subjects: Iterable[str], *, assign: bool = True) -> Routes:
        """The realtime server of each subject; with `assign` a subject without one gets one, if one is alive.

        Asked in parts if there are many. Raises ServerUnavailable while meta is away, ConnectionLost or RequestTimedOut
        if it goes away meanwhile, BadSubject for a name that can't be, DiskReserve if meta can store no more.
        """
        names = list(subjects)
        routes: dict[str, int] = {}
        servers: dict[int, ServerInfo] = {}
        unrouted: list[str] = []
        for begin in range(0, len(names), SUBJECTS_MAX):
            part: list[HeadValue] = [*names[begin : begin + SUBJECTS_MAX]]
            answer = await self._ask(RequestType.ROUTES, {"subjects": part, "assign": assign})
            found = read_routes(answer.head, self._endpoint.access)
            routes.update(found.routes)
            servers.update((info.server.log_id, info) for info in found.servers)
            unrouted.extend(found.unrouted)
        return Routes(routes, list(servers.values()), unrouted)

    def ask_routes(
        self, subjects: Iterable[str], done: Callable[[Routes | DelaydError], None], *, assign: bool = True
    ) -> None:
        """As `routes`, without a coroutine: `done` is called with the answer or the error; not after `close`."""
        self._question(self.routes(subjects, assign=assign), done)

    def ask_slots(self, wanted: SlotSet, done: Callable[[SlotOwners | DelaydError], None]) -> None:
        """Ask who owns the slots of keys; wanted ones that nobody owns get an owner. `done` is as for `ask_routes`."""

        async def ask() -> SlotOwners:
            return read_slot_owners((await self._ask(RequestType.SLOTS, {"wanted": slots_bytes(wanted)})).head)

        self._question(ask(), done)

    async def servers(self, role: str | None = None) -> list[ServerInfo]:
        """The servers of a role that meta knows, alive or not. Raises as `routes`."""
        answer = await self._ask(RequestType.SERVERS, {"role": role})
        return read_servers(answer.head, self._endpoint.access)

    def _question(self, asking: Coroutine[object, object, R], done: Callable[[R | DelaydError], None]) -> None:
        async def ask() -> None:
            answer: R | DelaydError
            try:
                answer = await asking
            except DelaydError as error:
                answer = error
            done(answer)

        self._questions.add(question := asyncio.get_running_loop().create_task(ask()))
        question.add_done_callback(self._questions.discard)
        question.add_done_callback(_surface)

    async def _ask(self, kind: RequestType, head: dict[str, HeadValue]) -> Frame:
        if self._connection is None or not self._connection.is_open:
            raise ServerUnavailable(f"meta at {self._endpoint} can't be reached; it is looked for again by itself")
        return await self._connection.request(kind, head, (), REQUEST_MS_MAX)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                wait_ms = float(await self._register(await self._connect()))
                failures = 0
            except ServerStopped:
                raise
            except DelaydError as error:
                wait_ms = self._back_off_ms(failures)
                failures += 1
                self._failed(error)
                if isinstance(error, FencedInstance):
                    # Otherwise this copy would take the place of the right server as soon as that one is restarted.
                    self.state = RegistrationState.FENCED
                    return
            await self._pause(wait_ms)

    async def _connect(self) -> Connection:
        if self._connection is None or not self._connection.is_open:
            self._connection = None
            connection = await connect(self._endpoint, timeout_ms=REQUEST_MS_MAX)
            try:
                await self._membership.prove(connection, REQUEST_MS_MAX)
            except BaseException:
                connection.abort()
                raise
            self._connection = connection
        return self._connection

    async def _register(self, connection: Connection) -> int:
        tokens = self._membership.tokens
        head = self._describe().to_head()
        head["used"] = {**tokens.used()}
        orders = self._orders
        if orders is not None and orders.moves is not None and orders.slots is not None:
            head["moves_seen"] = orders.moves.seen
            head |= orders.slots.claims.to_head()
        answer = await connection.request(RequestType.REGISTER, head, (), REQUEST_MS_MAX)
        heartbeat_ms = need_int(answer.head, "heartbeat_ms", HEARTBEAT_MS_MIN, HEARTBEAT_MS_MAX)
        now_ms = need_instant(answer.head, "now_ms")
        self._membership.joined(need_u64(answer.head, "cluster_id"))
        if self._on_now_ms is not None:
            self._on_now_ms(now_ms, need_str(answer.head, "boot") if "boot" in answer.head else "")
        if "tokens" in answer.head and need_u64(answer.head, "tokens") != tokens.revision:
            self._membership.heard_tokens(await self._tokens(connection))
        if orders is not None:
            orders.on_cordons(read_cordons(answer.head))
        if orders is not None and orders.moves is not None and orders.slots is not None:
            orders.moves.take(read_moves(answer.head))
            orders.slots.lost(need_slots(answer.head, "slots_lost"))
            if answer.head.get("slot_peers") is not None:
                orders.slots.met(need_members(answer.head, "slot_peers"))
        if self.state is not RegistrationState.REGISTERED:
            log.info("registered meta=%s", self._endpoint)
        self.state = RegistrationState.REGISTERED
        self._registered.set()
        return heartbeat_ms

    async def _tokens(self, connection: Connection) -> TokenPage:
        """All tokens that meta knows."""
        records: list[TokenRecord] = []
        while True:
            after = records[-1].name if records else ""
            page = read_page((await connection.request(RequestType.TOKENS, {"after": after}, (), REQUEST_MS_MAX)).head)
            records += page.tokens
            # When one has changed between two pages, the next registration finds another revision.
            if not page.more or not page.tokens:
                return TokenPage(page.revision, records, more=False)

    def _failed(self, error: DelaydError) -> None:
        last = (self.state, self._refusal)
        if isinstance(error, RequestFailed | ServerUnavailable | Stopping):
            # A connection without an answer in time is of no use for other requests either.
            if self._connection is not None:
                self._connection.abort()
            self.state, self._refusal = RegistrationState.AWAY, "-"
        else:
            self.state, self._refusal = RegistrationState.REFUSED, error.code
        if last == (self.state, self._refusal):
            return
        log.warning("%s meta=%s code=%s reason=%r", self.state.value, self._endpoint, error.code, error.message)
        if self.state is RegistrationState.REFUSED:
            self._membership.refused(error)
            if self._on_refused is not None:
                self._on_refused(error)

    async def _pause(self, wait_ms: float) -> None:
        # A connection that ends is replaced at once: meta was restarted, and clients ask it for live servers.
        if self._connection is not None and self._connection.is_open:
            await asyncio.wait({self._connection.closed}, timeout=wait_ms / 1000)
        else:
            await asyncio.sleep(wait_ms / 1000)

    def _back_off_ms(self, failures: int) -> float:
        limit_ms = BACK_OFF_MS_MIN << min(failures, BACK_OFF_DOUBLINGS_MAX)
        # Servers that lost meta at the same moment should not all come back at the same moment.
        return min(limit_ms, BACK_OFF_MS_MAX) * (0.5 + 0.5 * random.random())


def _surface(task: asyncio.Task[None]) -> None:
    # Nobody sees an exception in a task until the task is collected, but a bug must end the server now.
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": "a bug in the registration", "exception": error})
