"""Small servers that speak the real protocol in the test's own loop, and that misbehave as a test asks them to.

Invariant: they keep what the protocol promises (deduplication, batches that verify), so a client that passes against
them depends on nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from delayd.address import Endpoint
from delayd.batch.batch import Batch, parse
from delayd.batch.columns import ColumnId
from delayd.errors import DelaydError
from delayd.log.hour import NO_ENDED, EndedRows
from delayd.net.connection import Connection
from delayd.net.server import Server
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    need_bool,
    need_strs,
    need_u64,
    optional_str,
)
from delayd.wire.meta import SlotOwners
from delayd.wire.requests import RequestType

HOST = "127.0.0.1"


class SmallServer:
    """Listens, and answers PING and STATUS; requests are kept in `seen`."""

    def __init__(self, log_id: int) -> None:
        self.log_id = log_id
        self.port = 0
        self.ahead_ms = 0
        self.in_doubt = False  # Nothing has confirmed its clock since its machine was started.
        self.seen: list[Frame] = []
        self.connected_count = 0  # Connections that it has ever had.
        self.crashes: list[Exception] = []
        self.server: Server | None = None

    async def start(self) -> None:
        self.server = Server(self)
        self.port = (await self.server.listen(Endpoint(HOST, self.port))).port

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.close()
            self.server = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def now_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_REALTIME) // 1_000_000 + self.ahead_ms

    def timed(self, head: Head) -> Head:
        return {**head, "now_ms": self.now_ms(), **({"clock_in_doubt": True} if self.in_doubt else {})}

    def connected(self, connection: Connection) -> None:
        self.connected_count += 1

    def disconnected(self, connection: Connection, error: DelaydError | None) -> None:
        """Nothing was kept of it."""

    def crashed(self, error: Exception) -> None:
        self.crashes.append(error)

    def received(self, connection: Connection, frame: Frame) -> None:
        if frame.type == RequestType.PING:
            connection.answer(frame.request_id, self.timed({}))
        elif frame.type == RequestType.STATUS:
            connection.answer(frame.request_id, self.timed({"log_id": self.log_id}))
        else:
            self.seen.append(frame)
            self.serve(connection, frame)

    def serve(self, connection: Connection, frame: Frame) -> None:
        """Answer a request of its role; one without a role knows none, and the test fails with this in `crashes`."""
        raise AssertionError(f"no request of type {frame.type} was expected")

    def drop_connections(self) -> None:
        """End all connections at once, as a crash does."""
        assert self.server is not None
        for connection in list(self.server.connections):
            connection.abort()


class SmallMeta(SmallServer):
    """Names the servers that it was given; routes subjects to the first realtime server, or where it is told."""

    def __init__(self) -> None:
        super().__init__(log_id=1)
        self.delay: list[SmallServer] = []
        self.realtime: list[SmallServer] = []
        self.routed: dict[str, SmallServer] = {}  # Subjects of other realtime servers than the first.
        self.dead: set[int] = set()
        self.owners: dict[int, int] = {}  # Slots of keys; the others belong to the first delay server.
        self.asked_for_owners = 0

    def serve(self, connection: Connection, frame: Frame) -> None:
        if frame.type == RequestType.SERVERS:
            role = optional_str(frame.head, "role")
            assert role in ("delay", "realtime")
            servers = [self._server(server, role) for server in (self.delay if role == "delay" else self.realtime)]
            connection.answer(frame.request_id, {"servers": servers, "now_ms": self.now_ms()})
        elif frame.type == RequestType.SLOTS:
            self.asked_for_owners += 1
            connection.answer(frame.request_id, {**self.slot_owners().to_head(), "now_ms": self.now_ms()})
        else:
            assert frame.type == RequestType.ROUTES and need_bool(frame.head, "assign")
            subjects = need_strs(frame.head, "subjects")
            served = [*self.realtime[:1], *self.routed.values()]
            routes: Head = {subject: self.realtime[0].log_id for subject in subjects if self.realtime}
            routes |= {subject: self.routed[subject].log_id for subject in subjects if subject in self.routed}
            head: Head = {
                "routes": routes,
                "servers": [self._server(server, "realtime") for server in served],
                "unrouted": [subject for subject in subjects if subject not in routes],
            }
            connection.answer(frame.request_id, head)

    def slot_owners(self) -> SlotOwners:
        """As it tells them."""
        owners = SlotOwners.nobody()
        if self.delay:
            owners.log_ids[:] = self.delay[0].log_id
            for slot, log_id in self.owners.items():
                owners.log_ids[slot] = log_id
        return owners

    def _server(self, server: SmallServer, role: str) -> Head:
        alive = server.log_id not in self.dead
        place: Head = {"role": role, "log_id": server.log_id, "host": HOST, "port": server.port, "alive": alive}
        return {**place, "epoch": 1, "pid": 1, "seen_ms_ago": 0, "heard": True}


@dataclass(slots=True)
class Kept:
    """One accepted batch."""

    number: int
    low_water: int
    batch: Batch
    result: Head
    decided: bytes = b""


class SmallDelay(SmallServer):
    """Accepts batches once; `script` says what to do with the next ones instead."""

    def __init__(self, log_id: int) -> None:
        super().__init__(log_id)
        self.kept: list[Kept] = []
        self.numbers: list[int] = []  # As they came, repeated ones too.
        self.next_sequence = 1
        self.script: deque[Callable[[Connection, Frame], bool]] = deque()
        self.holding = False
        self.held: list[tuple[Connection, Frame]] = []
        # What it decides about the rows of a batch, which begins at this sequence.
        self.decide: Callable[[Batch, int], EndedRows] = lambda batch, base_sequence: NO_ENDED

    def serve(self, connection: Connection, frame: Frame) -> None:
        if frame.type == RequestType.OUTCOME:
            self._outcome(connection, frame)
            return
        batch = parse(frame.body)
        batch.verify()
        self.numbers.append(batch.producer.producer_batch)
        if self.script and self.script.popleft()(connection, frame):
            return
        if self.holding:
            self.held.append((connection, frame))
        else:
            self.accept(connection, frame)

    def release(self) -> None:
        """Answer what was held, and hold no more."""
        self.holding = False
        held, self.held = self.held, []
        for connection, frame in held:
            self.accept(connection, frame)

    def accept(self, connection: Connection, frame: Frame) -> None:
        result = self.keep(frame)
        part = parse(frame.body).producer
        known = self._find(part.producer_id, part.producer_batch)
        self.answer(connection, frame, result, b"" if known is None else known.decided)

    def answer(self, connection: Connection, frame: Frame, result: Head, decided: bytes = b"") -> None:
        head = self.timed({"log_id": self.log_id, "results": [result]})
        connection.answer(frame.request_id, head, [decided])

    def keep(self, frame: Frame) -> Head:
        batch = parse(bytes(frame.body))
        part = batch.producer
        known = self._find(part.producer_id, part.producer_batch)
        if known is not None:
            assert known.batch.heap_crc32c == batch.heap_crc32c, "a number was used for another batch"
            return {**known.result, "duplicate": True}
        result: Head = {
            "base_sequence": self.next_sequence,
            "count": batch.count,
            "appended_at_ms": self.now_ms(),
            "duplicate": False,
        }
        decided = self.decide(batch, self.next_sequence)
        if len(decided):
            result["decided"] = len(decided)
        self.next_sequence += batch.count
        self.kept.append(Kept(part.producer_batch, part.low_water, batch, result, decided.tobytes()))
        return result

    @property
    def rows(self) -> list[tuple[bytes, bytes, int]]:
        return [row for kept in self.kept for row in rows_of(kept.batch)]

    def knows(self, batch: Batch) -> bool:
        """Whether its number was accepted before."""
        return self._find(batch.producer.producer_id, batch.producer.producer_batch) is not None

    def _find(self, producer_id: int, number: int) -> Kept | None:
        for kept in self.kept:
            if kept.batch.producer.producer_id == producer_id and kept.number == number:
                return kept
        return None

    def _outcome(self, connection: Connection, frame: Frame) -> None:
        known = self._find(need_u64(frame.head, "producer_id"), need_u64(frame.head, "producer_batch"))
        head: Head = {"log_id": self.log_id, "now_ms": self.now_ms()}
        head["state"] = "unknown" if known is None else "accepted"
        head["result"] = None if known is None else known.result
        connection.answer(frame.request_id, head, [b"" if known is None else known.decided])


def refuse(delay: SmallDelay, error: DelaydError, rows: list[int]) -> Callable[[Connection, Frame], bool]:
    """A script's step: refuse a batch by name, unless its number is known, which is looked up first (rule I1)."""

    def step(connection: Connection, frame: Frame) -> bool:
        if delay.knows(parse(frame.body)):
            return False
        result: Head = {
            "error": error.code,
            "message": error.message,
            "retry_after_ms": error.retry_after_ms or None,
            "rows": rows,
        }
        delay.answer(connection, frame, result)
        return True

    return step


