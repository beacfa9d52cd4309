"""Meta as judges see it: the real server, but for its socket, thread and disk. Only this module knows its insides.

Invariant: whatever strangers say to it, it tells the same routes and knows the same servers, in this life and the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

from delayd.address import Endpoint
from delayd.config import MetaConfig
from delayd.errors import DelaydError
from delayd.machine.identity import Identity
from delayd.net.connection import Connection
from delayd.net.trust import Guard
from delayd.secret import SECRET_BYTES, Secret
from delayd.testing.clock import SimClock
from delayd.testing.executor import StepExecutor
from delayd.testing.state import MemoryState
from delayd.wire.frame import Frame, Head, HeadValue
from delayd.wire.meta import Registered
from delayd.wire.requests import RequestType
from meta.core import Meta
from meta.registry import RegistryTerms
from meta.server import MetaService

LOG_ID = 0x3E7A
CLUSTER_ID = 0xC1
PATH = "META"
LEASE_MS = 5_000


class MetaAdapter:
    """Meta through all of its lives: it knows the targets, and where each subject goes."""

    def __init__(self, clock: SimClock, targets: Mapping[int, str], routes: Mapping[str, int]) -> None:
        self._clock = clock
        self._state = MemoryState()
        self._targets = targets
        self._subjects = list(routes)
        self.begin()
        self._core.routes(self._subjects, True, lambda answer: None)
        self._executor.run_all()
        for subject, target in routes.items():
            self._core.move(subject, target, lambda told: None)
            self._executor.run_all()

    def begin(self) -> None:
        """Begin the next life, which the targets register with."""
        self._state = self._state.after_crash()
        self._executor = StepExecutor()
        self._core = Meta(self._state, PATH, self._executor, self._clock, RegistryTerms(LEASE_MS), _failed)
        self._service = asyncio.run(self._made())
        for number, (log_id, host) in enumerate(self._targets.items(), 1):
            self._core.register(Registered("realtime", log_id, Endpoint(host, number), 1, 1), lambda refused: None)
            self._executor.run_all()

    async def _made(self) -> MetaService:
        service = MetaService(MetaConfig(data="/data"), _failed)
        service._executor.close()
        service._disk.close()
        service._core, service._clock = self._core, self._clock
        service._identity, service._cluster_id = Identity(LOG_ID, 1), CLUSTER_ID
        secret = Secret(bytes(SECRET_BYTES), PATH)
        service._guard = Guard(secret, "meta", LOG_ID, lambda: CLUSTER_ID)
        return service

    def told(self) -> tuple[dict[str, int], dict[int, str]]:
        """Where each subject goes, and which realtime servers there are and where, as a delay server is told."""
        asker = Stranger(trusted=True)
        asker.asks(self, RequestType.ROUTES, {"subjects": cast(list[HeadValue], self._subjects), "assign": False})
        asker.asks(self, RequestType.SERVERS, {"role": "realtime"})
        routes, servers = (cast(dict[str, object], answer) for answer in asker.answers)
        known = cast(list[dict[str, object]], servers["servers"])
        places = {cast(int, server["log_id"]): cast(str, server["host"]) for server in known}
        return cast(dict[str, int], routes["routes"]), places

    def serves(self, peer: Stranger, frame: Frame) -> None:
        """Have a frame served; a DelaydError is its answer, and anything else a bug."""
        try:
            if frame.fault is not None:
                raise frame.fault
            self._service.received(cast(Connection, peer), frame)
        except DelaydError as error:
            peer.answer_error(frame.request_id, error)

    def does_some(self, operations: int) -> None:
        """Some of what waits for the disk is stored and answered."""
        for _ in range(operations):
            self._executor.step()

    def rests(self) -> None:
        """All of it."""
        self._executor.run_all()


class Stranger:
    """One connection to meta, which has not proved the secret unless it says so."""

    peer = "a stranger"
    channel = b""
    entry = None

    def __init__(self, *, trusted: bool = False) -> None:
        self.trusted = trusted
        self.answers: list[Head] = []
        self.refused: list[DelaydError] = []

    def asks(self, meta: MetaAdapter, kind: RequestType, head: Head) -> None:
        """Ask one thing, and wait for the answer."""
        meta.serves(self, Frame(kind, 0, len(self.answers) + 1, head, memoryview(b"")))
        meta.rests()

    def answer(self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[object] = ()) -> None:
        """See `delayd.net.connection.Connection`."""
        self.answers.append(dict(head))

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        """See `delayd.net.connection.Connection`."""
        self.refused.append(error)


def _failed(error: BaseException) -> None:
    raise AssertionError(f"meta ends: {error}") from error
