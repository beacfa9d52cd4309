"""The realtime server's core in the test's loop, behind a real socket: for tests of clients.

What consumers said is read from the wire, so the tests say what any realtime server is told. The server's clock goes on
only when a test moves it, or by `beat`, which lets as much time pass as on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from delayd.batch.columns import Buffer
from delayd.errors import DelaydError
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, HeadValue
from delayd.wire.heads import need_rows
from delayd.wire.requests import RequestType
from tests.unit.client.servers import SmallServer
from tests.worlds.dispatch_batches import dispatch_batch
from tests.worlds.realtime import SimPeer
from tests.worlds.realtime import World as Life

BEAT_S = 0.002
SUBJECT, GROUP = "orders", "g"


class Tapped:
    """A connection as the core has it; the server reads what passes."""

    def __init__(self, server: CoreServer, connection: Connection) -> None:
        self.asked: dict[int, Frame] = {}
        self.is_trusted = False
        self.close = connection.close
        self._server = server
        self._connection = connection

    @property
    def is_open(self) -> bool:
        return self._connection.is_open

    def answer(
        self, request_id: int, head: Mapping[str, HeadValue], body: Sequence[Buffer] = (), *, more: bool = False
    ) -> None:
        head, body = self._server.told(self.asked[request_id], dict(head), body)
        if not more:
            del self.asked[request_id]
        self._connection.answer(request_id, head, body, more=more)

    def answer_error(self, request_id: int, error: DelaydError) -> None:
        self.asked.pop(request_id)
        self._connection.answer_error(request_id, error)


class CoreServer(SmallServer):
    """One realtime server over all its lives. Consume sequences count the messages of a subject from 0."""

    def __init__(self, log_id: int) -> None:
        super().__init__(log_id)
        self.life = Life(log_id=log_id)
        self.beating: asyncio.Task[None] | None = None
        self.keeps: RequestType | None = None  # Requests of this type wait until `release`.
        self.held: dict[int, tuple[int, int]] = {}  # Consume sequence and attempt, by pull sequence.
        self.acked: list[int] = []  # Consume sequences, in the order of their acknowledgement.
        self.counted: list[int] = []  # The same of what was given back as an attempt.
        self.returned: list[int] = []  # The same of what no handler was given.
        self.extended: list[int] = []  # The same of each extension.
        self.damage = False  # The last byte of what is pulled is another one.
        self.lies: list[HeadValue] = []  # What the next answers say is wanted.
        self._tapped: dict[Connection, Tapped] = {}
        self._kept: list[tuple[Connection, Frame]] = []
        self._session = 0
        self._batches = 0
        self._sent = 0
        self._greet()

    def put(self, subject: str, *bodies: bytes, headers: Sequence[bytes] = ()) -> None:
        """These messages are due."""
        if not bodies:
            return
        self._batches += 1
        batch = dispatch_batch(self._batches, bodies, subject=subject, headers=headers, first_sequence=self._sent + 1)
        self._sent += len(bodies)
        self.life.dispatch(self._origin, self._session, batch)

    def add(self, *bodies: bytes) -> None:
        """These messages of one subject are due."""
        self.put(SUBJECT, *bodies)

    def pulls(self) -> int:
        """How many pulls it was asked for."""
        return sum(frame.type == RequestType.PULL for frame in self.seen)

    def waiting(self) -> int:
        """How many pulls wait for messages."""
        return sum(
            frame.type == RequestType.PULL for tapped in self._tapped.values() for frame in tapped.asked.values()
        )

    def end_leases(self) -> None:
        """What consumers hold is no longer theirs, and they do not know it."""
        self.held.clear()
        self.life.pass_time(12 * 3_600_000)

    async def start(self) -> None:
        await super().start()
        self.beating = asyncio.get_running_loop().create_task(self._beat())

    async def stop(self) -> None:
        if self.beating is not None:
            self.beating.cancel()
            self.beating = None
        await super().stop()

    async def restart(self) -> None:
        """Stop, and start again at the same port."""
        await self.stop()
        self.life = self.life.restarted()
        self._greet()
        await self.start()

    def serve(self, connection: Connection, frame: Frame) -> None:
        if frame.type == self.keeps:
            self._kept.append((connection, frame))
            return
        tapped = self._tapped.setdefault(connection, Tapped(self, connection))
        tapped.asked[frame.request_id] = frame
        try:
            self.life.core.received(tapped, frame)
        except DelaydError as error:
            tapped.answer_error(frame.request_id, error)

    def release(self) -> None:
        """Serve what waits."""
        self.keeps = None
        kept, self._kept = self._kept, []
        for connection, frame in kept:
            self.serve(connection, frame)

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        if tapped := self._tapped.pop(connection, None):
            self.life.core.disconnected(tapped)

    def told(
        self, frame: Frame, head: dict[str, HeadValue], body: Sequence[Buffer]
    ) -> tuple[dict[str, HeadValue], Sequence[Buffer]]:
        """Note what an answer means; the answer that leaves."""
        if frame.type == RequestType.PULL and "group" in frame.head:
            self._gave(need_rows(head, "parts", 4))
        elif frame.type in (RequestType.ACK, RequestType.NACK, RequestType.EXTEND):
            self._took(frame, need_rows(head, "stale", 3))
        if self.damage and body:
            whole = bytearray(b"".join(body))
            whole[-1] ^= 1
            body = [bytes(whole)]
        if self.lies and "wanted" in head:
            head["wanted"] = self.lies.pop()
        return head, body

    def _gave(self, parts: list[list[int]]) -> None:
        for pull, consume, count, attempt in parts:
            again = range(consume, consume + count)
            self.held = {at: held for at, held in self.held.items() if held[0] not in again}
            self.held |= {pull + row: (consume + row, attempt) for row in range(count)}

    def _took(self, frame: Frame, stale: list[list[int]]) -> None:
        refused = {pull + row for _, pull, count in stale for row in range(count)}
        pulls = [pull + row for _, pull, count in need_rows(frame.head, "handles", 3) for row in range(count)]
        consumes = [self.held[pull][0] for pull in pulls if pull in self.held and pull not in refused]
        if frame.type == RequestType.EXTEND:
            self.extended += consumes
            return
        for pull in pulls:
            self.held.pop(pull, None)
        given_back = self.returned if frame.head.get("uncounted") else self.counted
        (self.acked if frame.type == RequestType.ACK else given_back).extend(consumes)

    def _greet(self) -> None:
        self._origin = SimPeer()
        self._session += 1
        self.life.hello(self._origin, self._session)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(BEAT_S)
            passed_ms = int((loop.time() - before) * 1_000)
            before += passed_ms / 1_000
            self.life.clock.advance(passed_ms)
            self.life.core.wake()
