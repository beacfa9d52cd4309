"""The meta server without I/O: registrations and routes, kept in the state, served from memory.

Invariant: an answer that says something new is given when the state's transaction that holds it has returned. What is
decided while a transaction runs is the next one, so any number of routes costs one sync.

     register, routes ──▶ decided ──▶ gathered ──▶ one transaction, off the loop ──▶ durable ──▶ answers
                                        ▲ meanwhile                                   │
                                        └───────────────── the next one ◀─────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgpack

from delayd.clock import Clock
from delayd.errors import BadRequest, DamagedData, DiskFull, DiskReserve, RetryLater, ServerStopped
from delayd.executor import Done, Executor
from delayd.state import State
from delayd.validate import check_subject
from delayd.wire.meta import SUBJECTS_MAX, Registered, Routes, ServerInfo, SubjectPage, read_registered
from delayd.wire.requests import U64_MAX

from .registry import Registry
from .routes import RouteTable

SERVER_PREFIX = b"server/"
ROUTE_PREFIX = b"route/"
DISK_RETRY_AFTER_MS = 1_000  # Someone must free space first.

OnStored = Callable[[RetryLater | None], None]
OnRoutes = Callable[[Routes | RetryLater], None]


@dataclass(slots=True)
class _Changes:
    """What the next transaction holds, and who waits for it."""

    puts: dict[bytes, bytes] = field(default_factory=dict)
    removes: list[bytes] = field(default_factory=list)
    servers: list[Registered] = field(default_factory=list)
    routes: dict[str, int] = field(default_factory=dict)
    waiters: list[OnStored] = field(default_factory=list)


class Meta:
    """Registry and routes of one directory; every method belongs to the loop's thread and none blocks."""

    def __init__(
        self,
        state: State,
        path: str,
        executor: Executor,
        clock: Clock,
        lease_ms: int,
        stop: Callable[[BaseException], None],
    ) -> None:
        self.transactions = 0
        self._state = state
        self._executor = executor
        self._stop = stop
        self._registry = Registry(clock, lease_ms, _stored_servers(state, path))
        self._table = RouteTable(_stored_routes(state, path))
        self._gathered = _Changes()
        self._committing = False

    @property
    def idle(self) -> bool:
        """Whether all that was decided is durable and answered."""
        return not self._committing

    @property
    def server_count(self) -> int:
        """Servers known, alive or not."""
        return len(self._registry)

    @property
    def route_count(self) -> int:
        """Subjects that have a server."""
        return len(self._table)

    def register(self, server: Registered, on_stored: OnStored) -> None:
        """Renew a server's lease; `on_stored` hears when this registration is durable, mostly at once.

        Raises StaleEpoch, EpochOutOfRange, PlaceTaken, FencedInstance or SlowDown, see `Registry`.
        """
        forgotten = self._registry.make_room(server, self._has_routes)
        if forgotten is not None:
            self._gathered.removes.append(_server_key(forgotten))
        if not self._registry.hear(server):
            on_stored(None)
            return
        # A transaction removes before it puts, so a server that was forgotten and is back stays.
        self._gathered.puts[_server_key(server)] = _server_value(server)
        self._gathered.servers.append(server)
        self._gathered.waiters.append(on_stored)
        self._commit()

    def servers(self, role: str | None) -> list[ServerInfo]:
        """All servers of a role, or of each."""
        return self._registry.servers(role)

    def routes(self, subjects: Sequence[str], assign: bool, on_routes: OnRoutes) -> None:
        """Look up subjects; with `assign` those without a route get one, durable when `on_routes` hears of it.

        Raises BadRequest for too many at once, BadSubject for a name that can't be; then none got a route.
        """
        if len(subjects) > SUBJECTS_MAX:
            raise BadRequest(f"{len(subjects)} subjects; ask for {SUBJECTS_MAX} at a time", field="subjects")
        for subject in subjects:
            check_subject(subject.encode())
        if assign:
            decided = self._table.decide(subjects, self._registry.live("realtime"))
            self._gathered.routes.update(decided)
            for subject, log_id in decided.items():
                self._gathered.puts[ROUTE_PREFIX + subject.encode()] = msgpack.packb(log_id)
        if self._table.has_unsettled(subjects):
            self._gathered.waiters.append(partial(self._answer_routes, subjects, on_routes))
            self._commit()
        else:
            self._answer_routes(subjects, on_routes, None)

    def subjects(self, prefix: str, after: str, limit: int) -> SubjectPage:
        """Subjects that have a route, in order of name; at most SUBJECTS_MAX, whatever the limit."""
        return self._table.page(prefix, after, min(limit, SUBJECTS_MAX))

    def _has_routes(self, server: Registered) -> bool:
        return server.role == "realtime" and self._table.has_routes(server.log_id)

    def _answer_routes(self, subjects: Sequence[str], on_routes: OnRoutes, error: RetryLater | None) -> None:
        if error is not None:
            on_routes(error)
            return
        routes: dict[str, int] = {}
        unrouted: list[str] = []
        for subject in dict.fromkeys(subjects):
            log_id = self._table.get(subject)
            if log_id is None:
                unrouted.append(subject)
            else:
                routes[subject] = log_id
        on_routes(Routes(routes, self._registry.find("realtime", routes.values()), unrouted))

    def _commit(self) -> None:
        if self._committing:
            return
        changes, self._gathered = self._gathered, _Changes()
        if not changes.puts:
            # Whoever waited for the last transaction's routes, and brought none of its own.
            for waiter in changes.waiters:
                waiter(None)
            return
        self._committing = True
        self.transactions += 1
        work = partial(self._state.commit, list(changes.puts.items()), changes.removes)
        self._executor.submit(work, partial(self._committed, changes))

    def _committed(self, changes: _Changes, done: Done[None]) -> None:
        self._committing = False
        refused: RetryLater | None = None
        try:
            done.result()
        except ServerStopped as error:
            self._stop(error)
            return
        except DiskFull as error:
            # Nothing of it was stored, so meta goes on and serves what it knows.
            refused = DiskReserve(f"meta stores nothing more: {error.message}", retry_after_ms=DISK_RETRY_AFTER_MS)
        self._table.settle(changes.routes, durable=refused is None)
        if refused is None:
            for server in changes.servers:
                self._registry.stored(server)
        for waiter in changes.waiters:
            waiter(refused)
        self._commit()


