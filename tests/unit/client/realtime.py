"""A small realtime server: one subject's messages for any number of groups, with leases.

Invariant: a message is offered to one consumer of a group at a time, until it is acknowledged, given back, or its lease
ended (rule Q1).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import cast

import msgpack
import numpy as np

from delayd.batch.batch import encode, encode_subject_table, lay_out
from delayd.batch.columns import BatchKind, Buffer, ColumnArray, ColumnId, DispatchPart
from delayd.batch.names import retry_subject
from delayd.client.limits import Headers
from delayd.net.connection import Connection
from delayd.wire.frame import Frame, Head
from delayd.wire.heads import (
    need_int,
    need_list,
    need_rows,
    need_str,
)
from delayd.wire.requests import RequestType
from tests.unit.client.servers import SmallServer

ORIGIN = 99


@dataclass(slots=True)
class Stored:
    """One message of the subject."""

    sequence: int
    body: bytes
    deliver_at_ms: int
    headers: Headers | bytes | None  # Bytes: as a producer that is no delayd client sent them.


@dataclass(slots=True)
class Held:
    """One message that a consumer has."""

    consume: int
    attempt: int
    lease_ends: float


class SmallRealtime(SmallServer):
    """Serves what `add` gave it."""

    def __init__(self, log_id: int) -> None:
        super().__init__(log_id)
        self.incarnation = 1
        self.messages: list[Stored] = []
        self.next_pull = 1
        self.offered: deque[tuple[int, int]] = deque()  # Consume sequence and attempt.
        self.held: dict[int, Held] = {}
        self.acked: list[int] = []  # Consume sequences, in the order of their acknowledgement.
        self.damage = False
        self.waiting: list[tuple[Connection, Frame, float]] = []
        self.pulls = 0
        self.counted: list[tuple[int, int]] = []  # Consume sequence and attempt of what was given back as an attempt.
        self.retried: list[tuple[int, int, str]] = []  # Consume sequence, delay in ms and error.
        self.extended: list[tuple[int, int]] = []  # Consume sequence and lease in ms.
        self.rejected: list[tuple[int, str, str]] = []  # Consume sequence, reason and error.
        self.returned: list[tuple[int, int]] = []  # The same of what no handler was given.
        self.wanted = 0  # What the next answers say.
        self.why: list[int] = []
        self.ack_requests = 0
        self.group = "g"

    def add(self, body: bytes, deliver_at_ms: int | None = None, headers: Headers | bytes | None = None) -> None:
        """A message is due."""
        due = self.now_ms() if deliver_at_ms is None else deliver_at_ms
        self.messages.append(Stored(len(self.messages) + 1, body, due, headers))
        self.offered.append((len(self.messages) - 1, 1))
        self._answer_waiting()

    def restart(self) -> None:
        """Another life: nothing that was pulled before can be acknowledged any more."""
        self.incarnation += 1
        self._give_back(list(self.held))

    def serve(self, connection: Connection, frame: Frame) -> None:
        if frame.type == RequestType.PULL:
            assert need_str(frame.head, "group") == self.group
            self.pulls += 1
            ends = asyncio.get_running_loop().time() + need_int(frame.head, "wait_ms") / 1000
            self.waiting.append((connection, frame, ends))
            self._answer_waiting()
            loop = asyncio.get_running_loop()
            loop.call_later(need_int(frame.head, "wait_ms") / 1000 + 0.002, self._answer_waiting)
        elif frame.type == RequestType.PULL_END:
            ended = [(other, pull, 0.0 if other is connection else ends) for other, pull, ends in self.waiting]
            self.waiting = ended
            self._answer_waiting()
            connection.answer(frame.request_id, {})
        elif frame.type == RequestType.EXTEND:
            self._lengthen(connection, frame)
        elif frame.type in (RequestType.RETRY, RequestType.REJECT):
            self._decide(connection, frame)
        else:
            self.ack_requests += frame.type == RequestType.ACK
            self._settle(connection, frame)

    def _settle(self, connection: Connection, frame: Frame) -> None:
        self._end_leases()
        stale: list[list[int]] = []
        for incarnation, first, count in need_rows(frame.head, "handles", 3):
            for pull in range(first, first + count):
                held = self.held.pop(pull, None) if incarnation == self.incarnation else None
                if held is None:
                    stale.append([incarnation, pull, 1])
                elif frame.type == RequestType.ACK:
                    self.acked.append(held.consume)
                elif frame.head.get("uncounted"):
                    self.returned.append((held.consume, held.attempt))
                    self.offered.append((held.consume, held.attempt))
                else:
                    self.counted.append((held.consume, held.attempt))
                    self.offered.append((held.consume, held.attempt + 1))
        connection.answer(frame.request_id, {"stale": stale, "why": self.why, "wanted": self.wanted})
        self._answer_waiting()

    def _lengthen(self, connection: Connection, frame: Frame) -> None:
        self._end_leases()
        lease_ms = need_int(frame.head, "lease_ms")
        stale: list[list[int]] = []
        for incarnation, first, count in need_rows(frame.head, "handles", 3):
            for pull in range(first, first + count):
                held = self.held.get(pull) if incarnation == self.incarnation else None
                if held is None:
                    stale.append([incarnation, pull, 1])
                else:
                    held.lease_ends = asyncio.get_running_loop().time() + lease_ms / 1000
                    self.extended.append((held.consume, lease_ms))
        connection.answer(frame.request_id, {"stale": stale, "why": self.why, "wanted": self.wanted})

    def _decide(self, connection: Connection, frame: Frame) -> None:
        """A RETRY, whose delay is over at once, or a REJECT."""
        self._end_leases()
        stale: list[list[int]] = []
        is_retry = frame.type == RequestType.RETRY
        for row in need_list(frame.head, "retries" if is_retry else "rejects"):
            assert isinstance(row, list)
            incarnation, first, count, what, error = row
            assert isinstance(incarnation, int) and isinstance(first, int)
            assert isinstance(count, int) and isinstance(error, str)
            for pull in range(first, first + count):
                held = self.held.pop(pull, None) if incarnation == self.incarnation else None
                if held is None:
                    stale.append([incarnation, pull, 1])
                elif is_retry:
                    assert isinstance(what, int)
                    self.retried.append((held.consume, what, error))
                    self.counted.append((held.consume, held.attempt))
                    self.offered.append((held.consume, held.attempt + 1))
                else:
                    assert isinstance(what, str)
                    self.rejected.append((held.consume, what, error))
        connection.answer(frame.request_id, {"stale": stale, "why": self.why, "wanted": self.wanted})
        self._answer_waiting()

    def _end_leases(self) -> None:
        now = asyncio.get_running_loop().time()
        self._give_back([pull for pull, held in self.held.items() if held.lease_ends <= now])

    def _give_back(self, pulls: list[int]) -> None:
        for pull in pulls:
            held = self.held.pop(pull)
            self.offered.append((held.consume, held.attempt + 1))

    def _answer_waiting(self) -> None:
        self._end_leases()
        now = asyncio.get_running_loop().time()
        still: list[tuple[Connection, Frame, float]] = []
        for connection, frame, ends in self.waiting:
            if not connection.is_open:
                continue
            if not self.offered and now < ends:
                still.append((connection, frame, ends))
                continue
            self._answer_pull(connection, frame)
        self.waiting = still

    def _answer_pull(self, connection: Connection, frame: Frame) -> None:
        left = need_int(frame.head, "max_messages")
        lease_ends = asyncio.get_running_loop().time() + need_int(frame.head, "lease_ms") / 1000
        parts: list[list[int]] = []
        body: list[Buffer] = []
        # One part for each attempt and run of consume sequences, as the real server gives them.
        while self.offered and left:
            consume, attempt = self.offered.popleft()
            count = 1
            while self.offered and count < left and self.offered[0] == (consume + count, attempt):
                self.offered.popleft()
                count += 1
            for row in range(count):
                self.held[self.next_pull + row] = Held(consume + row, attempt, lease_ends)
            parts.append([self.next_pull, consume, count, attempt])
            body.append(self._batch(self.messages[consume : consume + count], need_str(frame.head, "subject")))
            self.next_pull += count
            left -= count
        head: Head = {"log_id": self.log_id, "incarnation": self.incarnation, "parts": parts, "now_ms": self.now_ms()}
        head["wanted"] = self.wanted
        connection.answer(frame.request_id, head, body)
        asyncio.get_running_loop().call_later(need_int(frame.head, "lease_ms") / 1000 + 0.002, self._answer_waiting)

    def _batch(self, messages: list[Stored], subject: str) -> bytes:
        if any(
            "delayd.attempt" in (message.headers or ())
            for message in messages
            if not isinstance(message.headers, bytes)
        ):
            subject = retry_subject(self.log_id, 1)
        table = encode_subject_table([subject.encode()])
        due = np.array([message.deliver_at_ms for message in messages], np.int64)
        sequences = np.array([message.sequence for message in messages], np.uint64)
        columns: list[tuple[ColumnId, ColumnArray]] = [(ColumnId.DELIVER_AT_MS, due), (ColumnId.SEQUENCE, sequences)]
        heap: list[Buffer] = [table]
        begin = len(table)
        if any(message.headers for message in messages):
            ends, packed = lay_out([_packed(message.headers) for message in messages], begin)
            columns.append((ColumnId.HEADERS_END, ends))
            heap.append(packed)
            begin += len(packed)
        ends, packed = lay_out([message.body for message in messages], begin)
        columns.append((ColumnId.BODY_END, ends))
        heap.append(packed)
        part = DispatchPart(ORIGIN, 1, 1, 0, 0, 0, 0)
        batch = bytearray(encode(BatchKind.DISPATCH, part, len(messages), columns, heap, 1))
        if self.damage:
            batch[-1] ^= 1
        return bytes(batch)


def _packed(headers: Headers | bytes | None) -> bytes:
    return headers if isinstance(headers, bytes) else cast(bytes, msgpack.packb(headers)) if headers else b""
