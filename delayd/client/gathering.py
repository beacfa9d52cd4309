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
from delayd.client.arguments import Single
from delayd.client.instants import ServerClock
from delayd.client.packing import pack_one, pack_rows
from delayd.client.receipt import Accepted, Receipt
from delayd.client.rows import Waiter
from delayd.errors import DelaydError

ROW_BYTES = 64  # What a waiting row holds besides its body: references and columns.


class Gathering:
    """See Rows; each row has a waiter of its own."""

    __slots__ = ("_deliver_at_ms", "held_bytes", "rows", "waiters")

    def __init__(self) -> None:
        self.rows: list[Single] = []
        self.waiters: list[Waiter[Receipt]] = []
        self.held_bytes = 0
        self._deliver_at_ms: list[int] = []

    @property
    def count(self) -> int:
        """Rows gathered."""
        return len(self.rows)

    def add(self, row: Single, byte_count: int, waiter: Waiter[Receipt]) -> None:
        """Take one row, which holds so many bytes."""
        self.rows.append(row)
        self.waiters.append(waiter)
        self.held_bytes += byte_count

    def encode(self, part: ProducerPart, clock: ServerClock) -> bytes:
        """See Rows."""
        if len(self.rows) == 1 and not self.rows[0][4]:
            subject, body, when, is_relative, _ = self.rows[0]
            due = clock.latest_ms(when) if is_relative else when
            self._deliver_at_ms = [due]
            return pack_one(part, due, subject.encode("ascii"), body)
        subjects, bodies, deliver, relative, headers = zip(*self.rows, strict=True)
        deliver_at_ms = np.array(deliver, np.int64)
        if any(relative):
            rows = np.array(relative, bool)
            deliver_at_ms[rows] = clock.latest_ms_column(deliver_at_ms[rows])
        self._deliver_at_ms = deliver_at_ms.tolist()
        index = {subject: at for at, subject in enumerate(dict.fromkeys(subjects))}
        names = [subject.encode("ascii") for subject in index]
        subject_of = np.array([index[subject] for subject in subjects], np.uint32) if len(index) > 1 else None
        return pack_rows(part, deliver_at_ms, names, subject_of, headers if any(headers) else None, bodies)

    def accept(self, accepted: Accepted) -> None:
        """See Rows."""
        log_id, sequence, _, at_ms, duplicate = accepted
        for waiter, due in zip(self.waiters, self._deliver_at_ms, strict=True):
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
        chosen = set(rows)
        for at, (row, waiter) in enumerate(zip(self.rows, self.waiters, strict=True)):
            (named if at in chosen else others).add(row, row_bytes(row), waiter)
        return named, others


def row_bytes(row: Single) -> int:
    """What a row holds in memory while it waits."""
    return len(row[1]) + len(row[4]) + ROW_BYTES