def hold(delay: SmallDelay) -> Callable[[Connection, Frame], bool]:
    """A script's step: this batch is answered only when `release` is called."""

    def step(connection: Connection, frame: Frame) -> bool:
        delay.held.append((connection, frame))
        return True

    return step


def drop_before(connection: Connection, frame: Frame) -> bool:
    """A script's step: the connection breaks and the batch is not kept."""
    connection.abort()
    return True


def drop_after(delay: SmallDelay) -> Callable[[Connection, Frame], bool]:
    """A script's step: the batch is kept and the connection breaks before the answer."""

    def step(connection: Connection, frame: Frame) -> bool:
        delay.keep(frame)
        connection.abort()
        return True

    return step


def rows_of(batch: Batch) -> list[tuple[bytes, bytes, int]]:
    """Subject, body and instant of each row."""
    subjects = batch.subjects()
    subject_of = batch.uint32s(ColumnId.SUBJECT).tolist() if ColumnId.SUBJECT in batch else [0] * batch.count
    starts, ends = batch.region(ColumnId.BODY_END)
    due = batch.int64s(ColumnId.DELIVER_AT_MS).tolist()
    heap = batch.heap
    return [
        (subjects[subject], bytes(heap[start:end]), at)
        for subject, start, end, at in zip(subject_of, starts.tolist(), ends.tolist(), due, strict=True)
    ]
