"""A server that asks for proofs, for the tests of trust."""

from __future__ import annotations

from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.net.trust import Guard
from delayd.secret import Secret
from delayd.wire.frame import Frame
from tests.trust import SECRET

CLUSTER = 0xC1
LIMIT_MS = 5_000


class Guarded:
    """A server that serves everything that its guard lets pass, by an empty answer."""

    def __init__(self, secret: Secret = SECRET, cluster_id: int = CLUSTER) -> None:
        self.served: list[int] = []
        self.connections: list[Connection] = []
        self.crashes: list[Exception] = []
        self._guard = Guard(secret, "realtime", 7, lambda: cluster_id)

    def connected(self, connection: Connection) -> None:
        self.connections.append(connection)

    def received(self, connection: Connection, frame: Frame) -> None:
        if not self._guard.serves(connection, frame):
            self.served.append(frame.type)
            connection.answer(frame.request_id, {})

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        pass

    def crashed(self, error: Exception) -> None:
        self.crashes.append(error)
