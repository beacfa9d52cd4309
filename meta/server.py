"""The meta server on its socket: requests in, answers out, around the core (docs/protocol.md, Meta).

Invariant: no request waits for the disk on the loop, and after `stop` all that was answered is durable.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import os
from collections.abc import Callable, Iterator

from delayd.address import Endpoint
from delayd.config import MetaConfig, describe, listens_everywhere
from delayd.errors import BadArgument, BadRequest, DelaydError, RetryLater, Stopping
from delayd.machine.disk import Lock
from delayd.machine.identity import (
    LOCK,
    draw_id,
    holder_name,
    known_cluster_id,
    known_place,
    open_cluster_id,
    open_identity,
    settle_place,
)
from delayd.machine.state import State
from delayd.net.connection import Connection
from delayd.net.cut import Cuts, remove_left
from delayd.net.held_start import HeldServer
from delayd.net.machine import REAL_MACHINE, Machine, WatchedState, check_role
from delayd.net.server import Server
from delayd.net.tokens import TokenBook
from delayd.net.trust import Guard
from delayd.wire.exposition import Family
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.heads import (
    need_bool,
    need_instant,
    need_int,
    need_map,
    need_str,
    need_strs,
    need_u64,
    optional_str,
    read_row,
)
from delayd.wire.meta import (
    Routes,
    SlotOwners,
    members_head,
    moves_head,
    need_slots,
    need_versions,
    read_registered,
    read_slot_claims,
    servers_head,
    slots_bytes,
)
from delayd.wire.metrics import Asked, families_of
from delayd.wire.push import PushTarget
from delayd.wire.requests import META_LIMITS, RequestType, not_served
from delayd.wire.status import status_head
from delayd.wire.tokens import TokenRecord

from .core import Meta
from .registry import RegistryTerms, read_standing
from .slots import begin_in_doubt

STATE_FOLDER = "state.lmdb"
SERVED_TO_THE_END = frozenset((RequestType.PING, RequestType.STATUS))  # These are also served while the server stops.
RESTART_MS = 1_000  # After this a client of a stopping server may look for it again.

log = logging.getLogger(__name__)


class MetaService:
    """One directory, its core and its socket; runs inside delayd.net.program."""

    def __init__(
        self, config: MetaConfig, fail: Callable[[BaseException], None], machine: Machine = REAL_MACHINE
    ) -> None:
        self._config = config
        self._machine = machine
        self._fail = fail
        self._clock = machine.clock()
        self._started_at_ms = self._clock.now_ms()
        self._executor = machine.executor("meta-state", operator.call)
        self._disk = machine.disk()
        self._server = Server(self, limits=META_LIMITS, unheard=self.look)
        self._lock: Lock | None = None
        self._state: WatchedState | None = None
        self._stopping = False
        self._idle: asyncio.Event = asyncio.Event()
        self._requests = 0
        self._handlers: dict[int, Callable[[Connection, Frame], None]] = {
            RequestType.PING: self._ping,
            RequestType.STATUS: self._status,
            RequestType.REGISTER: self._register,
            RequestType.SERVERS: self._servers,
            RequestType.ROUTES: self._routes,
            RequestType.META_SUBJECTS: self._subjects,
            RequestType.FORGET_SERVER: self._decide,
            RequestType.MOVE_ROUTE: self._decide,
            RequestType.SLOTS: self._tell_slots,
            RequestType.MOVE_SLOTS: self._decide,
            RequestType.SETTLE_SLOTS: self._decide,
            RequestType.CORDON_SERVER: self._decide,
            RequestType.PUSH_TARGETS: self._push_targets,
            RequestType.SET_PUSH_TARGET: self._decide,
            RequestType.DELETE_PUSH_TARGET: self._decide,
            RequestType.TOKENS: self._tokens,
            RequestType.SET_TOKEN: self._decide,
            RequestType.REVOKE_TOKEN: self._decide,
        }

    def open(self) -> None:
        """Lock the directory, begin its next epoch, read the state."""
        config = self._config
        log.info("config %s", describe(config))
        try:
            self._disk.make_folder(config.folder)
            holder = holder_name(config.role, supervised=config.exit_with_stdin)
            self._lock = self._disk.lock(os.path.join(config.folder, LOCK), holder)
            check_role(self._disk, config.folder, config.role)
            remove_left(self._disk, config.folder)
            path = os.path.join(config.folder, STATE_FOLDER)
            self._state = self._machine.state(path)
            self._identity = open_identity(self._state, path, draw_id, self._disk)
            place = self._machine.place(config.folder)
            if _may_lack_owners(self._state, path, place, config.wanted_cluster_id):
                begin_in_doubt(self._state)
            self._cluster_id = open_cluster_id(self._state, path, draw_id, config.wanted_cluster_id)
            moved = settle_place(self._state, place)
            if moved:
                log.warning("moved servers_are_told_of_when=they_have_registered_here")
            secret = self._machine.secret(config)
            self._cuts = Cuts(config.folder, self._identity.log_id, self._state, self._executor)
            self._handlers.update(self._cuts.handlers)
            terms = RegistryTerms(config.lease_ms, moved)
            self._core = Meta(self._state, path, self._executor, self._clock, terms, self._fail_core)
            book = self._server.book = self._core.book
            book.required = config.require_token
            self._guard = Guard(secret, config.role, self._identity.log_id, lambda: self._cluster_id, book)
        except DelaydError:
            self._close()
            raise
        log.info(
            "opened log_id=%016x epoch=%d cluster_id=%016x servers=%d routes=%d",
            *self._identity,
            self._cluster_id,
            self._core.server_count,
            self._core.route_count,
        )

    def abandon(self) -> HeldServer:
        """See delayd.net.held_start.Service; an `open` that fails has closed all that it had opened."""
        config = self._config
        return HeldServer(config.role, config.listens, self._machine.secret(config))

    async def registered(self) -> None:
        """Clients know meta's address by themselves."""

    async def start(self) -> Endpoint:
        """Listen; opens first if `open` was not called."""
        config = self._config
        if self._state is None:
            self.open()
        try:
            return await self._server.listen(config.listens)
        except DelaydError:
            self._close()
            raise

    async def stop(self) -> None:
        """See delayd.net.held_start.Service."""
        self._stopping = True
        self._server.stop_accepting()
        while not self._core.idle:
            self._idle.clear()
            await self._idle.wait()
        await self._server.close()
        self._close()

    # Calls of connections.

    def look(self, moved_ms: int) -> None:
        """Nobody could be heard for so long: the clock has been moved by so much, or this server stood still."""
        self._core.stood_still(moved_ms)

    def connected(self, connection: Connection) -> None:
        """Do nothing: a client that connects may ask at once."""

    def received(self, connection: Connection, frame: Frame) -> None:
        """Answer, or refuse by raising."""
        self._server.look()
        self._requests += 1
        if self._guard.serves(connection, frame):
            return
        if self._stopping and frame.type not in SERVED_TO_THE_END:
            raise Stopping("this meta server is stopping; go on with what is known", retry_after_ms=RESTART_MS)
        handler = self._handlers.get(frame.type)
        if handler is None:
            raise not_served("meta", frame.type)
        handler(connection, frame)

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """End the cut that the connection asked for, if there is one."""
        self._cuts.disconnected(connection)

    def crashed(self, error: Exception) -> None:
        """Stop: the error is a bug."""
        self._fail(error)

    def _fail_core(self, error: BaseException) -> None:
        self._fail(error)
        # Requests that waited for the disk are not answered any more; a stop that waits for them must go on.
        self._idle.set()

    def _ping(self, connection: Connection, frame: Frame) -> None:
        connection.answer(frame.request_id, self._timed({}))

    def _servers(self, connection: Connection, frame: Frame) -> None:
        servers = self._core.servers(optional_str(frame.head, "role"))
        connection.answer(frame.request_id, self._told({"servers": servers_head(servers)}))

    def _register(self, connection: Connection, frame: Frame) -> None:
        seen = need_u64(frame.head, "moves_seen") if "moves_seen" in frame.head else 0

        def on_stored(refused: RetryLater | None) -> None:
            if refused is not None:
                connection.answer_error(frame.request_id, refused)
            else:
                head: Head = {"lease_ms": self._config.lease_ms, "heartbeat_ms": self._config.heartbeat_ms}
                self._core.move_seen(seen)
                head["moves"] = moves_head(self._core.moves_after(seen))
                if claims is not None:
                    head["slots_lost"] = slots_bytes(self._core.slots_lost(claims, server.log_id))
                    peers = self._core.slot_peers(server.log_id)
                    head["slot_peers"] = None if peers is None else members_head(peers)
                head |= self._core.cordons().to_head()
                head["boot"] = self._clock.boot_mark
                head["tokens"] = self._core.token_revision
                connection.answer(frame.request_id, self._told(head))
            self._idle.set()

        server = read_registered(frame.head)
        host = server.endpoint.host
        if listens_everywhere(host):
            raise BadRequest(f"host is {host}, where nobody could reach this server", field="host")
        claims = read_slot_claims(frame.head) if server.role == "delay" and "slots" in frame.head else None
        self._hear_used(frame)
        self._core.register(server, on_stored, claims)

    def _hear_used(self, frame: Frame) -> None:
        used = need_map(frame.head, "used") if "used" in frame.head else {}
        self._core.tokens_used({name: need_instant(used, name) for name in used})

    def _routes(self, connection: Connection, frame: Frame) -> None:
        def on_routes(answer: Routes | RetryLater) -> None:
            if isinstance(answer, RetryLater):
                connection.answer_error(frame.request_id, answer)
            else:
                connection.answer(frame.request_id, self._told(answer.to_head()))
            self._idle.set()

        subjects, assign = need_strs(frame.head, "subjects"), need_bool(frame.head, "assign")
        # A delay server asks for subjects that it has messages for; other clients may only be curious.
        self._core.routes(subjects, assign, on_routes, used=connection.trusted)

    def _decide(self, connection: Connection, frame: Frame) -> None:
        """Take an operator's decision; the answer goes out when it is durable."""

        def on_done(told: str | RetryLater) -> None:
            if isinstance(told, RetryLater):
                connection.answer_error(frame.request_id, told)
            else:
                connection.answer(frame.request_id, self._told({"message": told}))
            self._idle.set()

        head = frame.head
        if frame.type == RequestType.FORGET_SERVER:
            self._core.forget(need_str(head, "role"), need_u64(head, "log_id"), need_bool(head, "routes"), on_done)
        elif frame.type == RequestType.MOVE_ROUTE:
            self._core.move(need_str(head, "subject"), need_u64(head, "to"), on_done)
        elif frame.type == RequestType.CORDON_SERVER:
            self._core.cordon(need_u64(head, "log_id"), read_standing(need_str(head, "standing")), on_done)
        elif frame.type == RequestType.SETTLE_SLOTS:
            self._core.settle_slots(on_done)
        elif frame.type == RequestType.SET_PUSH_TARGET:
            self._core.set_push_target(read_row(PushTarget, head), need_int(head, "was"), on_done)
        elif frame.type == RequestType.DELETE_PUSH_TARGET:
            self._core.delete_push_target(need_str(head, "name"), on_done)
        elif frame.type == RequestType.SET_TOKEN:
            self._core.set_token(read_row(TokenRecord, head), need_bool(head, "is_new"), on_done)
        elif frame.type == RequestType.REVOKE_TOKEN:
            self._core.revoke_token(need_str(head, "name"), on_done)
        else:
            slots, versions, lost = need_slots(head, "slots"), need_versions(head), need_bool(head, "lost")
            self._core.move_slots(slots, versions, need_u64(head, "to"), on_done, lost=lost)

    def _tokens(self, connection: Connection, frame: Frame) -> None:
        self._hear_used(frame)
        page = self._core.tokens(need_str(frame.head, "after"))
        listed: list[HeadValue] = [record.to_head() for record in page.tokens]
        own: Head = {"revision": page.revision, "tokens": listed, "more": page.more}
        connection.answer(frame.request_id, self._told({**own, "required": self._core.book.required}))

    def _push_targets(self, connection: Connection, frame: Frame) -> None:
        head = frame.head
        seen, gateway = (need_u64(head, name) if name in head else 0 for name in ("seen", "gateway"))
        told, gateways = self._core.push_targets(need_str(head, "after"), seen, gateway)
        listed: list[HeadValue] = [target.to_head() for target in told.targets]
        own: Head = {"revision": told.revision, "targets": listed, "more": told.more, "gateways": gateways}
        connection.answer(frame.request_id, self._told(own))

    def _tell_slots(self, connection: Connection, frame: Frame) -> None:
        def on_slots(answer: SlotOwners | RetryLater) -> None:
            if isinstance(answer, RetryLater):
                connection.answer_error(frame.request_id, answer)
            else:
                connection.answer(frame.request_id, self._told(answer.to_head()))
            self._idle.set()

        self._core.slots(need_slots(frame.head, "wanted"), on_slots)

    def _subjects(self, connection: Connection, frame: Frame) -> None:
        head = frame.head
        page = self._core.subjects(need_str(head, "prefix"), need_str(head, "after"), need_int(head, "limit", 1))
        connection.answer(frame.request_id, self._timed(page.to_head()))

    # Measured.

    @property
    def tokens(self) -> TokenBook | None:
        """See delayd.net.admin.Measured."""
        return self._server.book

    def not_ready(self) -> str:
        """See delayd.net.admin.Measured."""
        return ""

    def families(self) -> Iterator[Family]:
        """See delayd.net.admin.Measured."""
        yield from families_of([Asked("meta", f"{self._identity.log_id:016x}", self._told_status())])

    def families_by_subject(self, pattern: str) -> Iterator[Family]:
        """See delayd.net.admin.Measured."""
        raise BadArgument("meta counts nothing by subject; ask a realtime server")

    def _status(self, connection: Connection, frame: Frame) -> None:
        if self._state is not None:
            self._state.look()
        connection.answer(frame.request_id, self._told_status())

    def _told_status(self) -> Head:
        counters = {
            "requests": self._requests,
            "connections": len(self._server.connections),
            "servers": self._core.server_count,
            "routes": self._core.route_count,
            "transactions": self._core.transactions,
        }
        return status_head(
            role=self._config.role,
            log_id=self._identity.log_id,
            epoch=self._identity.epoch,
            cluster_id=self._cluster_id,
            pid=os.getpid(),
            started_at_ms=self._started_at_ms,
            now_ms=self._clock.now_ms(),
            counters=counters,
            waits=self._core.waits(),
            own={**self._server.status(), "boot": self._clock.boot_mark},
        )

    def _told(self, head: Head) -> Head:
        return self._timed({**head, "cluster_id": self._cluster_id})

    def _timed(self, head: Head) -> Head:
        return {**head, "now_ms": self._clock.now_ms()}

    def _close(self) -> None:
        self._executor.close()
        if self._state is not None:
            self._state.close()
        if self._lock is not None:
            self._lock.release()
        self._disk.close()


def _may_lack_owners(state: State, path: str, place: int, wanted_cluster_id: int) -> bool:
    """Whether delay servers may own slots of which this state does not know: it takes the place of a lost meta, or its
    folder was moved or restored. A cluster whose id is drawn here has no servers yet.
    """
    takes_over = bool(wanted_cluster_id) and not known_cluster_id(state, path)
    known = known_place(state)
    return takes_over or (known is not None and known != place)
