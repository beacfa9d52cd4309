"""Single sends, of any subjects, that share a batch.

Invariant: columns while they are gathered, so that a send costs a few appends; arrays are made once, when the batch is
bound to a server.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import numpy as np

from delayd.batch import ProducerPart
from delayd.client.instants import ServerClock
from delayd.client.limits import NO_HEADERS
from delayd.client.packing import BYTES_TARGET, ROWS_TARGET, pack_one, pack_rows
from delayd.client.receipt import Accepted, Receipt
from delayd.client.rows import Waiter
from delayd.errors import DelaydError

ROW_BYTES = 64  # What a waiting row holds besides its body: references and columns.


class Gathering:
    """See Rows; each row has a waiter of its own."""

    __slots__ = (
        "bodies",
        "deliver",
        "deliver_at_ms",
        "headers",
        "held_bytes",
        "relative",
        "subject_of",
        "subjects",
        "waiters",
    )

    def __init__(self) -> None:
        self.subjects: dict[str, int] = {}
        self.subject_of: list[int] = []
        self.bodies: list[bytes] = []
        self.deliver: list[int] = []  # ms since the epoch, or monotonic us for the rows in `relative`.
        self.relative: list[int] = []
        self.headers: dict[int, bytes] = {}
        self.waiters: list[Waiter[Receipt]] = []
        self.held_bytes = 0
        self.deliver_at_ms: list[int] = []

    @property
    def count(self) -> int:
        """Rows gathered."""
        return len(self.bodies)

    @property
    def is_full(self) -> bool:
        """No further row should join."""
        return self.held_bytes >= BYTES_TARGET or len(self.bodies) >= ROWS_TARGET

    def add(
        self, subject: str, body: bytes, when: int, relative: bool, headers: bytes, waiter: Waiter[Receipt]
    ) -> None:
        """Take one row; its arguments were checked."""
        if relative:
            self.relative.append(len(self.bodies))
        if headers:
            self.headers[len(self.bodies)] = headers
            self.held_bytes += len(headers)
        self.subject_of.append(self.subjects.setdefault(subject, len(self.subjects)))
        self.bodies.append(body)
        self.deliver.append(when)
        self.waiters.append(waiter)
        self.held_bytes += len(body) + ROW_BYTES

    def encode(self, part: ProducerPart, clock: ServerClock) -> bytes:
        """See Rows."""
        count = len(self.bodies)
        if count == 1 and not self.headers:
            due = clock.latest_ms(self.deliver[0]) if self.relative else self.deliver[0]
            self.deliver_at_ms = [due]
            return pack_one(part, due, next(iter(self.subjects)).encode("ascii"), self.bodies[0])
        deliver_at_ms = np.array(self.deliver, np.int64)
        if self.relative:
            rows = np.array(self.relative, np.int64)
            deliver_at_ms[rows] = clock.latest_ms_column(deliver_at_ms[rows])
        self.deliver_at_ms = deliver_at_ms.tolist()
        subjects = [subject.encode("ascii") for subject in self.subjects]
        subject_of = np.array(self.subject_of, np.uint32) if len(subjects) > 1 else None
        headers = [self.headers.get(row, NO_HEADERS) for row in range(count)] if self.headers else None
        return pack_rows(part, deliver_at_ms, subjects, subject_of, headers, self.bodies)

    def accept(self, accepted: Accepted) -> None:
        """See Rows."""
        log_id, sequence, _, at_ms, duplicate = accepted
        for waiter, due in zip(self.waiters, self.deliver_at_ms, strict=True):
            # A caller that was cancelled has stopped waiting; its message is kept all the same.
            if not waiter.done():
                waiter.set_result(Receipt(log_id, sequence, due, at_ms, due <= at_ms, duplicate))
            sequence += 1

    def fail(self, error: DelaydError) -> None:
        """See Rows."""
        for waiter in self.waiters:
            if not waiter.done():
                # A copy for each: an exception that is raised in many places collects all of their tracebacks.
                own = copy.copy(error)
                own.__cause__ = error.__cause__
                waiter.set_exception(own)

    def split(self, rows: Sequence[int]) -> tuple[Self, Self]:
        """See Rows."""
        named, others = type(self)(), type(self)()
        chosen, relative = set(rows), set(self.relative)
        names = list(self.subjects)
        for row, body in enumerate(self.bodies):
            side = named if row in chosen else others
            headers = self.headers.get(row, NO_HEADERS)
            side.add(names[self.subject_of[row]], body, self.deliver[row], row in relative, headers, self.waiters[row])
        return named, others