def _server_key(server: Registered) -> bytes:
    return SERVER_PREFIX + server.role.encode() + b"/" + server.log_id.to_bytes(8, "big")


def _server_value(server: Registered) -> bytes:
    head = server.to_head()
    value: bytes = msgpack.packb({name: head[name] for name in ("host", "port", "epoch", "pid", "place")})
    return value


def _stored_servers(state: State, path: str) -> list[Registered]:
    servers: list[Registered] = []
    for key, value in state.scan(SERVER_PREFIX):
        role, log_id = key[len(SERVER_PREFIX) : -9], key[-8:]
        try:
            fields = {"role": role.decode(), "log_id": int.from_bytes(log_id, "big"), **msgpack.unpackb(value)}
            servers.append(read_registered(fields))
        except (ValueError, TypeError, BadRequest) as error:
            raise DamagedData(path, 0, f"the value of {key!r} is no registration ({error})") from error
    return servers


def _stored_routes(state: State, path: str) -> list[tuple[str, int]]:
    routes: list[tuple[str, int]] = []
    for key, value in state.scan(ROUTE_PREFIX):
        try:
            log_id = msgpack.unpackb(value)
        except ValueError as error:
            raise DamagedData(path, 0, f"the value of {key!r} is no msgpack") from error
        if type(log_id) is not int or not 0 <= log_id <= U64_MAX:
            raise DamagedData(path, 0, f"the value of {key!r} is no log_id")
        routes.append((key[len(ROUTE_PREFIX) :].decode(), log_id))
    return routes
